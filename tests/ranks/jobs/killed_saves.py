"""Saves of GRPO's learner, and what a `kill -9` of all ranks would leave on the disk in each phase
of one.

What a killed process has written stays: so a copy of the run's folder, made in the middle of a
phase, is what a kill in it leaves.
"""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from open_instruct.checkpoints import safe_checkpointer, step_folder
from open_instruct.parallel.process import stop_process
from tests.ranks.jobs.checkpoints import NUM_STEPS, state_of
from tests.ranks.jobs.grpo_steps import Learner

PHASES = ("begun", "half written", "written", "unnamed", "published")
WHOLE = ("unnamed", "published")
"""In which the second save is complete, whether or not its folder has its name."""
PATIENCE_S = 300.0


def save_and_copy(cases: list[list[str]], ports: list[int]) -> list[list[dict[str, Any]]]:
    """Of each case the state at the first and at the second save, in each phase of which there is a
    copy.
    """
    results = []
    for flags, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        learner = Learner(flags, num_steps=NUM_STEPS)
        states = []
        for number in (1, 2):
            learner.take_step(7)
            if number == 2:
                _copy_in_each_phase(Path(learner.config.run.output_dir))
            learner.save({"mark": number})
            states.append(state_of(learner))
        learner.loop.close()
        _undo()
        results.append(states)
        stop_process()
    return results


def copy_of(output_dir: Path, phase: str) -> Path:
    return output_dir.with_name(f"{output_dir.name}, {phase}")


USUAL = (safe_checkpointer.write_own_files, step_folder.write_manifest, step_folder.publish)


def _undo() -> None:
    safe_checkpointer.write_own_files, step_folder.write_manifest, step_folder.publish = USUAL


def _copy_in_each_phase(output_dir: Path) -> None:
    """Have rank 0 copy the run's folder in each phase of the next save, while no rank writes."""
    write_own_files, write_manifest, publish = USUAL
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    others = [_mark(output_dir, other) for other in range(1, num_ranks)]

    def copy(phase: str) -> None:
        shutil.copytree(output_dir, copy_of(output_dir, phase))

    def write_in_turn(*arguments: Any) -> Any:
        if rank == 0:
            copy("begun")
            _mark(output_dir, 0).touch()
            _wait_for(lambda: all(mark.exists() for mark in others))
            copy("half written")
            return write_own_files(*arguments)
        _wait_for(_mark(output_dir, 0).exists)
        files = write_own_files(*arguments)
        _mark(output_dir, rank).touch()
        return files

    def write_manifest_last(*arguments: Any) -> None:
        copy("written")
        write_manifest(*arguments)

    def publish_last(*arguments: Any) -> None:
        copy("unnamed")
        publish(*arguments)
        copy("published")

    safe_checkpointer.write_own_files = write_in_turn
    step_folder.write_manifest, step_folder.publish = write_manifest_last, publish_last


def _mark(output_dir: Path, rank: int) -> Path:
    """The file that says that a rank has done its part."""
    return output_dir.with_name(f"{output_dir.name}, rank {rank}")


def _wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "another rank does not write"
        time.sleep(0.005)
