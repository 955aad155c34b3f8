"""The lines of the package that tell a GPU from a CPU, and which of them a program comes by."""

import ast
import io
import tokenize
from collections.abc import Iterator
from contextlib import contextmanager

from coverage import Coverage

from tests.fake_cuda.program import REPOSITORY

PACKAGE = REPOSITORY / "open_instruct"
WORDS = {"cuda", "is_cuda", "on_cuda", "on_gpus", "_on_gpu", "gpu_ids"}
DEVICE_TYPE = ["device", ".", "type"]

Span = tuple[int, int]
"""First and last line of a statement; of one that others are within, of its own part alone."""


def spans_of(source: str) -> dict[int, Span]:
    """The statements that speak of CUDA, by their first lines: they are what a test has to come by.

    Headers of functions and fields of classes are left out, as nothing is decided there.
    """
    lines = {line for line, _ in _mentions(source)}
    spans: dict[int, Span] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.stmt) or isinstance(
            node, ast.FunctionDef | ast.AnnAssign | ast.ClassDef
        ):
            continue
        body = [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
        last = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and lines & {*range(node.lineno, last + 1)}:
            spans[node.lineno] = (node.lineno, last)
    return spans


def _mentions(source: str) -> Iterator[tuple[int, str]]:
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for index, token in enumerate(tokens):
        is_word = token.type == tokenize.NAME and token.string in WORDS
        is_type = [each.string for each in tokens[index : index + 3]] == DEVICE_TYPE
        if is_word or is_type:
            yield token.start[0], token.string


def statements() -> dict[str, dict[int, Span]]:
    """Those of every file of the package that has any, by its path within the package."""
    found = {
        path.relative_to(PACKAGE).as_posix(): spans_of(path.read_text())
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    return {name: spans for name, spans in found.items() if spans}


@contextmanager
def come_by() -> Iterator[dict[str, set[int]]]:
    """The lines of such files that Python's threads execute within this context, by path: they are
    there when it has ended.
    """
    paths = {name: str(PACKAGE / name) for name in statements()}
    seen: dict[str, set[int]] = {}
    # Its tracer is in C: one in Python is called with every function of PyTorch, which takes a third
    # of the time.
    coverage = Coverage(data_file=None, config_file=False, include=[*paths.values()])
    coverage.start()
    try:
        yield seen
    finally:
        coverage.stop()
        data = coverage.get_data()
        seen |= {name: set(data.lines(path) or ()) for name, path in paths.items()}
