"""How an engine is set up by its device and the flags, and what is asked of it before a run relies
on it.
"""

from dataclasses import replace
from typing import Annotated, Any, Self

import pytest
from pydantic import Field, model_validator
from pydantic.dataclasses import dataclass

from open_instruct.cluster.actor_host import ActorHost
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError, RunError
from open_instruct.generation import nf4_loader
from open_instruct.generation.nf4_loader import load_options
from open_instruct.generation.requests import Batching
from open_instruct.generation.vllm_checks import (
    check_targets,
    check_temperature,
    explain_memory_error,
)
from open_instruct.generation.vllm_options import (
    adapter_options,
    engine_environment,
    engine_options,
)
from tests.refusals import refused
from tests.unit.fake_engine import SETTINGS

WARM = {5: -0.2, 7: -2.4, 1: -5.0}  # log-probs after a prompt, by token


class TestMemory:
    """What vLLM says of it; its words for a GPU that is held by another are asked of it in
    tests/fleet.
    """

    @pytest.mark.parametrize(
        ("words", "has_cache_size", "remedy"),
        [
            (
                "Free memory on device cuda:0 (0.4/79.1 GiB) on startup is less",
                False,
                "of their own",
            ),
            (
                "Free memory on device cuda:0 (1.2/79.1 GiB) on startup is less",
                False,
                ": use 0.01, or less",
            ),
            (
                "No available memory for the cache blocks.",
                False,
                "raise --vllm_gpu_memory_utilization, which is 0.9",
            ),
            (
                "(1.2 GiB KV cache is needed, which is larger",
                True,
                "raise --vllm_kv_cache_mib, or lower",
            ),
        ],
    )
    def test_memory_error_of_vllm_names_our_flags(
        self, words: str, has_cache_size: bool, remedy: str
    ) -> None:
        assert remedy in explain_memory_error(words, SETTINGS, has_cache_size=has_cache_size)

    def test_other_errors_of_vllm_are_no_memory_errors(self) -> None:
        assert (
            explain_memory_error("the model has no such layer", SETTINGS, has_cache_size=False)
            is None
        )


class Refusing:
    """An engine or a learner, as vLLM and DeepSpeed refuse what it is constructed with."""

    def __init__(self, *, stage: int) -> None:
        Config(stage=stage)


@dataclass
class Config:
    stage: Annotated[int, Field(lt=4)]

    @model_validator(mode="after")
    def check(self) -> Self:
        if self.stage < 0:
            raise ValueError("Of below 0\n there is none.")
        return self


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (
            4,
            (
                "Refusing.Config.stage: Input should be less than 4; change the flag that this is "
                "about"
            ),
        ),
        (-1, "Refusing.Config: Of below 0 there is none; change the flag that this is about"),
    ],
)
def test_refusal_by_pydantic_is_one_sentence(stage: int, words: str) -> None:
    with pytest.raises(InputError) as refused:
        ActorHost().construct(Refusing, {"stage": stage})
    assert str(refused.value) == words


class TestBatching:
    @pytest.mark.parametrize(
        ("flags", "on_cuda", "max_model_len", "expected"),
        [
            ({}, True, 8192, (256, None, True)),
            ({}, False, 512, (64, 4096, False)),
            ({}, False, 8192, (64, 8192, False)),
            (
                {"vllm_max_num_seqs": 1024, "vllm_max_num_batched_tokens": 32768},
                True,
                512,
                (1024, 32768, True),
            ),
            (
                {"vllm_max_num_seqs": 8, "vllm_max_num_batched_tokens": 512},
                False,
                512,
                (8, 512, False),
            ),
            ({"vllm_max_num_batched_tokens": 100}, True, 512, (100, 100, True)),
            ({"vllm_async_scheduling": "off"}, True, 512, (256, None, False)),
            ({"vllm_async_scheduling": "on"}, True, 512, (256, None, True)),
            ({"vllm_async_scheduling": "off"}, False, 512, (64, 4096, False)),
        ],
    )
    def test_flags_and_else_what_is_good_on_the_device(
        self,
        flags: dict[str, object],
        on_cuda: bool,
        max_model_len: int,
        expected: tuple[object, ...],
    ) -> None:
        batching = Batching.of(FleetSection(**flags), on_cuda=on_cuda, max_model_len=max_model_len)
        assert (
            batching.max_num_seqs,
            batching.max_num_batched_tokens,
            batching.schedules_ahead,
        ) == expected

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            ({"vllm_async_scheduling": "on"}, ("machine", "vllm_async_scheduling", "on")),
            (
                {"vllm_max_num_batched_tokens": 511},
                ("out_of_range", "vllm_max_num_batched_tokens", "511", "512"),
            ),
        ],
    )
    def test_engine_settings_of_cuda_are_refused_on_a_cpu(
        self, flags: dict[str, object], message: tuple[Any, ...]
    ) -> None:
        with refused(*message):
            Batching.of(FleetSection(**flags), on_cuda=False, max_model_len=512)


@pytest.mark.parametrize(
    ("runner", "on_cuda", "variable"),
    [
        ("auto", True, None),
        ("auto", False, None),
        ("v1", True, "0"),
        ("v1", False, "0"),
        ("v2", True, "1"),
    ],
)
def test_vllms_model_runner_is_chosen_before_vllm_is_imported(
    runner: str, on_cuda: bool, variable: str | None
) -> None:
    assert engine_environment(on_cuda, runner).get("VLLM_USE_V2_MODEL_RUNNER") == variable


def test_cpu_has_no_second_runner() -> None:
    with refused("machine", "vllm_runner", "v2", "v1"):
        engine_environment(False, "v2")


@pytest.mark.parametrize(
    ("on_cuda", "expected"),
    [
        (
            True,
            {
                "enable_chunked_prefill": None,
                "enable_return_routed_experts": True,
                "enforce_eager": False,
            },
        ),
        (
            False,
            {
                "enable_chunked_prefill": False,
                "enable_return_routed_experts": False,
                "enforce_eager": True,
            },
        ),
    ],
)
def test_options_of_an_engine_follow_its_device(on_cuda: bool, expected: dict[str, Any]) -> None:
    options = engine_options(
        replace(SETTINGS, fleet=FleetSection(routing_replay="on")), on_cuda=on_cuda
    )
    assert {name: options[name] for name in expected} == expected


class TestAdapter:
    @pytest.mark.parametrize(
        ("rank", "room"), [(1, 1), (2, 8), (16, 16), (17, 32), (300, 320), (512, 512)]
    )
    def test_engine_has_room_for_its_rank(self, rank: int, room: int) -> None:
        options = adapter_options(
            LoRASection(use_lora=True, lora_r=rank, lora_target_modules=["q_proj", "up_proj"])
        )
        assert options["max_lora_rank"] == room
        assert options["lora_target_modules"] == ["q_proj", "up_proj"]

    def test_targets_that_an_engine_has_not_are_refused(self) -> None:
        layers = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"]
        check_targets(LoRASection(lora_target_modules=["up_proj", "q_proj"]), layers)
        with refused("unsupported_model", "lora_sync", "k_proj", "gate_proj", "merged"):
            check_targets(
                LoRASection(lora_target_modules=["q_proj", "gate_proj", "k_proj"]), layers
            )


class TestProbe:
    @pytest.mark.parametrize(
        ("warm", "hot"),
        [
            # Twice the temperature halves differences.
            (WARM, {5: -1.3, 7: -2.4, 1: -3.72, 9: -4.0}),
            # All tokens are as likely: nothing to tell by.
            ({1: -6.20, 2: -6.25}, {1: -6.20, 2: -6.25}),
        ],
    )
    def test_log_probs_that_know_the_temperature(
        self, warm: dict[int, float], hot: dict[int, float]
    ) -> None:
        check_temperature(warm, hot)

    def test_log_probs_that_do_not_know_the_temperature_are_refused(self) -> None:
        with pytest.raises(
            RunError, match=r"not those that it samples from.*3 tokens.*--vllm_runner v1"
        ):
            check_temperature(WARM, dict(WARM))


def test_engine_rounds_the_model_only_where_vllm_has_the_plugin_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    in_4_bits = replace(
        SETTINGS, adapter=LoRASection(use_lora=True, use_qlora=True), dtype_of_scales="float32"
    )
    assert load_options(replace(in_4_bits, adapter=LoRASection(use_lora=True))) == load_options(
        SETTINGS
    )
    monkeypatch.setenv("VLLM_PLUGINS", "another,open_instruct_nf4")
    assert "float32" in load_options(in_4_bits)["model_loader_extra_config"].values()
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    with refused("missing_package", "lora_sync", "open_instruct_nf4", "VLLM_PLUGINS", "merged"):
        load_options(in_4_bits)
    monkeypatch.delenv("VLLM_PLUGINS")
    monkeypatch.setattr(nf4_loader, "entry_points", lambda **_: ())
    with refused("missing_package", "lora_sync", "open_instruct_nf4"):
        load_options(in_4_bits)
