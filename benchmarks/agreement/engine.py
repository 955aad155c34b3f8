"""An engine in a process of its own, which imports this file and no model of ours."""

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.records import Completion
from open_instruct.generation.requests import Batching, EngineSettings, GenerationRequest

LONGEST_PROMPT, LONGEST_COMPLETION = 48, 48
NUM_AT_ONCE = 16
TIMEOUT_S = 60


def settings_of(folder: Path, *, dtype: str) -> EngineSettings:
    return EngineSettings(
        model_folder=str(folder),
        tokenizer_folder=str(folder),
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=LONGEST_PROMPT + LONGEST_COMPLETION,
        batching=Batching(
            max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=4096, schedules_ahead=False
        ),
        fleet=FleetSection(vllm_kv_cache_mib=64, vllm_enforce_eager=True),
        seed=0,
    )


class EngineProcess:
    """An engine in a process of its own: vLLM and transformers' models must not share one."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.answer()

    def tell(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def answer(self) -> Any:
        """What came of the last call."""
        try:
            result, error = self._connection.recv()
        except EOFError:
            sys.exit("the engine's process died; its own words are above")
        if error is not None:
            sys.exit(f"the engine failed: {error}")
        return result

    def ask(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.answer()

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """The completions of requests, in their order."""
        self.ask("begin", dict(enumerate(requests)))
        told: dict[int, Completion] = {}
        while len(told) < len(requests):
            answers = self.ask("poll", TIMEOUT_S)
            for key, outcome in answers.items():
                if isinstance(outcome, str):
                    sys.exit(f"the engine refused: {outcome}")
                told[key] = outcome
        return [told[key] for key in range(len(requests))]

    def stop(self) -> None:
        self._connection.close()
        self._process.join(TIMEOUT_S)


def serve(connection: Connection, settings: EngineSettings) -> None:
    """What the engine's process runs, until the other end closes."""
    from open_instruct.cluster.actor_host import ActorHost
    from open_instruct.generation.vllm_options import engine_environment

    host = ActorHost()
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **engine_environment(on_cuda=False)}
    host.set_environment("engine-0", environment, meeting_address="127.0.0.1")
    from open_instruct.generation.engine import Engine

    host.construct(Engine, {"settings": settings})
    connection.send((None, None))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((host.call(method, *args), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))
    host.call("shutdown")
