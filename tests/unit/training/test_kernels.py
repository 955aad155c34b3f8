"""What is decided of kernels on devices that are only pretended."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import attention as torch_attention
from torch.nn.attention import _registry

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.models.build import build_model
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.parallel.layout import resolve_layout
from open_instruct.training.model import kernels
from open_instruct.training.model.kernels import FA3, compiler_problem, compiles, kernel_warnings
from open_instruct.training.parallelize import Parallelism, plan_frozen
from open_instruct.training.reference import build_replica
from tests.refusals import refused
from tests.unit.small_models import hf_config

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def works(device: torch.device) -> None:
    return None


def is_not_asked(device: torch.device) -> None:
    raise AssertionError("trying the compiler takes seconds")


def is_broken(device: torch.device) -> str:
    return "RuntimeError: no Triton"


class TestCompiling:
    @pytest.mark.parametrize(
        ("memory", "degrees", "device", "problem", "expected"),
        [
            ({}, {}, CUDA, works, True),
            ({}, {}, CPU, is_not_asked, False),
            ({"activation_memory_budget": 0.5}, {}, CPU, is_not_asked, False),
            ({"compile_model": True}, {}, CPU, works, True),
            ({"compile_model": False}, {}, CUDA, works, False),
            ({}, {}, CUDA, is_broken, False),
            ({}, {"tensor_parallel_degree": 2}, CUDA, works, False),
            ({}, {"context_parallel_degree": 2}, CUDA, works, False),
            ({}, {"fsdp_shard_degree": 2, "expert_parallel_degree": 2}, CUDA, works, False),
            ({"compile_model": True}, {"tensor_parallel_degree": 2}, CUDA, works, True),
            ({"activation_memory_budget": 0.5}, {"context_parallel_degree": 2}, CUDA, works, True),
            ({}, {"fsdp_num_replicas": 2}, CUDA, works, True),
        ],
    )
    def test_kernel_is_the_default_where_it_is_exact(
        self,
        memory: dict[str, Any],
        degrees: dict[str, int],
        device: torch.device,
        problem: Any,
        expected: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(kernels, "compiler_problem", problem)
        layout = resolve_layout([4], **degrees)
        assert compiles(MemorySection(**memory), layout=layout, device=device) is expected

    @pytest.mark.parametrize(
        ("memory", "device", "flag", "remedy"),
        [
            ({"compile_model": True}, CUDA, "--compile_model", "Triton"),
            ({"activation_memory_budget": 0.5}, CUDA, "--activation_memory_budget", "Triton"),
            ({"compile_model": True}, CPU, "--compile_model", "g++"),
        ],
    )
    def test_asked_for_and_impossible_is_refused(
        self,
        memory: dict[str, Any],
        device: torch.device,
        flag: str,
        remedy: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(kernels, "compiler_problem", is_broken)
        with refused("machine", None, flag, remedy):
            compiles(MemorySection(**memory), layout=resolve_layout([2]), device=device)

    def test_sum_is_compiled_to_find_out(self) -> None:
        def refuses(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            raise RuntimeError("no C compiler\nanywhere")

        try:
            for backend, expected in (("eager", None), (refuses, "no C compiler anywhere")):
                torch.compiler.set_default_backend(backend)
                torch.compiler.reset()
                compiler_problem.cache_clear()
                found = compiler_problem(CPU)
                assert found == expected or (
                    found is not None and expected is not None and expected in found
                )
        finally:
            torch.compiler.set_default_backend(None)
            torch.compiler.reset()
            compiler_problem.cache_clear()


def built_replica(
    words: list[str], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> tuple[SegmentTransformer, Parallelism]:
    """The model of a run on one device with these flags, on no device yet, and how it is made."""
    monkeypatch.setattr(SegmentTransformer, "init_weights", lambda *_, **__: None)
    monkeypatch.setattr(kernels, "compiler_problem", works)
    required = [
        "--model_name_or_path",
        "none",
        "--mixer_list",
        "none",
        "1.0",
        "--output_dir",
        "none",
    ]
    config = parse_run(DPOConfig, [*required, "--single_gpu_mode", *words])
    run: Any = SimpleNamespace(
        layout=resolve_layout([1], single_device=True), process=SimpleNamespace(device=device)
    )
    start: Any = SimpleNamespace(
        build=lambda init_device: build_model(hf_config("llama"), init_device=init_device)
    )
    parallelism = plan_frozen(run, config)
    model: Any = build_replica(
        start,
        parallelism,
        run=run,
        flags=config.model,
        max_seq_length=config.data.max_seq_length,
    )
    return model, parallelism


@pytest.mark.parametrize(("words", "is_compiled"), [([], True), (["--no_compile_model"], False)])
def test_one_gpu_computes_in_bfloat16_and_compiled_by_default(
    words: list[str], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, parallelism = built_replica(words, CUDA, monkeypatch)
    assert model.compile_enabled == parallelism.compiles == is_compiled
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert parallelism.sharding is None


@pytest.mark.parametrize(("words", "is_compiled"), [([], False), (["--compile_model"], True)])
def test_model_compiles_itself_on_a_cpu_where_it_is_asked_to(
    words: list[str], is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OLMo-core would not compile it, and say so in its log alone."""
    model, parallelism = built_replica(words, CPU, monkeypatch)
    assert model.compile_enabled == parallelism.compiles == is_compiled


@pytest.mark.parametrize(
    ("param_dtype", "device", "problem", "compile_model", "words"),
    [
        ("float32", CUDA, works, None, "8 to 10 times slower than --param_dtype bfloat16"),
        ("bfloat16", CUDA, works, None, None),
        ("float32", CPU, is_broken, None, None),
        ("bfloat16", CUDA, is_broken, None, "no Triton"),
        ("bfloat16", CUDA, is_broken, False, None),
    ],
)
def test_unused_speed_is_warned_of_once(
    param_dtype: str,
    device: torch.device,
    problem: Any,
    compile_model: bool | None,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "compiler_problem", problem)
    memory = MemorySection(compile_model=compile_model)
    warnings = list(kernel_warnings(memory, param_dtype=param_dtype, device=device))
    assert len(warnings) == (words is not None)
    assert words is None or words in warnings[0]


@pytest.mark.parametrize(
    ("family", "flags", "device", "has_fla", "words"),
    [
        (
            "olmo_hybrid",
            [],
            CUDA,
            False,
            "run in plain PyTorch, .* pip install flash-linear-attention",
        ),
        (
            "qwen3_5_text",
            [],
            CUDA,
            True,
            "attention's kernel, .* rows that share prompts in plain .* --prefix_sharing off",
        ),
        (
            "qwen3_5_text",
            ["--prefix_sharing", "off"],
            CUDA,
            True,
            "by flash-linear-attention's kernel, .* has run on a GPU$",
        ),
        ("olmo_hybrid", [], CPU, False, None),
        ("olmo3", [], CUDA, False, None),
    ],
)
def test_kernel_of_the_gated_delta_rule_is_named(
    family: str,
    flags: list[str],
    device: torch.device,
    has_fla: bool,
    words: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "compiler_problem", works)
    monkeypatch.setattr(kernels, "has_fla", lambda: has_fla)
    monkeypatch.setattr(kernels, "choose_attention", lambda *_, **__: None)
    warned: list[str] = []
    run: Any = SimpleNamespace(
        process=SimpleNamespace(device=device), console=SimpleNamespace(warn=warned.append)
    )
    given = [
        "--model_name_or_path",
        "m",
        "--mixer_list",
        "r.jsonl",
        "1.0",
        "--output_dir",
        "o",
        *flags,
    ]
    config = parse_run(DPOConfig, given)
    kernels.choose_kernels(
        build_model(hf_config(family)),
        run=run,
        memory=config.memory,
        param_dtype=config.model.param_dtype,
        shares_prompts=config.shares_prompts,
    )
    assert len(warned) == (words is not None)
    assert words is None or re.search(words, warned[0])


class TestFlashAttention3:
    @pytest.fixture
    def pretended(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
        """What happened to a pretended FlashAttention 3, which is installed beside a GPU of the
        Hopper generation.
        """
        happened: list[str] = []

        def register() -> Any:
            happened.append("registered")
            return SimpleNamespace(remove=lambda: happened.append("removed"))

        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, FA3, register)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        monkeypatch.setattr(kernels, "find_spec", lambda name: "a spec")
        monkeypatch.setattr(kernels, "try_attention", lambda device: torch.ones(4))
        yield happened
        if torch_attention.current_flash_attention_impl() is not None:
            torch_attention.restore_flash_attention_impl()

    @pytest.mark.parametrize(
        ("capability", "has_package", "param_dtype", "said"),
        [
            ((9, 0), True, "bfloat16", "attention by FlashAttention 3"),
            ((9, 0), False, "bfloat16", "OPEN_INSTRUCT_FA3=1"),
            ((9, 0), True, "float32", None),
            ((8, 0), True, "bfloat16", None),
            ((10, 0), True, "bfloat16", None),
        ],
    )
    def test_kernel_is_taken_on_supported_devices(
        self,
        capability: tuple[int, int],
        has_package: bool,
        param_dtype: str,
        said: str | None,
        pretended: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(kernels, "find_spec", lambda name: "a spec" if has_package else None)
        message = kernels.choose_attention(CUDA, param_dtype=param_dtype)
        assert message is None if said is None else message is not None and said in message
        is_taken = message is not None and has_package
        assert torch_attention.current_flash_attention_impl() == (FA3 if is_taken else None)
        assert pretended == ["registered"] * is_taken

    def test_pytorch_has_the_door(self, pretended: list[str]) -> None:
        assert FA3 in torch_attention.list_flash_attention_impls()
        assert kernels.choose_attention(CPU, param_dtype="bfloat16") is None and not pretended

    def test_kernel_is_left_out_when_pytorch_has_none(
        self, monkeypatch: pytest.MonkeyPatch, pretended: list[str]
    ) -> None:
        monkeypatch.setattr(torch_attention, "list_flash_attention_impls", list)
        assert kernels.choose_attention(CUDA, param_dtype="bfloat16") is None and not pretended

    @pytest.mark.parametrize("error", [RuntimeError, ImportError])
    def test_kernel_is_left_out_when_pytorch_refuses_it(
        self, error: type[Exception], monkeypatch: pytest.MonkeyPatch, pretended: list[str]
    ) -> None:
        def register() -> Any:
            raise error("no backward\nkernels")

        monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, FA3, register)
        said = kernels.choose_attention(CUDA, param_dtype="bfloat16")
        assert said is not None and said.endswith(
            f"left out: {error.__name__}: no backward kernels"
        )
        assert torch_attention.current_flash_attention_impl() is None

    @pytest.mark.parametrize(
        ("off", "is_kept"), [(1e-3, True), (0.1, False), (float("nan"), False), (None, False)]
    )
    def test_kernel_stays_when_a_trial_gives_the_same(
        self,
        off: float | None,
        is_kept: bool,
        monkeypatch: pytest.MonkeyPatch,
        pretended: list[str],
    ) -> None:
        """Without a number the trial fails, as with kernels that take other arguments."""

        def trial(device: torch.device) -> torch.Tensor:
            if torch_attention.current_flash_attention_impl() != FA3:
                return torch.ones(4)
            if off is None:
                raise TypeError("fwd takes others")
            return torch.ones(4) + off

        monkeypatch.setattr(kernels, "try_attention", trial)
        said = kernels.choose_attention(CUDA, param_dtype="bfloat16")
        assert said is not None and ("left out" in said) is not is_kept
        assert said.endswith("TypeError: fwd takes others") is (off is None)
        assert pretended == (["registered"] if is_kept else ["registered", "removed"])

    def test_trial_has_output_and_gradients(self) -> None:
        values = kernels.try_attention(CPU)
        assert values.shape == (256 * 64 * (4 + 4 + 2 + 2),) and values.isfinite().all()
