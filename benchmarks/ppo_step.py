"""A learner's step of PPO beside GRPO's: what a critic of the policy's own size costs in time and
in memory.

    python benchmarks/ppo_step.py [--num_ranks 2] [--size mini]

The same completions, model and flags, in float32 on a CPU, but for `--advantages gae`; nothing is
generated or sent. The two take turns, each in processes of its own, and the first steps do not
count. The bound of the time is the arithmetic: a policy's forward and backward passes are 3 of a
forward pass, a critic's 4, with that of its values; it has no vocabulary, and so needs less. The
bound of the memory is twice GRPO's peak: two models with gradients and optimizers. The exit code is
1 where the ratio of times is above 7/3, or that of peaks above 2.
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.memory import MIB, memory_bytes
from harness.processes import leave_numbers, numbers_of_ranks
from harness.program import end, parser_of, print_ratio
from harness.rounds import in_turns, paired_median

from open_instruct.batching.rollouts import plan_steps_of_ranks
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.core.records import Document, RolloutSample, Span
from open_instruct.run.opening import join_run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.grpo import GRPOLearner

MOST_TIME, MOST_MEMORY = 7 / 3, 2.0
NUM_COMPLETIONS, PROMPT, RESPONSE = 16, 64, 192
FIRST_STEP = 2
WAYS = {"GRPO": "standard", "PPO": "gae"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--size", default="mini", help="of the random model (see open-instruct tiny-model --help)"
    )
    parser.add_argument("--num_ranks", type=int, default=1)
    parser.add_argument("--num_steps", type=int, default=6)
    parser.add_argument("--num_rounds", type=int, default=3)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        advantages, model, num_steps, folder = args.worker
        worker(advantages, Path(model), int(num_steps), Path(folder))
        return
    with tempfile.TemporaryDirectory(prefix="ppo_step_") as name:
        model = write_tiny_model(Path(name) / "model", family="olmo2", size=args.size)

        def measured(advantages: str) -> dict[str, float]:
            words = [advantages, model, args.num_steps]
            ranks = numbers_of_ranks(Path(__file__).resolve(), args.num_ranks, words)
            return {name: max(rank[name] for rank in ranks) for name in ranks[0]}

        ways = {
            name: lambda number, advantages=advantages: measured(advantages)
            for name, advantages in WAYS.items()
        }
        runs = in_turns(ways, num_rounds=args.num_rounds, say=say)
    ratios = {
        what: paired_median(*([run[what] for run in runs[name]] for name in ("PPO", "GRPO")))
        for what in UNITS
    }
    for what, ratio in ratios.items():
        print_ratio(f"PPO's {what} to GRPO's", ratio)
    most = {"seconds": MOST_TIME, "peak": MOST_MEMORY}
    end(
        [
            f"{what}: {ratio:.2f} is above {most[what]:.2f}"
            for what, ratio in ratios.items()
            if ratio > most[what]
        ]
    )


UNITS = {"seconds": (1e-3, "ms a step"), "peak": (MIB, "MiB at the peak")}


def say(number: int, name: str, run: dict[str, float]) -> None:
    told = ", ".join(f"{run[what] / unit:.0f} {words}" for what, (unit, words) in UNITS.items())
    print(f"round {number}, {name}: {told}", flush=True)


def worker(advantages: str, model: Path, num_steps: int, folder: Path) -> None:
    """One rank takes its steps, and leaves the median of their seconds and the most memory that
    they added.
    """
    num_ranks = int(os.environ["WORLD_SIZE"])
    words = (
        f"--model_name_or_path {model} --dataset_mixer_list none 1.0 --output_dir {folder / 'run'}"
    )
    words += (
        f" --advantages {advantages} --max_prompt_token_length {PROMPT} --response_length "
        f"{RESPONSE}"
    )
    words += (
        f" --pack_length {4 * (PROMPT + RESPONSE)} --param_dtype float32 --num_learners_per_node "
        f"{num_ranks}"
    )
    (folder / "run").mkdir(exist_ok=True)
    config: Any = parse_run(GRPOConfig, words.split())
    validate_grpo(config)
    run = join_run(config)
    pretrained = open_pretrained(config, run.directory.hf_model)
    (before,) = memory_bytes("VmRSS")
    learner = GRPOLearner(pretrained, run=run, config=config)
    seconds = []
    for step in range(num_steps):
        work = plan_steps_of_ranks(
            samples(step, pretrained.hf_config.vocab_size),
            num_ranks=num_ranks,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            num_mini_batches=config.loss.num_mini_batches,
            prefix_sharing="off",
        )[int(os.environ["RANK"])]
        began_s = time.perf_counter()
        learner.step(work)
        seconds.append(time.perf_counter() - began_s)
    (peak,) = memory_bytes("VmHWM")
    leave_numbers(
        folder, {"seconds": statistics.median(seconds[FIRST_STEP:]), "peak": float(peak - before)}
    )


def samples(step: int, vocab_size: int) -> list[RolloutSample]:
    chance = random.Random(step)
    return [
        RolloutSample(
            document=Document(
                token_ids=tuple(chance.randrange(4, vocab_size) for _ in range(PROMPT + RESPONSE)),
                responses=(Span(start=PROMPT, stop=PROMPT + RESPONSE),),
            ),
            engine_logprobs=(-8.0,) * RESPONSE,
            advantage=float(index % 2),
        )
        for index in range(NUM_COMPLETIONS)
    ]


if __name__ == "__main__":
    main()
