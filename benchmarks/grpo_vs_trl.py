"""Completions a second of GRPO, from end to end, against TRL's GRPOTrainer: same model, prompts, reward and precision.

Float32 on a CPU, every process with one thread, meant for two cores. Ours: a learner (or several) and one engine,
which generates a step ahead of it (--async_steps 1). TRL: two gloo ranks, which generate (transformers' `generate`,
with its cache) and then train. All completions are learned from. Steps before `--first_step` do not count, nor does our
last one, beside which nothing is generated. The two take turns, and the ratio is the median over the rounds. TRL lives
in an environment of its own, made on the first run.

    python benchmarks/grpo_vs_trl.py [--num_shots 4] [--num_steps 12] [--num_rounds 3]
    python benchmarks/grpo_vs_trl.py --num_shots 0 [--warm_start 100 | --model DIR]

The task is sums of two numbers, behind so many that are worked out, as one would ask a base model. The model is random:
nearly all completions have the full length, so TRL pads nothing. With --warm_start it has learned from examples before,
some of which are worked out and most not: completions end by themselves, and differ in length, after 100 steps with 7
tokens on average. Those steps take longer than a round. The exit code is 1 if the ratio is below 1.5, without solved
sums before the question 1.3, and after a warm start 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trl_environment import DEFAULT_VENV, run, torchrun, trl_python

from open_instruct.toys.arithmetic import PROMPTS_FILE, SFT_FILE, worked_out, write_arithmetic
from open_instruct.toys.tiny import write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[1]
GOAL, GOAL_WITHOUT_SHOTS, GOAL_AFTER_WARM_START = 1.5, 1.3, 2.0
LEARNING_RATE = 1e-4
NUM_EXAMPLES, EXAMPLES_A_STEP = 8000, 64
# Tokens of a prompt at most: the question, and each solved one before it.
LONGEST_QUESTION, LONGEST_SHOT = 32, 64
SHOTS = ((47, 38), (12, 93), (60, 25), (81, 19), (34, 52), (77, 66), (28, 15), (90, 31))
PHASES = ("time/generate", "time/train", "time/sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Means over the steps that count: of completions, their tokens, their rewards, and our own clock's phases."""

    completions_per_second: float
    length: float
    reward: float
    phases_s: dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; default: a random one of --size")
    parser.add_argument("--warm_start", type=int, default=0, help="steps of supervised learning that come before")
    parser.add_argument("--size", default="mini", help="of the random model (see open-instruct tiny-model --help)")
    parser.add_argument(
        "--num_shots", type=int, default=4, choices=range(len(SHOTS) + 1), help="solved sums before each"
    )
    parser.add_argument("--num_prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--response_length", type=int, default=32)
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--first_step", type=int, default=3, help="that counts")
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--num_learners", type=int, default=1, help="of one thread each, beside the one engine")
    parser.add_argument("--num_threads", type=int, default=1, help="of our learners, and of our engine, each")
    parser.add_argument("--continuous_batching", action="store_true", help="TRL generates with transformers' engine")
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()
    if not 2 <= args.first_step < args.num_steps:
        parser.error("--first_step must be at least 2, and below --num_steps")

    python = trl_python(args.trl_venv)
    rounds: list[tuple[Speed, Speed]] = []
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl_") as name:
        folder = Path(name)
        model = args.model or write_tiny_model(folder / "model", family="olmo2", size=args.size)
        num_prompts = args.num_prompts * (args.num_steps + 2)
        write_arithmetic(folder, num_sft_rows=NUM_EXAMPLES, num_prompts=num_prompts, num_held_out=0, seed=0)
        if args.warm_start:
            began_s = time.monotonic()
            model = warmed_up(model, folder / SFT_FILE, folder / "sft", num_steps=args.warm_start)
            print(f"warm start: {args.warm_start} steps in {time.monotonic() - began_s:.0f} s", flush=True)
        put_shots_before(folder / PROMPTS_FILE, SHOTS[: args.num_shots])
        for number in range(1, args.num_rounds + 1):
            ours = run_ours(args, model, folder / PROMPTS_FILE, folder / f"ours{number}")
            report(f"round {number}: ours", ours)
            trl = run_trl(args, python, model, folder / PROMPTS_FILE, folder / f"trl{number}")
            report(f"round {number}: TRL", trl)
            rounds.append((ours, trl))

    print()
    for name, index in (("ours", 0), ("TRL", 1)):
        speed = statistics.median(both[index].completions_per_second for both in rounds)
        print(f"{name:5} {speed:6.1f} completions/s (median)")
    ratios = [ours.completions_per_second / trl.completions_per_second for ours, trl in rounds]
    ratio = statistics.median(ratios)
    goal = GOAL_AFTER_WARM_START if args.warm_start else GOAL if args.num_shots else GOAL_WITHOUT_SHOTS
    print(f"ratio: {ratio:.2f}x (goal {goal}x; rounds {', '.join(f'{each:.2f}x' for each in ratios)})")
    return int(ratio < goal)


def warmed_up(model: Path, rows: Path, out: Path, *, num_steps: int) -> Path:
    """The model after so many steps of sft.py, as configs/sft/tiny_cpu.yaml takes them."""
    flags: list[object] = [
        *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", out),
        *("--cache_dir", out.parent / "cache", "--max_seq_length", LONGEST_SHOT, "--param_dtype", "float32"),
        *("--per_device_train_batch_size", EXAMPLES_A_STEP // 2, "--max_train_steps", num_steps),
        *("--learning_rate", 3e-3, "--lr_scheduler_type", "linear", "--adam_beta2", 0.95),
        *("--checkpointing_steps", num_steps + 1),
    ]
    torchrun(sys.executable, 2, REPOSITORY / "open_instruct" / "sft.py", flags)
    return out / "hf_model"


def put_shots_before(prompts: Path, shots: Sequence[tuple[int, int]]) -> None:
    """Rewrite the prompts with solved sums before each question."""
    rows = [json.loads(line) for line in prompts.read_text().splitlines()]
    solved = "".join(f"What is {a} + {b}?\n{worked_out(a, b)}\n\n" for a, b in shots)
    for row in rows:
        row["messages"][0]["content"] = solved + row["messages"][0]["content"]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report(name: str, speed: Speed) -> None:
    phases = ", ".join(f"{phase.removeprefix('time/')} {value:.2f} s" for phase, value in speed.phases_s.items())
    print(
        f"{name:14} {speed.completions_per_second:6.1f} completions/s   {speed.length:.1f} tokens each, "
        f"reward {speed.reward:.3f}   {phases}",
        flush=True,
    )


def run_ours(args: argparse.Namespace, model: Path, prompts: Path, out: Path) -> Speed:
    """One run of grpo_olmo_core_actor.py; the time of each step is what it writes itself."""
    per_step = args.num_prompts * args.group
    longest_prompt = LONGEST_QUESTION + LONGEST_SHOT * args.num_shots
    longest = longest_prompt + args.response_length
    flags: list[object] = [
        *("--model_name_or_path", model, "--dataset_mixer_list", prompts, "1.0", "--output_dir", out),
        *("--cache_dir", out.parent / "cache", "--max_prompt_token_length", longest_prompt),
        *("--response_length", args.response_length, "--num_unique_prompts_rollout", args.num_prompts),
        *("--num_samples_per_prompt_rollout", args.group, "--total_episodes", per_step * (args.num_steps + 1)),
        *("--no_filter_zero_std_samples", "--async_steps", 1, "--pack_length", per_step * longest),
        # As in TRL, a whole copy of the model on each.
        *(["--fsdp_num_replicas", args.num_learners, "--fsdp_shard_degree", 1] if args.num_learners > 1 else []),
        *("--num_learners_per_node", args.num_learners, "--vllm_num_engines", 1, "--vllm_max_num_seqs", per_step),
        *("--param_dtype", "float32", "--learning_rate", LEARNING_RATE, "--lr_scheduler_type", "constant"),
        *("--warmup_ratio", 0, "--checkpointing_steps", args.num_steps + 1),
    ]
    program = REPOSITORY / "open_instruct" / "grpo_olmo_core_actor.py"
    run([sys.executable, str(program), *map(str, flags)], num_threads=args.num_threads)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = rows[args.first_step - 1 : args.num_steps]  # one step more was taken
    return Speed(
        completions_per_second=per_step * len(timed) / sum(row["time/step"] for row in timed),
        length=statistics.mean(row["sequence_length/mean"] for row in timed),
        reward=statistics.mean(row["reward"] for row in timed),
        phases_s={phase: statistics.mean(row[phase] for row in timed) for phase in PHASES},
    )


def run_trl(args: argparse.Namespace, python: Path, model: Path, prompts: Path, out: Path) -> Speed:
    """One run of TRL; a step's time is that from the end of the one before to its own."""
    out.mkdir()
    flags: list[object] = [
        *("--model", model, "--prompts", prompts, "--out", out, "--ranks", 2),
        *("--num_prompts", args.num_prompts, "--group", args.group, "--response_length", args.response_length),
        *("--steps", args.num_steps, "--learning_rate", LEARNING_RATE),
        *(["--continuous_batching"] if args.continuous_batching else []),
    ]
    torchrun(python, 2, REPOSITORY / "benchmarks" / "trl_grpo.py", flags)
    steps = json.loads((out / "steps.json").read_text())
    first = args.first_step - 1
    num_timed = args.num_steps - first
    time_s = steps["ended_s"][-1] - steps["ended_s"][first - 1]
    return Speed(
        completions_per_second=args.num_prompts * args.group * num_timed / time_s,
        length=statistics.mean(steps["lengths"][first:]),
        reward=statistics.mean(steps["rewards"][first:]),
        phases_s={"step": time_s / num_timed},
    )


if __name__ == "__main__":
    sys.exit(main())
