"""A headless Chromium that opens a file as a person would see it: of any width, in either colour
scheme.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    "",
)
FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--hide-scrollbars",
    ),
    *(
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-dev-shm-usage",
    ),
    "--remote-debugging-pipe",
)
Scheme = Literal["light", "dark"]


class Tab:
    """One page of the browser, spoken to over the pipe of its DevTools:

    JSON, each message ended by a zero.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to_browser, self._from_browser = to_browser, from_browser
        self._rest = b""
        self._last_id = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def open(self, file: Path, *, width: int, height: int = 900, scheme: Scheme = "light") -> None:
        """Show `file`, and wait until its scripts have run;

        `errors` then has what they did wrong.
        """
        self.errors = []
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.said(
            "new Promise(done => document.readyState === 'complete' ? done() : "
            "addEventListener('load', done))"
        )
        self.settle()

    def settle(self) -> None:
        """Wait until what has come into sight is drawn."""
        self.said("new Promise(done => setTimeout(done, 400))")

    def said(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """WebP of what is in sight."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="webp", quality=80)["data"]
        )

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            self._note(answer)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, (method, answer["error"])
                return dict(answer["result"])

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._from_browser, 2**20)
            assert read, "the browser has ended"
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(message["params"]["exceptionDetails"]))
        entry = message.get("params", {}).get("entry", {})
        if message.get("method") == "Log.entryAdded" and entry["level"] == "error":
            self.errors.append(entry["text"])


@contextmanager
def browser() -> Iterator[Tab]:
    """A tab of a browser of its own, with an empty profile, which ends with the block."""
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads from its file 3 and writes to its file 4.
    words = [
        "bash",
        "-c",
        f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}',
        "bash",
        CHROMIUM,
        *FLAGS,
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [*words, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(to_browser[0], from_browser[1]),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Tab(to_browser[1], from_browser[0])
        finally:
            process.terminate()
            process.wait(timeout=60)
            os.close(to_browser[1])
            os.close(from_browser[0])
