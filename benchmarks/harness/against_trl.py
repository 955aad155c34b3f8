"""Real tokens a second of an offline objective and of TRL's trainer: same model, rows, precision
and global batch.
"""

import statistics
import tempfile
from argparse import Namespace
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from harness.program import parser_of, print_ratio
from harness.rounds import in_turns
from harness.training import Objective, Speed, run_ours, run_trl
from harness.trl_environment import DEFAULT_VENV, trl_python
from open_instruct.commands.tiny_model import write_tiny_model
from scripts.demo_data.pairs import write_synthetic_preferences

TRL = "TRL"


def arguments(
    text: str | None,
    rows: str,
    *,
    batch: int = 4,
    always_sharded: bool = False,
    layouts: Collection[str] = (),
) -> Namespace:
    """The flags of a comparison; `layouts` are those of ours that --layouts chooses from."""
    parser = parser_of(text)
    parser.add_argument("--rows", type=Path, help=f"{rows} (.jsonl); default: 512 made-up ones")
    parser.add_argument(
        "--size", default="mini", help="of the tiny model (see open-instruct tiny-model --help)"
    )
    parser.add_argument("--vocab_size", type=int, help="of its tokenizer; default: the size's own")
    parser.add_argument("--ranks", type=int, default=2)
    if always_sharded:
        parser.set_defaults(sharded=True)
    else:
        parser.add_argument(
            "--sharded", action="store_true", help="ours: shards, not a whole copy on each rank"
        )
    parser.add_argument("--batch", type=int, default=batch, help="rows (or pairs) a microbatch")
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--max_length", type=int, default=512)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--num_warmup_steps", type=int, default=2)
    parser.add_argument("--num_rounds", type=int, default=2)
    if layouts:
        names = [*layouts]
        parser.add_argument(
            "--layouts", nargs="+", choices=names, default=names, help="of ours; default: all"
        )
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    return parser.parse_args()


def write_pairs(path: Path) -> Path:
    write_synthetic_preferences(path, num_rows=512, seed=0)
    return path


def compare(
    args: Namespace,
    objective: Objective,
    layouts: Mapping[str, Sequence[object]],
    *,
    write_rows: Callable[[Path], Path] = write_pairs,
) -> None:
    """Run our layouts, each with flags of its own, and TRL in turns, and print speeds and ratios.

    TRL's turn is after the first layout, whose ratio to it is the one that counts.
    """
    layouts = {name: layouts[name] for name in args.layouts}
    python = trl_python(args.trl_venv)
    with tempfile.TemporaryDirectory(prefix=f"{objective.ours}_vs_trl_") as name:
        folder = Path(name)
        model = write_tiny_model(
            folder / "model", family="olmo2", size=args.size, vocab_size=args.vocab_size
        )
        rows = args.rows or write_rows(folder / "rows.jsonl")

        def ours(layout: str, number: int) -> Speed:
            out = folder / f"{layout}{number}"
            return run_ours(args, model, rows, out, layouts[layout], objective=objective)

        def theirs(number: int) -> Speed:
            return run_trl(args, python, model, rows, folder / f"trl{number}", objective=objective)

        first, *others = layouts
        ways: dict[str, Callable[[int], Speed]] = {
            first: partial(ours, first),
            TRL: theirs,
            **{layout: partial(ours, layout) for layout in others},
        }
        report(in_turns(ways, num_rounds=args.num_rounds, say=say), ours=first)


def say(number: int, name: str, speed: Speed) -> None:
    print(f"round {number}: {name:6}  {speed.tokens_per_second:8,.0f} tokens/s", flush=True)


def report(runs: Mapping[str, list[Speed]], *, ours: str) -> None:
    """Speeds and ratios, and the first and last loss of each as a check that all train the same
    thing.
    """
    speed = {
        name: statistics.median(each.tokens_per_second for each in speeds)
        for name, speeds in runs.items()
    }
    print()
    for name, speeds in runs.items():
        losses = speeds[0].losses
        print(
            f"{name:6}  {speed[name]:8,.0f} tokens/s   {speed[name] / speed[TRL]:5.2f}x TRL   "
            f"loss {losses[0]:.4f} -> {statistics.mean(losses[-3:]):.4f} (mean of the last three)"
        )
    print_ratio(f"{ours} to TRL", speed[ours] / speed[TRL])
