"""GRPO whose learners and engines kill themselves in the middle of a weight sync, or of a change of
turns, in phases that a test has named.

    DYING=FOLDER python tests/fleet/dying_run.py FLAGS

A file such as `compare-3` in FOLDER is the death of one process as it compares weights for version
3, and `rest-3` as its state leaves the device after step 3; the process takes the file away first,
so that it dies once. Engines know of it by a plugin of vLLM's, in `environment_of`.
"""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist

from open_instruct.commands.process import exit_process
from open_instruct.config.grpo import GRPOConfig
from open_instruct.grpo_olmo_core_actor import PolicyTrainerOLMoCoreProcess, run_grpo
from open_instruct.weight_sync.transports import GATHERED

REPOSITORY = Path(__file__).resolve().parents[2]
PHASES = {"compare": 1, "send": 0, "gather": 1, "rest": 0, "return": 1}
"""Of a learner's sync and its turns, with the rank that dies in it."""


def environment_of(folder: Path) -> dict[str, str]:
    """For a run with the deaths in `folder`: what an installer would have written beside the plugin
    is there too.
    """
    written = folder / "dying-1.0.dist-info"
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: dying\nVersion: 1.0\n")
    (written / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ndying = tests.fleet.dying_run:arm_receivers\n"
    )
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY))), "DYING": str(folder)}


def is_due(phase: str, version: int) -> bool:
    try:
        Path(os.environ["DYING"], f"{phase}-{version}").unlink()
    except FileNotFoundError:
        return False
    return True


class DyingLearner(PolicyTrainerOLMoCoreProcess):
    """A learner that dies with its first message, made or about to be sent, or with some of its
    state on the way between device and host.

    Where learners and engines take turns, learners gather for the engine beside each, as on GPUs.
    """

    def __init__(self, config: GRPOConfig, *, weight_sync_backend: str, weight_sync: str) -> None:
        way = GATHERED if config.fleet.takes_turns else weight_sync_backend
        super().__init__(config, weight_sync_backend=way, weight_sync=weight_sync)

    def move_to_host(self) -> None:
        self._die_moving("rest")
        super().move_to_host()

    def move_to_device(self) -> None:
        self._die_moving("return")
        super().move_to_device()

    def _die_moving(self, phase: str) -> None:
        from tests.ranks.jobs.delta_kills import dying

        mover = self.learner._mover
        moves = mover.is_on_device == (phase == "rest")
        if moves and self._dies_in(phase, self.learner.loop.step):
            blocks: Any = mover._blocks
            blocks.pieces = dying(blocks.pieces, 3)  # two storages have moved

    def _dies_in(self, phase: str, number: int) -> bool:
        return PHASES[phase] == self.run.process.rank and is_due(phase, number)

    def broadcast_to_vllm(self, version: int) -> None:
        from tests.ranks.jobs.delta_kills import dying

        due = [phase for phase in ("compare", "send", "gather") if self._dies_in(phase, version)]
        sender: Any = self.sender
        if "gather" in due:  # it has the other learner's part of a bucket, and gives none of its
            dist.broadcast = dying(dist.broadcast, 2)
        if "compare" in due:
            sender._sent_parts._encode_message = dying(sender._sent_parts._encode_message, 1)
        if "send" in due:
            sender._outgoing.put = dying(sender._outgoing.put, 1)
        super().broadcast_to_vllm(version)


def arm_receivers() -> None:
    """An engine dies once it has the message of one learner of two, or after some of the tensors
    that it is to load.
    """
    from open_instruct.weight_sync.changes import Mirror
    from open_instruct.weight_sync.receiver import IncomingWeights
    from tests.ranks.jobs.delta_kills import dying

    def stage(self: Any, version: int) -> None:
        if is_due("stage", version):
            self._mirror.apply_message = dying(self._mirror.apply_message, 2)
        staged(self, version)
        if is_due("apply", version):
            read = dying(lambda weight: weight, 3)
            self._mirror.weights = lambda: map(read, Mirror.weights(self._mirror))

    staged = IncomingWeights.stage
    IncomingWeights.stage = stage  # type: ignore[method-assign]


def main() -> int:
    return run_grpo(GRPOConfig, DyingLearner, None, program="grpo_olmo_core_actor.py")


if __name__ == "__main__":
    # Ray knows a learner's class by its module's name, which must not be `__main__` there.
    from tests.fleet.dying_run import main as main_of_package

    exit_process(main_of_package())
