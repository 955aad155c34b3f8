"""Reads the calls in a Python script, and their arguments, without executing it."""

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file

MAX_SCRIPT_BYTES = 2**20
MAX_SHOWN = 60
MAX_DEPTH = 20
# Calls whose first argument says all that a setting needs.
NAMING = ("from_pretrained", "load_dataset", "load_from_disk")
# First arguments with which the datasets library reads the files of another argument.
FILE_READERS = ("arrow", "csv", "json", "parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of a class or function, with the words of each argument that is given by its name.

    Example: `DPOConfig(beta=0.1, loss_type=["sigmoid", "sft"], output_dir=args.out)` is::

        Call(name="DPOConfig", values={"beta": ["0.1"], "loss_type": ["sigmoid", "sft"]},
             unreadable={"output_dir": "args.out"})
    """

    name: str
    values: Mapping[str, list[str]] = field(default_factory=dict)
    unreadable: Mapping[str, str] = field(default_factory=dict)


class _Unknown(Exception):
    """An expression whose value is not in the script."""


def read_calls(path: str) -> list[Call]:
    """Read every call in a script, in the order of its lines.

    :raises InputError: the file cannot be read, or is no Python.
    """
    text = read_user_file(path, where=path, most=MAX_SCRIPT_BYTES)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        place = f"{path} line {error.lineno}" if isinstance(error, SyntaxError) else path
        raise InputError(f"{place}: not valid Python: {error}", kind="unreadable_file") from None
    names = dict(_find_functions(tree, path)) | dict(_find_assignments(tree))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    return [_read_call(call, names) for call in calls]


def _find_assignments(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """The expression of each name that is assigned exactly once."""
    assignments: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target: ast.expr | None = node.targets[0]
        elif isinstance(node, ast.AnnAssign):
            target = node.target
        else:
            continue
        if isinstance(target, ast.Name) and node.value is not None:
            assignments.setdefault(target.id, []).append(node.value)
    for name, expressions in assignments.items():
        if len(expressions) == 1:
            yield name, expressions[0]


def _find_functions(tree: ast.Module, path: str) -> Iterator[tuple[str, ast.expr]]:
    """Functions of the script as FILE.py:NAME, and imported ones as module:NAME."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, ast.Constant(f"{path}:{node.name}")
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield alias.asname or alias.name, ast.Constant(f"{node.module}:{alias.name}")


def _read_call(node: ast.Call, names: Mapping[str, ast.expr]) -> Call:
    values: dict[str, list[str]] = {}
    unreadable: dict[str, str] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            unreadable[f"**{_shorten(keyword.value)}"] = "several arguments at once"
            continue
        try:
            value = _evaluate(keyword.value, names, 0)
        except (_Unknown, ArithmeticError, TypeError, ValueError):
            unreadable[keyword.arg] = _shorten(_resolve(keyword.value, names))
            continue
        if isinstance(value, dict):
            for key, item in value.items():
                values[f"{keyword.arg}.{key}"] = _write_words(item)
            continue
        values[keyword.arg] = _write_words(value)
        for name, value in _find_loading_arguments(keyword.value, names).items():
            values[f"{keyword.arg}.{name}"] = [value]
    return Call(name=_find_called_name(node), values=values, unreadable=unreadable)


def _find_loading_arguments(node: ast.expr, names: Mapping[str, ast.expr]) -> dict[str, str]:
    """The named arguments of the call that loads a model or rows.

    Example: `split` of `load_dataset("a", split="train")`.
    """
    functions: dict[str, str] = {}
    for _ in range(MAX_DEPTH):
        if isinstance(node, ast.Name) and node.id in names:
            node = names[node.id]
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            functions["split"] = str(node.slice.value)
            node = node.value
    if isinstance(node, ast.Call) and _find_called_name(node) in NAMING:
        for keyword in node.keywords:
            if keyword.arg:
                functions[keyword.arg] = _shorten(keyword.value).strip("'")
        functions.pop("name", None)  # of a configuration of rows: `_find_loaded_name` has it
        if functions.pop("data_files", None) is not None and functions.get("split") == "train":
            del functions["split"]  # all rows of files are its "train"
    return functions


def _resolve(node: ast.expr, names: Mapping[str, ast.expr]) -> ast.expr:
    """The expression behind a name."""
    for _ in range(MAX_DEPTH):
        if not isinstance(node, ast.Name) or node.id not in names:
            break
        node = names[node.id]
    return node


def _find_called_name(node: ast.Call) -> str:
    """The last name of what is called: `from_pretrained` of `AutoTokenizer.from_pretrained`."""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    if isinstance(node.func, ast.Name):
        return node.func.id
    return ""


def _evaluate(node: ast.expr, names: Mapping[str, ast.expr], depth: int) -> Any:
    """The value of an expression of constants, assigned names, and arithmetic on numbers."""
    if depth > MAX_DEPTH:
        raise _Unknown
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _evaluate(names[node.id], names, depth + 1)
    if isinstance(node, ast.List | ast.Tuple):
        return [_evaluate(item, names, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise _Unknown
        keys = [_evaluate(key, names, depth + 1) for key in node.keys if key is not None]
        values = [_evaluate(value, names, depth + 1) for value in node.values]
        return dict(zip(keys, values, strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, names, depth + 1)
    if isinstance(node, ast.BinOp):
        return _compute(node, names, depth)
    if isinstance(node, ast.Attribute) and _is_torch(node.value):
        return node.attr  # torch.bfloat16
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return _evaluate(node.value, names, depth + 1)
    if isinstance(node, ast.Call) and _find_called_name(node) in NAMING and node.args:
        return _find_loaded_name(node, names, depth)
    raise _Unknown


def _is_torch(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "torch"


def _compute(node: ast.BinOp, names: Mapping[str, ast.expr], depth: int) -> Any:
    left = _evaluate(node.left, names, depth + 1)
    right = _evaluate(node.right, names, depth + 1)
    if not all(isinstance(side, int | float) for side in (left, right)):
        raise _Unknown
    if isinstance(node.op, ast.Mult):
        return left * right
    if isinstance(node.op, ast.Div):
        return left / right
    if isinstance(node.op, ast.FloorDiv):
        return left // right
    if isinstance(node.op, ast.Add):
        return left + right
    if isinstance(node.op, ast.Sub):
        return left - right
    raise _Unknown


def _find_loaded_name(node: ast.Call, names: Mapping[str, ast.expr], depth: int) -> str | list[str]:
    """The name of a model or of rows that a call loads; a configuration of rows is put behind it.

    Of `load_dataset("json", data_files="pairs.jsonl")` that is the file, or a list of files.
    """
    arguments = {keyword.arg: keyword.value for keyword in node.keywords}
    parts = [_evaluate(part, names, depth + 1) for part in node.args[:2]]
    if _find_called_name(node) == "load_dataset" and "name" in arguments:
        parts.append(_evaluate(arguments["name"], names, depth + 1))
    if not all(isinstance(part, str) for part in parts):
        raise _Unknown
    if "data_files" not in arguments:
        return ":".join(parts)
    files = _evaluate(arguments["data_files"], names, depth + 1)
    if isinstance(files, dict) or parts[0] not in FILE_READERS:
        # A file for each split, or some files of a folder or of a data set of the hub.
        raise _Unknown
    return files


def _write_words(value: Any) -> list[str]:
    if isinstance(value, list):
        return [_write_word(item) for item in value]
    return [_write_word(value)]


def _write_word(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | dict):
        return json.dumps(value)
    return str(value)


def _shorten(node: ast.expr) -> str:
    text = ast.unparse(node)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}…"
