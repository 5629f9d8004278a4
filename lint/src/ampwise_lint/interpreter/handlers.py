"""The interpreter, put together: what each part does when another asks for it."""

from __future__ import annotations

import ast

from ampwise_lint.interpreter import (
    calls,
    expressions,
    functions,
    imports,
    loops,
    statements,
    targets,
)
from ampwise_lint.path.state import Handlers

HANDLERS = Handlers(
    expressions={**expressions.EXPRESSIONS, ast.Call: calls.evaluate_call},
    statements={**statements.STATEMENTS, **loops.STATEMENTS, **imports.STATEMENTS},
    call=functions.walk,
    assign=targets.assign,
    resolve=imports.resolve,
)
