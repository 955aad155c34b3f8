"""A server that speaks as much of OpenAI's form as a judge needs, and answers as its caller
says.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[dict[str, Any]], str | int | float | None]
"""Of a request's body: the text of the reply, a status, or seconds (a float) after which nothing
comes.

None is an answer that comes byte by byte, for 10 seconds.
"""

CUT = "[cut]"  # the end of what a judge says that was cut at its limit


@dataclass
class Stub:
    url: str
    answer: Answer
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    num_at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def questions(self) -> list[str]:
        """Those that were asked, but for the trial at the start."""
        asked = [body["messages"][0]["content"] for body in self.bodies]
        return [each for each in asked if not each.startswith("Is 7 more")]


@contextmanager
def judge_stub(answer: Answer) -> Iterator[Stub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def drip(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", "200")
            self.end_headers()
            with suppress(OSError):  # nobody waits for more
                for _ in range(200):
                    self.wfile.write(b" ")
                    time.sleep(0.05)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with stub.lock:
                stub.bodies.append(body)
                stub.keys.append(self.headers["Authorization"])
                stub.num_at_once += 1
                stub.most_at_once = max(stub.most_at_once, stub.num_at_once)
            said = stub.answer(body)
            with stub.lock:
                stub.num_at_once -= 1
            if said is None:
                self.drip()
                return
            if isinstance(said, float):
                time.sleep(said)
                self.close_connection = True
                return
            if isinstance(said, int):
                self.reply(
                    said,
                    {"error": {"message": f"no, {self.headers['Authorization']}", "code": None}},
                )
                return
            usage = {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12}
            message = {"role": "assistant", "content": said}
            finish = "length" if said.endswith(CUT) else "stop"
            self.reply(
                200,
                {
                    "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                    "usage": usage,
                },
            )

        def reply(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *words: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    stub = Stub(url=f"http://127.0.0.1:{server.server_port}/v1", answer=answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
