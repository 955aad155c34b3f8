"""The checks, the most telling first: each a module of checks/ or node/ with `check(findings, work,
rehearse)`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`limit_s` is the longest that it may take on a GPU, of all together ten minutes.

    Example: `Check(name="waits", title="Host waits in a step of DPO, SFT and GRPO", limit_s=75)`.
    """

    name: str
    title: str
    limit_s: float
    folder: str = "checks"

    @property
    def module(self) -> str:
        return f"gpu_check.{self.folder}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """What is run on a machine with `num_gpus`, for which the packages `needed` must be there.

    Example: `Suite(num_gpus=1, needed=("torch",), checks=(Check(name="waits", title="Host waits",
    limit_s=75),))`.
    """

    num_gpus: int
    needed: tuple[str, ...]
    checks: tuple[Check, ...]


# Imported, because a package may be there and one that it needs may not.
OF_TRAINING = (
    *(
        "numpy",
        "jinja2",
        "torch",
        "transformers",
        "safetensors",
        "olmo_core.train",
        "open_instruct.train",
        "pytest",
    ),
)
VERSIONS = Check(name="versions", title="Versions, and whether they go together", limit_s=30)

ONE = Suite(
    num_gpus=1,
    needed=OF_TRAINING,  # neither ray nor vllm
    checks=(
        VERSIONS,
        Check(name="waits", title="Host waits in a step of DPO, SFT and GRPO", limit_s=75),
        Check(
            name="attention_speed",
            title="Attention of a 7B model, forward and backward",
            limit_s=40,
        ),
        Check(
            name="values", title="Values on the GPU against the CPU's (pytest -m gpu)", limit_s=90
        ),
        Check(
            name="compiling", title="Compiled blocks: values, versions, memory budget", limit_s=105
        ),
        Check(
            name="throughput",
            title="DPO of a 1B model: MFU, and memory against its plan",
            limit_s=150,
        ),
        Check(name="one_rank", title="One rank over NCCL: save, resume, export", limit_s=60),
        Check(
            name="handing_over",
            title="Weights from one process to another on one device",
            limit_s=25,
        ),
        Check(
            name="resting",
            title="A learner's state to host memory and back",
            limit_s=25,
        ),
    ),
)
NODE = Suite(
    num_gpus=8,
    needed=(*OF_TRAINING, "ray", "vllm"),
    checks=(
        VERSIONS,
        Check(
            name="layouts",
            title="FSDP, HSDP, TP and CP against one rank",
            limit_s=95,
            folder="node",
        ),
        Check(
            name="resumed",
            title="Replicas: asynchronous save, and resume",
            limit_s=75,
            folder="node",
        ),
        Check(
            name="channel",
            title="Weights to engines of one and of two devices",
            limit_s=45,
            folder="node",
        ),
        Check(
            name="engines",
            title="vLLM's log-probs against the learners'",
            limit_s=165,
            folder="node",
        ),
        Check(
            name="seven_b",
            title="DPO of a 7B model: MFU, and memory against its plan",
            limit_s=190,
            folder="node",
        ),
    ),
)
SUITES = {"one": ONE, "node": NODE}
