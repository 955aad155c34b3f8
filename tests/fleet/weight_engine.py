"""A process with an engine that takes weights through channels, for the test beside it.

    python tests/fleet/weight_engine.py MODEL_FOLDER FOLDER merged|delta|adapter

The same prompts are answered with each version. The first update breaks; the second last comes
while completions are being generated (a delta has been staged by then, and changes nothing before
it is put in place). An engine that holds an adapter has two more, without the emptying of its cache
of prefixes that comes with every update: under a name of its own, and under that of the version
before.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

import torch

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import RunError
from open_instruct.generation.engine import Engine
from open_instruct.generation.requests import (
    Batching,
    EngineSettings,
    GenerationRequest,
    SamplingSettings,
)
from open_instruct.generation.vllm_options import engine_environment
from open_instruct.weight_sync.receiver import AdapterReceiver
from tests.fleet.vllm_session import HaltingCore, answers_of, during_generation
from tests.ranks.files import tell, told
from tests.ranks.jobs.weight_sync import LORA
from tests.ranks.nccl_rules import Call, recorded

NUM_VERSIONS = 5
IN_FLIGHT = NUM_VERSIONS + 1
OWN_NAME, KEPT_NAME = NUM_VERSIONS + 2, NUM_VERSIONS + 3
MAX_MODEL_LEN = 192
# Longer than a block of a CPU's cache, which is 128 tokens.
PROMPTS = [tuple((7 * i + number) % 500 + 3 for i in range(150 + number)) for number in range(4)]
SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=14)


class RememberingCore(HaltingCore):
    """After `remembering` an update leaves the cache of prefixes, and perhaps the adapter's name,
    as they are.
    """

    @contextmanager
    def remembering(self, *, name: bool) -> Iterator[None]:
        names = self._adapter_names
        if name:
            self._adapter_names = iter([self._adapter])  # type: ignore[list-item]
        with patch.object(self._engine, "reset_prefix_cache"):
            yield
        self._adapter_names = names


def requests(version: int) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{number}",
            prompt_token_ids=prompt,
            seed=100 * version + number,
            sampling=SAMPLING,
        )
        for number, prompt in enumerate(PROMPTS)
    ]


def main(model_folder: str, folder: Path, way: str, notes: list[Call]) -> None:
    os.environ |= engine_environment(on_cuda=False)
    adapter: LoRASection | None = LORA if way == "adapter" else None
    settings = EngineSettings(
        model_folder=model_folder,
        tokenizer_folder=model_folder,
        dtype="float32",
        max_model_len=MAX_MODEL_LEN,
        batching=Batching(max_num_seqs=8, max_num_batched_tokens=1024, schedules_ahead=False),
        fleet=FleetSection(vllm_kv_cache_mib=64),
        seed=0,
        adapter=adapter,
    )
    cores: list[RememberingCore] = []

    def make_core(settings: EngineSettings) -> RememberingCore:
        cores.append(RememberingCore(settings))
        return cores[0]

    engine = Engine(settings, make_core=make_core)
    completions = []

    def answer(version: int) -> None:
        asked = requests(version)
        completions.extend(zip(PROMPTS, answers_of(engine, asked), strict=True))

    def stage(version: int) -> None:
        if broken and channel["backend"] == "files":  # the first one never comes
            told(folder / f"sent-{version}-0.told")
        if way == "delta":
            engine.stage_weights(version)
            tell(folder / f"read-{version}.told", {})

    def update(version: int) -> None:
        stage(version)
        engine.begin_update(False)
        engine.receive_weights()
        engine.finish_update(version)

    if adapter is not None:
        answer(0)
    broken = ""
    channel = told(folder / "0.told")
    engine.open_channel({**channel, "receiver_index": 0})
    try:
        update(1)
    except RunError as error:
        broken = str(error)
    engine.open_channel({**told(folder / "1.told"), "receiver_index": 0})
    for version in range(1, NUM_VERSIONS + 1):
        update(version)
        answer(version)
    stage(IN_FLIGHT)
    completions.extend(
        zip(PROMPTS, during_generation(engine, requests(IN_FLIGHT), IN_FLIGHT), strict=True)
    )
    said: dict[str, Any] = {
        "broken": broken,
        "in_flight": [completion.versions for _, completion in completions[-4:]],
    }
    if adapter is not None:
        from vllm.config.lora import MaxLoRARanks

        said["ranks"] = get_args(MaxLoRARanks)
        of_the_head = {
            f"base_model.model.lm_head.lora_{which}.weight": torch.zeros(8, 8) for which in "AB"
        }
        try:
            cores[0].call_workers(AdapterReceiver.hold_adapter, of_the_head)
        except RunError as error:
            said["refused"] = str(error)
        for version in (OWN_NAME, KEPT_NAME):
            with cores[0].remembering(name=version == KEPT_NAME):
                update(version)
            answer(version)
    tell(folder / "completions.told", {"completions": completions})
    (folder / "said.json").write_text(json.dumps(said | {"notes": notes}))
    engine.shutdown()
    os._exit(0)


if __name__ == "__main__":
    with recorded() as calls:  # where the way is NCCL's
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], calls)
