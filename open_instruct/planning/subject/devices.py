"""Published numbers of the GPUs that plans are made for."""

import contextlib
from dataclasses import dataclass, replace

from open_instruct.config.parser import nearest
from open_instruct.errors import InputError

MEMORY = "memory_gib="
MOST_GIB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU and its links. Rates are of one GPU in one direction, in 10^9 bytes a second.

    Example: `device_named("h100")` has 79.1 GiB, 989 TFLOP/s, 450 GB/s to its node and 50 GB/s to others.
    """

    name: str
    memory_gib: float
    peak_tflops_bf16: float
    in_node_gb_s: float
    cross_node_gb_s: float

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)


# Memory is what CUDA gives to programs, as PyTorch's out-of-memory errors tell it ("total capacity of 79.1 GiB"): a
# little less than the 80, 80, 141 and 180 GB of the data sheets. Arithmetic is dense bfloat16; data sheets of Hopper
# and Blackwell print twice that, for sparse matrices. NVLink is printed for both directions together. The network is
# that of NVIDIA's own DGX of the kind: one port for each GPU.
_KNOWN = (
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, NVLink 600 GB/s. DGX A100 data sheet: 8 x 200 Gb/s.
    Device(name="a100", memory_gib=79.1, peak_tflops_bf16=312, in_node_gb_s=300, cross_node_gb_s=25),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s sparse, NVLink 900 GB/s. DGX H100 data sheet: 8 x 400 Gb/s.
    Device(name="h100", memory_gib=79.1, peak_tflops_bf16=989, in_node_gb_s=450, cross_node_gb_s=50),
    # NVIDIA H200 SXM data sheet: 1,979 TFLOP/s sparse, NVLink 900 GB/s. DGX H200 data sheet: 8 x 400 Gb/s.
    Device(name="h200", memory_gib=139.8, peak_tflops_bf16=989, in_node_gb_s=450, cross_node_gb_s=50),
    # NVIDIA HGX B200 data sheet: 36 PFLOP/s sparse of 8, NVLink 1.8 TB/s. DGX B200 data sheet: 8 x 400 Gb/s.
    Device(name="b200", memory_gib=178.3, peak_tflops_bf16=2250, in_node_gb_s=900, cross_node_gb_s=50),
)
DEVICES = {device.name: device for device in _KNOWN}


def device_named(name: str) -> Device:
    """The GPU of a name, or `memory_gib=40` for any other; of that, all speeds are taken to be an H100's.

    Raises:
        InputError: there is no such name, or the memory is no positive number.
    """
    if name.startswith(MEMORY):
        with contextlib.suppress(ValueError):
            memory_gib = float(name.removeprefix(MEMORY))
            if 0 < memory_gib <= MOST_GIB:
                return replace(DEVICES["h100"], name=name, memory_gib=memory_gib)
    elif name.lower() in DEVICES:
        return DEVICES[name.lower()]
    other = f"of any other, give its memory, above 0 and at most {MOST_GIB:,.0f} GiB: {MEMORY}40"
    raise InputError(f"--gpu {name}: known are {', '.join(DEVICES)}; {other}{nearest(name, DEVICES)}", kind="bad_value")
