"""Real tokens a second of DPO against TRL's DPOTrainer: same model, rows, precision and global
batch.

Both run under torchrun on the same number of gloo ranks, float32, with reference log-probs computed
beforehand and not timed. Only real tokens count; steps of warm-up do not. The two take turns, so
that a busy machine slows both. TRL lives in an environment of its own, made on the first run.

    python benchmarks/dpo_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2] [--sharded]

Both have a whole copy of the model on each rank, which TRL always has; with --sharded ours has half
of it there, as it has by default.
"""

from harness.against_trl import arguments, compare
from harness.training import DPO

LAYOUTS = {
    "shared": ["--packing"],
    "packed": ["--packing", "--prefix_sharing", "off"],
    "padded": ["--no_packing"],
    "compiled": ["--packing", "--compile_model"],
}


if __name__ == "__main__":
    compare(arguments(__doc__, "preference pairs", layouts=LAYOUTS), DPO, LAYOUTS)
