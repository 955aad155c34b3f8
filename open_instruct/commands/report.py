"""`open-instruct report`: writes or serves the page of one run or of several."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path

from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import InputError, Problem
from open_instruct.core.files import write_user_file
from open_instruct.report.live_page import LivePage, serve_page
from open_instruct.report.page import report_page

MAX_ROLLOUTS = 10_000
MAX_LIVE_ROLLOUTS = 1_000


@dataclass(kw_only=True)
class ReportFlags:
    """Make one page of what runs have left in their folders, finished or not: curves, held-out
    scores, memory, time, layout, what is wrong and what to do, and the saved rollouts to read. The
    page is one file that needs no server and fetches nothing. `open-instruct report RUN [RUN ...]`
    takes the folders (--output_dir) of the runs.

    Examples:
        open-instruct report runs/dpo
        open-instruct report runs/a runs/b --out compared.html
        open-instruct report runs/dpo --watch
    """

    out: str | None = flag(
        "file to write; default: report.html in RUN, or here where there are several", None
    )
    watch: bool = flag(
        "serve the page on this machine, at an address that is printed; it follows the run", False
    )
    port: int = flag(
        "port of 127.0.0.1 for --watch; 0 takes one that is free", 0, requires="watch", minimum=0
    )
    max_rollouts: int | None = flag(
        f"saved rollouts of each run that the page may hold, 0 for none; "
        f"default: {MAX_ROLLOUTS:,}, with --watch {MAX_LIVE_ROLLOUTS:,}",
        None,
        minimum=0,
    )


def main(argv: Sequence[str]) -> int:
    """Write the page that the words after the command ask for; returns the exit code.

    Raises:
        InputError: a folder holds no run, a flag will not do, or the page cannot be written.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    if not names:
        raise InputError(
            "the first words are the folders of runs: open-instruct report RUN [RUN ...]",
            kind="stray_word",
        )
    folders = [Path(name).expanduser() for name in names]
    flags = parse(ReportFlags, argv[len(names) :])
    refuse([*limit_problems(flags), *_watch_problems(flags)])
    if flags.watch:
        return _watch(folders, flags)
    began_s = time.monotonic()
    most = MAX_ROLLOUTS if flags.max_rollouts is None else flags.max_rollouts
    page = report_page(folders, max_rollouts=most)
    out = Path("report.html")
    if flags.out:
        out = Path(flags.out).expanduser()
    elif len(folders) == 1:
        out = folders[0] / out
    write_user_file(out, page, flag="--out")
    print(f"{out} ({len(page) / 1e6:.2f} MB, in {time.monotonic() - began_s:.1f} s)")
    return 0


def _watch_problems(flags: ReportFlags) -> Iterator[Problem]:
    if flags.watch and flags.out:
        yield Problem("--watch writes no file: leave --out out", kind="conflict", flag="out")
    if flags.port and not flags.watch:
        yield Problem(
            "--port is read with --watch only: add --watch, or leave it out", kind="unread_flag"
        )


def _watch(folders: Sequence[Path], flags: ReportFlags) -> int:
    most = MAX_LIVE_ROLLOUTS if flags.max_rollouts is None else flags.max_rollouts
    serve_page(LivePage(folders, partial(report_page, max_rollouts=most)), port=flags.port)
    return 0
