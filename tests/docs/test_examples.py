"""The programs of examples/, each run as its head says."""

import json
import math
import re
from pathlib import Path

import pytest

from scripts.demo_data.pairs import write_synthetic_preferences
from tests.docs.pages import REPOSITORY
from tests.ranks import programs
from tests.ranks.shallow import write_shallow_model

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.py"))
TRAINER_SCRIPTS = sorted((REPOSITORY / "examples" / "olmo_core").glob("*.py"))
MAX_LINES = 60
MAX_LINES_OF_TRAINERS = 68
TIMEOUT_S = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder that an example is started in, with a model `tiny`."""
    write_shallow_model(tmp_path / "tiny", family="olmo2", is_narrow=False)
    return tmp_path


def run_example(name: str, folder: Path) -> str:
    """Run the command of the example's head; returns what it printed."""
    path = REPOSITORY / "examples" / f"{name}.py"
    command = re.search(rf"&& python examples/{name}\.py (.+)$", path.read_text(), re.MULTILINE)
    assert command is not None, "the head has no command"
    environment = {"OPEN_INSTRUCT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = [str(path), *command[1].split()]
    process = programs.start(words, cwd=folder, environment=environment)
    printed, _ = process.communicate(TIMEOUT_S)
    assert process.returncode == 0, printed
    return printed


def read_rows(folder: Path) -> list[dict[str, float]]:
    assert (folder / "hf_model" / "model.safetensors").is_file()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_there_are_five_short_examples() -> None:
    assert len(EXAMPLES) == 5
    assert all(len(path.read_text().splitlines()) <= MAX_LINES for path in EXAMPLES)


def test_script_for_olmo_cores_trainer_is_short_and_ends_like_the_others() -> None:
    """tests/ranks/test_train_modules.py runs their trainers; their ends are run here."""
    texts = [path.read_text() for path in TRAINER_SCRIPTS]
    assert len(texts) == 6
    assert max(len(text.splitlines()) for text in texts) <= MAX_LINES_OF_TRAINERS
    assert len({text.partition("if __name__")[2] for text in texts}) == 1
    for path, text in zip(TRAINER_SCRIPTS, texts, strict=True):
        assert f"examples/olmo_core/{path.name} MODEL_DIR " in text.splitlines()[2]


def test_page_of_train_modules_shows_lines_of_the_script() -> None:
    page = (REPOSITORY / "docs" / "train_modules.md").read_text()
    script = (REPOSITORY / "examples" / "olmo_core" / "dpo.py").read_text()
    block = page.partition("```python\n")[2].partition("```")[0]
    lines = {line.strip() for line in script.splitlines()}
    assert block and {line.strip() for line in block.splitlines()} <= lines


@pytest.mark.extended
def test_torchrun_starts_a_script_for_olmo_cores_trainer(folder: Path) -> None:
    write_synthetic_preferences(folder / "pairs.jsonl", num_rows=16, seed=1)
    environment = {"OPEN_INSTRUCT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    script = str(REPOSITORY / "examples" / "olmo_core" / "dpo.py")
    process = programs.start(
        [*programs.TORCHRUN, "--nproc_per_node", "2", script, "tiny", "pairs.jsonl", "OUT"],
        cwd=folder,
        environment=environment,
    )
    printed, _ = process.communicate(TIMEOUT_S)
    assert process.returncode == 0, printed
    losses = [float(loss) for loss in re.findall(r" loss=(\S+)", printed)]
    assert len(losses) == 5 and losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert (folder / "OUT" / "step5" / "model_and_optim" / ".metadata").is_file()


def test_dpo_by_hand_starts_at_ln_2_and_learns(folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", run_example("dpo_by_hand", folder))]
    assert losses[0] == pytest.approx(math.log(2), abs=1e-4)
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.6


def test_own_loss_is_that_of_its_formula_and_falls(folder: Path) -> None:
    run_example("own_loss", folder)
    losses = [row["loss"] for row in read_rows(folder / "OUT")]
    assert losses[0] == 0.5 and losses[-1] < losses[0]


def test_olmo_cores_trainer_takes_steps_of_our_train_module(folder: Path) -> None:
    printed = run_example("olmo_core_trainer", folder)
    losses = [float(loss) for loss in re.findall(r"loss=(\S+)", printed)]
    assert len(losses) == 5 and losses == sorted(losses, reverse=True)


@pytest.mark.extended
def test_grpo_from_python_counts_digits(folder: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    run_example("grpo_from_python", folder)
    rows = read_rows(folder / "OUT")
    assert len(rows) == 5 and all(row["verifier/count_digits"] == row["reward"] for row in rows)


@pytest.mark.extended
def test_episodes_in_an_environment_of_ones_own_end(folder: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM")
    run_example("own_environment", folder)
    rows = read_rows(folder / "OUT")
    assert len(rows) == 2 and all(row["episodes/env_error"] == 0 for row in rows)
