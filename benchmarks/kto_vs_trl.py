"""Real tokens a second of KTO against TRL's KTOTrainer: same model, rows, precision and global
batch.

Both run under torchrun on the same number of gloo ranks, float32, with reference log-probs computed
beforehand and not timed, and both score a mismatched reply of each row besides. Only real tokens
count, those of mismatched replies too; steps of warm-up do not. The two take turns, so that a busy
machine slows both. See `dpo_vs_trl.py` for TRL's environment.

    python benchmarks/kto_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2]
"""

import json
from pathlib import Path

from harness.against_trl import arguments, compare, write_pairs
from harness.training import BETA, Objective

KTO = Objective(
    ours="kto",
    theirs="kto",
    our_flags=("--loss_type", "kto", "--beta", BETA),
    their_flags=("--beta", BETA),
)
LAYOUTS = {
    "packed": ["--packing"],
    "padded": ["--no_packing"],
    "compiled": ["--packing", "--compile_model"],
}


def write_rows(path: Path) -> Path:
    """Of 512 made-up pairs the chosen and the rejected reply in turn."""
    rows = []
    for number, line in enumerate(write_pairs(path).read_text().splitlines()):
        *prompt, reply = json.loads(line)["rejected" if number % 2 else "chosen"]
        rows.append(json.dumps({"prompt": prompt, "completion": [reply], "label": number % 2 == 0}))
    path.write_text("\n".join(rows) + "\n")
    return path


if __name__ == "__main__":
    # As many documents in a forward pass as DPO's pairs have there, and the default of both suites.
    args = arguments(
        __doc__, 'rows of "prompt", "completion" and "label"', batch=8, layouts=LAYOUTS
    )
    compare(args, KTO, LAYOUTS, write_rows=write_rows)
