"""`open-instruct check`: all that a run would be refused for, said together, and nothing
written.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch  # noqa: F401  so that transformers finds it, whichever test comes first

from open_instruct.commands.check import main
from open_instruct.commands.checks import run_checks
from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.resolved import write_config
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.run.run_lock import lock_folder
from tests.refusals import refused

TURN = {"role": "user", "content": "What is 3 + 4?"}
PAIR = {"prompt": "What is 3 + 4?", "chosen": "7", "rejected": "8"}
TALK = {"messages": [TURN], "answer": "7"}
FUNCTIONS = """
def trl(completions, answer, **kwargs):
    return [float(wanted in completion[0]["content"]) for completion, wanted in zip(completions, answer)]

def broken(completions, **columns):
    return [len(text) / 0 for text in completions]

class Shop:
    def buy(self, thing: str) -> str:
        \"\"\"Buy something.

        Args:
            thing: what is bought
        \"\"\"
        return thing

class Closed(Shop):
    def reset(self):
        raise OSError("the shop is closed")
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_tiny_model(folder, family="olmo2")
    return folder


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with rows and functions, and a cache of its own."""
    write_rows(tmp_path / "pairs.jsonl", PAIR, PAIR)
    write_rows(tmp_path / "lacks.jsonl", PAIR, {"prompt": "?", "chosen": "!"})
    write_rows(tmp_path / "talks.jsonl", TALK, TALK)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPEN_INSTRUCT_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_rows(path: Path, *rows: Mapping[str, Any]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def words_for(
    command: str, model: Path | str, *more: str, rows: Sequence[str] = ("pairs.jsonl",)
) -> list[str]:
    flag = "--dataset_mixer_list" if command == "grpo" else "--mixer_list"
    mixed = [word for name in rows for word in (name, "1.0")]
    return [command, "--model_name_or_path", str(model), flag, *mixed, "--output_dir", "OUT", *more]


def words_for_grpo(model: Path, *more: str) -> list[str]:
    lengths = ["--response_length", "16", "--max_prompt_token_length", "64"]
    return words_for("grpo", model, *lengths, *more, rows=["talks.jsonl"])


def titles(text: str) -> list[str]:
    return re.findall(r"^(\w+(?: \w+)*)  +\S", text, flags=re.MULTILINE)


def test_check_looks_at_everything_and_writes_nothing(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(place.iterdir())
    assert main(words_for("dpo", model, "--max_seq_length", "64")) == 0
    said = capsys.readouterr().out
    assert titles(said) == [
        "flags",
        "output folder",
        "layout",
        "model",
        "tokenizer",
        "rows",
        "memory",
    ]
    assert "2 pairs" in said and "OUT is new" in said
    assert set(place.iterdir()) == before


def test_refusals_of_a_run_are_said_together(model: Path, place: Path) -> None:
    folder = place / "OUT"
    (folder / "step5").mkdir(parents=True)
    (folder / "config.yaml").write_text("command: sft\n")
    wrong = ["--learning_rate", "-1", "--eval_mixer_list", "gone.jsonl", "1.0"]
    words = words_for("dpo", model, *wrong, rows=["lacks.jsonl"])
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    with refused("out_of_range", "learning_rate") as caught:
        main(words)
    problems = caught.value.problems
    assert [problem.kind for problem in problems] == [
        "out_of_range",
        "other_run",
        "bad_row",
        "missing_file",
    ]
    assert "rejected" in str(caught.value) and "gone.jsonl" in str(caught.value)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize("has_driver", [True, False])
def test_memory_is_that_of_a_gpu_where_there_is_a_driver_of_one(
    model: Path,
    has_driver: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_checks, "has_gpu_here", lambda: has_driver)
    assert main(words_for("dpo", model)) == 0
    said = capsys.readouterr().out
    assert ("per GPU" in said, "per process" in said) == (has_driver, not has_driver)


@pytest.mark.parametrize(
    ("change", "kind", "flag", "name"),
    [
        (["--max_seq_lenght", "64"], "unknown_flag", None, "max_seq_length"),
        (
            ["--eval_mixer_list", "gone.jsonl", "1.0"],
            "missing_file",
            "eval_mixer_list",
            "gone.jsonl",
        ),
        (["--max_seq_length", "100000"], "out_of_range", "max_seq_length", "100000"),
        (["--fsdp_shard_degree", "2"], "layout", None, "fsdp_shard_degree"),
        (["--tokenizer_name_or_path", "./none"], "missing_file", "tokenizer_name_or_path", "none"),
        (["--report_to", "wandb"], "missing_package", "report_to", "wandb"),
    ],
)
def test_one_mistake_is_refused_as_the_run_refuses_it(
    model: Path, change: list[str], kind: str, flag: str | None, name: str
) -> None:
    with refused(kind, flag, name) as caught:
        main(words_for("dpo", model, *change))
    assert len(caught.value.problems) == 1


def test_flag_that_nothing_can_be_read_with_hides_no_other_refusal(model: Path) -> None:
    words = words_for("dpo", "./none")
    words[words.index("1.0")] = "many"
    with refused("bad_value", "mixer_list", "many") as caught:
        main(words)
    assert "missing_file" in {problem.kind for problem in caught.value.problems}


def test_missing_model_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    with refused("missing_file", None, "./none") as caught:
        main(words_for("dpo", "./none"))
    assert len(caught.value.problems) == 1
    assert titles(capsys.readouterr().out)[-1] == "memory"


def test_folder_that_cannot_be_used_is_refused(model: Path, place: Path) -> None:
    (place / "OUT").write_text("a file")
    with refused("unreadable_file", "output_dir", "OUT"):
        main(words_for("dpo", model))


@pytest.mark.slow  # as it starts a process
def test_folder_in_use_is_refused_with_its_process(model: Path, place: Path) -> None:
    import subprocess
    import sys

    folder = place / "OUT"
    folder.mkdir()
    # A lock is of a process: one of another is wanted.
    code = (
        "import sys; from pathlib import Path; from open_instruct.run.run_lock import lock_folder\n"
        "with lock_folder(Path('OUT'), say=print): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with refused("other_run", "output_dir", str(holder.pid)):
            main(words_for("dpo", model))
        holder.stdin.close()
    assert main(words_for("dpo", model)) == 0
    with lock_folder(folder, say=print):
        pass


def test_run_that_would_go_on_says_after_which_step(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_for("dpo", model)
    folder = place / "OUT"
    (folder / "step3").mkdir(parents=True)
    (folder / "step3" / "checkpoint.json").touch()
    write_config(
        parse_run(DPOConfig, words[1:]), folder / "config.yaml", {"world_size": 1}, command="dpo"
    )
    assert main(words) == 0
    assert "after step 3" in capsys.readouterr().out
    with refused("other_run", None, "learning_rate"):
        main([*words, "--learning_rate", "0.5"])


def test_grpo_has_its_judges_and_environments_asked_once(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(words_for_grpo(model, "--verifier", "mine.py:trl", "--environment", "mine.py:Shop"))
        == 0
    )
    said = capsys.readouterr().out
    assert titles(said)[-3:] == ["rewards", "environments", "memory"]
    assert "trl" in said and "messages" in said and "1 tool" in said


def test_agent_is_found_and_not_run(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It asks engines, of which there are none here."""
    agent = ["--environment", "agent:mine.py:broken"]
    assert main(words_for_grpo(model, "--verifier", "mine.py:trl", *agent)) == 0
    assert "agent:mine.py:broken" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "kind", "names"),
    [
        (["--verifier", "mine.py:broken"], "own_code", ["mine.py:6", "broken"]),
        (["--verifier", "mine.py:gone"], "own_code", ["gone"]),
        (["--verifier", "mine.py:trl", "--environment", "mine.py:Closed"], "own_code", ["closed"]),
        (
            [
                "--verifier",
                "judge",
                "--llm_judge_model",
                "m",
                "--llm_judge_url",
                "http://127.0.0.1:9/v1",
            ],
            "remote",
            ["llm_judge_model"],
        ),
        (["--verifier", "mine.py:trl", "--environment", "mcp:false"], "remote", ["environment"]),
        (
            ["--verifier", "mine.py:trl", "--environment", "agent:mine.py:gone"],
            "own_code",
            ["gone"],
        ),
    ],
)
def test_what_judges_or_answers_and_does_not_work_is_refused(
    model: Path, change: list[str], kind: str, names: list[str]
) -> None:
    more = ["--llm_judge_max_retries", "0"] if kind == "remote" else []
    with refused(kind, None, *names):
        main(words_for_grpo(model, *change, *more))


@pytest.mark.extended
@pytest.mark.parametrize("command", ["dpo", "sft", "kto"])
def test_first_loss_is_taken_of_the_real_model(
    command: str, model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(
        place / "chats.jsonl",
        *({"messages": [TURN, {"role": "assistant", "content": "7"}]} for _ in range(4)),
    )
    rows = [{"prompt": "3 + 4?", "completion": str(n), "label": n % 2 == 0} for n in range(4)]
    write_rows(place / "labelled.jsonl", *rows)
    name = {"dpo": "pairs.jsonl", "sft": "chats.jsonl", "kto": "labelled.jsonl"}[command]
    assert (
        main(words_for(command, model, "--with_model", "--max_seq_length", "64", rows=[name])) == 0
    )
    (loss,) = re.findall(r"first loss +(\d+\.\d+)", capsys.readouterr().out)
    expected = {"dpo": 0.6931, "sft": 6.2, "kto": 0.5}[command]
    assert float(loss) == pytest.approx(expected, abs=1e-4 if command == "dpo" else 0.5)
    assert not (place / "OUT").exists()


@pytest.mark.extended
def test_first_loss_of_grpo_is_that_of_two_made_up_answers(
    model: Path, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words_for_grpo(model, "--verifier", "mine.py:trl", "--with_model")) == 0
    assert re.search(r"first loss +-?\d+\.\d+", capsys.readouterr().out)
    assert not (place / "OUT").exists()


def test_run_with_check_does_as_the_command_does(model: Path, place: Path) -> None:
    from open_instruct import dpo
    from open_instruct.core.errors import EXIT_INPUT

    words = words_for("dpo", model)[1:]
    assert dpo.main([*words, "--check"]) == 0
    assert dpo.main([*words, "--check", "--eval_mixer_list", "gone.jsonl", "1.0"]) == EXIT_INPUT
    assert not (place / "OUT").exists()
