"""The work of one rank in one optimizer step, from the flags of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from open_instruct.batching.prefixes import FullRows, count_saved_tokens
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.models.hf.names import matches_module
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.read_shape import BYTES_OF_DTYPE

MIB = 2**20
# Of an engine on CUDA where the flags say nothing; source: `generation/requests.py`, and vLLM's
# `get_batch_defaults`.
ENGINE_TOKENS = 16384
ENGINE_SEQS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """Forward passes without gradients over the microbatches of an update, in every step.

    Example: the reference policy of GRPO with two mini-batches::

        Scoring(shape=model_shape("allenai/OLMo-2-1124-7B"), stands_as="reference policy",
                num_rounds=2)
    """

    shape: ModelShape
    # The label of a frozen model that stands beside the policy, sharded as it is; "": the policy
    # itself scores.
    stands_as: str = ""
    moves: bool = False  # it follows the policy, and is in checkpoints too
    num_rounds: int = 1  # passes over each microbatch
    # Values of each label: its log-prob, and its entropy if there are two. With 0 the head is not
    # run: its matrix stays whole on every rank, and the policy's head multiplies with it.
    num_values: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One rank's share of an optimizer step, at most: documents have their full length.

    Example: DPO with 1 pair of 2 x 2048 tokens a microbatch, 4 microbatches a step::

        Workload(algorithm="dpo", tokens_per_microbatch=4096, rows=FullRows(length=2048),
                 label_tokens_per_microbatch=4096, num_microbatches=4, reference_pass_tokens=4096)
    """

    algorithm: str
    # In a whole row, with shared prefixes once; a context degree splits them further.
    tokens_per_microbatch: int
    rows: FullRows  # what they are taken to be filled with
    label_tokens_per_microbatch: int
    num_microbatches: int  # of an update
    num_of_conversations: int = 0  # of them; a critic does not compute these
    num_updates: int = 1  # of GRPO: mini-batches by epochs
    reduces_last: bool = False  # microbatches add up whole gradients, which the last one reduces
    # Blocks whose weights are gathered ahead of their turn in forward passes.
    gathered_ahead: int = 0
    # Of GRPO: the tokens that a row can hold. Memory is planned for such a row, which shorter
    # documents fill.
    pack_tokens: int = 0
    param_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    multiplies_in_float8: bool = False  # matrices of blocks
    optimizer: Literal["adamw", "adamw_8bit", "skip_step_adamw", "muon"] = "adamw"
    has_moments_on_host: bool = False  # which is not the device
    # With what the optimizer steps; gathered, they are on the device.
    has_weights_on_host: bool = False
    checkpointing: Literal["none", "full", "selected_modules", "offload"] = "none"
    checkpointing_modules: tuple[str, ...] = ()
    activation_memory_budget: float = 1.0
    on_cuda: bool = True
    copies_checkpoints: bool = False  # they are written from a copy while the training goes on
    # Of a microbatch of the pass over the start weights before training.
    reference_pass_tokens: int = 0
    scorings: tuple[Scoring, ...] = ()
    # The other model that is trained (PPO), and the passes in which it scores tokens.
    critic: Scoring | None = None
    temperature: float = 1.0
    records_entropy: bool = False
    num_values: int = 1  # numbers for each label: its log-prob, and any other that the loss reads
    export_bytes_per_param: int = 2
    num_engines: int = 0
    shares_device: bool = False  # an engine is on the learner's own device
    engine_tensor_degree: int = 1
    sync_backend: str = "nccl"
    sync_bucket_bytes: int = 0
    sync_bytes_per_param: int = 2
    sync_crosses_nodes: bool = True  # unless engines are known to be on the learners' node
    sync_choice: tuple[str, str] = ("dense", "")  # or "delta", what has changed; and why
    sends_adapter: bool = False  # a weight sync sends the adapter alone
    kv_cache_bytes: int = 0  # of an engine that shares the device, with what its steps take

    @property
    def row_tokens_per_microbatch(self) -> int:
        """Tokens of the documents of a microbatch, each counted with its prompt."""
        groups, _ = self.rows.fill_groups(self.tokens_per_microbatch)
        num_saved = sum(count_saved_tokens(self.rows.prefix, size) for size in groups)
        return self.tokens_per_microbatch + num_saved

    @property
    def gathered_keys(self) -> int:
        """Keys of a row, with those of a shared prefix before each document of its group."""
        num_documents = self.rows.per_group
        num_keys = num_documents * self.rows.length  # of a whole group
        return self.tokens_per_microbatch * num_keys // self.rows.count_tokens(num_documents)

    def with_full_rows(self) -> Workload:
        """This workload with rows that are full to the last token."""
        if self.pack_tokens <= self.tokens_per_microbatch:
            return self
        num_tokens = self.pack_tokens
        num_labels = self.label_tokens_per_microbatch * num_tokens // self.tokens_per_microbatch
        return replace(
            self, tokens_per_microbatch=num_tokens, label_tokens_per_microbatch=num_labels
        )

    @property
    def recomputed_modules(self) -> tuple[str, ...]:
        """Patterns of the modules of the blocks that run again in the backward pass."""
        modules = {"none": (), "selected_modules": self.checkpointing_modules}
        return modules.get(self.checkpointing, ("blocks.*",))

    def recomputes(self, module: str) -> bool:
        """Whether a module of all blocks ("attention", or "" for whole blocks) is recomputed."""
        return any(is_wrapped(self.recomputed_modules, 0, name) for name in ("", module))

    @property
    def critic_workload(self) -> Workload:
        """The work of the critic, which learns from the same completions and goes to no engine."""
        assert self.critic is not None
        return replace(
            self,
            critic=None,
            scorings=(self.critic,),
            num_microbatches=self.num_microbatches - self.num_of_conversations,
            num_values=1,
            num_engines=0,
            shares_device=False,
            sync_choice=("dense", ""),
        )

    def cache_bytes(self, fleet: FleetSection, shape: ModelShape, device_memory_bytes: int) -> int:
        """Bytes of an engine beyond its weights.

        By default vLLM takes a share of a GPU, and these are the rest. With --vllm_kv_cache_mib,
        and on a CPU, they are the cache, a block's activations for all tokens, and all sequences'
        logits twice.
        """
        cache_mib = fleet.kv_cache_mib(on_cuda=self.on_cuda)
        if cache_mib is None:
            share = int(fleet.vllm_gpu_memory_utilization * device_memory_bytes)
            return max(0, share - shape.num_params * self.sync_bytes_per_param)
        tokens = fleet.vllm_max_num_batched_tokens or ENGINE_TOKENS
        width = max(shape.active_features(layer) for layer in shape.layers)
        block_bytes = tokens * (3 * width + 4 * shape.d_model) * self.sync_bytes_per_param
        logit_bytes = 2 * (fleet.vllm_max_num_seqs or ENGINE_SEQS) * shape.vocab_size * 4
        return cache_mib * MIB + block_bytes + logit_bytes

    @property
    def merges_adapters(self) -> bool:
        """Whether the engines are sent the weights with any adapters merged into them."""
        return self.num_engines > 0 and not self.sends_adapter

    @property
    def compute_bytes(self) -> int:
        """Bytes of a number in the dtype that is computed in."""
        return BYTES_OF_DTYPE[self.param_dtype]


def is_wrapped(patterns: Iterable[str], layer: int, module: str) -> bool:
    """Whether --activation_checkpointing_modules names a module of a layer; "" is the layer."""
    return matches_module(patterns, f"blocks.{layer}.{module}".rstrip("."))
