"""Verifiers that run a completion's program against tests, in a sandbox or on a server.

The server speaks open-instruct's form. A score is the share of the tests that pass; 0 where that is
below --code_pass_rate_reward_threshold. Tests run one after the other, each in a process of its
own, for at most --code_max_execution_time. Those that the time of a verdict does not reach have
failed.
"""

import ast
import json
import math
import re
import textwrap
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from decimal import Decimal, InvalidOperation
from typing import Any, ClassVar

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.text import json_or_text
from open_instruct.rewards.sandbox.sandbox import MAX_OUTPUT_BYTES, SANDBOX
from open_instruct.rewards.verifier import Verifier
from open_instruct.rewards.words import find_tagged_answer

# Of --verifier_timeout_s, so that the verdict on a program that is late in every test still comes.
SHARE_OF_TIME = 0.9
# The mark of a block's first line, and its language. Tildes are a fence at the beginning of a line
# alone.
_FENCE = re.compile(r"((?<!`)`{3,}+|(?<![^\n])[ \t]*+~{3,}+)[ \t]*+([^\s`]*)[^`\n]*\n")
MAX_FENCES = 20  # that may be the end of one block
PYTHON = ("python", "py", "python3")
# What reading text that is no literal raises.
NO_LITERAL = (ValueError, SyntaxError, TypeError, MemoryError, RecursionError)
# Members of a set or a dict with one hash. Each is compared with all the others, so that 50,000
# multiples of 2**61 - 1, whose hash is 0, cost a billion comparisons. Of values that nobody has
# forged a few have one hash.
MAX_EQUAL_HASHES = 64
# As contests write numbers. Decimal also reads 1_000 and the digits of all scripts.
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


class Code(Verifier):
    """A program defines what statements such as `assert add(1, 2) == 3` call."""

    name: ClassVar[str] = "code"
    test: ClassVar[str] = '"assert add(1, 2) == 3"'
    endpoint: ClassVar[str] = "/test_program"

    def configure(self, flags: RewardSection) -> None:
        self._flags = flags
        self._time_s = SHARE_OF_TIME * flags.verifier_timeout_s

    def check_ground_truth(self, ground_truth: Any) -> None:
        tests = json_or_text(ground_truth)
        if not (isinstance(tests, list) and tests and all(map(self.is_test, tests))):
            raise ValueError(f"is no list of tests such as {self.test}, and no JSON of one")

    def score(self, completion: str, ground_truth: Any) -> float:
        program = find_program(completion)
        tests = json_or_text(ground_truth)
        if self._flags.code_api_url:
            results = self._ask_server(program, tests)
        else:
            results = self._run_tests(program, tests)
        rate = sum(results) / len(tests)
        if rate < self._flags.code_pass_rate_reward_threshold:
            return 0.0
        return rate

    def _run_tests(self, program: str, tests: list[Any]) -> Iterator[bool]:
        """Whether each test passes, as long as there is time, and the score can be above 0."""
        deadline_s = time.monotonic() + self._time_s
        min_rate = self._flags.code_pass_rate_reward_threshold
        num_good = len(tests)  # if all further ones pass
        for test in tests:
            left_s = deadline_s - time.monotonic()
            passes = False
            if left_s > 0 and num_good / len(tests) >= min_rate:
                timeout_s = min(left_s, self._flags.code_max_execution_time)
                passes = self.passes(program, test, timeout_s)
            num_good -= not passes
            yield passes

    def _ask_server(self, program: str, tests: list[Any]) -> Iterator[bool]:
        content = {
            "program": program,
            "tests": tests,
            "max_execution_time": self._flags.code_max_execution_time,
        }
        headers = {"Content-Type": "application/json"}
        url = str(self._flags.code_api_url).replace("/test_program", self.endpoint)
        request = urllib.request.Request(url, data=json.dumps(content).encode(), headers=headers)
        with urllib.request.urlopen(request, timeout=self._time_s) as answer:
            return (result == 1 for result in json.load(answer)["results"])

    def is_test(self, test: Any) -> bool:
        return isinstance(test, str)

    def passes(self, program: str, test: Any, timeout_s: float) -> bool:
        """Whether a program passes a test in this time.

        It does not if it dies, or prints without an end. Of `assert CALL == LITERAL` the program
        sees only the call: its value comes out, and is compared here.
        """
        call, expected = split_assertion(test)
        cpu_s = math.ceil(timeout_s) + 1
        with closing(SANDBOX.interpreter(cpu_s=cpu_s, name="solution")) as interpreter:
            deadline_s = time.monotonic() + timeout_s
            if interpreter.run(program, timeout_s=timeout_s).status != "done":
                return False
            result = interpreter.run(call, timeout_s=deadline_s - time.monotonic(), is_plain=True)
        if result.status != "done":
            return False
        if not expected:
            return True
        try:
            return bool(read_literal(result.value) == read_literal(expected))
        except NO_LITERAL:
            return False


class CodeStdio(Code):
    """A program reads a test's input and prints its output.

    Spaces around lines do not count, nor how numbers are written.
    """

    name: ClassVar[str] = "code_stdio"
    test: ClassVar[str] = '{"input": "1 2", "output": "3"}'
    endpoint: ClassVar[str] = "/test_program_stdio"

    def is_test(self, test: Any) -> bool:
        if not isinstance(test, dict) or not isinstance(test.get("output"), str):
            return False
        return isinstance(test.get("input"), str | list)

    def passes(self, program: str, test: Any, timeout_s: float) -> bool:
        stdin = test["input"]
        if not isinstance(stdin, str):
            stdin = "\n".join(map(str, stdin))
        expected = test["output"]
        max_bytes = MAX_OUTPUT_BYTES + 4 * len(expected)
        cpu_s = math.ceil(timeout_s) + 1
        with closing(SANDBOX.interpreter(cpu_s=cpu_s, stdin=stdin)) as interpreter:
            result = interpreter.run(program, timeout_s=timeout_s, max_bytes=max_bytes)
        lines = result.output.strip().split("\n")
        expected_lines = expected.strip().split("\n")
        if result.status not in ("done", "exit") or len(lines) != len(expected_lines):
            return False
        return all(map(_is_same_line, lines, expected_lines))


def find_program(completion: str) -> str:
    """The last block of Python between fences, else the last of any language, else all of it.

    Example: ``find_program("So:\\n```python\\nx = 1\\n```") == "x = 1\\n"``.
    """
    blocks = list(_find_blocks(completion))
    if not blocks:
        return find_tagged_answer(completion)
    python_blocks = [block for block in blocks if block[0] in PYTHON]
    _, program = (python_blocks or blocks)[-1]
    return program


def _find_blocks(text: str) -> Iterator[tuple[str, str]]:
    """The language and the lines of each block between fences of ``` or ~~~, in order.

    A block ends at the first fence of its kind where it is whole Python, since docstrings have
    fences, too; if there is none, at its first fence; if it has none, at the end of the text.
    """
    start = 0
    while opening := _FENCE.search(text, start):
        language = opening[2].lower()
        behind = text[opening.end() :]
        fence = rf"^[ \t]*{opening[1].strip()}[`~]*[ \t]*$"
        closings = list(re.finditer(fence, behind, re.MULTILINE))
        bodies = [textwrap.dedent(behind[: closing.start()]) for closing in closings[:MAX_FENCES]]
        if not closings:
            yield language, textwrap.dedent(behind)
            return
        number = 0
        if language in (*PYTHON, ""):
            whole = (number for number, body in enumerate(bodies) if _is_python(body))
            number = next(whole, 0)
        yield language, bodies[number]
        start = opening.end() + closings[number].end()


def _is_python(program: str) -> bool:
    try:
        ast.parse(program)
    except NO_LITERAL:
        return False
    return True


def split_assertion(test: str) -> tuple[str, str]:
    """The call and the literal of a test `assert CALL == LITERAL`; else the whole test, and "".

    The literal may come first.

    Example: `split_assertion("assert add(1, 2) == 3") == ("add(1, 2)", "3")`.
    """
    try:
        match ast.parse(test).body:
            case [ast.Assert(test=ast.Compare(left=call, ops=[ast.Eq()], comparators=[literal]))]:
                if not _is_literal(literal):
                    call, literal = literal, call
                if _is_literal(literal):
                    return ast.unparse(call), ast.unparse(literal)
    except NO_LITERAL:
        pass
    return test, ""


def _is_literal(node: ast.expr) -> bool:
    try:
        evaluate_literal(node)
    except NO_LITERAL:
        return False
    return True


def _is_same_line(line: str, expected: str) -> bool:
    if line.strip() == expected.strip():
        return True
    try:
        numbers = read_numbers(line)
        return numbers is not None and numbers == read_numbers(expected)
    except InvalidOperation:  # an exponent that is larger than any
        return False


def read_literal(text: str) -> Any:
    """The value that a text is the literal of.

    Raises:
        ValueError, SyntaxError, TypeError, MemoryError, RecursionError: there is none.
    """
    return evaluate_literal(ast.parse(text.strip(), mode="eval").body)


def evaluate_literal(expression: ast.expr) -> Any:
    """As `read_literal`, of an expression."""
    for node in ast.walk(expression):
        members: list[Any] = []
        if isinstance(node, ast.Set):
            members = node.elts
        elif isinstance(node, ast.Dict):
            members = node.keys
        hashes = Counter(hash(ast.literal_eval(member)) for member in members if member)
        if max(hashes.values(), default=0) > MAX_EQUAL_HASHES:
            raise ValueError("its members are chosen to have one hash")
    return ast.literal_eval(expression)


def read_numbers(line: str) -> list[Decimal] | None:
    """The numbers between the spaces of a line; None where something else stands there, too."""
    words = line.split()
    if not all(map(_NUMBER.fullmatch, words)):
        return None
    return [*map(Decimal, words)]
