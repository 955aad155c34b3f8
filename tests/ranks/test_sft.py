"""Supervised tuning: its loss, that no cut of a batch changes it, and a run from the command line
to a model.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from open_instruct.run.alarms import LATER_SHARE
from tests.ranks import programs
from tests.ranks.launch import run_ranks as start
from tests.ranks.objective_rows import write_conversations
from tests.ranks.shallow import write_shallow_model
from tests.ranks.train_case import NUM_ROWS, OF_EVERY_RUN, STEPS_OF_AN_EPOCH, TrainCase, free_ports
from tests.waiting import HANGS_AFTER_S

pytestmark = pytest.mark.extended

RunRanks = Callable[..., list[Any]]
JOB = "tests.ranks.jobs.train_runs:run_each"


def read(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> TrainCase:
    folder = tmp_path_factory.mktemp("sft")
    write_conversations(folder / "rows.jsonl", num_rows=NUM_ROWS, seed=1)
    write_conversations(folder / "held_out.jsonl", num_rows=12, seed=2)
    model = write_shallow_model(folder / "model", family="olmo2")
    own = {"eval_mixer_list": [folder / "held_out.jsonl", "1.0"], "eval_steps": 2}
    own |= {"max_train_steps": STEPS_OF_AN_EPOCH}
    return TrainCase(model=model, rows=folder / "rows.jsonl", folder=folder, own_flags=own)


@pytest.fixture(scope="module")
def one_process(case: TrainCase) -> TrainCase:
    commands = [
        case.command("base"),
        case.command("one_row_at_a_time", batch=1),
        case.command("padded", packing=False),
        case.command("padded_accumulated", packing=False, batch=2),
        case.command(
            "whole_data",
            max_train_steps=1,
            per_device_train_batch_size=NUM_ROWS,
            learning_rate=1e-9,
        ),
    ]
    start(1, JOB, commands=commands, ports=free_ports(len(commands)), entry="sft")
    return case


def assert_same(case: TrainCase, *names: str) -> None:
    base = np.array(case.trajectory("base"))
    held_out = read(case.folder / "base" / "eval.jsonl")
    assert len(base) == STEPS_OF_AN_EPOCH and [row["step"] for row in held_out] == [0, 2, 3]
    for name in names:
        assert np.array(case.trajectory(name)) == pytest.approx(base, rel=1e-5), name
        for ours, theirs in zip(read(case.folder / name / "eval.jsonl"), held_out, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name


def test_cutting_does_not_matter(one_process: TrainCase) -> None:
    assert_same(one_process, "one_row_at_a_time", "padded", "padded_accumulated")


def test_two_ranks(one_process: TrainCase, run_ranks: RunRanks) -> None:
    commands = [
        one_process.command("fsdp_2", ranks=2),
        one_process.command("tensor_2", ranks=1, tensor_parallel_degree=2, batch=4),
    ]
    run_ranks(2, JOB, commands=commands, ports=free_ports(2), entry="sft")
    assert_same(one_process, "fsdp_2", "tensor_2")


def test_slow_rank_is_told_of_once(one_process: TrainCase, run_ranks: RunRanks) -> None:
    """Also one of a tensor group, whose ranks wait for each other within every layer; and one whose
    rows come late.
    """
    window, flags = 5, {"max_train_steps": 10, "eval_steps": 0}
    commands = [
        one_process.command("slow", ranks=2, **flags),
        one_process.command("slow_tensor", ranks=1, tensor_parallel_degree=2, batch=4, **flags),
    ]
    job = JOB.replace("run_each", "run_with_a_slow_rank")
    run_ranks(
        2,
        job,
        commands=commands,
        ports=free_ports(2),
        slow_rank=1,
        window=window,
        on_one_host=False,
    )
    for name in ("slow", "slow_tensor"):
        rows, log = (
            one_process.metrics(name),
            (one_process.folder / name / "run.log").read_text().splitlines(),
        )
        assert [row["step"] for row in rows if "slowest_learner" in row] == [window, 2 * window]
        assert (
            rows[window - 1]["slowest_learner"] == 1
            and rows[window - 1]["slowest_learner/times"] > 1.5
        )
        (told,) = [line for line in log if "takes" in line]
        assert f"after step {2 * window} learner-1 takes " in told
    row = one_process.metrics("slow")[window - 1]
    assert (
        row["slowest_loader"] == 1
        and row["loaders/share"] < 0.1
        and row["slowest_loader/share"] > LATER_SHARE
    )
    log = (one_process.folder / "slow" / "run.log").read_text().splitlines()
    (late,) = [line for line in log if "waits for its own rows" in line]
    assert f"after step {2 * window} learner-1 waits " in late

    # Of one host's CPU ranks, none is slow by itself.
    shared = [one_process.command("shares_cores", ranks=2, max_train_steps=window, eval_steps=0)]
    run_ranks(
        2, job, commands=shared, ports=free_ports(1), slow_rank=1, window=window, on_one_host=True
    )
    row = one_process.metrics("shares_cores")[window - 1]
    assert "slowest_loader" in row and "slowest_learner" not in row


def sums_of_transformers(case: TrainCase, *, max_seq_length: int) -> list[tuple[int, float, int]]:
    """Of each row that is learned: its tokens, the sum of -log p over those of its replies, and how
    many these are.

    An implementation of nobody here: its own model, its own template, its own cross-entropy.
    """
    tokenizer = AutoTokenizer.from_pretrained(case.model)
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    sums = []
    for row in read(case.rows):
        ids, is_reply = [], []
        for turn in range(len(row["messages"])):
            if row["messages"][turn]["role"] != "assistant":
                continue
            before, after = (
                tokenizer.apply_chat_template(
                    row["messages"][:stop], tokenize=False, add_generation_prompt=stop == turn
                )
                for stop in (turn, turn + 1)
            )
            known = tokenizer.decode(ids)
            for text, learned in (
                (before.removeprefix(known), False),
                (after.removeprefix(before).rstrip(), True),
            ):
                piece = tokenizer(text, add_special_tokens=False)["input_ids"]
                ids += piece
                is_reply += [learned] * len(piece)
        ids, is_reply = ids[:max_seq_length], is_reply[:max_seq_length]
        if not any(is_reply):  # a prompt that fills the length is left out
            continue
        ids = ids[: max(place for place, learned in enumerate(is_reply) if learned) + 1]
        labels = [token if learned else -100 for token, learned in zip(ids, is_reply, strict=False)]
        with torch.no_grad():
            mean = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        sums.append((len(ids), float(mean) * sum(is_reply), sum(is_reply)))
    return sums


def test_loss_is_that_of_transformers_on_the_replies(one_process: TrainCase) -> None:
    sums = sums_of_transformers(one_process, max_seq_length=192)
    (first,) = one_process.metrics("whole_data")
    assert first["loss"] == pytest.approx(
        sum(loss for _, loss, _ in sums) / sum(n for *_, n in sums), rel=1e-5
    )


def test_batch_of_rows_that_conversations_fill(one_process: TrainCase, run_ranks: RunRanks) -> None:
    """Each step is the mean over the replies in its rows, on any number of ranks; an epoch has all
    conversations.
    """
    sums = sums_of_transformers(one_process, max_seq_length=512)
    filled: list[list[int]] = []
    for row in sorted(range(len(sums)), key=lambda row: -sums[row][0]):
        rooms = [512 - sum(sums[other][0] for other in others) for others in filled]
        room = min((room for room in rooms if room >= sums[row][0]), default=None)
        if room is None:
            filled.append([row])
        else:
            filled[rooms.index(room)].append(row)
    num_steps = -(-len(filled) // 2)
    assert num_steps > 1 and len(filled) < len(sums) / 2
    flags: dict[str, Any] = {
        "packing_strategy": "bfd",
        "max_train_steps": num_steps,
        "learning_rate": 1e-9,
    }
    flags |= {"eval_steps": 0, "per_device_train_batch_size": 1, "max_seq_length": 512}
    own = [one_process.command("filled", **flags, gradient_accumulation_steps=2)]
    start(1, JOB, commands=own, ports=free_ports(1), entry="sft")
    split = [one_process.command("filled_2", **flags, gradient_accumulation_steps=1)]
    run_ranks(2, JOB, commands=split, ports=free_ports(1), entry="sft")

    order = np.random.default_rng([42, 1]).permutation(len(filled)).tolist()
    num_tokens = 0
    for name in ("filled", "filled_2"):
        assert len(one_process.metrics(name)) == num_steps
    for step, start_of_step in enumerate(range(0, len(filled), 2)):
        rows = [row for one in order[start_of_step : start_of_step + 2] for row in filled[one]]
        loss = sum(sums[row][1] for row in rows) / sum(sums[row][2] for row in rows)
        num_tokens += sum(sums[row][0] for row in rows)
        for name in ("filled", "filled_2"):
            found = one_process.metrics(name)[step]
            assert (
                found["loss"] == pytest.approx(loss, rel=1e-5) and found["num_tokens"] == num_tokens
            )
    assert num_tokens == sum(length for length, *_ in sums)


def test_metrics_have_the_names_scripts_read(one_process: TrainCase) -> None:
    scores = {"eval/loss", "eval/num_label_tokens", "eval/num_conversations"}
    first, second, third = one_process.metrics("base")
    assert set(first) == OF_EVERY_RUN
    assert set(second) == set(third) == OF_EVERY_RUN | scores | {"time/evaluation"}
    _, *held_out = read(one_process.folder / "base" / "eval.jsonl")
    for row, scored in zip((second, third), held_out, strict=True):
        assert set(scored) == {"step"} | scores
        assert {name: row[name] for name in scored} == scored


def test_stopped_run_resumes_bitwise(one_process: TrainCase) -> None:
    """Stopped by what ends it: two of the three steps, with a schedule that does not know the
    length.

    Nor do held-out rows, scored after every step of the one and around the other, change what is
    learned.
    """
    flags: dict[str, Any] = {
        "lr_scheduler_type": "constant",
        "checkpointing_steps": 2,
        "eval_steps": 1,
    }
    filled = {"packing_strategy": "bfd", "gradient_accumulation_steps": 2, "batch": 1}
    commands = [
        one_process.command("undisturbed", **flags | {"eval_steps": 0}),
        one_process.command("resumed", **flags, max_train_steps=2),
        one_process.command("resumed", **flags),
        one_process.command("undisturbed_filled", **flags | {"eval_steps": 0} | filled),
        one_process.command("resumed_filled", **flags | filled, max_train_steps=2),
        one_process.command("resumed_filled", **flags | filled),
    ]
    start(1, JOB, commands=commands, ports=free_ports(len(commands)), entry="sft")
    for ended in ("", "_filled"):
        assert one_process.trajectory(f"resumed{ended}") == one_process.trajectory(
            f"undisturbed{ended}"
        )
        assert one_process.weights_digest(f"resumed{ended}") == one_process.weights_digest(
            f"undisturbed{ended}"
        )
    held_out = read(one_process.folder / "resumed" / "eval.jsonl")
    assert [row["step"] for row in held_out] == [0, 1, 2, 3]
    assert [held_out[0], held_out[3]] == read(one_process.folder / "undisturbed" / "eval.jsonl")


def test_from_the_command_line_to_a_model_that_transformers_loads(case: TrainCase) -> None:
    command = case.command(
        "cli", ranks=2, learning_rate=1e-2, max_train_steps=30, fsdp_shard_degree=2, eval_steps=0
    )
    torchrun = [*programs.TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_ports(1)[0])]
    process = programs.start([*torchrun, "open_instruct/sft.py", *command])
    said, _ = process.communicate(timeout=HANGS_AFTER_S)
    assert process.returncode == 0, said
    assert "\nmemory: at most " in said
    losses = [loss for loss, _ in case.trajectory("cli")]
    assert losses[-1] < 0.6 * losses[0]
    before, after = read(case.folder / "cli" / "eval.jsonl")
    assert before["eval/loss"] == pytest.approx(
        math.log(len(AutoTokenizer.from_pretrained(case.model))), rel=0.1
    )
    assert after["eval/loss"] < 0.8 * before["eval/loss"]
    model, report = AutoModelForCausalLM.from_pretrained(
        case.folder / "cli" / "hf_model", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


def test_rows_that_are_only_tokenised_are_found_by_the_run(case: TrainCase) -> None:
    command = case.command(
        "tokenised", eval_steps=0, max_train_steps=1, cache_dir=case.folder / "other_cache"
    )
    only = programs.start(["open_instruct/sft.py", *command, "--cache_dataset_only"])
    said, _ = only.communicate(timeout=HANGS_AFTER_S)
    assert only.returncode == 0 and said.count("kept in ") == 2, said
    assert not {"metrics.jsonl", "hf_model"} & {
        path.name for path in (case.folder / "tokenised").iterdir()
    }
    run = programs.start(["open_instruct/sft.py", *command])
    said, _ = run.communicate(timeout=HANGS_AFTER_S)
    assert run.returncode == 0 and said.count("read from ") == 2, said
