"""One completion, as a verifier pool scores it."""

from typing import Literal

from open_instruct.core.records import Check, Completion
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.verdict import Outcome


def completion_of(text: str, *, is_truncated: bool = False) -> Completion:
    reason: Literal["stop", "length"] = "length" if is_truncated else "stop"
    return Completion(
        text=text, token_ids=(7,), logprobs=(-0.5,), versions=(0,), finish_reason=reason, seed=0
    )


def score(
    pool: VerifierPool, check: Check, text: str, *, prompt: str = "", is_truncated: bool = False
) -> Outcome:
    (outcome,) = pool.score(check, prompt, [completion_of(text, is_truncated=is_truncated)])
    return outcome
