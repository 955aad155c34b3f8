"""Code of every entry: flags to a checked config before torch is loaded, and failures to exit
codes.

0 is done, 2 the user's input, 1 any other failure; an entry itself returns 143 after a checkpointed
SIGTERM, 129 after such a SIGHUP. Whatever went wrong, the last line on stderr says what to do.
"""

import errno
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn, TypeVar

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.help import CHECK, asks_for_help, print_help
from open_instruct.config.rollout_sections import LearnerParallelSection
from open_instruct.config.sections import ParallelSection, RanksSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.config.training import BackendRecord, LearnerConfig
from open_instruct.core.errors import (
    EXIT_FAILURE,
    EXIT_INPUT,
    EXIT_OF_SIGNAL,
    EXIT_PREEMPTED,
    InputError,
    RunError,
)
from open_instruct.core.text import escaped
from open_instruct.parallel.launch import TYPED, num_to_start, start_ranks
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.node_sizes import node_sizes_from_environment
from open_instruct.parallel.status import this_process
from open_instruct.parallel.triton_cache import remove_temporary_folders
from open_instruct.report.closing import describe_best_step, print_results
from open_instruct.run import run_lock
from open_instruct.run.cadence import set_handler, stop_signals_handled
from open_instruct.run.hub.upload import open_repository, upload
from open_instruct.run.run_directory import exported_by

# Most errors are met by every rank at once, and rank 0 tells of them. torchrun ends all ranks as
# soon as one has failed, so the others wait for this long, or rank 0 might be ended before it has
# spoken. A rank that still lives afterwards is the only one that knows.
OTHER_RANKS_WAIT_S = 3.0

# torchrun names a file to each process, and shows the file's text in its final table.
LAUNCHER_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# What writers say that are not Python's own: of torch, safetensors, Ray.
FULL_DISK_WORDS = (
    "No space left on device",
    "Disk quota exceeded",
    "PytorchStreamWriter failed",
    "OutOfDiskError",
)

# Held by the thread that tells how the process ends: another must not speak, and end it, meanwhile.
_last_words = threading.Lock()


class Terminated(BaseException):
    """SIGTERM or SIGHUP, by number.

    Not an Exception: nothing on the way up may take it for a failure of its own.
    """


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
    write_what_encoding_lacks()
    program = command_as_typed(program)
    words = sys.argv[1:] if argv is None else list(argv)

    def run() -> int:
        if asks_for_help(words):
            if _rank() == 0:
                print_help(config_class, program, words)
            return 0
        unneeded: list[str] = []
        try:
            config = parse_run(config_class, words, unneeded=unneeded)
            warnings = validate(config)
            num_ranks = _check_nodes(config.parallel, config.backend)
            if _rank() == 0:  # which alone talks to a tracker
                check_trackers(config.logging.report_to, os.environ)
                if config.run.push_to_hub:
                    open_repository(config.run)
        except InputError as error:
            return _refuse(program, error)
        log_file = Path(config.run.output_dir) / "run.log"

        def start() -> int:
            look(config)
            if num_ranks is None or script is None:
                if _rank() == 0:
                    _print_to_stderr(*(f"{program}: warning: {warning}" for warning in warnings))
                    if unneeded:
                        _print_to_stderr(
                            f"{program}: not needed here, and left out: {'; '.join(unneeded)}"
                        )
                return run_and_report(main, config)
            code, message = start_ranks(script[0], [*script[1], *words], num_ranks, typed=program)
            if message:
                _print_to_stderr(f"{program}: {message}. {_way_on(log_file)}")
            return code

        return run_to_exit_code(start, program=program, log_file=log_file)

    return run_to_exit_code(run, program=program)


def check_in_place_of_run(
    check: Callable[[Sequence[str]], int], words: Sequence[str], *, program: str
) -> int:
    """Have `check`, on rank 0, look at all that the words say but for `--check`; returns the exit
    code.
    """
    others = [word for word in words if word != CHECK]
    return run_to_exit_code(
        lambda: check(others) if _rank() == 0 else 0, program=command_as_typed(program)
    )


def _refuse(program: str, error: InputError) -> int:
    asking = f"python {sys.argv[0]}" if Path(sys.argv[0]).name == program else program
    lines = (f"{program}: {error}", f"Nothing was started. `{asking} --help` shows the flags.")
    # Every rank has the same words, so none can be the only one that knows.
    _report_failure(*lines, known_to_all=True)
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
    num_ranks = num_to_start(parallel.num_processes, os.environ)
    # Nodes of unequal size cannot be told from one process's environment; they are checked once the
    # ranks have met.
    if (
        nodes := (num_ranks,) if num_ranks else node_sizes_from_environment(os.environ)
    ) is not None:
        find_layout(parallel, nodes, backend)
    return num_ranks


def run_and_report(main: Callable[[ConfigT], int], config: ConfigT) -> int:
    """Run `main`; rank 0 of a run that is done says what it has left, and uploads its model."""
    began_s = time.monotonic()
    code = main(config)
    if code == 0 and _rank() == 0:
        print_results(config, took_s=time.monotonic() - began_s)
        if config.run.push_to_hub:
            print(upload(config.run, exported_by(config), step=describe_best_step(config)))
    return code


def command_as_typed(script: str) -> str:
    """The command that was typed:

    `open-instruct dpo`, or `script` where that was started, as a rank too.
    """
    if command := os.environ.get(TYPED):
        return command
    is_command = Path(sys.argv[0]).name in ("open-instruct", "cli.py") and len(sys.argv) > 1
    return f"open-instruct {sys.argv[1]}" if is_command else script


def write_what_encoding_lacks() -> None:
    """Have a letter that is not in the terminal's encoding written as an escape: it must not end a
    run.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # which stderr has from Python


def run_to_exit_code(run: Callable[[], int], *, program: str, log_file: Path | None = None) -> int:
    """Call `run`; whatever it raises becomes a message on stderr and an exit code.

    The traceback of an unexpected exception goes to `log_file`, or to stderr where that cannot be
    written. Rank 0 speaks at once; another rank speaks only if it outlives rank 0's report.
    """
    write_what_encoding_lacks()
    # Without any handler Python prints the warnings of every library; the run's own log comes
    # later.
    logging.getLogger().addHandler(logging.NullHandler())
    reporter = _ErrorReporter(program, log_file)
    this_process.report_loss = reporter.end_for_loss
    this_process.watch_launcher()
    with _signals_raise():
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
def _signals_raise() -> Iterator[None]:
    """Stop signals raise in the main thread while the block runs, except while a loop handles
    them.
    """
    if signal.getsignal(signal.SIGTERM) is _raise_stop:
        yield
        return
    say_unraisable = sys.unraisablehook
    # A stop that comes in a finaliser or a callback of C is dropped there with a traceback; it is
    # raised again soon.
    sys.unraisablehook = lambda ignored: (
        None if ignored.exc_value is this_process.pending_stop else say_unraisable(ignored)
    )
    try:
        with stop_signals_handled(_raise_stop):
            yield
    finally:
        sys.unraisablehook = say_unraisable
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


class _ErrorReporter:
    """Turns the error that ended a run into a message on stderr and an exit code."""

    def __init__(self, program: str, log_file: Path | None) -> None:
        self.program = program
        self.log_file = log_file

    def report(self, error: BaseException) -> int:
        # A library may have wrapped a stop in an error of its own.
        error = this_process.pending_stop or error
        is_stop = isinstance(error, Terminated | KeyboardInterrupt | SystemExit)
        if not isinstance(error, InputError) and (
            loss := this_process.explain_error(error) or (is_stop and this_process.find_loss_now())
        ):
            self._report_lost_ranks(error, *loss)
            return EXIT_FAILURE
        if is_stop:
            return self._report_stop(error)
        if isinstance(error, InputError | RunError):
            _report_failure(f"{self.program}: {error}")
            return EXIT_INPUT if isinstance(error, InputError) else EXIT_FAILURE
        if is_full_disk(error):
            _record_traceback(self.log_file, error, to_stderr=False)
            where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
            full = (
                f"{self.program}: the disk is full{where}, while {this_process.status}: make room."
            )
            _report_failure(f"{full} {_way_on(self.log_file)}")
            return EXIT_FAILURE
        where = _record_traceback(self.log_file, error)
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        _report_failure(
            f"{self.program} failed: {summary}{this_process.describe_ranks(error)}",
            f"The traceback is {where}. {_advice(error)}{_way_on(self.log_file)}",
        )
        return EXIT_FAILURE

    def end_for_loss(self, words: str) -> None:
        """End the run from a watching thread, as the main one may wait for ever; no message if
        `words` is empty.
        """
        if _last_words.acquire(blocking=False):  # else the main thread ends it
            if words:
                self._report_loss(words)
            exit_process(EXIT_FAILURE)

    def _report_loss(self, words: str) -> None:
        line = f"{self.program}: {words}. {_way_on(self.log_file)}"
        this_process.leave(line)
        _print_to_stderr(line)
        _write_for_launcher(line)

    def _report_lost_ranks(self, error: BaseException, words: str, is_mine_to_report: bool) -> None:
        _record_traceback(self.log_file, error, to_stderr=False)
        if is_mine_to_report and words.startswith("[rank"):
            _print_to_stderr(words)  # which has said everything, and had no time to say it aloud
            _write_for_launcher(words)
        elif is_mine_to_report:
            self._report_loss(words)
        else:
            this_process.leave(words)
            time.sleep(OTHER_RANKS_WAIT_S)

    def _report_stop(self, error: BaseException) -> int:
        # Ray, while it starts, makes an exit of SIGTERM.
        if isinstance(error, SystemExit) and error.code != signal.SIGTERM:
            raise error
        by = (
            signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.Signals(error.args[0])
        )
        name = by.name if by != signal.SIGINT else "interrupted"
        line = f"{self.program}: {name} while {this_process.status}. {_way_on(self.log_file)}"
        this_process.leave(line)
        if _rank() == 0:
            _print_to_stderr(line)
        return EXIT_OF_SIGNAL[by]


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


def _rank() -> int:
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdecimal() else 0


def _print_to_stderr(*lines: str) -> None:
    with suppress(OSError):  # stderr may lie on the full disk, or its reader be gone
        for line in lines:
            print(escaped(line, "\n\t"), file=sys.stderr, flush=True)


def _report_failure(*lines: str, known_to_all: bool = False) -> None:
    rank = _rank()
    this_process.leave(" ".join(lines))
    if rank > 0:
        # If rank 0 has printed the reason, the launcher ends this rank here.
        set_handler(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHER_RANKS_WAIT_S)
        if known_to_all:
            return
        lines = tuple(f"[rank {rank}] {line}" for line in lines)
    _print_to_stderr(*lines)
    _write_for_launcher("\n".join(lines))


def _write_for_launcher(message: str) -> None:
    if error_file := os.environ.get(LAUNCHER_ERROR_FILE):
        failure = {
            "message": escaped(message, "\n\t"),
            "extraInfo": {"timestamp": str(int(time.time()))},
        }
        with suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": failure}), encoding="utf-8")


def _record_traceback(
    log_file: Path | None, error: BaseException, *, to_stderr: bool = True
) -> str:
    """Write the traceback of `error` to `log_file`, or to stderr; returns where it is."""
    text = "".join(traceback.format_exception(error))
    if log_file is not None:
        with suppress(OSError), log_file.open("a", encoding="utf-8") as log:
            log.write(f"rank {_rank()} failed:\n{text}")
            return f"in {log_file}"
    if to_stderr:
        _print_to_stderr(text.rstrip("\n"))
    return "above"


def is_full_disk(error: BaseException | None) -> bool:
    """Whether `error`, or a cause of it, is about a full disk, quota or file size limit."""
    while error is not None:
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        if is_full or any(words in str(error) for words in FULL_DISK_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _advice(error: BaseException) -> str:
    # By name, because torch may not be loaded.
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "The GPU is out of memory: halve --per_device_train_batch_size and double "
            "--gradient_accumulation_steps, use --activation_checkpointing full, or raise "
            "--fsdp_shard_degree. "
        )
    return "This is an internal error; please report it with the log. "


def _way_on(log_file: Path | None) -> str:
    if log_file is None:
        return "Run the same command to try again."
    steps = [path.name.removeprefix("step") for path in log_file.parent.glob("step*")]
    newest = max((int(step) for step in steps if step.isdecimal()), default=None)
    if newest is None:
        return (
            "There is no checkpoint yet: the same command, given again, starts from the beginning."
        )
    return (
        "Run the same command again to go on from the last checkpoint, "
        f"{log_file.parent / f'step{newest}'}."
    )
