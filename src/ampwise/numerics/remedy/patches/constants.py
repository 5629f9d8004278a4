"""Constants that a 16-bit format does not hold: masks beyond its range, guards below it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import libcst as cst

from ampwise import formats
from ampwise.numerics.remedy.patches.edit import Edit, is_sum
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.source import code_of, dotted, same, walk
from ampwise.numerics.remedy.patches.terms import Term

_FILLS = {"masked_fill": "value", "masked_fill_": "value", "fill_": "value",
          "full_like": "fill_value"}  # fmt: skip
_MASKS = ("MASK_CONSTANT", "FULLY_MASKED_ROW")
_WITH_EPS = ("normalize", "cosine_similarity", "layer_norm", "rms_norm")
"""Functions with a small `eps` by default."""
_EPS = {"float16": "1e-4", "bfloat16": "1e-6"}
"""A guard that is a normal number of the format, as the constants of the field are written."""


def terms(site: Site) -> list[Term]:
    """Operations at the line, then those that its names stand for, the nearest first."""
    found = list(site.expressions)
    for _, value in assigned(site):
        found += walk(value, cst.BaseExpression)
    return [term for term in map(site.term, found) if term.op]


def assigned(site: Site) -> Iterator[tuple[cst.Name, cst.BaseExpression]]:
    """Names that the line depends on, at a use, and what they stand for, the nearest first."""
    seen: set[cst.CSTNode] = set(site.expressions)
    queue = [each for each in site.expressions if isinstance(each, cst.Name)]
    while queue:
        name = queue.pop(0)
        binding, parts = site.definition(name), site.parts_with(name)
        value = None if binding is None else binding.value
        if parts is not None:
            value = parts.of
        if value is None or value in seen:
            continue
        yield name, value
        seen.update(walk(value, cst.BaseExpression))
        queue += walk(value, cst.Name)


# -- masks ----------------------------------------------------------------------------------------


def masks(site: Site) -> Iterator[Edit]:
    """Another constant of a mask, at the line, or in what its names stand for."""
    if site.cause not in _MASKS:
        return
    most = formats.lookup(site.compute_dtype).max
    for term in terms(site):
        found = next((each for each in _places(term) if _is_wide(site, each[0], most)), None)
        if found is not None:
            yield from _finite(site, term, *found)
            yield from _everywhere(site, found[0])


def _everywhere(site: Site, place: Term) -> Iterator[Edit]:
    """The same for all masks of the class, or function, that have the constant of a place."""
    nodes = walk(site.source.module, cst.BaseExpression)
    every = [(term, *each) for term in map(site.term, nodes) for each in _places(term)]
    alike = [each for each in every if same(each[1].node, place.node)]
    made = [next(_finite(site, *each), None) for each in alike]
    if len(made) > 1 and None not in made:
        first = next(each for each in made if each is not None)
        changes = {node: to for e in made if e is not None for node, to in e.changes.items()}
        yield Edit(
            f"{first.what}, and wherever else {code_of(place.node)} is one", first.why, changes
        )


def _places(term: Term) -> Iterator[tuple[Term, Term]]:
    """Parameters that a mask's constant may be, each with the tensor that has the format."""
    if term.op in ("mul", "where"):
        one, other = term.parameters["input"], term.parameters["other"]
        pairs = ((one, other), (other, one))
        yield from sorted(pairs, key=lambda pair: not pair[0].is_constant)
    elif term.op in _FILLS and _FILLS[term.op] in term.parameters:
        yield term.parameters[_FILLS[term.op]], term.parameters.get("input", term)


def _is_wide(site: Site, term: Term, most: float) -> bool:
    """Whether a constant is beyond the format, or is one of another place that may be."""
    if site.cause == "FULLY_MASKED_ROW":
        return term.value == -math.inf or _is_infinity(term.node)
    if term.is_constant:
        return abs(term.value) > most
    node = term.node.expression if isinstance(term.node, cst.UnaryOperation) else term.node
    return bool(dotted(node)) and not site.kinds(node) & set(_TENSORS)


_TENSORS = ("float16", "bfloat16", "float32", "float64", "int64", "int32", "bool")


def _is_infinity(node: cst.BaseExpression) -> bool:
    words = code_of(node).replace(" ", "").replace('"', "'").removeprefix("-")
    return words in ("float('-inf')", "float('inf')", "torch.inf", "math.inf", "np.inf")


def _finite(site: Site, term: Term, place: Term, tensor: Term) -> Iterator[Edit]:
    """The most negative number of the tensor's own format; -inf where that has no name.

    Half of it where something is added: the sum has room, then.
    """
    end = "max" if place.is_constant and place.value > 0 else "min"
    half, room = (" / 2", ", with room for what is added") if _is_added(site, term) else ("", "")
    if format_ := _format_of(site, tensor.node):
        most = f"{site.source.spelled('torch.finfo')}({format_}).{end}{half}"
        yield Edit(
            f"a mask of torch.finfo({format_}).{end}{half}",
            f"The constant is the format's own limit, whatever the format is{room}.",
            {place.node: cst.parse_expression(most)},
        )
    if site.cause == "MASK_CONSTANT" and end == "min":
        yield Edit(
            "a mask of -inf",
            "Every format has -inf, and softmax makes 0 of it where a row keeps one position.",
            {place.node: cst.parse_expression('float("-inf")')},
        )


def _is_added(site: Site, term: Term) -> bool:
    """Whether a mask is a term of a sum, or what it gives is: a factor is meant to be one."""
    line = site.source.statement(term.node)
    names = walk(site.scope, cst.Name)
    given = [
        e for e in names if (made := site.definition(e)) is not None and made.statement is line
    ]
    return term.op == "mul" or any(_in_a_sum(site, each) for each in (term.node, *given))


def _in_a_sum(site: Site, node: cst.BaseExpression) -> bool:
    above = site.source.parents[node]
    adds = cst.AddAssign | cst.SubtractAssign
    return is_sum(above) or (isinstance(above, cst.AugAssign) and isinstance(above.operator, adds))


def _format_of(site: Site, node: cst.BaseExpression) -> str:
    """How the format of a tensor is called: a tensor's own, or what it is cast to."""
    if dotted(node):
        return f"{dotted(node)}.dtype"
    casts = [each.args[0].value for each in walk(node, cst.Call) if _is_cast(each)]
    if known := [dotted(each) for each in casts if dotted(each).endswith("dtype")]:
        return known[0]
    names = [
        each for kind in (cst.Attribute, cst.Name) for each in walk(node, kind) if dotted(each)
    ]
    half = (dotted(each) for each in names if site.is_half(each))
    return next((f"{each}.dtype" for each in half), "")


def _is_cast(call: cst.Call) -> bool:
    return isinstance(call.func, cst.Attribute) and call.func.attr.value == "to" and bool(call.args)


# -- guards ---------------------------------------------------------------------------------------


def guards(site: Site) -> Iterator[Edit]:
    """A larger eps."""
    if site.cause != "EPS_UNDERFLOW":
        return
    eps = _EPS.get(site.dtype or site.compute_dtype, "1e-6")
    what = f"an eps of {eps}, which the format holds"
    why = "The smaller constant is rounded away, and guards nothing."
    text = cst.Float(eps)
    for term in terms(site):
        small = [e for e in term.parameters.values() if _is_guard(e.value, float(eps))]
        if small:
            yield Edit(what, why, {small[0].node: text})
    for node in site.expressions:
        if isinstance(node, cst.Call) and _takes_eps(site, node):
            tight = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
            arg = cst.Arg(text, cst.Name("eps"), equal=tight)
            yield Edit(what, why, {node: node.with_changes(args=[*node.args, arg])})


def _is_guard(value: object, eps: float) -> bool:
    return isinstance(value, float) and 0 < value < eps


def _takes_eps(site: Site, node: cst.Call) -> bool:
    """Whether a call leaves the `eps` of a function at its default."""
    name = site.source.full(node.func).rpartition(".")[2]
    given = any(each.keyword is not None and each.keyword.value == "eps" for each in node.args)
    return name in _WITH_EPS and not given
