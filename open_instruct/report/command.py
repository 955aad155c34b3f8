"""`open-instruct report`: the page of a run, or of several beside each other, written to a file or served.

It is served while the runs go on: on loopback alone, under a secret address; its script asks for it anew when files
have changed.
"""

import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from threading import Lock

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.errors import InputError
from open_instruct.report.page import report_page
from open_instruct.whole_file import write_asked

PROGRAM = "open-instruct report"
HOST = "127.0.0.1"


@dataclass(kw_only=True)
class ReportFlags:
    """Make one page of what runs have left in their folders, finished or not: curves, held-out scores, memory, time,
    layout, what is wrong and what to do, and the saved rollouts to read. The page is one file that needs no server and
    fetches nothing. `open-instruct report RUN [RUN ...]` takes the folders (--output_dir) of the runs.

    Examples:
        open-instruct report runs/dpo
        open-instruct report runs/a runs/b --out compared.html
        open-instruct report runs/grpo --follow
    """

    out: str | None = flag("file to write; default: report.html in RUN, or here where there are several", None)
    follow: bool = flag("write no file: serve the page to this machine alone, and refresh it as the run goes on", False)
    port: int = flag("port on 127.0.0.1 for --follow; 0 takes a free one", 0, minimum=0, maximum=65535)
    max_rollouts: int = flag("saved rollouts of each run that the page may hold; 0 leaves them out", 10_000, minimum=0)


def main(argv: Sequence[str]) -> int:
    """Write or serve the page that the words after the command ask for; returns the exit code.

    Raises:
        InputError: a folder holds no run, a flag will not do, or the page cannot be written.
    """
    if asks_for_help(argv):
        print_help(ReportFlags, f"{PROGRAM} RUN [RUN ...]")
        return 0
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    if not names:
        raise InputError(f"the first words are the folders of runs: {PROGRAM} RUN [RUN ...] [--flag value ...]")
    folders = [Path(name).expanduser() for name in names]
    flags = parse(ReportFlags, argv[len(names) :])
    refuse(limit_problems(flags))
    if flags.follow:
        if flags.out is not None:
            raise InputError("--follow writes no file, so --out cannot be given beside it; leave one of them out")
        serve(folders, port=flags.port, max_rollouts=flags.max_rollouts)
        return 0
    began_s = time.monotonic()
    page = report_page(folders, max_rollouts=flags.max_rollouts)
    folder = folders[0] if len(folders) == 1 else Path()
    out = Path(flags.out).expanduser() if flags.out else folder / "report.html"
    write_asked(out, page, flag="--out")
    print(f"{out} ({len(page) / 1e6:.2f} MB, in {time.monotonic() - began_s:.1f} s)")
    return 0


class Pages:
    """The newest page about some runs, and the mark that changes with it."""

    def __init__(self, folders: Sequence[Path], *, max_rollouts: int) -> None:
        self._folders = folders
        self._max_rollouts = max_rollouts
        self._lock = Lock()
        # Other users of the machine reach its loopback too, and so does any website through a browser.
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._made = ""

    def mark(self) -> str:
        """A text that changes when a file of the runs does."""
        names = ("metrics.jsonl", "eval.jsonl", "config.yaml", "plan.json", "hf_model", "traces")
        paths = [folder / name for folder in self._folders for name in names]
        return "-".join(f"{_changed_ns(path):x}" for path in paths)

    def page(self) -> str:
        with self._lock:
            try:
                self._made = report_page(self._folders, max_rollouts=self._max_rollouts, mark=self.mark())
            except InputError:  # a run that is being started afresh has no files for a moment
                if not self._made:
                    raise
            return self._made


def _changed_ns(path: Path) -> int:
    with suppress(OSError):  # a file may be removed meanwhile
        return path.stat().st_mtime_ns
    return 0


def server_of(pages: Pages, *, port: int) -> ThreadingHTTPServer:
    """:raises InputError: the port is taken."""

    answers = {pages.path: (pages.page, "text/html"), f"{pages.path}mark": (pages.mark, "text/plain")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path not in answers:
                self.send_error(404)
                return
            answer, kind = answers[self.path]
            content = answer().encode()
            with suppress(ConnectionError):  # a reader may leave in the middle of a page
                self.send_response(200)
                self.send_header("Content-Type", f"{kind}; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Do not print a line for each request."""

    try:
        return ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        raise InputError(
            f"--port {port} cannot be had ({error.strerror or error}); leave it out to take another"
        ) from error


def serve(folders: Sequence[Path], *, port: int, max_rollouts: int) -> None:
    """Serve the page of the runs to this machine, until Ctrl-C.

    :raises InputError: a folder holds no run, or the port is taken.
    """
    pages = Pages(folders, max_rollouts=max_rollouts)
    pages.page()  # a folder without a run is refused before anything is served
    with server_of(pages, port=port) as server:
        address = f"http://{HOST}:{server.server_port}{pages.path}"
        print(f"{address} shows the page on this machine, to who knows this address; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
