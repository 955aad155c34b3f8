"""Real tokens a second of KTO against TRL's KTOTrainer: same model, rows, precision and global batch.

Both run under torchrun on the same number of gloo ranks, float32, with reference log-probs computed beforehand and not
timed, and both score a mismatched reply of each row besides. Only real tokens count, those of mismatched replies too;
steps of warm-up do not. The two take turns, so that a busy machine slows both. See `dpo_vs_trl.py` for TRL's
environment.

    python benchmarks/kto_vs_trl.py [--rows FILE] [--num_steps 10] [--num_rounds 2]
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from dpo_vs_trl import Speed, arguments, report, run_ours, run_trl
from trl_environment import trl_python

from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import write_tiny_model


def main() -> None:
    # As many documents in a forward pass as DPO's pairs have there, and the default of both suites.
    args = arguments(__doc__, 'rows of "prompt", "completion" and "label"', batch=8)
    python = trl_python(args.trl_venv)
    with tempfile.TemporaryDirectory(prefix="kto_vs_trl_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size, vocab_size=args.vocab_size)
        rows = args.rows or write_rows(folder / "rows.jsonl")
        runs: dict[str, list[Speed]] = {"packed": [], "padded": [], "TRL": []}
        for number in range(args.num_rounds):
            packed, trl, padded = (folder / f"{run}{number}" for run in ("packed", "trl", "padded"))
            runs["packed"].append(run_ours(args, model, rows, packed, ["--packing"], name="kto"))
            runs["TRL"].append(run_trl(args, python, model, rows, trl, program="trl_kto.py"))
            runs["padded"].append(run_ours(args, model, rows, padded, ["--no_packing"], name="kto"))
            for name, speeds in runs.items():
                print(f"round {number + 1}: {name:6}  {speeds[-1].tokens_per_second:8,.0f} tokens/s", flush=True)
    report(runs, ours="packed")


def write_rows(path: Path) -> Path:
    """Of 512 made-up pairs the chosen and the rejected reply in turn."""
    write_synthetic_preferences(path, num_rows=512, seed=0)
    rows = []
    for number, line in enumerate(path.read_text().splitlines()):
        *prompt, reply = json.loads(line)["rejected" if number % 2 else "chosen"]
        rows.append(json.dumps({"prompt": prompt, "completion": [reply], "label": number % 2 == 0}))
    path.write_text("\n".join(rows) + "\n")
    return path


if __name__ == "__main__":
    main()
