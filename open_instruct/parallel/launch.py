"""Start the ranks of a run on this machine by torch's elastic agent, as torchrun does.

The agent's own report is left out: the ranks print their errors, and their exit code is the
command's.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from open_instruct.config.sharding_sections import RanksSection
from open_instruct.core.errors import (
    EXIT_FAILURE,
    EXIT_INPUT,
    EXIT_OF_SIGNAL,
    InputError,
    stop_signals,
)
from open_instruct.core.text import spell_count

AUTO = "auto"
# The environment variable with the command line that started the ranks, for messages.
COMMAND_VARIABLE = "OPEN_INSTRUCT_COMMAND"
# A large model's last checkpoint takes longer than torchrun's 30 seconds; users who do not want it
# can kill the ranks.
SHUTDOWN_S = 300


def count_ranks_to_start(num_processes: str | None, environ: Mapping[str, str]) -> int | None:
    """The number of ranks to start by --num_processes; None for a rank, or for one process."""
    if num_processes is None or "WORLD_SIZE" in environ:
        return None
    number = _count_gpus() if num_processes == AUTO else int(num_processes)
    if number < 2:
        return None
    return number


def share_threads(num_processes: int) -> dict[str, str]:
    """Environment variables that share this machine's cores among `num_processes`.

    Threads of a matrix product spin while they wait, so one thread too many costs more than one too
    few.
    """
    num_threads = max(1, (os.cpu_count() or 1) // num_processes)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(num_threads))}


def start_ranks(
    script: Path,
    words: Sequence[str],
    num_ranks: int,
    *,
    command: str,
) -> tuple[int, str]:
    """Run `script` on `num_ranks` ranks to their end.

    A signal is passed on to all ranks, which have `TORCH_ELASTIC_SHUTDOWN_TIMEOUT` seconds
    (default: `SHUTDOWN_S`).

    Args:
        command: as the user typed it, for the ranks' messages.

    Returns:
        The exit code, and an error that no rank has reported.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException

    from open_instruct.parallel.one_node import LoopbackRendezvous

    spec = WorkerSpec(
        role="rank",
        local_world_size=num_ranks,
        entrypoint=sys.executable,
        args=("-u", str(script), *words),
        rdzv_handler=LoopbackRendezvous("open_instruct"),
        max_restarts=0,
    )
    with TemporaryDirectory(prefix="open_instruct_ranks_") as folder:
        timeout_s = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_S))
        agent = LocalElasticAgent(
            spec, DefaultLogsSpecs(log_dir=folder), shutdown_timeout=timeout_s
        )
        try:
            with _rank_environment(command, num_ranks):
                failures = agent.run().failures.values()
        except SignalException as stopped:
            if any(Path(folder).rglob("error.json")):
                return EXIT_FAILURE, ""
            return EXIT_OF_SIGNAL.get(stopped.sigval, EXIT_FAILURE), ""
        if not failures:
            return 0, ""
        first = min(failures, key=lambda failure: failure.timestamp)
        code = EXIT_FAILURE
        if first.exitcode in (EXIT_INPUT, *EXIT_OF_SIGNAL.values()):
            code = first.exitcode
        if first.exitcode >= 0 or any(Path(folder).rglob("error.json")):
            return code, ""
        name = signal.Signals(-first.exitcode).name
        return code, f"rank {first.local_rank} (pid {first.pid}) was ended by {name}"


@contextmanager
def _rank_environment(command: str, num_ranks: int) -> Iterator[None]:
    """A context in which the environment is the ranks', and the agent logs nothing."""
    before = dict(os.environ)
    level = logging.root.manager.disable
    logging.disable()
    os.environ[COMMAND_VARIABLE] = command
    # The agent would also handle signals that this process ignores.
    names = [number.name for number in stop_signals()]
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ",".join(names)
    os.environ.update(share_threads(num_ranks))
    try:
        yield
    finally:
        logging.disable(level)
        os.environ.clear()
        os.environ.update(before)


def refuse_other_rank_count(num_processes: str | None, num_started: int) -> None:
    """Refuse --num_processes if a launcher started another number of processes on this machine.

    Raises:
        InputError: the numbers differ; the message says what would work.
    """
    if num_processes not in (None, AUTO, str(num_started)):
        here = spell_count(num_started, "process")
        raise InputError(
            f"--num_processes {num_processes}: this run was started on {here} of "
            "this machine; leave the flag out under torchrun, or start the run by "
            "`open-instruct` without it",
            kind="conflict",
        )


def find_idle_gpus(parallel: RanksSection, *, num_ranks: int, num_gpus: int) -> str | None:
    """A hint for a run of one process on a machine with several GPUs; None if none is idle."""
    if num_ranks > 1 or num_gpus < 2 or parallel.single_gpu_mode or parallel.num_processes == "1":
        return None
    return (
        f"this machine has {num_gpus} GPUs, and the run takes one: --num_processes auto takes all "
        "of them, unless WORLD_SIZE is set in the environment, as for a launcher's process; "
        "--num_processes 1 says that one is meant"
    )


def _count_gpus() -> int:
    import torch

    return torch.cuda.device_count()
