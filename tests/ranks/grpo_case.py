"""Cases of GRPO's learner steps that the rank tests share, and how to run them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import free_ports

RunRanks = Callable[..., list[Any]]
Rows = list[dict[str, float]]

JOB = "tests.ranks.jobs.grpo_steps:run_each"
# Packed rows hold several completions; the last step has fewer than the four ranks of some tests.
COMPLETIONS = [13, 9, 3]


class GRPOCase:
    """A tiny model and the cases over it; `add` and then `run` all of them in the same ranks."""

    def __init__(self, folder: Path, **size: Any) -> None:
        self.folder = folder
        self.model = write_shallow_model(folder / "model", family="olmo2", **size)

    def case(
        self, name: str, *, completions: list[int] = COMPLETIONS, flags: dict[str, Any], **job: Any
    ) -> dict:
        out = self.folder / name
        out.mkdir()
        settings: dict[str, Any] = {
            "model_name_or_path": self.model,
            "dataset_mixer_list": ["prompts.jsonl", "1.0"],
            "output_dir": out,
            "max_prompt_token_length": 24,
            "response_length": 24,
            "pack_length": 120,
            "temperature": 0.7,
            "param_dtype": "float32",
            "learning_rate": 1e-4,
            "warmup_ratio": 0.0,
        } | flags
        words: list[str] = []
        for flag, value in settings.items():
            words.append(f"--{flag}")
            words.extend(str(word) for word in (value if isinstance(value, list) else [value]))
        return {"flags": words, "completions": completions} | job

    def run(
        self, run_ranks: RunRanks, num_ranks: int, cases: dict[str, dict], *, job: str = JOB
    ) -> dict[str, Rows]:
        results = run_ranks(
            num_ranks, job, cases=list(cases.values()), ports=free_ports(len(cases))
        )
        for rank in range(1, num_ranks):
            for ours, first in zip(results[rank], results[0], strict=True):
                # Every rank tells the same, but for what tensor-parallel ranks measure of
                # themselves.
                assert [_told(row) for row in ours] == [_told(row) for row in first]
        return dict(zip(cases, results[0], strict=True))


def _told(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if is_computed(name)}


def is_computed(name: str) -> bool:
    """Whether a metric is the same on every rank, and in every run.

    Routers of context ranks see parts of rows.
    """
    return not name.startswith(("peak_memory_gib", "has_moved", "router/", "time/"))
