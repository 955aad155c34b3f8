"""Real tokens a second of reward models against TRL's RewardTrainer: same model, rows, precision
and global batch.

Both run under torchrun on the same number of gloo ranks, float32. Only real tokens count; steps of
warm-up do not. The two take turns, so that a busy machine slows both. TRL lives in an environment
of its own, made on the first run.

    python benchmarks/reward_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2]
"""

from harness.against_trl import arguments, compare
from harness.training import Objective

CENTER = 0.01
REWARD = Objective(
    ours="reward_model",
    theirs="reward",
    our_flags=("--center_rewards_coefficient", CENTER),
    their_flags=("--center", CENTER),
)
LAYOUTS = {
    "shared": ["--prefix_sharing", "auto"],
    "packed": ["--prefix_sharing", "off"],
    "compiled": ["--prefix_sharing", "auto", "--compile_model"],
}


if __name__ == "__main__":
    compare(
        arguments(__doc__, "preference pairs", always_sharded=True, layouts=LAYOUTS),
        REWARD,
        LAYOUTS,
    )
