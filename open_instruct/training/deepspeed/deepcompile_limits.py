"""What --deepcompile cannot go with, as DeepSpeed 0.19's own source has it.

Neither torch nor DeepSpeed is imported.
"""

from collections.abc import Iterator

from open_instruct.config.training import LearnerConfig
from open_instruct.config.validation import find_changed
from open_instruct.training.deepspeed.settings import effective_zpg

WITHOUT = "; leave one out"
# Flags at whose named value DeepCompile would compute something else, or not at all, and why.
REASONS = {
    "adam_offload": (
        "the step of states in host memory reads gradients there, and DeepCompile writes none"
    ),
    "offload": "compiled passes gather weights by NCCL, which reads a GPU's memory alone",
    "tensor_parallel_degree": "DeepSpeed does not compile exchanges of split matrices with ZeRO's",
    "activation_checkpointing offload": (
        "compiled passes choose by themselves what they keep, and the copies to the host are not "
        "among it"
    ),
    "advantage_normalization_type gae": (
        "DeepCompile keeps its passes and parameters for the whole process, and a critic is a "
        "second engine there"
    ),
    "placement shared": "its buffers would stay on a GPU while engines are awake",
    "placement auto": "its buffers would stay on a GPU while engines are awake",
}


def find_deepcompile_problems(config: LearnerConfig) -> Iterator[str]:
    """What cannot work beside --deepcompile; nothing without it."""
    parallel = config.parallel
    if not parallel.deepcompile:
        return
    stage = parallel.deepspeed_stage
    if stage == 0:
        yield (
            "--deepcompile has no use under --deepspeed_stage 0, whose gradients DeepSpeed does "
            "not exchange in compiled passes; use 1, 2 or 3"
        )
    if stage == 1 and config.model.param_dtype == "bfloat16":
        yield (
            "--deepcompile: the optimizer of --deepspeed_stage 1 in bfloat16 has not the ranges "
            "that DeepCompile fills; use --deepspeed_stage 2 or 3, or --param_dtype float32"
        )
    if stage in (1, 2) and config.adapters is not None:
        yield (
            f"--use_lora with --deepcompile: at --deepspeed_stage {stage} DeepCompile takes no "
            "frozen weights; use --deepspeed_stage 3"
        )
    if effective_zpg(parallel) > 1:
        yield (
            f"--deepspeed_zpg {parallel.deepspeed_zpg} with --deepcompile: compiled passes gather "
            "weights from all ranks, never from second copies nearby; use 1"
        )
    for flag in find_changed(config, *dict.fromkeys(name.split()[0] for name in REASONS)):
        name = flag.removeprefix("--")
        reason = REASONS.get(name) or REASONS.get(name.split()[0])
        if reason:
            yield f"{flag} with --deepcompile: {reason}{WITHOUT}"


def find_deepcompile_warnings(config: LearnerConfig) -> Iterator[str]:
    """What --deepcompile changes without being asked; nothing without it."""
    if not config.parallel.deepcompile:
        return
    yield "--deepcompile: the plan counts memory, traffic and time of a run without it"
    if config.model.param_dtype == "bfloat16":
        yield (
            "--deepcompile: ranks add up gradients in bfloat16, and in float32 without it; losses "
            "and norms differ by that rounding"
        )
