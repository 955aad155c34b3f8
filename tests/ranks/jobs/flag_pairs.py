"""Runs of any objective on either backend, one after the other in the same ranks, and how each
ended.
"""

import gc
import json
import math
import os
import traceback
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.process import stop_process
from open_instruct.train import train
from open_instruct.training import export, loop  # noqa: F401
from tests.ranks.flag_pairs import parse_flags
from tests.ranks.jobs.grpo_steps import Learner

NUM_STEPS = 2
COMPLETIONS = 6
LAST_CHARACTERS = 1500


def run_each(cases: list[dict[str, Any]], ports: list[int]) -> list[str]:
    """Of each case "done", "refused: KIND FLAG", or the end of a traceback."""
    return [run_case(port=port, **case) for case, port in zip(cases, ports, strict=True)]


def run_case(*, port: int, objective: str, words: list[str], folder: str) -> str:
    os.environ["MASTER_PORT"] = str(port)
    try:
        losses = (
            take_grpo_steps(words)
            if objective == "grpo"
            else take_steps(objective, words, Path(folder))
        )
        is_sound = len(losses) == NUM_STEPS and all(map(math.isfinite, losses))
        return "done" if is_sound else f"losses {losses}"
    except InputError as error:
        return f"refused: {error.kind} {error.flag}: {error}"
    except BaseException:
        return traceback.format_exc()[-LAST_CHARACTERS:]
    finally:
        stop_process()
        gc.collect()  # a case that failed holds its model in a circle


def take_steps(objective: str, words: list[str], folder: Path) -> list[float]:
    assert train(parse_flags(objective, words), objective=load_objective(objective)) == 0
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def take_grpo_steps(words: list[str]) -> list[float]:
    learner = Learner(words, num_steps=NUM_STEPS)
    return [learner.take_step(COMPLETIONS)["loss"] for _ in range(NUM_STEPS)]
