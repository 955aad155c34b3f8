"""The table of flags that are tried two by two, and the runs in which every pair that is not
refused lies once.

A factor has levels, and a level has flags. A pair of levels that the commands refuse by its flags
alone, or once the model is read, is a case by itself. The runs are made of all other pairs, so that
no refusal hides what else a run has.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

import covertable

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.core.errors import InputError
from open_instruct.objectives.registry import load_objective

Flags = Mapping[str, Any]

FACTORS: Mapping[str, Mapping[str, Flags]] = {
    "layout": {
        "one": {},
        "single": {"single_gpu_mode": True},
        "sharded": {},
        "replicas": {"fsdp_shard_degree": 1},
        "tensor": {"tensor_parallel_degree": 2},
        "context": {"context_parallel_degree": 2},
        "experts": {"expert_parallel_degree": 2},
        "zero_1": {"backend": "deepspeed", "deepspeed_stage": 1},
        "zero_2": {"backend": "deepspeed", "deepspeed_stage": 2},
        "zero_3": {"backend": "deepspeed", "deepspeed_stage": 3},
    },
    "objective": {
        name: {} for name in ("dpo", "sft", "kto", "reward_model", "prm", "distill", "grpo")
    },
    "recomputed": {
        "nothing": {"activation_checkpointing": "none"},
        "blocks": {"activation_checkpointing": "full"},
        "modules": {"activation_checkpointing": "selected_modules"},
        "offloaded": {"activation_checkpointing": "offload"},
        "budget": {"activation_memory_budget": 0.5},
    },
    "optimizer": {
        name: {"optimizer": name} for name in ("adamw", "adamw_8bit", "skip_step_adamw", "muon")
    },
    "gathered": {
        "in turn": {},
        "ahead": {"fsdp_prefetch_factor": 1},
        "reduced last": {"gradient_reduction": "last"},
    },
    "on host": {"nothing": {}, "moments": {"adam_offload": True}, "shards": {"offload": True}},
    "adapters": {
        "none": {},
        "lora": {"use_lora": True, "lora_r": 4},
        "qlora": {"use_lora": True, "use_qlora": True, "lora_r": 4},
    },
    "rows": {"packed": {}, "shared": {"prefix_sharing": "on"}, "padded": {"packing": False}},
    "dtype": {
        "float32": {"param_dtype": "float32"},
        "bfloat16": {"param_dtype": "bfloat16"},
        "float8": {"param_dtype": "bfloat16", "float8_linears": "rowwise"},
    },
    "model": {"dense": {}, "experts": {}},
    "built": {"on meta": {}, "in memory": {"init_device": "cpu"}},
}
ONE_RANK = ("one", "single")
# Refused once the model is read: docs/models.md says why.
REFUSED_BY_MODEL = {
    frozenset({("layout", "tensor"), ("model", "experts")}),
    frozenset({("layout", "experts"), ("model", "dense")}),
    frozenset({("optimizer", "muon"), ("model", "experts")}),
    frozenset({("adapters", "qlora"), ("model", "experts")}),
    frozenset({("dtype", "float8"), ("model", "experts")}),
}

Level = tuple[str, str]
Case = dict[str, str]
"""The level of each factor. Example: `{"layout": "tensor", "objective": "sft", …}`."""


def find_num_ranks(case: Mapping[str, str]) -> int:
    return 1 if case.get("layout", "one") in ONE_RANK else 2


def collect_flags(levels: Mapping[str, str]) -> dict[str, Any]:
    """The flags of all levels; what a command needs beside them is its `TrainCase`'s."""
    flags: dict[str, Any] = {}
    for factor, level in levels.items():
        flags |= FACTORS[factor][level]
    return flags


def parse_flags(objective: str, words: Sequence[str]) -> Any:
    """:raises InputError: as the command does, before anything is started."""
    if objective == "grpo":
        config = parse_run(GRPOConfig, list(words))
        validate_grpo(config)
        return config
    chosen = load_objective(objective)
    config = parse_run(chosen.config_class, list(words))
    chosen.validate(config)
    return config


def spell_flags(flags: Mapping[str, Any]) -> list[str]:
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


@cache
def find_refusal(*levels: Level) -> InputError | None:
    """Why the flags of some levels cannot go together, whatever else a run has;

    None where they can.
    """
    case = dict(levels)
    objective = case.get("objective", "dpo")
    needed: dict[str, Any] = {"model_name_or_path": "m", "output_dir": "out"}
    rows = "dataset_mixer_list" if objective == "grpo" else "mixer_list"
    needed[rows] = ["rows.jsonl", "1.0"]
    if objective == "distill":
        needed["teacher_model_name_or_path"] = "teacher"
    if objective == "grpo":
        needed["num_learners_per_node"] = find_num_ranks(case)
    try:
        parse_flags(objective, spell_flags(needed | collect_flags(case)))
    except InputError as error:
        return error
    return None


def is_refused(one: Level, other: Level) -> bool:
    return (
        frozenset({one, other}) in REFUSED_BY_MODEL
        or find_refusal(*sorted((one, other))) is not None
    )


def list_pairs() -> list[tuple[Level, Level]]:
    levels = [(factor, level) for factor, levels in FACTORS.items() for level in levels]
    return [(one, other) for one, other in combinations(levels, 2) if one[0] != other[0]]


def list_runs() -> list[Case]:
    """Runs that have, between them, every pair of levels that a run can have."""
    factors = {factor: list(levels) for factor, levels in FACTORS.items()}
    constraints = [forbid(one, other) for one, other in list_pairs() if is_refused(one, other)]
    return [dict(run) for run in covertable.make(factors, constraints=constraints)]


def forbid(*levels: Level) -> dict[str, Any]:
    """A constraint of covertable's: no run has all of these levels."""
    differs = [{"operator": "ne", "left": factor, "value": level} for factor, level in levels]
    return {"operator": "or", "conditions": differs}
