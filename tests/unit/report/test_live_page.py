"""`open-instruct report RUN --watch`: what the server answers, to whom, and how it ends."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from pathlib import Path

import pytest

from open_instruct.commands.report import main
from open_instruct.core.errors import InputError
from open_instruct.report.live_page import LOOPBACK, LivePage, PageServer
from open_instruct.report.page import report_page


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_step(folder, 1)
    return folder


@pytest.fixture
def server(run: Path) -> Iterator[PageServer]:
    def render(folders: list[Path], *, version: str, refresh_s: float) -> str:
        return report_page(folders, max_rollouts=0, version=version, refresh_s=refresh_s)

    with PageServer(LivePage([run], render)) as opened:
        threading.Thread(
            target=opened.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
        ).start()
        yield opened
        opened.shutdown()


def write_step(folder: Path, step: int) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "loss": 1 / step}) + "\n")


def answer(server: PageServer, path: str, *, host: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection(LOOPBACK, server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host or f"localhost:{server.server_port}"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_page_is_made_anew_when_the_run_goes_on(server: PageServer, run: Path) -> None:
    path = f"/{server.secret}/"
    status, before = answer(server, path)
    version = re.search(r'data-version="(\w+)"', before)
    assert status == HTTPStatus.OK and version
    assert "connect-src 'self'" in before
    assert answer(server, f"{path}version") == (HTTPStatus.OK, version[1])
    write_step(run, 2)
    assert answer(server, f"{path}version")[1] != version[1]
    assert "step 2, stopped" in " ".join(answer(server, path)[1].split())
    (run / "hf_model").mkdir()
    assert "step 2, ended" in " ".join(answer(server, path)[1].split())


@pytest.mark.parametrize(
    ("host", "path", "status"),
    [
        ("127.0.0.1:1", "/SECRET/", HTTPStatus.OK),  # of a forwarded port
        ("localhost", "/SECRET/", HTTPStatus.OK),
        ("evil.example", "/SECRET/", HTTPStatus.FORBIDDEN),
        ("localhost.evil.example:80", "/SECRET/", HTTPStatus.FORBIDDEN),
        ("127.0.0.1.evil.example", "/SECRET/version", HTTPStatus.FORBIDDEN),
        ("localhost", "/", HTTPStatus.NOT_FOUND),
        ("localhost", "/wrong/version", HTTPStatus.NOT_FOUND),
        ("localhost", "/SECRET/../metrics.jsonl", HTTPStatus.NOT_FOUND),
    ],
)
def test_only_this_machine_and_its_secret_are_answered(
    server: PageServer, host: str, path: str, status: HTTPStatus
) -> None:
    got, text = answer(server, path.replace("SECRET", server.secret), host=host)
    assert got == status
    assert ("loss" in text) == (status == HTTPStatus.OK)
    assert server.server_address[0] == LOOPBACK


def test_run_that_is_gone_is_said_and_the_server_lives(server: PageServer, run: Path) -> None:
    kept = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").unlink()
    status, text = answer(server, f"/{server.secret}/")
    assert status == HTTPStatus.SERVICE_UNAVAILABLE and str(run) in text
    (run / "metrics.jsonl").write_text(kept)
    assert answer(server, f"/{server.secret}/")[0] == HTTPStatus.OK


def test_port_in_use_and_a_file_beside_it_are_refused(server: PageServer, run: Path) -> None:
    with pytest.raises(InputError) as caught:
        main([str(run), "--watch", "--port", str(server.server_port)])
    assert str(server.server_port) in str(caught.value)
    with pytest.raises(InputError) as caught:
        main([str(run), "--watch", "--out", "a.html"])
    assert "--out" in str(caught.value)
    with pytest.raises(InputError) as caught:
        main([str(run), "--port", "8080"])
    assert "--watch" in str(caught.value)


@pytest.mark.slow
def test_watch_says_the_end_of_a_run_and_ends_by_an_interrupt(run: Path) -> None:
    (run / "hf_model").mkdir()
    words = [sys.executable, "-m", "open_instruct.cli", "report", str(run), "--watch"]
    # A shell has what it starts in the background ignore Ctrl-C, and these tests may be such.
    hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, preexec_fn=hears) as process:
        assert process.stdout is not None and process.stderr is not None
        assert "http://127.0.0.1:" in process.stdout.readline()
        assert f"{run}: ended at step 1" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == ""
