"""How blocks run on a device: compiled or not, with which attention, and what is recomputed.

Settings without an effect are replaced, refused or warned of.

Decisions are pure functions of the device's facts, so tests can make them for devices that are not
there. FlashAttention 3 has not been run: it is used where PyTorch takes it, and only if its results
equal PyTorch's own.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib.util import find_spec

import torch
from olmo_core.nn.attention.flash_linear_attn_api import has_fla
from olmo_core.nn.transformer import Transformer
from olmo_core.nn.transformer import TransformerActivationCheckpointingMode as Mode
from olmo_core.train.train_module import TransformerActivationCheckpointingConfig
from torch.nn import attention as torch_attention

from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.attention.attention import attend_over_segments
from open_instruct.models.attention.segments import QKV, Segments
from open_instruct.models.delta_rule.mixer import DeltaRuleMixer
from open_instruct.models.hf.names import matches_module
from open_instruct.run.opening import Run

FA3 = "FA3"
FA3_PACKAGE = "flash_attn_interface"
HOPPER = 9
WITHOUT_FA3 = (
    "attention by PyTorch's own kernels; FlashAttention 3 is faster on this GPU: "
    "OPEN_INSTRUCT_FA3=1 scripts/install.sh"
)
# For bfloat16, whose steps are 2^-8 of a number.
TOLERANCE = 2e-2


def choose_kernels(
    model: Transformer,
    *,
    run: Run,
    memory: MemorySection,
    param_dtype: str,
    shares_prompts: bool,
) -> TransformerActivationCheckpointingConfig | None:
    """Choose the attention kernels, and return the activation checkpointing.

    The console warns of replaced settings.
    """
    device = run.process.device
    for warning in kernel_warnings(memory, param_dtype=param_dtype, device=device):
        run.console.warn(warning)
    has_delta_rule = any(isinstance(module, DeltaRuleMixer) for module in model.modules())
    if has_delta_rule and device.type == "cuda":
        run.console.warn(describe_delta_rule(shares_prompts=shares_prompts))
    message = choose_attention(device, param_dtype=param_dtype)
    if message is not None:
        run.console.say(message)
    return build_activation_checkpointing(memory, model=model, device=device)


def build_activation_checkpointing(
    memory: MemorySection, *, model: Transformer, device: torch.device
) -> TransformerActivationCheckpointingConfig | None:
    """The config; None: keep every activation.

    The compiler spends a memory budget, see `compiles`. On a CPU it is not asked to, and OLMo-core
    would silently keep every activation, so whole blocks are recomputed instead. Offloading
    recomputes blocks too, and moves their inputs to the host, see inputs_on_host.py.

    :raises InputError: a pattern of modules matches nothing in `model`.
    """
    mode = memory.activation_checkpointing
    budget = memory.activation_memory_budget
    if budget < 1.0 and device.type == "cuda":
        return TransformerActivationCheckpointingConfig(
            mode=Mode.budget, activation_memory_budget=budget
        )
    if budget < 1.0 or mode in ("full", "offload"):
        return TransformerActivationCheckpointingConfig(mode=Mode.full)
    if mode == "selected_modules":
        modules = _select_modules(memory.activation_checkpointing_modules, model)
        return TransformerActivationCheckpointingConfig(mode=Mode.selected_modules, modules=modules)
    return None


def _select_modules(patterns: Sequence[str], model: Transformer) -> list[str]:
    """The modules that `patterns` name, but none inside another.

    OLMo-core is given names, since a * in its own patterns matches dots too.
    """
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(matches_module([pattern], name) for name in names):
            parts = ", ".join(f"blocks.*.{name}" for name, _ in model.blocks["0"].named_children())
            raise InputError(
                f"--activation_checkpointing_modules {pattern}: the model has no module of that "
                f"name (a * stands for anything but a dot); the parts of its blocks are {parts}",
                kind="bad_value",
            )
    selected_modules: list[str] = []
    for name in names:
        is_inside_another = any(name.startswith(f"{outer}.") for outer in selected_modules)
        if matches_module(patterns, name) and not is_inside_another:
            selected_modules.append(name)
    return selected_modules


@lru_cache
def compiler_problem(device: torch.device) -> str | None:
    """Why PyTorch's compiler cannot compile a sum on `device`.

    On CUDA it wants Triton and a C compiler, on a CPU a C++ compiler.
    """
    try:
        torch.compile(lambda tensor: tensor + 1.0)(torch.zeros(8, device=device))
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def compiles(memory: MemorySection, *, layout: ShardLayout, device: torch.device) -> bool:
    """Whether blocks are compiled. On CUDA they are, unless --no_compile_model is given.

    Under tensor, context or expert parallelism they are compiled only on request, and so they are
    on a CPU, where a short run is over before the compiler is. On CUDA --activation_memory_budget
    is a request too, since the compiler is what spends that budget.

    :raises InputError: compilation was requested, and the compiler does not work.
    """
    on_cuda = device.type == "cuda"
    is_split = layout.model_parallel_degree * layout.expert_parallel_degree > 1
    is_asked = memory.compile_model or (on_cuda and memory.activation_memory_budget < 1)
    is_default = on_cuda and not is_split
    if memory.compile_model is False or not (is_asked or is_default):
        return False
    what = compiler_problem(device)
    if what is not None and is_asked:
        flag = "--compile_model" if memory.compile_model else "--activation_memory_budget"
        remedy = "Install Triton and a C compiler" if on_cuda else "Install a C++ compiler (g++)"
        raise InputError(
            f"{flag}: PyTorch's compiler does not work here ({what}). {remedy}, or leave the "
            "flag out and use --activation_checkpointing full where memory is short",
            kind="machine",
        )
    return what is None


def kernel_warnings(
    memory: MemorySection, *, param_dtype: str, device: torch.device
) -> Iterator[str]:
    """Warnings about settings that have no effect on this device, or leave its speed unused."""
    if device.type != "cuda":
        budget = memory.activation_memory_budget
        if budget < 1.0:
            yield (
                f"--activation_memory_budget {budget} is for CUDA: recomputing whole blocks "
                "instead (--activation_checkpointing full)"
            )
        elif memory.activation_checkpointing == "offload":
            yield (
                "--activation_checkpointing offload does without CUDA what full does: all is on "
                "the host"
            )
        return
    if param_dtype == "float32":
        yield (
            "--param_dtype float32 on CUDA has no variable-length attention (each document is a "
            "call of its own) and no tensor cores, not even in TF32: 8 to 10 times slower than "
            "--param_dtype bfloat16 by estimate, which keeps what is trained in float32 all the "
            "same"
        )
    what = compiler_problem(device) if memory.compile_model is None else None
    if what is not None:
        yield (
            f"PyTorch's compiler does not work here ({what}); blocks run uncompiled: install "
            "Triton and a C compiler"
        )


def describe_delta_rule(*, shares_prompts: bool) -> str:
    """What runs layers of the gated delta rule on CUDA in 16 bits."""
    slow = "in plain PyTorch, one chunk after the other"
    if not has_fla():
        return (
            f"layers of the gated delta rule run {slow}: pip install flash-linear-attention, "
            "which has a kernel"
        )
    kernel = (
        "layers of the gated delta rule run by flash-linear-attention's kernel, which no test "
        "has run on a GPU"
    )
    if not shares_prompts:
        return kernel
    return f"{kernel}; rows that share prompts {slow}: compare --prefix_sharing off"


def choose_attention(device: torch.device, *, param_dtype: str) -> str | None:
    """Activate FlashAttention 3 where it is installed and right; returns a message, or None.

    It is for GPUs of compute capability 9 alone.
    """
    has_door = hasattr(torch_attention, "restore_flash_attention_impl")
    if device.type != "cuda" or param_dtype == "float32" or not has_door:
        return None
    if torch.cuda.get_device_capability(device)[0] != HOPPER:
        return None
    if FA3 not in torch_attention.list_flash_attention_impls():
        return None
    if find_spec(FA3_PACKAGE) is None:
        return WITHOUT_FA3
    expected = try_attention(device)
    try:
        torch_attention.activate_flash_attention_impl(FA3)
        error = float((try_attention(device) - expected).norm() / expected.norm())
        if error <= TOLERANCE:
            return (
                f"attention by FlashAttention 3 ({FA3_PACKAGE}), as close as {error:.0e} to "
                "PyTorch's own in a trial"
            )
        what = f"in a trial it is {error:.0e} from PyTorch's own"
    except Exception as failure:
        what = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    if torch_attention.current_flash_attention_impl() is not None:
        torch_attention.restore_flash_attention_impl()
    return f"FlashAttention 3 is installed ({FA3_PACKAGE}) but left out: {what}"


def try_attention(device: torch.device) -> torch.Tensor:
    """Output and gradients, in one row, of attention over two documents whose heads share keys."""
    generator = torch.Generator().manual_seed(0)
    tensors: list[torch.Tensor] = []
    for num_heads in (4, 2, 2):
        values = torch.randn(256, num_heads, 64, generator=generator)
        tensors.append(values.to(device, torch.bfloat16).requires_grad_())
    output = attend_over_segments(
        QKV(*tensors), Segments.from_lengths((200, 56), (0, 0), device=device)
    )
    gradients = torch.autograd.grad(output.float().square().sum(), tensors)
    return torch.cat([each.detach().float().flatten() for each in (output, *gradients)])
