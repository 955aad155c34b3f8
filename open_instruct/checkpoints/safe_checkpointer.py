"""OLMo-core's door to checkpoints of safetensors and JSON: nothing is pickled into a file, nothing unpickled from one.

A save is a plan that all ranks make (who writes which box), files that each rank writes by itself, and a name that
rank 0 gives when all are there. Only the plan and the name are collective.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from olmo_core.aliases import PathOrStr
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.train.checkpoint import Checkpointer, CheckpointerConfig
from olmo_core.train.train_module import TrainModule
from olmo_core.utils import wait_for
from torch.distributed.checkpoint.metadata import Metadata

from open_instruct.checkpoints.exact_json import from_json, to_json
from open_instruct.checkpoints.step_folder import (
    INDEX,
    MANIFEST,
    PART,
    Manifest,
    begin,
    publish,
    read_manifest,
    refuse_another_start_model,
    step_of,
    write_manifest,
)
from open_instruct.errors import RunError
from open_instruct.models.box_files import (
    Claim,
    Part,
    WrittenFile,
    part_of,
    read_parts,
    share_out,
    write_hashed,
    write_tensors,
)
from open_instruct.models.load import raise_together
from open_instruct.parallel.process import gathered

VISIBLE_WITHIN_S = 120.0  # a folder that another node made on a file system that is shared

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePlan:
    """Which boxes this rank writes, and where all lie; made once, as a layout does not change within a run."""

    claims: Mapping[str, Claim]
    index: Mapping[str, Any]
    own: tuple[str, ...]


@dataclass
class SafeCheckpointer(Checkpointer):
    """Writes and reads `step{N}` folders; see `step_folder` for what is in one.

    :param start_model: fingerprint of what the run began with; a checkpoint of a run with another is refused.
    """

    start_model: str = ""
    _plan: SavePlan | None = field(default=None, repr=False)

    def save(
        self, dir: PathOrStr, train_module: TrainModule, train_state: dict[str, Any], ephemeral: bool = False
    ) -> None:
        """:raises OSError: on every rank, if any could not write; what was there before is unharmed."""
        assert not ephemeral, "all checkpoints are alike"
        final, rank = Path(dir), get_rank()
        part = final.with_name(final.name + PART)
        tensors, values = split(train_module.state_dict_to_save())
        parts = {name: part_of(tensor) for name, tensor in tensors.items()}
        plan = self._planned(parts)
        _together(lambda: begin(final) if rank == 0 else None, kind=OSError)
        try:
            files = _together(lambda: write_own_files(part, rank, plan, parts, values, train_state), kind=OSError)
            of_ranks = gathered(files)
            _together(lambda: self._finish(part, final, of_ranks) if rank == 0 else None, kind=OSError)
        except OSError:
            if rank == 0:  # a full disk has better use for it
                shutil.rmtree(part, ignore_errors=True)
            raise

    def _finish(self, part: Path, final: Path, of_ranks: Sequence[Mapping[str, WrittenFile]]) -> None:
        files = {name: file for of_rank in of_ranks for name, file in of_rank.items()}
        manifest = Manifest(step=step_of(final), num_ranks=len(of_ranks), start_model=self.start_model, files=files)
        write_manifest(part, manifest)
        publish(part, final)

    def save_async(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("checkpoints are written while the training waits")

    def load(
        self,
        dir: PathOrStr,
        train_module: TrainModule,
        *,
        load_trainer_state: bool | None = None,
        load_optim_state: bool | None = None,
        reset_optimizer_states_on_load: bool | None = None,
    ) -> dict[str, Any] | None:
        """Fill the train module, from whatever layout, and return the trainer's state.

        The files are taken as they are: whoever chose the checkpoint has compared them with their digests.

        :raises RunError: on every rank, if any cannot read its part, or another model is in the checkpoint.
        """
        assert not reset_optimizer_states_on_load, "a checkpoint is gone on from whole"
        folder = Path(dir)
        manifest = _together(lambda: read_manifest(folder), kind=RunError)
        refuse_another_start_model(folder, manifest.start_model, self.start_model)
        index = _together(lambda: json.loads((folder / INDEX).read_bytes()), kind=RunError)
        state = train_module.state_dict_to_load(
            Metadata(state_dict_metadata=dict.fromkeys([*index["tensors"], *index["values"]])),  # type: ignore[arg-type]
            optim=load_optim_state,
        )

        def fill() -> dict[str, Any]:
            tensors, values = split(state)
            read_parts(folder, index["tensors"], {name: part_of(tensor) for name, tensor in tensors.items()})
            put_values(state, {name: from_json(index["values"][name]) for name in values})
            own = f"rank{get_rank()}.json" if manifest.num_ranks > get_rank() else "rank0.json"
            return cast(dict[str, Any], from_json(json.loads((folder / own).read_bytes())))

        train_state = _together(fill, kind=RunError)
        train_module.load_state_dict(state)
        return None if load_trainer_state is False else train_state

    @classmethod
    def dir_is_checkpoint(cls, dir: PathOrStr) -> bool:
        return (Path(dir) / MANIFEST).is_file()

    def _planned(self, parts: Mapping[str, Part]) -> SavePlan:
        claims = {name: part.claim for name, part in parts.items()}
        if self._plan is None or self._plan.claims != claims:
            index = share_out(gathered(claims))
            own = tuple(name for name, entry in index.items() if any(rank == get_rank() for rank, *_ in entry["boxes"]))
            self._plan = SavePlan(claims=claims, index=index, own=own)
        return self._plan


@dataclass
class SafeCheckpointerConfig(CheckpointerConfig):
    """What OLMo-core's `TrainerConfig` builds a `SafeCheckpointer` from."""

    start_model: str = ""

    def build(self, process_group: dist.ProcessGroup | None = None, **kwargs: Any) -> SafeCheckpointer:
        return SafeCheckpointer(process_group=process_group, start_model=self.start_model, **kwargs)


def write_own_files(
    part: Path, rank: int, plan: SavePlan, parts: Mapping[str, Part], values: Mapping[str, Any], train_state: Any
) -> dict[str, WrittenFile]:
    """This rank's files of a checkpoint; no other rank is asked anything."""
    wait_for(part.exists, f"waiting for {part}", timeout=VISIBLE_WITHIN_S)
    tensors, state = f"rank{rank}.safetensors", f"rank{rank}.json"
    files = {
        tensors: write_tensors(part / tensors, {name: parts[name].local for name in plan.own}),
        state: _write_json(part / state, to_json(train_state)),
    }
    if rank == 0:
        index = {"tensors": plan.index, "values": {name: to_json(value) for name, value in values.items()}}
        files[INDEX] = _write_json(part / INDEX, index)
    return files


def split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the other values of a state dict, by their dotted names, in order."""
    leaves = dict(sorted(_leaves(state)))
    tensors = {name: value for name, value in leaves.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: value for name, value in leaves.items() if name not in tensors}


def put_values(state: dict[str, Any], values: Mapping[str, Any], prefix: str = "") -> None:
    """Replace what is no tensor in `state` by `values`, which go by dotted names."""
    for key, value in state.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            put_values(value, values, f"{name}.")
        elif name in values:
            state[key] = values[name]


def _leaves(state: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _write_json(path: Path, value: Any) -> WrittenFile:
    return write_hashed(path, [json.dumps(value).encode()])


def _together(work: Callable[[], T], *, kind: Callable[[str], Exception]) -> T:
    """Do `work` on every rank; if it fails on any, all raise one `kind` that says what and where. Collective."""
    told, result = [], None
    try:
        result = work()
    except Exception as error:
        where = f"rank {get_rank()}: " if get_world_size() > 1 else ""
        told = [f"{where}{' '.join(f'{type(error).__name__}: {error}'.split())}"]
    raise_together(told, kind=kind)
    return cast(T, result)
