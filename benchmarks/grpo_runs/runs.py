"""One run of GRPO, of ours or of TRL, and how fast it was."""

import json
import statistics
import sys
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from harness import BENCHMARKS, REPOSITORY
from harness.processes import read_metrics, run, torchrun

from grpo_runs.sums import LONGEST_QUESTION, LONGEST_SHOT

LEARNING_RATE = 1e-4
PHASES = ("time/generate", "time/train", "time/sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Means over the steps that count: of completions, their tokens, their rewards, and our own
    clock's phases.
    """

    completions_per_second: float
    length: float
    reward: float
    phases_s: dict[str, float]


def run_ours(args: Namespace, model: Path, prompts: Path, out: Path) -> Speed:
    """One run of grpo_olmo_core_actor.py; the time of each step is what it writes itself."""
    per_step = args.num_prompts * args.group
    longest_prompt = LONGEST_QUESTION + LONGEST_SHOT * args.num_shots
    longest = longest_prompt + args.response_length
    flags: list[object] = [
        *(
            "--model_name_or_path",
            model,
            "--dataset_mixer_list",
            prompts,
            "1.0",
            "--output_dir",
            out,
        ),
        *("--cache_dir", out.parent / "cache", "--max_prompt_token_length", longest_prompt),
        *(
            "--response_length",
            args.response_length,
            "--num_unique_prompts_rollout",
            args.num_prompts,
        ),
        *(
            "--num_samples_per_prompt_rollout",
            args.group,
            "--total_episodes",
            per_step * (args.num_steps + 1),
        ),
        *("--no_filter_zero_std_samples", "--async_steps", 1, "--pack_length", per_step * longest),
        # Otherwise every completion is of one version of the weights, as TRL's are.
        "--inflight_updates" if args.inflight_updates else "--no_inflight_updates",
        # As in TRL, a whole copy of the model on each.
        *(
            ["--fsdp_num_replicas", args.num_learners, "--fsdp_shard_degree", 1]
            if args.num_learners > 1
            else []
        ),
        *(
            "--num_learners_per_node",
            args.num_learners,
            "--vllm_num_engines",
            1,
            "--vllm_max_num_seqs",
            per_step,
        ),
        *(
            "--param_dtype",
            "float32",
            "--learning_rate",
            LEARNING_RATE,
            "--lr_scheduler_type",
            "constant",
        ),
        *("--warmup_ratio", 0, "--checkpointing_steps", args.num_steps + 1),
        *(["--compile_model"] if args.compile_model else []),
    ]
    program = REPOSITORY / "open_instruct" / "grpo_olmo_core_actor.py"
    run([sys.executable, program, *flags], num_threads=args.num_threads)
    timed = read_metrics(out)[args.first_step - 1 : args.num_steps]  # one step more was taken
    return Speed(
        completions_per_second=per_step * len(timed) / sum(row["time/step"] for row in timed),
        length=statistics.mean(row["sequence_length/mean"] for row in timed),
        reward=statistics.mean(row["reward"] for row in timed),
        phases_s={phase: statistics.mean(row[phase] for row in timed) for phase in PHASES},
    )


def run_trl(args: Namespace, python: Path, model: Path, prompts: Path, out: Path) -> Speed:
    """One run of TRL; a step's time is that from the end of the one before to its own."""
    out.mkdir()
    flags: list[object] = [
        *("--model", model, "--prompts", prompts, "--out", out, "--ranks", 2),
        *(
            "--num_prompts",
            args.num_prompts,
            "--group",
            args.group,
            "--response_length",
            args.response_length,
        ),
        *("--steps", args.num_steps, "--learning_rate", LEARNING_RATE),
        *(["--continuous_batching"] if args.continuous_batching else []),
    ]
    torchrun(python, 2, BENCHMARKS / "trl_programs" / "grpo.py", flags)
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
