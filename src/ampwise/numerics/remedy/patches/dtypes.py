"""Float32 for an operand, in place of a cast to 16 bits; and a cast that is missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import libcst as cst

from ampwise.formats import HALF
from ampwise.numerics.remedy.patches.constants import assigned, terms
from ampwise.numerics.remedy.patches.edit import (
    Edit,
    enclosed,
    method,
    raised,
    raised_before,
    separable,
    widened,
)
from ampwise.numerics.remedy.patches.idle import without_casts
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import (
    Before,
    Change,
    changed,
    code_of,
    dotted,
    same,
    walk,
)
from ampwise.numerics.remedy.patches.terms import ELEMENTWISE, TENSORS, Term
from ampwise.numerics.remedy.patches.views import outermost
from ampwise.numerics.remedy.patches.written import (
    ASKED,
    asked_for,
    float32,
    is_a_dtype,
    made_like,
    named_formats,
    of_half,
    only_asked,
    taken_over,
    uses,
    wide,
)
from ampwise_lint.base.words import joined

_NO_TENSORS = ("math", "numpy", "len", "int", "float", "max", "min", "range")
_KNOWN = ("numel", "size", "dim", "float", "double")
"""Methods whose result is no tensor, or in a wide format."""
_ATEN: Mapping[str, tuple[str, ...]] = {
    "square": ("mul", "pow", "square"),
    "std": ("std", "var"),
    "norm": ("norm", "linalg_vector_norm"),
    "vector_norm": ("linalg_vector_norm",),
    "normalize": ("div", "norm", "linalg_vector_norm", "clamp_min"),
    "nll_loss": ("nll_loss_forward",),
    "cross_entropy": ("nll_loss_forward", "log_softmax"),
    "reciprocal": ("reciprocal", "mul", "div"),
    "sub": ("sub", "rsub"),
}
"""Aten's names of operations, where they are others."""
_MAKES = ("_to_copy", "arange", "full", "zeros", "ones", "empty", "linspace", "scalar_tensor")
"""Operations that give a tensor its format."""
FROM_HERE_ON = "{} in float32 from here on"
FLOAT32 = "float32 keeps the digits, and the range, that this operation needs."
_INTO = {"index_add_": 2, "index_copy_": 2, "scatter_add_": 2, "scatter_": 2, "masked_scatter_": 1}
"""Methods that write a tensor of their own format, and which argument that is."""


def edits(site: Site) -> Iterator[Edit]:
    """Float32 in place of 16 bits at the line, without leaving autocast."""
    if site.cause == "DTYPE_ERROR":
        yield from _matching(site)
    yield from _uncast(site)
    yield from _followed(site)
    yield from _carried(site)
    yield from _raised(site)
    yield from _formula(site)
    yield from _like(site)
    yield from _from_here_on(site)


# -- a cast that is too much ----------------------------------------------------------------------


def _uncast(site: Site) -> Iterator[Edit]:
    """The casts at the line; or else those of what its names stand for; or all of the function.

    Then the formats of tensors that are made in the function in that of one with 16 bits.
    State that is kept in a dictionary is no name; and its format may be an argument that another
    method of the class has a default for: first only what is made in it, then the default.
    """
    if site.statement is None:
        return
    here = {**wide(site, site.statement)}
    if site.dtype in HALF:
        taken = taken_over(site, site.expressions)
        here |= taken if site.op in _MAKES else _given(site, taken)
    behind = {node: each for term in terms(site) for node, each in wide(site, term.node).items()}
    for name, value in assigned(site):
        if site.is_half(name):
            part = site.source.parents[value]  # of n, i = n.to(x.dtype), i.to(x.dtype)
            whole = site.source.parents[part] if isinstance(part, cst.Element) else value
            behind |= taken_over(site, list(walk(whole, cst.BaseExpression)))
    everywhere = {} if site.function is None else wide(site, site.function)
    around = None if site.function is None else site.source.class_around(site.function)
    of_class = {} if around is None else wide(site, around)
    made = [each for each in site.roots if not _is_cast(each)]
    followed = of_half(site, taken_over(site, made))
    state = behind | of_half(site, taken_over(site, _casts_of(site)))
    for changes in (here, state, behind, everywhere):
        if changes:
            yield from in_place_of("a cast to float32", "16 bits", site, changes)
    of_name = {} if around is None else named_formats(site, around)
    if of_name:
        yield from in_place_of("float32", _asked(of_name), site, of_name)
    if of_class:
        yield from in_place_of("a cast to float32", "16 bits", site, of_class)
    if followed:
        yield from in_place_of("float32", _asked(followed), site, followed)


def _asked(formats: Iterable[cst.CSTNode]) -> str:
    """What formats are asked for by."""
    asked = [code_of(e) for e in formats if isinstance(e, cst.Attribute | cst.Name | cst.Subscript)]
    return joined(dict.fromkeys(asked)) or "another format"


def _casts_of(site: Site) -> list[cst.BaseExpression]:
    """Casts in assignments to names that the line reads: also of what a loop goes on with."""
    read = {each.value for e in site.expressions for each in walk(e, cst.Name)}
    given = [
        each.value
        for each in walk(site.scope, cst.Assign)
        for target in each.targets
        if isinstance(target.target, cst.Name) and target.target.value in read
    ]
    return [each for value in given for each in walk(value, cst.BaseExpression) if _is_cast(each)]


def in_place_of(
    wider: str, format_: str, site: Site, changes: Mapping[cst.CSTNode, Change]
) -> Iterator[Edit]:
    """Another format in place of one; no cast of what is float32 in that.

    First with what the function returns in the format that was given for it.
    """
    less, all_left_out = without_casts(site, changes)
    what = f"no cast to {format_}" if all_left_out else f"{wider} in place of {format_}"
    if returned := _returned_as_asked(site, less):
        yield Edit(f"{what} but of the result", FLOAT32, returned)
    yield _by_statement(site, what, less)


def _by_statement(site: Site, what: str, changes: Mapping[cst.CSTNode, Change]) -> Edit:
    """An edit of formats: all of a statement, or none: a reader would ask why one is left."""

    def statement(node: cst.CSTNode) -> object:
        return node if isinstance(node, cst.BaseStatement) else site.source.statement(node)

    return separable(what, FLOAT32, changes, statement)


def _returned_as_asked(
    site: Site, changes: Mapping[cst.CSTNode, Change]
) -> dict[cst.CSTNode, Change]:  # fmt: skip
    """Changes after which a format that is an argument is that of the result; else of no use."""
    if site.function is None:
        return {}
    arguments = {each.name.value for each in walk(site.function.params, cst.Param)}
    within = {name.value for each in changes for name in walk(each, cst.Name)}
    unused = [
        name
        for name in sorted(arguments & within)
        if is_a_dtype(cst.Name(name))
        and all(any(site.source.inside(use, e) for e in changes) for use in uses(site, name))
    ]
    returned = [each.value for each in walk(site.function.body, cst.Return)]
    if (
        len(unused) != 1
        or not returned
        or any(e is None or isinstance(e, cst.Tuple) for e in returned)
    ):
        return {}
    found = dict(changes)
    for each in returned:
        assert each is not None
        found = {node: to for node, to in found.items() if not site.source.inside(node, each)}
        found[each] = method(changed(each, changes), "to", cst.Name(unused[0]))
    return found


def _given(site: Site, changes: Mapping[cst.CSTNode, Change]) -> dict[cst.CSTNode, Change]:
    """Those of changes of a format that stands there as a name: what it is, is not seen.

    An argument's default is changed itself.
    """
    params = [] if site.function is None else list(walk(site.function.params, cst.Param))
    defaults = {each.name.value for each in params if each.default is not None}
    names = {node: to for node, to in changes.items() if isinstance(node, cst.Name)}
    return {node: to for node, to in names.items() if node.value not in defaults}


def in_part(site: Site) -> Iterator[Edit]:
    """All casts to 16 bits in a part of a file: a class, a function, a statement outside of any."""
    if changes := wide(site, site.source.module):
        less, _ = without_casts(site, changes)
        yield _by_statement(site, "casts to float32 in place of 16 bits", less)


def copied(site: Site) -> Iterator[Edit]:
    """As casts that are too much, where these make a copy, too: of float32 there is none."""
    around = None if site.function is None else site.source.class_around(site.function)
    for scope in (site.statement, site.function, around):
        changes: dict[cst.CSTNode, Change] = {}
        for call in walk(scope, cst.Call) if scope is not None else ():
            if (value := _cast_of(site, call)) is not None:
                copy = cst.parse_expression("f(copy=True)")
                assert isinstance(copy, cst.Call)
                made = method(value, "to", float32(site))
                changes[call] = made.with_changes(args=[*made.args, *copy.args])
        if changes:
            what = "a copy in float32 in place of a cast to 16 bits"
            yield separable(what, FLOAT32, changes)


def _cast_of(site: Site, call: cst.Call) -> cst.BaseExpression | None:
    """What a call casts to 16 bits; None where it does not."""
    if not isinstance(call.func, cst.Attribute):
        return None
    name = call.func.attr.value
    if name in ("half", "bfloat16") and not site.source.full(call.func):
        return call.func.value
    is_to = name == "to" and len(call.args) == 1
    return call.func.value if is_to and wide(site, call.args[0].value) else None


def _like(site: Site) -> Iterator[Edit]:
    """Float32 for what is made in the format of another tensor, without a word.

    At the line, then in all of the function.
    """
    for scope in (site.statement, site.function):
        if changes := {} if scope is None else made_like(site, scope):
            yield separable("float32 in place of the format of another tensor", FLOAT32, changes)


def _is_cast(node: cst.BaseExpression) -> bool:
    """Whether an expression casts what there is, and makes no tensor."""
    match node:
        case cst.Call(func=cst.Attribute(attr=cst.Name(value=name))):
            return name in ("to", "type", "type_as")
        case _:
            return False


def _followed(site: Site) -> Iterator[Edit]:
    """Float32 for the tensor whose format is taken over: then both have it."""
    if site.op not in _MAKES or site.dtype not in HALF:
        return
    for asked in taken_over(site, site.expressions):
        if not isinstance(asked, cst.Attribute):
            continue
        changes: dict[cst.CSTNode, Change] = {
            leaf.node: widened(site, leaf.node) for leaf in _leaves(site, site.term(asked.value))
        }
        if changes and not any(site.source.inside(each, asked) for each in changes):
            what = f"{code_of(asked.value)}, whose format this takes over, in float32"
            yield Edit(what, FLOAT32, changes)


# -- operands -------------------------------------------------------------------------------------


def _raised(site: Site) -> Iterator[Edit]:
    """The operands of the operation in float32; of several like it on the line, all."""
    found = _meant(site)
    changes: dict[cst.CSTNode, Change] = {}
    for term in found:
        for operand in half_operands(site, term):
            changes[operand] = widened(site, operand)
    if changes:
        what = f"the operands of {found[0].op} in float32"
        yield from (casts(site, what, FLOAT32, e) for e in _from_their_making(site, changes))


def casts(
    site: Site, what: str, why: str, changes: Mapping[cst.CSTNode, Change], *, alone: bool = True
) -> Edit:
    """Casts; of tensors that would be cast more than once, in front of the first statement.

    But where these are used below: so much need not be in float32.

    Parameters
    ----------
    alone
        Whether a name may be in 16 bits beside its cast.
    """
    source, statement = site.source, site.source.statement
    tensors = {e: e.value if isinstance(e, cst.Subscript) else e for e in changes}
    names = [each.value for each in tensors.values() if isinstance(each, cst.Name)]
    lines = [each for each in dict.fromkeys(map(statement, changes)) if each is not None]
    named = [use for name in dict.fromkeys(names) for use in uses(site, name)]
    beside = [] if alone else [e for e in named if statement(e) in lines and e not in changes]
    first, end = lines[0], max(map(source.end, lines))
    if (
        isinstance(first, cst.SimpleStatementLine)
        and len(names) == len(changes)
        and len(names) + len(beside) > len(set(names))
        and all(site.unchanged(each, source.start(first)) for each in tensors.values())
        and all(source.parents[each] is source.parents[first] for each in lines)
        and not any(
            source.start(use) > end and site.unchanged(each, source.start(use))
            for each in tensors.values()
            for use in uses(site, code_of(each))
        )
        and not any(isinstance(each, cst.For | cst.While) for each in source.up(first))
    ):
        return raised_before(first, list(dict.fromkeys(names)), what, why)
    return separable(what, why, changes, lambda node: (code_of(node), id(statement(node))))


def _meant(site: Site) -> list[Term]:
    """Operations on the line that compute as their operands do, and that may be the faulty one."""
    every = map(site.term, site.expressions)
    return [each for each in every if each.op in ELEMENTWISE and _is_meant(site, each)]


def _is_meant(site: Site, term: Term) -> bool:
    """Whether a term is the operation that the diagnosis names, by aten's name of it."""
    op = site.op.removesuffix("_").removeprefix("_").removesuffix("_backward").removesuffix("_dim")
    return op in _ATEN.get(term.op, (term.op,)) or op.startswith(f"{term.op}_")


def half_operands(site: Site, term: Term) -> Iterator[cst.BaseExpression]:
    """What an operation, and those in it, take in 16 bits, as far as that may be."""
    for each in map(term.get, TENSORS):
        if each is None or each.is_constant:
            continue
        if each.op in ELEMENTWISE:
            yield from half_operands(site, each)
        elif may_be_half(site, each):
            yield each.node
            if isinstance(term.node, cst.BinaryOperation) and same(each.node, term.node.right):
                yield term.node.right  # x * x


def may_be_half(site: Site, term: Term) -> bool:
    """Whether an expression may be a 16-bit tensor."""
    node = term.node
    if kinds := site.kinds(node):
        return bool(kinds & set(HALF))
    if isinstance(node, cst.Attribute) and node.attr.value in ASKED:
        return False
    if isinstance(node, cst.Call):
        full = site.source.full(node.func) or dotted(node.func)
        called = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
        return full.partition(".")[0] not in _NO_TENSORS and called not in _KNOWN
    of = node.value if isinstance(node, cst.Subscript) else node  # x.shape[-1]
    asked = isinstance(of, cst.Attribute) and of.attr.value in ASKED
    return not asked and not code_of(node).endswith(".float()")


def _formula(site: Site) -> Iterator[Edit]:
    """What the line computes with in float32, from where that comes in: a few lines above."""
    found = [each for each in map(site.term, site.expressions) if each.op in ELEMENTWISE]
    changes: dict[cst.CSTNode, Change] = {}
    for term in found:
        for leaf in _leaves(site, term):
            changes[leaf.node] = widened(site, leaf.node)
    if changes := outermost(site, changes):
        what = "what the formula starts from in float32"
        yield from (separable(what, FLOAT32, each) for each in _from_their_making(site, changes))


def _from_their_making(
    site: Site, casts: Mapping[cst.CSTNode, Change]
) -> Iterator[Mapping[cst.CSTNode, Change]]:  # fmt: skip
    """Casts, and first: what is made like another tensor in float32 where it is made.

    So is what a loop goes on with: cast in the loop, it would be each time that this comes by.
    """
    found: dict[cst.CSTNode, Change] = {}
    for node, to in casts.items():
        found |= _made_in_float32(site, node) or {node: to}
    if found.keys() != casts.keys():
        yield found
    yield casts


def _made_in_float32(site: Site, node: cst.CSTNode) -> dict[cst.CSTNode, Change]:
    """Changes that make a value in float32 where it is made; empty where a cast is as good."""
    values = site.values_of(node.value) if isinstance(node, cst.Name) else [node]
    like = {made: new for each in values for made, new in made_like(site, each).items()}
    if here := {made: like[made] for made in values if made in like}:
        return here
    if (found := site.carried(node)) is None:
        return {}
    loop, begin = found
    if begin.value is None or not site.has_run(begin, loop):
        return {loop: Before(raised([begin.name]))}
    return {} if site.term(begin.value).is_constant else {begin.value: widened(site, begin.value)}


def _carried(site: Site) -> Iterator[Edit]:
    """What a loop goes on with at the line in float32 from where it begins."""
    names = [] if site.statement is None else walk(site.statement, cst.Name)
    half = [each for each in names if site.is_half(each) and site.carried(each) is not None]
    changes = {node: to for each in half for node, to in _made_in_float32(site, each).items()}
    if changes:
        yield separable("what the loop goes on with, in float32", FLOAT32, changes)


def _leaves(site: Site, term: Term) -> Iterator[Term]:
    """What comes into a formula that is computed without products of matrices."""
    if term.op in ELEMENTWISE:
        for each in map(term.get, TENSORS):
            if each is not None:
                yield from _leaves(site, each)
        return
    if isinstance(term.node, cst.Subscript):
        yield from _leaves(site, site.term(term.node.value))
        return
    binding = site.definition(term.node)
    inner = None if binding is None or binding.value is None else site.term(binding.value)
    may_be = not term.is_constant and may_be_half(site, term)
    # A float32 sum may have 16-bit parts; what a call gives in float32 has none.
    if inner is not None and (
        inner.op in ELEMENTWISE or (may_be and isinstance(inner.node, cst.Call))
    ):
        yield from _leaves(site, inner)
    elif may_be:
        yield term


def _from_here_on(site: Site) -> Iterator[Edit]:
    """The names that the line computes with in float32, on it and on those below."""
    line = site.statement
    if not isinstance(line, cst.SimpleStatementLine) or site.function is None or not _meant(site):
        return
    used = [each for each in walk(line, cst.Name) if site.is_half(each)]
    names = list(dict.fromkeys(each.value for each in used if not site.is_label(each)))
    names = [each for each in names if not only_asked(site, each)]
    if not names:
        return
    if (above := _above(site, line)) is not None and (asked := _asked_in(site, above, names)):
        yield raised_before(above, asked, FROM_HERE_ON, FLOAT32)
    yield raised_before(line, names, FROM_HERE_ON, FLOAT32)


def _above(site: Site, line: cst.SimpleStatementLine) -> cst.SimpleStatementLine | None:
    """The simple statement right above another."""
    block = site.source.parents[line]
    assert isinstance(block, cst.IndentedBlock)
    at = block.body.index(line)
    above = block.body[at - 1] if at else None
    return above if isinstance(above, cst.SimpleStatementLine) else None


def _asked_in(site: Site, statement: cst.SimpleStatementLine, names: Sequence[str]) -> list[str]:
    """Which of some names a statement asks for their format; none where it reads others, too.

    Cast in front of it, what is made there in that format is in float32, too.
    """
    read = [use for name in names for use in uses(site, name) if site.source.inside(use, statement)]
    asked = [each.value for each in read if asked_for(site, each) == "dtype"]
    targets = walk(statement, cst.AssignTarget)
    bound = {name.value for each in targets for name in walk(each, cst.Name)}
    if any(each.value not in {*asked, *bound} for each in read):
        return []
    return [each for each in dict.fromkeys(asked) if each not in bound]


# -- a cast that is missing -----------------------------------------------------------------------


def _matching(site: Site) -> Iterator[Edit]:
    """What is written into a tensor, in the format of that."""
    what = "what is written, in the format of the tensor"
    why = "A tensor that is written into keeps its format; under autocast the value has another."
    for node in walk(site.statement, cst.Assign) if site.statement is not None else ():
        target = node.targets[0].target
        if isinstance(target, cst.Subscript):
            yield Edit(what, why, {node.value: _cast_like(node.value, target.value)})
    for node in site.expressions:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            continue
        place = _INTO.get(node.func.attr.value)
        if place is not None and len(node.args) > place:
            value = node.args[place].value
            yield Edit(what, why, {value: _cast_like(value, node.func.value)})


def _cast_like(value: cst.BaseExpression, target: cst.BaseExpression) -> cst.BaseExpression:
    if not dotted(target):
        return method(enclosed(value), "float")  # as tensors are that are made on the spot
    return method(enclosed(value), "to", cst.Attribute(target, cst.Name("dtype")))
