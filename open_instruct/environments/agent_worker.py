"""Runs a user's agent in a process of its own: a function, or a command with all that it starts.

The process is forked for one episode and ends with it. It knows the episode's endpoint by its
environment alone, as any client of OpenAI's does.
"""

import asyncio
import inspect
import json
import os
import subprocess
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any
from urllib.parse import urlsplit

from open_instruct.core.user_code import accepted_columns, load_named
from open_instruct.environments.agent_walls import put_up_walls

MAX_OUTPUT_BYTES = 64 << 20
TAIL_BYTES = 64 << 10
READ_BYTES = 64 << 10
MAX_PROBLEM_CHARACTERS = 2000
# A process that its program has left behind may hold its output open.
OUTPUT_TIMEOUT_S = 1.0


def run_agent(
    *,
    word: str = "",
    command: Sequence[str] = (),
    row: Mapping[str, Any],
    variables: Mapping[str, str],
    is_trial: bool = False,
    folder: str = "",
) -> dict[str, str]:
    """Run a function (`word`) or a command on a row; returns what came of it, as `RunResult` reads.

    `value` is the JSON of what the function returned, or of the last line that the program printed.
    With `is_trial` a function is loaded, and not called. With a `folder` it runs behind walls, and
    may write there alone.
    """
    os.environ.update(variables)
    try:
        if folder:
            os.environ.update({"TMPDIR": folder, "HOME": folder})
            port = urlsplit(variables["OPENAI_BASE_URL"]).port
            assert port is not None
            put_up_walls(port=port, folder=folder)
        if command:
            return _run_command(command, json.dumps(row))
        function = load_named(word, origin=f"agent:{word}", what="function")
        if not callable(function):
            raise TypeError(f"{word} is a {type(function).__name__}, and no function")
        value = None
        if not is_trial:
            value = function(**accepted_columns(function, row))
            if inspect.iscoroutine(value):
                value = asyncio.run(value)
        text = json.dumps(value)
        if len(text) > MAX_OUTPUT_BYTES:
            raise ValueError(f"it returned more than {MAX_OUTPUT_BYTES:,} bytes")
        return {"status": "done", "value": text}
    except BaseException as error:  # the user's code, which may raise anything, and exit
        text = "".join(traceback.format_exception(error))
        return {"status": "error", "problem": text[-MAX_PROBLEM_CHARACTERS:]}


def _run_command(command: Sequence[str], text: str) -> dict[str, str]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    output = _Tail(process.stdout, process)
    errors = _Tail(process.stderr, process)
    with suppress(OSError):  # it may read nothing, and end
        process.stdin.write(text.encode("utf-8", "replace"))
        process.stdin.close()
    code = process.wait()
    for tail in (output, errors):
        tail.thread.join(OUTPUT_TIMEOUT_S)
    words = errors.text().strip()[-MAX_PROBLEM_CHARACTERS:]
    if output.is_flooded or errors.is_flooded:
        return {"status": "error", "problem": f"it wrote more than {MAX_OUTPUT_BYTES:,} bytes"}
    if code != 0:
        return {"status": "error", "problem": f"it ended with {code}: {words}"}
    lines = output.text().strip().splitlines()
    value = None
    if lines:
        with suppress(ValueError, RecursionError):
            value = json.loads(lines[-1])
    # A number alone may be the program's answer.
    return {
        "status": "done",
        "value": json.dumps(value if isinstance(value, dict) else None),
    }


class _Tail:
    """Reads a program's output to its end, and keeps the end; ends one that writes without end."""

    def __init__(self, stream: IO[bytes], process: "subprocess.Popen[bytes]") -> None:
        self.is_flooded = False
        self._stream = stream
        self._process = process
        self._data = b""
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def text(self) -> str:
        return self._data.decode("utf-8", "replace")

    def _read(self) -> None:
        num_bytes = 0
        while part := self._stream.read1(READ_BYTES):  # type: ignore[attr-defined]
            num_bytes += len(part)
            self._data = (self._data + part)[-TAIL_BYTES:]
            if num_bytes > MAX_OUTPUT_BYTES:
                self.is_flooded = True
                self._process.kill()
                return
