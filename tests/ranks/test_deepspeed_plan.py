"""What the planner says of DeepSpeed is about what its engine holds, and the sums of what it
sends.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.layout import find_layout
from open_instruct.planning.exchanges import axis_groups
from open_instruct.planning.memory.parts import BUFFERS
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.subject.build_workload import build_shape, build_workload
from open_instruct.training.deepspeed import planned_memory, planned_traffic
from open_instruct.training.deepspeed.planned import DeepSpeedPlanner
from open_instruct.training.deepspeed.planned_memory import ZeroMemoryModel
from open_instruct.training.deepspeed.planned_traffic import plan_exchanges
from open_instruct.training.deepspeed.settings import effective_zpg
from tests.ranks.jobs.deepspeed_runs import OF_LARGE_MODELS
from tests.ranks.launch import run_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_traffic import words_of
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

NUM_RANKS, NUM_TOKENS, NUM_MICROBATCHES = 4, 64, 2
# Of a weight sync, of adapters alone a hundredth: some tensors travel in pieces.
BUCKET_BYTES = 100_000
FEW_BYTES = 256  # of metrics, norms and flags, which no plan counts
FILLED_UP = 0.001  # of the state: counters, and norms that ranks split with their heads
# Of the state of stage 2 in float32: whole gradients of what reaches into a rank's part, at most.
TOUCHED = 0.2
# Of weights that stage 3 gathers: a tied matrix twice in a pass, frozen ones not always.
GATHERED = 0.25
# Of what ranks that split matrices bring together: where there are few, logits are not computed
# again.
LOGITS = 0.5
SQUARES = 0.02  # of what they add up: the squares of a norm over all heads

# No vocabulary but the tied one divides by the ranks; of three layers the one in the middle is
# between others.
MODELS: dict[str, dict[str, Any]] = {
    "olmo2": {"family": "olmo2", "vocab_size": 515, "tie": False, "layers": 2},
    "tied": {"family": "qwen3", "vocab_size": 512, "tie": True, "layers": 3},
    "llama": {"family": "llama", "vocab_size": 514, "tie": False, "layers": 2},
}
FLOAT32 = {"param_dtype": "float32"}
# What comes of the command's default; of others it is off.
FULL = {"activation_checkpointing": "full"}
DECAYS = {"weight_decay": 0.1}
ON_HOST = {"adam_offload": True}
LORA = {"use_lora": True, "lora_r": 6}
SPLIT = {"tensor_parallel_degree": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    num_ranks: int
    flags: dict[str, Any]
    sharing: dict[str, int] = field(default_factory=dict)


def of_stage(
    stage: int, model: str, num_ranks: int, *flags: dict[str, Any], **sharing: int
) -> Case:
    together = {name: value for each in flags for name, value in each.items()}
    given = {
        "backend": "deepspeed",
        "deepspeed_stage": stage,
        "activation_checkpointing": "none",
    } | together
    return Case(model=model, num_ranks=num_ranks, flags=given, sharing=sharing)


CASES = {
    "0": of_stage(0, "olmo2", 4, FLOAT32),
    "1": of_stage(1, "olmo2", 4, DECAYS),
    "1 in parts, on the host": of_stage(1, "tied", 4, ON_HOST, reduce_bucket_size=50_000),
    "2": of_stage(2, "llama", 4, DECAYS),
    "2 in parts, float32, on the host": of_stage(
        2, "olmo2", 4, FLOAT32, ON_HOST, reduce_bucket_size=70_000
    ),
    "3 in parts, again": of_stage(3, "tied", 4, FLOAT32, FULL, DECAYS, **OF_LARGE_MODELS),
    "3, copies nearby": of_stage(3, "olmo2", 4, {"deepspeed_zpg": 2}, **OF_LARGE_MODELS),
    "3, all on the host": of_stage(3, "llama", 4, ON_HOST, {"offload": True}, **OF_LARGE_MODELS),
    # DeepSpeed numbers modules through the life of a process: those of all ranks come before those
    # of two.
    "0, adapters": of_stage(0, "olmo2", 4, FLOAT32, LORA),
    "1, adapters": of_stage(1, "tied", 4, LORA, DECAYS),
    "3, adapters": of_stage(3, "llama", 4, FLOAT32, DECAYS, LORA, **OF_LARGE_MODELS),
    "3, adapters, copies nearby": of_stage(
        3, "tied", 4, LORA, {"deepspeed_zpg": 2}, FULL, **OF_LARGE_MODELS
    ),
    "1, matrices split": of_stage(1, "llama", 4, SPLIT, DECAYS),
    "2, matrices split, in parts": of_stage(
        2, "tied", 4, SPLIT, FLOAT32, FULL, reduce_bucket_size=30_000
    ),
    "3, matrices split": of_stage(3, "llama", 4, SPLIT, FLOAT32, FULL, **OF_LARGE_MODELS),
    "1 of 2 ranks, float32": of_stage(1, "tied", 2, FLOAT32),
    "2 of 2 ranks, in parts": of_stage(2, "tied", 2, reduce_bucket_size=70_000),
    "2 of 2 ranks, on the host": of_stage(2, "llama", 2, ON_HOST),
    "3 of 2 ranks, in parts": of_stage(3, "llama", 2, **OF_LARGE_MODELS),
    "3 of 2 ranks, again": of_stage(3, "olmo2", 2, FULL, ON_HOST, **OF_LARGE_MODELS),
    "3 of 2 ranks, rows split": of_stage(
        3, "llama", 2, {"sequence_parallel_size": 2}, FULL, **OF_LARGE_MODELS
    ),
    "2 of 2 ranks, matrices split": of_stage(2, "olmo2", 2, SPLIT, ON_HOST),
    "3 of 2 ranks, matrices split": of_stage(3, "tied", 2, SPLIT, **OF_LARGE_MODELS),
    "2 of 2 ranks, adapters in parts": of_stage(
        2, "olmo2", 2, FLOAT32, ON_HOST, LORA, reduce_bucket_size=2_000
    ),
    "3 of 2 ranks, adapters, again": of_stage(3, "olmo2", 2, LORA, FULL, **OF_LARGE_MODELS),
    **{f"{stage} of 1 rank": of_stage(stage, "olmo2", 1, FLOAT32) for stage in range(4)},
}


class Measured:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {
            name: write_shallow_model(folder / name, **given) for name, given in MODELS.items()
        }

    @cached_property
    def by_case(self) -> dict[str, list[dict[str, Any]]]:
        """What the ranks of every case measured: all cases one after the other in the same four."""
        jobs = []
        for name, case in CASES.items():
            (self.folder / name).mkdir()
            job = {"flags": self.words(name), "sharing": case.sharing, "world_size": case.num_ranks}
            job |= {
                "num_tokens": NUM_TOKENS,
                "num_microbatches": NUM_MICROBATCHES,
                "bucket_bytes": BUCKET_BYTES,
            }
            jobs.append(job)
        target, ports = "tests.ranks.jobs.deepspeed_plan:measure_each", free_ports(len(jobs))
        of_ranks = run_ranks(NUM_RANKS, target, cases=jobs, ports=ports)
        return {
            name: [found for found in each if found]
            for name, each in zip(CASES, zip(*of_ranks, strict=True), strict=True)
        }

    def words(self, name: str) -> list[str]:
        case = CASES[name]
        flags = {
            "model_name_or_path": self.models[case.model],
            "output_dir": self.folder / name,
            "learning_rate": 1e-4,
        }
        flags |= {"mixer_list": "rows.jsonl 1.0", "max_seq_length": NUM_TOKENS} | case.flags
        return [word for flag, value in flags.items() for word in (f"--{flag}", *words_of(value))]

    def planned(self, name: str) -> ZeroMemoryModel:
        """Of a run whose engines are sent the weights."""
        case, config = CASES[name], parse_run(load_objective("dpo").config_class, self.words(name))
        shape = build_shape(config, str(self.models[case.model]))
        layout = find_layout(config.parallel, [case.num_ranks], config.backend)
        workload = replace(
            build_workload(config, shape, layout),
            tokens_per_microbatch=NUM_TOKENS,
            label_tokens_per_microbatch=NUM_TOKENS // 2,
            num_microbatches=NUM_MICROBATCHES,
            on_cuda=False,
            num_engines=1,
        )
        return DeepSpeedPlanner(config.parallel).memory_model(shape, layout, workload)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    return Measured(tmp_path_factory.mktemp("plan"))


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of a case, planned with what DeepSpeed is told in it."""
    sharing = CASES[request.param].sharing
    bucket = sharing.get("reduce_bucket_size", planned_memory.BUCKET)
    monkeypatch.setattr(planned_memory, "BUCKET", bucket)
    at_once = sharing.get("stage3_max_live_parameters", planned_memory.MOST_AT_ONCE)
    for module in (planned_memory, planned_traffic):
        monkeypatch.setattr(module, "MOST_AT_ONCE", at_once)
    small = sharing.get("stage3_param_persistence_threshold", planned_memory.SMALL)
    monkeypatch.setattr(planned_memory, "SMALL", small)
    return str(request.param)


def test_plan_counts_the_bytes_that_are_there_before_the_step(
    measured: Measured, name: str
) -> None:
    """State, gradients, the buckets that wait and second copies: never more than planned, and not
    much less.
    """
    planned = measured.planned(name)
    expected = sum(planned.state_bytes()) + planned.resident_parts(0)[BUFFERS]
    expected += planned.passes.bucket_bytes if planned.stage == 1 else 0
    if effective_zpg(planned.flags) > 1:
        expected += planned.item_bytes * sum(planned.sizes.values()) // effective_zpg(planned.flags)
    least = 1 - (TOUCHED if planned.stage == 2 and planned.item_bytes == 4 else FILLED_UP)
    for rank, found in enumerate(measured.by_case[name]):
        assert found["between"] <= found["with_gradients"]
        assert least <= found["with_gradients"] / expected < 1 + FILLED_UP, f"rank {rank}"


def test_sums_of_what_is_exchanged(measured: Measured, name: str) -> None:
    """By collective and group, in a step and to add adapters to what is sent.

    A group of one sends nothing.
    """
    planned, splits = measured.planned(name), "tensor_parallel_degree" in CASES[name].flags
    gathers_more = planned.stage == 3 and (
        planned.shape.is_tied or planned.shape.adapters is not None
    )
    for rank, found in enumerate(measured.by_case[name]):
        sums: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for exchange in plan_exchanges(planned):
            (group,) = (
                group for group in axis_groups(planned.layout, exchange.axis) if rank in group
            )
            first = group.index(rank) // exchange.group_size * exchange.group_size
            sums[exchange.collective, group[first : first + exchange.group_size]] += (
                exchange.num_bytes
            )
        issued: Counter[tuple[str, tuple[int, ...]]] = Counter()
        for collective, num_bytes, neighbours, num_calls in (*found["step"], *found["merging"]):
            issued[collective, tuple(neighbours)] += num_bytes * num_calls
        for kind in (each for each in issued | sums if len(each[1]) > 1):
            less, more = (LOGITS, SQUARES) if splits else (0, 0)
            if gathers_more and kind[0] == "all_gather":
                less, more = GATHERED, GATHERED
            least, most = (1 - less) * sums[kind] - FEW_BYTES, (1 + more) * sums[kind] + FEW_BYTES
            assert least <= issued[kind] <= most, f"rank {rank}, {kind}"


def test_plan_counts_the_bytes_that_engines_are_sent(measured: Measured, name: str) -> None:
    """All of it, in buckets; of adapters also alone."""
    planned, found = measured.planned(name), measured.by_case[name][0]
    has_adapters = planned.shape.adapters is not None
    assert ("sync of adapters" in found) is has_adapters
    for part in ("sync", "sync of adapters")[: 1 + has_adapters]:
        bucket_bytes = BUCKET_BYTES if part == "sync" else BUCKET_BYTES // 100
        workload = replace(
            planned.workload, sync_bucket_bytes=bucket_bytes, sends_adapter=part != "sync"
        )
        buckets = sync_buckets(planned.shape, planned.layout, workload)
        messages = [row[1] for row in found[part] for _ in range(row[2])]
        assert sum(whole for _, whole in buckets) == sum(messages)
