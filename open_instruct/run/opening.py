"""Opens a training run: process group, layout, folder, console and plan."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import psutil
import torch

from open_instruct.checkpoints.step_folder import latest_step, refuse_another_format
from open_instruct.config.parser import parse
from open_instruct.config.resolved import (
    as_flat_dict,
    collect_provenance,
    describe_changed_lengths,
    refuse_conflicts,
    write_config,
)
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.config.validation import find_changed
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.launch import find_idle_gpus, refuse_other_rank_count
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.process import (
    Process,
    gather_objects,
    run_on_main_process,
    start_process,
    stop_process,
)
from open_instruct.parallel.status import this_process
from open_instruct.parallel.wording import describe_layout
from open_instruct.planning.plan import BATCH
from open_instruct.planning.start_check import StartCheck, check_plan
from open_instruct.planning.subject.build_workload import RunConfig
from open_instruct.run.console import Console
from open_instruct.run.run_directory import RunDirectory, start_log
from open_instruct.run.run_lock import lock_folder

ConfigT = TypeVar("ConfigT", bound=LearnerConfig)
PLAN_CHOICES = ("activation_checkpointing", "activation_checkpointing_modules")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run that has been opened on this rank."""

    process: Process
    layout: ShardLayout
    directory: RunDirectory
    console: Console


@contextmanager
def open_run(config: TrainingConfig, command: str) -> Iterator[Run]:
    """Start the process group, decide the layout, claim the folder; leave the group at the end.

    :raises InputError: if the flags cannot work on these nodes, the folder cannot be written, or it
        holds another run.
    """
    this_process.begin("starting")
    process = start_process(timeout_s=config.parallel.dist_timeout_s, seed=config.optim.seed)
    layout = find_layout(config.parallel, process.gpus_per_node, config.backend)
    refuse_other_rank_count(
        config.parallel.num_processes, layout.gpus_per_node[layout.find_node(process.rank)]
    )
    directory = RunDirectory(path=Path(config.run.output_dir))
    console = Console(speaks=process.rank == 0)
    this_process.watch_ranks(config.parallel.dist_timeout_s)
    claim = claim_run_folder(directory, config, layout, console, command)
    with ExitStack() as stack:
        run_on_main_process(lambda: stack.enter_context(claim))
        start_log(directory.log, rank=process.rank)
        idle = find_idle_gpus(
            config.parallel, num_ranks=layout.world_size, num_gpus=torch.cuda.device_count()
        )
        for warning in filter(None, [*layout.warnings, idle]):
            console.warn(warning)
        description = describe_layout(layout, config.parallel, config.backend)
        console.say(f"{description} on {process.device.type}")
        yield Run(
            process=process,
            layout=layout,
            directory=directory,
            console=console,
        )
        # A failed run does not leave the group, since leaving waits for peers that may be gone.
        stop_process()


def join_run(config: LearnerConfig) -> Run:
    """Join the ranks of a run whose folder another process holds, which alone prints.

    :raises InputError: if the flags cannot work on these nodes.
    """
    process = start_process(timeout_s=config.parallel.dist_timeout_s, seed=config.optim.seed)
    layout = find_layout(config.parallel, process.gpus_per_node, config.backend)
    directory = RunDirectory(path=Path(config.run.output_dir))
    start_log(directory.log, rank=process.rank)
    return Run(
        process=process,
        layout=layout,
        directory=directory,
        console=Console(speaks=False),
    )


@contextmanager
def claim_run_folder(
    directory: RunDirectory,
    config: LearnerConfig,
    layout: ShardLayout,
    console: Console,
    command: str,
) -> Iterator[None]:
    """Make the run's folder, write its layout and flags, and keep other runs out.

    One process does this for all.

    :raises InputError: if it cannot be written, is in use, or holds another run.
    """
    directory.create()
    with lock_folder(directory.path, say=console.say):
        directory.remove_partials()
        if config.run.overwrite_output_dir:
            directory.remove_earlier_run()
        refuse_another_format(directory.path)
        step = latest_step(directory.path)
        if step is not None:
            refuse_another_run(config, directory, layout, step, console)
        directory.write_layout(layout)
        facts = {"world_size": layout.world_size} | collect_provenance()
        write_config(config, directory.config, facts, command=command)
        yield


def plan_run(config: ConfigT, run: Run, folder: Path) -> ConfigT:
    """Print the plan of a run whose ranks have met; `folder` holds the model's config.json.

    Returns the flags with the plan's choices for the smallest device, the same on every rank.

    :raises InputError: if it surely cannot fit, on every rank.
    """
    device = run.process.device
    nodes = run.layout.gpus_per_node
    num_sharing = nodes[run.layout.find_node(run.process.rank)]
    memory_bytes = min(gather_objects(find_memory_bytes(device, num_sharing=num_sharing)))
    on_cuda = device.type == "cuda"
    run_config = cast(RunConfig, config)  # the planner checks its type
    warn_noop_offload(config, run.console, on_cuda=on_cuda)

    def say() -> dict[str, Any]:
        check = check_plan(
            run_config, nodes, model_folder=str(folder), memory_bytes=memory_bytes, on_cuda=on_cuda
        )
        return say_plan(check, run.console, run.directory)

    return apply_plan(config, run_on_main_process(say))


def warn_noop_offload(config: LearnerConfig, console: Console, *, on_cuda: bool) -> None:
    """Name the flags that offload to the host's memory where there is no other memory."""
    if not on_cuda and config.parallel.backend == "olmo_core":
        for flag in find_changed(config, "adam_offload", "offload"):
            console.say(f"{flag} changes nothing without CUDA: all is on the host")


def say_plan(check: StartCheck, console: Console, directory: RunDirectory) -> dict[str, Any]:
    """Print the plan of a run and write it to the run's folder; `apply_plan` reads the result.

    One process does this for all.
    """
    console.say(check.line, style="yellow" if check.warning else None)
    if check.warning:
        console.warn(check.warning)
    directory.write_plan(check.memory)
    return check.memory


def apply_plan(config: ConfigT, plan: Mapping[str, Any]) -> ConfigT:
    """The flags with the saved plan's choice for --activation_checkpointing auto, if any."""
    if config.memory.activation_checkpointing != "auto":
        return config
    choices = {name: plan[name] for name in PLAN_CHOICES if plan.get(name)}
    memory = replace(config.memory, **({"activation_checkpointing": "none"} | choices))
    batch = {name: plan[name] for name in BATCH if name in plan}
    return replace(config, memory=memory, optim=replace(config.optim, **batch))


def find_memory_bytes(device: torch.device, *, num_sharing: int) -> int:
    """The bytes of a GPU; without CUDA `num_sharing` processes share the host's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total // num_sharing


def refuse_another_run(
    config: LearnerConfig,
    directory: RunDirectory,
    layout: ShardLayout,
    step: int,
    console: Console,
) -> None:
    """Refuse to continue another run's checkpoints; a run that has ended may become longer."""
    if not directory.config.exists():
        raise InputError(
            f"{directory.path} holds checkpoints, and no config.yaml with the flags of the run "
            "that wrote them: put that back, give another --output_dir, or "
            "--overwrite_output_dir to remove the run and start afresh",
            kind="other_run",
            flag="output_dir",
        )
    try:
        before = parse(type(config), [str(directory.config)])
        saved_flags = as_flat_dict(before)
    except InputError as error:
        raise InputError(
            f"{directory.config}, the settings of the run in that folder, cannot be read: "
            f"{error}. Mend it to go on with that run, or give another --output_dir",
            kind="unreadable_file",
        ) from error
    world = layout.data_parallel_world_size
    has_ended = directory.hf_model.is_dir() or directory.adapter.is_dir()
    worlds = (directory.read_data_parallel_world_size() or world, world)
    refuse_conflicts(saved_flags, config, worlds=worlds, ended_after=step if has_ended else None)
    earlier = config.backend.sharing(before.parallel, layout)
    now = config.backend.sharing(config.parallel, layout)
    if earlier != now:
        console.say(
            f"the run in {directory.path} had {earlier}, and goes on with {now}. Weights and "
            "optimizer states stay the same; sums are taken in another order, so losses may "
            "differ in their last digits"
        )
    lengths = describe_changed_lengths(saved_flags, config)
    if lengths:
        schedule = config.optim.lr_scheduler_type
        console.warn(
            f"the run in {directory.path} had ended after step {step}, and goes on from there "
            f"({'; '.join(lengths.values())}). --lr_scheduler_type {schedule} and --warmup_ratio "
            "stretch over all steps of a run: the learning rate is from now on that of a run of "
            "the new length, which is higher than it was at the end"
        )
