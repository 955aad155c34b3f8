"""What every entry shares: flags to a checked config before torch is loaded, and failures to exit codes.

0 is done, 2 the user's input, 1 any other failure; an entry itself returns 143 after a checkpointed
SIGTERM. Whatever went wrong, the last line on stderr says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

from open_instruct.config.help import print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import LoggingSection, ParallelSection, RunSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.errors import EXIT_FAILURE, EXIT_INPUT, InputError, RunError
from open_instruct.parallel.layout import UnequalNodesError, layout_of, node_sizes_from_environment

HELP_WORDS = ("--help", "-h")

# Most errors are met by every rank at once, and rank 0 tells of them. torchrun ends all ranks as soon as one
# has failed, so the others wait for this long, or rank 0 might be ended before it has spoken. A rank that
# still lives afterwards is the only one that knows.
OTHER_RANKS_WAIT_S = 3.0

# torchrun names a file to each process, and shows what it finds there in the table that it ends with.
LAUNCHER_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"


class EntryConfig(Protocol):
    """What an entry needs of a config class, whichever other sections it has.

    Read-only, so that a section may be of a subclass.
    """

    @property
    def parallel(self) -> ParallelSection: ...

    @property
    def run(self) -> RunSection: ...

    @property
    def logging(self) -> LoggingSection: ...


ConfigT = TypeVar("ConfigT", bound=EntryConfig)


def run_entry(
    config_class: type[ConfigT],
    main: Callable[[ConfigT], int],
    argv: Sequence[str] | None,
    *,
    program: str,
    validate: Callable[[ConfigT], list[str]],
    gpus_per_node: Callable[[ConfigT], Sequence[int]] | None = None,
) -> int:
    """Parse `argv` (default: the command line), check it, run `main`, and return the exit code.

    Flags, and the layout they ask of the nodes, are checked before `main` is called, so an entry that
    imports torch inside `main` refuses bad flags, and answers `--help`, without loading it. `validate`
    returns warnings, which are printed. `gpus_per_node` reads the nodes from the flags, where no launcher
    tells of them.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    speaks = _rank() == 0
    if any(word in HELP_WORDS for word in words):
        if speaks:
            print_help(config_class, program)
        return 0
    try:
        config = parse(config_class, words)
        warnings = validate(config)
        if gpus_per_node is None:
            check_layout(config.parallel, os.environ)
        else:
            layout_of(config.parallel, gpus_per_node(config))
        if speaks:  # rank 0 alone talks to a tracker
            check_trackers(config.logging.report_to, os.environ)
    except InputError as error:
        # Every rank has the same words, so none can be the only one that knows.
        lines = (f"{program}: {error}", f"Nothing was started. `{program} --help` lists every flag.")
        _tell_of_failure(*lines, known_to_all=True)
        return EXIT_INPUT
    if speaks:
        _tell(*(f"{program}: warning: {warning}" for warning in warnings))
    return run_to_exit_code(lambda: main(config), program=program, log_file=Path(config.run.output_dir) / "run.log")


def check_layout(parallel: ParallelSection, environ: Mapping[str, str]) -> None:
    """Refuse sharding flags that cannot work on the nodes that the launcher tells of.

    Nodes of unequal size cannot be told from one process's environment; they are left to the
    check that follows once the ranks have met.

    Raises:
        InputError: naming the flag and the values that would work.
    """
    try:
        gpus_per_node = node_sizes_from_environment(environ)
    except UnequalNodesError:
        return
    layout_of(parallel, gpus_per_node)


def run_to_exit_code(run: Callable[[], int], *, program: str, log_file: Path | None = None) -> int:
    """Call `run`; whatever it raises becomes a message on stderr and an exit code.

    The traceback of an unexpected exception goes to `log_file`, or to stderr where that cannot be
    written. Rank 0 speaks at once; another rank speaks only if it outlives rank 0's report.
    """
    # Without any handler Python prints the warnings of every library; the run's own log comes later.
    logging.getLogger().addHandler(logging.NullHandler())
    try:
        return run()
    except InputError as error:
        _tell_of_failure(f"{program}: {error}")
        return EXIT_INPUT
    except RunError as error:
        _tell_of_failure(f"{program}: {error}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        if _rank() == 0:
            _tell(f"{program}: interrupted. {_way_on(log_file)}")
        return EXIT_FAILURE
    except Exception as error:
        where = _record_traceback(log_file)
        summary = " ".join(f"{type(error).__name__}: {error}".split())
        _tell_of_failure(f"{program} failed: {summary}", f"The traceback is {where}. {_advice(error, log_file)}")
        return EXIT_FAILURE


def leave(exit_code: int) -> NoReturn:
    """End the process with `exit_code` at once, without taking the interpreter down piece by piece.

    Everything is written and closed by now. What is left are threads of libraries (gloo's among them),
    and one that is still running while its object is destroyed would abort a run that succeeded.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _rank() -> int:
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdecimal() else 0


def _tell(*lines: str) -> None:
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def _tell_of_failure(*lines: str, known_to_all: bool = False) -> None:
    rank = _rank()
    if rank > 0:
        time.sleep(OTHER_RANKS_WAIT_S)
        if known_to_all:
            return
        lines = tuple(f"[rank {rank}] {line}" for line in lines)
    _tell(*lines)
    if error_file := os.environ.get(LAUNCHER_ERROR_FILE):
        failure = {"message": "\n".join(lines), "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": failure}), encoding="utf-8")


def _record_traceback(log_file: Path | None) -> str:
    """Write the traceback that is being handled to `log_file`, or to stderr; returns where it is."""
    text = traceback.format_exc()
    if log_file is not None:
        try:
            with log_file.open("a", encoding="utf-8") as log:
                log.write(f"rank {_rank()} failed:\n{text}")
        except OSError:
            pass
        else:
            return f"in {log_file}"
    sys.stderr.write(text)
    return "above"


def _advice(error: Exception, log_file: Path | None) -> str:
    # By name, because torch may not be loaded.
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "The GPU is out of memory: halve --per_device_train_batch_size and double --gradient_accumulation_steps, "
            "use --activation_checkpointing full, or raise --fsdp_shard_degree."
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"The disk is full: make room. {_way_on(log_file)}"
    return f"This is not about a flag. {_way_on(log_file)}"


def _way_on(log_file: Path | None) -> str:
    if log_file is None:
        return "Run the same command to try again."
    return "Run the same command again to go on from the last checkpoint."
