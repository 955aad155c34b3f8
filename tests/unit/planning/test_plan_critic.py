"""A run with a critic is planned as two models that are trained in turn, each at rest while the
other learns.
"""

from dataclasses import replace

import pytest

from open_instruct.commands.plan import parse_request
from open_instruct.planning.memory.parts import CRITIC, CUDA, INTERPRETER, POLICY, SCRATCH
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.memory.scratch import PROCESS_BYTES
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.planning.traffic import traffic_per_step

RUN = (
    "grpo --model_name_or_path allenai/OLMo-2-1124-7B --num_learners_per_node 8 "
    "--activation_checkpointing full"
)
RUN += " --gpu h100 --pack_length 8192 --num_unique_prompts_rollout 64 --num_mini_batches 2"
GAE = " --advantages gae"
STAGE = " --backend deepspeed --deepspeed_stage "


def planned(words: str) -> Plan:
    return make_plan(parse_request(words.split()).setting)


def parts(plan: Plan, phase: str) -> dict[str, int]:
    return dict(next(each for each in plan.phases if each.name == phase).parts)


@pytest.mark.parametrize(
    "backend",
    [
        "",
        STAGE + "0 --param_dtype float32",
        *(STAGE + stage for stage in "123"),
        STAGE + "2 --adam_offload",
    ],
)
def test_policy_needs_what_it_needs_alone_and_the_critic_at_rest(backend: str) -> None:
    alone, both = planned(RUN + backend), planned(RUN + GAE + backend)
    assert [phase.name for phase in both.phases if phase.name != CRITIC] == [
        phase.name for phase in alone.phases
    ]
    for phase in alone.phases:
        with_critic = parts(both, phase.name)
        at_rest = with_critic.pop(CRITIC)
        assert with_critic.pop(CUDA) > parts(alone, phase.name)[CUDA]  # groups of its own
        assert with_critic == {label: size for label, size in phase.parts if label != CUDA}
        if phase.name == "load":
            assert at_rest <= parts(both, "forward")[CRITIC]


@pytest.mark.parametrize("backend", ["", STAGE + "2", STAGE + "3"])
def test_critic_needs_what_a_model_that_scores_does(backend: str) -> None:
    """It is planned as a run of its own, to which all else on the GPU is added."""
    plan = planned(RUN + GAE + backend)
    work, shape = plan.workload.critic_workload, plan.workload.critic.shape  # type: ignore[union-attr]
    assert shape.parameters[-1].shape == (1, 4096)
    phases = {
        each.name: each
        for each in memory_by_phase(plan.setting.backend.memory_model(shape, plan.layout, work))
    }
    of_learning = ("scoring pass", "forward", "backward", "optimizer step")
    worst = max((phases[name] for name in of_learning), key=lambda phase: phase.total_bytes)
    critic = parts(plan, CRITIC)
    policy_bytes = critic.pop(POLICY)
    assert critic.pop(CUDA) == parts(plan, "forward")[CUDA]
    assert critic == {label: size for label, size in worst.parts if label != CUDA}
    alone = planned(RUN + backend)
    kept = {
        label: size
        for label, size in parts(alone, "optimizer step").items()
        if label not in (SCRATCH, CUDA)
    }
    assert policy_bytes <= sum(kept.values())
    assert policy_bytes >= kept["parameters"] + kept["optimizer states"]


def test_resting_model_has_twelve_bytes_a_weight() -> None:
    """FSDP2 frees gradients at the end of a step: float32 weights and two moments of them stay, and
    RoPE's table.
    """
    plan = planned(RUN + GAE)
    rope = 2 * 4 * 8192 * 128
    num_params = plan.workload.critic.shape.num_params  # type: ignore[union-attr]
    # Norms and the score's one row do not divide by 8, and a step counter is 4 bytes a parameter.
    assert parts(plan, "forward")[CRITIC] == pytest.approx(12 * num_params / 8 + rope, rel=1e-4)


def test_values_are_one_pass_more_and_updates_are_the_policys() -> None:
    alone, both = planned(RUN), planned(RUN + GAE)
    assert both.workload.critic.num_rounds == 2  # type: ignore[union-attr]
    work, shape = both.workload.critic_workload, both.workload.critic.shape  # type: ignore[union-attr]
    critic_exchanges = traffic_per_step(shape, both.layout, work)
    assert (
        both.exchanges[len(alone.exchanges) - _num_syncs(alone) :][: len(critic_exchanges)]
        == critic_exchanges
    )
    # Recomputed blocks: policy 4 forward passes a microbatch and one for its log-probs, the critic
    # as many. Without logits it does less by the policy's head.
    head = 2 * shape.d_model * shape.vocab_size * work.label_tokens_per_microbatch
    passes = work.num_updates * work.num_microbatches * 3 + 2 * work.num_microbatches
    saved = passes * head / (both.setting.device.peak_tflops_bf16 * 1e12 * 0.4)
    assert both.time.compute_s == pytest.approx(2 * alone.time.compute_s - saved, rel=1e-3)


def _num_syncs(plan: Plan) -> int:
    return sum(exchange.axis == "sync" for exchange in plan.exchanges)


def test_other_critic_has_no_adapters() -> None:
    plan = planned(RUN + GAE + " --critic_model_name_or_path allenai/OLMo-2-0425-1B --use_lora")
    shape = plan.workload.critic.shape  # type: ignore[union-attr]
    assert shape == replace(model_shape("allenai/OLMo-2-0425-1B"), scores=True, is_tied=False)
    assert all(each.is_trained for each in shape.parameters)
    assert plan.setting.shape.adapters is not None


def test_check_at_start_counts_both_models() -> None:
    alone, both = planned(RUN), planned(RUN + GAE)
    assert both.state_bytes == pytest.approx(2 * alone.state_bytes, rel=0.07)


def test_checkpoints_have_the_critic_too() -> None:
    alone, both = (dict(planned(words).host.parts) for words in (RUN, RUN + GAE))
    copied = "a copy to write checkpoints from"
    assert 1.8 * alone[copied] < both[copied] < 2.05 * alone[copied]


def test_libraries_of_a_process_are_counted_once_without_a_gpu() -> None:
    setting = parse_request((RUN + GAE).split()).setting
    for phase in make_plan(replace(setting, on_cuda=False)).phases:
        assert dict(phase.parts)[INTERPRETER] == PROCESS_BYTES
    on_cuda, on_cpu = (
        make_plan(replace(setting, on_cuda=is_gpu)).memory for is_gpu in (True, False)
    )
    at_rest = on_cuda.resident_parts(0, is_training=False)[CRITIC]
    assert on_cpu.resident_parts(0, is_training=False)[CRITIC] == at_rest
