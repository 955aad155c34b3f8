"""What cannot be of learners and engines on the same GPUs: in turns, or handing memory over."""

from collections.abc import Iterator

from open_instruct.config.flags import spell_value
from open_instruct.config.fleet_sections import FleetSection, LearnerParallelSection
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.errors import problems_of_kind


@problems_of_kind("conflict")
def prompts_ahead_problems(rollout: RolloutSection) -> Iterator[str]:
    """More prompts ahead than asynchronous steps have."""
    most_ahead = rollout.async_steps * rollout.num_unique_prompts_rollout
    if rollout.max_prompts_ahead > most_ahead:
        yield (
            f"--prompts_ahead {rollout.prompts_ahead}: --async_steps {rollout.async_steps} allows "
            f"those of later steps at most, {most_ahead} prompts; use so many, or more async steps"
        )


@problems_of_kind("conflict")
def shared_gpu_problems(
    fleet: FleetSection, parallel: LearnerParallelSection, *, sends_adapter: bool
) -> Iterator[str]:
    """What cannot go with --placement shared or mixed, or is for GPUs that are shared alone."""
    is_shared = fleet.placement == "shared"
    if fleet.weight_sync_backend == "ipc" and not (parallel.single_gpu_mode or is_shared):
        yield (
            "--weight_sync_backend ipc hands over memory of one device: it needs "
            "--placement shared or --single_gpu_mode; use auto"
        )
    if not fleet.takes_turns:
        return
    flag_words = f"--placement {fleet.placement}"
    degree = fleet.vllm_tensor_parallel_size
    learners = parallel.num_learners_per_node
    num_turning = fleet.count_turning_engines(sum(learners))
    if is_shared and fleet.vllm_num_engines not in (1, num_turning):
        yield (
            f"--vllm_num_engines {fleet.vllm_num_engines}: under --placement shared every "
            "learner's GPU has an engine, or a part of one; leave it out, or use --placement mixed "
            "for more engines"
        )
    if parallel.single_gpu_mode and not is_shared:
        yield "--single_gpu_mode has one device, and no other engines: use --placement shared"
    elif not is_shared and fleet.vllm_num_engines <= num_turning:
        yield (
            f"--vllm_num_engines {fleet.vllm_num_engines}: under --placement mixed the learners' "
            f"GPUs have {num_turning}, and further ones GPUs of their own; give all of them "
            "together, or use --placement shared"
        )
    if any(number % degree for number in learners):
        yield (
            f"--vllm_tensor_parallel_size {degree}: under {flag_words} it must divide "
            f"--num_learners_per_node {spell_value(learners)}, as an engine is on one node's GPUs"
        )
    if sends_adapter:
        yield (
            "--lora_sync adapter: engines that take turns give up the model beside it too; use "
            "merged"
        )
    if fleet.weight_sync == "delta":
        yield (
            "--weight_sync delta: engines that take turns have given up all weights, and take all; "
            "use auto or dense"
        )
    if fleet.weight_sync_backend == "nccl":
        yield (
            f"--weight_sync_backend nccl needs a GPU for each process, and {flag_words} has "
            "one for a learner and an engine; use auto"
        )
