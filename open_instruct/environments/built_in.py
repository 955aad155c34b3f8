"""The environments that come with the package: a calculator, Python, and the games of
open-instruct's launches.
"""

import ast
import operator
import re
from collections.abc import Callable
from typing import Any

from open_instruct.core.errors import RunError
from open_instruct.environments.environment import EnvironmentFault, ToolAnswer
from open_instruct.rewards.sandbox.sandbox import SANDBOX, Interpreter

OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
MAX_EXPRESSION = 200  # characters
MAX_NUMBER = 1e30
MAX_SHOWN = 4000  # characters
PYTHON_TIMEOUT_S = 5.0
MAX_PYTHON_S = 600  # of CPU time in an episode


class Calculator:
    """A tool that computes. What the policy answers at last is judged by the row's verifier."""

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: numbers, brackets and + - * / // %, such as (3 + 4) * 12
        """
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
        value = _value(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if float(value).is_integer() else str(value)


class Python:
    """A tool that runs Python in the sandbox.

    Names stay from one call to the next, until one is late or dies.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout_s = timeout or PYTHON_TIMEOUT_S  # of a call
        self._interpreter: Interpreter | None = None
        self._is_closed = False

    def python(self, code: str) -> str:
        """Runs Python code, and gives what it prints and the value of its last line.

        Args:
            code: the Python code
        """
        try:
            self._interpreter = self._interpreter or SANDBOX.interpreter(
                cpu_s=MAX_PYTHON_S, stderr=True
            )
            if self._is_closed:  # meanwhile
                self._interpreter.close()
            ran = self._interpreter.run(code, timeout_s=self._timeout_s)
        except (RunError, OSError) as error:  # of this machine
            raise EnvironmentFault(str(error)) from error
        shown = ran.output + (ran.problem or ("" if ran.value == "None" else ran.value))
        if ran.status in ("late", "died"):
            self._interpreter.close()
            self._interpreter = None
            why = (
                f"took more than {self._timeout_s:g} s"
                if ran.status == "late"
                else "died, or printed too much"
            )
            shown += f"\nThe interpreter {why}. It is started anew: its names are gone."
        return (
            shown
            if len(shown) <= MAX_SHOWN
            else f"{shown[: MAX_SHOWN // 2]}\n…\n{shown[-MAX_SHOWN // 2 :]}"
        )

    def close(self) -> None:
        self._is_closed = True
        if self._interpreter is not None:
            self._interpreter.close()


def _value(node: ast.AST) -> float:
    value: float
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_value(node.operand))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is no arithmetic of numbers")
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"numbers are at most {MAX_NUMBER:g}")
    return value


class Counter:
    """Tools that bring a counter to a target: 1 for the target, -0.5 for another value, -0.1 a
    step.
    """

    def reset(self, target: int = 5) -> str:
        self._target = int(target)
        self._count = 0
        return f"Counter is at 0. Reach {self._target} to win."

    def increment(self) -> ToolAnswer:
        """Increment the counter by 1"""
        return self._moved(1)

    def decrement(self) -> ToolAnswer:
        """Decrement the counter by 1"""
        return self._moved(-1)

    def submit(self) -> ToolAnswer:
        """Submit current value as answer"""
        if self._count == self._target:
            return ToolAnswer(
                content=f"Correct: the counter is at {self._count}.", reward=1.0, done=True
            )
        return ToolAnswer(
            content=f"Wrong: {self._count} is not {self._target}.", reward=-0.5, done=True
        )

    def _moved(self, by: int) -> ToolAnswer:
        self._count += by
        return ToolAnswer(content=f"Counter is now {self._count}.", reward=-0.1)


class GuessNumber:
    """A tool that guesses a number: 1 for the number, less for another one the further away it
    is.
    """

    def __init__(self, min_val: int = 1, max_val: int = 100) -> None:
        self._lowest = int(min_val)
        self._highest = int(max_val)

    def reset(self, number: int) -> str:
        self._number = int(number)
        return f"Guess a number between {self._lowest} and {self._highest}."

    def guess(self, number: int) -> ToolAnswer:
        """Make a guess

        Args:
            number: Your guess
        """
        guessed = int(number)
        if guessed == self._number:
            return ToolAnswer(content=f"Correct! The number was {guessed}.", reward=1.0, done=True)
        closeness = 1.0 - abs(guessed - self._number) / max(1, self._highest - self._lowest)
        hint = "low. Try higher." if guessed < self._number else "high. Try lower."
        return ToolAnswer(content=f"{guessed} is too {hint}", reward=closeness)


class Wordle:
    """A game in text: a word of five letters in six guesses, each in <guess> tags, answered letter
    by letter.

    G stands under a letter in its place, Y under one that is elsewhere, X under one that is not
    there. A guess is worth 0.2 for each G and 0.1 for each Y, the word 1 and 1 over the number of
    turns, and 0.2 the share of turns with tags. After two moves in a row that are none the game is
    over. Every word of five letters is a guess.
    """

    def __init__(self, max_guesses: int = 6) -> None:
        self._max_guesses = int(max_guesses)
        self._guesses: list[str] = []
        self._num_turns = 0
        self._num_with_tags = 0
        self._num_bad = 0

    def reset(self, word: str) -> None:
        self._word = word.upper()

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_turns += 1
        found = re.findall(r"<guess>\s*\[?([^<\]]+)\]?\s*</guess>", text, re.IGNORECASE)
        self._num_with_tags += bool(found)
        guess = found[-1].strip().upper() if found else ""
        if len(guess) != 5 or not guess.isalpha() or guess in self._guesses:
            return self._bad_move()
        self._num_bad = 0
        self._guesses.append(guess)
        marks = _marks(guess, self._word)
        shown = f"{' '.join(guess)}\n{' '.join(marks)}\n"
        if guess == self._word:
            return (
                f"{shown}You guessed the word.",
                1.0 + 1.0 / self._num_turns + self._form(),
                True,
                {},
            )
        reward = _worth(marks) + self._form()
        num_left = self._max_guesses - len(self._guesses)
        if num_left <= 0:
            return f"{shown}No guesses are left. The word was {self._word}.", reward, True, {}
        return f"{shown}You have {num_left} guesses left.", reward, False, {}

    def _bad_move(self) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_bad += 1
        wanted = "give a word of five letters that you have not guessed yet, in <guess> tags"
        if self._num_bad < 2:
            return f"Invalid move: {wanted}.", 0.0, False, {}
        last = _worth(_marks(self._guesses[-1], self._word)) if self._guesses else 0.0
        return f"Invalid move: {wanted}.", last + self._form(), True, {}

    def _form(self) -> float:
        return 0.2 * self._num_with_tags / self._num_turns


def _worth(marks: str) -> float:
    return 0.2 * marks.count("G") + 0.1 * marks.count("Y")


def _marks(guess: str, word: str) -> str:
    """G, Y or X for each letter; a letter of the word answers for one letter of the guess alone."""
    left = [letter for letter, guessed in zip(word, guess, strict=True) if letter != guessed]
    marks = ""
    for letter, guessed in zip(word, guess, strict=True):
        if letter == guessed:
            marks += "G"
        elif guessed in left:
            left.remove(guessed)
            marks += "Y"
        else:
            marks += "X"
    return marks
