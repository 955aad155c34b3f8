"""Engines that kill themselves in phases of a weight sync, one after the other: a plugin of vLLM's.

A folder has a file for each death, `0-begin`, `1-join` and so on. The engine that comes into the
phase of the first one dies there, and leaves `died-0-begin`, with the time of its death, in place
of it. Where what has changed is sent, an engine dies only while that travels, which the first
version that a channel carries does not.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
VARIABLE = "DEATHS_OF_ENGINES"

PHASES_OF_WHOLE_WEIGHTS = ("begin", "join", "take", "load", "finish")
PHASES_OF_CHANGES = ("stage", "begin", "load", "finish")
PHASES_OF_TURNS = ("release", "load", "retake")
"""An engine has given up its memory; has some weights of the next version; has its cache again."""


def write_deaths(folder: Path, phases: Sequence[str]) -> dict[str, str]:
    """Returns the environment of a run whose engines die so."""
    written = folder / "dying_engines-1.0.dist-info"  # what an installer would have written
    written.mkdir(parents=True)
    (written / "METADATA").write_text("Metadata-Version: 2.1\nName: dying-engines\nVersion: 1.0\n")
    plugin = "dying_engines = tests.fleet.dying_engines:arm_engines"
    (written / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{plugin}\n")
    for number, phase in enumerate(phases):
        (folder / f"{number}-{phase}").touch()
    return {"PYTHONPATH": os.pathsep.join(map(str, (folder, REPOSITORY))), VARIABLE: str(folder)}


def read_deaths(folder: Path) -> dict[str, float]:
    """When engines died, in seconds since the epoch, by phase in their order."""
    files = sorted(folder.glob("died-*"))
    return {file.name.split("-")[2]: float(file.read_text()) for file in files}


def is_due(phase: str) -> bool:
    left = sorted(Path(os.environ[VARIABLE]).glob("[0-9]-*"))
    return bool(left) and left[0].name.endswith(f"-{phase}")


def die_in(phase: str) -> None:
    """End this process, if that is the next death."""
    if not is_due(phase):
        return
    due = sorted(Path(os.environ[VARIABLE]).glob("[0-9]-*"))[0]
    died = due.with_name(f"died-{due.name}")
    try:
        due.rename(died)
    except FileNotFoundError:  # another engine was quicker
        return
    died.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


def count_versions(incoming: Any) -> int:
    """Those that a channel has carried, with the one that has been staged."""
    return int(incoming._position // len(incoming._manifest.buckets))


def carries_changes(incoming: Any) -> bool:
    """Whether the version that is put in place came as what has changed, or none ever does."""
    return incoming._mirror is None or count_versions(incoming) > 1


def arm_engines() -> None:
    """Let the methods that vLLM adds to its workers, and what they call, end the process."""
    from open_instruct.weight_sync.receiver import IncomingWeights, WeightReceiver

    join, begin, finish = (
        WeightReceiver.open_channel,
        WeightReceiver.start_update,
        WeightReceiver.finish_update,
    )
    stage, buckets = IncomingWeights.stage, IncomingWeights.buckets

    @wraps(join)  # a worker's methods are called by their names
    def join_or_die(self: Any, info: dict[str, Any]) -> None:
        die_in("join")
        join(self, info)

    @wraps(begin)
    def begin_or_die(self: Any) -> None:
        begin(self)  # which takes the layers apart
        if carries_changes(self.incoming_weights):
            die_in("begin")

    @wraps(finish)
    def finish_or_die(self: Any) -> None:
        if carries_changes(self.incoming_weights):
            die_in("finish")
        finish(self)

    def stage_or_die(self: Any, version: int) -> None:
        if count_versions(self) > 0:
            change = self._mirror.apply_message

            def change_or_die(*args: Any) -> Any:
                changed = change(*args)
                die_in("stage")  # with a part in the copy, and others on their way
                return changed

            self._mirror.apply_message = change_or_die
        stage(self, version)

    def buckets_or_die(self: Any) -> Iterator[Any]:
        for weights in buckets(self):
            if self._mirror is None:
                die_in("take")  # a bucket has come, and nothing of it is loaded
            yield load_or_die(weights) if carries_changes(self) else weights

    release, take_memory = WeightReceiver.release_memory, WeightReceiver.take_memory

    @wraps(release)
    def release_or_die(self: Any) -> int:
        num_bytes = release(self)
        die_in("release")
        return num_bytes

    @wraps(take_memory)
    def take_memory_or_die(self: Any, part: Any) -> None:
        take_memory(self, part)
        if part == "kv_cache":
            die_in("retake")

    WeightReceiver.release_memory = release_or_die  # type: ignore[method-assign]
    WeightReceiver.take_memory = take_memory_or_die  # type: ignore[method-assign]
    IncomingWeights.stage = stage_or_die  # type: ignore[method-assign]
    IncomingWeights.buckets = buckets_or_die  # type: ignore[method-assign]
    WeightReceiver.open_channel = join_or_die  # type: ignore[method-assign]
    WeightReceiver.start_update = begin_or_die  # type: ignore[method-assign]
    WeightReceiver.finish_update = finish_or_die  # type: ignore[method-assign]


def load_or_die(weights: Iterator[Any]) -> Iterator[Any]:
    for number, weight in enumerate(weights):
        if number == 2:
            die_in("load")  # two tensors are in the model
        yield weight
