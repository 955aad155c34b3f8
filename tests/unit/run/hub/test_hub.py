"""`--push_to_hub`: the card, the upload to a hub on loopback, and what is said where it does not
get there.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants

from open_instruct.commands.process import run_entry
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.resolved import collect_provenance, write_config
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.run.card import write_card
from open_instruct.run.run_directory import RunDirectory
from tests.unit.run.hub.fake_hub import FakeHub, fake_hub

NEEDED = [
    "--model_name_or_path",
    "allenai/OLMo-2-1B",
    "--mixer_list",
    "allenai/pairs",
    "1.0",
    "mine.jsonl",
    "500",
]
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "README.md": b"---\ntags: [open-instruct]\n---\n",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with fake_hub() as it:
        monkeypatch.setattr(constants, "ENDPOINT", it.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_of_a_test")
        yield it


def code_of(out: Path, *words: str, code: int = 0, folder: str = "hf_model") -> int:
    """Of an entry that writes a model and ends with `code`."""

    def main(config: DPOConfig) -> int:
        (out / folder).mkdir(parents=True)
        for name, content in FILES.items():
            (out / folder / name).write_bytes(content)
        return code

    words = (*NEEDED, "--output_dir", str(out), "--push_to_hub", *words)
    return run_entry(DPOConfig, main, words, program="dpo", validate=validate_dpo)


def test_model_gets_there(hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(tmp_path / "first") == 0
    assert hub.files == {"me/first": FILES} and hub.is_private == {"me/first": False}
    assert hub.tokens == {"Bearer hf_of_a_test"} and set(hub.cards) == {FILES["README.md"].decode()}
    assert capsys.readouterr().out == f"the trained model is at {hub.endpoint}/me/first\n"
    words = ["--use_lora", "--export", "adapter", "--hub_model_id", "us/mine", "--hub_private"]
    assert code_of(tmp_path / "second", *words, folder="adapter") == 0
    assert hub.files["us/mine"] == FILES and hub.is_private["us/mine"]


def test_run_that_was_stopped_uploads_nothing(hub: FakeHub, tmp_path: Path) -> None:
    assert code_of(tmp_path / "run", code=143) == 143
    assert hub.files == {}


@pytest.mark.parametrize("path", ["preupload/main", "commit/main"])
def test_upload_that_fails_is_told_with_what_tries_again(
    hub: FakeHub, tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    hub.answers[path] = 403
    assert code_of(tmp_path / "run", "--hub_private") == 1
    told = capsys.readouterr().err.splitlines()[-1]
    folder = tmp_path / "run" / "hf_model"
    assert told.startswith(
        f"dpo: the trained model is in {folder}, and was not uploaded (HfHubHTTPError: "
    )
    again = shlex.split(told.partition("To try again: ")[2])
    assert again == ["hf", "upload", "me/run", str(folder), ".", "--private"]
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == FILES and hub.files == {}
    if path == "commit/main":
        hub.answers.clear()
        program = str(Path(sys.executable).with_name(again[0]))
        environment = {**os.environ, **hub.environment}
        subprocess.run(
            [program, *again[1:]], env=environment, check=True, timeout=300, capture_output=True
        )
        assert hub.files == {"me/run": FILES}


def test_upload_that_would_fail_is_refused_before_the_run(
    hub: FakeHub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told_of(*words: str) -> str:
        assert code_of(tmp_path / "run", *words) == 2
        assert not (tmp_path / "run").exists()
        return capsys.readouterr().err

    assert "leave --push_to_hub out" in told_of("--cache_logprobs_only")
    assert "gives no repository a b (HFValidationError" in told_of("--hub_model_id", "a b")
    hub.answers["repos/create"] = 403
    assert "gives no repository run (HfHubHTTPError: " in told_of()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "gives no repository run (Conn" in told_of()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert "nobody has logged in here: run `hf auth login`, or set HF_TOKEN" in told_of()


def test_name_without_an_upload_is_warned_of() -> None:
    config = parse_run(
        DPOConfig,
        [*NEEDED, "--output_dir", "o", "--hub_model_id", "us/mine", "--push_to_hub", "false"],
    )
    assert validate_dpo(config) == ["--hub_model_id us/mine is read only with --push_to_hub"]


def test_card_says_what_the_run_was(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path / "run one")
    directory.create()
    config = parse_run(DPOConfig, [*NEEDED, "--output_dir", str(directory.path), "--beta", "3"])
    write_config(config, directory.config, collect_provenance())
    for step, accuracy in ((0, 0.5), (4, 0.75), (8, 2 / 3)):
        directory.write_evaluation({"step": step, "eval/accuracy": accuracy, "samples": []})
    card = write_card(directory, trained_by="dpo")
    _, head, text = card.split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["open-instruct", "dpo"],
        "base_model": "allenai/OLMo-2-1B",
        "datasets": ["allenai/pairs"],
    }
    assert text.startswith(
        "\n# run one\n\nTrained from `allenai/OLMo-2-1B` with open-instruct: dpo.\n"
    )
    assert "| `mine.jsonl` | 500 |" in text
    assert "|  | step 0 | step 8 |\n| --- | --- | --- |\n| eval/accuracy | 0.5 | 0.6667 |\n" in text
    settings = text.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(settings)["beta"] == 3 and "#   transformers: " in settings
    assert "| eval/accuracy | 0.5 | 0.75 |" in write_card(directory, trained_by="dpo", until=4)


def test_card_names_no_base_model_of_a_local_folder(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    (tmp_path / "model").mkdir()
    words = [
        "--model_name_or_path",
        str(tmp_path / "model"),
        "--mixer_list",
        str(tmp_path / "rows.jsonl"),
        "1.0",
    ]
    write_config(parse_run(DPOConfig, [*words, "--output_dir", "o"]), directory.config)
    card = write_card(directory, trained_by="reward_model", is_adapter=True)
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["library_name"], head["pipeline_tag"]) == ("peft", "text-classification")
    assert head.keys() == {"library_name", "pipeline_tag", "tags"}
    assert f"An adapter of `{tmp_path / 'model'}`" in card and "## Scores" not in card


def test_model_is_exported_without_a_card_where_the_settings_are_gone(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    assert write_card(directory, trained_by="dpo") is None
    for damaged in (b"\xff\xfe", b"a: [1", b"", b"[1]", b"seed: 1"):
        directory.config.write_bytes(damaged)
        assert write_card(directory, trained_by="dpo") is None
