"""Reads the command of a shell script, with its variables filled in, without executing it."""

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping

from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file

MAX_SCRIPT_BYTES = 2**20
MAX_ROUNDS = 10
SHELL_SUFFIXES = (".sh", ".bash", ".slurm", ".sbatch")
ASSIGNMENT = re.compile(r"(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
ARRAY = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)\+?=\((.*)\)\s*", re.DOTALL)
HEREDOC = re.compile(r"read\s+(?:-\w+\s+(?:''\s+)?)*([A-Za-z_]\w*)\s*<<-?\s*['\"]?(\w+)['\"]?.*")
VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-((?:[^{}]|\{[^{}]*\})*))?\})")
QUOTED_ARRAY = re.compile(r'"(\$\{\w+\[[@*]\]\})"')
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
}
LOOP = re.compile(r"for\s+([A-Za-z_]\w*)\s+in\s+([^\s;]+).*", re.DOTALL)
COMMENT = re.compile(r"(?:^|(?<=\s))#[^\n'\"]*$", re.MULTILINE)


def expand_script(words: list[str], starts_trainer: Callable[[list[str]], bool]) -> list[str]:
    """The words of a launch; of a shell script, those of its command and what follows."""
    if not words[0].endswith(SHELL_SUFFIXES):
        return words
    return [*read_command(words[0], starts_trainer), *words[1:]]


def read_command(path: str, starts_trainer: Callable[[list[str]], bool]) -> list[str]:
    """The words of the first command in a script that `starts_trainer`.

    A variable that the script does not set is left as `$NAME`; of a loop the first turn is read.

    :raises InputError: the file cannot be read, or has no such command.
    """
    text = read_user_file(path, where=path, most=MAX_SCRIPT_BYTES)
    variables: dict[str, str] = {}
    for line in _logical_lines(text, variables):
        array = ARRAY.fullmatch(line)
        if array is not None:
            items = _fill_in(array[2], variables)
            variables[array[1]] = f"{variables.get(array[1], '')} {items}".strip()
            continue
        loop = LOOP.fullmatch(line)
        if loop is not None:
            variables[loop[1]] = _fill_in(loop[2], variables)
            continue
        assignment = ASSIGNMENT.fullmatch(line)
        if assignment is not None:
            value = _split(_fill_in(assignment[2], variables))
            if len(value) <= 1:
                variables[assignment[1]] = " ".join(value)
                continue
        words = _split(_fill_in(line, variables))
        if starts_trainer(words):
            return words
    raise InputError(
        f"{path}: no line of it starts a trainer of that suite: give the words of the line that "
        "does",
        kind="unreadable_file",
    )


def _logical_lines(text: str, variables: dict[str, str]) -> list[str]:
    """The lines of a script without comments, each joined with those that continue it.

    A text that the script reads into a variable is put into `variables`.
    """
    lines: list[str] = []
    lines_left = [re.sub(r"\\\s+$", r"\\", line) for line in text.splitlines()]
    while lines_left:
        line = lines_left.pop(0)
        heredoc = HEREDOC.fullmatch(line.strip())
        if heredoc is not None:
            end = lines_left.index(heredoc[2]) if heredoc[2] in lines_left else len(lines_left)
            variables[heredoc[1]] = " ".join(part.rstrip("\\") for part in lines_left[:end])
            del lines_left[: end + 1]
            continue
        line = _without_comment(line)
        while lines_left and (line.endswith("\\") or _is_open(line, lines_left)):
            line = f"{line.removesuffix(chr(92))} {_without_comment(lines_left.pop(0))}"
        if line.strip():
            lines.append(line.strip())
    return lines


def _is_open(line: str, lines_left: list[str]) -> bool:
    """Whether a list in brackets, or a value in quotes, goes on in the next line."""
    assignment = ASSIGNMENT.fullmatch(line.strip())
    if assignment is not None and assignment[2][:1] in ("'", '"'):
        quote = assignment[2][0]
        is_closed = quote in assignment[2][1:]
        return not is_closed and any(quote in other for other in lines_left)
    if re.match(r"\s*(?:export\s+)?\w+\+?=\(", line) is None:
        return False
    return not line.rstrip().endswith(")")


def _without_comment(line: str) -> str:
    return COMMENT.sub("", line).rstrip()


def _fill_in(text: str, variables: Mapping[str, str]) -> str:
    """The text with its variables and its arithmetic filled in, as far as they are known."""
    text = QUOTED_ARRAY.sub(r"\1", text)  # whose own words have quotes where they need them
    for _ in range(MAX_ROUNDS):
        before = text
        text = VARIABLE.sub(lambda match: _look_up(match, variables), text)
        text = _fill_in_arithmetic(text, variables)
        if text == before:
            break
    return text


def _look_up(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """The value of a variable; else its default in the script, or the text as it is."""
    name = match[1] or match[2]
    if name in variables:
        return variables[name]
    if match[3] is not None:
        return match[3].strip("'\"")
    return match[0]


def _fill_in_arithmetic(text: str, variables: Mapping[str, str]) -> str:
    """The text with each `$((...))` computed, as far as its names are known."""
    start = text.find("$((")
    while start >= 0:
        end = text.find("))", start)
        while end >= 0 and text.count("(", start, end) > text.count(")", start, end) + 2:
            end = text.find("))", end + 1)
        if end < 0:
            break
        number = _compute(text[start + 3 : end], variables)
        if number is not None:
            text = f"{text[:start]}{number}{text[end + 2 :]}"
        start = text.find("$((", start + 1)
    return text


def _compute(expression: str, variables: Mapping[str, str]) -> int | None:
    """The value of an expression of whole numbers, variables, brackets and `+ - * /`, or None."""
    try:
        return _evaluate(ast.parse(expression.strip(), mode="eval").body, variables)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return None


def _evaluate(node: ast.expr, variables: Mapping[str, str]) -> int:
    if isinstance(node, ast.Constant):
        return int(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return int(variables.get(node.id, ""))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        compute = OPERATORS[type(node.op)]
        return compute(_evaluate(node.left, variables), _evaluate(node.right, variables))
    raise ValueError


def _split(text: str) -> list[str]:
    """The words of a command; a text with a quote that is never closed is split at its spaces."""
    try:
        return [word for word in shlex.split(text) if not re.fullmatch(r"\$[@*]|\$\{@.*\}", word)]
    except ValueError:
        return text.split()
