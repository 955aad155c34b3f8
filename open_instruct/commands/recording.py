"""`open-instruct serve RUN --record FILE`: our endpoint before a model; sessions become rows."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.commands.talking.models import TalkingModel
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import EXIT_FAILURE, InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.rl.agents.api_requests import MODEL, RunSampling
from open_instruct.rl.agents.recorded_sessions import RecordingEndpoint
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from open_instruct.rl.episodes.tool_calls import detect_call_form

if TYPE_CHECKING:
    from open_instruct.generation.engine_pool import EnginePool
    from open_instruct.generation.requests import EngineSettings

NO_LIMIT = 1 << 30  # of replies, which a served session may have without end


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
    if model.adapter is not None:
        raise InputError(
            f"--record: {model.name} is an adapter; `open-instruct merge` makes one model of it "
            "and its base",
            kind="conflict",
            flag="record",
        )
    chat = ChatFormat.choose(load_tokenizer(str(model.folder), flag="model"), None)
    failures: list[Exception] = []
    pool = open_engine(model, chat, flags, on_failure=failures.append)
    try:
        asyncio.run(serve(pool, chat, flags, names=(MODEL, model.name)))
    finally:
        pool.close()
    return EXIT_FAILURE if failures else 0


def open_engine(
    model: TalkingModel,
    chat: ChatFormat,
    flags: RecordFlags,
    *,
    on_failure: Callable[[Exception], None],
) -> EnginePool:
    """Start the model's engine in this process."""
    import torch

    from open_instruct.generation.local_engine import open_local_pool
    from open_instruct.generation.vllm_options import engine_environment

    on_cuda = torch.cuda.is_available()
    os.environ.update(engine_environment(on_cuda))  # read when vLLM is imported
    settings = choose_engine_settings(model, chat, flags, on_cuda=on_cuda)
    return open_local_pool(settings, on_failure=on_failure)


def choose_engine_settings(
    model: TalkingModel,
    chat: ChatFormat,
    flags: RecordFlags,
    *,
    on_cuda: bool,
) -> EngineSettings:
    """The settings of an engine for a model and its flags: in bfloat16 where a GPU computes."""
    from open_instruct.generation.requests import Batching, EngineSettings

    fleet = FleetSection()
    return EngineSettings(
        model_folder=str(model.folder.resolve()),
        tokenizer_folder=str(model.tokenizer_folder.resolve()),
        dtype=flags.param_dtype or ("bfloat16" if on_cuda else "float32"),
        max_model_len=flags.max_seq_length,
        batching=Batching.of(fleet, on_cuda=on_cuda, max_model_len=flags.max_seq_length),
        fleet=fleet,
        seed=0,
        stop_token_ids=chat.turn_end_token_ids(),
    )


async def serve(
    pool: EnginePool, chat: ChatFormat, flags: RecordFlags, *, names: tuple[str, ...]
) -> None:
    """Answer requests until a signal comes, and write the sessions."""
    loop = asyncio.get_running_loop()
    rendering = ThreadPoolExecutor(1, thread_name_prefix="turns")

    async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
        return await loop.run_in_executor(rendering, partial(function, *args))

    template = TurnTemplate(chat)
    call_form = detect_call_form(chat.template.text)

    def make_session(number: int) -> AgentSession:
        return AgentSession(
            SessionTree(template),
            template,
            pool,
            first_request(number, flags),
            SessionLimits(
                max_turns=NO_LIMIT,
                max_context=flags.max_seq_length,
                turn_length=None,
                num_at_once=64,
            ),
            call_form=call_form,
            in_thread=in_thread,
        )

    endpoint = RecordingEndpoint(
        Path(flags.record),
        make_session,
        RunSampling(
            temperature=flags.temperature,
            top_p=flags.top_p,
            follows=True,
            model_names=names,
        ),
        chat_format=chat.fingerprint,
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
    print(f"{endpoint.base_url} answers; sessions go to {flags.record}", flush=True)
    writing = asyncio.ensure_future(endpoint.write_ended_sessions())
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    await endpoint.stop()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)
    rendering.shutdown()


def first_request(number: int, flags: RecordFlags) -> Any:
    """What a session's requests have in common: how they are sampled, and their seeds."""
    from open_instruct.generation.requests import (
        GenerationRequest,
        SamplingSettings,
        make_sampling_seed,
    )

    sampling = SamplingSettings(
        temperature=flags.temperature, top_p=flags.top_p, max_tokens=flags.max_seq_length
    )
    return GenerationRequest(
        request_id=f"session/{number}",
        prompt_token_ids=(),
        seed=make_sampling_seed("session", number),
        sampling=sampling,
    )
