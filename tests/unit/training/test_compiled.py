"""Compiled blocks: as few versions as there are kinds of rows, the values of uncompiled ones, and
no silent end of it.

Attention takes the way that it takes on CUDA, and PyTorch's compiler traces, but writes no kernels.
"""

import logging
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer, TransformerActivationCheckpointingMode
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from open_instruct.batching.documents import pack_documents
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.records import PackedBatch
from open_instruct.models import compiled
from open_instruct.models.build import build_model
from open_instruct.models.heads.logprob_head import compile_label_losses, compute_label_losses
from open_instruct.models.shards import local_part
from open_instruct.parallel.listening import LOOPBACK_INTERFACE
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.model.inputs_on_host import InputsOnHost
from open_instruct.training.model.kernels import build_activation_checkpointing
from tests.unit.batching.test_prefix_sharing import DOCUMENTS, GROUPS, assert_same, group, results
from tests.unit.small_models import CPU, hf_config, new_model
from tests.unit.varlen_on_cpu import as_on_cuda, varlen_kernels

__all__ = ["as_on_cuda", "varlen_kernels"]  # fixtures

pytestmark = pytest.mark.usefixtures("one_thread", "as_on_cuda")

MOST_VERSIONS = 6


@pytest.fixture(autouse=True)
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A compiler without code generation, nothing of earlier tests of this process, and nothing
    left for later ones.
    """
    monkeypatch.setattr(compiled, "FALLBACKS", compiled.Fallbacks())
    monkeypatch.setattr(logging.getLogger("torch._dynamo.convert_frame"), "handlers", [])
    torch.compiler.set_default_backend(getattr(request, "param", "eager"))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    limit, sources = torch._dynamo.config.recompile_limit, torch.compiler.config.dynamic_sources
    with (
        torch._dynamo.config.patch(recompile_limit=limit),
        torch.compiler.config.patch(dynamic_sources=sources),
        # Or inductor compiles three programs to learn that g++ knows the instructions which the CPU
        # says it has.
        torch._inductor.config.patch({"cpp.vec_isa_ok": True}),
    ):
        yield
    torch.compiler.set_default_backend(None)
    torch.compiler.reset()


def versions_of(function: Any) -> int:
    return len(_debug_get_cache_entry_list(function.__code__))


def versions_of_blocks(model: Transformer) -> int:
    block: Any = next(iter(model.blocks.values()))
    return versions_of(type(getattr(block, "_checkpoint_wrapped_module", block)).forward)


def row(rng: random.Random, *, shares: bool) -> PackedBatch:
    """A few prompts of some length, with two replies each."""
    pairs = [
        group(rng.randint(5, 30), (rng.randint(1, 20), rng.randint(1, 20)), seed=rng.randint(0, 99))
        for _ in "12"
    ]
    pairs += [group(9, (3, 4), seed=5)] * rng.randint(0, 3)
    documents = [document for pair in pairs for document in pair]
    groups = [(index, index + 1) for index in range(0, len(documents), 2)]
    return pack_documents(documents, groups=groups if shares else None)


def rows_of_a_run() -> Iterator[tuple[PackedBatch, bool]]:
    """And whether they are learned from: a reference pass, training with and without shared
    prompts, held-out rows.

    Beyond the tables of RoPE, too, and what a rank is given that has nothing to do.
    """
    rng = random.Random(0)
    for learned in (False, True):
        for shares in (True, True, False, False):
            yield row(rng, shares=shares), learned
        yield pack_documents([]), learned
        yield pack_documents(group(3, (1,), seed=1)), learned
        for length in (70, 200):
            yield pack_documents(group(length, (5, 9), seed=2), groups=[(0, 1)]), learned


def outcome(model: Transformer, batch: PackedBatch, *, learned: bool) -> tuple[Any, ...]:
    with torch.set_grad_enabled(learned):
        model.train(learned)
        scores = token_logprobs(model, batch, device=CPU, temperature=0.7, with_entropy=learned)
        if not learned or not len(scores.logprobs_N):
            return (scores.logprobs_N,)
        weights_N = torch.linspace(-1, 1, len(scores.logprobs_N)) / 50
        gradients = torch.autograd.grad(scores.logprobs_N @ weights_N, list(model.parameters()))
        return scores.logprobs_N, scores.entropy_N, *gradients


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("olmo3", marks=pytest.mark.extended),
        pytest.param("qwen3", marks=pytest.mark.extended),
    ],
)
def test_few_versions_serve_every_row_of_a_run(family: str) -> None:
    plain, model = new_model(family), new_model(family)
    model.apply_compile()
    windows = {block.attention.backend.window_size for block in model.blocks.values()}
    for batch, learned in rows_of_a_run():
        assert_same(outcome(model, batch, learned=learned), outcome(plain, batch, learned=learned))
    assert versions_of_blocks(model) <= MOST_VERSIONS * len(windows)
    assert 0 < versions_of(compute_label_losses) <= MOST_VERSIONS
    assert compiled.FALLBACKS.count == 0
    assert not torch._dynamo.utils.counters["graph_break"]
    # From now on nothing is compiled, whatever the lengths.
    before = versions_of_blocks(model), versions_of(compute_label_losses)
    model.lm_head.max_logits_bytes = 4 * 89 * 20  # a head in chunks
    for shares in (True, False):
        outcome(model, row(random.Random(1), shares=shares), learned=True)
    assert (versions_of_blocks(model), versions_of(compute_label_losses)) == before


@pytest.mark.parametrize(
    "family",
    [
        pytest.param("olmo_hybrid", marks=pytest.mark.extended),
        pytest.param("qwen3_5_text", marks=pytest.mark.extended),
    ],
)
def test_layers_that_remember_are_left_out_of_what_is_compiled(family: str) -> None:
    """In their middle; before it and after it they are compiled."""
    plain, model = new_model(family), new_model(family)
    model.apply_compile()
    for shares in (True, False):
        batch = row(random.Random(2), shares=shares)
        assert_same(outcome(model, batch, learned=True), outcome(plain, batch, learned=True))
    assert versions_of_blocks(model) > 0 and compiled.FALLBACKS.count == 0


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """A world of one rank, over gloo."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.extended
def test_sharded_blocks_are_compiled_too(alone: DeviceMesh) -> None:
    """In bfloat16 over float32 shards, as a run has them: FSDP's hooks stay outside."""
    models = [build_model(hf_config("llama")) for _ in "12"]
    models[1].apply_compile()
    for model in models:
        model.apply_fsdp(alone, torch.bfloat16, torch.float32, prefetch_factor=0)
        model.init_weights(device=CPU, max_seq_len=64)
        with torch.no_grad():
            for ours, theirs in zip(
                model.parameters(), new_model("llama").parameters(), strict=True
            ):
                local_part(ours).copy_(theirs)
    rng = random.Random(0)
    for shares in (True, False, True):
        batch, found = row(rng, shares=shares), []
        for model in models:
            scores = token_logprobs(model, batch, device=CPU)
            scores.logprobs_N.mean().backward()
            found.append(
                [scores.logprobs_N, *(local_part(each.grad).clone() for each in model.parameters())]
            )
            model.zero_grad()
        assert_same(*found)
    assert versions_of_blocks(models[1]) == 2
    assert compiled.FALLBACKS.count == 0


@pytest.mark.extended
def test_blocks_are_compiled_around_what_ranks_exchange_of_a_row(alone: DeviceMesh) -> None:
    """PyTorch's compiler would leave out the whole block, and say nothing."""
    plain, model = new_model("llama"), new_model("llama")
    model.apply_cp(alone)
    model.apply_compile()
    batch = pack_documents(DOCUMENTS, groups=GROUPS)
    assert_same(outcome(model, batch, learned=True), outcome(plain, batch, learned=True))
    assert versions_of_blocks(model) == 1


def test_end_of_compiling_is_said_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "MAX_VERSIONS", 1)
    model, batch = new_model("llama"), pack_documents(DOCUMENTS, groups=GROUPS)
    model.apply_compile()
    with caplog.at_level(logging.WARNING, logger=compiled.log.name):
        outcome(model, batch, learned=False)
        assert compiled.FALLBACKS.count == 0
        outcome(model, batch, learned=True)
    assert compiled.FALLBACKS.count == 2
    said = [record.getMessage() for record in caplog.records if record.name == compiled.log.name]
    assert len(said) == 2
    assert (
        "the compiler has made 1 versions of 'forward'" in said[0]
        and "--no_compile_model" in said[0]
    )


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"], indirect=True)
def test_compiled_blocks_give_the_same_gradients(request: pytest.FixtureRequest) -> None:
    """One block, and the head's loss; kernels take their time."""
    if "inductor" in request.node.name and shutil.which("g++") is None:
        pytest.skip("no C++ compiler here")
    model, shared = new_model("olmo3"), pack_documents(DOCUMENTS, groups=GROUPS)
    expected = results(model, shared)
    model.lm_head.compute_losses = compile_label_losses()
    model.blocks["0"].apply_compile()
    assert_same(results(model, shared), expected)


@pytest.mark.extended
@pytest.mark.parametrize("compiler", ["aot_eager"], indirect=True)
@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("qwen3_moe", ()),
        ("qwen3", ("*norm", "attention.*_norm", "feed_forward")),
        ("qwen3_moe", ("*norm", "attention")),
    ],
    ids=str,
)
def test_compiled_blocks_are_recomputed(family: str, parts: tuple[str, ...]) -> None:
    """Parts of them, as the plan may choose these: checkpointing is then within what is compiled.
    Or whole blocks, from inputs that wait on the host: there it is around it.
    """
    plain, model = new_model(family), new_model(family)
    if parts:
        memory = MemorySection(
            activation_checkpointing="selected_modules",
            activation_checkpointing_modules=[f"blocks.*.{part}" for part in parts],
        )
        config = build_activation_checkpointing(memory, model=model, device=CPU)
        assert config is not None
        model.apply_activation_checkpointing(config.mode, modules=config.modules)
    else:
        model.apply_activation_checkpointing(TransformerActivationCheckpointingMode.full)
    model.apply_compile()
    if not parts:
        on_host = InputsOnHost(CPU)
        for block in model.blocks.values():
            on_host.hook_block(block)
    for shares in (True, False):
        batch = row(random.Random(0), shares=shares)
        assert_same(outcome(model, batch, learned=True), outcome(plain, batch, learned=True))
    assert versions_of_blocks(model) > 0 and compiled.FALLBACKS.count == 0


@pytest.mark.extended
def test_compiled_blocks_route_tokens_as_they_are_told() -> None:
    """Rows of many lengths, with and without; few versions serve them all."""
    plain, model = new_model("qwen3_moe"), new_model("qwen3_moe")
    model.apply_compile()
    rng = random.Random(0)
    for has_forced_experts in (True, False, True, True):
        batch = row(rng, shares=False)
        if has_forced_experts:
            drawn = [rng.sample(range(8), 3) for _ in range(4 * batch.input_ids_BT.numel())]
            batch = replace(batch, routes_TR=torch.tensor(drawn, dtype=torch.int16).view(-1, 12))
        assert_same(outcome(model, batch, learned=True), outcome(plain, batch, learned=True))
    assert 0 < versions_of_blocks(model) <= MOST_VERSIONS and compiled.FALLBACKS.count == 0
