"""Formulas that lose digits or overflow, and the function of torch's that computes the same.

A row is a rewrite: what it is called, why it helps, spellings of the formula (`template`), and what
to write instead. To add one, add a row, and a fault with its diff to the tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from ampwise.numerics.remedy.patches.edit import Edit
from ampwise.numerics.remedy.patches.site import Site
from ampwise.numerics.remedy.patches.template import Guard, Rewrite
from ampwise.numerics.remedy.patches.terms import Term

_MOST_EPS = 1e-2
"""The largest constant that only keeps a formula away from a bad argument."""


def _eps_is_small(holes: Mapping[str, Term]) -> bool:
    """Whether what may be dropped is a guard: a small number."""
    eps = holes.get("EPS")
    return eps is None or (eps.is_constant and 0 < eps.value <= _MOST_EPS)


def _guarded(inner: str) -> tuple[str, ...]:
    """Spellings of something with and without a guard against 0."""
    return (
        inner, f"{inner} + EPS", f"clamp_min({inner}, EPS)", f"clamp({inner}, min=EPS, max=MAX_)",
    )  # fmt: skip


def _log(inner: str) -> tuple[str, ...]:
    return tuple(f"log({each})" for each in _guarded(inner))


_SOFTMAX = "softmax(X, dim=D, dtype=T_)"
_BY_HAND = "exp(X) / sum(exp(X), dim=D, keepdim=True)"
_SHIFTS = ("max(X)", "amax(X)", "amax(X, dim=D, keepdim=True)")
_SHIFTED = tuple(
    f"exp(X - {most}) / sum(exp(X - {most}), dim=D, keepdim=True)"
    for shift in _SHIFTS
    for most in (shift, f"detach({shift})")
)
"""With a maximum taken out already, which softmax does by itself, and for each row."""
_P, _Q = _guarded("sigmoid(X)"), _guarded("1 - sigmoid(X)")
_ONE_MINUS = (*_Q, "1 - sigmoid(X) + EPS")

_SUM = tuple(f"Y * log({p}) + (1 - Y) * log({q})" for p, q in product(_P, _ONE_MINUS))
_DIFFERENCE = tuple(f"-Y * log({p}) - (1 - Y) * log({q})" for p, q in product(_P, _ONE_MINUS))


def _entropies() -> Iterator[Rewrite]:
    """The formula of binary cross-entropy, as it is summed up."""
    ways = {
        "": (*(f"-mean({each})" for each in _SUM), *(f"mean(-({each}))" for each in _SUM),
             *(f"mean({each})" for each in _DIFFERENCE)),
        ', reduction="sum"': (*(f"-sum({each})" for each in _SUM),
                              *(f"sum(-({each}))" for each in _SUM),
                              *(f"sum({each})" for each in _DIFFERENCE)),
        ', reduction="none"': (*(f"-({each})" for each in _SUM), *_DIFFERENCE),
    }  # fmt: skip
    for how, spelled in ways.items():
        yield Rewrite(
            _ENTROPY, _ROUNDS, spelled, f"F.binary_cross_entropy_with_logits(X, Y{how})",
            _eps_is_small,
        )  # fmt: skip


_ENTROPY = "binary_cross_entropy_with_logits in place of its formula"
_ROUNDS = "A probability that rounds to 0 or 1 has a logarithm of -inf; the logits have all digits."

_LEAVES = "exp leaves the format's range before the logarithm brings it back."
_SAME_LOG = (
    "The ratio is formed of exponentials, which leave the format's range; logarithms do not."
)


def _ratios() -> Iterator[Rewrite]:
    """The logarithm of what is divided by exponentials or multiplied with them."""
    total = "sum(exp(X), dim=D_, keepdim=K_)"
    yield Rewrite(
        "logsumexp in place of the logarithm of a share",
        _SAME_LOG,
        tuple(
            f"log({share})"
            for both in (f"exp(P) + {total}",)
            for share in (f"exp(P) / ({both})", f"exp(P) / ({both} + EPS)",
                          f"exp(P) / ({both}) + EPS")
        ),
        "F.logsigmoid(P - torch.logsumexp(X, dim=D_, keepdim=K_))",
        _eps_is_small,
    )  # fmt: skip
    yield Rewrite(
        "logsumexp in place of the logarithm of a share",
        _SAME_LOG,
        (
            f"log(exp(P) / {total})",
            f"log(exp(P) / ({total} + EPS))",
            f"log(exp(P) / {total} + EPS)",
        ),
        "P - torch.logsumexp(X, dim=D_, keepdim=K_)",
        _eps_is_small,
    )
    yield Rewrite(
        "logsigmoid in place of the logarithm of a share",
        _SAME_LOG,
        ("log(exp(X) / (exp(X) + exp(Y)))", "log(exp(X) / (exp(X) + exp(Y) + EPS))"),
        "F.logsigmoid(X - Y)",
        _eps_is_small,
    )
    weighted = "logsumexp with the logarithm of the weights"
    yield Rewrite(
        weighted,
        _LEAVES,
        (
            "log(sum(W * exp(X) / Z, dim=D, keepdim=K_))",
            "log(sum(W * (exp(X) / Z), dim=D, keepdim=K_))",
        ),
        "torch.logsumexp(X + torch.log(W) - torch.log(Z), dim=D, keepdim=K_)",
    )
    yield Rewrite(
        weighted,
        _LEAVES,
        _log("sum(exp(X) * W, dim=D, keepdim=K_)"),
        "torch.logsumexp(X + torch.log(W), dim=D, keepdim=K_)",
        _eps_is_small,
    )
    yield Rewrite(
        "logsumexp in place of log(mean(exp))",
        _LEAVES,
        ("log(mean(exp(X), dim=D, keepdim=K_))",),
        "torch.logsumexp(X, dim=D, keepdim=K_) - torch.tensor(X.shape[D]).log()",
    )
    yield Rewrite(
        "logsumexp in place of log(exp + exp + exp)",
        _LEAVES,
        ("log(exp(X) + exp(Y) + exp(Z))",),
        "torch.logsumexp(torch.stack([X, Y, Z]), dim=0)",
    )
    yield Rewrite(
        "the exponent in place of log(exp / y)",
        _LEAVES,
        ("log(exp(X) / Y)",),
        "X - torch.log(Y)",
        _are_tensors("Y"),
    )


def _are_tensors(*names: str) -> Guard:
    """Whether holes are no numbers, as far as that can be seen."""
    return lambda holes: not any(holes[each].is_constant for each in names)


_LOGARITHMS = (
    Rewrite(
        _ENTROPY,
        _ROUNDS,
        (
            "binary_cross_entropy(sigmoid(X), Y, weight=W_, reduction=R_)",
            "binary_cross_entropy(clamp(sigmoid(X), EPS, MAX_), Y, weight=W_, reduction=R_)",
        ),
        "F.binary_cross_entropy_with_logits(X, Y, weight=W_, reduction=R_)",
        _eps_is_small,
    ),
    *_entropies(),
    Rewrite(
        "log_softmax in place of log(softmax)",
        "A probability too small for the format is 0, and its logarithm -inf; log_softmax never "
        "leaves the logarithm.",
        (*_log(_SOFTMAX), *_log(_BY_HAND)),
        "F.log_softmax(X, dim=D)",
        _eps_is_small,
    ),
    Rewrite(
        "logsigmoid in place of log(sigmoid)",
        "A probability too small for the format is 0, and its logarithm -inf.",
        (*_log("sigmoid(X)"), *_log("reciprocal(1 + exp(-X))"), "-log(1 + exp(-X))"),
        "F.logsigmoid(X)",
        _eps_is_small,
    ),
    Rewrite(
        "logsigmoid in place of log(1 - sigmoid)",
        "A probability that rounds to 1 leaves 0, and its logarithm is -inf.",
        tuple(f"log({each})" for each in _ONE_MINUS),
        "F.logsigmoid(-X)",
        _eps_is_small,
    ),
    Rewrite(
        "logsumexp in place of log(sum(exp))",
        "exp leaves the format's range before the logarithm brings it back; logsumexp takes the "
        "maximum out first.",
        _log("sum(exp(X), dim=D, keepdim=K_)"),
        "torch.logsumexp(X, dim=D, keepdim=K_)",
        _eps_is_small,
    ),
    Rewrite(
        "logaddexp in place of log(exp + exp)",
        "exp leaves the format's range before the logarithm brings it back.",
        ("log(exp(X) + exp(Y))",),
        "torch.logaddexp(X, Y)",
    ),
    *_ratios(),
    Rewrite(
        "the logarithm of 1 - tanh² by softplus",
        "tanh rounds to 1, and nothing is left of the difference.",
        tuple(f"log({each})" for each in _guarded("1 - square(tanh(X))")),
        "2 * (0.6931471805599453 - X - F.softplus(-2 * X))",
        _eps_is_small,
    ),
    Rewrite(
        "expm1 in place of 1 - exp in a logarithm",
        "exp of a small number rounds to 1, and nothing is left of the difference.",
        tuple(f"log({each})" for each in _guarded("1 - exp(X)")),
        "torch.log(-torch.expm1(X))",
        _eps_is_small,
    ),
    Rewrite(
        "atanh in place of its formula",
        "1 - x cancels, and the quotient leaves the format's range.",
        ("0.5 * log((1 + X) / (1 - X))", "log((1 + X) / (1 - X)) / 2"),
        "torch.atanh(X)",
    ),
    Rewrite(
        "acosh in place of its formula",
        "The square leaves the format's range, or cancels against 1.",
        ("log(X + sqrt(square(X) - 1))",),
        "torch.acosh(X)",
    ),
    Rewrite(
        "asinh in place of its formula",
        "The square leaves the format's range.",
        ("log(X + sqrt(square(X) + 1))",),
        "torch.asinh(X)",
    ),
    Rewrite(
        "softplus in place of log(1 + exp)",
        "exp leaves the format's range, or is lost beside 1, before the logarithm is taken.",
        ("log(1 + exp(X))", "log1p(exp(X))"),
        "F.softplus(X)",
    ),
    Rewrite(
        "a sum of logarithms in place of the logarithm of a product",
        "The product leaves the format's range; the sum of its logarithms does not.",
        ("log(prod(X, dim=D_, keepdim=K_))",),
        "torch.log(X).sum(dim=D_, keepdim=K_)",
    ),
    Rewrite(
        "softplus in place of cosh in a logarithm",
        "cosh leaves the format's range before the logarithm brings it back.",
        ("log(cosh(X))",),
        "X + F.softplus(-2 * X) - 0.6931471805599453",
    ),
    Rewrite(
        "log1p in place of log(1 + x)",
        "1 + x drops the digits of a small x.",
        ("log(1 + X)",),
        "torch.log1p(X)",
    ),
)

_EXPONENTIALS = (
    Rewrite(
        "softmax in place of exp / sum(exp)",
        "exp leaves the format's range; softmax takes the maximum out first.",
        (*_SHIFTED, _BY_HAND, "exp(X) / (sum(exp(X), dim=D, keepdim=True) + EPS)"),
        "torch.softmax(X, dim=D)",
        _eps_is_small,
    ),
    Rewrite(
        "tanh in place of its formula",
        "Both exponentials leave the format's range, and inf / inf is NaN.",
        ("(exp(X) - exp(-X)) / (exp(X) + exp(-X))",
         "(exp(2 * X) - 1) / (exp(2 * X) + 1)"),
        "torch.tanh(X)",
    ),
    Rewrite(
        "silu in place of x / (1 + exp(-x))",
        "exp leaves the format's range, and its gradient with it.",
        ("X / (1 + exp(-X))", "X * reciprocal(1 + exp(-X))"),
        "F.silu(X)",
    ),
    Rewrite(
        "sigmoid in place of its formula",
        "exp leaves the format's range, and its gradient with it.",
        ("reciprocal(1 + exp(-X))", "exp(X) / (1 + exp(X))"),
        "torch.sigmoid(X)",
    ),
    Rewrite(
        "sigmoid of the difference in place of a share",
        "exp leaves the format's range; the difference of the exponents does not.",
        ("exp(X) / (exp(X) + exp(Y))", "exp(X) / (exp(X) + exp(Y) + EPS)"),
        "torch.sigmoid(X - Y)",
        _eps_is_small,
    ),
    Rewrite(
        "half the exponent in place of sqrt(exp)",
        "exp leaves the format's range before the root brings it back.",
        ("sqrt(exp(X))",),
        "torch.exp(0.5 * X)",
    ),
    Rewrite(
        "the negative exponent in place of 1 / sqrt(exp)",
        "exp leaves the format's range, or is 0, and its reciprocal is inf.",
        ("rsqrt(exp(X))",),
        "torch.exp(-0.5 * X)",
    ),
    Rewrite(
        "the negative exponent in place of 1 / exp",
        "exp leaves the format's range, or is 0, and is divided by.",
        ("reciprocal(exp(X))",),
        "torch.exp(-X)",
    ),
    Rewrite(
        "the negative exponent in place of a division by exp",
        "exp leaves the format's range, or is 0, and is divided by.",
        ("Y / exp(X)",),
        "Y * torch.exp(-X)",
    ),
    Rewrite(
        "gelu in place of its formula",
        "The cube leaves the format's range.",
        ("0.5 * X * (1 + tanh(A * (X + 0.044715 * pow(X, 3))))",
         "X * 0.5 * (1 + tanh(A * (X + 0.044715 * pow(X, 3))))"),
        'F.gelu(X, approximate="tanh")',
    ),
    Rewrite(
        "expm1 in place of exp(x) - 1",
        "The digits of a small x cancel.",
        ("exp(X) - 1",),
        "torch.expm1(X)",
    ),
)  # fmt: skip

_LAST = "dim=-1, keepdim=True"
_MEAN = f"mean(X, {_LAST})"
_SPREADS = (
    f"mean(square(X), {_LAST}) - square({_MEAN})",
    f"mean(square(X - {_MEAN}), {_LAST})",
    f"var(X, {_LAST}, correction=0)",
    f"var(X, {_LAST}, unbiased=False)",
)
_CENTRED = tuple(
    spelled.replace("SPREAD", spread)
    for spread in _SPREADS
    for spelled in (f"(X - {_MEAN}) / sqrt(SPREAD + EPS)", f"(X - {_MEAN}) * rsqrt(SPREAD + EPS)")
)
_ROOTED = (
    f"X * rsqrt(mean(square(X), {_LAST}) + EPS)",
    f"X / sqrt(mean(square(X), {_LAST}) + EPS)",
)

_NORMS = (
    Rewrite(
        "rms_norm in place of its formula",
        "Squares leave the format's range; rms_norm adds them up in float32.",
        tuple(f"{each} * W" for each in _ROOTED),
        "F.rms_norm(X, X.shape[-1:], W, EPS)",
    ),
    Rewrite(
        "rms_norm in place of its formula",
        "Squares leave the format's range; rms_norm adds them up in float32.",
        _ROOTED,
        "F.rms_norm(X, X.shape[-1:], eps=EPS)",
    ),
    Rewrite(
        "layer_norm in place of its formula",
        "The variance loses its digits, or leaves the format's range; layer_norm keeps it in "
        "float32.",
        tuple(f"{each} * W + B" for each in _CENTRED),
        "F.layer_norm(X, X.shape[-1:], W, B, EPS)",
    ),
    Rewrite(
        "layer_norm in place of its formula",
        "The variance loses its digits, or leaves the format's range; layer_norm keeps it in "
        "float32.",
        _CENTRED,
        "F.layer_norm(X, X.shape[-1:], eps=EPS)",
    ),
    Rewrite(
        "torch.var in place of E[x²] - E[x]²",
        "Nearly equal numbers are subtracted, and their digits cancel; var takes the mean off "
        "before it squares.",
        ("mean(square(X), dim=D_, keepdim=K_) - square(mean(X, dim=D_, keepdim=K_))",),
        "torch.var(X, dim=D_, correction=0, keepdim=K_)",
    ),
    *(
        Rewrite(
            "normalize in float32 in place of x / |x|",
            "Squares leave the format's range, or a row of zeros is divided by 0.",
            ("X / sqrt(sum(square(X), dim=D, keepdim=True))",
             "X / sqrt(sum(square(X), dim=D, keepdim=True) + EPS)",
             "X / (sqrt(sum(square(X), dim=D, keepdim=True)) + EPS)",
             "X / norm(X, dim=D, keepdim=True)",
             "X / (norm(X, dim=D, keepdim=True) + EPS)"),
            f"F.normalize(X.float(), dim=D{eps})",
            _eps_is_small,
        )
        for eps in ("", ", eps=1e-4")  # the gradient of a row of zeros is divided by it
    ),
    Rewrite(
        "vector_norm in place of sqrt(sum(x²))",
        "Squares leave the format's range, and the root has no derivative at 0; vector_norm has "
        "neither problem.",
        ("sqrt(sum(square(X), dim=D_, keepdim=K_))",),
        "torch.linalg.vector_norm(X, dim=D_, keepdim=K_)",
    ),
    Rewrite(
        "hypot in place of sqrt(x² + y²)",
        "Squares leave the format's range.",
        ("sqrt(square(X) + square(Y))",),
        "torch.hypot(X, Y)",
    ),
    Rewrite(
        "a mean over the targets that count, of which there may be none",
        "With every target ignored the mean is 0 divided by 0.",
        ("cross_entropy(X, Y, ignore_index=I, label_smoothing=L_)",),
        'F.cross_entropy(X, Y, ignore_index=I, label_smoothing=L_, reduction="sum")'
        " / (Y != I).sum().clamp_min(1)",
    ),
    Rewrite(
        "a mean over the targets that count, of which there may be none",
        "With every target ignored the mean is 0 divided by 0.",
        ("cross_entropy(X, Y, label_smoothing=L_)",),
        'F.cross_entropy(X, Y, label_smoothing=L_, reduction="sum")'
        " / (Y != -100).sum().clamp_min(1)",
    ),
)  # fmt: skip

ROWS = (*_LOGARITHMS, *_EXPONENTIALS, *_NORMS)


def edits(site: Site) -> Iterator[Edit]:
    """Every formula at the line that a function of torch's computes better."""
    only_empty = site.cause == "EMPTY_REDUCTION"
    for row in ROWS:
        if ("targets that count" in row.what) == only_empty:
            yield from row.edits(site)
