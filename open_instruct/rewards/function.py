"""Rewards as plain functions, as TRL has them: `def reward(completions, **columns)`.

Such a function returns a list of floats, one for each completion.
"""

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, ClassVar

from open_instruct.core.errors import InputError
from open_instruct.core.user_code import accepted_columns
from open_instruct.rewards.event_loop import await_entries
from open_instruct.rewards.verifier import Verifier

FILE_HEAD = (
    '"""The reward of this run, as it was given to fit()."""\n\nfrom __future__ import '
    "annotations\n\n\n"
)


class RewardFunction(Verifier):
    """A verifier that calls a function once for all completions of a prompt.

    The rewards may be any numbers. The function's arguments are lists with an entry for each
    completion: `completions`, `prompts`, and columns of the row by name. Completions and prompts
    are texts, or for a function in TRL's style lists of messages; see trial.py.
    """

    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    reads_row: ClassVar[bool] = True
    judges_groups: ClassVar[bool] = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__  # type: ignore[misc]
        self.function = function

    def judge_all(
        self,
        *,
        prompt: Any,
        completions: Sequence[Any],
        ground_truth: Mapping[str, Any],
        are_truncated: Sequence[bool],
    ) -> list[float]:
        """`ground_truth` is the row."""
        del are_truncated
        rewards = self.function(**self.build_arguments(prompt, completions, ground_truth))
        if rewards is None:
            raise TypeError("it returns None: return a list with one reward for each completion")
        return await_entries(rewards)

    def build_arguments(
        self, prompt: Any, completions: Sequence[Any], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The completions, the prompts and the row's columns, of these the ones it takes."""
        columns = {**row, "prompts": prompt}
        repeated_columns = {name: [value] * len(completions) for name, value in columns.items()}
        return accepted_columns(
            self.function, repeated_columns | {"completions": list(completions)}
        )


def write_function_file(function: Callable[..., Any]) -> str:
    """The text of a file that has this function and nothing else.

    The processes in which verifiers run load the function from it.

    Raises:
        InputError: its source cannot be read, or the function uses a name from outside of it.
    """
    name = getattr(function, "__name__", repr(function))
    remedy = f"write it to a file, and pass reward='mine.py:{name}'"
    try:
        text = FILE_HEAD + textwrap.dedent(inspect.getsource(function.__code__))
        code = compile(text, "reward.py", "exec")
    except (AttributeError, OSError, SyntaxError) as error:
        raise _source_error(f"{name} has no source of its own ({error}); {remedy}") from error
    if name not in code.co_names:
        raise _source_error(f"{name} is not what its source defines; {remedy}")
    missing = []
    for undefined_name in sorted(_find_undefined_names(code)):
        if undefined_name in function.__globals__ or not hasattr(builtins, undefined_name):
            missing.append(undefined_name)
    if missing:
        raise _source_error(
            f"{name} uses {', '.join(missing)}, which the function alone does not have: import or "
            f"define that inside it; or {remedy}"
        )
    return text


def _source_error(problem: str) -> InputError:
    return InputError(f"reward: {problem}", kind="own_code", flag="reward")


def _find_undefined_names(code: CodeType) -> set[str]:
    """The global names that the code of a file reads, at any depth, and does not define.

    Builtins are among them.
    """
    codes = [code]
    for part in codes:  # which grows meanwhile
        codes += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    defined_names = set()
    read = set()
    for part in codes:
        for instruction in dis.get_instructions(part):
            if instruction.opname == "STORE_NAME":
                defined_names.add(instruction.argval)
            elif instruction.opname in ("LOAD_NAME", "LOAD_GLOBAL"):
                read.add(instruction.argval)
    return {name for name in read - defined_names if not name.startswith("__")}
