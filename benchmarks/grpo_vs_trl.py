"""Completions a second of GRPO, from end to end, against TRL's GRPOTrainer: same model, prompts,
reward and precision.

Float32 on a CPU, every process with one thread, meant for two cores. Ours: a learner (or several)
and one engine, which generates a step ahead of it (--async_steps 1). TRL: two gloo ranks, which
generate (transformers' `generate`, with its cache) and then train. All completions are learned
from. Steps before `--first_step` do not count, nor does our last one, beside which nothing is
generated. The two take turns, and the ratio is the median over the rounds. TRL lives in an
environment of its own, made on the first run.

    python benchmarks/grpo_vs_trl.py [--num_shots 4] [--num_steps 12] [--num_rounds 3]
    python benchmarks/grpo_vs_trl.py --num_shots 0 [--compile_model] [--warm_start 100 | --model DIR]

The task is sums of two numbers, behind so many that are worked out, as one would ask a base model.
The model is random: nearly all completions have the full length, so TRL pads nothing. With
--warm_start it has learned from examples before, some of which are worked out and most not:
completions end by themselves, and differ in length, after 100 steps with 7 tokens on average. Those
steps take longer than a round. The exit code is 1 if the ratio is below 1.5, without solved sums
before the question 1.3, and after a warm start 2.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from grpo_runs.runs import Speed, run_ours, run_trl
from grpo_runs.sums import NUM_EXAMPLES, SHOTS, put_shots_before, warmed_up
from harness.program import parser_of
from harness.rounds import in_turns, paired_ratios
from harness.trl_environment import DEFAULT_VENV, trl_python

from open_instruct.commands.tiny_model import write_tiny_model
from scripts.demo_data.sums import PROMPTS_FILE, SFT_FILE, write_arithmetic

GOAL, GOAL_WITHOUT_SHOTS, GOAL_AFTER_WARM_START = 1.5, 1.3, 2.0


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--model", type=Path, help="a folder; default: a random one of --size")
    parser.add_argument(
        "--warm_start", type=int, default=0, help="steps of supervised learning that come before"
    )
    parser.add_argument(
        "--size", default="mini", help="of the random model (see open-instruct tiny-model --help)"
    )
    parser.add_argument(
        "--num_shots",
        type=int,
        default=4,
        choices=range(len(SHOTS) + 1),
        help="solved sums before each",
    )
    parser.add_argument("--num_prompts", type=int, default=8, help="of a step")
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--response_length", type=int, default=32)
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--first_step", type=int, default=3, help="that counts")
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument(
        "--num_learners", type=int, default=1, help="of one thread each, beside the one engine"
    )
    parser.add_argument(
        "--num_threads", type=int, default=1, help="of our learners, and of our engine, each"
    )
    parser.add_argument("--compile_model", action="store_true", help="of our learners")
    parser.add_argument(
        "--inflight_updates",
        action="store_true",
        help="our engine takes weights in the midst of completions, and does not finish them first",
    )
    parser.add_argument(
        "--continuous_batching", action="store_true", help="TRL generates with transformers' engine"
    )
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()
    if not 2 <= args.first_step < args.num_steps:
        parser.error("--first_step must be at least 2, and below --num_steps")

    python = trl_python(args.trl_venv)
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl_") as name:
        folder = Path(name)
        model = args.model or write_tiny_model(folder / "model", family="olmo2", size=args.size)
        num_prompts = args.num_prompts * (args.num_steps + 2)
        write_arithmetic(
            folder, num_sft_rows=NUM_EXAMPLES, num_prompts=num_prompts, num_held_out=0, seed=0
        )
        if args.warm_start:
            began_s = time.monotonic()
            model = warmed_up(model, folder / SFT_FILE, folder / "sft", num_steps=args.warm_start)
            print(
                f"warm start: {args.warm_start} steps in {time.monotonic() - began_s:.0f} s",
                flush=True,
            )
        prompts = folder / PROMPTS_FILE
        put_shots_before(prompts, SHOTS[: args.num_shots])
        ways = {
            "ours": lambda number: run_ours(args, model, prompts, folder / f"ours{number}"),
            "TRL": lambda number: run_trl(args, python, model, prompts, folder / f"trl{number}"),
        }
        runs = in_turns(ways, num_rounds=args.num_rounds, say=say)

    print()
    rates = {
        name: [speed.completions_per_second for speed in speeds] for name, speeds in runs.items()
    }
    for name, of_rounds in rates.items():
        print(f"{name:5} {statistics.median(of_rounds):6.1f} completions/s (median)")
    ratios = paired_ratios(rates["ours"], rates["TRL"])
    ratio = statistics.median(ratios)
    goal = (
        GOAL_AFTER_WARM_START if args.warm_start else GOAL if args.num_shots else GOAL_WITHOUT_SHOTS
    )
    print(
        f"ratio: {ratio:.2f}x (goal {goal}x; rounds {', '.join(f'{each:.2f}x' for each in ratios)})"
    )
    return int(ratio < goal)


def say(number: int, name: str, speed: Speed) -> None:
    phases = ", ".join(
        f"{phase.removeprefix('time/')} {value:.2f} s" for phase, value in speed.phases_s.items()
    )
    print(
        f"round {number}: {name:4}  {speed.completions_per_second:6.1f} completions/s   "
        f"{speed.length:.1f} tokens each, reward {speed.reward:.3f}   {phases}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
