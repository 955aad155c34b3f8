"""Train DPO: parse, build, cache the reference, fit, export.

    open-instruct dpo --num_processes 2 --model_name_or_path DIR --mixer_list rows.jsonl 1.0 \
        --output_dir OUT
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.process import exit_process
from open_instruct.objectives.dpo import DPO
from open_instruct.train import make_main

main = make_main(DPO)

if __name__ == "__main__":
    exit_process(main())
