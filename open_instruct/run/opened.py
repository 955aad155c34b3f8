"""Every training run first opens its process group, its layout, its run directory and its console."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from open_instruct.checkpoints.step_folder import latest_step, refuse_earlier_format
from open_instruct.config.backends import backend_named
from open_instruct.config.parser import parse
from open_instruct.config.resolved import as_flat_dict, changed_lengths, provenance, refuse_conflicts, write_config
from open_instruct.config.sections import ParallelSection
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.errors import InputError
from open_instruct.parallel import peers
from open_instruct.parallel.launch import idle_gpus, refuse_other_number
from open_instruct.parallel.layout import layout_of
from open_instruct.parallel.process import Process, on_main_process, start_process, stop_process
from open_instruct.records import ShardLayout
from open_instruct.run.console import Console
from open_instruct.run.run_directory import RunDirectory, log_to
from open_instruct.run.run_lock import locked
from open_instruct.wording import counted

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has been opened on this rank."""

    process: Process
    layout: ShardLayout
    directory: RunDirectory
    console: Console


@contextmanager
def open_run(config: TrainingConfig, command: str) -> Iterator[Run]:
    """Start the process group, decide the layout, and make the run directory ready; leave the group at the end.

    :raises InputError: if the flags cannot work on these nodes, the folder cannot be written, or it holds
        another run.
    """
    peers.doing("starting")
    process = start_process(timeout_s=config.parallel.dist_timeout_s, seed=config.optim.seed)
    layout = layout_of(config.parallel, process.gpus_per_node)
    refuse_other_number(config.parallel.num_processes, layout.gpus_per_node[layout.node_of(process.rank)])
    directory = RunDirectory(path=Path(config.run.output_dir))
    console = Console(speaks=process.rank == 0)
    peers.watch(config.parallel.dist_timeout_s)
    with ExitStack() as held:
        on_main_process(lambda: held.enter_context(made_ready(directory, config, layout, console, command)))
        log_to(directory.log, rank=process.rank)
        idle = idle_gpus(config.parallel, num_ranks=layout.world_size, num_gpus=torch.cuda.device_count())
        for warning in (*layout.warnings, *([idle] if idle else [])):
            console.warn(warning)
        console.say(f"{shared_by(layout, config.parallel)} on {process.device.type}")
        yield Run(process=process, layout=layout, directory=directory, console=console)
        # A failed run does not leave the group, since leaving waits for peers that may be gone.
        stop_process()


def shared_by(layout: ShardLayout, parallel: ParallelSection, *, who: str = "rank") -> str:
    """The layout in words, with the number of ranks: `2 ranks: DeepSpeed ZeRO-3`."""
    return (
        f"{counted(layout.world_size, who)}: {backend_named(parallel.backend).sharing(parallel, layout)}"
        + (f" x {layout.context_parallel_degree} context" if layout.context_parallel_degree > 1 else "")
        + (f" x {layout.tensor_parallel_degree} tensor" if layout.tensor_parallel_degree > 1 else "")
    )


def join_run(config: LearnerConfig) -> Run:
    """Join the ranks of a run whose folder another process holds; this process prints nothing, and writes to its log.

    :raises InputError: if the flags cannot work on these nodes.
    """
    process = start_process(timeout_s=config.parallel.dist_timeout_s, seed=config.optim.seed)
    layout = layout_of(config.parallel, process.gpus_per_node)
    directory = RunDirectory(path=Path(config.run.output_dir))
    log_to(directory.log, rank=process.rank)
    return Run(process=process, layout=layout, directory=directory, console=Console(speaks=False))


@contextmanager
def made_ready(
    directory: RunDirectory, config: LearnerConfig, layout: ShardLayout, console: Console, command: str
) -> Iterator[None]:
    """Make the folder of the run, leave its layout and its flags there, and keep other runs out while the block runs.

    One process does this for all.

    :raises InputError: if it cannot be written, is in use, or holds another run.
    """
    directory.create()
    with locked(directory.path, say=console.say):
        directory.remove_partials()
        if config.run.overwrite_output_dir:
            directory.remove_earlier_run()
        refuse_earlier_format(directory.path)
        if (step := latest_step(directory.path)) is not None:
            _refuse_another_run(config, directory, layout, step, console)
        directory.write_layout(layout)
        write_config(config, directory.config, {"world_size": layout.world_size} | provenance(), command=command)
        yield


def _refuse_another_run(
    config: LearnerConfig, directory: RunDirectory, layout: ShardLayout, step: int, console: Console
) -> None:
    """Refuse to continue a folder's checkpoints in another run, but for a longer one after the first has ended."""
    if not directory.config.exists():
        return
    try:
        before = parse(type(config), [str(directory.config)])
        saved = as_flat_dict(before)
    except InputError as error:
        raise InputError(
            f"{directory.config}, the settings of the run in that folder, cannot be read: {error}. Remove that file to "
            "go on without comparing them, or give another --output_dir"
        ) from error
    refuse_conflicts(
        saved,
        config,
        saved_data_parallel_world_size=directory.saved_data_parallel_world_size() or layout.data_parallel_world_size,
        data_parallel_world_size=layout.data_parallel_world_size,
        ended_after=step if directory.hf_model.is_dir() or directory.adapter.is_dir() else None,
    )
    was, now = (backend_named(of.backend).sharing(of, layout) for of in (before.parallel, config.parallel))
    if was != now:
        console.say(
            f"the run in {directory.path} was on {was}, and goes on on {now} with the same weights and optimizer "
            "states; sums are taken in another order, so losses may differ in their last digits"
        )
    if lengths := changed_lengths(saved, config):
        changes, schedule = "; ".join(lengths.values()), config.optim.lr_scheduler_type
        console.warn(
            f"the run in {directory.path} had ended after step {step}, and goes on from there ({changes}). "
            f"--lr_scheduler_type {schedule} and --warmup_ratio stretch over all steps of a run: the learning rate is "
            "from now on that of a run of the new length, which is higher than it was at the end"
        )
