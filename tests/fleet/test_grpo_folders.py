"""The GRPO commands of the quick start: where a run keeps what it needs while it runs, and what is left
of that.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from open_instruct.cluster.watchdog import FOLDER_VARIABLE, SHARED_MEMORY
from tests.fleet.grpo_case import GRPOCase, finished
from tests.ranks.fork_server import REPOSITORY

pytestmark = pytest.mark.extended


def variables_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def block_of_quick_start() -> str:
    """Its lines from a model to a trained one; two steps of 25, and the shell becomes the last
    command.
    """
    blocks = (REPOSITORY / "docs" / "quick_start.md").read_text().split("```\n")
    (block,) = (block for block in blocks if "\nopen-instruct grpo " in block)
    assert " --total_episodes 1600 " in block and " --output_dir OUT_GRPO\n" in block
    return block.replace("\nopen-instruct grpo ", "\nexec open-instruct grpo ").replace(
        " 1600 ", " 128 "
    )


def test_only_caches_are_left_in_home_and_in_a_deep_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unix sockets cannot lie in a folder with so long a name."""
    home, temporary = tmp_path / "home", tmp_path / "/".join(["a_folder_with_a_long_name"] * 5)
    for folder in (home, temporary):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(temporary))
    case = GRPOCase(
        model=tmp_path / "tiny",
        prompts=tmp_path / "prompts.jsonl",
        output_dir=tmp_path / "OUT_GRPO",
    )
    found = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(REPOSITORY),
    }
    process = subprocess.Popen(
        ["bash", "-ec", block_of_quick_start()],
        cwd=tmp_path,
        env={
            **os.environ,
            **found,
            "OPEN_INSTRUCT_CACHE": str(tmp_path / "cache"),
            "OMP_NUM_THREADS": "1",
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    fleet_folders: set[Path] = set()
    case.when_step(
        1,
        process,
        lambda: fleet_folders.add(Path(variables_of(case.pids()["engines"][0])[FOLDER_VARIABLE])),
    )
    (fleet_folder,) = fleet_folders
    assert "step 2/2" in finished(process, exit_code=0)
    assert (case.output_dir / "hf_model" / "model.safetensors").is_file()
    assert not fleet_folder.exists()
    # What later runs of vLLM and torch find again: what is known of a kind of model, and what was
    # compiled.
    assert {path.relative_to(home).parts[:2] for path in home.rglob("*")} <= {
        (".cache",),
        (".cache", "vllm"),
    }
    left = [
        path
        for path in temporary.rglob("*")
        if not path.relative_to(temporary).parts[0].startswith("torchinductor_")
    ]
    assert left == []
    assert not [
        path
        for path in SHARED_MEMORY.iterdir()
        if path.name.startswith(f"open_instruct-{process.pid}-")
    ]
