"""Train DPO: parse, build, cache the reference, fit, export.

    open-instruct dpo --num_processes 2 --model_name_or_path DIR --mixer_list rows.jsonl 1.0 \
        --output_dir OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.entry import leave
from open_instruct.objectives.dpo import DPO
from open_instruct.train import run_objective


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the flags in `argv` (default: the command line) and return the exit code."""
    return run_objective(DPO, argv)


if __name__ == "__main__":
    leave(main())
