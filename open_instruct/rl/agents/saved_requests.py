"""Requests of recorded sessions, as a file holds them: a line of JSON for each session.

They stand beside the rows of the sessions, in the order in which they came, each with the ids of
its replies, so that they can be sent again (`replayed_sessions.py`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from open_instruct.core.errors import InputError
from open_instruct.rl.agents.session_tree import SampledReply

ENDING = ".requests.jsonl"  # in the place of the rows' .jsonl
SUCCESS = 200


class Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class SavedReply(Saved):
    """The ids of a reply, behind those that it was sampled after."""

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, reply: SampledReply) -> "SavedReply":
        return cls(prompt_token_ids=reply.prompt_token_ids, token_ids=reply.completion.token_ids)


class SavedRequest(Saved):
    """A request, the status of HTTP of its answer, and the replies of the answer.

    While it is being answered its status is 0.
    """

    path: str
    body: Any
    status: int = 0
    replies: list[SavedReply] = []


class SessionSettings(Saved):
    """What a served session's replies depend on beside its requests."""

    model: str  # as the server was told of it, which requests may name
    param_dtype: Literal["bfloat16", "float32"]
    max_seq_length: int
    temperature: float
    top_p: float


class SavedSession(Saved):
    """A session's requests, in the order in which they came.

    Example: `{"session": "3f…", "seed": 7, "settings": {…}, "requests": [{"path":
    "/v1/chat/completions", "body": {…}, "status": 200, "replies": [{…}]}]}`.
    """

    session: str
    seed: int
    settings: SessionSettings
    requests: list[SavedRequest]


def find_requests_path(rows: Path) -> Path:
    """The file of the requests of sessions whose rows are in `rows`."""
    return rows.with_suffix(ENDING)


def save_session(path: Path, session: SavedSession) -> None:
    """Add a session to the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(session.model_dump_json() + "\n")


def read_sessions(path: Path) -> Iterator[SavedSession]:
    """Read the sessions of a file, one after another.

    Raises:
        InputError: it cannot be read, or a line holds no session.
    """
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                yield _read_session(line, f"{path} line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}", kind="unreadable_file") from error


def _read_session(line: str, where: str) -> SavedSession:
    try:
        return SavedSession.model_validate_json(line)
    except ValidationError as error:
        problem = error.errors()[0]
        field = ".".join(map(str, problem["loc"])) or "the line"
        raise InputError(
            f"{where} holds no requests of a session: {field}: {problem['msg']}; name a file "
            f"*{ENDING} that `open-instruct serve RUN --record` has written",
            kind="unreadable_file",
        ) from error
