"""An environment with four clients of OpenAI's API, installed once into the user's cache.

Where there is no way to the package index, a test that asks for it is skipped with that reason.
"""

import fcntl
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from open_instruct.data.files.array_file import find_cache_folder

PACKAGES = (
    "openai-agents==0.24.0",
    "langchain-openai==1.7.4",
    "smolagents==1.26.0",
    "litellm==1.110.2",
)
CLIENTS = ("agents_sdk", "langchain", "smolagents", "litellm")
PROGRAMS = Path(__file__).parent
INSTALL_TIMEOUT_S = 900.0


def find_python() -> Path:
    """The interpreter of the environment, which is made if it is not there."""
    versions = "-".join(package.partition("==")[2] for package in PACKAGES)
    folder = find_cache_folder(None) / "agent_clients" / versions
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        problem = "" if (folder / ".complete").exists() else _make(folder)
    if problem:
        pytest.skip(problem)
    return folder / "bin" / "python"


@cache
def _make(folder: Path) -> str:
    """Make the environment; returns why there can be none, or ""."""
    shutil.rmtree(folder, ignore_errors=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--prefer-binary"]
    try:
        for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *PACKAGES]):
            subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        return f"{error}: {str(error.stderr).strip()[-300:]}"
    (folder / ".complete").touch()
    return ""
