"""Planned activations and phases against real blocks, and against PyTorch's tracker."""

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.memory_runs.cases import Case, predicted
from benchmarks.memory_runs.tracked import track
from open_instruct.batching.prefixes import FullRows
from open_instruct.commands.tiny_model import tiny_config
from open_instruct.config.lora import LoRASection
from open_instruct.config.sections import OptimSection
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.families import FAMILIES
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.attention.segments import Segments
from open_instruct.models.build import build_model
from open_instruct.models.experts import routed
from open_instruct.models.experts.routed import ExpertGroup, Experts
from open_instruct.models.heads import logprob_head
from open_instruct.models.hf.names import is_expert_stack
from open_instruct.models.load import CHUNK_BYTES
from open_instruct.models.lora.adapters import add_adapters
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.memory import activations, head
from open_instruct.planning.memory.activations import profile_piece
from open_instruct.planning.memory.memory_model import NUM_SYNC_SLOTS, MemoryModel
from open_instruct.planning.memory.phases import READ_CHUNK_BYTES, memory_by_phase
from open_instruct.planning.memory.state import local_size
from open_instruct.planning.subject.build_workload import with_adapters
from open_instruct.planning.subject.model import ModelShape
from open_instruct.planning.subject.read_shape import model_shape, shape_from_fields
from open_instruct.planning.subject.workload import Scoring, Workload
from open_instruct.training.model.kernels import build_activation_checkpointing
from open_instruct.training.olmo_core.fsdp2 import hand_gradients_over
from open_instruct.training.optim import eight_bit
from open_instruct.training.optim.optimizers import build_optimizer_config
from open_instruct.weight_sync.channel import NUM_SLOTS
from tests.ranks.fork_server import Forked
from tests.tiers import mark_extended

SIZE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "sliding_window": 4096,
}
# Without AVX-512, matrix products of bfloat16 on a CPU are a hundred times slower than those of
# float32: small ones do.
LENGTHS = (80, 112)
# Of a layer that remembers, what is beside its matrices is rounded, and is to be small.
WIDE = SIZE | {"hidden_size": 256, "intermediate_size": 640}
LONG = (160, 224)
DEFAULT_MODULES = tuple(MemorySection().activation_checkpointing_modules)
WORKLOAD = Workload(
    algorithm="dpo",
    tokens_per_microbatch=4096,
    rows=FullRows(length=2048),
    label_tokens_per_microbatch=4096,
    num_microbatches=1,
    reference_pass_tokens=4096,
)
GRPO = replace(
    WORKLOAD, algorithm="grpo", reference_pass_tokens=0, num_engines=2, sync_bucket_bytes=256 << 20
)
LAYOUT = resolve_layout([8, 8])
ALONE = resolve_layout([1], single_device=True)


class Live(TorchDispatchMode):
    """Bytes of the storages that were made within, as long as they live, and their peak since
    `reset`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: dict[int, int] = {}
        self.total = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            tensor.untyped_storage()._cdata
            for tensor in tree_leaves((args, kwargs))
            if torch.is_tensor(tensor)
        }
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if not torch.is_tensor(tensor):
                continue
            storage = tensor.untyped_storage()
            if storage._cdata in self.num_bytes or storage._cdata in inputs:
                continue
            self.num_bytes[storage._cdata] = storage.nbytes()
            self.total += storage.nbytes()
            weakref.finalize(storage, self._freed, storage._cdata)
        self.peak = max(self.peak, self.total)
        return output

    def _freed(self, key: int) -> None:
        self.total -= self.num_bytes.pop(key)

    def reset(self) -> None:
        self.peak = self.total


def shape_of(hf_config: Any) -> ModelShape:
    return shape_from_fields(hf_config.to_dict(), name="tiny", where="config.json")


def phases_of(
    shape: ModelShape, layout: ShardLayout, workload: Workload
) -> dict[str, dict[str, int]]:
    """The parts of each phase."""
    return {
        phase.name: dict(phase.parts)
        for phase in memory_by_phase(MemoryModel(shape, layout, workload))
    }


FEED_FORWARD = "blocks.*.feed_forward"
NORMS, INNER_NORMS = "blocks.*.*_norm", "blocks.*.attention.*_norm"
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    "recomputed", [(), (FEED_FORWARD,), ("blocks.*.attention", NORMS), DEFAULT_MODULES]
)
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("family", mark_extended(["olmo2", "qwen3", "llama"], but=["olmo2"]))
def test_block_is_what_it_really_keeps_and_needs(
    family: Any, dtype: torch.dtype, recomputed: tuple[str, ...]
) -> None:
    compare_block(family, dtype, recomputed)


@pytest.mark.parametrize(
    ("family", "dtype", "recomputed", "adapters"),
    [
        # Norms and the feed-forward are recomputed, or norms alone.
        ("olmo2", BFLOAT16, (NORMS, FEED_FORWARD, INNER_NORMS), None),
        ("olmo2", BFLOAT16, (NORMS, INNER_NORMS), None),
        ("qwen3", BFLOAT16, (NORMS, FEED_FORWARD), None),
        ("qwen3", BFLOAT16, (NORMS,), None),
        # The block is frozen beside adapters.
        ("olmo2", BFLOAT16, (), {}),
        ("olmo2", FLOAT32, (), {"lora_dropout": 0.1}),
        ("qwen3", FLOAT32, (), {"lora_target_modules": ["v_proj", "down_proj"]}),
        ("qwen3", BFLOAT16, (FEED_FORWARD,), {"lora_dropout": 0.1}),
        ("llama", BFLOAT16, ("blocks.*.attention", NORMS), {}),
        # It is held in 4 bits.
        ("olmo2", BFLOAT16, (), {"use_qlora": True}),
        (
            "qwen3",
            FLOAT32,
            (FEED_FORWARD,),
            {"use_qlora": True, "lora_target_modules": ["v_proj", "down_proj"]},
        ),
        ("qwen3_moe", FLOAT32, (), None),
        ("qwen3_moe", BFLOAT16, (), None),
        ("qwen3_moe", BFLOAT16, (FEED_FORWARD,), None),
        ("qwen3_moe", BFLOAT16, (), {}),
    ],
)
def test_other_block_is_what_it_keeps_and_needs(
    family: Any, dtype: torch.dtype, recomputed: tuple[str, ...], adapters: dict[str, Any] | None
) -> None:
    lora = None if adapters is None else LoRASection(use_lora=True, lora_r=24, **adapters)
    compare_block(family, dtype, recomputed, lora)


@pytest.mark.parametrize(
    ("family", "dtype", "recomputed"),
    [
        ("olmo_hybrid", FLOAT32, ()),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in (
                ("olmo_hybrid", FLOAT32, ("blocks.*.attention", NORMS)),
                ("qwen3_5_text", FLOAT32, ()),
                ("qwen3_5_text", FLOAT32, ("blocks.*.attention", NORMS)),
                ("olmo_hybrid", BFLOAT16, ()),
                ("qwen3_5_text", BFLOAT16, ("blocks.*.attention", NORMS)),
            )
        ),
    ],
)
def test_blocks_of_a_model_that_remembers(
    family: Any, dtype: torch.dtype, recomputed: tuple[str, ...]
) -> None:
    """What is between the matrices of a layer is counted as one operation; attention is exact but
    for its gate.
    """
    large: dict[str, Any] = {"size": WIDE, "lengths": LONG}
    # Of what a forward pass needs that keeps nothing, the bound is not close: the backward pass
    # needs more.
    for head_dim in (32, 64, 128) if dtype == FLOAT32 else (64,):
        rel = (0.02, 0.08 if recomputed else 0.05, 0.06)
        compare_block(
            family, dtype, recomputed, layer=0, linear_head_dim=head_dim, rel=rel, **large
        )
    compare_block(
        family, dtype, recomputed, layer=1, rel=(0.07, 0.3 if recomputed else 0.07, 0.1), **large
    )
    in_4_bits = LoRASection(use_lora=True, use_qlora=True, lora_r=24)
    compare_block(family, dtype, recomputed, in_4_bits, layer=0, rel=(0.02, 0.08, 0.06), **large)


@pytest.mark.parametrize(
    ("dtype", "recomputed"), [(FLOAT32, ()), (BFLOAT16, ()), (BFLOAT16, (FEED_FORWARD,))]
)
def test_block_with_split_experts_is_what_it_keeps_and_needs(
    dtype: torch.dtype, recomputed: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where as many rows arrive as are sent."""
    monkeypatch.setattr(routed, "all_to_all_single", lambda counts, *_: counts)
    monkeypatch.setattr(routed, "all_to_all_single_autograd", lambda rows, *_: rows.clone())
    compare_block("qwen3_moe", dtype, recomputed, expert_degree=2)


class PretendedGroup(ExpertGroup):
    """Of ranks with a part of each stack, of which this one is there alone."""

    def __init__(self, experts: Experts, degree: int) -> None:
        self.group, self.degree = None, degree  # type: ignore[assignment]
        for name, stack in list(experts.named_parameters()):
            experts.register_parameter(name, nn.Parameter(stack.detach().chunk(degree)[0].clone()))

    def select_local(self, stack: torch.Tensor) -> torch.Tensor:
        return stack


def compare_block(
    family: Any,
    dtype: torch.dtype,
    recomputed: tuple[str, ...],
    lora: LoRASection | None = None,
    *,
    size: dict[str, int] = SIZE,
    lengths: tuple[int, ...] = LENGTHS,
    layer: int = 0,
    linear_head_dim: int | None = None,
    rel: tuple[float, float, float] = (0.01, 0.02, 0.05),
    expert_degree: int = 1,
) -> None:
    """What a block of a real model, on a CPU by itself, makes and keeps, with what is planned of
    it.
    """
    num_layers = 2 if FAMILIES[family].delta else 1
    hf_config = tiny_config(
        family, {**size, "num_hidden_layers": num_layers}, vocab_size=512, tie=False
    )
    if linear_head_dim is not None:
        hf_config.linear_key_head_dim = hf_config.linear_value_head_dim = linear_head_dim
    model = build_model(hf_config, init_device="cpu").to(dtype)
    if lora is not None:
        add_adapters(model, lora, dtype=dtype)
    if recomputed:
        memory = MemorySection(
            activation_checkpointing="selected_modules",
            activation_checkpointing_modules=list(recomputed),
        )
        config = build_activation_checkpointing(memory, model=model, device=torch.device("cpu"))
        assert config is not None
        model.apply_activation_checkpointing(config.mode, modules=config.modules)
    block = model.blocks[str(layer)]
    if expert_degree > 1:
        (experts,) = (each for each in block.modules() if isinstance(each, Experts))
        experts.group = PretendedGroup(experts, expert_degree)
    x = torch.randn(1, sum(lengths), size["hidden_size"], dtype=dtype, requires_grad=True)
    row = Segments.from_lengths(lengths, (0,) * len(lengths), device=x.device)
    if getattr(block.attention, "rope", None) is not None:
        block.attention.rope.warmup_cache(sum(lengths), torch.device("cpu"))

    with Live() as live:
        output = block(x, cu_doc_lens=row)
        # Beside what is kept there are the output and its gradient, which the profile counts from
        # the backward on.
        kept, forward_peak = live.total - output.untyped_storage().nbytes(), live.peak
        gradient = torch.ones_like(output)
        live.reset()
        output.backward(gradient)
        backward_peak = live.peak - output.untyped_storage().nbytes()

    split = resolve_layout([expert_degree], expert_parallel_degree=expert_degree)
    layout = split if expert_degree > 1 else ALONE
    workload = replace(
        WORKLOAD,
        tokens_per_microbatch=sum(lengths),
        rows=FullRows(length=max(lengths)),
        param_dtype=str(dtype).removeprefix("torch."),
        on_cuda=False,
        checkpointing="selected_modules",
        checkpointing_modules=recomputed,
    )
    shape = with_adapters(shape_of(hf_config), lora)
    profile = profile_piece(shape.layers[layer].kind, shape, layout, workload, splits_rows=True)
    assert profile.kept_bytes == pytest.approx(kept, rel=rel[0])
    assert sum(profile.forward_peak) == pytest.approx(forward_peak, rel=rel[1])
    assert sum(profile.backward_peak) == pytest.approx(backward_peak, rel=rel[2])
    trained = sum(
        parameter.num_params // (expert_degree if is_expert_stack(parameter.name) else 1)
        for parameter in shape.parameters
        if parameter.layer == layer and parameter.is_trained
    )
    assert profile.backward[-1].weight_gradients == trained * dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "max_logits_bytes", "lora"),
    [
        *(
            (dtype, num_bytes, None)
            for dtype in ("float32", "bfloat16")
            for num_bytes in (1 << 30, 64 * 512 * 4)
        ),
        ("bfloat16", 64 * 512 * 4, LoRASection(use_lora=True)),
    ],
)
def test_passes_of_a_whole_model(
    dtype: Any, max_logits_bytes: int, lora: LoRASection | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without FSDP, and with logits in one piece or in chunks of 64 positions; in bfloat16 a copy
    runs the passes.
    """
    hf_config = tiny_config("olmo2", {**SIZE, "num_hidden_layers": 3}, vocab_size=512, tie=False)
    model = build_model(hf_config, init_device="cpu").to(getattr(torch, dtype))
    if lora is not None:
        add_adapters(model, lora, dtype=torch.bfloat16)
    elif dtype == "bfloat16":
        hand_gradients_over(model, build_model(hf_config, init_device="cpu"))
    model.lm_head.max_logits_bytes = max_logits_bytes
    monkeypatch.setattr(head, "MAX_LOGITS_BYTES", max_logits_bytes)
    activations.clear_profiles()
    num_tokens = sum(LENGTHS)
    ids_BT = torch.zeros(1, num_tokens, dtype=torch.long)
    positions_BK = torch.arange(num_tokens - 2).unsqueeze(0)
    with Live() as live:
        for block in model.blocks.values():
            block.attention.rope.warmup_cache(num_tokens, torch.device("cpu"))
        real = {"tables of RoPE": live.total}

    def losses() -> torch.Tensor:
        return model(
            ids_BT,
            labels=ids_BT,
            loss_reduction="none",
            return_logits=False,
            logits_to_keep=positions_BK,
            segments=Segments.from_lengths(LENGTHS, (0,) * len(LENGTHS), device=ids_BT.device),
        ).loss

    with Live() as live:
        with torch.no_grad():
            losses()
        real["reference pass"] = live.peak
        live.reset()
        loss = losses().sum()
        real["forward"] = live.peak
        live.reset()
        loss.backward()
        real["backward"] = live.peak

    workload = replace(
        WORKLOAD,
        tokens_per_microbatch=num_tokens,
        rows=FullRows(length=max(LENGTHS)),
        label_tokens_per_microbatch=num_tokens - 2,
        reference_pass_tokens=num_tokens,
        param_dtype=dtype,
        on_cuda=False,
    )
    phases = phases_of(with_adapters(shape_of(hf_config), lora), ALONE, workload)
    activations.clear_profiles()
    assert phases["forward"]["buffers"] == real.pop("tables of RoPE")
    there_before = ("parameters", "optimizer states", "buffers", "interpreter and libraries")
    for name, num_bytes in real.items():
        made = sum(part for label, part in phases[name].items() if label not in there_before)
        assert made == pytest.approx(num_bytes, rel=0.05), name


OTHER_TRACKED = (
    Case(
        name="reduced last",
        num_layers=2,
        pairs=((150, 106),),
        num_microbatches=2,
        reduces_last=True,
    ),
    Case(
        name="recomputed",
        num_layers=2,
        pairs=((150, 106),),
        param_dtype="bfloat16",
        checkpointing="full",
    ),
    Case(
        name="of two kinds",
        family="qwen3_moe",
        num_layers=3,
        pairs=((150, 106),),
        param_dtype="bfloat16",
        dense_layers=(1,),
    ),
    Case(name="remembers", family="olmo_hybrid", num_layers=3, pairs=((150, 106),)),
)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(name="plain", num_layers=2, pairs=((150, 106),)), marks=pytest.mark.slow),
        *(pytest.param(case, marks=pytest.mark.extended) for case in OTHER_TRACKED),
    ],
    ids=lambda case: case.name,
)
def test_step_is_what_pytorch_tracks(case: Case) -> None:
    """In a process of its own, since a process has one fake process group."""
    process = Forked(print_tracked, case)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    assert max(predicted(case).values()) == pytest.approx(int(said.split()[-1]), rel=0.05)


def print_tracked(case: Case) -> int:
    print(track(case))
    return 0


def test_constants_are_those_of_the_code_that_runs() -> None:
    assert (READ_CHUNK_BYTES, NUM_SYNC_SLOTS) == (CHUNK_BYTES, NUM_SLOTS)
    for name in ("MAX_LOGITS_BYTES", "MAX_KEPT_BYTES"):
        assert getattr(head, name) == getattr(logprob_head, name)


@pytest.mark.parametrize("prefixes", [(0, 30, 30, 30), (0, 40, 20, 30)], ids=["prompt", "tree"])
def test_keys_are_gathered_as_the_row_has_them(prefixes: tuple[int, ...]) -> None:
    """Two groups of four documents of 50 tokens, each of which shares 30 with others on average."""
    workload = replace(
        WORKLOAD,
        rows=FullRows(length=50, prefix=30, per_group=4),
        tokens_per_microbatch=2 * (30 + 4 * 20),
    )
    row = Segments.from_lengths(
        tuple(50 - prefix for prefix in prefixes) * 2, prefixes * 2, device=torch.device("cpu")
    )
    assert row.key_index_K is not None
    assert workload.gathered_keys == len(row.key_index_K) == 400


@pytest.mark.parametrize("name", ["adamw", "muon", "adamw_8bit"])
def test_step_needs_what_it_really_does(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a rank orthogonalises the largest matrix, or steps chunk by chunk; the first step makes
    the moments.
    """
    monkeypatch.setattr(eight_bit, "CHUNK_VALUES", chunk := 2**14)
    monkeypatch.setattr("open_instruct.planning.memory.state.CHUNK_BYTES", 6 * 4 * chunk)
    hf_config = tiny_config("olmo2", SIZE, vocab_size=256, tie=False)
    model = build_model(hf_config, init_device="cpu")
    optim = OptimSection(optimizer=name)
    optimizer = build_optimizer_config(optim, device=torch.device("cpu"), names=()).build(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Live() as live:
        optimizer.step()
    moments = MemoryModel(
        shape_of(hf_config), resolve_layout([1]), replace(WORKLOAD, optimizer=name)
    )
    assert live.peak == moments.step_temporaries()


def test_blocks_that_are_gathered_ahead_are_there_while_one_is_at_work() -> None:
    """In forward passes alone: each is a buffer of a whole block in bfloat16."""
    shape, layout = model_shape("allenai/OLMo-2-1124-7B"), resolve_layout([8])
    workload = replace(
        WORKLOAD, checkpointing="full", tokens_per_microbatch=16384, reference_pass_tokens=16384
    )

    def needed(num_ahead: int) -> dict[str, int]:
        phases = phases_of(shape, layout, replace(workload, gathered_ahead=num_ahead))
        return {name: sum(parts.values()) for name, parts in phases.items()}

    none, one, three, most = map(needed, (0, 1, 3, 31))
    block_bytes = 2 * sum(each.num_params for each in shape.parameters if each.layer == 0)
    assert most["reference pass"] - three["reference pass"] == 28 * block_bytes
    # With none ahead there is most in the head, or while a unit is gathered.
    assert none["reference pass"] <= one["reference pass"] <= none["reference pass"] + block_bytes
    assert (
        one["reference pass"] < three["reference pass"] <= one["reference pass"] + 2 * block_bytes
    )
    # Where the most of 31 are ahead only the first block has kept anything.
    assert most["forward"] > none["forward"] + 15 * block_bytes
    assert needed(99) == most
    assert none["backward"] == one["backward"] == most["backward"]


def test_phases_are_those_of_the_run() -> None:
    shape = model_shape("Qwen/Qwen3-8B")
    assert [*phases_of(shape, LAYOUT, WORKLOAD)] == [
        *("load", "reference pass", "forward", "backward", "optimizer step", "export")
    ]
    reference = Scoring(shape=shape, stands_as="reference policy")
    phases = phases_of(shape, LAYOUT, replace(GRPO, scorings=(reference,)))
    assert [*phases][1:3] == ["scoring pass", "forward"] and "reference policy" not in phases[
        "load"
    ]
    assert phases["backward"]["reference policy"] == phases["backward"]["parameters"]
    # Of two buckets a rank brings an eighth. The embeddings, of 1.2 GB, come in pieces.
    in_buckets = phases["weight sync"]["buffers"] - phases["backward"]["buffers"]
    assert 0.9 < in_buckets / (2 * (256 << 20) / 8) <= 1


def test_adapter_that_travels_alone_is_scaled_and_fits_into_one_bucket() -> None:
    shape = with_adapters(model_shape("Qwen/Qwen3-8B"), LoRASection(use_lora=True, lora_r=16))
    merged, alone = (
        phases_of(shape, LAYOUT, replace(GRPO, sends_adapter=is_alone))
        for is_alone in (False, True)
    )
    # Rank 0's eighth of each: of float32 ones scaled ones, and bfloat16 ones in each of two
    # buckets.
    own = shape.num_trained / 8
    assert alone["weight sync"]["temporaries"] == pytest.approx(4 * own, rel=1e-3)
    in_buckets = alone["weight sync"]["buffers"] - alone["backward"]["buffers"]
    assert in_buckets == pytest.approx(2 * 2 * own, rel=1e-3)
    assert (
        merged["weight sync"]["temporaries"]
        == merged["export"]["temporaries"]
        == alone["export"]["temporaries"]
    )


def test_engine_on_the_same_device_is_counted() -> None:
    shape = model_shape("Qwen/Qwen3-0.6B")
    shared = replace(
        GRPO, num_engines=1, sync_backend="ipc", shares_device=True, kv_cache_bytes=1 << 30
    )
    for name, parts in phases_of(shape, ALONE, shared).items():
        assert parts["vLLM engine"] == 2 * shape.num_params + (1 << 30), name
        assert "gathered weights" not in parts, name


@pytest.mark.parametrize(
    ("layout", "moves", "bytes_a_parameter"),
    [
        (ALONE, False, 12),
        (ALONE, True, 16),
        (resolve_layout([4], fsdp_shard_degree=1), False, 12 / 4),
        (resolve_layout([4]), False, 12 / 4),
    ],
)
def test_copy_that_checkpoints_are_written_from_is_where_they_are_written(
    layout: ShardLayout, moves: bool, bytes_a_parameter: float
) -> None:
    """On a GPU it is the host's; elsewhere it is in the plan once there has been a checkpoint."""
    shape = model_shape("Qwen/Qwen3-0.6B")
    reference = Scoring(shape=shape, stands_as="reference policy", moves=True)
    workload = replace(WORKLOAD, scorings=(reference,)) if moves else WORKLOAD
    on_gpu = replace(workload, copies_checkpoints=True)
    assert any(MemoryModel(shape, layout, on_gpu).host_parts().values())
    assert phases_of(shape, layout, on_gpu) == phases_of(shape, layout, workload)
    on_cpu = MemoryModel(shape, layout, replace(on_gpu, on_cuda=False))
    assert not any(on_cpu.host_parts().values())
    num_bytes = on_cpu.checkpoint_copy()
    assert num_bytes == pytest.approx(bytes_a_parameter * shape.num_params, rel=1e-3)
    without = phases_of(shape, layout, replace(workload, on_cuda=False))
    for name, parts in phases_of(shape, layout, on_cpu.workload).items():
        more = 0 if name in ("load", "reference pass") else num_bytes
        assert sum(parts.values()) - sum(without[name].values()) == more, name


def test_each_tensor_of_that_copy_takes_a_power_of_two_of_pinned_memory() -> None:
    """As PyTorch's allocator rounds: of 7B on 8 GPUs 13.5 GiB a rank for 10.2 GiB of tensors."""
    shape, layout = model_shape("allenai/OLMo-2-1124-7B"), resolve_layout([8])

    def copied(**changes: Any) -> int:
        workload = replace(WORKLOAD, copies_checkpoints=True, **changes)
        (num_bytes,) = filter(None, MemoryModel(shape, layout, workload).host_parts().values())
        return num_bytes

    sizes = [local_size(parameter, layout).shard * 4 for parameter in shape.parameters]
    powers = [next(2**power for power in range(40) if 2**power >= size) for size in sizes]
    assert copied() == 3 * sum(powers)
    assert copied() / 2**30 == pytest.approx(13.5, abs=0.05)
    is_muons = [each.layer is not None and len(each.shape) == 2 for each in shape.parameters]
    # A byte for each value, and four bytes for 256.
    of_codes = [size // 4 + size // 256 for size in sizes]
    in_8_bits = phases_of(shape, layout, replace(WORKLOAD, optimizer="adamw_8bit"))[
        "optimizer step"
    ]
    assert in_8_bits["optimizer states"] == pytest.approx(2 * sum(of_codes), rel=1e-3)
    assert copied() / 2 < copied(optimizer="adamw_8bit") < copied() * 0.6
    assert copied(optimizer="muon") == sum(
        (2 if one else 3) * power for one, power in zip(is_muons, powers, strict=True)
    )


def test_moments_of_the_host_are_in_its_account() -> None:
    shape, workload = model_shape("Qwen/Qwen3-0.6B"), replace(WORKLOAD, has_moments_on_host=True)
    moments = MemoryModel(shape, LAYOUT, WORKLOAD).optimizer
    assert (
        MemoryModel(shape, LAYOUT, workload).host_parts()["optimizer states"]
        == moments
        > shape.num_params
    )
    of_step = phases_of(shape, LAYOUT, workload)["optimizer step"]
    assert "optimizer states" not in of_step and of_step["temporaries"] > 0


def test_weights_of_the_host_are_in_its_account() -> None:
    shape, workload = model_shape("Qwen/Qwen3-0.6B"), replace(WORKLOAD, has_weights_on_host=True)
    here, there = (
        MemoryModel(shape, LAYOUT, WORKLOAD),
        MemoryModel(shape, LAYOUT, workload).host_parts(),
    )
    assert there["optimizer states"] == here.optimizer
    # Each tensor is pinned by itself, in a power of two.
    for kind, held in (("parameters", here.parameters), ("gradients", here.gradients)):
        assert held <= there[kind] < 2 * held
    before, after = (phases_of(shape, LAYOUT, each) for each in (WORKLOAD, workload))
    assert {"parameters", "gradients", "optimizer states"} & after["optimizer step"].keys() == set()
    assert "parameters" not in after["backward"]
    for phase in ("backward", "export"):
        assert (
            sum(before[phase].values()) - sum(after[phase].values())
            > here.parameters + here.optimizer
        )
    in_4_bits = with_adapters(shape, LoRASection(use_lora=True, use_qlora=True))
    held = MemoryModel(in_4_bits, LAYOUT, WORKLOAD).parameters
    assert held <= MemoryModel(in_4_bits, LAYOUT, workload).host_parts()["parameters"] < 2 * held


def test_whole_gradients_are_there_while_microbatches_add_up() -> None:
    shape = model_shape("allenai/OLMo-2-1124-7B")
    every, last, alone = (
        phases_of(
            shape,
            LAYOUT,
            replace(WORKLOAD, num_microbatches=num_microbatches, reduces_last=reduces_last),
        )
        for num_microbatches, reduces_last in ((2, False), (2, True), (1, True))
    )
    assert last["forward"]["gradients"] == 4 * shape.num_params > 7 * every["forward"]["gradients"]
    assert last["optimizer step"] == every["optimizer step"]
    assert alone == phases_of(shape, LAYOUT, WORKLOAD)
