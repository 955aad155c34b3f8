"""A page served while its runs go on: on loopback alone, under a secret address, made anew when files have changed."""

import secrets
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from open_instruct.errors import InputError
from open_instruct.report.page import report_page

HOST = "127.0.0.1"


class Pages:
    """The newest page about some runs, and the mark that changes with it."""

    def __init__(self, folders: Sequence[Path], *, max_rollouts: int) -> None:
        self._folders = folders
        self._max_rollouts = max_rollouts
        self._lock = Lock()
        # Other users of the machine reach its loopback too, and so does any website through a browser.
        self.path = f"/{secrets.token_urlsafe(16)}/"
        self._made: tuple[str, str] = ("", "")

    def mark(self) -> str:
        """A text that changes when a file of the runs does."""
        names = ("metrics.jsonl", "eval.jsonl", "config.yaml", "plan.json", "hf_model", "traces")
        paths = [folder / name for folder in self._folders for name in names]
        return "-".join(f"{_changed_ns(path):x}" for path in paths)

    def page(self) -> str:
        with self._lock:
            mark = self.mark()
            if self._made[0] != mark:
                try:
                    page = report_page(self._folders, max_rollouts=self._max_rollouts, mark=mark)
                    self._made = (mark, page)
                except InputError:  # a run that is being started afresh has no files for a moment
                    if not self._made[1]:
                        raise
            return self._made[1]


def _changed_ns(path: Path) -> int:
    with suppress(OSError):  # a file may be removed meanwhile
        return path.stat().st_mtime_ns
    return 0


def server_of(pages: Pages, *, port: int) -> ThreadingHTTPServer:
    """:raises InputError: the port is taken."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == f"{pages.path}mark":
                self._send(pages.mark(), "text/plain")
            elif self.path == pages.path:
                self._send(pages.page(), "text/html")
            else:
                self.send_error(404)

        def _send(self, text: str, kind: str) -> None:
            content = text.encode()
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
