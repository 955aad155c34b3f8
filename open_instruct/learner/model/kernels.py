"""The choice of kernels for a device: compiled blocks or not, and which attention; with a warning for float32.

Decisions are pure functions of the device's facts, so tests can make them for devices that are not there.
FlashAttention 3 has not been run: it is used where PyTorch offers it, and only if its results equal PyTorch's own.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.util import find_spec
from typing import cast

import torch
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module.transformer import TransformerActivationCheckpointingConfig
from torch.nn import attention as torch_attention

from open_instruct.config.sections import MemorySection
from open_instruct.config.training import LearnerConfig
from open_instruct.errors import InputError
from open_instruct.learner.model.activation_checkpointing import build_activation_checkpointing
from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments
from open_instruct.run.opened import Run
from open_instruct.shard_layout import ShardLayout

FA3, FA3_PACKAGE = "FA3", "flash_attn_interface"
HOPPER = 9
WITHOUT_FA3 = (
    "attention by PyTorch's own kernels; FlashAttention 3 is faster on this GPU: OPEN_INSTRUCT_FA3=1 scripts/install.sh"
)
PROBED_LENGTHS = (200, 56)
# Tolerance for bfloat16, whose steps are 2^-8 of a number.
PROBED_TOLERANCE = 2e-2

Problem = Callable[[torch.device], str | None]


def choose_kernels(
    model: Transformer, *, run: Run, config: LearnerConfig
) -> TransformerActivationCheckpointingConfig | None:
    """Choose the attention kernels, and return the activation checkpointing; the console warns of replaced settings."""
    device, param_dtype = run.process.device, config.model.param_dtype
    checkpointing, warnings = build_activation_checkpointing(config.memory, model=model, device=device)
    for warning in [*warnings, *kernel_warnings(config.memory, param_dtype=param_dtype, device=device)]:
        run.console.warn(warning)
    if message := choose_attention(device, param_dtype=param_dtype):
        run.console.say(message)
    return checkpointing


@lru_cache
def compiler_problem(device: torch.device) -> str | None:
    """Why PyTorch's compiler cannot compile a sum on `device`; on CUDA it wants Triton and a C compiler."""
    try:
        torch.compile(lambda tensor: tensor + 1.0)(torch.zeros(8, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def compiles(
    memory: MemorySection, *, layout: ShardLayout, device: torch.device, problem: Problem = compiler_problem
) -> bool:
    """Whether blocks are compiled. On CUDA they are, unless --no_compile_model is given.

    Under tensor or context parallelism they are compiled only on request. --activation_memory_budget is a request too,
    since the compiler is what spends that budget.

    :raises InputError: compilation was requested, and the compiler does not work.
    """
    is_asked = memory.compile_model or memory.activation_memory_budget < 1
    is_split = layout.tensor_parallel_degree * layout.context_parallel_degree > 1
    if device.type != "cuda" or memory.compile_model is False or (is_split and not is_asked):
        return False
    what = problem(device)
    if what is not None and is_asked:
        flag = "--compile_model" if memory.compile_model else "--activation_memory_budget"
        raise InputError(
            f"{flag}: PyTorch's compiler does not work here ({what}). Install Triton and a C compiler, or leave the "
            "flag out and use --activation_checkpointing full where memory is short"
        )
    return what is None


def kernel_warnings(
    memory: MemorySection, *, param_dtype: str, device: torch.device, problem: Problem = compiler_problem
) -> Iterator[str]:
    """Warnings about settings that leave the device's speed unused."""
    if device.type != "cuda":
        return
    if param_dtype == "float32":
        yield (
            "--param_dtype float32 on CUDA has no variable-length attention (each document is a call of its own) and "
            "no tensor cores, not even in TF32: 8 to 10 times slower than --param_dtype bfloat16 by estimate, which "
            "keeps what is trained in float32 all the same"
        )
    if memory.compile_model is None and (what := problem(device)) is not None:
        yield f"PyTorch's compiler does not work here ({what}); blocks run uncompiled: install Triton and a C compiler"


def takes_fa3(*, capability: tuple[int, int], has_package: bool, known: list[str]) -> bool:
    """Whether PyTorch can hand its attention to FlashAttention 3, which is for compute capability 9 alone."""
    return capability[0] == HOPPER and has_package and FA3 in known


def choose_attention(device: torch.device, *, param_dtype: str) -> str | None:
    """Activate FlashAttention 3 where it is installed and right. Returns a message for the console, or None."""
    has_door = hasattr(torch_attention, "restore_flash_attention_impl")
    if device.type != "cuda" or param_dtype == "float32" or not has_door:
        return None
    capability, has_package = torch.cuda.get_device_capability(device), find_spec(FA3_PACKAGE) is not None
    if capability[0] == HOPPER and not has_package:
        return WITHOUT_FA3
    known = torch_attention.list_flash_attention_impls()
    is_there = takes_fa3(capability=capability, has_package=has_package, known=known)
    return try_fa3(lambda: _probe(device)) if is_there else None


def try_fa3(probe: Callable[[], list[torch.Tensor]]) -> str:
    """Activate FlashAttention 3 if `probe` gives the same with and without it; otherwise keep PyTorch's attention."""
    expected = probe()
    try:
        torch_attention.activate_flash_attention_impl(FA3)
        # torch's maximum and not Python's, which may pass over NaN.
        off = float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(probe(), expected, strict=True)]).max())
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    else:
        if off <= PROBED_TOLERANCE:
            return f"attention by FlashAttention 3 ({FA3_PACKAGE}), as close as {off:.0e} to PyTorch's own in a trial"
        what = f"in a trial it is {off:.0e} from PyTorch's own"
    if torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()
    return f"FlashAttention 3 is installed ({FA3_PACKAGE}) but left out: {what}"


def _probe(device: torch.device) -> list[torch.Tensor]:
    """Output and gradients of a small causal row with grouped heads, computed in bfloat16 and returned as float32."""
    generator = torch.Generator().manual_seed(0)
    segments = Segments.of(PROBED_LENGTHS, (0, 0), device=device)
    qkv = QKV(*(torch.randn(sum(PROBED_LENGTHS), heads, 64, generator=generator) for heads in (4, 2, 2)))
    qkv = qkv.each(lambda tensor: tensor.to(device, torch.bfloat16).requires_grad_())
    output = attend_over_segments(qkv, segments)
    gradients = torch.autograd.grad(output.float().square().sum(), cast(tuple[torch.Tensor, ...], qkv))
    return [tensor.detach().float() for tensor in (output, *gradients)]
