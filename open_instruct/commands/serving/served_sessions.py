"""What `open-instruct serve` with our own endpoint has behind it: an engine, and sessions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from open_instruct.commands.talking.models import TalkingModel
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.sections import Dtype
from open_instruct.core.errors import InputError
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.rl.agents.saved_requests import SessionSettings
from open_instruct.rl.agents.session import AgentSession, SessionLimits
from open_instruct.rl.agents.session_tree import SessionTree
from open_instruct.rl.episodes.bridge import TurnTemplate
from open_instruct.rl.episodes.tool_calls import detect_call_form

if TYPE_CHECKING:
    from open_instruct.generation.engine_pool import EnginePool
    from open_instruct.generation.requests import EngineSettings

NO_LIMIT = 1 << 30  # of replies, which a served session may have without end
REQUESTS_AT_ONCE = 64  # of one session


def refuse_adapter(model: TalkingModel, flag: str) -> None:
    """Refuse a model that is an adapter.

    Raises:
        InputError: it is one.
    """
    if model.adapter is not None:
        raise InputError(
            f"--{flag}: {model.name} is an adapter; `open-instruct merge` makes one model of it "
            "and its base",
            kind="conflict",
            flag=flag,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model whose sessions an engine of this process answers."""

    sessions: SessionMaker
    chat: ChatFormat
    engine_settings: EngineSettings
    failures: list[Exception]  # of the engine, until now


@contextmanager
def open_model(
    model: TalkingModel, *, max_seq_length: int, param_dtype: Dtype | None
) -> Iterator[ServedModel]:
    """Start an engine of the model; it ends with the block."""
    chat = ChatFormat.choose(load_tokenizer(str(model.folder), flag="model"), None)
    failures: list[Exception] = []
    pool, engine_settings = open_engine(
        model,
        chat,
        max_seq_length=max_seq_length,
        param_dtype=param_dtype,
        on_failure=failures.append,
    )
    with closing(pool), closing(SessionMaker(pool, chat)) as sessions:
        yield ServedModel(
            sessions=sessions,
            chat=chat,
            engine_settings=engine_settings,
            failures=failures,
        )


def open_engine(
    model: TalkingModel,
    chat: ChatFormat,
    *,
    max_seq_length: int,
    param_dtype: Dtype | None,
    on_failure: Callable[[Exception], None],
) -> tuple[EnginePool, EngineSettings]:
    """Start the model's engine in this process; returns it with its settings."""
    import torch

    from open_instruct.generation.local_engine import open_local_pool
    from open_instruct.generation.vllm_options import engine_environment

    on_cuda = torch.cuda.is_available()
    os.environ.update(engine_environment(on_cuda))  # read when vLLM is imported
    settings = choose_engine_settings(
        model,
        chat,
        max_seq_length=max_seq_length,
        param_dtype=param_dtype,
        on_cuda=on_cuda,
    )
    return open_local_pool(settings, on_failure=on_failure), settings


def choose_engine_settings(
    model: TalkingModel,
    chat: ChatFormat,
    *,
    max_seq_length: int,
    param_dtype: Dtype | None,
    on_cuda: bool,
) -> EngineSettings:
    """The settings of an engine for a model: in bfloat16 where a GPU computes."""
    from open_instruct.generation.requests import Batching, EngineSettings

    fleet = FleetSection()
    return EngineSettings(
        model_folder=str(model.folder.resolve()),
        tokenizer_folder=str(model.tokenizer_folder.resolve()),
        dtype=param_dtype or ("bfloat16" if on_cuda else "float32"),
        max_model_len=max_seq_length,
        batching=Batching.of(fleet, on_cuda=on_cuda, max_model_len=max_seq_length),
        fleet=fleet,
        seed=0,
        stop_token_ids=chat.turn_end_token_ids(),
    )


class SessionMaker:
    """Makes sessions of a model that is served; all of them run in one event loop."""

    def __init__(self, pool: EnginePool, chat: ChatFormat) -> None:
        self._pool = pool
        self._template = TurnTemplate(chat)
        self._call_form = detect_call_form(chat.template.text)
        self._rendering = ThreadPoolExecutor(1, thread_name_prefix="turns")

    def make_session(
        self,
        settings: SessionSettings,
        *,
        seed: int,
        name: str,
    ) -> AgentSession:
        """A new session, whose requests have names that begin with `name`."""
        from open_instruct.generation.requests import GenerationRequest, SamplingSettings

        sampling = SamplingSettings(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_seq_length,
        )
        first_request = GenerationRequest(
            request_id=name,
            prompt_token_ids=(),
            seed=seed,
            sampling=sampling,
        )
        limits = SessionLimits(
            max_turns=NO_LIMIT,
            max_context=settings.max_seq_length,
            turn_length=None,
            num_at_once=REQUESTS_AT_ONCE,
        )
        return AgentSession(
            SessionTree(self._template),
            self._template,
            self._pool,
            first_request,
            limits,
            call_form=self._call_form,
            in_thread=self._in_thread,
        )

    async def _in_thread(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function in the one thread for templates and tokenizers; returns its result."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._rendering, partial(function, *args))

    def close(self) -> None:
        self._rendering.shutdown()
