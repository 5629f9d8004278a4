"""Pages from templates of jinja2, which is an extra: everything from outside is escaped."""

from __future__ import annotations

from functools import cache
from typing import Any

from ampwise_lint.base import neutral
from ampwise_lint.base.errors import MissingExtraError
from ampwise_lint.base.words import counted


@cache
def pages(package: str, **helpers: Any) -> Any:
    """The environment of a package's templates; ``page.html``, which lays them out, is here.

    Raises
    ------
    MissingExtraError
        Without jinja2.
    """
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    except ImportError:
        raise MissingExtraError(
            "a page needs jinja2, which is not installed: pip install 'ampwise-lint[html]'"
        ) from None
    loader = ChoiceLoader([PackageLoader(package), PackageLoader("ampwise_lint.base")])
    made: Any = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, finalize=_finalized
    )
    made.globals.update(counted=counted, **helpers)
    return made


def _finalized(value: Any) -> Any:
    """What a page shows of a value: a line, unless a template made it."""
    from jinja2.runtime import Undefined
    from markupsafe import Markup

    return value if isinstance(value, Markup | Undefined) else neutral.line(str(value))
