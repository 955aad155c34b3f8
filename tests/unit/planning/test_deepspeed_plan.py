"""Plans of the learner on DeepSpeed: what advice names, what is shown, and where host memory is
counted.
"""

import io
import subprocess
from typing import Any

import pytest
from rich.console import Console

from open_instruct.commands.plan import parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.objectives.registry import load_objective
from open_instruct.planning.advice import Advice
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.presentation import plan_record, render_words, traffic_rows
from open_instruct.planning.start_check import check_plan
from open_instruct.report.plan_page import html_page, print_plan
from open_instruct.training.deepspeed.planned_memory import BUCKET, MOST_AT_ONCE, SMALL

SEVEN_B = ["--model_name_or_path", "allenai/OLMo-2-1124-7B"]
SMALL_ROWS = ["--activation_checkpointing", "full", "--per_device_train_batch_size", "1"]


def planned_with(stage: int, *words: str, gpus: str = "8") -> Plan:
    of_zero = [
        "--backend",
        "deepspeed",
        "--deepspeed_stage",
        str(stage),
        "--gpus_per_node",
        *gpus.split(),
    ]
    return make_plan(parse_request(["dpo", *SEVEN_B, *SMALL_ROWS, *of_zero, *words]).setting)


def to_fit(plan: Plan) -> str:
    change = Advice(plan).to_fit
    assert change is not None and change.plan.has_room and not plan.has_room
    return change.text


def test_each_stage_needs_less_than_the_one_before() -> None:
    needed = [
        planned_with(stage, "--param_dtype", "float32").peak.total_bytes for stage in range(4)
    ]
    assert needed == sorted(needed, reverse=True)
    assert planned_with(3).peak.total_bytes < needed[3]


def test_engine_on_the_learners_gpu_is_planned_for() -> None:
    words = ["grpo", "--model_name_or_path", "Qwen/Qwen3-0.6B", "--vllm_kv_cache_mib", "1024"]
    one, two = (
        make_plan(
            parse_request(
                [*words, "--backend", "deepspeed", "--num_learners_per_node", "1", *more]
            ).setting
        )
        for more in (["--single_gpu_mode", "--gpus_per_node", "1"], ["--gpus_per_node", "2"])
    )
    assert one.workload.sync_backend == "ipc" and two.workload.sync_backend == "nccl"
    engine = dict(one.peak.parts)["vLLM engine"]
    assert engine > 2 * one.setting.shape.num_params + 2**30
    # But for NCCL's buffers of the way to the other GPU.
    own, apart = (
        plan.peak.total_bytes - dict(plan.peak.parts)["CUDA and libraries"] for plan in (one, two)
    )
    assert own - engine == pytest.approx(apart, rel=1e-3)
    assert (
        "engine" not in render_words("headline", one)[0]
        and "1 engine of 1 GPU" in render_words("headline", two)[0]
    )


def test_frozen_model_is_sharded_under_stage_3_only() -> None:
    """Below it every rank has all of it in bfloat16, and a part of the adapters' 16 bytes and
    more.
    """
    in_stages = [
        dict(planned_with(stage, "--use_lora").peak.parts)["parameters"] for stage in (1, 2, 3)
    ]
    shape = planned_with(2, "--use_lora").setting.shape
    adapters = shape.num_trained
    assert (
        in_stages[0]
        == in_stages[1]
        == pytest.approx(2 * shape.num_params + adapters * (2 + 4 / 8), rel=1e-3)
    )
    # What is not larger than 100,000 values stays whole beside the shards.
    assert in_stages[2] == pytest.approx((2 * shape.num_params + adapters * 6) / 8, rel=0.05)


def test_adapters_are_named_where_no_stage_fits() -> None:
    change = Advice(
        planned_with(3, "--gpu", "memory_gib=10", "--adam_offload", gpus="3")
    ).with_adapters
    assert change is not None and change.plan.has_room and "--use_lora" in change.text


def test_ranks_that_split_matrices_share_with_those_that_have_the_same_part() -> None:
    whole, split = planned_with(2), planned_with(2, "--tensor_parallel_degree", "2")
    shape, held = split.setting.shape, dict(split.peak.parts)
    # Embeddings stay whole, and so do norms; AdamW's part of the rest is one of 4 x 2.
    embeddings = shape.vocab_size * shape.d_model
    own = (embeddings + (shape.num_params - embeddings) / 2) / 4
    assert held["optimizer states"] == pytest.approx(8 * own, rel=1e-3)
    assert held["parameters"] == pytest.approx((4 + 4 * 2) * own, rel=1e-3)
    # Between matrices every rank has all tokens, and within them a part of the features.
    of_block = [sum(each.memory.passes.profiles[0].backward_peak) for each in (whole, split)]
    assert 0.5 < of_block[1] / of_block[0] < 0.9
    assert (
        "2 neighbours split matrices, and all with the same part share"
        in split.setting.backend.sharing
    )
    sums = [
        each
        for each in split.exchanges
        if each.axis == "tensor" and each.collective == "all_reduce"
    ]
    assert {each.group_size for each in sums} == {
        2
    } and split.time.waiting_s > whole.time.waiting_s == 0
    assert {"activations of split matrices", "logits"} < {
        row[0].what for row in traffic_rows(split)
    }
    assert all(len(row[0].what) <= 36 for row in traffic_rows(split))


def test_advice_turns_to_split_matrices_last() -> None:
    """Where not even host memory is enough.

    Of eight ranks that split matrices none has anything to gather.
    """
    advised = to_fit(planned_with(3, "--adam_offload", "--offload", "--gpu", "memory_gib=10"))
    assert advised == "--tensor_parallel_degree 8"


def test_advice_names_the_next_stage_that_fits() -> None:
    assert to_fit(planned_with(0, "--param_dtype", "float32")) == "--deepspeed_stage 1"
    assert to_fit(planned_with(1, "--gpu", "memory_gib=60")) == "--deepspeed_stage 2"
    assert to_fit(planned_with(2, "--gpu", "memory_gib=34")) == "--deepspeed_stage 3"


def test_advice_turns_to_host_memory_where_no_stage_fits() -> None:
    assert to_fit(planned_with(3, "--gpu", "memory_gib=22")) == "--adam_offload true"
    host = dict(planned_with(3, "--adam_offload").host.parts)
    own = planned_with(3).memory.num_trained_values
    # AdamW's, and gradients that add up and that it reads.
    assert host["parameters"] == 4 * own and host["gradients"] == 8 * own
    assert host["optimizer states"] == pytest.approx(8 * own, abs=64)
    assert dict(planned_with(3).host.parts).keys() == {"a copy to write checkpoints from"}


def test_all_stages_are_ranked_and_shown() -> None:
    plan = planned_with(2, gpus="8 8")
    advice = Advice(plan)
    cells = {
        tuple(map(str, other.setting.backend.cells(other.layout).values()))
        for other in advice.ranked
    }
    # 0 is refused in bfloat16.
    assert cells == {("1", "1", "-"), ("2", "1", "-"), ("3", "1", "-"), ("3", "8", "-")}
    file = io.StringIO()
    print_plan(plan, advice, Console(file=file, width=80))
    said = file.getvalue()
    assert "DeepSpeed ZeRO-2: all ranks share optimizer states and gradients" in said
    assert "fsdp" not in said and "◀ this" in said
    assert "ZeRO-2" in html_page(plan, advice)
    assert [row["sharing"] for row in plan_record(plan, advice)["layouts"]].count("2 1 -") == 1


def test_faster_stage_is_named_where_it_fits() -> None:
    """Stage 2 reduces whole gradients after every microbatch, stage 1 once."""
    slow = ["--cross_node_gb_s", "1", "--gradient_accumulation_steps", "8"]
    faster = Advice(planned_with(2, *slow, gpus="8 8")).faster
    assert faster is not None and faster.text == "--deepspeed_stage 1"


def test_run_says_its_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = write_tiny_model(tmp_path / "model", family="olmo2", size="tiny")
    words = [
        "--model_name_or_path",
        str(model),
        "--backend",
        "deepspeed",
        "--deepspeed_stage",
        "3",
        "--adam_offload",
    ]
    words += ["--mixer_list", "rows.jsonl", "1.0", "--output_dir", "out"]
    config = parse_run(load_objective("sft").config_class, words)
    said = check_plan(config, [2], model_folder=str(model), memory_bytes=64 * 2**30, on_cuda=False)
    assert said.line.startswith("memory: at most ") and "cannot fit" not in said.warning
    config = parse_run(load_objective("sft").config_class, [*words, "--no_plan_check"])
    refused = check_plan(config, [2], model_folder=str(model), memory_bytes=2**20, on_cuda=False)
    assert "the run cannot fit" in refused.warning


def test_deepspeed_counts_devices_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at every bucket of gradients: a CPU is asked through a program."""
    from open_instruct.training.deepspeed.library import deepspeed

    accelerator = deepspeed.accelerator.cpu_accelerator.CPU_Accelerator()
    monkeypatch.delenv("LOCAL_SIZE", raising=False)
    num_devices = accelerator.device_count()

    def started(*_: Any, **__: Any) -> None:
        raise AssertionError("another program was started")

    monkeypatch.setattr(subprocess, "check_output", started)
    assert accelerator.device_count() == num_devices >= 1


def test_constants_of_the_plan_are_those_of_deepspeed() -> None:
    from open_instruct.training.deepspeed.library import deepspeed

    theirs = deepspeed.runtime.zero.config.DeepSpeedZeroConfig()
    assert (theirs.reduce_bucket_size, theirs.param_persistence_threshold) == (BUCKET, SMALL)
    assert theirs.max_live_parameters == theirs.sub_group_size == MOST_AT_ONCE
