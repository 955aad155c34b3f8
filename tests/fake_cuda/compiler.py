"""PyTorch's compiler for a GPU that is not there: kernels are written, assembled for it and listed,
none is launched.

Inductor writes them for tensors of the mode of `device.py`, Triton compiles them to PTX, and ptxas,
which lies in Triton's wheel, assembles that. The code that Inductor writes around the kernels runs:
it makes its tensors on the pretended GPU, and calls the products of matrices there.
"""

import contextlib
import io
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fake_cuda.device import H100
from tests.fake_cuda.program import REPOSITORY

TRITON = REPOSITORY / "build" / "triton"
"""Where `make triton` puts it: in an environment for CPUs, vLLM and PyTorch would take it for a
sign of a GPU.
"""
CAPABILITY = 10 * H100["major"] + H100["minor"]
ELF, OF_CUDA = b"\x7fELF", 190
USED = re.compile(r"(\d+) bytes spill stores.*?Used (\d+) registers", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One that was assembled: `variant` is one of the sizes of blocks that Inductor chooses from
    while it runs.

    Example: Kernel(name="triton_poi_fused_mul_silu_4", variant="XBLOCK 512, warps 8",
    target="sm_90a", registers=32, spilled_bytes=0, shared_bytes=0)
    """

    name: str
    variant: str
    target: str
    registers: int
    spilled_bytes: int
    shared_bytes: int


def has_triton() -> bool:
    return find_spec("triton") is not None or TRITON.is_dir()


def set_compiler_environment(folder: Path) -> None:
    """Inductor's caches are in `folder`, and it compiles in this process: workers would pretend
    nothing.

    Before `pretend_cuda`, as libraries that find Triton import Inductor, which reads this then. Not
    by its `config`, which is one for each thread, as the backward pass has its own.
    """
    os.environ |= {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def pretend_compiler() -> list[Kernel]:
    """Let Inductor compile for the pretended GPU; returns what was assembled so far.

    Before it `set_compiler_environment` and `pretend_cuda`; torch may be imported, its compiler not
    yet be used.
    """
    if find_spec("triton") is None:
        sys.path.append(str(TRITON))

    import torch
    import triton
    from torch._inductor.runtime import triton_helpers, triton_heuristics
    from triton.backends.compiler import GPUTarget

    triton.knobs.nvidia.dump_ptxas_log = True
    here: Any = torch._C
    here._cuda_getCurrentRawStream = lambda device: 0
    guards: Any = torch._C._dynamo.guards
    guards._empty_strided_cuda = _empty_strided
    guards._reinterpret_tensor = _reinterpreted
    _fold_constants_on_the_host()

    target = GPUTarget("cuda", CAPABILITY, H100["warp_size"])
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: target))
    triton_helpers.set_driver_to_gpu = lambda: None

    assembled: list[Kernel] = []
    compile_kernel = triton.compile

    def listed(source: Any, *how: Any, **more: Any) -> Any:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            made = compile_kernel(source, *how, **more)
        if said.getvalue():  # else Triton had it in its cache, so that it is listed
            assembled.append(_kernel(source, made, said.getvalue()))
        return made

    triton.compile = listed
    for launches in ("_make_launchers", "_dynamic_scale_rblock", "run"):
        setattr(triton_heuristics.CachingAutotuner, launches, lambda *arguments, **more: None)
    return assembled


def _kernel(source: Any, compiled: Any, said: str) -> Kernel:
    cubin, ptx = compiled.asm["cubin"], compiled.asm["ptx"]
    assert cubin.startswith(ELF) and int.from_bytes(cubin[18:20], "little") == OF_CUDA, cubin[:20]
    used = USED.search(said)
    assert used is not None, said
    spilled, registers = map(int, used.groups())
    blocks = {source.fn.arg_names[index]: size for (index,), size in source.constants.items()}
    return Kernel(
        name=source.fn.__name__,
        variant=", ".join(
            f"{name} {size}"
            for name, size in {**blocks, "warps": compiled.metadata.num_warps}.items()
        ),
        target=ptx.partition(".target ")[2].split()[0],
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=compiled.metadata.shared,
    )


def _empty_strided(size: Any, stride: Any, dtype: Any) -> Any:
    import torch

    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpreted(tensor: Any, size: Any, stride: Any, offset: int = 0) -> Any:
    """What Inductor does in C++, which knows nothing of fake tensors."""
    return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


def _fold_constants_on_the_host() -> None:
    """Inductor looks at the values of constants, and those of the pretended GPU have none."""
    from torch._inductor.fx_passes import joint_graph
    from torch.utils._python_dispatch import TorchDispatchMode

    class OnHost(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            where = {"device": "cpu"} if kwargs and kwargs.get("device") is not None else {}
            return func(*args, **(kwargs or {}) | where)

    folder: Any = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduced(folding: Any, node: Any) -> Any:
        with OnHost():
            return deduce(folding, node)

    folder._deduce_value = deduced
