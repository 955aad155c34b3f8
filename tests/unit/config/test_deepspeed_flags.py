"""The flags of the learner on DeepSpeed: what is refused and why, and what they make of its own
configuration.
"""

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from open_instruct import grpo_fast
from open_instruct.cluster.placement import FleetShape
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.wording import describe_layout
from open_instruct.rl import checked_run
from open_instruct.training.deepspeed.grpo_flags import GRPOFastConfig
from open_instruct.training.deepspeed.settings import effective_zpg, engine_settings, refuse_unfit
from open_instruct.training.model import kernels
from open_instruct.training.model.kernels import kernel_warnings
from open_instruct.training.optim.optimizers import build_optimizer_config
from tests.refusals import refused

REQUIRED = [
    "--model_name_or_path",
    "model",
    "--mixer_list",
    "rows.jsonl",
    "1.0",
    "--output_dir",
    "out",
]


def config_of(words: str, stage: int | None = 2) -> DPOConfig:
    flags = [] if stage is None else ["--backend", "deepspeed", "--deepspeed_stage", str(stage)]
    return parse_run(DPOConfig, [*REQUIRED, *flags, *words.split()])


def layout_of_flags(config: Any, gpus_per_node: list[int]) -> ShardLayout:
    return find_layout(config.parallel, gpus_per_node, config.backend)


def settings_of(words: str, stage: int = 2, *, on_cuda: bool = False) -> dict[str, Any]:
    config = config_of(words, stage)
    validate_dpo(config)
    return engine_settings(
        config.parallel,
        param_dtype=config.model.param_dtype,
        max_grad_norm=config.optim.max_grad_norm,
        on_cuda=on_cuda,
    )


@pytest.mark.parametrize("stage", range(4))
def test_every_stage_goes_with_float32_and_all_but_the_first_with_bfloat16(stage: int) -> None:
    assert settings_of("--param_dtype float32", stage)["zero_optimization"] == {
        "stage": stage,
        "zero_hpz_partition_size": 1,
    }
    if stage > 0:
        assert settings_of("", stage)["bf16"] == {"enabled": True}


@pytest.mark.parametrize("words", ["--zero_stage 2", "--backend olmo_core --deepspeed_zpg 8"])
def test_zero_flags_are_named_as_unread_under_fsdp2(words: str) -> None:
    (line,) = validate_dpo(config_of(words, stage=None))
    assert (
        "FSDP2 shards all that is trained" in line and "read only with --backend deepspeed" in line
    )


GRPO_REQUIRED = [
    "--model_name_or_path",
    "model",
    "--dataset_mixer_list",
    "prompts.jsonl",
    "1.0",
    "--output_dir",
    "out",
]


def test_both_entries_of_grpo_take_either_backend() -> None:
    """What differs is the default."""
    for config_class, default, other in (
        (GRPOConfig, "olmo_core", "deepspeed"),
        (GRPOFastConfig, "deepspeed", "olmo_core"),
    ):
        for given, backend in (([], default), (["--backend", other], other)):
            config = parse_run(config_class, [*GRPO_REQUIRED, "--param_dtype", "float32", *given])
            assert validate_grpo(config) == [] and config.parallel.backend == backend


def test_run_with_the_defaults_works_and_so_does_one_on_a_single_gpu() -> None:
    for given in (
        [],
        ["--single_gpu_mode", "--deepspeed_stage", "2"],
        ["--single_gpu_mode", "--deepspeed_stage", "3"],
    ):
        config = parse_run(GRPOFastConfig, [*GRPO_REQUIRED, *given])
        assert validate_grpo(config) == []
        assert config.model.param_dtype == "bfloat16" and config.parallel.deepspeed_stage == int(
            given[-1] if given else 2
        )
        layout = find_layout(config.parallel, config.parallel.num_learners_per_node, config.backend)
        # The engine has the same GPU, and the one learner is ZeRO's as any other: it has a mesh.
        assert (layout.world_size, layout.single_device) == (1, False)
        assert FleetShape.of(config.fleet, config.parallel).shares_device is bool(given)
    config = config_of("--backend deepspeed", stage=None)
    assert validate_dpo(config) == [] and config.parallel.deepspeed_stage == 2
    with refused("layout", "single_gpu_mode", "2"):
        layout_of_flags(config_of("--single_gpu_mode"), [2])


@pytest.mark.parametrize(
    ("words", "zpg"),
    [
        ("--num_learners_per_node 8 8", 8),
        ("--num_learners_per_node 4 4 4", 4),
        ("--num_learners_per_node 16 16", 8),
        ("--num_learners_per_node 2 4", 2),
        ("--num_learners_per_node 8", 1),  # a second copy would be no nearer
        ("--num_learners_per_node 8 8 --tensor_parallel_degree 2", 1),
        ("--num_learners_per_node 8 8 --deepspeed_stage 2", 1),
        ("--num_learners_per_node 8 8 --deepspeed_zpg 4", 4),
    ],
)
def test_neighbours_hold_a_second_copy_where_there_are_several_nodes(words: str, zpg: int) -> None:
    stage = [] if "stage" in words else ["--deepspeed_stage", "3"]
    config = parse_run(GRPOFastConfig, [*GRPO_REQUIRED, *stage, *words.split()])
    assert validate_grpo(config) == []
    assert effective_zpg(config.parallel) == zpg
    settings = engine_settings(
        config.parallel, param_dtype="bfloat16", max_grad_norm=1.0, on_cuda=False
    )
    assert settings["zero_optimization"]["zero_hpz_partition_size"] == zpg
    told = describe_layout(
        find_layout(config.parallel, config.parallel.num_learners_per_node, config.backend),
        config.parallel,
        config.backend,
        who="learner",
    )
    assert f"learners, DeepSpeed ZeRO-{config.parallel.deepspeed_stage}" in told
    assert (f"second copies of the weights shared by {zpg} neighbours" in told) is (zpg > 1)


def test_second_copies_below_stage_3_are_not_made_and_said_so() -> None:
    config = config_of("--deepspeed_zpg 8", stage=2)
    (line,) = validate_dpo(config)
    assert line.startswith("--deepspeed_zpg 8: read only with --deepspeed_stage 3")
    assert settings_of("--deepspeed_zpg 8")["zero_optimization"]["zero_hpz_partition_size"] == 1
    # Whatever would divide them.
    assert find_layout(config.parallel, [2], config.backend).world_size == 2


def test_refused_run_of_grpo_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither for its flags and layout, nor where there is no DeepSpeed that will do."""
    monkeypatch.setattr("open_instruct.grpo_olmo_core_actor.check_paths", lambda config: None)
    out = [*GRPO_REQUIRED[:-1], str(tmp_path / "out"), "--deepspeed_stage", "3"]
    assert (
        grpo_fast.main([*out, "--deepspeed_zpg", "4", "--num_learners_per_node", "2", "4"])
        == EXIT_INPUT
    )
    assert "--deepspeed_zpg 4 does not divide 6 learner GPUs" in capsys.readouterr().err
    # A test before this one may have imported it.
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    versions = {"deepspeed": "0.9.5"}
    with patch(
        "importlib.metadata.version",
        lambda name, version=metadata.version: versions.get(name) or version(name),
    ):
        assert grpo_fast.main([*out, "--param_dtype", "float32"]) == EXIT_INPUT
    assert "pip install 'open-instruct[deepspeed]'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_ranks_share_on_whichever_nodes_they_are() -> None:
    by_stage = {stage: layout_of_flags(config_of("", stage), [2, 4]) for stage in (0, 2)}
    assert (by_stage[0].num_replicas, by_stage[0].shard_degree) == (6, 1)
    assert (by_stage[2].num_replicas, by_stage[2].shard_degree) == (1, 6)
    assert by_stage[2].data_parallel_world_size == 6
    assert layout_of_flags(config_of("--deepspeed_zpg 2", 3), [4, 4]).shard_degree == 8
    matrices = layout_of_flags(config_of("--tensor_parallel_degree 2", 3), [4, 4])
    assert (
        matrices.tensor_parallel_degree,
        matrices.data_parallel_world_size,
        matrices.shard_degree,
    ) == (2, 4, 4)
    split = layout_of_flags(config_of("--sequence_parallel_size 2", 3), [4, 4])
    assert (split.context_parallel_degree, split.data_parallel_world_size, split.shard_degree) == (
        2,
        4,
        4,
    )
    with refused("layout", "context_parallel_degree", "3", "8"):
        layout_of_flags(config_of("--sequence_parallel_size 3", 3), [4, 4])
    with refused("layout", "deepspeed_zpg", "3", "8", "1"):
        layout_of_flags(config_of("--deepspeed_zpg 3", 3), [4, 4])


def test_deepspeed_configuration_scales_and_clips_exactly() -> None:
    settings = settings_of("--max_grad_norm 0.5 --param_dtype float32")
    assert (
        settings["gradient_accumulation_steps"] == settings["train_micro_batch_size_per_gpu"] == 1
    )
    assert settings["managed_gradient_accumulation"] is False
    assert settings["gradient_clipping"] == 0.5
    assert "bf16" not in settings and "communication_data_type" not in settings
    # There the learner clips: DeepSpeed would, and keep the norm to itself.
    assert settings_of("--max_grad_norm 0.5 --param_dtype float32", 0)["gradient_clipping"] == 0


def test_gradients_add_up_in_float32_where_bfloat16_is_computed_with() -> None:
    settings = settings_of("")
    assert settings["communication_data_type"] == "fp32"
    assert settings["data_types"] == {"grad_accum_dtype": "fp32"}


def test_offload_and_second_copies_reach_it() -> None:
    sharing = settings_of("--adam_offload --offload --deepspeed_zpg 4", 3, on_cuda=True)[
        "zero_optimization"
    ]
    in_host_memory = {"device": "cpu", "pin_memory": True}
    assert sharing == {
        "stage": 3,
        "zero_hpz_partition_size": 4,
        "offload_optimizer": in_host_memory,
        "offload_param": in_host_memory,
    }
    assert (
        settings_of("--adam_offload", 1)["zero_optimization"]["offload_optimizer"]["pin_memory"]
        is False
    )


@pytest.fixture
def with_version(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Pretends that this version of DeepSpeed is installed, or none."""
    real = metadata.version

    def pretend(version: str | None) -> None:
        def version_of(name: str) -> str:
            if name == "deepspeed" and version is None:
                raise metadata.PackageNotFoundError(name)
            return version if name == "deepspeed" and version is not None else real(name)

        monkeypatch.setattr("importlib.metadata.version", version_of)

    return pretend


# Compared as strings, 0.9.5 would be newer than 0.19.8 and 0.100.0 older.
@pytest.mark.parametrize("version", [None, "0.9.5", "0.18.8+cu128", "0.19.7", "0.20.0", "0.100.0"])
def test_deepspeed_of_another_version_is_refused(
    version: str | None, with_version: Callable[[str | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from open_instruct.training.deepspeed import library

    with_version(version)
    with pytest.raises(InputError) as caught:
        refuse_unfit()
    (said,) = str(caught.value).splitlines()
    installed = (
        "is not installed"
        if version is None
        else f"deepspeed {version} is installed, and <0.20,>=0.19.8 is"
    )
    assert (
        installed in said
        and "pip install 'open-instruct[deepspeed]'" in said
        and "make install puts it in" in said
    )
    # And nothing of it is imported then.
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(InputError):
        library._load()


def test_driver_asks_for_the_version_alone(with_version: Callable[[str | None], None]) -> None:
    """Its learners load the library."""
    with_version("0.19.7")
    words = [
        "--model_name_or_path",
        "m",
        "--dataset_mixer_list",
        "rows.jsonl",
        "1.0",
        "--output_dir",
        "out",
    ]
    with refused("missing_package", "backend", "0.19.7"):
        checked_run.open_rollout_run(
            parse_run(GRPOConfig, [*words, "--backend", "deepspeed"])
        ).__enter__()


@pytest.mark.parametrize("version", ["0.19.8", "0.19.10", "0.19.8+unknown"])
def test_versions_that_were_asked_for_will_do(
    version: str, with_version: Callable[[str | None], None]
) -> None:
    with_version(version)
    refuse_unfit()


CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
COMPILER_IS_MISSING = "RuntimeError: no nvcc"


class TestAdam:
    @pytest.fixture(autouse=True)
    def extensions(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """PyTorch's folder of extensions: no lock in the user's own is looked at."""
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        return tmp_path

    @pytest.mark.parametrize(
        ("device", "adam_offload", "adam", "name"),
        [
            (CPU, False, "AdamW", "AdamW"),
            (CPU, True, "AdamW", "AdamW"),
            (CUDA, False, "FusedAdam", "FusedAdam"),
            (CUDA, True, "CPUAdam", "DeepSpeedCPUAdam"),
        ],
    )
    def test_optimizer_is_built_for_the_device_of_its_states(
        self,
        device: torch.device,
        adam_offload: bool,
        adam: Any,
        name: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        from open_instruct.training.deepspeed import adam as deepspeed_adam

        monkeypatch.setattr(deepspeed_adam, "find_build_problem", lambda adam: None)
        assert deepspeed_adam.choose_adam_kind(device, adam_offload=adam_offload) == adam
        optim = config_of(
            "--weight_decay 0.1 --learning_rate 0.5 --adam_beta2 0.95 --adam_epsilon 1e-5"
        ).optim
        torchs = build_optimizer_config(optim, device=device, names=("norm.weight",))
        chosen = deepspeed_adam.choose_adam_config(torchs, adam, warn=pytest.fail)
        assert chosen.optimizer().__name__ == name
        for one in ("lr", "betas", "eps", "weight_decay", "group_overrides"):
            assert getattr(chosen, one) == getattr(torchs, one)

    def test_pytorchs_steps_where_its_kernel_cannot_be_compiled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from open_instruct.training.deepspeed import adam as deepspeed_adam

        monkeypatch.setattr(deepspeed_adam, "find_build_problem", lambda adam: COMPILER_IS_MISSING)
        torchs, said = (
            build_optimizer_config(config_of("").optim, device=CPU, names=()),
            list[str](),
        )
        chosen = deepspeed_adam.choose_adam_config(torchs, "FusedAdam", warn=said.append)
        assert chosen is torchs
        assert said == [
            "DeepSpeed's FusedAdam cannot be compiled here (RuntimeError: no nvcc); PyTorch's "
            "AdamW is used"
        ]

    def test_lock_that_a_killed_build_may_have_left_is_named(
        self, monkeypatch: pytest.MonkeyPatch, extensions: Path
    ) -> None:
        from open_instruct.training.deepspeed import adam as deepspeed_adam

        monkeypatch.setattr(deepspeed_adam, "find_build_problem", lambda adam: None)
        torchs = build_optimizer_config(config_of("").optim, device=CPU, names=())
        deepspeed_adam.choose_adam_config(torchs, "FusedAdam", warn=pytest.fail)
        lock = extensions / "fused_adam" / "lock"
        lock.touch()
        said: list[str] = []
        deepspeed_adam.choose_adam_config(torchs, "FusedAdam", warn=said.append)
        (sentence,) = said
        assert sentence.endswith(f"end the run and remove {lock}")

    def test_error_of_the_builder_is_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from open_instruct.training.deepspeed.adam import deepspeed, find_build_problem

        def load(builder: object) -> None:
            raise RuntimeError("no\n  nvcc")

        monkeypatch.setattr(deepspeed.ops.op_builder.FusedAdamBuilder, "load", load)
        assert find_build_problem("FusedAdam") == COMPILER_IS_MISSING
        monkeypatch.setattr(deepspeed.ops.op_builder.FusedAdamBuilder, "load", lambda builder: None)
        assert find_build_problem("FusedAdam") is None


def test_compiler_is_not_mentioned_when_nothing_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from open_instruct.training.deepspeed.zero import without_compilation

    def warnings(memory: MemorySection) -> list[str]:
        return list(kernel_warnings(memory, param_dtype="bfloat16", device=CUDA))

    monkeypatch.setattr(kernels, "compiler_problem", lambda device: COMPILER_IS_MISSING)
    memory = config_of("").memory
    assert ["compiler does not work" in warning for warning in warnings(memory)] == [True]
    assert warnings(without_compilation(memory)) == []
