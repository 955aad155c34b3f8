"""The rounds in which ranks write a sharded model together, in whatever format.

A plan made from shapes alone assigns each tensor a file, and each file a writing rank, its owner.
Then all ranks go through rounds: in each round every owner receives the parts of its next tensor,
already cast, and writes it while the next one arrives. Beside its shards a rank holds these two
tensors, and its parts of the other owners'.

Everything is written to a sibling folder, which replaces an earlier export in the end, so that a
crash leaves the earlier export unchanged.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from olmo_core.distributed.utils import get_rank

from open_instruct.core.errors import InputError, RunError
from open_instruct.models import export_files
from open_instruct.models.export_checks import check_destination
from open_instruct.models.load import raise_together
from open_instruct.models.shards import LocalShard, gather_to_owner
from open_instruct.parallel.process import run_on_main_process

Append = Callable[
    [Path, export_files.PlannedFile, export_files.PlannedTensor, torch.Tensor], object
]
"""Writes the next tensor of a planned file in a folder; raises OSError if the disk fails."""


def prepare_export(source: Path, out: Path, num_bytes: int) -> None:
    """Make the folder that `out` is written in, on rank 0. Collective.

    :raises InputError: `out` is the source, or cannot be replaced or written.
    """
    run_on_main_process(partial(_prepare, source, out, num_bytes))


def _prepare(source: Path, out: Path, num_bytes: int) -> None:
    with export_files.translate_disk_errors(out, InputError):
        check_destination(source, out)
        export_files.prepare_folder(out, num_bytes)


def write_weights(
    folder: Path,
    plan: Sequence[export_files.PlannedFile],
    weights: Mapping[str, LocalShard],
    append: Append,
) -> list[str]:
    """Write every file of the plan: a tensor arrives while the one before it is written.

    Collective. `append` is called by a file's owner alone, for one tensor after the other. Returns
    what went wrong.
    """
    device = weights[plan[0].tensors[0].name].local.device
    if device.type != "cpu" and dist.is_initialized():
        # NCCL makes its communicator in the first call, which every rank must enter; not all ranks
        # send in every round.
        dist.all_reduce(torch.zeros(1, device=device))
    problems: list[str] = []

    def write(
        file: export_files.PlannedFile, tensor: export_files.PlannedTensor, values: torch.Tensor
    ) -> None:
        try:
            append(folder, file, tensor, values)
        except OSError as error:  # kept until the end, since peers still wait to send
            problems.append(export_files.explain_disk_error(folder / file.file_name, error))

    with ThreadPoolExecutor(max_workers=1) as disk:
        writing: list[Future[None]] = []
        for entries in export_files.plan_rounds(plan):
            parts = {
                owner: (weights[tensor.name], tensor.dtype)
                for owner, (_, tensor) in entries.items()
            }
            whole = gather_to_owner(parts)
            for earlier in writing:
                earlier.result()  # at most one tensor waits for the disk while the next arrives
            if whole is not None and not problems:
                writing = [disk.submit(write, *entries[get_rank()], whole)]
            del whole
        for last in writing:
            last.result()
    return problems


def finish_export(out: Path, write_other_files: Callable[[], None], problems: list[str]) -> None:
    """Complete the export on rank 0 and put it in its place, unless a rank has problems.

    Collective.

    :raises RunError: the disk filled up or failed; an earlier export is unharmed.
    """
    if get_rank() == 0:
        try:
            write_other_files()
        except OSError as error:
            problems.append(export_files.explain_disk_error(out, error))
    try:
        raise_together(problems, kind=RunError)
    except RunError:
        if get_rank() == 0:
            shutil.rmtree(export_files.find_partial_folder(out), ignore_errors=True)
        raise
    run_on_main_process(partial(export_files.put_in_place, out))
