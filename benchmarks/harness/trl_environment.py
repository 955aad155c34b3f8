"""An environment of its own for TRL."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

TRL = "trl==1.16.0"
DEFAULT_VENV = Path("~/.cache/open_instruct/trl_venv").expanduser()


def trl_python(venv: Path) -> Path:
    """The interpreter of an environment with TRL, with the same torch as ours; made if it is not
    there.
    """
    python = venv / "bin" / "python"
    if (venv / ".complete").exists():
        return python
    print(f"making an environment for TRL in {venv} (once)", flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off"]
    for packages in ([our_version("torch"), "numpy"], [TRL, our_version("transformers")]):
        subprocess.run(
            [*pip, *packages], check=True, stderr=subprocess.DEVNULL, env=os.environ | cpu_wheels()
        )
    (venv / ".complete").touch()
    return python


def beside(python: Path, name: str, packages: list[str]) -> Path:
    """A folder of packages for that environment, whose other users had better not find them; made
    if not there.
    """
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
