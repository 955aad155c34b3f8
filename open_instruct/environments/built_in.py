"""The built-in environments: a calculator, Python, and the games of open-instruct's launches."""

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
    """A tool that computes; the row's verifier judges the policy's last reply."""

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: numbers, brackets and + - * / // %, such as (3 + 4) * 12
        """
        if len(expression) > MAX_EXPRESSION:
            raise ValueError(f"an expression has at most {MAX_EXPRESSION} characters")
        value = _evaluate(ast.parse(expression.strip(), mode="eval").body)
        return str(int(value)) if float(value).is_integer() else str(value)


class Python:
    """A tool that runs Python in the sandbox.

    Names stay from one call to the next, until a call takes too long or the interpreter dies.
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
            if self._interpreter is None:
                self._interpreter = SANDBOX.interpreter(cpu_s=MAX_PYTHON_S, stderr=True)
            if self._is_closed:  # meanwhile
                self._interpreter.close()
            ran = self._interpreter.run(code, timeout_s=self._timeout_s)
        except (RunError, OSError) as error:  # of this machine
            raise EnvironmentFault(str(error)) from error
        text = ran.output
        if ran.problem:
            text += ran.problem
        elif ran.value != "None":
            text += ran.value
        if ran.status in ("late", "died"):
            self._interpreter.close()
            self._interpreter = None
            reason = "died, or printed too much"
            if ran.status == "late":
                reason = f"took more than {self._timeout_s:g} s"
            text += f"\nThe interpreter {reason}. It is started anew: its names are gone."
        if len(text) <= MAX_SHOWN:
            return text
        return f"{text[: MAX_SHOWN // 2]}\n…\n{text[-MAX_SHOWN // 2 :]}"

    def close(self) -> None:
        self._is_closed = True
        if self._interpreter is not None:
            self._interpreter.close()


def _evaluate(node: ast.AST) -> float:
    value: float
    if (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    ):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate(node.left), _evaluate(node.right))
    elif isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate(node.operand))
    else:
        raise ValueError(f"{ast.unparse(node)!r} is no arithmetic of numbers")
    if abs(value) > MAX_NUMBER:
        raise ValueError(f"numbers are at most {MAX_NUMBER:g}")
    return value


class Counter:
    """Tools that bring a counter to a target.

    The target is worth 1, another value -0.5, and every step -0.1.
    """

    def reset(self, target: int = 5) -> str:
        self._target = int(target)
        self._count = 0
        return f"Counter is at 0. Reach {self._target} to win."

    def increment(self) -> ToolAnswer:
        """Increment the counter by 1"""
        return self._move(1)

    def decrement(self) -> ToolAnswer:
        """Decrement the counter by 1"""
        return self._move(-1)

    def submit(self) -> ToolAnswer:
        """Submit current value as answer"""
        if self._count == self._target:
            text = f"Correct: the counter is at {self._count}."
            return ToolAnswer(content=text, reward=1.0, done=True)
        text = f"Wrong: {self._count} is not {self._target}."
        return ToolAnswer(content=text, reward=-0.5, done=True)

    def _move(self, by: int) -> ToolAnswer:
        self._count += by
        return ToolAnswer(content=f"Counter is now {self._count}.", reward=-0.1)


class GuessNumber:
    """A tool that guesses a number, which is worth 1; other numbers are worth less by distance."""

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
        number = int(number)
        if number == self._number:
            return ToolAnswer(content=f"Correct! The number was {number}.", reward=1.0, done=True)
        closeness = 1.0 - abs(number - self._number) / max(1, self._highest - self._lowest)
        hint = "low. Try higher." if number < self._number else "high. Try lower."
        return ToolAnswer(content=f"{number} is too {hint}", reward=closeness)


class Wordle:
    """A game in text: find a word of five letters in six guesses, each in <guess> tags.

    The answer has G under a letter in its place, Y under one that is elsewhere, and X under one
    that is not there. A guess is worth 0.2 for each G and 0.1 for each Y. The word is worth 1, and
    1 over the number of turns. The share of turns with tags is worth 0.2 in all. Two invalid moves
    in a row end the game. Every word of five letters is a valid guess.
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
        guesses = re.findall(r"<guess>\s*\[?([^<\]]+)\]?\s*</guess>", text, re.IGNORECASE)
        guess = ""
        if guesses:
            self._num_with_tags += 1
            guess = guesses[-1].strip().upper()
        if len(guess) != 5 or not guess.isalpha() or guess in self._guesses:
            return self._answer_invalid()
        self._num_bad = 0
        self._guesses.append(guess)
        marks = _mark_letters(guess, self._word)
        feedback = f"{' '.join(guess)}\n{' '.join(marks)}\n"
        if guess == self._word:
            reward = 1.0 + 1.0 / self._num_turns + self._score_form()
            return f"{feedback}You guessed the word.", reward, True, {}
        reward = _score_marks(marks) + self._score_form()
        num_left = self._max_guesses - len(self._guesses)
        if num_left <= 0:
            return f"{feedback}No guesses are left. The word was {self._word}.", reward, True, {}
        return f"{feedback}You have {num_left} guesses left.", reward, False, {}

    def _answer_invalid(self) -> tuple[str, float, bool, dict[str, Any]]:
        self._num_bad += 1
        instruction = "give a word of five letters that you have not guessed yet, in <guess> tags"
        if self._num_bad < 2:
            return f"Invalid move: {instruction}.", 0.0, False, {}
        last = 0.0
        if self._guesses:
            last = _score_marks(_mark_letters(self._guesses[-1], self._word))
        return f"Invalid move: {instruction}.", last + self._score_form(), True, {}

    def _score_form(self) -> float:
        return 0.2 * self._num_with_tags / self._num_turns


def _score_marks(marks: str) -> float:
    return 0.2 * marks.count("G") + 0.1 * marks.count("Y")


def _mark_letters(guess: str, word: str) -> str:
    """G, Y or X for each letter of the guess; a letter of the word counts for one of them only."""
    pairs = list(zip(word, guess, strict=True))
    unmatched = [letter for letter, guess_letter in pairs if letter != guess_letter]
    marks = ""
    for letter, guess_letter in pairs:
        if letter == guess_letter:
            marks += "G"
        elif guess_letter in unmatched:
            unmatched.remove(guess_letter)
            marks += "Y"
        else:
            marks += "X"
    return marks
