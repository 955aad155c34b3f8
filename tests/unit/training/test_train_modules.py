"""The public train modules: what they refuse, how they plan steps, and where their loaders stand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from olmo_core.config import DType
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.optim import AdamWConfig
from olmo_core.train.train_module import TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.config.sections import DataSection
from open_instruct.core.records import Document, RolloutSample, Span
from open_instruct.objectives.kto import KTOLossSection
from open_instruct.objectives.prm import StepSection
from open_instruct.objectives.reward_model import RewardLossSection
from open_instruct.olmo_core_train_modules import (
    DPOTrainModule,
    GRPOTrainModule,
    KTOTrainModule,
    PRMTrainModule,
    RewardModelTrainModule,
    RolloutDataLoader,
    SFTTrainModule,
    StepDataLoader,
    build_data_parallel_config,
)
from open_instruct.parallel.layout import resolve_layout
from open_instruct.training.olmo_core.objective_module import choose_parallelism
from open_instruct.training.olmo_core.offline_module import plan_shape
from open_instruct.training.rows.sample_loader import SampleLoader
from tests.olmo_core_checkpoints import make_config
from tests.refusals import refused
from tests.unit.conftest import JoinAs
from tests.unit.small_models import new_model
from tests.unit.training.test_training_pieces import make_pairs, shape_of

LENGTHS: dict[str, Any] = {"max_sequence_length": 16, "rank_microbatch_size": 32}
GRPO: dict[str, Any] = {"temperature": 1.0, "response_length": 8}


def build(kind: type[Any], **arguments: Any) -> Any:
    settings = {"model": new_model("llama"), "optim": AdamWConfig(lr=0.1), **LENGTHS}
    return kind(**(settings | {"device": torch.device("cpu")} | arguments))


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("autocast_precision", torch.bfloat16),
        ("eval_only", True),
        ("label_ignore_index", 0),
        ("z_loss_multiplier", 1e-5),
        ("ep_config", object()),
    ],
)
def test_argument_of_olmo_cores_module_is_refused_where_nothing_reads_it(
    argument: str, value: Any
) -> None:
    with refused("conflict", None, argument):
        build(SFTTrainModule, **{argument: value})


@pytest.mark.parametrize(
    ("kind", "section", "name"),
    [
        (DPOTrainModule, PreferenceLossSection(ref_policy_update_freq=2), "ref_policy_update_freq"),
        (DPOTrainModule, PreferenceLossSection(cache_logprobs_only=True), "cache_logprobs_only"),
        (KTOTrainModule, KTOLossSection(cache_logprobs_only=True), "cache_logprobs_only"),
        (GRPOTrainModule, PolicyLossSection(num_mini_batches=2), "num_mini_batches"),
        (GRPOTrainModule, PolicyLossSection(num_epochs=2), "num_epochs"),
        (GRPOTrainModule, PolicyLossSection(pack_length=64), "pack_length"),
        (GRPOTrainModule, PolicyLossSection(beta=0.1), "beta"),
    ],
)
def test_setting_of_a_loss_is_refused_where_the_trainer_has_no_place_for_it(
    kind: type[Any], section: Any, name: str
) -> None:
    with refused("conflict", None, name):
        build(kind, loss=section, **(GRPO if kind is GRPOTrainModule else {}))


def test_model_of_olmo_cores_own_is_refused_with_the_way_to_one_of_ours() -> None:
    stock = make_config("olmo2").build(init_device="meta")
    with refused("own_code", None, "StartModel.open"):
        build(SFTTrainModule, model=stock)


def test_model_with_another_head_is_refused() -> None:
    with refused("own_code", None, "score"):
        build(RewardModelTrainModule, loss=RewardLossSection())
    with refused("own_code", None, "classes"):
        build(PRMTrainModule, steps=StepSection(), tokenizer=None)


def test_batch_without_a_step_is_refused() -> None:
    with refused("own_code", None, "input_ids"):
        build(SFTTrainModule).train_batch({"input_ids": torch.zeros(1, 4)})


def test_module_of_olmo_cores_config_has_its_settings() -> None:
    config = TransformerTrainModuleConfig(
        optim=AdamWConfig(lr=0.25),
        max_grad_norm=3.0,
        state_dict_load_opts={"strict": False},
        **LENGTHS,
    )
    module = DPOTrainModule.from_config(
        config, new_model("llama"), loss=PreferenceLossSection(), device=torch.device("cpu")
    )
    assert module.optim is not None and module.optim.param_groups[0]["lr"] == 0.25
    assert module.max_grad_norm == 3.0 and module.rank_microbatch_size == 32
    assert module.state_dict_load_opts.strict is False


def test_layouts_config_is_that_of_the_one_public_builder() -> None:
    layout = resolve_layout([2, 2])
    chosen = choose_parallelism(layout, "float32", {})
    expected = build_data_parallel_config(layout, param_dtype="float32")
    assert chosen == {"dp_config": expected, "tp_config": None, "cp_config": None}
    assert expected is not None and (expected.num_replicas, expected.shard_degree) == (2, 2)
    assert expected.param_dtype == DType.float32


@pytest.mark.parametrize(
    "given",
    [
        {
            "layout": resolve_layout([1]),
            "dp_config": TransformerDataParallelConfig(name=DataParallelType.hsdp),
        },
        {"dp_config": TransformerDataParallelConfig(name=DataParallelType.ddp)},
        {"layout": resolve_layout([2], expert_parallel_degree=2)},
    ],
)
def test_degrees_that_contradict_are_refused(given: dict[str, Any]) -> None:
    with refused("conflict"):
        build(SFTTrainModule, **given)


def plan(**changes: Any) -> Any:
    settings: dict[str, Any] = {
        "documents_per_row": 2,
        "rank_microbatch_size": 16_384,
        "rows_per_step": 64,
        "num_ranks": 8,
        "pad_to_multiple_of": 1,
    }
    data = DataSection(mixer_list=["rows.jsonl", "1.0"], max_seq_length=2048)
    return plan_shape(data, **(settings | changes))


@pytest.mark.parametrize(
    ("changes", "rows", "microbatches"),
    [
        ({}, 4, 2),
        ({"documents_per_row": 1}, 8, 1),
        ({"rows_per_step": 16}, 2, 1),
        ({"rank_microbatch_size": 4096}, 1, 8),
        ({"num_ranks": 1}, 4, 16),
    ],
)
def test_microbatch_holds_as_many_rows_as_tokens_allow(
    changes: dict[str, int], rows: int, microbatches: int
) -> None:
    shape = plan(**changes)
    assert (shape.max_samples_per_microbatch, shape.max_microbatches) == (rows, microbatches)
    assert shape.max_tokens_per_microbatch <= changes.get("rank_microbatch_size", 16_384)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"rank_microbatch_size": 2048}, "4096"),
        ({"rows_per_step": 60}, "32"),
        ({"rows_per_step": 6}, "8"),
        ({"rows_per_step": 40}, "32"),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_what_would_do(
    changes: dict[str, int], remedy: str
) -> None:
    with refused("conflict"):
        plan(**changes)
    with pytest.raises(ValueError, match=rf"\b{remedy}\b"):
        plan(**changes)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"eval_mixer_list": ["a.jsonl", "1.0"]}, "eval_mixer_list"),
        ({"cache_dataset_only": True}, "cache_dataset_only"),
        ({"max_seq_length": 17}, "max_sequence_length"),
    ],
)
def test_rows_that_the_trainer_cannot_take_are_refused_before_they_are_read(
    fields: dict[str, Any], name: str
) -> None:
    usual: dict[str, Any] = {"mixer_list": ["absent.jsonl", "1.0"], "max_seq_length": 16}
    data = DataSection(**(usual | fields))
    tokenizer: Any = None
    with refused("conflict", None, name):
        build(SFTTrainModule).build_data_loader(data, tokenizer, rows_per_step=2, work_dir="out")


def sample(step: int) -> list[RolloutSample]:
    """Two completions of `step` tokens each."""
    ids = tuple(range(1, 4 + step))
    document = Document(token_ids=ids, responses=(Span(start=3, stop=len(ids)),))
    logprobs = (-1.0,) * step
    return [
        RolloutSample(document=document, engine_logprobs=logprobs, advantage=advantage)
        for advantage in (1.0, -1.0)
    ]


def test_rollout_loader_goes_on_from_its_state(tmp_path: Path) -> None:
    def make_loader() -> RolloutDataLoader:
        return RolloutDataLoader(
            sample, num_steps=4, max_tokens_per_microbatch=32, dp_group=None, work_dir=tmp_path
        )

    loader = make_loader()
    loader.reshuffle(1)
    counts = []
    for batch in loader:
        counts.append(batch["step"].counts["labels"])
        assert loader.global_num_tokens_in_batch(batch) == 2 * (3 + len(counts))
        if len(counts) == 2:
            state = loader.state_dict()
    assert counts == [2, 4, 6, 8]
    resumed = make_loader()
    resumed.load_state_dict(state)
    resumed.reshuffle(1)
    assert [batch["step"].counts["labels"] for batch in resumed] == [6, 8]


def make_step_loader(folder: Path, *, rows_per_step: int = 4) -> StepDataLoader:
    shape = shape_of(
        max_seq_length=64, max_samples_per_microbatch=2, max_microbatches=rows_per_step // 2
    )
    pairs = make_pairs(10)
    rows = [(row,) for row in range(10)]
    samples = SampleLoader(pairs, rows, shape=shape, seed=3, dp_group=None)
    return StepDataLoader(samples, work_dir=folder)


def take_epoch(loader: StepDataLoader, epoch: int) -> list[list[tuple[int, ...]]]:
    """The rows of each microbatch of each step, as the Trainer takes an epoch."""
    loader.reshuffle(epoch)
    steps = [[batch.row_ids for batch in each["step"].microbatches] for each in loader]
    loader.reset()
    return steps


def test_loader_of_rows_goes_on_where_the_trainer_stopped(join_as: JoinAs, tmp_path: Path) -> None:
    join_as(0, 1)
    loader = make_step_loader(tmp_path)
    assert loader.total_batches == 3
    epochs = [take_epoch(loader, 1), take_epoch(loader, 2)]
    assert epochs[0] != epochs[1]
    assert {row for step in epochs[1] for rows in step for row in rows} == set(range(10))

    stopped = make_step_loader(tmp_path)
    take_epoch(stopped, 1)
    stopped.reshuffle(2)
    next(iter(stopped))
    resumed = make_step_loader(tmp_path)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.batches_processed == 1
    assert take_epoch(resumed, 2) == epochs[1][1:]


def test_checkpoint_with_other_steps_is_refused(join_as: JoinAs, tmp_path: Path) -> None:
    join_as(0, 1)
    state = make_step_loader(tmp_path).state_dict()
    with refused("other_run", None, "rows_per_step", "4"):
        make_step_loader(tmp_path, rows_per_step=2).load_state_dict(state)


def test_loader_has_no_dry_run(tmp_path: Path) -> None:
    loader = RolloutDataLoader(
        sample, num_steps=1, max_tokens_per_microbatch=32, dp_group=None, work_dir=tmp_path
    )
    with pytest.raises(NotImplementedError):
        loader.get_mock_batch()
