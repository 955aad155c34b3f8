"""`open-instruct report RUN --watch`: serves the page of runs that go on, on this machine.

Listens on the loopback address alone. Its address holds a secret word, as other people may have
accounts on the same machine, and a request that names another host is refused: a page from
elsewhere, whose name was made to lead here (DNS rebinding), reads nothing.
"""

import secrets
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from open_instruct.core.errors import InputError
from open_instruct.report.run_files import RunFiles
from open_instruct.run.run_directory import RunDirectory

LOOPBACK = "127.0.0.1"
HOST_NAMES = (LOOPBACK, "localhost")
CHECK_INTERVAL_S = 1.0
# The least time between two looks of a browser; more for a page that takes long to make.
REFRESH_S = 3.0
REFRESH_PER_S = 10.0
SOCKET_TIMEOUT_S = 30.0
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class RenderPage(Protocol):
    """Makes the page of some runs; a live one has a `version`, and reloads after `refresh_s`."""

    def __call__(self, folders: Sequence[Path], *, version: str, refresh_s: float) -> str: ...


class LivePage:
    """A page that is made anew when a file that it is made from has changed."""

    def __init__(self, folders: Sequence[Path], render: RenderPage) -> None:
        self.folders = folders
        self._render = render
        self._lock = threading.Lock()
        self._version = ""
        self._content = b""
        self._took_s = 0.0

    def find_version(self) -> str:
        """A word that is another one after every change of the runs' files."""
        marks: list[Any] = []
        for folder in self.folders:
            marks += _file_marks(RunDirectory(path=folder))
        return f"{hash(tuple(marks)) & (2**64 - 1):x}"

    def render(self) -> bytes:
        """The page as the files are now.

        :raises InputError: a run is not there any more.
        """
        with self._lock:
            version = self.find_version()
            if version != self._version:
                began_s = time.monotonic()
                refresh_s = max(REFRESH_S, REFRESH_PER_S * self._took_s)
                page = self._render(self.folders, version=version, refresh_s=refresh_s)
                self._content = page.encode()
                self._took_s = time.monotonic() - began_s
                self._version = version
            return self._content


def _file_marks(directory: RunDirectory) -> list[Any]:
    paths = (
        directory.config,
        directory.metrics,
        directory.evaluations,
        directory.layout,
        directory.plan,
        directory.hf_model,
        directory.adapter,
        directory.path / "traces",
    )
    return [*map(_file_mark, paths), directory.has_live_lease()]


def _file_mark(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


class PageServer(ThreadingHTTPServer):
    """Serves a `LivePage` at `url`, to this machine alone.

    Raises:
        InputError: the port cannot be listened on.
    """

    daemon_threads = True

    def __init__(self, page: LivePage, *, port: int = 0) -> None:
        self.page = page
        self.secret = secrets.token_urlsafe(12)
        try:
            super().__init__((LOOPBACK, port), _PageHandler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise InputError(
                f"--port {port} cannot be listened on ({why}): give another, or none for one that "
                "is free",
                kind="bad_value",
                flag="port",
            ) from None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_port}/{quote(self.secret)}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes away in the middle is no error of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _PageHandler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = SOCKET_TIMEOUT_S

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in HOST_NAMES:
            self._answer_text(HTTPStatus.FORBIDDEN, "not a name of this machine\n")
        elif self.path == f"/{self.server.secret}/version":
            self._answer_text(HTTPStatus.OK, self.server.page.find_version())
        elif self.path == f"/{self.server.secret}/":
            self._answer_page()
        else:
            remedy = "the address is the one that the command has printed\n"
            self._answer_text(HTTPStatus.NOT_FOUND, remedy)

    def _answer_page(self) -> None:
        try:
            content = self.server.page.render()
        except InputError as error:
            self._answer_text(HTTPStatus.SERVICE_UNAVAILABLE, f"{error}\n")
            return
        self._answer(HTTPStatus.OK, content, "text/html")

    def _answer_text(self, status: HTTPStatus, text: str) -> None:
        self._answer(status, text.encode(), "text/plain")

    def _answer(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        fields = {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(content))}
        for name, value in (fields | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """The terminal is for what happens to the runs."""


def serve_page(page: LivePage, *, port: int) -> None:
    """Serve the page until Ctrl-C, and say when a run ends.

    :raises InputError: a folder holds no run, or the port cannot be listened on.
    """
    page.render()
    with PageServer(page, port=port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(f"{server.url} shows {', '.join(map(str, page.folders))}; Ctrl-C ends it", flush=True)
        try:
            _print_ends(page.folders)
        except KeyboardInterrupt:
            print()
        finally:
            server.shutdown()


def _print_ends(folders: Sequence[Path]) -> None:
    """Print a line for every run that ends or stops; never returns."""
    states: dict[Path, str] = {}
    while True:
        for folder in folders:
            state = RunDirectory(path=folder).find_state()
            if state != states.get(folder) and state != "running":
                rows = RunFiles.read(folder).rows
                step = rows[-1]["step"] if rows else 0
                print(f"{folder}: {state} at step {step:g}", flush=True)
            states[folder] = state
        time.sleep(CHECK_INTERVAL_S)
