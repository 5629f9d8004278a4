"""Changing source as findings say: by libcst, so that all that is not changed stays to the byte.

An edit names a node by its place (`findings.Edit`, columns in bytes, as Python's parser counts).
One may not fit there (the statement shares its line with another, what would leave a ``with`` block
needs autocast): then none of its finding's edits is made, and the finding stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TypeVar

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from ampwise_lint.findings import Edit

R = TypeVar("R")
Span = tuple[int, int, int, int]
STAYS_OUT = ("step", "update", "unscale_", "backward", "zero_grad", "item", "append", "print")
"""Calls that do not need autocast, and may leave its block behind a backward."""

PROBLEMS = (
    cst.ParserSyntaxError, cst.CSTValidationError, SyntaxError, ValueError, RecursionError
)  # fmt: skip
"""What an edit that makes no sense where it stands, or code that is too deep, raises."""


def apply(text: str, edits: Iterable[Edit]) -> tuple[str, set[Edit]]:
    """The text with edits made, each once; and those that did not fit."""
    by_span: dict[Span, list[Edit]] = defaultdict(list)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    wanted = dict.fromkeys(edits)
    for each in wanted:
        by_span[_span(each, lines)].append(each)
    wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
    editor = _Editor(by_span)
    changed = wrapper.visit(editor).code
    if text.endswith("\r") and not changed.endswith("\r"):  # which libcst takes for no end of line
        changed += "\r"
    return changed, wanted.keys() - editor.made


def _span(edit: Edit, lines: Sequence[str]) -> Span:
    """An edit's place with columns in characters."""

    def characters(line: int, column: int) -> int:
        return len(lines[line - 1].encode()[:column].decode(errors="replace"))

    return (
        edit.line,
        characters(edit.line, edit.column),
        edit.end_line,
        characters(edit.end_line, edit.end_column),
    )


class _Editor(cst.CSTTransformer):
    """Makes the edits, innermost nodes first."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self, edits: dict[Span, list[Edit]]) -> None:
        super().__init__()
        self.made: set[Edit] = set()
        self._edits = edits
        self._wraps = [
            (span, each) for span, found in edits.items() for each in found if each.what == "wrap"
        ]

    def _at(self, node: cst.CSTNode, kind: str) -> list[Edit]:
        span = self._span(node)
        return [] if span is None else [e for e in self._edits.get(span, []) if e.what == kind]

    # ------------------------------------------------------------------ expressions

    def on_leave(
        self, original_node: cst.CSTNode, updated_node: cst.CSTNode
    ) -> cst.CSTNode | cst.RemovalSentinel | cst.FlattenSentinel[cst.CSTNode]:
        updated = super().on_leave(original_node, updated_node)
        if isinstance(updated, cst.Call):
            for each in self._at(original_node, "argument"):
                updated = self._done(each, _with_argument(updated, each.text))
        if isinstance(updated, cst.Dict):
            for each in self._at(original_node, "argument"):
                updated = self._done(each, _with_element(updated, each.text))
        if isinstance(updated, cst.BaseExpression):
            for each in self._at(original_node, "replace"):
                new = cst.parse_expression(each.text)
                updated = self._done(each, _kept_parentheses(updated, new))
            for each in self._at(original_node, "decorate"):
                code = cst.Module([]).code_for_node(updated) + each.text
                updated = self._done(each, cst.parse_expression(code))
        if isinstance(updated, cst.ImportFrom | cst.Import):
            for each in self._at(original_node, "replace"):
                updated = self._done(each, _import(each.text))
        return updated

    def _done(self, edit: Edit, result: R) -> R:
        self.made.add(edit)
        return result

    # ------------------------------------------------------------------ statements

    def leave_FunctionDef(  # noqa: N802 - libcst's name
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        decorators: list[cst.Decorator] = []
        both = zip(original_node.decorators, updated_node.decorators, strict=True)
        for original, now in both:
            decorators.append(now)
            for each in self._at(original.decorator, "decorator"):
                new = cst.Decorator(cst.parse_expression(each.text))
                decorators.append(self._done(each, new))
        return updated_node.with_changes(decorators=decorators)

    def leave_IndentedBlock(  # noqa: N802 - libcst's name
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def leave_Module(  # noqa: N802 - libcst's name
        self, original_node: cst.Module, updated_node: cst.Module
    ) -> cst.Module:
        return updated_node.with_changes(body=self._block(original_node.body, updated_node.body))

    def _block(
        self, originals: Sequence[cst.BaseStatement], updated: Sequence[cst.BaseStatement]
    ) -> list[cst.BaseStatement]:
        body: list[cst.BaseStatement] = []
        below: list[cst.BaseStatement] = []
        header: Edit | None = None
        for index, (original, changed) in enumerate(zip(originals, updated, strict=True)):
            first, rest = self._statement(original, changed)
            if header is None:
                header = self._header(originals[index:])
                body += first
            else:
                rest = [*first, *rest]
            if header is None:
                body += rest
                continue
            below += rest
            if self._ends(original, header):
                body += [self._done(header, _compound(header.text, below))] if below else []
                below, header = [], None
        return body or [_line("pass", None)]

    def _statement(
        self, original: cst.BaseStatement, now: cst.BaseStatement
    ) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]]:
        """What is put before a statement; and the statement, with what is put behind it."""
        first: list[cst.BaseStatement] = []
        for each in self._at(original, "before"):
            first.append(self._done(each, _line(each.text, now)))
            now = _without_leading(now)
        after = [self._done(e, _line(e.text, None)) for e in self._at(original, "after")]
        removed = self._at(original, "remove")
        if removed and isinstance(now, cst.SimpleStatementLine):
            self.made.update(removed)
            return first, after
        return first, [*self._with_left(original, now), *after]

    def _header(self, statements: Sequence[cst.BaseStatement]) -> Edit | None:
        """What the first of some statements, and those up to one of them, are put below."""
        span = self._span(statements[0])
        wraps = [each for each in self._wraps if span is not None and each[0][:2] == span[:2]]
        return next(
            (each for _, each in wraps if any(self._ends(e, each) for e in statements)), None
        )

    def _ends(self, node: cst.BaseStatement, wrap: Edit) -> bool:
        span = self._span(node)
        return span is not None and any(
            each is wrap and place[2:] == span[2:] for place, each in self._wraps
        )

    def _span(self, node: cst.CSTNode) -> Span | None:
        """A node's place; none for statements that share their line."""
        if isinstance(node, cst.SimpleStatementLine):
            if len(node.body) != 1:
                return None
            node = node.body[0]
        place = self.get_metadata(PositionProvider, node, None)
        if place is None:
            return None
        return place.start.line, place.start.column, place.end.line, place.end.column

    def _with_left(
        self, original: cst.BaseStatement, now: cst.BaseStatement
    ) -> list[cst.BaseStatement]:
        """A ``with`` statement, and behind it what leaves its block."""
        if not isinstance(original, cst.With) or not isinstance(now, cst.With):
            return [now]
        if not isinstance(original.body, cst.IndentedBlock):
            return [now]
        assert isinstance(now.body, cst.IndentedBlock)
        first = next((i for i, e in enumerate(original.body.body) if self._at(e, "out")), None)
        inner = list(now.body.body)
        if first is None or len(inner) != len(original.body.body):
            return [now]
        rest = inner[first:]
        if first == 0 or not all(_needs_no_autocast(each) for each in rest):
            return [now]
        for each in original.body.body:
            self.made.update(self._at(each, "out"))
        kept = now.with_changes(body=now.body.with_changes(body=inner[:first]))
        return [kept, *rest]


def _needs_no_autocast(node: cst.CSTNode) -> bool:
    """Whether a statement computes nothing that autocast would change."""
    calls: list[str] = []

    class Calls(cst.CSTVisitor):
        def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 - libcst's name
            calls.append(
                node.func.attr.value
                if isinstance(node.func, cst.Attribute)
                else node.func.value
                if isinstance(node.func, cst.Name)
                else "?"
            )

    node.visit(Calls())
    allowed = (*STAYS_OUT, "scale", "clip_grad_norm_", "clip_grad_value_", "parameters", "detach")
    return all(each in allowed for each in calls)


def _with_argument(call: cst.Call, text: str) -> cst.Call:
    """A call with one more argument; ``0:`` puts it first, ``|a,b`` names what was first."""
    first, text = text.startswith("0:"), text.removeprefix("0:")
    text, _, shifted = text.partition("|")
    made = cst.parse_expression(f"f({text})")
    assert isinstance(made, cst.Call)
    new = made.args[0]
    args = list(call.args)
    if any(new.keyword and a.keyword and a.keyword.value == new.keyword.value for a in args):
        return call
    if not args:
        return call.with_changes(args=[new])
    comma = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if first:
        equal = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
        for index, name in enumerate(shifted.split(",") if shifted else ()):
            if index < len(args) and args[index].keyword is None:
                args[index] = args[index].with_changes(keyword=cst.Name(name), equal=equal)
        return call.with_changes(args=[new.with_changes(comma=comma), *args])
    last = args[-1]
    if isinstance(last.comma, cst.Comma):  # a list that ends in a comma keeps doing so
        ending = last.comma
        between = args[-2].comma if len(args) > 1 else comma
        return call.with_changes(
            args=[*args[:-1], last.with_changes(comma=between), new.with_changes(comma=ending)]
        )
    return call.with_changes(
        args=[
            *args[:-1],
            last.with_changes(comma=comma, whitespace_after_arg=cst.SimpleWhitespace("")),
            new.with_changes(whitespace_after_arg=last.whitespace_after_arg),
        ]
    )


def _with_element(mapping: cst.Dict, text: str) -> cst.Dict:
    """A dict with one more item, laid out as the last one is."""
    made = cst.parse_expression(f"{{{text}}}")
    assert isinstance(made, cst.Dict)
    elements = list(mapping.elements)
    if not elements:
        return mapping.with_changes(elements=made.elements)
    last = elements[-1]
    between = elements[-2].comma if len(elements) > 1 else cst.MaybeSentinel.DEFAULT
    if not isinstance(between, cst.Comma):
        between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    new = made.elements[0].with_changes(comma=last.comma)
    return mapping.with_changes(elements=[*elements[:-1], last.with_changes(comma=between), new])


def _kept_parentheses(old: cst.BaseExpression, new: cst.BaseExpression) -> cst.BaseExpression:
    if old.lpar and not new.lpar:
        return new.with_changes(lpar=old.lpar, rpar=old.rpar)
    return new


def _import(text: str) -> cst.ImportFrom | cst.Import:
    statement = cst.parse_statement(text)
    assert isinstance(statement, cst.SimpleStatementLine)
    found = statement.body[0]
    assert isinstance(found, cst.ImportFrom | cst.Import)
    return found


def _line(text: str, before: cst.BaseStatement | None) -> cst.BaseStatement:
    """A new statement; put before another, it takes over the empty lines and comments above it."""
    leading = getattr(before, "leading_lines", ()) if before is not None else ()
    return cst.parse_statement(text).with_changes(leading_lines=leading)


def _compound(header: str, statements: Sequence[cst.BaseStatement]) -> cst.BaseStatement:
    """Statements below a header, which takes over the empty lines and comments above them."""
    made = _line(f"{header}\n    pass\n", statements[0])
    inner = [_without_leading(statements[0]), *statements[1:]]
    return made.with_changes(body=cst.IndentedBlock(body=inner))


def _without_leading(node: cst.BaseStatement) -> cst.BaseStatement:
    return node.with_changes(leading_lines=()) if hasattr(node, "leading_lines") else node
