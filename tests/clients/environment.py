"""An environment with four clients of OpenAI's API, installed once into the user's cache.

Where there is no way to the package index, a test that asks for it is skipped with that reason.
"""

import fcntl
import shutil
import subprocess
import sys
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
    python = folder / "bin" / "python"
    mark = folder / ".complete"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if mark.exists():
            return python
        shutil.rmtree(folder, ignore_errors=True)
        commands = (
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", "--prefer-binary", *PACKAGES],
        )
        for command in commands:
            done = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                timeout=INSTALL_TIMEOUT_S,
            )
            if done.returncode != 0:
                pytest.skip(f"no clients could be installed: {done.stderr.strip()[-300:]}")
        mark.touch()
    return python
