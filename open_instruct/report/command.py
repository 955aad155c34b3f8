"""`open-instruct report`: the page of a run, or of several beside each other, written to a file."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.errors import InputError
from open_instruct.report.page import report_page
from open_instruct.whole_file import write_asked


@dataclass(kw_only=True)
class ReportFlags:
    """Make one page of what runs have left in their folders, finished or not: curves, held-out scores, memory, time,
    layout, what is wrong and what to do, and the saved rollouts to read. The page is one file that needs no server and
    fetches nothing. `open-instruct report RUN [RUN ...]` takes the folders (--output_dir) of the runs.

    Examples:
        open-instruct report runs/dpo
        open-instruct report runs/a runs/b --out compared.html
    """

    out: str | None = flag("file to write; default: report.html in RUN, or here where there are several", None)
    max_rollouts: int = flag("saved rollouts of each run that the page may hold; 0 leaves them out", 10_000, minimum=0)


def main(argv: Sequence[str]) -> int:
    """Write the page that the words after the command ask for; returns the exit code.

    Raises:
        InputError: a folder holds no run, a flag will not do, or the page cannot be written.
    """
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    if not names:
        raise InputError("the first words are the folders of runs: open-instruct report RUN [RUN ...]")
    folders = [Path(name).expanduser() for name in names]
    flags = parse(ReportFlags, argv[len(names) :])
    refuse(limit_problems(flags))
    began_s = time.monotonic()
    page = report_page(folders, max_rollouts=flags.max_rollouts)
    folder = folders[0] if len(folders) == 1 else Path()
    out = Path(flags.out).expanduser() if flags.out else folder / "report.html"
    write_asked(out, page, flag="--out")
    print(f"{out} ({len(page) / 1e6:.2f} MB, in {time.monotonic() - began_s:.1f} s)")
    return 0
