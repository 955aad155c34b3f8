"""Checkpoints of safetensors and JSON behind OLMo-core's interface, without any pickle.

Values that are no tensors of the model or the optimizer are written as JSON, exactly: what JSON has
no form for is tagged.

A save has three parts: all ranks agree on who writes which box, each rank writes its files, and
rank 0 gives the folder its name when all files are there. The first and the last are collective and
run on the main thread. A thread may write the files, from a copy, while the training goes on. It
makes that copy while the gradients of the next step are computed, as the weights change only in the
update after them.
"""

import base64
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from olmo_core.aliases import PathOrStr
from olmo_core.distributed.utils import all_reduce_value, get_rank, get_world_size
from olmo_core.train.checkpoint import Checkpointer
from olmo_core.train.train_module import TrainModule
from safetensors.torch import load, save

from open_instruct.checkpoints import step_folder
from open_instruct.checkpoints.background import copy_to_host, in_background
from open_instruct.checkpoints.parts import CheckpointPart, as_metadata, names_of_part
from open_instruct.checkpoints.step_folder import (
    INDEX,
    MANIFEST,
    Damaged,
    Files,
    Manifest,
    step_of,
    write_own_files,
)
from open_instruct.core.errors import RunError
from open_instruct.models.box_files import (
    Claim,
    Part,
    WrittenFile,
    assign_boxes,
    make_part,
    read_parts,
)
from open_instruct.models.load import raise_together
from open_instruct.parallel.process import gather_objects

ARRAY_KINDS = "biufc"  # numpy's kinds that are numbers

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnderWay:
    """A save whose files are being written in `part`, to be renamed to `final`."""

    part: Path
    final: Path
    copied: threading.Event  # set when the run's tensors are no longer read
    written: Future[Files]  # done when this rank has written its files
    saved: Future[None] = field(default_factory=Future)  # done when the folder has its name


@dataclass
class SafeCheckpointer(Checkpointer):
    """Writes and reads `step{N}` folders; see `step_folder` for what is in one.

    Args:
        start_model: fingerprint of the start model; a checkpoint of another one is refused.
        parts: what is saved beside the train module, by name.
    """

    start_model: str = ""
    parts: Mapping[str, CheckpointPart] = field(default_factory=dict)
    _claims: Mapping[str, Claim] = field(default_factory=dict, repr=False)
    _index: Mapping[str, Any] = field(default_factory=dict, repr=False)
    _copies: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _under_way: UnderWay | None = field(default=None, repr=False)

    def save(
        self,
        dir: PathOrStr,
        train_module: TrainModule,
        train_state: dict[str, Any],
        ephemeral: bool = False,
    ) -> None:
        """Write a checkpoint; collective.

        Raises:
            RunError: on every rank, if any could not write; what was there before is unharmed.
        """
        assert not ephemeral, "all checkpoints are alike"
        self._begin(Path(dir), train_module, train_state)
        self.finish()

    def save_async(
        self,
        dir: PathOrStr,
        train_module: TrainModule,
        train_state: dict[str, Any],
        ephemeral: bool = False,
    ) -> Future[None]:
        """As `save`, without waiting for the thread that writes a copy, alone on each rank.

        Call `wait_for_copy` before the weights or the optimizer change. The future has its result,
        and OLMo-core's callbacks are called, within the `finish` that finds it written: on the main
        thread, after the same step on every rank.
        """
        assert not ephemeral, "all checkpoints are alike"
        return self._begin(Path(dir), train_module, train_state, from_copy=True)

    @torch.no_grad()
    def _begin(
        self,
        final: Path,
        train_module: TrainModule,
        train_state: dict[str, Any],
        *,
        from_copy: bool = False,
    ) -> Future[None]:
        """Have a thread write this rank's files, from the weights or from a copy; collective."""
        self.finish()  # one at a time
        rank = get_rank()
        tensors, values = split(self.state_to_save(train_module))
        parts = {name: make_part(tensor) for name, tensor in tensors.items()}
        index = self._assign_boxes(parts)
        local_tensors: dict[str, torch.Tensor] = {}
        for name, entry in index.items():
            writers = [box_rank for box_rank, *_ in entry["boxes"]]
            if rank in writers:
                local_tensors[name] = parts[name].local

        def make_documents() -> dict[str, Any]:
            documents = {f"rank{rank}.json": to_json(train_state)}
            if rank == 0:
                step_folder.begin(final)
                values_of_json = {name: to_json(value) for name, value in values.items()}
                documents[INDEX] = {"tensors": index, "values": values_of_json}
            return documents

        documents = together(make_documents, kind=make_write_error(final))
        part = step_folder.add_suffix(final)
        copied = threading.Event()

        def write() -> Files:
            tensors = local_tensors
            try:
                if from_copy:
                    tensors = copy_to_host(local_tensors, self._copies)
            finally:
                copied.set()
            return write_own_files(part, rank, tensors, documents)

        self._under_way = UnderWay(
            part=part, final=final, copied=copied, written=in_background(write)
        )
        return self._under_way.saved

    def state_to_save(self, train_module: TrainModule) -> dict[str, Any]:
        """The state of the train module and of all parts, which share storage with the run's."""
        parts = {name: part.state_to_save() for name, part in self.parts.items()}
        return train_module.state_dict_to_save() | parts

    def wait_for_copy(self) -> None:
        """Return when a save under way has its copy, so that weights and optimizer may change."""
        if self._under_way is not None:
            self._under_way.copied.wait()

    def finish(self, *, waits: bool = True) -> bool:
        """Publish the save under way, if there is one and all ranks have written.

        Returns whether it did. Collective while a save is under way.

        Args:
            waits: wait until all ranks have written.

        Raises:
            RunError: on every rank, if any could not write; what was there before is unharmed.
        """
        save = self._under_way
        if save is None:
            return False
        if waits:
            wait([save.written])
        else:
            # Over gloo, so that no rank waits for a device.
            is_done = int(save.written.done())
            if not all_reduce_value(is_done, torch.device("cpu"), op=dist.ReduceOp.MIN):
                return False
        self._under_way = None
        try:
            written = together(save.written.result, kind=make_write_error(save.final))
            rank_files = gather_objects(written)
            together(partial(self._publish, save, rank_files), kind=make_write_error(save.final))
        except RunError:
            if get_rank() == 0:  # the disk may be full
                shutil.rmtree(save.part, ignore_errors=True)
            raise
        save.saved.set_result(None)
        return True

    def _publish(self, save: UnderWay, rank_files: Sequence[Files]) -> None:
        """Rank 0 writes the manifest and gives the folder its name."""
        if get_rank() == 0:
            files: dict[str, WrittenFile] = {}
            for each in rank_files:
                files |= each
            manifest = Manifest(
                step=step_of(save.final),
                num_ranks=len(rank_files),
                start_model=self.start_model,
                files=files,
            )
            step_folder.write_manifest(save.part, manifest)
            step_folder.publish(save.part, save.final)

    def load(
        self,
        dir: PathOrStr,
        train_module: TrainModule,
        *,
        load_trainer_state: bool | None = None,
        load_optim_state: bool | None = None,
        reset_optimizer_states_on_load: bool | None = None,
    ) -> dict[str, Any] | None:
        """Load into the train module, from any layout, and return the trainer's state.

        The caller has compared the files with their digests.

        Raises:
            RunError: on every rank, if any cannot read its part, or the checkpoint has another
                model.
        """
        assert not reset_optimizer_states_on_load, "the optimizer's state belongs to a checkpoint"
        self.wait_for_copy()
        folder = Path(dir)
        manifest = together(partial(step_folder.read_manifest, folder), kind=RunError)
        step_folder.refuse_another_start_model(folder, self.start_model)
        index = together(partial(read_index, folder), kind=RunError)
        saved_names = [*index["tensors"], *index["values"]]
        own_state = train_module.state_dict_to_load(
            as_metadata(saved_names), optim=load_optim_state
        )
        part_states: dict[str, dict[str, Any]] = {}
        for name, part in self.parts.items():
            part_state = part.state_to_load(as_metadata(names_of_part(name, saved_names)))
            if part_state is not None:
                part_states[name] = part_state
        state = own_state | part_states

        def fill() -> dict[str, Any]:
            tensors, _ = split(state)
            parts = {name: make_part(tensor) for name, tensor in tensors.items()}
            read_parts(folder, index["tensors"], parts)
            # Fused AdamW has settings that AdamW with moments on the host lacks: these stay.
            for name, holder, key in _find_leaves(state):
                if name in index["values"]:
                    holder[key] = from_json(index["values"][name])
            rank = get_rank() if get_rank() < manifest.num_ranks else 0
            path = folder / f"rank{rank}.json"
            train_state = cast(dict[str, Any], from_json(json.loads(path.read_bytes())))
            step = train_state["global_step"]
            if step != manifest.step:
                raise Damaged(f"{path} is of step {step}, and {MANIFEST} of step {manifest.step}")
            return train_state

        train_state = together(fill, kind=RunError)
        train_module.load_state_dict({name: state[name] for name in own_state})
        for name, part_state in part_states.items():
            self.parts[name].load_state(part_state)
        if load_trainer_state is False:
            return None
        return train_state

    @classmethod
    def dir_is_checkpoint(cls, dir: PathOrStr) -> bool:
        return (Path(dir) / MANIFEST).is_file()

    def _assign_boxes(self, parts: Mapping[str, Part]) -> Mapping[str, Any]:
        """Agree on the rank that writes each box: once, as a run's layout stays; collective."""
        claims = {name: part.claim for name, part in parts.items()}
        if self._claims != claims:
            self._claims = claims
            self._index = assign_boxes(gather_objects(claims))
        return self._index


def read_index(folder: Path) -> dict[str, Any]:
    """Where the files of a checkpoint have each tensor and each value."""
    index: dict[str, Any] = json.loads((folder / INDEX).read_bytes())
    return index


def make_write_error(final: Path) -> Callable[[str], RunError]:
    """A function that makes the error of a failed save, from the reason."""
    before = f"the checkpoint of step {step_of(final)} cannot be written to {final.parent}"
    after = (
        "Those written before are unharmed: make room, or mend what is said here, then give the "
        "same command again"
    )
    return lambda why: RunError(f"{before} ({why}). {after}")


def split(state: dict[str, Any]) -> tuple[dict[str, torch.Tensor | Part], dict[str, Any]]:
    """Split a state dict into tensors (or their parts) and other values, by sorted dotted names."""
    leaves = {name: holder[key] for name, holder, key in _find_leaves(state)}
    tensors: dict[str, torch.Tensor | Part] = {}
    values: dict[str, Any] = {}
    for name in sorted(leaves):
        if isinstance(leaves[name], torch.Tensor | Part):
            tensors[name] = leaves[name]
        else:
            values[name] = leaves[name]
    return tensors, values


def _find_leaves(
    state: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield each value that is no dictionary: its dotted name, its dictionary, its key there."""
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _find_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", state, key


def together(work: Callable[[], T], *, kind: Callable[[str], Exception]) -> T:
    """Do `work` on every rank; if it fails on any, all raise one `kind` that says what and where.

    Collective.
    """
    failures: list[str] = []
    result: T | None = None
    try:
        result = work()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if get_world_size() > 1:
            text = f"rank {get_rank()}: {text}"
        failures.append(text)
    raise_together(failures, kind=kind)
    return cast(T, result)


def to_json(value: Any) -> Any:
    """The value in a form that `json.dumps` accepts. Tensors are moved to the CPU.

    :raises TypeError: for a value that could not be read back exactly: an object, an enum, a
        subclass.

    Example::

        >>> to_json({"betas": (0.9, 0.99)})
        {'dict': [['betas', {'tuple': [0.9, 0.99]}]]}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value  # the text of a float is exact, NaN and infinity have one
    if isinstance(value, torch.Tensor):
        return {"tensor": base64.b64encode(save({"": value.detach().cpu().contiguous()})).decode()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in ARRAY_KINDS:
        kind = "array" if isinstance(value, np.ndarray) else "number"
        return {kind: to_json(torch.from_numpy(np.array(value)))}
    if type(value) is tuple:
        return {"tuple": [to_json(item) for item in value]}
    if type(value) is list:
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_json(key), to_json(item)] for key, item in value.items()]}
    raise TypeError(f"a checkpoint cannot hold a {type(value).__name__}")


def from_json(value: Any) -> Any:
    """The value that `to_json` was given.

    Raises an error of some kind for what `to_json` does not return.
    """
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(from_json(item) for item in value["tuple"])
    if "dict" in value:
        return {from_json(key): from_json(item) for key, item in value["dict"]}
    if "tensor" in value:
        return load(base64.b64decode(value["tensor"], validate=True))[""]
    if "array" in value:
        return from_json(value["array"]).numpy()
    return from_json(value["number"]).numpy()[()]
