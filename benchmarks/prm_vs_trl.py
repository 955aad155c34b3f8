"""Losses of a process reward model beside those of TRL's PRMTrainer: same model, rows and updates,
in float32.

    python benchmarks/prm_vs_trl.py
    python benchmarks/prm_vs_trl.py --record tests/unit/objectives/trl_prm_losses.json

A tiny Qwen 3 with a head of two classes learns steps of sums, all rows in every step, so that their
order does not matter; AdamW, a constant learning rate, no clipping. TRL is 1.13.0, the last that
has process reward models, in an environment of its own. The exit code is 1 where a loss of the five
steps differs by more than 1e-6.

--record writes what TRL computed, for the test that holds it without TRL.
"""

import json
import tempfile
from pathlib import Path

from harness import BENCHMARKS
from harness.processes import read_metrics, run
from harness.program import end, parser_of
from harness.trl_environment import DEFAULT_VENV, beside, trl_python

from tests.unit.objectives.trl_prm import (
    LEARNING_RATE,
    NUM_STEPS,
    TOLERANCE,
    train_ours,
    write_problem,
)

TRL_WITH_PRM = "trl==1.13.0"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--record", type=Path, help="write TRL's losses to this file")
    parser.add_argument("--trl_venv", type=Path, default=DEFAULT_VENV)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="prm_vs_trl_") as name:
        folder = Path(name)
        model, rows = write_problem(folder)
        theirs = run_trl(args.trl_venv, model, rows, folder / "trl")
        train_ours(model, rows, folder / "ours")
        ours = [row["loss"] for row in read_metrics(folder / "ours")]
    if args.record is not None:
        args.record.write_text(
            json.dumps({"made_with": TRL_WITH_PRM, "losses": theirs}, indent=1) + "\n"
        )
    end(list(compare(ours, theirs)))


def run_trl(venv: Path, model: Path, rows: Path, out: Path) -> list[float]:
    """The loss of each of TRL's steps."""
    out.mkdir()
    python = trl_python(venv)
    packages = beside(python, "trl_prm", [TRL_WITH_PRM])
    flags = [
        "--model",
        model,
        "--rows",
        rows,
        "--out",
        out,
        "--learning_rate",
        LEARNING_RATE,
        "--steps",
        NUM_STEPS,
    ]
    program = BENCHMARKS / "trl_programs" / "prm.py"
    run([python, program, *flags], environment={"PYTHONPATH": str(packages)})
    losses: list[float] = json.loads((out / "losses.json").read_text())
    return losses


def compare(ours: list[float], theirs: list[float]) -> list[str]:
    """Print both; returns the steps whose losses differ."""
    missed = []
    for step, (own, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        difference = abs(own - other)
        print(f"step {step}: ours {own:.9f}, TRL's {other:.9f}, difference {difference:.1e}")
        if difference > TOLERANCE:
            missed.append(f"step {step}: {difference:.1e} is more than {TOLERANCE:g}")
    return missed


if __name__ == "__main__":
    main()
