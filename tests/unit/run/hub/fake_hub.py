"""A hub of our own on loopback: it takes what huggingface_hub uploads, large files by git-lfs, and
keeps it.
"""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

USER = "me"


class FakeHub:
    """What it was told: repositories by their names, whether each is private, and the files of
    each.

    Attributes:
        answers: status codes to be given in place of a proper answer, by the end of a path, such as
            `commit/main`.
    """

    def __init__(self) -> None:
        self.is_private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.cards: list[str] = []
        self.tokens: set[str | None] = set()
        self.answers: dict[str, int] = {}
        self.large: dict[str, bytes] = {}
        self.endpoint = ""

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that is to take it for the hub; its large files go by git-lfs, which anybody
        can speak.
        """
        quiet = {
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": "hf_of_a_test"} | quiet

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path == "/api/validate-yaml":
            self.cards.append(json.loads(body)["content"])
            return {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or USER}/{asked['name']}"
            self.is_private.setdefault(name, asked.get("visibility") == "private")
            return {"url": f"{self.endpoint}/{name}"}
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            for file in files:
                file["uploadMode"] = "lfs" if file["path"].endswith(".safetensors") else "regular"
            return {"files": files}
        if path.endswith("/info/lfs/objects/batch"):
            objects = [{"oid": each["oid"], "size": 1} for each in json.loads(body)["objects"]]
            for each in objects:
                each["actions"] = {"upload": {"href": f"{self.endpoint}/large/{each['oid']}"}}
            return {"transfer": "basic", "objects": objects}
        if path.startswith("/large/"):
            self.large[path.removeprefix("/large/")] = body
            return {}
        assert path.endswith("/commit/main"), path
        name = path.removeprefix("/api/models/").removesuffix("/commit/main")
        files = self.files.setdefault(name, {})
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                content = self.large[line["value"]["oid"]]
                assert hashlib.sha256(content).hexdigest() == line["value"]["oid"]
                files[line["value"]["path"]] = content
        return {
            "commitUrl": f"{self.endpoint}/{name}/commit/abc",
            "commitOid": "abc",
            "success": True,
        }


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """One that listens on loopback while the block runs."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            path = self.path.partition("?")[0]
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if not path.startswith("/large/"):  # whose address is enough
                hub.tokens.add(self.headers.get("Authorization"))
            code = next((code for end, code in hub.answers.items() if path.endswith(end)), 200)
            answer = hub.answer(path, body) if code == 200 else {"error": "so it was told"}
            text = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_PUT = answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
