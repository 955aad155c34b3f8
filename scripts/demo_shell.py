"""What the demos share: a command is shown as a user would type it, and then run."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from open_instruct.report.terminal_curve import draw_curve

REPOSITORY = Path(__file__).resolve().parents[1]
# Relative to the repository, as the commands are shown.
OUTPUT = Path("demo_output")
CURVE_HEIGHT = 8

console = Console(highlight=False)


def step(number: int, what: str) -> None:
    console.rule(f"[bold]{number}. {what}", align="left")


def begin_with_tiny_model(folder: Path, *, size: str) -> None:
    """The first step of every demo."""
    step(1, "a small random OLMo-2 with a tokenizer of its own")
    shutil.rmtree(folder, ignore_errors=True)
    run("open-instruct", "tiny-model", folder, "--family", "olmo2", "--size", size)


def torchrun(num_ranks: int, *arguments: object) -> None:
    """`run` on several ranks of this machine, which listen to nobody else."""
    run(
        "torchrun",
        "--rdzv_backend",
        "loopback",
        "--rdzv_endpoint",
        "localhost",
        "--nproc_per_node",
        num_ranks,
        *arguments,
    )


def run(program: str, *arguments: object) -> None:
    """Run a program of the environment; end the demo if it fails."""
    words = [str(argument) for argument in arguments]
    console.print(f"$ {shlex.join([program, *words])}", style="dim", markup=False, soft_wrap=True)
    executable = Path(sys.executable).with_name(program)
    # One thread a process: several of them share two cores or so. Nothing here needs the hub.
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    finished = subprocess.run([executable, *words], env=environment)
    if finished.returncode != 0:
        console.print(
            f"[red]{program} ended with code {finished.returncode}; what went wrong is said above."
        )
        sys.exit(finished.returncode)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def show_what_happened(
    run_folder: Path,
    *,
    samples: Callable[..., RenderableType],
    summary: Callable[..., RenderableType],
    began_s: float,
) -> None:
    """Answers to held-out prompts before and after a run of GRPO, and its summary."""
    console.print()
    evaluations = rows_of(run_folder / "eval.jsonl")
    console.print(samples(evaluations[0]["samples"], evaluations[-1]["samples"]))
    metrics = rows_of(run_folder / "metrics.jsonl")
    elapsed_s = time.monotonic() - began_s
    console.print(
        summary(metrics=metrics, evaluations=evaluations, elapsed_s=elapsed_s, width=console.width)
    )


def panel_of(rewards: Sequence[float], facts: Table, *, width: int) -> Panel:
    """The curve of the rewards of steps, and facts below it."""
    body = Table.grid()
    body.add_row(Text(draw_curve(rewards, width=width - 4, height=CURVE_HEIGHT, title="reward")))
    body.add_row("")
    body.add_row(facts)
    return Panel(body, title="what happened", title_align="left", expand=False)


def ended(main: Callable[[], int]) -> int:
    """The exit code of `main`, also where it is interrupted."""
    try:
        return main()
    except KeyboardInterrupt:
        return 130
