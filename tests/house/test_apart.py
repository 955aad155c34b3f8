"""`scripts/apart.sh`: commands that leave something behind, and commands that do not."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.tiers import mark_extended

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "apart.sh"
TIMEOUT_S = 300.0


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    folder.mkdir()
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    (folder / ".gitignore").write_text("__pycache__/\n")
    return folder


def run(
    checkout: Path, command: str, *, home: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT, "bash", "-c", command],
        cwd=checkout,
        env=os.environ | {"HOME": home or str(checkout.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def state_of(pid: str) -> str:
    """One letter, once the process is no longer running; "ended" if there is none."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            state = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "ended"
        if state == "Z":
            return state
        time.sleep(0.05)
    return state


def walled(checkout: Path) -> bool:
    return "no namespaces" not in run(checkout, "true").stderr


def test_home_and_tmpdir_are_empty_and_the_checkout_is_there(checkout: Path) -> None:
    (checkout / "file").touch()
    done = run(checkout, 'ls -A "$HOME" "$TMPDIR" | grep -v : ; touch "$HOME/a" "$TMPDIR/b"; ls -A')
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [".git", ".gitignore", "file"]


@pytest.mark.extended
def test_exit_code_is_the_commands_own(checkout: Path) -> None:
    assert run(checkout, "exit 7").returncode == 7


def test_file_left_in_the_checkout_fails(checkout: Path) -> None:
    done = run(checkout, "touch here; mkdir __pycache__; touch __pycache__/a.pyc")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith("/checkout/here")


@pytest.mark.extended
def test_files_of_the_demos_may_stay(checkout: Path) -> None:
    (checkout / ".gitignore").write_text("demo_output/\n")
    assert run(checkout, "mkdir demo_output; touch demo_output/model").returncode == 0
    assert run(checkout, "mkdir output; touch output/model").returncode == 1


@pytest.mark.extended
def test_process_that_was_left_fails_and_is_ended(checkout: Path) -> None:
    done = run(checkout, "sleep 55 >/dev/null 2>&1 & echo $!")
    assert done.returncode == 1
    assert "sleep 55" in done.stderr
    assert state_of(done.stdout.strip()) in ("ended", "Z")  # a zombie where nobody adopts orphans


@pytest.mark.parametrize(
    "folder", mark_extended(["/tmp", "/var/tmp", "/dev/shm"], but=["/dev/shm"])
)
def test_file_left_in_a_folder_of_all_fails_and_is_not_seen_outside(
    checkout: Path, folder: str
) -> None:
    if not walled(checkout):
        pytest.skip("no mount namespaces here")
    name = f"{folder}/left-{os.getpid()}"
    done = run(checkout, f"touch {name}")
    assert done.returncode == 1
    assert name in done.stderr
    assert not Path(name).exists()


def test_true_home_is_read_only(checkout: Path) -> None:
    if not walled(checkout):
        pytest.skip("no mount namespaces here")
    done = run(checkout, "touch /usr/local/share/left", home="/usr/local/share")
    assert done.returncode == 1
    assert "Read-only" in done.stderr
