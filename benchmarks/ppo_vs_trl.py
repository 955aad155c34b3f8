"""Memory of PPO with a critic beside TRL's PPOTrainer: same models, completions, rewards, updates
and precision.

    python benchmarks/ppo_vs_trl.py
    python benchmarks/ppo_vs_trl.py --size mini --whole

Both train a policy and a critic of its size from the same weights, and hold a frozen copy of the
policy as a reference. Float32 on a CPU, one thread; AdamW; each step 8 prompts of random tokens
with one completion of the full length each, all of them in one update, 2 a microbatch; no gradient
is clipped, nothing is recomputed. The reward is a rule without weights: the share of a completion's
tokens that have an even id.

TRL is 1.12.0, the last that has PPO: one process generates, by transformers, and learns. Of ours
the learner's process is measured, which is where PPO is. It is given the very completions and
rewards that TRL had, so the losses of both critics must be the same in every step, which is held.
What generates for it is another process, and not counted.

The peak is that of the whole process, from its start (VmHWM); it is compared as it is, and less
what the process had before its models were opened, libraries above all. The exit code is 1 where
one of these two ratios, ours to TRL's, is above 1, or where losses differ.

--whole: also a run of ours from end to end, of the same sizes: learner, engine, driver, judges and
Ray, beside TRL's process. The peak is that of the sum over processes, sampled, of memory that no
file backs, each page once; no goal.
"""

import argparse
import json
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from harness import BENCHMARKS, REPOSITORY
from harness.memory import MIB, PeakOfChildren, memory_bytes
from harness.processes import leave_numbers, numbers_of_ranks, run
from harness.program import end, parser_of, print_ratio
from harness.trl_environment import DEFAULT_VENV, beside, trl_python
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from open_instruct.batching.rollouts import plan_steps_of_ranks
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.core.records import Document, RolloutSample, Span
from open_instruct.run.opening import join_run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.grpo import GRPOLearner

TRL_WITH_PPO = "trl==1.12.0"
LEARNING_RATE = 1e-4
# So little that it does not matter whether the divergence is a part of the loss, as in ours, or of
# the reward.
BETA = 1e-6
MOST, MOST_DIFFERENCE = 1.0, 1e-3
NUM_NAMED = 5


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--size", default="small", help="of both models (see open-instruct tiny-model --help)"
    )
    parser.add_argument("--batch", type=int, default=2, help="completions a microbatch")
    parser.add_argument("--accumulation", type=int, default=4, help="microbatches a step")
    parser.add_argument("--prompt_length", type=int, default=32)
    parser.add_argument("--response_length", type=int, default=96)
    parser.add_argument("--num_steps", type=int, default=3)
    parser.add_argument("--whole", action="store_true", help="also all processes of a run")
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    parser.add_argument("--worker", nargs=2, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker)
        return
    with tempfile.TemporaryDirectory(prefix="ppo_vs_trl_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size)
        critic = write_critic(model, folder / "critic")
        theirs = say("TRL", run_trl(args, model, critic, folder / "trl"))
        task = {
            "flags": our_flags(args, model, critic),
            "prompt_length": args.prompt_length,
            "steps": theirs["steps"],
        }
        (folder / "task.json").write_text(json.dumps(task))
        ours = say("ours", numbers_of_ranks(Path(__file__).resolve(), 1, [folder / "task.json"])[0])
        if args.whole:
            compare_whole(run_whole(args, model, critic, folder), theirs["family"])
    end(compare(args, ours, theirs))


def write_critic(model: Path, folder: Path) -> Path:
    """The model as transformers' class with a score, whose head is drawn."""
    shutil.copytree(model, folder)
    weights, settings = folder / "model.safetensors", folder / "config.json"
    tensors = load_file(weights)
    width = tensors.pop("lm_head.weight").shape[1]
    tensors["score.weight"] = (
        torch.randn(1, width, generator=torch.Generator().manual_seed(0)) / width**0.5
    )
    save_file(tensors, weights, metadata={"format": "pt"})
    config = json.loads(settings.read_text())
    config |= {"architectures": ["Olmo2ForSequenceClassification"], "id2label": {"0": "score"}}
    settings.write_text(json.dumps(config))
    return folder


def our_flags(args: Namespace, model: Path, critic: Path) -> list[str]:
    """Those of a run of ours, but for its prompts and its folder."""
    words: list[object] = [
        *(
            "--model_name_or_path",
            model,
            "--critic_model_name_or_path",
            critic,
            "--advantages",
            "gae",
        ),
        *(
            "--max_prompt_token_length",
            args.prompt_length,
            "--response_length",
            args.response_length,
        ),
        *(
            "--pack_length",
            args.batch * (args.prompt_length + args.response_length),
            "--prefix_sharing",
            "off",
        ),
        *(
            "--param_dtype",
            "float32",
            "--num_learners_per_node",
            1,
            "--beta",
            BETA,
            "--rho_correction",
            "none",
        ),
        *(
            "--learning_rate",
            LEARNING_RATE,
            "--critic_learning_rate",
            LEARNING_RATE,
            "--max_grad_norm",
            0,
        ),
        *("--lr_scheduler_type", "constant", "--warmup_ratio", 0),
    ]
    return list(map(str, words))


def worker(task_file: Path, folder: Path) -> None:
    """The learner's process: it takes the steps of the task, and leaves its memory and its
    losses.
    """
    task = json.loads(task_file.read_text())
    (folder / "run").mkdir()
    words = ["--dataset_mixer_list", "none", "1.0", "--output_dir", str(folder / "run")]
    config: Any = parse_run(GRPOConfig, [*task["flags"], *words])
    validate_grpo(config)
    joined = join_run(config)
    (before,) = memory_bytes("VmRSS")
    learner = GRPOLearner(
        open_pretrained(config, joined.directory.hf_model), run=joined, config=config
    )
    steps = []
    for step in task["steps"]:
        (work,) = plan_steps_of_ranks(
            [
                sample_of(*each, task["prompt_length"])
                for each in zip(step["token_ids"], step["rewards"], strict=True)
            ],
            num_ranks=1,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            num_mini_batches=1,
        )
        row = learner.step(work)
        steps.append({"policy_loss": row["policy_loss"], "value_loss": row["critic/loss"]})
        steps[-1]["num_microbatches"] = len(work.minibatches[0].microbatches)
    (peak,) = memory_bytes("VmHWM")
    leave_numbers(folder, {"before": before, "peak": peak, "steps": steps})


def sample_of(token_ids: list[int], reward: float, prompt_length: int) -> RolloutSample:
    response = Span(start=prompt_length, stop=len(token_ids))
    return RolloutSample(
        document=Document(token_ids=tuple(token_ids), responses=(response,)),
        # Not read with --rho_correction none.
        engine_logprobs=(0.0,) * (response.stop - response.start),
        advantage=reward,
    )


def run_trl(args: Namespace, model: Path, critic: Path, out: Path) -> dict[str, Any]:
    """What TRL's process leaves, and its `family`: the peak of the sum over its processes."""
    out.mkdir()
    python = trl_python(args.trl_venv)
    packages = beside(python, "trl_ppo", [TRL_WITH_PPO])
    flags: list[object] = [
        *("--model", model, "--critic", critic, "--out", out, "--batch", args.batch),
        *(
            "--accumulation",
            args.accumulation,
            "--steps",
            args.num_steps,
            "--prompt_length",
            args.prompt_length,
        ),
        *(
            "--response_length",
            args.response_length,
            "--learning_rate",
            LEARNING_RATE,
            "--kl_coef",
            BETA,
        ),
    ]
    with watched() as family:
        run(
            [python, BENCHMARKS / "trl_programs" / "ppo.py", *flags],
            environment={"PYTHONPATH": str(packages)},
        )
    told: dict[str, Any] = json.loads((out / "trl.json").read_text())
    return told | {"family": family}


def say(name: str, run: dict[str, Any]) -> dict[str, Any]:
    print(
        (
            f"{name:5} {run['before'] / MIB:7,.0f} MiB before the models, "
            f"{run['peak'] / MIB:7,.0f} at the peak"
        ),
        flush=True,
    )
    for number, step in enumerate(run["steps"], start=1):
        print(
            f"      step {number}: loss of the critic {step['value_loss']:.6f}, of the policy "
            f"{step['policy_loss']:.6f}"
        )
    return run


def compare(args: Namespace, ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Print the ratios; returns what was missed."""
    missed = []
    for what, libraries in {"peak": 0, "peak without libraries": 1}.items():
        ratio = (ours["peak"] - libraries * ours["before"]) / (
            theirs["peak"] - libraries * theirs["before"]
        )
        print_ratio(f"{what}, ours to TRL's", ratio)
        if ratio > MOST:
            missed.append(f"{what}: {ratio:.2f} of TRL's is above {MOST}")
    for number, (own, other) in enumerate(
        zip(ours["steps"], theirs["steps"], strict=True), start=1
    ):
        if abs(own["value_loss"] / other["value_loss"] - 1) > MOST_DIFFERENCE:
            missed.append(
                f"step {number}: the critic's loss is {own['value_loss']}, and TRL's "
                f"{other['value_loss']}"
            )
        if own["num_microbatches"] != args.accumulation:
            missed.append(
                f"step {number}: {own['num_microbatches']} microbatches, and TRL's "
                f"{args.accumulation}"
            )
    return missed


def run_whole(args: Namespace, model: Path, critic: Path, folder: Path) -> PeakOfChildren:
    """A run of ours from end to end, with as many prompts of the same length, whose answers a rule
    judges.
    """
    per_step = args.batch * args.accumulation
    prompts = write_prompts(
        folder / "prompts.jsonl",
        model,
        num_rows=per_step * args.num_steps,
        length=args.prompt_length,
    )
    flags: list[object] = [
        *our_flags(args, model, critic),
        *(
            "--dataset_mixer_list",
            prompts,
            "1.0",
            "--output_dir",
            folder / "whole",
            "--cache_dir",
            folder / "cache",
        ),
        *(
            "--num_unique_prompts_rollout",
            per_step,
            "--num_samples_per_prompt_rollout",
            1,
            "--async_steps",
            0,
        ),
        *(
            "--total_episodes",
            per_step * args.num_steps,
            "--checkpointing_steps",
            args.num_steps + 1,
        ),
        *("--vllm_num_engines", 1, "--vllm_kv_cache_mib", 64, "--vllm_max_num_seqs", per_step),
    ]
    with watched() as family:
        run([sys.executable, REPOSITORY / "open_instruct" / "grpo_olmo_core_actor.py", *flags])
    return family


def write_prompts(path: Path, model: Path, *, num_rows: int, length: int) -> Path:
    """Questions that have `length` tokens each, with what the chat template adds."""
    template = partial(
        AutoTokenizer.from_pretrained(model).apply_chat_template, add_generation_prompt=True
    )
    rows = []
    for number in range(num_rows):
        content = f"{number}:"
        while len(template([{"role": "user", "content": content}], return_dict=False)) < length:
            content += " 7"
        rows.append(
            {
                "messages": [{"role": "user", "content": content}],
                "ground_truth": "7",
                "dataset": "gsm8k",
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@contextmanager
def watched() -> Iterator[PeakOfChildren]:
    """Memory of the processes that are started within."""
    family = PeakOfChildren()
    family.start()
    try:
        yield family
    finally:
        family.stop()


def compare_whole(ours: PeakOfChildren, theirs: PeakOfChildren) -> None:
    for name, family in {"a run of ours": ours, "TRL": theirs}.items():
        largest = sorted(family.parts, key=itemgetter(1), reverse=True)[:NUM_NAMED]
        named = ", ".join(f"{Path(part).name} {size / MIB:,.0f}" for part, size in largest)
        print(
            f"{name}: {family.most_bytes / MIB:,.0f} MiB of {len(family.parts)} processes: {named}"
        )
    print_ratio("sum over processes, ours to TRL's", ours.most_bytes / theirs.most_bytes)


if __name__ == "__main__":
    main()
