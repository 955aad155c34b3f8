"""A process with one real engine, which is asked everything that the test beside it wants to know.

    python tests/fleet/vllm_session.py MODEL_FOLDER OTHER_MODEL_FOLDER OUT.json

A process of its own, which vLLM sets up when it is imported.
"""

import json
import os
import re
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.records import Completion
from open_instruct.generation import vllm_core
from open_instruct.generation.engine import Engine
from open_instruct.generation.requests import (
    Batching,
    EngineSettings,
    GenerationRequest,
    SamplingSettings,
)
from open_instruct.generation.vllm_core import Outcome, VLLMCore
from open_instruct.generation.vllm_options import engine_environment, engine_options
from tests.fleet.folder_receiver import FolderReceiver

TEMPERATURE = 0.7
MAX_MODEL_LEN = 96
NUM_REQUESTS = 24
MAX_TOKENS = 60
EOS = 2
# An untrained model ends no turn by itself: some tokens end it here, so that about half the
# completions are ended.
STOP_TOKEN_IDS = (EOS, *range(20, 512, 80))
STEPS_BEFORE_UPDATE = 10
TIMEOUT_S = 300.0


class HaltingCore(VLLMCore):
    """Once `halt` is set, a step that is `STEPS_BEFORE_UPDATE` further waits for `go`."""

    halt = False
    num_steps = 0
    go = threading.Event()
    has_halted = threading.Event()

    def step(self) -> Mapping[int, Outcome]:
        if self.halt:
            HaltingCore.num_steps += 1
            if self.num_steps == STEPS_BEFORE_UPDATE:
                self.has_halted.set()
                assert self.go.wait(TIMEOUT_S)
        return super().step()


def requests(**sampling: Any) -> list[GenerationRequest]:
    """Prompts of several lengths, in groups of four that are the same."""
    settings = SamplingSettings(temperature=TEMPERATURE, top_p=1.0, max_tokens=MAX_TOKENS)
    return [
        GenerationRequest(
            request_id=f"{number // 4}/{number % 4}",
            prompt_token_ids=tuple(
                (7 * i + number // 4) % 500 + 3 for i in range(5 + 4 * (number // 4))
            ),
            seed=2**62 + number,
            sampling=replace(settings, **sampling),
        )
        for number in range(NUM_REQUESTS)
    ]


def poll_all(engine: Engine, num_keys: int) -> list[Completion]:
    told: dict[int, Completion] = {}
    deadline = time.monotonic() + TIMEOUT_S
    while len(told) < num_keys:
        answers = engine.poll(1.0)
        for key, outcome in answers.items():
            if isinstance(outcome, str):
                raise ValueError(outcome)
            told[key] = outcome
        assert time.monotonic() < deadline
    return [told[key] for key in sorted(told)]


def answers_of(engine: Engine, asked: list[GenerationRequest]) -> list[Completion]:
    """Ask, and wait for all; one that is refused is an error."""
    engine.begin(dict(enumerate(asked)))
    return poll_all(engine, len(asked))


def during_generation(
    engine: Engine, asked: list[GenerationRequest], version: int
) -> list[Completion]:
    """Ask, and update the weights after some steps."""
    HaltingCore.num_steps, HaltingCore.halt = 0, True
    engine.begin(dict(enumerate(asked)))
    assert HaltingCore.has_halted.wait(TIMEOUT_S)
    with ThreadPoolExecutor(1) as driver:
        updating = driver.submit(engine.begin_update, False)
        while not engine._calls:  # the update comes before the next step
            time.sleep(0.001)
        HaltingCore.go.set()
        updating.result(TIMEOUT_S)
    engine.receive_weights()
    engine.finish_update(version)
    HaltingCore.halt = False
    return poll_all(engine, len(asked))


def with_stop_strings(engine: Engine, whole: list[Completion]) -> list[dict[str, Any]]:
    """The same requests again, each with a few letters from the middle of its own answer as a stop
    string.
    """
    answers = []
    for asked, completion in zip(requests(), whole, strict=True):
        words = [
            match[0] for match in re.finditer("[a-z]{2,}", completion.text) if match.start() > 0
        ]
        if words:
            sampling = replace(asked.sampling, stop_strings=(words[0], "never said"))
            (stopped,) = answers_of(engine, [replace(asked, sampling=sampling)])
            answers.append(
                {"stop": words[0], "whole": asdict(completion), "stopped": asdict(stopped)}
            )
    return answers


def refused_share(settings: EngineSettings) -> dict[float, str | None]:
    """By share of a GPU that is asked for where 30.157 of 79.1 GiB are free: what a run says of
    vLLM's own error.
    """
    from vllm.v1.worker.utils import request_memory

    found = Mock(device_="cuda:0", free_memory=int(30.157 * 2**30), total_memory=int(79.1 * 2**30))
    said: dict[float, str | None] = {}
    for share in (0.9, 0.39, 0.38):
        fleet = replace(settings.fleet, vllm_gpu_memory_utilization=share)
        try:
            request_memory(found, Mock(gpu_memory_utilization=share))
            said[share] = None
        except ValueError as error:
            said[share] = vllm_core.explain_memory_error(
                str(error), replace(settings, fleet=fleet), has_cache_size=False
            )
    return said


def arguments_on_a_gpu(settings: EngineSettings) -> dict[str, Any]:
    """What vLLM takes for an engine on CUDA where the flags leave much open; nothing here pretends
    to be CUDA.
    """
    from vllm.engine.arg_utils import EngineArgs

    batching = Batching(max_num_seqs=256, max_num_batched_tokens=None, schedules_ahead=True)
    arguments = EngineArgs(**engine_options(replace(settings, batching=batching), on_cuda=True))
    names = ("max_num_seqs", "max_num_batched_tokens", "async_scheduling", "logprobs_mode")
    return {name: getattr(arguments, name) for name in names}


def main(model_folder: str, other_folder: str, out: Path) -> None:
    os.environ.update(engine_environment(on_cuda=False))
    began_s = time.monotonic()
    settings = EngineSettings(
        model_folder=model_folder,
        tokenizer_folder=model_folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        # All prompts together are more than one step takes, as with long prompts in a run.
        batching=Batching(
            max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=MAX_MODEL_LEN, schedules_ahead=False
        ),
        fleet=FleetSection(vllm_kv_cache_mib=64, vllm_enforce_eager=True, routing_replay="on"),
        seed=0,
        stop_token_ids=STOP_TOKEN_IDS,
    )
    answers: dict[str, Any] = {
        "on_cuda": arguments_on_a_gpu(settings),
        "refused_share": refused_share(settings),
    }
    from vllm.v1.engine.llm_engine import LLMEngine

    with (
        patch.object(vllm_core, "check_temperature", wraps=vllm_core.check_temperature) as probed,
        patch.object(LLMEngine, "from_engine_args", wraps=LLMEngine.from_engine_args) as started,
    ):
        engine = Engine(settings, make_core=partial(HaltingCore, weight_receiver=FolderReceiver))
    answers["on_cuda"]["as"] = started.call_args.kwargs["usage_context"].name
    answers |= {
        "probed": [[*it.items()] for it in probed.call_args.args],
        "start_s": time.monotonic() - began_s,
    }

    def generate(name: str, asked: list[GenerationRequest]) -> list[Completion]:
        completions = answers_of(engine, asked)
        answers[name] = [asdict(completion) for completion in completions]
        return completions

    sampled = generate("sampled", requests())
    generate("sampled_backwards", requests()[::-1])
    generate("short", requests(max_tokens=3))
    generate("greedy", requests(temperature=0.0))
    answers["stopped"] = with_stop_strings(engine, sampled)
    try:
        answers_of(
            engine,
            [replace(requests()[0], prompt_token_ids=(5,) * (MAX_MODEL_LEN - MAX_TOKENS + 1))],
        )
    except ValueError as error:
        answers["refused"] = str(error)
    generate(
        "longest", [replace(requests()[0], prompt_token_ids=(5,) * (MAX_MODEL_LEN - MAX_TOKENS))]
    )

    engine.open_channel({"folders": [other_folder, model_folder]})
    answers["updated"] = [
        asdict(completion) for completion in during_generation(engine, requests(), 1)
    ]
    generate("other", requests())
    engine.begin_update(True)
    engine.receive_weights()
    engine.finish_update(2)
    generate("back", requests())
    engine.begin({0: requests()[0], 1: requests()[1]})
    engine.cancel([0])
    answers["after_cancel"] = [asdict(completion) for completion in poll_all(engine, 1)]
    with patch("vllm.v1.engine.core.cleanup_dist_env_and_memory") as make_room:
        engine.shutdown()
    answers["made_room"] = make_room.called
    out.write_text(json.dumps(answers, default=bytes.hex))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
