"""Code of every entry: from flags to a checked config, and from failures to exit codes.

0 is done, 2 the user's input, 1 any other failure; an entry itself returns 143 after a checkpointed
SIGTERM, 129 after such a SIGHUP. Whatever went wrong, the last line on stderr says what to do.
"""

import io
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from open_instruct.commands.failures import (
    FailureReporter,
    Terminated,
    advise_next_command,
    find_rank,
    print_to_stderr,
    report_failure,
)
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.help import CHECK, asks_for_help, print_help
from open_instruct.config.sharding_sections import ParallelSection, RanksSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.config.training import BackendRecord, LearnerConfig
from open_instruct.core.errors import EXIT_FAILURE, EXIT_INPUT, EXIT_PREEMPTED, InputError
from open_instruct.parallel.launch import COMMAND_VARIABLE, count_ranks_to_start, start_ranks
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.node_sizes import node_sizes_from_environment
from open_instruct.parallel.status import this_process
from open_instruct.parallel.triton_cache import remove_temporary_folders
from open_instruct.report.closing import describe_best_step, print_results
from open_instruct.run import run_lock
from open_instruct.run.cadence import handle_stop_signals, set_handler
from open_instruct.run.hub.upload import open_repository, upload
from open_instruct.run.run_directory import find_export_folder

# Held by the thread that tells how the process ends: another must not speak, and end it, meanwhile.
_last_words = threading.Lock()


ConfigT = TypeVar("ConfigT", bound=LearnerConfig)


def run_entry(
    config_class: type[ConfigT],
    main: Callable[[ConfigT], int],
    argv: Sequence[str] | None,
    *,
    program: str,
    validate: Callable[[ConfigT], list[str]],
    script: tuple[Path, Sequence[str]] | None = None,
    look: Callable[[ConfigT], None] = lambda config: None,
) -> int:
    """Parse `argv` (default: the command line), check it, run `main`, and return the exit code.

    Flags, and the layout they ask of the nodes, are checked before `main` is called, so an entry
    that imports torch inside `main` refuses bad flags, and answers `--help`, without loading it.

    Args:
        validate: checks the flags and returns warnings, which are printed.
        script: what ranks are started from, where the flags ask for some, and its first words.
        look: refuses files and folders that will not do.
    """
    escape_unencodable_letters()
    program = command_as_typed(program)
    words = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        if asks_for_help(words):
            if find_rank() == 0:
                print_help(config_class, program, words)
            return 0
        unneeded: list[str] = []
        try:
            config = parse_run(config_class, words, unneeded=unneeded)
            warnings = validate(config)
            num_ranks = _check_nodes(config.parallel, config.backend)
            _check_access(config)
        except InputError as error:
            return _refuse(program, error)
        log_file = Path(config.run.output_dir) / "run.log"

        def start() -> int:
            look(config)
            if num_ranks is not None and script is not None:
                file, first_words = script
                command = [*first_words, *words]
                code, message = start_ranks(file, command, num_ranks, command=program)
                if message:
                    print_to_stderr(f"{program}: {message}. {advise_next_command(log_file)}")
                return code
            _print_warnings(program, warnings, unneeded)
            return run_and_report(main, config)

        return run_to_exit_code(start, program=program, log_file=log_file)

    return run_to_exit_code(run, program=program)


def check_in_place_of_run(
    check: Callable[[Sequence[str]], int], words: Sequence[str], *, program: str
) -> int:
    """Check, on rank 0, the run of a command that has `--check`; returns the exit code."""

    def run() -> int:
        if find_rank() > 0:
            return 0
        return check([word for word in words if word != CHECK])

    return run_to_exit_code(run, program=command_as_typed(program))


def _check_access(config: LearnerConfig) -> None:
    """Check trackers and the hub's repository on rank 0, which alone talks to them.

    Raises:
        InputError: there is no access to one of them.
    """
    if find_rank() > 0:
        return
    check_trackers(config.logging.report_to, os.environ)
    if config.run.push_to_hub:
        open_repository(config.run)


def _print_warnings(program: str, warnings: Sequence[str], unneeded: Sequence[str]) -> None:
    if find_rank() > 0:
        return
    print_to_stderr(*(f"{program}: warning: {warning}" for warning in warnings))
    if unneeded:
        print_to_stderr(f"{program}: not needed here, and left out: {'; '.join(unneeded)}")


def _refuse(program: str, error: InputError) -> int:
    asking = f"python {sys.argv[0]}" if Path(sys.argv[0]).name == program else program
    lines = (f"{program}: {error}", f"Nothing was started. `{asking} --help` shows the flags.")
    # Every rank has the same words, so none can be the only one that knows.
    report_failure(*lines, known_to_all=True)
    return EXIT_INPUT


def _check_nodes(parallel: ParallelSection, backend: BackendRecord) -> int | None:
    """The number of ranks to start here, where the flags ask for some.

    Raises:
        InputError: the sharding flags cannot work on the nodes that flags or the launcher name.
    """
    if isinstance(parallel, LearnerParallelSection):
        find_layout(parallel, parallel.num_learners_per_node, backend)
    if not isinstance(parallel, RanksSection):
        return None
    num_ranks = count_ranks_to_start(parallel.num_processes, os.environ)
    if num_ranks:
        nodes: tuple[int, ...] | None = (num_ranks,)
    else:
        # None where nodes are of unequal size, which one process's environment does not show: they
        # are checked once the ranks have met.
        nodes = node_sizes_from_environment(os.environ)
    if nodes is not None:
        find_layout(parallel, nodes, backend)
    return num_ranks


def run_and_report(main: Callable[[ConfigT], int], config: ConfigT) -> int:
    """Run `main`; rank 0 of a run that is done says what it has left, and uploads its model."""
    began_s = time.monotonic()
    code = main(config)
    if code == 0 and find_rank() == 0:
        print_results(config.run, config.adapters, took_s=time.monotonic() - began_s)
        if config.run.push_to_hub:
            print(
                upload(
                    config.run,
                    find_export_folder(config.run, config.adapters),
                    step=describe_best_step(config.run),
                )
            )
    return code


def command_as_typed(script: str) -> str:
    """The command that was typed: `open-instruct dpo`, or `script` where that was started."""
    if command := os.environ.get(COMMAND_VARIABLE):
        return command
    is_command = Path(sys.argv[0]).name in ("open-instruct", "cli.py") and len(sys.argv) > 1
    return f"open-instruct {sys.argv[1]}" if is_command else script


def escape_unencodable_letters() -> None:
    """Print letters that stdout's encoding lacks as escapes: none of them may end a run."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # which stderr has from Python


def run_to_exit_code(run: Callable[[], int], *, program: str, log_file: Path | None = None) -> int:
    """Call `run`; whatever it raises becomes a message on stderr and an exit code.

    The traceback of an unexpected exception goes to `log_file`, or to stderr where that cannot be
    written. Rank 0 speaks at once; another rank speaks only if it outlives rank 0's report.
    """
    escape_unencodable_letters()
    # Without any handler Python prints the warnings of every library; the run's own log comes
    # later.
    logging.getLogger().addHandler(logging.NullHandler())
    reporter = FailureReporter(program, log_file)
    this_process.report_loss = partial(_end_for_loss, reporter)
    this_process.watch_launcher()
    with _raise_stop_signals():
        try:
            return run()
        except BrokenPipeError as error:
            if log_file is not None or sys.stdout.closed:
                return reporter.report(error)
            # `| head` has closed the pipe: the rest of the buffer has nowhere to go.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except BaseException as error:
            with _last_words:
                # The launcher ends the other ranks once this one ends: first print the reason.
                set_handler(signal.SIGTERM, signal.SIG_IGN)
                set_handler(signal.SIGHUP, signal.SIG_IGN)
                return reporter.report(error)


@contextmanager
def _raise_stop_signals() -> Iterator[None]:
    """Stop signals raise in the main thread during the block, except while a loop handles them."""
    if signal.getsignal(signal.SIGTERM) is _raise_stop:
        yield
        return
    report_unraisable = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        # A stop that comes in a finaliser or a callback of C is dropped there with a traceback; it
        # is raised again soon.
        if unraisable.exc_value is not this_process.pending_stop:
            report_unraisable(unraisable)

    sys.unraisablehook = report_others
    try:
        with handle_stop_signals(_raise_stop):
            yield
    finally:
        sys.unraisablehook = report_unraisable
        this_process.pending_stop = None


def _raise_stop(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    if number != signal.SIGINT:
        # A second one waits for nothing.
        set_handler(signal.SIGTERM, lambda number, frame: os._exit(EXIT_PREEMPTED))
        set_handler(signal.SIGHUP, signal.SIG_IGN)  # a terminal that closes tells of it twice
    stop = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
    this_process.pending_stop = stop
    raise stop


def _end_for_loss(reporter: FailureReporter, words: str) -> None:
    """End the run from a watching thread, as the main one may wait for ever.

    There is no message if `words` is empty.
    """
    if _last_words.acquire(blocking=False):  # else the main thread ends it
        if words:
            reporter.report_loss(words)
        exit_process(EXIT_FAILURE)


def exit_process(exit_code: int) -> NoReturn:
    """End the process with `exit_code` at once, without taking the interpreter down piece by piece.

    Everything is written and closed by now, or given up with the run, but for the hold on its
    folder. What is left are threads of libraries (gloo's among them), and one that is still running
    while its object is destroyed would abort a run that succeeded.
    """
    run_lock.release_all()
    remove_temporary_folders()
    with suppress(OSError):  # they may lie on a full disk, or their reader be gone
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(exit_code)
