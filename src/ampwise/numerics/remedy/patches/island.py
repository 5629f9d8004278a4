"""Islands: a statement, some beside it, or a function, outside of autocast, on float32 inputs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.edit import Edit, method, of_parts, raised
from ampwise.numerics.remedy.patches.products import may_multiply
from ampwise.numerics.remedy.patches.site import LIST_OF, Site, is_other, writes
from ampwise.numerics.remedy.patches.source import Change, changed, code_of, dotted, walk
from ampwise.numerics.remedy.patches.terms import ELEMENTWISE
from ampwise.numerics.remedy.patches.written import (
    formats_asked,
    made_like,
    of_half,
    only_asked,
    taken_over,
    wide,
)
from ampwise_lint.base.words import joined

_SHAPES = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "float", "double", "to")
"""What may be asked of a tensor whatever its format is."""
WHY = "In float32 nothing here is rounded to 16 bits."


def elements(site: Site) -> Iterator[Edit]:
    """One of several layers that are called in a tuple, in a statement of its own in float32."""
    line = site.statement
    if not isinstance(line, cst.SimpleStatementLine) or len(line.body) > 1:
        return
    small = line.body[0]
    value = small.value if isinstance(small, cst.Return | cst.Assign) else None
    parts = [each.value for each in value.elements] if isinstance(value, cst.Tuple) else []
    called = [each for each in parts if modules_called(each)]
    for part in called if len(called) > 1 else ():
        name = _new_name(site, part)
        made = cst.Assign([cst.AssignTarget(name)], changed(part, _in_float32(site, part)))
        block = outside_autocast(site, [cst.SimpleStatementLine([made])], [line])
        rest = bare(changed(line, {part: name}))
        what = f"{code_of(part)} in float32, outside of autocast"
        yield Edit(what, WHY, {line: cst.FlattenSentinel([block, rest])})


def _new_name(site: Site, part: cst.CSTNode) -> cst.Name:
    """A name for what a layer gives: that of the layer, if it is free."""
    name = modules_called(part)[0].rpartition(".")[2]
    attributes = [each.attr for each in walk(site.scope, cst.Attribute)]
    taken = {each.value for each in walk(site.scope, cst.Name) if each not in attributes}
    return cst.Name(f"{name}_float32" if name in taken else name)


def statement(site: Site) -> Iterator[Edit]:
    """The statement at the line in float32."""
    line = site.statement
    if not isinstance(line, cst.SimpleStatementLine) or calls_an_argument(line, site):
        return  # all of the model that is given would be in float32
    own = {each: _in_float32(site, each) for each in (line, *_twins(site, line))}
    if not own[line] and all(each.op in ELEMENTWISE for each in map(site.term, _calls(line))):
        return
    several = [each for each, to in own.items() if to or each is line]
    if several == [line] and _leaves_autocast(site, several) and _loop_of(site, several):
        yield span(site, several, [])
        return
    what = "the statement" if len(several) == 1 else "the statement, and those like it beside it,"

    def made(some: Sequence[_Part]) -> Edit:
        casts = _casts_in(some)
        bodies = {each: [bare(changed(each, casts))] for each in several}
        changes: dict[cst.CSTNode, Change] = {
            each: _island(site, body, [each], some) for each, body in bodies.items()
        }
        return Edit(f"{what} in float32{_where(site, [line])}", WHY, changes)

    yield of_parts(_parts(site, several), made)


def _twins(site: Site, line: cst.SimpleStatementLine) -> list[cst.SimpleStatementLine]:
    """Statements beside one that say the same of other names."""
    above = site.source.parents[line]
    if not isinstance(above, cst.IndentedBlock):
        return []
    body = list(above.body)
    at = body.index(line)
    found: list[cst.SimpleStatementLine] = []
    for side in (reversed(body[:at]), body[at + 1 :]):
        for each in side:
            if not isinstance(each, cst.SimpleStatementLine) or not _are_twins(line, each):
                break
            found.append(each)
    return found


def _are_twins(one: cst.SimpleStatementLine, other: cst.SimpleStatementLine) -> bool:
    """Whether the words of two statements are the same but for a few names."""
    mine, theirs = (
        [word for part in each.body for word in re.findall(r"\w+|[^\w\s]", code_of(part))]
        for each in (one, other)
    )
    if len(mine) != len(theirs) or len(mine) < _LEAST_WORDS:
        return False
    pairs = [(a, b) for a, b in zip(mine, theirs, strict=True) if a != b]
    names = all(a.isidentifier() and b.isidentifier() for a, b in pairs)
    return names and len(pairs) <= len(mine) * _OTHER_WORDS


_LEAST_WORDS, _OTHER_WORDS = 12, 0.25
"""Words and signs of a statement, and the share of them that another one may have otherwise."""


def adjacent(site: Site) -> Iterator[Edit]:
    """The statement at the line in float32 with those beside it that it hangs together with.

    Not beyond one that calls a module: its weights would be in float32, too.
    """
    above = None if site.statement is None else site.source.parents[site.statement]
    if not isinstance(above, cst.IndentedBlock):
        return
    body = list(above.body)
    at = next(number for number, each in enumerate(body) if each is site.statement)
    for before, after in _REACHES:
        part = body[max(0, at - before) : at + after + 1]
        if len(part) == before + after + 1 and _hangs_together(site, part):
            yield span(site, part, body[at + after + 1 :])


def can_be_moved(site: Site, node: cst.BaseStatement) -> bool:
    """Whether a statement can be put into an island: no layer is called in it."""
    simple = isinstance(node, cst.SimpleStatementLine)
    return simple and not calls_a_module(node) and not calls_an_argument(node, site)


def span(
    site: Site, part: Sequence[cst.BaseStatement], rest: Sequence[cst.BaseStatement]
) -> Edit:  # fmt: skip
    """Statements in float32, outside of autocast; around their loop if that can be."""
    while _leaves_autocast(site, part) and (around := _loop_of(site, part)) is not None:
        part, rest = around

    def made(some: Sequence[_Part]) -> Edit:
        kept = [*_cast_first(site, part, rest, _casts_in(some))]
        gone = dict.fromkeys(part[1:], cst.RemoveFromParent())
        return Edit(
            f"{_lines_of(site, part)} in float32{_where(site, part)}",
            WHY,
            {part[0]: _island(site, kept, part, some), **gone},
        )

    return of_parts(_parts(site, part), made)


def _lines_of(site: Site, part: Sequence[cst.BaseStatement]) -> str:
    first, last = site.source.start(part[0])[0], site.source.end(part[-1])[0]
    return f"line {first}" if first == last else f"lines {first} to {last}"


_Part = Mapping[cst.CSTNode, Change] | None
"""Casts that an island is made with, or without; None for that it leaves autocast."""


def _parts(site: Site, several: Sequence[cst.BaseStatement]) -> list[_Part]:
    """What an island of statements is made of: casts, those of a name together; the island."""
    found: dict[object, dict[cst.CSTNode, Change]] = {}
    for each in several:
        for node, to in _in_float32(site, each).items():
            found.setdefault(dotted(node) or node, {})[node] = to
    return [None, *found.values()] if _leaves_autocast(site, several) else [*found.values()]


def _casts_in(parts: Sequence[_Part]) -> dict[cst.CSTNode, Change]:
    return {node: to for each in parts if each is not None for node, to in each.items()}


def _loop_of(
    site: Site, part: Sequence[cst.BaseStatement]
) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]] | None:  # fmt: skip
    """The loop of some statements, and what stands below it; None where other ones need autocast.

    What is cast in a loop would be cast, and autocast left, each time that it comes by.
    """
    block = site.source.parents[part[0]]
    if not isinstance(block, cst.IndentedBlock):
        return None
    beside = [each for each in block.body if each not in part]
    if not all(can_be_moved(site, each) and not may_multiply(site, each) for each in beside):
        return None
    loop = site.source.parents[block]
    if not isinstance(loop, cst.For) or loop.orelse is not None:
        return None
    above = site.source.parents[loop]
    if not isinstance(above, cst.IndentedBlock):
        return None
    below = list(above.body)
    return [loop], below[below.index(loop) + 1 :]


def _where(site: Site, part: Sequence[cst.BaseStatement]) -> str:
    """Whether statements have to leave autocast to be in float32, in words."""
    return ", outside of autocast" if _leaves_autocast(site, part) else ""


def _leaves_autocast(site: Site, part: Sequence[cst.BaseStatement]) -> bool:
    return any(may_multiply(site, each) for each in part)


def _island(
    site: Site, body: Sequence[cst.BaseStatement], part: Sequence[cst.BaseStatement],
    made_of: Sequence[_Part],
) -> Change:  # fmt: skip
    """Statements in float32 in place of others; outside of autocast where that would cast."""
    if None in made_of:
        return outside_autocast(site, body, part)
    leading: Sequence[cst.EmptyLine] = getattr(part[0], "leading_lines", ())
    first = bare(body[0]).with_changes(leading_lines=leading)
    return cst.FlattenSentinel([first, *body[1:]])


_REACHES = ((0, 1), (1, 0), (1, 1), (2, 0), (1, 2), (2, 1))
"""How many statements before and after the one at the line, the smallest islands first."""


def _hangs_together(site: Site, part: Sequence[cst.BaseStatement]) -> bool:
    """Whether each statement computes with what one before it in the part gave, and calls none."""
    if not all(can_be_moved(site, each) for each in part):
        return False
    return all(
        names_bound(site, part[:number]) & names_read(site, each)
        or any(names_bound(site, [each]) & names_read(site, other) for other in part[number + 1 :])
        for number, each in enumerate(part)
    )


def modules_called(node: cst.CSTNode) -> list[str]:
    """Attributes of `self` that are called, as they are written."""
    names = (dotted(each.func) for each in walk(node, cst.Call))
    return [each for each in names if each.startswith("self.")]


def layers_called(site: Site, node: cst.CSTNode) -> list[str]:
    """Those that are no methods of the class around the line, also by way of its methods."""
    around = site.source.parents.get(site.function) if site.function is not None else None
    methods: dict[str, cst.FunctionDef] = {}
    if isinstance(around, cst.IndentedBlock):
        within = [each for each in around.body if isinstance(each, cst.FunctionDef)]
        methods = {f"self.{each.name.value}": each for each in within}
    found: list[str] = []
    seen: set[str] = set()
    left = modules_called(node)
    while left:
        name = left.pop()
        if name not in methods:
            found.append(name)
        elif name not in seen:
            seen.add(name)
            left += modules_called(methods[name])
    return found


def calls_a_module(node: cst.CSTNode) -> bool:
    """Whether an attribute of `self` is called."""
    return bool(modules_called(node))


def names_bound(site: Site, part: Sequence[cst.CSTNode]) -> set[str]:
    """Names that statements assign to."""
    names = [each for node in part for each in walk(node, cst.Name)]
    return {each.value for each in names if isinstance(site.holder(each), cst.AssignTarget)}


def names_read(site: Site, node: cst.CSTNode) -> set[str]:
    """Names that a statement computes with."""
    return {each.value for each in walk(node, cst.Name) if not site.is_label(each)}


def _cast_first(
    site: Site, part: Sequence[cst.BaseStatement], rest: Sequence[cst.BaseStatement],
    casts: Mapping[cst.CSTNode, Change],
) -> Iterator[cst.BaseStatement]:  # fmt: skip
    """The statements on float32 inputs: what is used often and not again is cast in front.

    So is what a loop computes with: also what it writes anew.
    """
    made: set[str] = set()
    loops = [each for each in part if isinstance(each, cst.For)]
    anew = names_bound(site, loops)
    items = {name.value for each in loops for name in walk(each, cst.Name) if _is_set(site, name)}
    changes: dict[cst.CSTNode, Change] = {}
    for each in _in_order(part):
        own = {node: to for node, to in casts.items() if site.source.inside(node, each)}
        changes |= {n: to for n, to in own.items() if dotted(n).partition(".")[0] not in made}
        made |= names_bound(site, [each])
    names = [each for each in changes if isinstance(each, cst.Name)]
    used = [each.value for each in names if not site.is_label(each)]
    later = {name for each in rest for name in names_read(site, each)}
    often = [
        name
        for name in dict.fromkeys(used)
        if name in anew or (name not in later | items and (used.count(name) > 1 or loops))
    ]
    if often:
        yield raised(often)
    left = {n: to for n, to in changes.items() if dotted(n) not in often}
    first, *others = (changed(each, left) for each in part)
    yield from (bare(first), *others)


def _in_order(part: Iterable[cst.BaseStatement]) -> Iterator[cst.CSTNode]:
    """Statements, and those of loops in place of these."""
    for each in part:
        if isinstance(each, cst.For) and isinstance(each.body, cst.IndentedBlock):
            yield each.iter
            yield from _in_order(each.body.body)
        else:
            yield each


def arguments(site: Site) -> Iterator[Edit]:
    """The 16-bit arguments of the function in float32, which is enough where it has no products."""
    if site.function is None or not isinstance(site.function.body, cst.IndentedBlock):
        return
    body = site.function.body.body
    rest = body[1:] if is_docstring(body[0]) else body
    if not rest or calls_an_argument(site.function, site):
        return
    half = [each for each in arguments_of(site.function) if is_half_at(site, each, rest[0])]
    lists = lists_at(site, rest[0])
    names = [*(each for each in half if not only_asked(site, each)), *lists]
    if not names or any(calls_a_module(each) for each in rest):
        return

    def raises(some: Sequence[str]) -> Edit | None:
        if not some:
            return None
        cast = raised(some, lists).with_changes(leading_lines=getattr(rest[0], "leading_lines", ()))
        return Edit(
            f"{joined(some)} in float32 from the start of the function",
            "What is computed with float32 is float32, but for products of matrices.",
            {rest[0]: cst.FlattenSentinel([cast, bare(rest[0])])},
        )

    yield of_parts(names, raises)


def function(site: Site) -> Iterator[Edit]:
    """The function around the line in float32, from its first statement on."""
    if site.function is None or not isinstance(site.function.body, cst.IndentedBlock):
        return
    body = site.function.body.body
    kept = 1 if is_docstring(body[0]) else 0
    rest = body[kept:]
    if not rest or calls_an_argument(site.function, site):
        return
    block = site.function.body
    half = [each for each in arguments_of(site.function) if is_half_at(site, each, rest[0])]
    asked = [each for each in half if only_asked(site, each)]
    lists = lists_at(site, rest[0])
    names = [*(each for each in half if each not in asked), *lists]

    def made(some: Sequence[str | cst.BaseStatement]) -> Edit | None:
        part = [each for each in rest if each in some]
        if not part:
            return None
        begin, end = (rest.index(part[number]) for number in (0, -1))
        if len(part) < end - begin + 1:
            return None
        changes = {node: to for each in part for node, to in wide(site, each).items()}
        changes |= formats_asked(site, asked)
        casts = [raised([each], lists) for each in names if each in some]
        first, *others = (changed(each, changes) for each in part)
        island = outside_autocast(site, [*casts, bare(first), *others], part[:1])
        now = [*body[: kept + begin], island, *rest[end + 1 :]]
        what = "the function" if len(part) == len(rest) else _lines_of(site, part)
        return Edit(
            f"{what} in float32, outside of autocast", WHY, {block: block.with_changes(body=now)}
        )

    edit = of_parts([*names, *rest], made)
    yield replace(edit, statements=len(rest))


def outside_autocast(
    site: Site, body: Sequence[cst.BaseStatement], instead_of: Sequence[cst.BaseStatement]
) -> cst.BaseStatement:
    """Statements in a block without autocast; comments above the first stay above the block."""
    autocast = site.source.spelled("torch.autocast")
    first, device = instead_of[0], _device(site, instead_of)
    made = cst.parse_statement(f"with {autocast}({device}, enabled=False):\n    pass\n")
    leading: Sequence[cst.EmptyLine] = getattr(first, "leading_lines", ())
    return made.with_changes(body=cst.IndentedBlock(body), leading_lines=leading)


def bare(node: cst.BaseStatement) -> cst.BaseStatement:
    """A statement without the comments above it."""
    return node.with_changes(leading_lines=()) if hasattr(node, "leading_lines") else node


def _device(site: Site, within: Sequence[cst.BaseStatement]) -> str:
    """The kind of device, asked of a tensor at hand; where none is, of the machine."""
    line = site.source.start(within[0])[0]
    here = site.dtypes.get(line, {})
    wanted = site.statement if site.statement is not None else within[0]
    names = [each for each in walk(wanted, cst.Name) if not site.is_label(each)]
    seen = {name: {e for e in kinds if not is_other(e)} for name, kinds in here.items()}
    tensors = {name: kinds for name, kinds in seen.items() if kinds}
    # What is assigned here may be there only from the second time on that a loop comes by.
    made = {name.value for each in within for name in walk(each, cst.Name) if _is_set(site, name)}
    made -= set() if site.function is None else set(arguments_of(site.function))
    one = len(within) == 1 and isinstance(within[0], cst.SimpleStatementLine)
    read = [
        each.value for each in names if each.value in tensors and (one or each.value not in made)
    ]
    known = read or sorted((e for e in tensors if e not in made), key=code_of(site.scope).find)
    known.sort(key=lambda each: not any("float" in kind for kind in tensors[each]))
    if known:
        return f"{known[0]}.device.type"
    return f'"cuda" if {site.source.spelled("torch.cuda.is_available")}() else "cpu"'


def _is_set(site: Site, name: cst.Name) -> bool:
    """Whether a name gets its value where it stands."""
    holder = site.holder(name)
    loops = isinstance(holder, cst.For) and site.source.inside(name, holder.target)
    return site.is_label(name) or loops


def _in_float32(site: Site, statement: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that leave no 16 bits in a statement: formats that it writes, and takes over; names.

    A name that is cast in place is cast no more within what is cast as a whole.
    """
    expressions = list(walk(statement, cst.BaseExpression))
    taken = of_half(site, taken_over(site, expressions))
    changes = {**wide(site, statement), **taken, **made_like(site, statement)}
    names = _raised(site, statement)
    within = site.source.inside
    return changes | {
        node: to
        for node, to in names.items()
        if not any(within(node, each) for each in changes if isinstance(each, cst.Call))
    }


def _raised(site: Site, statement: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that cast 16-bit names, where they are computed with."""
    return {
        node: method(node, "float")
        for kind in (cst.Attribute, cst.Name)
        for node in walk(statement, kind)
        if dotted(node) and site.is_half(node) and is_computed_with(site, node)
    }


def is_computed_with(site: Site, node: cst.BaseExpression) -> bool:
    """Whether the numbers of a name are used, and not its shape or format."""
    match site.source.parents[node]:
        case cst.Attribute(value=value, attr=cst.Name(value=asked)) if value is node:
            return asked not in _SHAPES and not writes(asked)
        case cst.AssignTarget() | cst.Attribute():
            return False
        case cst.For(target=target) if target is node:
            return False
        case cst.Arg(keyword=label) as given:
            call = site.source.parents[given]
            assert isinstance(call, cst.Call)
            asked = dotted(call.func).endswith("autograd.grad") and given is not call.args[0]
            return label is not node and not asked and dotted(call.func) != "len"
        case cst.Subscript() as above:
            target = site.source.parents[above]
            return not isinstance(target, cst.AssignTarget)
        case _:
            return True


def _calls(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Operations in a statement: calls and products."""
    return [*walk(node, cst.Call), *walk(node, cst.BinaryOperation)]


def calls_an_argument(node: cst.CSTNode, site: Site) -> bool:
    """Whether a function that was given is called, such as the model in a loss."""
    given = set(arguments_of(site.function)) if site.function is not None else set[str]()
    for each in walk(node, cst.Lambda):
        given.update(_names(each.params))
    return any(dotted(each.func) in given for each in walk(node, cst.Call))


def arguments_of(function: cst.FunctionDef) -> list[str]:
    """Names of the arguments of a function."""
    return _names(function.params)


def _names(params: cst.Parameters) -> list[str]:
    every = [*params.posonly_params, *params.params, *params.kwonly_params]
    return [each.name.value for each in every]


def is_half_at(site: Site, name: str, first: cst.BaseStatement) -> bool:
    """Whether a name was seen to hold 16 bits where a statement began."""
    seen = site.dtypes.get(site.source.start(first)[0], {}).get(name, set())
    return bool(seen & set(HALF))


def lists_at(site: Site, first: cst.BaseStatement) -> list[str]:
    """Arguments that were seen to hold lists of 16-bit tensors where a statement began."""
    seen = site.dtypes.get(site.source.start(first)[0], {})
    of_half = {f"{LIST_OF}{each}" for each in HALF}
    every = () if site.function is None else arguments_of(site.function)
    return [each for each in every if seen.get(each, set()) & of_half]


def is_docstring(node: cst.BaseStatement) -> bool:
    """Whether a statement is the docstring of a function."""
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )
