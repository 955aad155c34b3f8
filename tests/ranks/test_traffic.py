"""The collectives that the planner predicts for a step are those that the train modules issue: each
call, each byte.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.layout import find_layout
from open_instruct.planning.exchanges import Exchange, axis_groups
from open_instruct.planning.memory import head
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.subject.build_workload import build_shape, build_workload
from open_instruct.planning.subject.workload import Scoring
from open_instruct.planning.traffic import (
    merging_traffic,
    scoring_pass,
    traffic_per_step,
    weight_sync_traffic,
)
from tests.ranks.launch import run_ranks
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import free_ports

pytestmark = pytest.mark.extended

JOBS = "tests.ranks.jobs.traffic"
NUM_TOKENS = 64
MOST_METRIC_BYTES = 100_000
MOST_SCORE_BYTES = 1024
SYNC_BUCKET_BYTES = 100_000  # less than the embeddings, which travel in pieces
ADAPTER_BUCKET_BYTES = 1_000  # the same of the largest halves of adapters

# The first vocabulary divides by neither 2 nor 4: there the first rank holds more than the others.
# What a layer adds between two others is seen of each kind of layout in one case: every layer takes
# its time.
MODELS: dict[str, dict[str, Any]] = {
    "untied": {"family": "olmo2", "vocab_size": 515, "tie": False, "layers": 2},
    "tied": {"family": "qwen3", "vocab_size": 512, "tie": True, "layers": 2},
    "deep": {"family": "qwen3", "vocab_size": 512, "tie": True, "layers": 3},
    "experts": {"family": "qwen3_moe", "vocab_size": 512, "tie": False, "layers": 2},
    "plain": {"family": "llama", "vocab_size": 514, "tie": False, "layers": 2},
    "teacher": {"family": "olmo3", "vocab_size": 512, "tie": False, "layers": 2},
    "remembers": {"family": "olmo_hybrid", "vocab_size": 512, "tie": False, "layers": 2},
    "every expert": {"family": "qwen3_moe", "vocab_size": 512, "tie": False, "layers": 2},
}

HSDP = {"fsdp_shard_degree": 2}
SPLIT = {"expert_parallel_degree": 2}
CONTEXT = {"context_parallel_degree": 2}
TENSOR = {"tensor_parallel_degree": 2}
TEACHER = {"teacher_model_name_or_path": "teacher"}
FULL = {"activation_checkpointing": "full"}
ATTENTION = {
    "activation_checkpointing": "selected_modules",
    "activation_checkpointing_modules": "blocks.*.attention",
}
LAST = {"gradient_reduction": "last"}
MUON = {"optimizer": "muon"}
GAE = {"advantages": "gae"}
LORA = {"use_lora": "true", "lora_r": 6}
ALONE = {"lora_sync": "adapter"}
MLP = {
    "activation_checkpointing": "selected_modules",
    "activation_checkpointing_modules": "blocks.*.feed_forward",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step of `num_microbatches` microbatches (for GRPO: of each update) on every data-parallel
    rank.

    In a pretended world, one process issues what rank 0 would, to a group that sends nothing, and
    as it would on CUDA.
    """

    model: str
    num_ranks: int
    flags: dict[str, Any]
    algorithm: str = "dpo"
    num_microbatches: int = 2
    logits_per_chunk: int | None = None
    is_pretended: bool = False

    @property
    def processes(self) -> tuple[int, bool]:
        """How many count it, and whether they pretend to be more: the cases of as many run in the
        same.
        """
        return 1 if self.is_pretended else self.num_ranks, self.is_pretended


# Each layout with one of the models, and so that both meet whole weights, shards and split
# matrices.
CASES: dict[str, Case] = {
    f"{name} {model}": Case(model=model, num_ranks=num_ranks, flags=flags)
    for name, model, num_ranks, flags in (
        ("hsdp 2x2", "untied", 4, HSDP),
        ("fsdp 4", "deep", 4, {"fsdp_shard_degree": 4}),
        ("replicas 4", "untied", 4, {"fsdp_shard_degree": 1}),
        ("tensor 2", "untied", 2, TENSOR),
        ("tensor 2", "deep", 2, TENSOR),
        ("muon, fsdp 2 x tensor 2", "untied", 4, TENSOR | MUON),
        ("fsdp 2 x tensor 2, checkpointing", "deep", 4, TENSOR | FULL),
    )
} | {
    "checkpointing": Case(model="tied", num_ranks=4, flags=HSDP | FULL),
    "context 2": Case(model="plain", num_ranks=2, flags=CONTEXT),
    "context 2, attention again": Case(model="untied", num_ranks=2, flags=CONTEXT | ATTENTION),
    "context 2, what is remembered": Case(
        model="remembers", num_ranks=2, flags=CONTEXT | ATTENTION
    ),
    "tensor 2, what is remembered": Case(model="remembers", num_ranks=2, flags=TENSOR | FULL),
    "fsdp 2 x context 2, checkpointing": Case(model="deep", num_ranks=4, flags=CONTEXT | FULL),
    "grpo replicas 2 x context 2": Case(
        model="plain",
        num_ranks=4,
        algorithm="grpo",
        flags=CONTEXT | {"fsdp_shard_degree": 1, "beta": 0.05, "record_entropy": True},
    ),
    "muon, hsdp 2x2": Case(model="untied", num_ranks=4, flags=HSDP | MUON),
    "tensor 2 without query-key norms": Case(model="plain", num_ranks=2, flags=TENSOR),
    "attention again, logits in chunks": Case(
        model="tied", num_ranks=2, flags=TENSOR | ATTENTION, logits_per_chunk=10
    ),
    "feed-forward again": Case(model="untied", num_ranks=2, flags=TENSOR | MLP),
    "replicas 2 x tensor 2, float32": Case(
        model="plain",
        num_ranks=4,
        flags=TENSOR
        | FULL
        | {"fsdp_shard_degree": 1, "param_dtype": "float32", "optimizer": "skip_step_adamw"},
    ),
    "hsdp 2x2, reduced last": Case(
        model="untied", num_ranks=4, flags=HSDP | LAST, num_microbatches=3
    ),
    "fsdp 2 x tensor 2, reduced last": Case(model="untied", num_ranks=4, flags=TENSOR | LAST),
    "tensor 2, float32, reduced last": Case(
        model="tied", num_ranks=2, flags=TENSOR | LAST | {"param_dtype": "float32"}
    ),
    "tensor 2, one microbatch, reduced last": Case(
        model="tied", num_ranks=2, flags=TENSOR | LAST, num_microbatches=1
    ),
    "grpo fsdp 4, two updates, reduced last": Case(
        model="tied",
        num_ranks=4,
        algorithm="grpo",
        flags=LAST | {"fsdp_shard_degree": 4, "num_mini_batches": 2},
    ),
    "grpo fsdp 4, experts": Case(
        model="experts", num_ranks=4, algorithm="grpo", flags={"fsdp_shard_degree": 4}
    ),
    "grpo hsdp 2x2": Case(
        model="untied", num_ranks=4, algorithm="grpo", flags=HSDP | {"beta": 0.05}
    ),
    "grpo fsdp 4, six updates": Case(
        model="deep",
        num_ranks=4,
        algorithm="grpo",
        flags={"fsdp_shard_degree": 4, "num_mini_batches": 2, "num_epochs": 3},
    ),
    "grpo fsdp 2 x tensor 2": Case(
        model="tied",
        num_ranks=4,
        algorithm="grpo",
        flags=TENSOR | {"beta": 0.05, "record_entropy": True},
    ),
    "grpo with a teacher, chosen tokens": Case(
        model="tied",
        num_ranks=4,
        algorithm="grpo",
        flags=TENSOR | TEACHER | {"top_entropy_quantile": 0.5, "num_mini_batches": 2, "beta": 0.05},
    ),
    "grpo with a critic, hsdp 2x2": Case(
        model="tied", num_ranks=4, algorithm="grpo", flags=HSDP | FULL | GAE
    ),
    "grpo with a critic, context 2": Case(
        model="plain",
        num_ranks=2,
        algorithm="grpo",
        flags=CONTEXT | GAE | {"num_mini_batches": 2, "num_epochs": 2},
    ),
    "experts of 2": Case(model="every expert", num_ranks=2, flags=SPLIT | MLP),
    "experts of 2, replicas": Case(model="every expert", num_ranks=4, flags=HSDP | SPLIT),
    "grpo experts of 4": Case(
        model="every expert",
        num_ranks=4,
        algorithm="grpo",
        flags={"expert_parallel_degree": 4, "beta": 0.05},
    ),
    "grpo experts of 2, replicas": Case(
        model="every expert", num_ranks=4, algorithm="grpo", flags=HSDP | SPLIT
    ),
    "updated reference": Case(
        model="untied", num_ranks=4, flags=HSDP | {"ref_policy_update_freq": 1}
    ),
    "updated reference, weighed pairs": Case(
        model="tied",
        num_ranks=2,
        flags=TENSOR | {"loss_type": "wpo", "weight_alignment": True, "ref_policy_update_freq": 1},
    ),
    "teacher's logits, hsdp 2x2": Case(
        model="tied", num_ranks=4, algorithm="distill", flags=HSDP | TEACHER
    ),
    "teacher's logits, tensor 2": Case(
        model="deep", num_ranks=2, algorithm="distill", flags=TENSOR | TEACHER
    ),
    "teacher's logits, context 2": Case(
        model="tied", num_ranks=2, algorithm="distill", flags=CONTEXT | TEACHER
    ),
    "adapters, hsdp 2x2": Case(model="untied", num_ranks=4, flags=HSDP | LORA),
    "adapters beside 4 bits": Case(model="plain", num_ranks=2, flags=LORA | {"use_qlora": "true"}),
    "adapters, fsdp 2 x tensor 2, checkpointing": Case(
        model="tied", num_ranks=4, flags=TENSOR | FULL | LORA
    ),
    "adapters, tensor 2, some matrices, reduced last": Case(
        model="plain",
        num_ranks=2,
        flags=TENSOR | LAST | LORA | {"lora_target_modules": "v_proj down_proj"},
    ),
    "adapters, grpo fsdp 4": Case(
        model="untied",
        num_ranks=4,
        algorithm="grpo",
        flags={"fsdp_shard_degree": 4, "beta": 0.05, "num_mini_batches": 2} | LORA | ALONE,
    ),
    "adapters, grpo tensor 2 x fsdp 2": Case(
        model="plain", num_ranks=4, algorithm="grpo", flags=TENSOR | LORA | ALONE
    ),
    # Nodes of 8: here 2 replicas of 4 shards and 2 tensor ranks, 8 replicas of the same, and 8
    # replicas of 128 shards.
    "16 ranks, muon": Case(model="plain", num_ranks=16, is_pretended=True, flags=TENSOR | MUON),
    "64 ranks": Case(model="untied", num_ranks=64, is_pretended=True, flags=TENSOR),
    "1,024 ranks": Case(
        model="deep", num_ranks=1024, is_pretended=True, flags={"fsdp_shard_degree": 128}
    ),
}
# One process takes a fourth of what four take. Of each kind of layout another case has all its
# ranks.
IN_ONE_PROCESS = (
    *(
        "fsdp 4 deep",
        "replicas 4 untied",
        "fsdp 2 x tensor 2, checkpointing deep",
        "checkpointing",
        "muon, hsdp 2x2",
    ),
    *(
        "hsdp 2x2, reduced last",
        "fsdp 2 x tensor 2, reduced last",
        "adapters, fsdp 2 x tensor 2, checkpointing",
    ),
    *("updated reference", "teacher's logits, hsdp 2x2", "adapters, hsdp 2x2"),
    *(
        "grpo with a critic, hsdp 2x2",
        "grpo hsdp 2x2",
        "grpo fsdp 4, two updates, reduced last",
        "grpo fsdp 4, six updates",
    ),
    *(
        "grpo with a teacher, chosen tokens",
        "tensor 2 deep",
        "tensor 2, one microbatch, reduced last",
    ),
    *("feed-forward again", "teacher's logits, context 2", "updated reference, weighed pairs"),
)
CASES |= {name: replace(CASES[name], is_pretended=True) for name in IN_ONE_PROCESS}


class Counted:
    """Runs all cases of as many processes in the same ones, when the first of them is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.models = {
            name: write_shallow_model(folder / name, **given) for name, given in MODELS.items()
        }
        # Each token meets every expert, so that as many go to each rank.
        config = self.models["every expert"] / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"num_experts_per_tok": 8}))
        self.of_processes = cache(self._run)

    def __getitem__(self, name: str) -> list[dict[str, Any]]:
        """What every rank counted."""
        return [of_rank[name] for of_rank in self.of_processes(*CASES[name].processes)]

    def words(self, name: str) -> list[str]:
        case = CASES[name]
        flags: dict[str, Any] = {
            "model_name_or_path": self.models[case.model],
            "output_dir": self.folder / name,
        }
        if case.algorithm != "grpo":
            flags |= {"mixer_list": "rows.jsonl 1.0", "max_seq_length": NUM_TOKENS}
        else:
            half = NUM_TOKENS // 2
            flags |= {
                "dataset_mixer_list": "prompts.jsonl 1.0",
                "num_learners_per_node": case.num_ranks,
            }
            flags |= {
                "max_prompt_token_length": half,
                "response_length": half,
                "pack_length": NUM_TOKENS,
            }
        flags |= {"learning_rate": 1e-4} | case.flags
        if "teacher_model_name_or_path" in flags:
            flags["teacher_model_name_or_path"] = self.models[flags["teacher_model_name_or_path"]]
        pairs = ((f"--{flag}", value) for flag, value in flags.items())
        return [word for flag, value in pairs for word in (flag, *words_of(value))]

    def planned(self, name: str) -> tuple[ShardLayout, dict[str, tuple[Exchange, ...]]]:
        """The layout, and what the planner says of each part that is counted."""
        case = CASES[name]
        config = parse_run(load_objective(case.algorithm).config_class, self.words(name))
        shape, layout = (
            build_shape(config, str(self.models[case.model])),
            find_layout(config.parallel, nodes_of(case), config.backend),
        )
        workload = replace(
            build_workload(config, shape, layout),
            tokens_per_microbatch=NUM_TOKENS,
            num_microbatches=case.num_microbatches,
            on_cuda=case.is_pretended,
            sync_backend="shm",
        )
        planned = {"step": traffic_per_step(shape, layout, replace(workload, num_engines=0))}
        if workload.critic is not None:
            planned["step"] += traffic_per_step(
                workload.critic.shape, layout, workload.critic_workload
            )
        if case.algorithm == "dpo":
            once = replace(workload, num_microbatches=1)
            planned["reference"] = tuple(scoring_pass(Scoring(shape=shape), layout, once))
        elif case.algorithm == "grpo":
            sent = replace(
                workload,
                sync_backend="gloo",
                sync_bytes_per_param=2,
                sync_bucket_bytes=bucket_bytes_of(case),
            )
            planned["sync"] = weight_sync_traffic(sync_buckets(shape, layout, sent), sent)
            planned["merging"] = tuple(merging_traffic(shape, layout))
        return layout, planned

    def _run(self, num_processes: int, is_pretended: bool) -> list[dict[str, dict[str, Any]]]:
        cases = {
            name: case
            for name, case in CASES.items()
            if case.processes == (num_processes, is_pretended)
        }
        jobs = []
        for name, case in cases.items():
            (self.folder / name).mkdir(exist_ok=True)
            job = {"algorithm": case.algorithm, "flags": self.words(name), "num_tokens": NUM_TOKENS}
            if case.algorithm != "grpo":
                job |= {
                    "num_microbatches": case.num_microbatches,
                    "logits_per_chunk": case.logits_per_chunk,
                }
            else:
                degrees = (
                    case.flags.get(f"{name}_parallel_degree", 1) for name in ("tensor", "context")
                )
                num_data_ranks = case.num_ranks // prod(degrees)
                num_mini_batches = case.flags.get("num_mini_batches", 1)
                job["num_completions"] = case.num_microbatches * num_data_ranks * num_mini_batches
                job["sync_bucket_bytes"] = bucket_bytes_of(case)
            if is_pretended:
                job["gpus_per_node"] = nodes_of(case)
            jobs.append(job)
        target, ports = (
            ("count_pretended", {})
            if is_pretended
            else ("count_each", {"ports": free_ports(len(jobs))})
        )
        results = run_ranks(num_processes, f"{JOBS}:{target}", cases=jobs, **ports)
        return [dict(zip(cases, of_rank, strict=True)) for of_rank in results]


def bucket_bytes_of(case: Case) -> int:
    return ADAPTER_BUCKET_BYTES if "lora_sync" in case.flags else SYNC_BUCKET_BYTES


def nodes_of(case: Case) -> list[int]:
    return [8] * (case.num_ranks // 8) or [case.num_ranks]


def words_of(value: Any) -> list[str]:
    return value.split() if isinstance(value, str) else [str(value)]


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> Counted:
    return Counted(tmp_path_factory.mktemp("traffic"))


def as_issued(
    exchanges: Iterable[Exchange], layout: ShardLayout, rank: int
) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """Calls by (collective, bytes, global ranks of the group)."""
    calls: Counter[tuple[str, int, tuple[int, ...]]] = Counter()
    for exchange in exchanges:
        (group,) = (group for group in axis_groups(layout, exchange.axis) if rank in group)
        # Those of all ranks are among the ranks of one copy of the model.
        is_of_copy = exchange.axis == "all"
        assert exchange.group_size == (
            len(group) // layout.num_replicas if is_of_copy else len(group)
        )
        calls[exchange.collective, exchange.bytes_per_call, group] += exchange.num_calls
    return calls


def without_a_score(
    calls: Counter[tuple[str, int, tuple[int, ...]]], layout: ShardLayout
) -> Counter[tuple[str, int, tuple[int, ...]]]:
    """The calls but those of a critic's last norm and its one row, which FSDP holds apart and a
    plan counts as one.
    """
    return Counter(
        {
            (kind, num_bytes, group): count
            for (kind, num_bytes, group), count in calls.items()
            if num_bytes > MOST_SCORE_BYTES
            or (kind == "all_reduce" and len(group) == layout.world_size)
        }
    )


@pytest.mark.parametrize("name", CASES)
def test_every_call_and_every_byte(
    counted: Counted, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    if case.logits_per_chunk is not None:
        vocab_size = MODELS[case.model]["vocab_size"]
        monkeypatch.setattr(head, "MAX_LOGITS_BYTES", case.logits_per_chunk * 4 * vocab_size)
    layout, planned = counted.planned(name)
    of_ranks = counted[name]
    messages = [
        [exchange.bytes_per_call, exchange.wire_bytes // exchange.num_calls, exchange.num_calls]
        for exchange in planned.pop("sync", ())
    ]
    assert sorted(messages) == of_ranks[0].get("sync", [])
    # Of a vocabulary that does not divide, the planner says what the rank with the most has.
    is_even = MODELS[case.model]["vocab_size"] % case.flags.get("tensor_parallel_degree", 1) == 0
    for rank in range(len(of_ranks) if is_even else 1):
        for part, exchanges in planned.items():
            issued = Counter(
                {(row[0], row[1], tuple(row[2])): row[3] for row in of_ranks[rank][part]}
            )
            expected = as_issued(exchanges, layout, rank)
            if case.flags.get("advantages") == "gae":
                expected, issued = (without_a_score(calls, layout) for calls in (expected, issued))
            assert expected <= issued, f"{part}, rank {rank}"
            # Metrics are brought together once an update, which no plan counts.
            others = [(kind, num_bytes) for kind, num_bytes, _ in (issued - expected).elements()]
            assert all(
                kind == "all_reduce" and num_bytes < MOST_METRIC_BYTES for kind, num_bytes in others
            )
            num_updates = case.flags.get("num_mini_batches", 1) * case.flags.get("num_epochs", 1)
            num_updates *= 1 + (case.flags.get("advantages") == "gae")
            reads_apart = layout.data_parallel_world_size > 1
            assert len(others) == (num_updates if part == "step" and reads_apart else 0), (
                f"{part}, rank {rank}"
            )
            assert (
                issued
                or part == "merging"
                or layout.shard_group_size == layout.tensor_parallel_degree == 1
            )
