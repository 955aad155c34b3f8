"""Which files a model is opened from."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.parallel.layout import resolve_layout
from open_instruct.run import pretrained
from open_instruct.run.pretrained import fetch_folder, open_pretrained
from tests.refusals import refused

REQUIRED = ["--mixer_list", "rows.jsonl", "1.0", "--output_dir", "out", "--model_name_or_path"]


def test_pretrained_takes_the_given_revision_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(name: str, *, revision: str | None, **_: Any) -> str:
        asked.append((name, revision))
        return str(tmp_path)

    class Stopped(Exception):
        pass

    def stop(folder: str) -> None:
        raise Stopped

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(pretrained, "open_model_folder", stop)
    (tmp_path / "tokenizer.json").touch()
    for words in (
        ["org/model"],
        ["org/model", "--model_revision", "step5"],
        ["org/model", "--model_revision", "step5", "--tokenizer_name_or_path", "org/words"],
        ["org/model", "--tokenizer_name_or_path", "org/words", "--tokenizer_revision", "v2"],
    ):
        config = parse_run(DPOConfig, [*REQUIRED, *words])
        validate_dpo(config)
        with pytest.raises(Stopped):
            open_pretrained(config, tmp_path / "out")
    assert asked == [
        ("org/model", None),
        ("org/model", "step5"),
        *[("org/model", "step5"), ("org/words", "step5")],
        *[("org/model", None), ("org/words", "v2")],
    ]


def test_folder_has_no_revisions(tmp_path: Path) -> None:
    assert fetch_folder(str(tmp_path), revision="main") == tmp_path
    with refused("conflict", "model_revision", "v2"):
        fetch_folder(str(tmp_path), revision="v2")


def test_revision_of_no_tokenizer_is_refused() -> None:
    with refused("unread_flag", "tokenizer_revision", "--tokenizer_name_or_path"):
        validate_dpo(parse_run(DPOConfig, [*REQUIRED, "m", "--tokenizer_revision", "v2"]))


def test_fields_that_nothing_reads_are_told_of(tmp_path: Path) -> None:
    """Printable, and not all of a thousand."""
    folder = write_tiny_model(tmp_path / "model", family="llama", tie=True)
    config = parse_run(DPOConfig, [*REQUIRED, str(folder)])
    assert open_pretrained(config, tmp_path / "out").warnings == []
    fields = json.loads((folder / "config.json").read_text())
    more = {"residual_scale": 0.5, "\u202e": 1, **dict.fromkeys(map(str, range(1000)), True)}
    (folder / "config.json").write_text(json.dumps(fields | more))
    (warning,) = open_pretrained(config, tmp_path / "out").warnings
    assert (
        "config.json has fields that nothing reads: 'residual_scale', '\\u202e', '0', " in warning
    )
    assert warning.isprintable() and len(warning) < 400


def test_model_whose_layers_are_all_dense_has_no_experts_to_split(tmp_path: Path) -> None:
    """Though its family has, and so do the fields of its config.json.."""
    folder = write_tiny_model(tmp_path / "model", family="qwen3_moe")
    fields = json.loads((folder / "config.json").read_text())
    dense = fields | {"mlp_only_layers": list(range(fields["num_hidden_layers"]))}
    layout = resolve_layout([2], expert_parallel_degree=2)
    config = parse_run(DPOConfig, [*REQUIRED, str(folder)])
    open_pretrained(config, tmp_path / "out", layout=layout)
    (folder / "config.json").write_text(json.dumps(dense))
    with refused("layout", "expert_parallel_degree", "2"):
        open_pretrained(config, tmp_path / "out", layout=layout)
