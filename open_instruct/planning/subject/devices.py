"""Published numbers of the GPUs that plans are made for, and what a CPU is taken to do."""

import contextlib
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.core.errors import InputError

MEMORY = "memory_gib="
MOST_GIB = 1e6
CPU = "cpu"
# Of a core: 32 float32 operations a cycle (AVX2, two fused products) at 3 GHz.
TFLOPS_OF_A_CORE = 0.1
# Between processes of a host over gloo, and through a port of 10 Gb/s.
CPU_IN_NODE_GB_S = 2.0
CPU_CROSS_NODE_GB_S = 1.25
# Of a host's memory, by one process: two channels of DDR4-3200, which processes share.
CPU_MEMORY_GB_S = 50.0
# Words of product names that do not distinguish the GPUs below.
MAKERS_WORDS = frozenset(
    {"nvidia", "geforce", "rtx", "pro", "tesla", "amd", "instinct", "generation"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU and its links, or a process's share of a CPU.

    Rates are of one GPU in one direction, in 10^9 bytes a second.

    Example: `find_device("h100")` has 79.1 GiB, 989 TFLOP/s, 450 GB/s to its node and 50 GB/s to
    others.
    """

    name: str
    memory_gib: float
    peak_tflops_bf16: float
    in_node_gb_s: float
    cross_node_gb_s: float
    memory_gb_s: float = 3350
    """What it reads of its own memory; the default is an H100's."""

    has_bf16: bool = True
    """Whether it multiplies in bfloat16; else the peak is that of float32."""

    @property
    def memory_bytes(self) -> int:
        return round(self.memory_gib * 2**30)

    @property
    def is_cpu(self) -> bool:
        return self.name == CPU

    @property
    def words(self) -> frozenset[str]:
        """The words that distinguish its name: of "rtx6000-ada" 6000 and ada."""
        return _find_words(self.name)


# Memory is what CUDA gives to programs, as PyTorch's out-of-memory errors tell it ("total capacity
# of 79.1 GiB"): a little less than the 80, 80, 141 and 180 GB of the data sheets. Arithmetic is
# dense bfloat16, summed in float32; data sheets of Hopper and Blackwell print twice that, for
# sparse matrices. NVLink is printed for both directions together. The network is that of NVIDIA's
# own DGX of the kind, one port for each GPU; of cards that no DGX has, that of a cloud's node of
# eight, or where no cloud has them a port of 25 Gb/s for each. Bandwidths of memory are of the same
# sheets.
_KNOWN = (
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s, NVLink 600 GB/s. DGX A100 data sheet: 8 x 200
    # Gb/s.
    Device(
        name="a100",
        memory_gib=79.1,
        peak_tflops_bf16=312,
        in_node_gb_s=300,
        cross_node_gb_s=25,
        memory_gb_s=2039,
    ),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s sparse, NVLink 900 GB/s. DGX H100 data sheet: 8 x
    # 400 Gb/s.
    Device(
        name="h100",
        memory_gib=79.1,
        peak_tflops_bf16=989,
        in_node_gb_s=450,
        cross_node_gb_s=50,
        memory_gb_s=3350,
    ),
    # NVIDIA H200 SXM data sheet: 1,979 TFLOP/s sparse, NVLink 900 GB/s. DGX H200 data sheet: 8 x
    # 400 Gb/s.
    Device(
        name="h200",
        memory_gib=139.8,
        peak_tflops_bf16=989,
        in_node_gb_s=450,
        cross_node_gb_s=50,
        memory_gb_s=4800,
    ),
    # NVIDIA HGX B200 data sheet: 36 PFLOP/s sparse of 8, NVLink 1.8 TB/s. DGX B200 data sheet: 8 x
    # 400 Gb/s.
    Device(
        name="b200",
        memory_gib=178.3,
        peak_tflops_bf16=2250,
        in_node_gb_s=900,
        cross_node_gb_s=50,
        memory_gb_s=8000,
    ),
    # AMD Instinct MI300X data sheet: 1,307 TFLOP/s, 192 GB, seven links of 128 GB/s in both
    # directions. MI300X platform: 8 x 400 Gb/s.
    Device(
        name="mi300x",
        memory_gib=191.9,
        peak_tflops_bf16=1307,
        in_node_gb_s=448,
        cross_node_gb_s=50,
        memory_gb_s=5300,
    ),
    # NVIDIA Ada GPU architecture, appendix A: 165.2 TFLOP/s, 24 GB, PCIe 4.0 x16.
    Device(
        name="rtx4090",
        memory_gib=23.6,
        peak_tflops_bf16=165.2,
        in_node_gb_s=32,
        cross_node_gb_s=3.125,
        memory_gb_s=1008,
    ),
    # NVIDIA RTX Blackwell GPU architecture, appendix A: 209.5 TFLOP/s, 32 GB, PCIe 5.0 x16.
    Device(
        name="rtx5090",
        memory_gib=31.3,
        peak_tflops_bf16=209.5,
        in_node_gb_s=64,
        cross_node_gb_s=3.125,
        memory_gb_s=1792,
    ),
    # NVIDIA RTX 6000 Ada data sheet: 1,457 TFLOP/s in float8, sparse: a quarter of that. 48 GB,
    # PCIe 4.0 x16.
    Device(
        name="rtx6000-ada",
        memory_gib=47.4,
        peak_tflops_bf16=364.2,
        in_node_gb_s=32,
        cross_node_gb_s=3.125,
        memory_gb_s=960,
    ),
    # NVIDIA RTX PRO Blackwell GPU architecture: 503.8 TFLOP/s, 96 GB, PCIe 5.0 x16.
    Device(
        name="rtx6000-blackwell",
        memory_gib=94.9,
        peak_tflops_bf16=503.8,
        in_node_gb_s=64,
        cross_node_gb_s=3.125,
        memory_gb_s=1792,
    ),
    # NVIDIA L40S data sheet: 362 TFLOP/s, 48 GB with ECC, PCIe 4.0 x16. AWS g6e.48xlarge: 400 Gb/s
    # for 8.
    Device(
        name="l40s",
        memory_gib=44.3,
        peak_tflops_bf16=362,
        in_node_gb_s=32,
        cross_node_gb_s=6.25,
        memory_gb_s=864,
    ),
    # NVIDIA A10G data sheet: 70 TFLOP/s, 24 GB with ECC, PCIe 4.0 x16. AWS g5.48xlarge: 100 Gb/s
    # for 8.
    Device(
        name="a10g",
        memory_gib=22.0,
        peak_tflops_bf16=70,
        in_node_gb_s=32,
        cross_node_gb_s=1.5625,
        memory_gb_s=600,
    ),
    # NVIDIA V100 SXM2 data sheet: 15.7 TFLOP/s in float32, 32 GB, NVLink 300 GB/s, and no bfloat16.
    # DGX-1: 4 x 100 Gb/s for 8.
    Device(
        name="v100",
        memory_gib=31.7,
        peak_tflops_bf16=15.7,
        in_node_gb_s=150,
        cross_node_gb_s=6.25,
        memory_gb_s=900,
        has_bf16=False,
    ),
)
DEVICES = {device.name: device for device in _KNOWN}


def find_device(name: str, *, num_sharing: int = 1) -> Device:
    """The device of a name.

    Args:
        name: of a GPU, in its maker's spelling too ("NVIDIA RTX 6000 Ada"); `cpu`; or
            `memory_gib=40` for any other GPU, whose speeds are taken to be an H100's.
        num_sharing: processes that share this machine's memory and cores, where it is `cpu`.

    Raises:
        InputError: there is no such name, or the memory is no positive number.
    """
    if name.startswith(MEMORY):
        with contextlib.suppress(ValueError):
            memory_gib = float(name.removeprefix(MEMORY))
            if 0 < memory_gib <= MOST_GIB:
                return replace(DEVICES["h100"], name=name, memory_gib=memory_gib)
    elif name.lower() == CPU:
        return find_cpu(num_sharing)
    else:
        words = _find_words(name)
        for device in DEVICES.values():
            if device.words == words:
                return device
    devices = [*DEVICES, CPU]
    other = f"of any other, give its memory, above 0 and at most {MOST_GIB:,.0f} GiB: {MEMORY}40"
    raise InputError(
        f"--gpu {name}: known are {', '.join(devices)}; {other}{suggest_nearest(name, devices)}",
        kind="bad_value",
    )


def find_cpu(num_sharing: int) -> Device:
    """A process's share of this machine's memory and cores, among `num_sharing` processes."""
    return Device(
        name=CPU,
        memory_gib=psutil.virtual_memory().total / num_sharing / 2**30,
        peak_tflops_bf16=TFLOPS_OF_A_CORE * (os.cpu_count() or 1) / num_sharing,
        in_node_gb_s=CPU_IN_NODE_GB_S,
        cross_node_gb_s=CPU_CROSS_NODE_GB_S,
        memory_gb_s=CPU_MEMORY_GB_S / num_sharing,
        has_bf16=False,
    )


def has_gpu_here() -> bool:
    """Whether a driver of NVIDIA's or AMD's shows a GPU of this machine, found without torch."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return False
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def find_gpu(product_name: str) -> Device | None:
    """The GPU of a driver's product name, such as "NVIDIA H100 80GB HBM3"; None if unknown."""
    text = product_name.lower()
    for device in DEVICES.values():
        if all(word in text for word in device.words):
            return device
    return None


def _find_words(name: str) -> frozenset[str]:
    words = re.findall(r"[a-z0-9]+", name.lower())
    distinctive = {word.removeprefix("rtx") for word in words}
    return frozenset(distinctive - MAKERS_WORDS - {""})
