"""The checks, the most telling first: each is the module of checks/ of that name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`limit_s` is the longest that it may take on a GPU, of all together ten minutes.

    Its module has `check(findings, work, rehearse)`.
    """

    name: str
    title: str
    limit_s: float


CHECKS = (
    Check(name="versions", title="Versions, and whether they go together", limit_s=30),
    Check(name="waits", title="Host waits in a step of DPO, SFT and GRPO", limit_s=75),
    Check(name="attention_speed", title="Attention of a 7B model, forward and backward", limit_s=40),
    Check(name="values", title="Values on the GPU against the CPU's (pytest -m gpu)", limit_s=100),
    Check(name="compiling", title="Compiled blocks: values, versions, memory budget", limit_s=105),
    Check(name="throughput", title="DPO of a 1B model: MFU, and memory against its plan", limit_s=165),
    Check(name="one_rank", title="One rank over NCCL: save, resume, export", limit_s=60),
    Check(name="handing_over", title="Weights from one process to another on one device", limit_s=25),
)
