"""What an engine answers: how it is, and which completions are done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from open_instruct.records import Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """How an engine is at one moment.

    `num_running` requests are being generated, `num_waiting` have not been begun. `num_generated_tokens` counts those
    of finished completions. `seconds_in_step` is how long the present step has taken so far, 0 between two steps.
    """

    pid: int
    version: int
    num_running: int
    num_waiting: int
    num_generated_tokens: int
    seconds_in_step: float
    is_updating: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAnswers:
    """What has come out since the last poll, by the key each request was begun under.

    Example: `EngineAnswers(health=…, completions={7: Completion(…)}, refused={8: "the prompt has 90 tokens, …"})`.
    """

    health: EngineHealth
    completions: Mapping[int, Completion]
    refused: Mapping[int, str]
