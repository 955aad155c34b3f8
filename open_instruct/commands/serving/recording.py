"""`open-instruct serve RUN --record FILE`: our endpoint before a model; sessions become rows."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from open_instruct.commands.serving.served_sessions import SessionMaker, open_model, refuse_adapter
from open_instruct.commands.talking.models import TalkingModel
from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import EXIT_FAILURE, InputError
from open_instruct.rl.agents.api_requests import MODEL, RunSampling
from open_instruct.rl.agents.recorded_sessions import RecordingEndpoint
from open_instruct.rl.agents.saved_requests import SessionSettings, find_requests_path
from open_instruct.rl.agents.session import AgentSession


@dataclass(kw_only=True)
class RecordFlags:
    """Serve a model by OpenAI's API on this machine alone, and record what is asked and sampled.

    Examples:
        open-instruct serve runs/first --record sessions.jsonl
    """

    record: str = flag("rows of the sessions, which are added to it (.jsonl)", is_path=True)
    port: int = flag("of loopback", 8000, minimum=0, maximum=65535)
    max_seq_length: int = flag("tokens of a prompt with its reply, at most", 4096, minimum=2)
    temperature: float = flag("of sampling, where a request names none", 1.0, minimum=0)
    top_p: float = flag("nucleus sampling, where a request names none", 1.0, above=0, maximum=1)
    session_timeout_s: float = flag(
        "seconds of silence after which a key's session has ended; later requests of the key begin "
        "another",
        600.0,
        above=0,
    )
    param_dtype: Dtype | None = flag(
        "dtype of the computation; default: bfloat16 on CUDA, float32 on a CPU", None
    )


def serve_and_record(model: TalkingModel, words: Sequence[str]) -> int:
    """Serve until a signal ends it; returns the exit code.

    Raises:
        InputError: a flag, the model or the port cannot be used.
    """
    flags = parse(RecordFlags, words)
    refuse(list(limit_problems(flags)))
    refuse_adapter(model, "record")
    with open_model(
        model, max_seq_length=flags.max_seq_length, param_dtype=flags.param_dtype
    ) as served:
        settings = SessionSettings(
            model=model.name,
            param_dtype=served.engine_settings.dtype,
            max_seq_length=flags.max_seq_length,
            temperature=flags.temperature,
            top_p=flags.top_p,
        )
        asyncio.run(serve(served.sessions, flags, settings, chat_format=served.chat.fingerprint))
    return EXIT_FAILURE if served.failures else 0


async def serve(
    sessions: SessionMaker,
    flags: RecordFlags,
    settings: SessionSettings,
    *,
    chat_format: str,
) -> None:
    """Answer requests until a signal comes, and write the sessions."""
    from open_instruct.generation.requests import make_sampling_seed

    def make_session(number: int) -> AgentSession:
        return sessions.make_session(
            settings, seed=make_sampling_seed("session", number), name=f"session/{number}"
        )

    path = Path(flags.record)
    endpoint = RecordingEndpoint(
        path,
        make_session,
        RunSampling(
            temperature=flags.temperature,
            top_p=flags.top_p,
            follows=True,
            model_names=(MODEL, settings.model),
        ),
        settings,
        chat_format=chat_format,
        silence_s=flags.session_timeout_s,
    )
    try:
        await endpoint.start(flags.port)
    except OSError as error:
        raise InputError(
            f"--port {flags.port}: {error.strerror}; give another, or 0 for a free one",
            kind="bad_value",
            flag="port",
        ) from error
    files = f"{path}, and their requests to {find_requests_path(path)}"
    print(f"{endpoint.base_url} answers; sessions go to {files}", flush=True)
    writing = asyncio.ensure_future(endpoint.write_ended_sessions())
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    await endpoint.stop()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
