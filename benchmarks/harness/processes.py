"""Programs, ranks and workers in processes of their own, and the numbers that they leave."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NUM_LAST_CHARACTERS = 3000


def run(
    command: Sequence[object], *, num_threads: int = 1, environment: Mapping[str, str] | None = None
) -> str:
    """What it wrote to its standard output; ends this program if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words,
        env=os.environ
        | {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"}
        | dict(environment or {}),
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        told = "\n".join(text[-NUM_LAST_CHARACTERS:] for text in (done.stdout, done.stderr))
        sys.exit(f"{' '.join(words)} failed:\n{told}")
    return done.stdout


def torchrun(
    python: str | Path,
    num_ranks: int,
    program: Path,
    flags: Sequence[object],
    *,
    num_threads: int = 1,
) -> None:
    """Run `program` on `num_ranks` ranks of `num_threads` threads each; ends this program if it
    fails.
    """
    launcher = [
        python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        num_ranks,
    ]
    run([*launcher, program, *flags], num_threads=num_threads)


def numbers_of_ranks(
    program: Path, num_ranks: int, words: Sequence[object], *, scratch_dir: Path | None = None
) -> list[dict[str, Any]]:
    """What each rank of `program --worker WORDS FOLDER` leaves with `leave_numbers`, under
    torchrun.
    """
    with tempfile.TemporaryDirectory(dir=scratch_dir) as name:
        torchrun(sys.executable, num_ranks, program, ["--worker", *words, name])
        return read_numbers(Path(name), num_ranks)


def numbers_of_workers(
    program: Path, num_ranks: int, num_others: int, words: Sequence[object]
) -> list[dict[str, Any]]:
    """The same of ranks that can form a process group, and of processes beside them, whose RANK is
    beyond theirs.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    group = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks), "NUM_NODES": "1"}
    group |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, str(program), "--worker", *map(str, words), name]
        processes = []
        for rank in range(num_ranks + num_others):
            with (folder / f"{rank}.log").open("w") as log:
                environment = os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        codes = [process.wait() for process in processes]
        if any(codes):
            rank = next(rank for rank, code in enumerate(codes) if code)
            text = (folder / f"{rank}.log").read_text()
            sys.exit(
                f"{' '.join(command)} failed on process {rank}:\n{text[-NUM_LAST_CHARACTERS:]}"
            )
        return read_numbers(folder, num_ranks + num_others)


def leave_numbers(folder: Path, numbers: Mapping[str, Any]) -> None:
    """Of this rank, for the program that started it."""
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(numbers))


def read_numbers(folder: Path, num_ranks: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, one a step."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
