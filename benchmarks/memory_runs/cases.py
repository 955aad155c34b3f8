"""Steps of DPO whose memory is compared, their models, and what the planner says of them."""

import json
from dataclasses import dataclass
from typing import Any

import torch

from open_instruct.batching.prefixes import FullRows
from open_instruct.commands.tiny_model import tiny_config
from open_instruct.config.lora import LoRASection
from open_instruct.config.sections import OptimSection
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.build import build_model
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.parallel.data_parallel import build_parallel_configs
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import INTERPRETER
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.subject.build_workload import with_adapters
from open_instruct.planning.subject.read_shape import shape_from_fields
from open_instruct.planning.subject.workload import Workload
from open_instruct.training.model.kernels import build_activation_checkpointing
from open_instruct.training.optim.optimizers import build_optimizer_config

NUM_STEPS = 2
CPU = torch.device("cpu")
PAIR = ((300, 212), (290, 222))
SHORT_PAIR = ((150, 106), (140, 116))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and a step of it:

    `pairs` are the lengths of (chosen, rejected) documents of one microbatch.
    """

    name: str
    family: Any = "olmo2"
    is_tied: bool = False
    num_layers: int = 8
    vocab_size: int = 16384
    param_dtype: Any = "float32"
    checkpointing: Any = "none"
    optimizer: Any = "adamw"
    shard_degree: int = 2
    num_replicas: int = 1
    num_microbatches: int = 1
    reduces_last: bool = False
    lora_rank: int = 0
    dense_layers: tuple[int, ...] = ()  # among layers of experts
    pairs: tuple[tuple[int, int], ...] = PAIR

    @property
    def lengths(self) -> tuple[int, ...]:
        return (*(chosen for chosen, _ in self.pairs), *(rejected for _, rejected in self.pairs))

    @property
    def layout(self) -> ShardLayout:
        return resolve_layout(
            [self.shard_degree * self.num_replicas], fsdp_shard_degree=self.shard_degree
        )

    @property
    def hf_config(self) -> Any:
        size = {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": 12,
            "num_key_value_heads": 6,
            "sliding_window": 4096,
        }
        config = tiny_config(self.family, size, vocab_size=self.vocab_size, tie=self.is_tied)
        if self.dense_layers:
            config.mlp_only_layers = list(self.dense_layers)
        return config

    @property
    def lora(self) -> LoRASection | None:
        return LoRASection(use_lora=True, lora_r=self.lora_rank) if self.lora_rank else None


CASES = [
    Case(name="fp32"),
    Case(name="fp32-short", pairs=SHORT_PAIR),
    Case(name="full", checkpointing="full"),
    Case(name="selected", checkpointing="selected_modules"),
    Case(name="bf16", param_dtype="bfloat16"),
    Case(name="bf16-full", param_dtype="bfloat16", checkpointing="full"),
    Case(name="bf16-qwen3-tied", param_dtype="bfloat16", family="qwen3", is_tied=True),
    Case(name="llama-accumulate", family="llama", num_microbatches=2, pairs=SHORT_PAIR),
    Case(
        name="reduced-last",
        num_microbatches=3,
        reduces_last=True,
        pairs=SHORT_PAIR,
        param_dtype="bfloat16",
    ),
    Case(
        name="replicas",
        shard_degree=1,
        num_replicas=2,
        pairs=SHORT_PAIR,
        optimizer="skip_step_adamw",
    ),
    Case(name="adamw-8bit", optimizer="adamw_8bit"),
    Case(name="adapters", lora_rank=16),
    Case(
        name="bf16-adapters",
        lora_rank=16,
        param_dtype="bfloat16",
        num_microbatches=2,
        checkpointing="full",
    ),
    Case(name="four-shards", shard_degree=4, pairs=SHORT_PAIR, checkpointing="full"),
]


def case_of(text: str) -> Case:
    """A case from the JSON of its fields."""
    fields = json.loads(text)
    return Case(**fields | {"pairs": tuple(map(tuple, fields["pairs"]))})


def planned(case: Case) -> MemoryModel:
    """The memory of a run, as the planner has it."""
    shape = shape_from_fields(case.hf_config.to_dict(), name=case.name, where=case.name)
    workload = Workload(
        algorithm="dpo",
        tokens_per_microbatch=sum(case.lengths),
        rows=FullRows(length=max(case.lengths)),
        label_tokens_per_microbatch=sum(case.lengths) - len(case.lengths),
        num_microbatches=case.num_microbatches,
        reduces_last=case.reduces_last,
        param_dtype=case.param_dtype,
        optimizer=case.optimizer,
        checkpointing=case.checkpointing,
        checkpointing_modules=("blocks.*.feed_forward",),
        on_cuda=False,
    )
    return MemoryModel(with_adapters(shape, case.lora), case.layout, workload)


def predicted(case: Case) -> dict[str, int]:
    """Bytes of tensors in each phase of a step."""
    tensor_bytes: dict[str, int] = {}
    for phase in memory_by_phase(planned(case)):
        if phase.name in ("forward", "backward", "optimizer step"):
            beside_tensors = dict(phase.parts).get(INTERPRETER, 0)
            tensor_bytes[phase.name] = phase.total_bytes - beside_tensors
    return tensor_bytes


def build(case: Case) -> tuple[Any, dict[str, Any]]:
    """The model of a run, not yet sharded, and how a train module is to shard, recompute and step
    it.
    """
    model = build_model(case.hf_config)
    if case.lora is not None:
        add_adapters(model, case.lora, dtype=getattr(torch, case.param_dtype))
    memory = MemorySection(activation_checkpointing=case.checkpointing)
    return model, {
        "rank_microbatch_size": sum(case.lengths),
        "max_sequence_length": sum(case.lengths),
        "dp_config": build_parallel_configs(case.layout, param_dtype=case.param_dtype)["dp"],
        "ac_config": build_activation_checkpointing(memory, model=model, device=CPU),
        "device": CPU,
    }


def optimizer_of(case: Case) -> Any:
    """The configuration of its optimizer."""
    return build_optimizer_config(OptimSection(optimizer=case.optimizer), device=CPU, names=())
