"""What the processes of verifiers do: they load them, and score one completion after another."""

import json
import traceback
from typing import Any

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.verifiers.event_loop import awaited
from open_instruct.verifiers.registry import known_verifiers
from open_instruct.verifiers.verifier import Verifier, said, without_key
from open_instruct.wording import counted

MAX_TRACEBACK_CHARACTERS = 4000
VERIFIERS: dict[str, Verifier] = {}  # of this process


def answered(*, flags: dict[str, Any] | None = None, verifier: str = "", **asked: Any) -> dict[str, str]:
    """The answer to a request of `VerifierPool`: it sends the flags first, and then what is to be scored."""
    told: dict[str, Any] = {}
    if flags is None:
        told = verdicts(VERIFIERS[verifier], **asked)
    else:
        try:
            VERIFIERS.update(known_verifiers(RewardSection(**flags)))
            for each in VERIFIERS.values():
                each.load()
        except BaseException as error:
            told = _failure(error)
    return {"status": "done", "value": json.dumps(told)}


def verdicts(verifier: Verifier, **asked: Any) -> dict[str, Any]:
    """`{"scores": […]}`, or `{"problem": …, "traceback": …}` where the verifier raised, or for one of the scores.

    `asked` are the arguments of `Verifier.judge_all`.
    """
    try:
        scores = awaited(verifier.judge_all(**asked))
        if len(scores) != (num_asked := len(asked["completions"])):
            raise ValueError(
                f"{counted(len(scores), 'reward')} for {counted(num_asked, 'completion')}: return one for each"
            )
        return {"scores": [_failure(each) if isinstance(each, BaseException) else float(each) for each in scores]}
    except BaseException as error:  # foreign code, which may raise anything, and exit
        return _failure(error)


def _failure(error: BaseException) -> dict[str, str]:
    shown = without_key("".join(traceback.format_exception(error)))
    return {"problem": said(error), "traceback": shown[-MAX_TRACEBACK_CHARACTERS:]}
