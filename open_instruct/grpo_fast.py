"""Train GRPO with learners on DeepSpeed: `grpo_olmo_core_actor.py` with `--backend deepspeed`.

    python open_instruct/grpo_fast.py --model_name_or_path DIR \
        --dataset_mixer_list prompts.jsonl 1.0 --num_learners_per_node 2 --deepspeed_stage 3 \
        --output_dir OUT
"""

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.process import exit_process
from open_instruct.grpo_olmo_core_actor import PolicyTrainerOLMoCoreProcess, run_grpo
from open_instruct.training.deepspeed.grpo_flags import GRPOFastConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the flags in `argv` (default: the command line) and return the exit code."""
    return run_grpo(GRPOFastConfig, PolicyTrainerRayProcess, argv, program="grpo_fast.py")


class PolicyTrainerRayProcess(PolicyTrainerOLMoCoreProcess):
    """A learner of a run that `grpo_fast.py` started. An alias, as its flags name the backend."""


if __name__ == "__main__":
    # Ray knows a learner's class by its module's name, which must not be `__main__` there.
    from open_instruct.grpo_fast import main as main_of_package

    exit_process(main_of_package())
