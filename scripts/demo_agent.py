"""GRPO of an agent, on a small scale: a program with OpenAI's client, which knows nothing of
training, asks a tiny model for products; the model learns to call the program's calculator.

The examples and the prompts are those of `make demo-tools`. There our environment answers the
calls; here the program does, `scripts/demo_data/product_agent.py`. Every step is the command that a
user would type, and is shown before it runs. Start it with `make demo-agent`.
"""

import os
import sys
import time
from functools import partial

from demo_shell import OUTPUT, REPOSITORY, ended, run, show_what_happened, step
from demo_tools import FOLDER, SFT, samples, start_warm, summary

GRPO = OUTPUT / "agent"
NUM_SFT_STEPS = 480  # fewer than there, as most of the time goes here
PROGRAM = "scripts/demo_data/product_agent.py"


def main() -> int:
    os.chdir(REPOSITORY)
    began_s = time.monotonic()

    start_warm(NUM_SFT_STEPS)

    step(4, f"GRPO of {PROGRAM}, which asks the policy by OpenAI's API")
    run("python", "open_instruct/grpo_olmo_core_actor.py", *grpo_flags())

    show_what_happened(
        GRPO, samples=samples, summary=partial(summary, run_folder=GRPO), began_s=began_s
    )
    return 0


def grpo_flags() -> list[str]:
    return f"""
        configs/grpo/tiny_cpu.yaml --model_name_or_path {SFT}/hf_model --dataset_mixer_list {FOLDER}/prompts.jsonl 1.0
        --dataset_mixer_eval_list {FOLDER}/held_out.jsonl 100 --environment agent:{PROGRAM}:solve
        --tool_call_form pythonic --max_turns 2 --response_length 64 --total_episodes 960
        --local_eval_every 0 --output_dir {GRPO} --overwrite_output_dir --cache_dir {OUTPUT}/cache
    """.split()


if __name__ == "__main__":
    sys.exit(ended(main))
