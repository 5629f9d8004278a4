"""Islands: a statement, or a function, outside of autocast, on float32 inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import libcst as cst

from ampwise.numerics.remedy.patches.dtypes import ELEMENTWISE, wide
from ampwise.numerics.remedy.patches.edit import Edit, method
from ampwise.numerics.remedy.patches.site import HALF, OTHER, Site
from ampwise.numerics.remedy.patches.source import Change, changed, dotted, walk

_SHAPES = ("shape", "dtype", "device", "ndim", "size", "dim", "numel", "float", "double", "to")
"""What may be asked of a tensor whatever its format is."""
WHY = "Autocast off and inputs in float32: nothing here is rounded to 16 bits."
FUNCTION = "the function in float32, outside of autocast"


def statement(site: Site) -> Iterator[Edit]:
    """The statement at the line in float32."""
    line = site.statement
    if not isinstance(line, cst.SimpleStatementLine) or _calls_an_argument(line, site):
        return  # all of the model that is given would be in float32
    changes = {**wide(site, line), **_raised(site, [line])}
    if not changes and all(each.op in ELEMENTWISE for each in map(site.term, _calls(line))):
        return
    within = bare(changed(line, changes))
    yield Edit(
        "the statement in float32, outside of autocast",
        WHY,
        {line: outside_autocast(site, [within], line)},
    )


def function(site: Site) -> Iterator[Edit]:
    """The function around the line in float32, from its first statement on."""
    if site.function is None or not isinstance(site.function.body, cst.IndentedBlock):
        return
    body = site.function.body.body
    kept = 1 if _is_docstring(body[0]) else 0
    rest = body[kept:]
    if not rest or _calls_an_argument(site.function, site):
        return
    names = [each for each in _arguments(site.function) if _is_half_at(site, each, rest[0])]
    casts = [cst.parse_statement(f"{each} = {each}.float()\n") for each in names]
    changes = {node: made for each in rest for node, made in wide(site, each).items()}
    first, *others = (changed(each, changes) for each in rest)
    block = outside_autocast(site, [*casts, bare(first), *others], rest[0])
    new = site.function.body.with_changes(body=[*body[:kept], block])
    yield Edit(FUNCTION, WHY, {site.function.body: new})


def outside_autocast(
    site: Site, body: Sequence[cst.BaseStatement], first: cst.BaseStatement
) -> cst.BaseStatement:
    """Statements in a block without autocast; comments above the first stay above the block."""
    autocast = site.source.spelled("torch.autocast")
    device = _device(site, first)
    made = cst.parse_statement(f"with {autocast}({device}, enabled=False):\n    pass\n")
    leading: Sequence[cst.EmptyLine] = getattr(first, "leading_lines", ())
    return made.with_changes(body=cst.IndentedBlock(body), leading_lines=leading)


def bare(node: cst.BaseStatement) -> cst.BaseStatement:
    """A statement without the comments above it."""
    return node.with_changes(leading_lines=()) if hasattr(node, "leading_lines") else node


def _device(site: Site, first: cst.BaseStatement) -> str:
    """The kind of device, asked of a tensor at hand; of the CPU where none is."""
    line = site.source.start(first)[0]
    here = site.dtypes.get(line, {})
    wanted = site.statement if site.statement is not None else first
    names = [each for each in walk(wanted, cst.Name) if not site.is_label(each)]
    tensors = {name: kinds - {OTHER} for name, kinds in here.items() if kinds - {OTHER}}
    read = [each.value for each in names if each.value in tensors]
    # What is assigned here may be there only from the second time on that a loop comes by.
    made = {each.value for each in walk(first, cst.Name) if site.is_label(each)}
    known = read or [each for each in tensors if each not in made]
    known.sort(key=lambda each: not any("float" in kind for kind in tensors[each]))
    return f"{known[0]}.device.type" if known else '"cpu"'


def _raised(site: Site, statements: Sequence[cst.CSTNode]) -> dict[cst.CSTNode, Change]:
    """Changes that cast 16-bit names, where they are computed with."""
    changes: dict[cst.CSTNode, Change] = {}
    for each in statements:
        for kind in (cst.Attribute, cst.Name):
            for node in walk(each, kind):
                if dotted(node) and site.is_half(node) and _is_computed_with(site, node):
                    changes[node] = method(node, "float")
    return changes


def _is_computed_with(site: Site, node: cst.BaseExpression) -> bool:
    match site.source.parents[node]:
        case cst.Attribute(value=value, attr=cst.Name(value=asked)) if value is node:
            return asked not in _SHAPES
        case cst.AssignTarget() | cst.Attribute():
            return False
        case cst.Arg(keyword=label) if label is node:
            return False
        case cst.Subscript() as above:
            target = site.source.parents[above]
            return not isinstance(target, cst.AssignTarget)
        case _:
            return True


def _calls(node: cst.CSTNode) -> list[cst.BaseExpression]:
    """Operations in a statement: calls and products."""
    return [*walk(node, cst.Call), *walk(node, cst.BinaryOperation)]


def _calls_an_argument(node: cst.CSTNode, site: Site) -> bool:
    """Whether a function that was given is called, such as the model in a loss."""
    given = set(_arguments(site.function)) if site.function is not None else set[str]()
    for each in walk(node, cst.Lambda):
        given.update(_names(each.params))
    return any(dotted(each.func) in given for each in walk(node, cst.Call))


def _arguments(function: cst.FunctionDef) -> list[str]:
    return _names(function.params)


def _names(params: cst.Parameters) -> list[str]:
    every = [*params.posonly_params, *params.params, *params.kwonly_params]
    return [each.name.value for each in every]


def _is_half_at(site: Site, name: str, first: cst.BaseStatement) -> bool:
    seen = site.dtypes.get(site.source.start(first)[0], {}).get(name, set())
    return bool(seen & set(HALF))


def _is_docstring(node: cst.BaseStatement) -> bool:
    return (
        isinstance(node, cst.SimpleStatementLine)
        and isinstance(node.body[0], cst.Expr)
        and isinstance(node.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )
