"""Reports a failed run: to stderr, the log and the launcher, and by the exit code.

Most errors are met by every rank at once, and rank 0 reports them. It ends with what to do next.
"""

import errno
import json
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from open_instruct.core.errors import (
    EXIT_FAILURE,
    EXIT_INPUT,
    EXIT_OF_SIGNAL,
    InputError,
    RunError,
)
from open_instruct.core.text import escape_controls
from open_instruct.parallel.status import this_process
from open_instruct.run.cadence import set_handler

# torchrun ends all ranks as soon as one has failed, so the others wait for this long: otherwise
# rank 0 might be ended before it has spoken. A rank that still lives afterwards is the only one
# that knows.
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

OUT_OF_MEMORY_ADVICE = (
    "The GPU is out of memory: halve --per_device_train_batch_size and double "
    "--gradient_accumulation_steps, use --activation_checkpointing full, or raise "
    "--fsdp_shard_degree. "
)
INTERNAL_ERROR_ADVICE = "This is an internal error; please report it with the log. "


class Terminated(BaseException):
    """SIGTERM or SIGHUP, by number.

    Not an Exception: nothing on the way up may take it for a failure of its own.
    """


class FailureReporter:
    """Turns the error that ended a run into a message on stderr and an exit code.

    Not what ends the process: whoever calls it does that.
    """

    def __init__(self, program: str, log_file: Path | None) -> None:
        self.program = program
        self.log_file = log_file

    def report(self, error: BaseException) -> int:
        """Report the error; returns the exit code."""
        # A library may have wrapped a stop in an error of its own.
        error = this_process.pending_stop or error
        is_stop = isinstance(error, Terminated | KeyboardInterrupt | SystemExit)
        if not isinstance(error, InputError):
            loss = this_process.explain_error(error) or (is_stop and this_process.find_loss_now())
            if loss:
                self._report_lost_ranks(error, *loss)
                return EXIT_FAILURE
        if is_stop:
            return self._report_stop(error)
        if isinstance(error, InputError | RunError):
            report_failure(f"{self.program}: {error}")
            return EXIT_INPUT if isinstance(error, InputError) else EXIT_FAILURE
        if is_full_disk(error):
            self._report_full_disk(error)
            return EXIT_FAILURE
        place = _record_traceback(self.log_file, error)
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        report_failure(
            f"{self.program} failed: {summary}{this_process.describe_ranks(error)}",
            f"The traceback is {place}. {_advise(error)}{advise_next_command(self.log_file)}",
        )
        return EXIT_FAILURE

    def report_loss(self, words: str) -> None:
        """Report that other ranks are lost."""
        line = f"{self.program}: {words}. {advise_next_command(self.log_file)}"
        this_process.leave(line)
        print_to_stderr(line)
        _write_for_launcher(line)

    def _report_lost_ranks(self, error: BaseException, words: str, is_mine_to_report: bool) -> None:
        _record_traceback(self.log_file, error, to_stderr=False)
        if is_mine_to_report and words.startswith("[rank"):
            print_to_stderr(words)  # which has said everything, and had no time to say it aloud
            _write_for_launcher(words)
        elif is_mine_to_report:
            self.report_loss(words)
        else:
            this_process.leave(words)
            time.sleep(OTHER_RANKS_WAIT_S)

    def _report_full_disk(self, error: BaseException) -> None:
        _record_traceback(self.log_file, error, to_stderr=False)
        place = ""
        if isinstance(error, OSError) and error.filename:
            place = f" ({error.filename})"
        problem = f"the disk is full{place}, while {this_process.status}: make room."
        report_failure(f"{self.program}: {problem} {advise_next_command(self.log_file)}")

    def _report_stop(self, error: BaseException) -> int:
        # Ray, while it starts, makes an exit of SIGTERM.
        if isinstance(error, SystemExit) and error.code != signal.SIGTERM:
            raise error
        number = signal.SIGINT
        name = "interrupted"
        if not isinstance(error, KeyboardInterrupt):
            number = signal.Signals(error.args[0])
            name = number.name
        next_command = advise_next_command(self.log_file)
        line = f"{self.program}: {name} while {this_process.status}. {next_command}"
        this_process.leave(line)
        if find_rank() == 0:
            print_to_stderr(line)
        return EXIT_OF_SIGNAL[number]


def find_rank() -> int:
    """The rank that the launcher gave this process; 0 without one."""
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdecimal() else 0


def print_to_stderr(*lines: str) -> None:
    """Print lines without control characters; where stderr cannot be written, they are lost."""
    with suppress(OSError):  # stderr may lie on the full disk, or its reader be gone
        for line in lines:
            print(escape_controls(line, "\n\t"), file=sys.stderr, flush=True)


def report_failure(*lines: str, known_to_all: bool = False) -> None:
    """Print lines at once on rank 0; on another rank, only where it outlives rank 0's report.

    With `known_to_all` rank 0 alone prints.
    """
    rank = find_rank()
    this_process.leave(" ".join(lines))
    if rank > 0:
        # If rank 0 has printed the reason, the launcher ends this rank here.
        set_handler(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHER_RANKS_WAIT_S)
        if known_to_all:
            return
        lines = tuple(f"[rank {rank}] {line}" for line in lines)
    print_to_stderr(*lines)
    _write_for_launcher("\n".join(lines))


def _write_for_launcher(message: str) -> None:
    error_file = os.environ.get(LAUNCHER_ERROR_FILE)
    if error_file is None:
        return
    failure = {
        "message": escape_controls(message, "\n\t"),
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
            log.write(f"rank {find_rank()} failed:\n{text}")
            return f"in {log_file}"
    if to_stderr:
        print_to_stderr(text.rstrip("\n"))
    return "above"


def is_full_disk(error: BaseException | None) -> bool:
    """Whether `error`, or a cause of it, is about a full disk, quota or file size limit."""
    while error is not None:
        is_full = isinstance(error, OSError) and error.errno in FULL_DISK
        if is_full or any(words in str(error) for words in FULL_DISK_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _advise(error: BaseException) -> str:
    # By name, because torch may not be loaded.
    if type(error).__name__ == "OutOfMemoryError":
        return OUT_OF_MEMORY_ADVICE
    return INTERNAL_ERROR_ADVICE


def advise_next_command(log_file: Path | None) -> str:
    """A sentence on what the same command would do now: start again, or go on."""
    if log_file is None:
        return "Run the same command to try again."
    names = [path.name.removeprefix("step") for path in log_file.parent.glob("step*")]
    steps = [int(name) for name in names if name.isdecimal()]
    if not steps:
        return (
            "There is no checkpoint yet: the same command, given again, starts from the beginning."
        )
    checkpoint = log_file.parent / f"step{max(steps)}"
    return f"Run the same command again to go on from the last checkpoint, {checkpoint}."
