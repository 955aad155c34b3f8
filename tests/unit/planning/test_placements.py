"""Where learners and engines can stand: memory and seconds of each phase, and which is the fastest."""

import json
from dataclasses import replace
from typing import Any

import pytest

from open_instruct.commands.plan import main, parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.planning.engine_time import (
    BANDWIDTH_SHARE,
    EXCHANGE_S,
    STEP_OVERHEAD_S,
    EngineWork,
)
from open_instruct.planning.placement_choice import PlacementChoice, list_placements
from open_instruct.planning.placements import HOST_GB_S, Placement, find_placement
from open_instruct.planning.setting import Setting
from open_instruct.planning.start_check import check_plan
from open_instruct.planning.subject.devices import find_device
from open_instruct.planning.subject.read_shape import model_shape
from open_instruct.report.run_forms import parse_plan

SEVEN, THIRTY_TWO = "allenai/Olmo-3-1025-7B", "allenai/Olmo-3-1125-32B"
REQUIRED = ("--dataset_mixer_list", "rows.jsonl", "1.0", "--output_dir", "out")
ROLLOUTS = (
    "--num_unique_prompts_rollout 64 --num_samples_per_prompt_rollout 8 --response_length 4096 "
    "--max_prompt_token_length 1024"
)


def words_of(model: str, more: str) -> list[str]:
    return f"grpo --model_name_or_path {model} {ROLLOUTS} {more}".split()


def choice_of(model: str, more: str) -> PlacementChoice:
    choice = parse_request(words_of(model, more)).choice
    assert choice is not None
    return choice


def work_of(model: str, **changes: Any) -> EngineWork:
    work = EngineWork(
        shape=model_shape(model),
        device=find_device("h100"),
        mfu=0.5,
        num_completions=64,
        num_prompts=8,
        prompt_tokens=1000,
        response_tokens=2000,
        item_bytes=2,
        memory_share=0.9,
        max_num_seqs=256,
    )
    return replace(work, **changes)


def test_keys_and_values_are_those_of_each_window() -> None:
    # OLMo 3 7B: 32 layers of 32 heads of 128, three of four with a window of 4,096.
    work = work_of(SEVEN)
    per_position = 2 * 32 * 128 * 2
    assert work.count_key_bytes(1000) == 32 * 1000 * per_position
    assert work.count_key_bytes(8192) == (24 * 4096 + 8 * 8192) * per_position


def test_step_of_an_engine_reads_weights_and_keys_and_values() -> None:
    work = work_of(SEVEN, num_prompts=0)
    # An engine of its own for each: one sequence at once, and as many steps as tokens.
    read_bytes = work.weight_bytes + work.count_key_bytes(2000)
    read_s = read_bytes / (3350e9 * BANDWIDTH_SHARE)
    expected_s = 2000 * (read_s + STEP_OVERHEAD_S)
    assert work.count_seconds(64, 1, num_seqs=16) == pytest.approx(expected_s)
    exchange_s = 2 * 32 * EXCHANGE_S
    expected_s = 2000 * (read_s / 2 + STEP_OVERHEAD_S + exchange_s)
    assert work.count_seconds(64, 2, num_seqs=16) == pytest.approx(expected_s)
    # Two engines have 32 each, 16 at once, and wait for the longest: over twice as many steps.
    twice_s = 2 * 2000 * (read_s + STEP_OVERHEAD_S)
    assert 1.2 * twice_s < work.count_seconds(2, 1, num_seqs=16) < 2 * twice_s


def test_large_batch_is_bound_by_arithmetic_and_prompts_are_computed_once() -> None:
    work = work_of(SEVEN, num_completions=4096, max_num_seqs=4096)
    slow = replace(find_device("h100"), peak_tflops_bf16=1.0)
    work = replace(work, device=slow)
    num_values = sum(each.num_params for each in work.shape.parameters if len(each.shape) == 2)
    token_s = 2 * num_values / (1e12 * 0.5)
    # Arithmetic does not care how many sequences are left; what each step takes beside does.
    expected_s = 2000 * 4096 * token_s + 8 * 1000 * token_s
    seconds = work.count_seconds(1, 1, num_seqs=4096)
    assert expected_s < seconds < expected_s + 2 * 2000 * STEP_OVERHEAD_S


def test_measured_rate_replaces_the_formula() -> None:
    work = work_of(SEVEN, tokens_per_second=500.0)
    never_waits = work.count_seconds(64, 4, num_seqs=1)
    assert never_waits == pytest.approx(64 * 2000 / (500.0 * 256))
    # The rate is that of engines that never wait; those of a step wait for its longest.
    waits = work.count_seconds(2, 4, num_seqs=64)
    assert 1.2 < waits / (64 * 2000 / (500.0 * 8)) < 2


def test_prompts_of_later_steps_spare_a_turn_the_longest_completions() -> None:
    """The fewest are taken with which it is as short as with more, or those that are given."""
    words = words_of(SEVEN, "--gpus_per_node 8")
    for more in ("", "--rollout_tokens_per_second 2000"):
        choice = parse_request([*words, *more.split(), "--placement", "auto"]).choice
        assert choice is not None
        shared = next(each for each in choice.best if each.kind == "shared")
        assert shared.pauses_completions and 0 < shared.prompts_ahead <= 64
        assert shared.saved_wait_s > 0 and 0 < shared.older_fraction < 1
    fewer = next(each for each in list_placements(with_ahead(words, 4), (8,)) if is_shared(each))
    default = next(each for each in list_placements(with_ahead(words), (8,)) if is_shared(each))
    assert fewer.prompts_ahead == 4
    assert fewer.older_fraction < default.older_fraction
    assert fewer.step_s > default.step_s


def is_shared(placement: Placement) -> bool:
    return placement.kind == "shared" and placement.degree == 1


def with_ahead(words: list[str], *number: int) -> Setting:
    more = ["--prompts_ahead", *map(str, number)] if number else []
    return parse_request([*words, *more]).setting


def test_synchronous_turn_begins_nothing_of_the_next() -> None:
    setting = parse_request(words_of(SEVEN, "--gpus_per_node 8 --async_steps 0")).setting
    shared = next(each for each in list_placements(setting, (8,)) if is_shared(each))
    assert not shared.pauses_completions
    assert shared.prompts_ahead == shared.older_fraction == 0


def test_weights_that_do_not_fit_leave_no_cache() -> None:
    work = work_of(THIRTY_TWO)
    assert work.find_cache_bytes(1, beside_bytes=20 << 30) < 0
    assert work.count_seqs(1, -1) == 0
    assert work.find_cache_bytes(4) > work.find_cache_bytes(2) > 0


def test_active_parameters_of_experts_are_those_of_a_few() -> None:
    shape = model_shape("Qwen/Qwen3-30B-A3B")
    num_active = sum(map(shape.active_params, shape.parameters))
    assert 3.2e9 < num_active < 3.5e9  # "A3B": 3.3 billion, by its card


def test_phases_of_turns_come_one_after_another_and_split_ones_beside_each_other() -> None:
    request = parse_request(words_of(SEVEN, "--gpus_per_node 8"))
    found = {
        (each.kind, each.learners, each.degree): each
        for each in list_placements(request.setting, (8,))
    }
    shared, split = found["shared", (8,), 1], found["split", (2,), 1]
    mixed = found["mixed", (4,), 1]
    assert shared.step_s == pytest.approx(sum(shared.phase_s.values()))
    longer_s = max(split.phase_s["generate"], split.phase_s["learn"])
    assert split.step_s == pytest.approx(longer_s + split.phase_s["sync"])
    # Half of the engines rest while learners work, so half of that time is lost to generation.
    busy_s = sum(mixed.phase_s.values()) - mixed.phase_s["generate"]
    assert mixed.step_s == pytest.approx(mixed.phase_s["generate"] + busy_s / 2)
    assert {each.num_gpus for each in found.values()} == {8}


def test_synchronous_steps_are_sums_in_every_placement() -> None:
    request = parse_request(words_of(SEVEN, "--gpus_per_node 8 --async_steps 0"))
    for placement in list_placements(request.setting, (8,)):
        assert placement.step_s == pytest.approx(sum(placement.phase_s.values()))


def test_state_that_moves_and_what_stays_are_all_that_a_learner_has() -> None:
    request = parse_request(words_of(SEVEN, "--gpus_per_node 8 --beta 0.1"))
    (shared,) = (
        each
        for each in list_placements(request.setting, (8,))
        if each.kind == "shared" and each.degree == 1
    )
    # Float32 weights, two moments and the weights of a reference, each an eighth.
    expected_bytes = 4 * 4 * 7.3e9 / 8
    assert shared.moved_bytes == pytest.approx(expected_bytes, rel=0.01)
    resident = shared.plan.memory.resident_parts(0)
    assert shared.moved_bytes + shared.resting_bytes == sum(resident.values())


def test_engines_of_several_nodes_stand_within_them_and_beside_no_learner_alone() -> None:
    request = parse_request(words_of(THIRTY_TWO, "--gpus_per_node 2x8"))
    placements = list(list_placements(request.setting, (8, 8)))
    assert {each.learners for each in placements} >= {(8, 8), (8, 0), (4, 4)}
    for each in placements:
        free = [8 - number for number in each.learners]
        if each.kind == "split":
            assert all(number % each.degree == 0 for number in free)
        else:
            assert all(number % each.degree == 0 for number in each.learners)


@pytest.mark.parametrize(
    ("model", "nodes"), [(SEVEN, "--gpus_per_node 8"), (THIRTY_TWO, "--gpus_per_node 2x8")]
)
def test_auto_takes_the_fastest_that_fits_and_says_why(
    model: str, nodes: str, capsys: pytest.CaptureFixture[str]
) -> None:
    choice = choice_of(model, f"{nodes} --placement auto")
    assert choice.chosen.fits
    assert choice.chosen.step_s == min(each.step_s for each in choice.best if each.fits)
    assert main(words_of(model, f"{nodes} --placement auto")) == 0
    text = capsys.readouterr().out
    assert "placement learners engines generate" in text
    assert f"{choice.chosen.kind.capitalize()} is the fastest" in text
    assert choice.chosen.flags.split()[-1] in text


def test_slow_engines_make_sharing_the_faster() -> None:
    slow = choice_of(SEVEN, "--gpus_per_node 8 --placement auto --rollout_tokens_per_second 100")
    assert slow.chosen.takes_turns
    request = parse_request(words_of(SEVEN, "--gpus_per_node 8 --placement auto"))
    assert request.choice is not None
    split: Placement = next(each for each in request.choice.best if each.kind == "split")
    assert 0 < split.idle_share < 1


@pytest.mark.parametrize(("flags", "names"), [("", 3), ("--placement shared", 4)])
def test_run_on_gpus_leaves_the_seconds_that_were_planned(flags: str, names: int) -> None:
    config = parse_request(words_of(SEVEN, f"--gpus_per_node 8 {flags}")).setting.config
    found = check_plan(
        replace(config),
        [8],
        model_folder=SEVEN,
        memory_bytes=80 << 30,
        on_cuda=True,
    )
    metrics = ["generate", "train", "sync", "switch"][:names]
    assert list(found.memory["seconds"]) == metrics
    assert min(found.memory["seconds"].values()) > 0
    plan = parse_plan(json.dumps(found.memory).encode())
    assert plan.seconds == found.memory["seconds"]
    assert (plan.older_fraction is not None) == ("shared" in flags)
    on_cpu = check_plan(
        replace(config),
        [8],
        model_folder=SEVEN,
        memory_bytes=80 << 30,
        on_cuda=False,
    )
    assert "seconds" not in on_cpu.memory


def test_placement_asked_for_is_planned_though_another_is_faster() -> None:
    choice = choice_of(SEVEN, "--gpus_per_node 8 --placement split")
    assert choice.chosen.kind == "split"
    assert choice.runner_up is not None and choice.runner_up.kind == "shared"


def test_mixed_placement_sends_weights_through_the_host_and_is_run_by_its_flags() -> None:
    choice = choice_of(SEVEN, "--gpus_per_node 8 --placement mixed")
    mixed = choice.chosen
    assert mixed.kind == "mixed" and sum(mixed.learners) < 8
    config = mixed.plan.setting.config
    assert isinstance(config, GRPOConfig)
    assert config.fleet.placement == "mixed"
    assert config.fleet.vllm_num_engines * config.fleet.vllm_tensor_parallel_size == 8
    flags = mixed.flags.split()
    parsed = parse_run(GRPOConfig, [*words_of(SEVEN, "")[1:], *REQUIRED, *flags])
    assert parsed.fleet == config.fleet
    assert mixed.phase_s["sync"] == pytest.approx(mixed.work.weight_bytes / (HOST_GB_S * 1e9))
    assert find_placement(mixed.plan).step_s == pytest.approx(mixed.step_s)


def test_json_has_all_kinds_and_marks_the_one_that_is_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(words_of(SEVEN, "--gpus_per_node 8 --placement auto --json")) == 0
    record = json.loads(capsys.readouterr().out)
    assert {each["kind"] for each in record["placements"]} == {"split", "shared", "mixed"}
    (taken,) = (each for each in record["placements"] if each["is_chosen"])
    assert record["layout"]["gpus_per_node"] == [each for each in taken["learners"] if each]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("dpo --model_name_or_path {} --gpus_per_node 8 --placement auto", "--placement"),
        ("grpo --model_name_or_path {} --gpus_per_node 1 --placement split", "fewer sharding"),
    ],
)
def test_placement_that_cannot_be_is_refused(words: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        parse_request(words.format(SEVEN).split())
