"""Where a run of GRPO keeps what it needs while it runs, and what is left of that."""

from __future__ import annotations

from pathlib import Path

import pytest

from open_instruct.cluster.watchdog import FOLDER_VARIABLE, SHARED_MEMORY
from open_instruct.toys.tiny import write_tiny_model
from tests.fleet.grpo_case import GRPOCase, finished, write_prompts


def variables_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


@pytest.mark.timeout(300)
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
        model=write_tiny_model(tmp_path / "model", family="olmo2", size="tiny"),
        prompts=write_prompts(tmp_path / "prompts.jsonl", 4),
        output_dir=tmp_path / "out",
        flags={"total_episodes": 16, "cache_dir": tmp_path / "cache"},
    )
    process = case.start_python()  # where caches lie is settled by imports
    fleet_folders: set[Path] = set()
    case.when_step(
        1, process, lambda: fleet_folders.add(Path(variables_of(case.pids()["engines"][0])[FOLDER_VARIABLE]))
    )
    (fleet_folder,) = fleet_folders
    finished(process, exit_code=0)
    assert not fleet_folder.exists()
    # What later runs of vLLM and torch find again: what is known of a kind of model, and what was compiled.
    assert {path.relative_to(home).parts[:2] for path in home.rglob("*")} <= {(".cache",), (".cache", "vllm")}
    left = [
        path for path in temporary.rglob("*") if not path.relative_to(temporary).parts[0].startswith("torchinductor_")
    ]
    assert left == []
    assert not [path for path in SHARED_MEMORY.iterdir() if path.name.startswith(f"open_instruct-{process.pid}-")]
