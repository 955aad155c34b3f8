"""An environment of its own for TRL, and programs run under torchrun in it or in ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
DEFAULT_VENV = Path("~/.cache/open_instruct/trl_venv").expanduser()


def trl_python(venv: Path) -> Path:
    """The interpreter of an environment with TRL, with the same torch as ours; made if it is not there."""
    python = venv / "bin" / "python"
    if (venv / ".complete").exists():
        return python
    print(f"making an environment for TRL in {venv} (once)", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
    for packages in ([our_version("torch"), "numpy"], [TRL, our_version("transformers")]):
        subprocess.run([*pip, *packages], check=True, stderr=subprocess.DEVNULL, env=os.environ | cpu_wheels())
    (venv / ".complete").touch()
    return python


def beside(python: Path, name: str, packages: list[str]) -> Path:
    """A folder of packages for that environment, whose other users had better not find them; made if not there."""
    folder = DEFAULT_VENV.with_name(name)
    if not (folder / ".complete").exists():
        pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, *packages], check=True, stderr=subprocess.DEVNULL)
        (folder / ".complete").touch()
    return folder


def our_version(package: str) -> str:
    return f"{package}=={version(package)}"


def cpu_wheels() -> dict[str, str]:
    """Where a torch that ends in +cpu is found besides where pip already looks."""
    known = os.environ.get("PIP_EXTRA_INDEX_URL", "")
    return {"PIP_EXTRA_INDEX_URL": f"{known} https://download.pytorch.org/whl/cpu".strip()}


def torchrun(python: str | Path, num_ranks: int, program: Path, flags: list[object], *, num_threads: int = 1) -> None:
    """Run `program` on `num_ranks` ranks of `num_threads` threads each; ends this program if it fails."""
    command = [str(python), "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(num_ranks)]
    run([*command, str(program), *map(str, flags)], num_threads=num_threads)


def run(command: list[str], *, num_threads: int) -> None:
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": str(num_threads), "TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
