"""Offline runs of any objective, then learner steps of GRPO, all in the same ranks."""

from typing import Any

from tests.ranks.jobs import deepspeed_grpo, deepspeed_runs


def run(
    runs: list[dict[str, Any]], steps: list[dict[str, Any]], ports: list[int]
) -> tuple[list[Any], list[list[dict[str, float]]]]:
    """What each of `runs` had to tell, and the metrics of each case of `steps`; each has a port of
    its own.
    """
    said = deepspeed_runs.run(runs, ports[: len(runs)])
    return said, deepspeed_grpo.run_each(cases=steps, ports=ports[len(runs) :])
