"""For how long a checkpoint holds the training up: written while it waits, against written by a
thread meanwhile.

    python benchmarks/async_checkpoints.py [--size base] [--num_ranks 2] [--num_saves 4] [--interval
    4]

DPO with a checkpoint after every few steps, float32 with AdamW, both ways in turn on the same rows.
What is compared is `time/checkpoint` of metrics.jsonl, the seconds in which no step could be taken.
The first save of a run, which plans who writes what and touches the memory of the copies for the
first time, is shown apart from the median of the others. The last save is waited for either way and
is in neither. Ends with code 1 if a thread's is more than a tenth.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from harness import REPOSITORY
from harness.processes import read_metrics, torchrun
from harness.program import parser_of

from open_instruct.commands.tiny_model import SIZES, write_tiny_model
from scripts.demo_data.pairs import write_synthetic_preferences

PROGRAM = REPOSITORY / "open_instruct" / "dpo.py"
MOST = 0.1


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SIZES, default="base")
    parser.add_argument("--num_ranks", type=int, default=2)
    parser.add_argument("--num_saves", type=int, default=4, help="of each run that are timed")
    parser.add_argument(
        "--interval",
        type=int,
        default=4,
        help="steps between them; a thread is done within so many",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="async_checkpoints_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size)
        rows = folder / "rows.jsonl"
        write_synthetic_preferences(rows, num_rows=16, seed=0)
        held_up_s = {}
        num_steps = args.interval * (args.num_saves + 1)
        for mode in ("off", "on"):
            flags: list[object] = [
                *(
                    "--model_name_or_path",
                    model,
                    "--mixer_list",
                    rows,
                    "1.0",
                    "--output_dir",
                    folder / mode,
                ),
                *(
                    "--cache_dir",
                    folder / "cache",
                    "--max_seq_length",
                    64,
                    "--checkpointing_steps",
                    args.interval,
                ),
                *(
                    "--keep_last_n_checkpoints",
                    1,
                    "--async_checkpoints",
                    mode,
                    "--max_train_steps",
                    num_steps,
                ),
                *("--gradient_accumulation_steps", 1, "--per_device_train_batch_size", 1),
            ]
            torchrun(sys.executable, args.num_ranks, PROGRAM, flags)
            # What a save took stands in the rows of the steps after it.
            of_rows = [
                row["time/checkpoint"] for row in read_metrics(folder / mode)[args.interval :]
            ]
            held_up_s[mode] = [
                sum(of_rows[at : at + args.interval])
                for at in range(0, len(of_rows), args.interval)
            ]
    waits, thread = (median(held_up_s[mode][1:]) for mode in ("off", "on"))
    print(
        f"the training waits   {waits:7.3f} s a checkpoint, the first {held_up_s['off'][0]:.3f} s"
    )
    print(
        f"a thread writes      {thread:7.3f} s a checkpoint, the first {held_up_s['on'][0]:.3f} s"
    )
    print(f"ratio                {thread / waits:7.3f} (at most {MOST})")
    return int(thread > MOST * waits)


if __name__ == "__main__":
    sys.exit(main())
