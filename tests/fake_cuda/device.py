"""A CUDA device that is not there: its tensors have shapes, dtypes and a device, but no values.

In a process of its own, on any build of torch and without a driver: `load_hooks`, before torch is
imported; then `pretend_cuda`; then everything inside `PretendedGPU` runs as on a GPU, and what
would make the host wait for the device is noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HOOKS = Path(__file__).with_name("hooks.cpp")
PACKAGE = str(Path(__file__).resolve().parents[2] / "open_instruct")


def load_hooks(folder: Path) -> None:
    """Compile hooks.cpp into `folder` and load it: torch looks for hooks once, while it is
    imported.
    """
    assert "torch" not in sys.modules, "torch is imported already, without the hooks"
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch_folder, built = Path(spec.submodule_search_locations[0]), folder / "hooks.so"
    command = [
        *(
            "g++",
            "-O0",
            "-shared",
            "-fPIC",
            "-std=c++20",
            f"-I{torch_folder / 'include'}",
            "-o",
            str(built),
        ),
        *(str(HOOKS), f"-L{torch_folder / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]
    subprocess.run(command, check=True)
    # Of a CUDA build the third too, which registers hooks and a guard of its own: ours come after
    # them.
    for name in ("libtorch_global_deps.so", "libtorch_cpu.so", "libtorch_cuda.so"):
        if (torch_folder / "lib" / name).exists():
            ctypes.CDLL(str(torch_folder / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built))


H100: dict[str, Any] = {
    "name": "NVIDIA H100 80GB HBM3",
    "gcnArchName": "",
    "major": 9,
    "minor": 0,
    "total_memory": 80 << 30,
    "multi_processor_count": 132,
    "warp_size": 32,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "shared_memory_per_block": 49152,
    "shared_memory_per_block_optin": 232448,
    "L2_cache_size": 50 << 20,
}

BY_INDEX = ("index", "index_put", "index_put_", "_index_put_impl_")


class Waits:
    """What made the host wait for the device so far: "file:line: what", each with its number."""

    def __init__(self) -> None:
        self.noted = Counter[str]()

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
        ours = [frame for frame in frames if frame.filename.startswith(PACKAGE)]
        # A backward pass runs in a thread of torch's, where none of our functions is on the stack.
        frame = (ours or frames)[-1]
        self.noted[f"{Path(frame.filename).name}:{frame.lineno}: {what}"] += 1

    def taken(self) -> dict[str, int]:
        """Those since the last call."""
        noted, self.noted = dict(self.noted), Counter()
        return noted


WAITS = Waits()


class Stream:
    """A stream on which nothing runs; also every event."""

    device_index, device_type, stream_id = 0, 1, 0

    def __init__(self, *arguments: Any, **more: Any) -> None:
        import torch

        self.device = torch.device("cuda", 0)

    def synchronize(self) -> None:
        WAITS.note("synchronize()")

    def record_event(self, event: Any = None) -> Any:
        return event or Stream()

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 0.0

    def is_capturing(self) -> bool:
        return False

    def _nothing(self, *arguments: Any) -> None: ...

    wait_stream = wait_event = record = wait = __exit__ = _nothing

    def __enter__(self) -> Stream:
        return self


def pretend_cuda() -> None:
    """Let `torch.cuda` speak of a device: it has streams, memory of which little is used, and the
    name of an H100.

    The libraries come after it: some keep functions of `torch.cuda` while they are imported
    (PyTorch's compiler), or ask them about the device (torchao). All that they ask is answered, so
    that none goes to a driver.
    """
    gc.disable()
    import torch

    stream = Stream()

    def always(value: Any) -> Callable[..., Any]:
        return lambda *arguments, **more: value

    answers = {
        **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
        **dict.fromkeys(("_lazy_init", "init", "set_device", "set_stream", "empty_cache"), None),
        **dict.fromkeys(
            ("manual_seed", "manual_seed_all", "set_sync_debug_mode", "reset_peak_memory_stats"),
            None,
        ),
        "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        **dict.fromkeys(
            ("current_device", "max_memory_allocated", "memory_allocated", "get_sync_debug_mode"), 0
        ),
        **dict.fromkeys(("current_stream", "default_stream"), stream),
        "memory_stats": {
            "allocated_bytes.all.peak": 3 << 30,
            "reserved_bytes.all.peak": 5 << 30,
            "num_alloc_retries": 2,
        },
        "device_count": 8,
        "stream": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
        "get_device_capability": (9, 0),
        "get_device_properties": SimpleNamespace(**H100),
        "get_device_name": H100["name"],
    }
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, always(answer))
    # By these the compiler goes to a device; it wants two functions.
    torch.cuda._exchange_device, torch.cuda._maybe_exchange_device = always(0), always(0)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = always(0)  # type: ignore[assignment]
    torch.Tensor.record_stream = always(None)  # type: ignore[method-assign, assignment]
    torch.cuda.Stream = torch.cuda.Event = Stream  # type: ignore[assignment, misc]
    torch.cuda.synchronize = lambda device=None: WAITS.note("torch.cuda.synchronize()")  # type: ignore[assignment]
    torch.accelerator.current_stream = always(stream)
    torch.accelerator.synchronize = lambda device=None: WAITS.note(
        "torch.accelerator.synchronize()"
    )  # type: ignore
    # Libraries stay: looking for garbage in them takes a tenth of the time, and to trace their
    # import half a minute.
    import olmo_core.train.train_module  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    gc.freeze()
    gc.enable()


def pretended_gpu() -> Any:
    """A mode in which tensors on "cuda" are fake and those on the CPU are real.

    A number that is read from the device is 0 or False, those of a list are 1; a mask there counts
    as all true.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class PretendedGPU(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
            FakeTensorMode.avoid_device_init = True
            # Kept: another tensor must not come to lie where a pinned one was.
            self.pinned: dict[int, torch.Tensor] = {}

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """PyTorch's compiler works within it: what it makes is called on tensors of this
            mode.
            """
            return True

        def __enter__(self) -> PretendedGPU:
            # torch.tensor(..., device="cuda") is made on the CPU first.
            torch._C._set_only_lift_cpu_tensors(True)
            super().__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            torch._C._set_only_lift_cpu_tensors(False)

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            kwargs = dict(kwargs or {})
            tensors = [
                leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)
            ]
            target = kwargs.get("device")
            to_cuda = target is not None and torch.device(target).type == "cuda"
            name = func.overloadpacket._qualified_op_name.removeprefix("aten::")
            if name == "_pin_memory" or kwargs.pop("pin_memory", False):
                made = args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)
                self.pinned[made.untyped_storage().data_ptr()] = made
                return made
            if name == "is_pinned":
                return args[0].untyped_storage().data_ptr() in self.pinned
            if not to_cuda and not any(isinstance(tensor, FakeTensor) for tensor in tensors):
                return func(*args, **kwargs)
            if name == "_local_scalar_dense":
                if args[0].device.type == "cuda":
                    WAITS.note("a number is read")
                return torch.zeros((), dtype=args[0].dtype).item()
            self._note(name, args, kwargs)
            with self.fake:
                if name == "masked_select":
                    return args[0].new_empty((args[0].numel(),))
                if name == "nonzero":
                    return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.int64)
                if name in BY_INDEX:
                    args = (
                        args[0],
                        [index for given in args[1] for index in without_mask(given)],
                        *args[2:],
                    )
                if name == "bincount":  # of ids below its third argument, as all of ours are
                    return args[0].new_empty((args[2],), dtype=torch.int64)
                if not all(issubclass(kind, FakeTensor) for kind in types):
                    return func(*args, **kwargs)
            # As within it, but at once.
            return self.fake.__torch_dispatch__(func, types, args, kwargs)

        def _note(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
            if name == "_to_copy":
                source, target = args[0], kwargs.get("device")
                device = source.device if target is None else torch.device(target)
                self._note_copy(source, device, non_blocking=kwargs.get("non_blocking", False))
            elif name == "copy_":
                self._note_copy(
                    args[1], args[0].device, non_blocking=len(args) > 2 and args[2], into=args[0]
                )
            elif name in ("nonzero", "masked_select", "bincount"):
                WAITS.note(name)
            elif name in BY_INDEX:
                # One number under a mask is filled in, without a look at the mask.
                fills = len(args) > 2 and args[2].device.type == "cpu" and args[2].numel() == 1
                for index in args[1]:
                    if is_mask(index) and not fills:
                        WAITS.note("a mask as an index")
                    elif index is not None and index.device.type != args[0].device.type:
                        WAITS.note("an index on the other device")

        def _note_copy(
            self,
            source: torch.Tensor,
            device: torch.device,
            *,
            non_blocking: bool,
            into: torch.Tensor | None = None,
        ) -> None:
            if {source.device.type, device.type} != {"cpu", "cuda"}:
                return
            on_host = source if source.device.type == "cpu" else into
            if non_blocking and on_host is None:  # PyTorch pins what it makes for such a copy
                return
            if non_blocking and on_host.untyped_storage().data_ptr() in self.pinned:
                return
            # CUDA lets the stream run dry before it copies from memory that is not pinned, whatever
            # it was asked.
            kind = "copy from memory that is not pinned" if non_blocking else "blocking copy"
            WAITS.note(f"{kind}, {source.device.type} to {device.type}, of {tuple(source.shape)}")

    def is_mask(index: torch.Tensor | None) -> bool:
        return index is not None and index.dtype in (torch.bool, torch.uint8)

    def without_mask(index: torch.Tensor | None) -> list[torch.Tensor | None]:
        """What is taken where all of a mask is true."""
        if index is None or not is_mask(index):
            return [index]
        return [index.new_empty((index.numel(),), dtype=torch.int64) for _ in range(index.dim())]

    def tolist(tensor: torch.Tensor) -> Any:
        WAITS.note("tolist()")
        return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    FakeTensor.numpy = lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).numpy()  # type: ignore
    return PretendedGPU()
