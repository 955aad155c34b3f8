"""The GRPO commands of the docs, in a folder that has what they name, in tiny; they take two steps.

README's is run by test_grpo_folders.py.
"""

import json
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.demo_data.sums import write_arithmetic
from tests.fleet.grpo_case import finished, started
from tests.house.test_docs_commands import commands_of
from tests.ranks.fork_server import REPOSITORY
from tests.ranks.shallow import write_shallow_model

pytestmark = pytest.mark.extended

DOCS = REPOSITORY / "docs"
FILE_OF: dict[str, list[str]] = {"open-instruct": ["open_instruct/cli.py"], "python": []}


def rows_of_run(page: Path, part: str, folder: Path, *, num_episodes: int) -> list[dict[str, Any]]:
    """Run in `folder` the page's command that has `part` in it, for so many episodes; its metrics."""
    (command,) = (command for command in commands_of(page) if part in command)
    program, *words = shlex.split(command)
    file, *words = [*FILE_OF[program], *words]
    words[words.index("--total_episodes") + 1] = str(num_episodes)
    said = finished(started([str(REPOSITORY / file), *words], cwd=folder), exit_code=0)
    assert "step 2/2" in said
    output_dir = folder / words[words.index("--output_dir") + 1]
    assert (output_dir / "hf_model" / "model.safetensors").is_file()
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


def test_a_reward_of_ones_own(tmp_path: Path) -> None:
    """docs/rewards.md, with the file and the prompts that it shows."""
    page = DOCS / "rewards.md"
    text = page.read_text()
    write_shallow_model(tmp_path / "tiny", family="olmo2", is_narrow=False)
    (tmp_path / "mine.py").write_text(text.partition("```python\n")[2].partition("```")[0])
    prompts = text[text.index("for n in $(seq 100)") : text.index("open-instruct grpo --verifier mine.py")]
    subprocess.run(["bash", "-ec", prompts], cwd=tmp_path, check=True)
    rows = rows_of_run(page, "--verifier mine.py", tmp_path, num_episodes=32)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(0 <= row["verifier/digits"] < 1 for row in rows) and any(row["reward"] for row in rows)


def test_the_walk_through(tmp_path: Path) -> None:
    """docs/grpo.md, with what `make demo-grpo` leaves."""
    demo = tmp_path / "demo_output"
    write_shallow_model(demo / "sft" / "hf_model", family="olmo2", is_narrow=False)
    (demo / "arithmetic").mkdir()
    write_arithmetic(demo / "arithmetic", num_sft_rows=1, num_prompts=64, num_held_out=8, seed=0)
    rows = rows_of_run(DOCS / "grpo.md", "grpo_olmo_core_actor.py --", tmp_path, num_episodes=128)
    assert [row["step"] for row in rows] == [1, 2]
    assert "eval/reward" in rows[-1] and "verifier/gsm8k" in rows[-1]
    assert json.loads((tmp_path / "OUT" / "layout.json").read_text())["shard_groups"] == [[0, 1]]
