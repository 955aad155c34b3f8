"""Routing replay: the learner's tokens go to the experts that the engine chose for them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode

from open_instruct.batching.documents import pack_documents
from open_instruct.batching.rollouts import (
    build_rollout_batch,
    build_rollout_minibatches,
    plan_steps_of_ranks,
)
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.batch_values import LogprobsField, RLValues
from open_instruct.core.records import (
    Batch,
    Completion,
    Document,
    PackedBatch,
    RolloutSample,
    Span,
    StepBatch,
)
from open_instruct.generation.vllm_core import VLLMCore
from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.rl.checked_run import open_rollout_run
from open_instruct.rl.episodes.conversations import _EpisodeRecord
from open_instruct.training.model import forward_inputs
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.model.routing import balance, record_routing
from open_instruct.training.policy import Policy
from tests.fleet.grpo_case import GRPOCase, write_prompts
from tests.ranks.shallow import write_shallow_model
from tests.refusals import refused
from tests.unit.fake_engine import request
from tests.unit.small_models import CPU, new_model

pytestmark = pytest.mark.usefixtures("one_thread")

NO_VALUES = RLValues(engine_logprobs_N=torch.zeros(0), advantages_N=torch.zeros(0))
NUM_LAYERS, TOP_K, NUM_EXPERTS = 4, 3, 8
LAYERS_OF_MODELS = {
    "all": {},
    "some dense": {"mlp_only_layers": [0, 2]},
    "not normalized": {"norm_topk_prob": False},
}


def layers_of(model: SegmentTransformer) -> list[tuple[int, RoutedFeedForward]]:
    return [
        (number, layer)
        for number, block in enumerate(model.blocks.values())
        for layer in block.modules()
        if isinstance(layer, RoutedFeedForward)
    ]


def packed_of(lengths: Sequence[int] = (9, 5)) -> PackedBatch:
    documents = [
        Document(
            token_ids=tuple((7 * i + length) % 80 + 3 for i in range(length)),
            responses=(Span(start=2, stop=length),),
        )
        for length in lengths
    ]
    return pack_documents(documents)


def own_choice(model: SegmentTransformer, packed: PackedBatch) -> torch.Tensor:
    """What the model chooses by itself, (T, layers * K), -1 in dense layers."""
    layers = layers_of(model)
    with record_routing(model):
        token_logprobs(model, packed, device=CPU)
    chosen_TLK = torch.full((packed.input_ids_BT.numel(), NUM_LAYERS, TOP_K), -1, dtype=torch.int16)
    for number, layer in layers:
        ((_, experts_TK),) = layer.take_routing()
        chosen_TLK[:, number] = experts_TK.short()
    return chosen_TLK.flatten(1)


def other_experts(num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    drawn = [
        torch.randperm(NUM_EXPERTS, generator=generator)[:TOP_K]
        for _ in range(num_tokens * NUM_LAYERS)
    ]
    return torch.stack(drawn).view(num_tokens, -1).short()


def tell(layer: RoutedFeedForward, routes_TR: torch.Tensor) -> None:
    layer.forced_experts_TK, layer.has_forced_experts = routes_TR[:, :TOP_K], True


def loss_and_gradients(model: SegmentTransformer, packed: PackedBatch) -> list[torch.Tensor]:
    model.zero_grad(set_to_none=True)
    loss = token_logprobs(model, packed, device=CPU).logprobs_N.sum()
    loss.backward()
    return [
        loss.detach(),
        *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
    ]


def are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("fields", LAYERS_OF_MODELS.values(), ids=LAYERS_OF_MODELS)
def test_equal_choice_changes_no_bit_in_whichever_order_it_is_told(
    fields: dict[str, object],
) -> None:
    model, packed = new_model("qwen3_moe", **fields), packed_of()
    before = loss_and_gradients(model, packed)
    told = own_choice(model, packed).view(-1, NUM_LAYERS, TOP_K).flip(-1).flatten(1)
    assert are_equal(before, loss_and_gradients(model, replace(packed, routes_TR=told)))


@pytest.mark.parametrize("normalized", [True, False])
def test_weights_and_the_routers_gradient_are_those_of_the_told_experts_in_the_full_softmax(
    normalized: bool,
) -> None:
    """By hand: each told expert's MLP, times its share of the softmax over all experts."""
    ((_, layer), *_) = layers_of(new_model("qwen3_moe", norm_topk_prob=normalized))
    x_TD = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    tell(layer, other_experts(6))
    (ours := layer(x_TD)).square().sum().backward()
    gradient, layer.router.weight.grad = layer.router.weight.grad, None

    probs_TE = layer.router(x_TD).softmax(dim=-1)
    weights_TK = probs_TE.gather(1, layer.forced_experts_TK.long())
    weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True) if normalized else weights_TK
    w1, w3, w2 = (
        stack.detach() for stack in (layer.experts.w1, layer.experts.w3, layer.experts.w2)
    )
    rows = []
    for x_D, weights_K, told_K in zip(
        x_TD, weights_TK, layer.forced_experts_TK.tolist(), strict=True
    ):
        mlps = [w2[e] @ (torch.nn.functional.silu(w1[e] @ x_D) * (w3[e] @ x_D)) for e in told_K]
        rows.append(sum(weight * mlp for weight, mlp in zip(weights_K, mlps, strict=True)))
    theirs = torch.stack(rows)
    theirs.square().sum().backward()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    largest = float(layer.router.weight.grad.abs().max())
    assert gradient is not None and largest > 1e-3
    torch.testing.assert_close(gradient, layer.router.weight.grad, rtol=1e-4, atol=1e-5 * largest)


def test_token_of_which_nothing_is_told_has_its_own_experts() -> None:
    ((_, layer), *_) = layers_of(new_model("qwen3_moe"))
    x_TD = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    own = layer(x_TD)
    tell(layer, other_experts(6))
    told = layer(x_TD)
    layer.forced_experts_TK[::2] = -1
    mixed = layer(x_TD)
    torch.testing.assert_close(mixed[::2], own[::2])
    torch.testing.assert_close(mixed[1::2], told[1::2])
    assert not torch.allclose(own, told)


def test_blocks_that_are_computed_again_have_the_same_experts() -> None:
    gradients = []
    for is_recomputed in (False, True):
        model = new_model("qwen3_moe")
        if is_recomputed:
            model.apply_activation_checkpointing(TransformerActivationCheckpointingMode.full)
        gradients.append(
            loss_and_gradients(model, replace(packed_of(), routes_TR=other_experts(14)))
        )
    assert are_equal(*gradients)
    assert not are_equal(gradients[0], loss_and_gradients(model, packed_of()))


def test_rank_that_has_a_part_of_a_row_has_the_experts_of_that_part() -> None:
    packed = replace(packed_of(), routes_TR=other_experts(14))
    context = SimpleNamespace(local_slice=lambda num_tokens: slice(7, num_tokens))
    with patch.object(forward_inputs, "find_context_group", lambda model: context):
        own, _ = forward_inputs.local_slice(MagicMock(tp_enabled=True), packed)
    assert torch.equal(own.routes_TR, packed.routes_TR[7:])


def test_routing_replay_counts_replayed_tokens() -> None:
    """One token is told its own experts in another order, one others, one others as probable, and
    one nothing.
    """
    model = new_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, num_hidden_layers=1)
    apart, alike = [3.0, 2, 1, 0], [1.0, 1, 1, 1]
    others = [e for e in range(4) if e not in torch.tensor(alike).topk(2).indices.tolist()]
    ((_, layer),) = layers_of(model)
    routes_TR = torch.tensor([[1, 0], [0, 2], others, [-1, -1]], dtype=torch.int16)
    layer.forced_experts_TK, layer.has_forced_experts = routes_TR, True
    with record_routing(model) as routers:
        probs_TE = torch.tensor([apart, apart, alike, apart]).softmax(dim=-1)
        layer._record_routing(probs_TE, layer.route(layer.mask_unforced(probs_TE))[1])
    # Of a row of eight tokens another rank has the rest, of which nothing is told.
    row = replace(
        packed_of([4, 4]), routes_TR=torch.cat([routes_TR, torch.full_like(routes_TR, -1)])
    )
    _, metrics = balance(model, routers, row, share=1.0)
    counted = {name: float(metric.value) for name, metric in metrics.items()}
    assert (counted["router/replayed"], counted["router/differing"]) == (0.75, 0.5)
    tokens = torch.tensor([0, 0, 0, 0]).index_add(
        0, torch.tensor([1, 0, 0, 2, *others, 0, 1]), torch.ones(8).long()
    )
    assert counted["router/max_load"] == tokens.max() / 2


def test_frozen_model_chooses_its_own_experts_and_the_policy_before_the_step_does_not() -> None:
    model = new_model("qwen3_moe")
    policy = Policy.__new__(Policy)
    policy.__dict__ |= {
        "backend": MagicMock(),
        "device": CPU,
        "model": model,
        "loss": MagicMock(temperature=1.0),
    }
    plain, replayed = (
        Batch(packed=replace(packed_of(), routes_TR=told), row_ids=(), values=NO_VALUES)
        for told in (None, other_experts(14))
    )
    step = StepBatch(microbatches=(plain, replayed), counts={})
    models: dict[LogprobsField, Any] = {"old_logprobs_N": model, "reference_logprobs_N": model}
    (scored,) = policy.add_logprobs(models, [step])
    of_plain, of_replayed = (RLValues.read(batch.values) for batch in scored.microbatches)
    assert torch.equal(of_plain.reference_logprobs_N, of_replayed.reference_logprobs_N)
    assert not torch.allclose(of_plain.old_logprobs_N, of_replayed.old_logprobs_N)


def test_model_without_experts_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    model = write_shallow_model(tmp_path / "model", family="qwen3", is_narrow=False)
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    case = GRPOCase(
        model=model, prompts=prompts, output_dir=tmp_path / "out", flags={"routing_replay": "on"}
    )
    with refused("conflict", "routing_replay", "on"):
        open_rollout_run(parse_run(GRPOConfig, case.command()[1:])).__enter__()


class TestPacking:
    """Two experts a token, in one layer: the document's number, and the place in it."""

    def sample(
        self, number: int, ids: Sequence[int], *, has_forced_experts: bool = True
    ) -> RolloutSample:
        routes = np.array([[number, place] for place in range(len(ids) - 1)], dtype=np.int16)
        return RolloutSample(
            document=Document(token_ids=tuple(ids), responses=(Span(start=3, stop=len(ids)),)),
            engine_logprobs=(-1.0,) * (len(ids) - 3),
            advantage=1.0,
            routes=routes.tobytes() if has_forced_experts else b"",
        )

    def test_each_token_has_its_own_and_a_shared_one_those_of_the_first(self) -> None:
        samples = [
            self.sample(0, [1, 2, 3, 4, 5]),
            self.sample(1, [1, 2, 3, 6]),
            self.sample(2, [7, 8, 9, 10], has_forced_experts=False),
        ]
        packed = build_rollout_batch(
            samples, pad_to_multiple_of=8, prefix_sharing="on", num_routes=2
        ).packed
        assert packed.input_ids_BT.tolist() == [[1, 2, 3, 4, 5, 3, 6, 7, 8, 9, 10, *[0] * 5]]
        unknown = [[-1, -1]]
        first = [[0, place] for place in range(4)] + unknown
        assert packed.routes_TR.tolist() == first + [[1, 2]] + unknown + unknown * 4 + unknown * 5

    def test_every_rank_knows_how_many_there_are(self) -> None:
        """One rank has the sample with routes, one that without, and two have none."""
        samples = [
            self.sample(0, [1, 2, 3, 4]),
            self.sample(1, [5, 6, 7, 8, 9], has_forced_experts=False),
        ]
        steps = plan_steps_of_ranks(
            samples, num_ranks=4, max_tokens_per_microbatch=40, num_mini_batches=1
        )
        batches = [build_rollout_minibatches(step)[0].microbatches[0] for step in steps]
        assert {batch.packed.routes_TR.shape[1] for batch in batches} == {2}
        assert sum(int((batch.packed.routes_TR >= 0).any(dim=1).sum()) for batch in batches) == 3

    def test_batch_has_no_routes_when_none_were_recorded(self) -> None:
        samples = [self.sample(0, [1, 2, 3, 4], has_forced_experts=False)]
        (step,) = plan_steps_of_ranks(
            samples, num_ranks=1, max_tokens_per_microbatch=40, num_mini_batches=1
        )
        assert build_rollout_minibatches(step)[0].microbatches[0].packed.routes_TR is None


def told(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=np.int16).tobytes()


def test_episode_keeps_for_each_token_what_it_was_sampled_with() -> None:
    """The last request was fed all tokens before it, maybe to newer weights."""
    walked = _EpisodeRecord(request(0), adds_rewards=False)
    walked.begin(SimpleNamespace(token_ids=[1, 2], answers=[]), is_own=False)  # type: ignore[arg-type]
    for ids, routes in (([3, 4], [10, 11, 12]), ([5, 6, 7], [20, 21, 22, 23, 24, 25])):
        walked.token_ids += ids
        reply = Completion(
            token_ids=tuple(ids),
            logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            text="",
            finish_reason="stop",
            seed=0,
            routes=told(routes),
        )
        walked.add_reply(reply, "")
    assert walked.completion("done", "").routes == told([10, 11, 12, 23, 24, 25])


class TestEngine:
    @pytest.fixture
    def core(self) -> VLLMCore:
        core = VLLMCore.__new__(VLLMCore)
        core.__dict__ |= {
            "_engine": MagicMock(),
            "_routes": {},
            "_requests": {5: request(0)},
            "_adapter_names": iter([None] * 9),
        }
        core._tokenizer = MagicMock(**{"decode.return_value": ""})
        core._records_routes, core._settings = (
            True,
            SimpleNamespace(fleet=FleetSection(routing_replay="on")),
        )
        return core

    def says(self, core: VLLMCore, *values: int) -> None:
        noted = np.array(values, dtype=np.int16)[:, None, None]
        core._engine.collective_rpc.return_value = [noted, noted]  # by each worker

    def test_new_weights_do_not_change_what_a_token_was_sampled_with(self, core: VLLMCore) -> None:
        self.says(core, 1, 2)
        core.weights_changed(1)
        self.says(core)  # it waits, after it was set aside for want of room
        core.weights_changed(2)
        self.says(core, 7, 8, 9)
        assert core._find_routes(5).flatten().tolist() == [1, 2, 9]
        assert core._find_routes(5).flatten().tolist() == [7, 8, 9], (
            "of another request of that key"
        )

    def asked(self, num_prompt: int, *, told: np.ndarray | None = None) -> Any:
        """A request with two tokens of a completion, as vLLM gives it back."""
        output = SimpleNamespace(
            finish_reason="length",
            logprobs=SimpleNamespace(logprobs=[-1.0, -1.0]),
            token_ids=[8, 9],
            weight_versions=[SimpleNamespace(version="0", start=0, end=2)],
            stop_reason=None,
            routed_experts=told,
        )
        return SimpleNamespace(request_id="5", prompt_token_ids=[1] * num_prompt, outputs=[output])

    @pytest.mark.parametrize("dtype", ["uint8", "uint16"])
    def test_routes_of_vllm_on_a_gpu_are_taken_as_they_are(
        self, core: VLLMCore, dtype: str
    ) -> None:
        core._records_routes = False
        core.weights_changed(1)
        asked = self.asked(1, told=np.array([[[200, 3]], [[0, 255]]], dtype=dtype))
        assert core._build_outcome(asked).routes == told([200, 3, 0, 255])
        core._engine.collective_rpc.assert_not_called()

    @pytest.mark.parametrize("num_told", [0, 3, 5])
    def test_completion_whose_experts_are_not_all_told_is_refused(
        self, core: VLLMCore, num_told: int
    ) -> None:
        self.says(core, *range(num_told))
        with pytest.raises(
            RuntimeError, match=f"of {num_told} tokens, not 4: use --routing_replay off"
        ):
            core._build_outcome(self.asked(3))

    def test_missing_routes_on_a_gpu_are_refused(self, core: VLLMCore) -> None:
        core._records_routes = False
        with pytest.raises(RuntimeError, match="of 0 tokens, not 4"):
            core._build_outcome(self.asked(3))
