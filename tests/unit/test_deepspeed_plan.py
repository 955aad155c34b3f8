"""Plans of the learner on DeepSpeed: what advice names, what is shown, and where host memory is counted."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from open_instruct.config.parser import parse
from open_instruct.learner.deepspeed import planned, planned_state
from open_instruct.learner.olmo_core.optimizers import BIASES, NOT_DECAYED
from open_instruct.planning.advice import advise
from open_instruct.planning.plan import Plan, plan_of
from open_instruct.planning.request import PLAN_CONFIGS, parse_request
from open_instruct.planning.shown.html_page import html_page
from open_instruct.planning.shown.json_record import as_record
from open_instruct.planning.shown.terminal import print_plan
from open_instruct.planning.start_check import check_plan
from open_instruct.toys.tiny import write_tiny_model

SEVEN_B = ["--model_name_or_path", "allenai/OLMo-2-1124-7B"]
SMALL_ROWS = ["--activation_checkpointing", "full", "--per_device_train_batch_size", "1"]


def planned_with(stage: int, *words: str, gpus: str = "8") -> Plan:
    of_zero = ["--backend", "deepspeed", "--deepspeed_stage", str(stage), "--gpus_per_node", *gpus.split()]
    return plan_of(parse_request(["dpo", *SEVEN_B, *SMALL_ROWS, *of_zero, *words]).setting)


def to_fit(plan: Plan) -> str:
    change = advise(plan).to_fit
    assert change is not None and change.plan.has_room and not plan.has_room
    return change.text


def test_each_stage_needs_less_than_the_one_before() -> None:
    needed = [planned_with(stage, "--param_dtype", "float32").peak.total_bytes for stage in range(4)]
    assert needed == sorted(needed, reverse=True)
    assert planned_with(3).peak.total_bytes < needed[3]


def test_advice_names_the_next_stage_that_fits() -> None:
    assert to_fit(planned_with(0, "--param_dtype", "float32")) == "--deepspeed_stage 1"
    assert to_fit(planned_with(1, "--gpu", "memory_gib=60")) == "--deepspeed_stage 2"
    assert to_fit(planned_with(2, "--gpu", "memory_gib=34")) == "--deepspeed_stage 3"


def test_advice_turns_to_host_memory_where_no_stage_fits() -> None:
    assert to_fit(planned_with(3, "--gpu", "memory_gib=22")) == "--adam_offload true"
    host = dict(planned_with(3, "--adam_offload").host.parts)
    own = planned_with(3).moments.shares.own  # type: ignore[attr-defined]
    # AdamW's, and gradients that add up and that it reads.
    assert host["parameters"] == 4 * own and host["gradients"] == 8 * own
    assert host["optimizer states"] == pytest.approx(8 * own, abs=64)
    assert dict(planned_with(3).host.parts).keys() == {"a copy to write checkpoints from"}


def test_all_stages_are_ranked_and_shown() -> None:
    plan = planned_with(2, gpus="8 8")
    advice = advise(plan)
    cells = {other.backend.cells(other.layout) for other in advice.ranked}
    assert cells == {("1", "1", "-"), ("2", "1", "-"), ("3", "1", "-"), ("3", "8", "-")}  # 0 is refused in bfloat16
    file = io.StringIO()
    print_plan(plan, advice, Console(file=file, width=80))
    said = file.getvalue()
    assert "DeepSpeed ZeRO-2: all ranks share optimizer states and gradients" in said
    assert "fsdp" not in said and "◀ this" in said
    assert "ZeRO-2" in html_page(plan, advice)
    assert [row["sharing"] for row in as_record(plan, advice)["layouts"]].count("2 1 -") == 1


def test_a_faster_stage_is_named_where_it_fits() -> None:
    """Stage 2 reduces whole gradients after every microbatch, stage 1 once."""
    slow = ["--cross_node_gb_s", "1", "--gradient_accumulation_steps", "8"]
    faster = advise(planned_with(2, *slow, gpus="8 8")).faster
    assert faster is not None and faster.text == "--deepspeed_stage 1"


def test_a_run_says_its_plan(tmp_path) -> None:  # type: ignore[no-untyped-def]
    model = write_tiny_model(tmp_path / "model", family="olmo2", size="tiny")
    words = ["--model_name_or_path", str(model), "--backend", "deepspeed", "--deepspeed_stage", "3", "--adam_offload"]
    words += ["--mixer_list", "rows.jsonl", "1.0", "--output_dir", "out"]
    config = parse(PLAN_CONFIGS["sft"], words)
    said = check_plan(config, [2], model_folder=str(model), memory_bytes=64 * 2**30, on_cuda=False)
    assert said.line.startswith("plan: needs ") and said.refusal is None
    config = parse(PLAN_CONFIGS["sft"], [*words, "--no_plan_check"])
    refused = check_plan(config, [2], model_folder=str(model), memory_bytes=2**20, on_cuda=False)
    assert refused.refusal is not None and "the run cannot fit" in refused.refusal


def test_what_it_takes_from_deepspeed_and_from_torch_is_theirs() -> None:
    from open_instruct.learner.deepspeed.library import deepspeed

    theirs = deepspeed.runtime.zero.config.DeepSpeedZeroConfig()
    names = {name: name.removeprefix("stage3_") for name in planned.DEFAULTS}
    assert {name: getattr(theirs, field) for name, field in names.items()} == planned.DEFAULTS
    assert list(planned_state.NOT_DECAYED) == [*NOT_DECAYED, BIASES]


def test_a_plan_loads_neither_torch_nor_deepspeed() -> None:
    words = ["plan", "dpo", *SEVEN_B, "--gpus_per_node", "8", "--backend", "deepspeed", "--deepspeed_stage", "3"]
    program = (
        f"import sys; from open_instruct.cli import main; assert main({words}) == 0; "
        "assert not {'torch', 'deepspeed'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)
