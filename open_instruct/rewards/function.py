"""A reward as a plain function:

`def reward(completions, **columns) -> list[float]`, as TRL has them.
"""

import builtins
import dis
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import CodeType
from typing import Any, ClassVar

from open_instruct.core.errors import InputError
from open_instruct.core.user_code import taken
from open_instruct.rewards.event_loop import awaited
from open_instruct.rewards.verifier import Verifier

ABOVE = (
    '"""The reward of this run, as it was given to fit()."""\n\nfrom __future__ import '
    "annotations\n\n\n"
)


class RewardFunction(Verifier):
    """Calls the function once for all completions of a prompt. The rewards may be any numbers.

    Its arguments are lists with an entry for each completion: `completions`, `prompts`, and columns
    of the row by name. Completions and prompts are texts, or for a function in TRL's style lists of
    messages; see trial.py.
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
        rewards = self.function(**self.arguments(prompt, completions, ground_truth))
        if rewards is None:
            raise TypeError("it returns None: return a list with one reward for each completion")
        return awaited(rewards)

    def arguments(
        self, prompt: Any, completions: Sequence[Any], row: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the function is called with: of completions, prompts and the row's columns those
        that it takes.
        """
        repeated = {
            name: [value] * len(completions) for name, value in {**row, "prompts": prompt}.items()
        }
        return taken(self.function, repeated | {"completions": list(completions)})


def file_with(function: Callable[..., Any]) -> str:
    """The text of a file that has this function and nothing else, for the processes in which
    verifiers run.

    Raises:
        InputError: its source cannot be read, or the function uses a name from outside of it.
    """
    name = getattr(function, "__name__", repr(function))
    way_out = f"write it to a file, and pass reward='mine.py:{name}'"
    try:
        text = ABOVE + textwrap.dedent(inspect.getsource(function.__code__))
        file = compile(text, "reward.py", "exec")
    except (AttributeError, OSError, SyntaxError) as error:
        raise InputError(
            f"reward: {name} has no source of its own ({error}); {way_out}",
            kind="own_code",
            flag="reward",
        ) from error
    if name not in file.co_names:
        raise InputError(
            f"reward: {name} is not what its source defines; {way_out}",
            kind="own_code",
            flag="reward",
        )
    own = function.__globals__
    if missing := sorted(
        each for each in _names_read(file) if each in own or not hasattr(builtins, each)
    ):
        raise InputError(
            f"reward: {name} uses {', '.join(missing)}, which the function alone does not have: "
            f"import or define that inside it; or {way_out}",
            kind="own_code",
            flag="reward",
        )
    return text


def _names_read(file: CodeType) -> set[str]:
    """The global names that the code of a file reads, at any depth, and does not define; builtins
    are among them.
    """
    codes = [file]
    for code in codes:
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
    done = [(each.opname, each.argval) for code in codes for each in dis.get_instructions(code)]
    defined = {name for what, name in done if what == "STORE_NAME"}
    read = {name for what, name in done if what in ("LOAD_NAME", "LOAD_GLOBAL")}
    return {name for name in read - defined if not name.startswith("__")}
