"""Calls of tools written as Python, as OLMo 3 writes them: `add(a=2, b=3)`, a line for each call."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any


class ToolCallError(ValueError):
    """A reply begins a call that cannot be read; the message says why."""


def read_python_calls(text: str) -> Iterator[tuple[str, dict[str | None, Any]]]:
    """Names and arguments of calls with literal keyword arguments, one a line or in one list.

    Raises:
        ToolCallError: there is something else.
    """
    literals = {"null": None, "true": True, "false": False}
    try:
        tree = ast.parse(text.strip().replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolCallError(f"the calls are no Python: {type(error).__name__}") from error
    nodes: list[ast.AST] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args or any(keyword.arg is None for keyword in node.keywords):
            raise ToolCallError("a call is NAME(argument=value, …)")
        arguments = {}
        for keyword in node.keywords:
            value = keyword.value
            if isinstance(value, ast.Name) and value.id in literals:
                arguments[keyword.arg] = literals[value.id]
                continue
            try:
                arguments[keyword.arg] = ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError, MemoryError) as error:
                raise ToolCallError(f"the argument {keyword.arg} is no literal") from error
        yield ast.unparse(node.func), arguments


def python_call(name: str, arguments: Mapping[str, Any]) -> str:
    """One call; values are written as JSON."""
    written = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{name}({', '.join(written)})"
