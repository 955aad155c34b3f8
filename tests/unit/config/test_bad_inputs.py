"""What a user can get wrong, through the real entry: exit code 2, a sentence that names it, no
traceback.
"""

import errno
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from open_instruct.checkpoints.step_folder import find_damage
from open_instruct.models.export_files import find_replace_problem
from open_instruct.objectives.dpo import DPO
from open_instruct.parallel.process import stop_process
from open_instruct.train import run_objective
from scripts.demo_data.pairs import write_synthetic_preferences
from tests.ranks.shallow import write_shallow_model

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    write_shallow_model(folder / "model", layers=1, family="llama")
    write_synthetic_preferences(folder / "rows.jsonl", num_rows=4, seed=0)
    return folder


@pytest.fixture
def stderr_of(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., str]]:
    """Run with good flags but for those given; check the exit code; return stderr."""

    def run(*, exit_code: int = 2, **flags: Any) -> str:
        settings: dict[str, Any] = {
            "model_name_or_path": good / "model",
            "mixer_list": [good / "rows.jsonl", "1.0"],
            "output_dir": tmp_path / "out",
            "cache_dir": good / "cache",
            "param_dtype": "float32",
            "max_seq_length": 256,
            "max_train_steps": 1,
        } | flags
        words = []
        for flag, value in settings.items():
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
        assert run_objective(DPO, words) == exit_code
        told = capsys.readouterr().err
        assert "Traceback" not in told
        return told

    # A run sets environment variables and the root logger for its own process; this one goes on.
    environment, root = dict(os.environ), logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield run
    stop_process()
    os.environ.clear()
    os.environ.update(environment)
    root.handlers, root.level = handlers, level


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})

    return damage


def edit_config(**values: Any) -> Damage:
    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | values
        (model / "config.json").write_text(json.dumps(config))

    return damage


def truncate(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (edit_tensors(lambda tensors: tensors.pop(NORM)), NORM),
        (edit_tensors(lambda tensors: tensors.update(extra=torch.zeros(2))), "extra"),
        (edit_tensors(lambda tensors: tensors.update({NORM: torch.zeros(3)})), NORM),
        (edit_tensors(lambda tensors: tensors[NORM].fill_(float("nan"))), NORM),
        (truncate, "truncated"),
        (
            lambda model: (model / "model.safetensors").write_bytes(b"no tensors here"),
            "model.safetensors",
        ),
        (lambda model: (model / "model.safetensors").unlink(), "safetensors"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer"),
        (edit_config(attention_bias=True), "attention_bias"),
        (edit_config(model_type="gpt2"), "gpt2"),
        (edit_config(vocab_size=100), "vocab_size 100"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_checkpoints(
    good: Path, tmp_path: Path, stderr_of: Callable[..., str], damage: Damage, told: str
) -> None:
    model = tmp_path / "model"
    shutil.copytree(good / "model", model)
    damage(model)
    assert told in stderr_of(model_name_or_path=model)


def test_all_bad_rows_are_told_with_their_lines(
    tmp_path: Path, stderr_of: Callable[..., str]
) -> None:
    def row(*replies: str, prompt: str = "Hello") -> bytes:
        turns = [
            [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
            for reply in replies
        ]
        return json.dumps(dict(zip(("chosen", "rejected"), turns, strict=False))).encode()

    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(
        b"\n".join(
            [row("yes", "no"), b"{not json", row("yes"), row("same", "same"), b'{"a": "\xff"}']
        )
    )
    told = stderr_of(mixer_list=[rows, "1.0"])
    assert "4 of 5 rows" in told and "--on_bad_row skip" in told
    for line, reason in ((2, "not JSON"), (3, "'rejected'"), (4, "equals"), (5, "UTF-8")):
        assert f"{rows}, line {line}: " in told and reason in told


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"chat_template_name": "klingon"}, "chatml"),
        ({"mixer_list": ["nothing.jsonl", "1.0"]}, "nothing.jsonl"),
        ({"max_seq_length": 100_000}, "4096"),
        ({"max_seq_length": 3}, "at --max_seq_length 3 (prompt_too_long 4); raise it"),
        ({"fsdp_shard_degree": 3}, "--fsdp_shard_degree 3"),
        ({"tensor_parallel_degree": 2}, "--tensor_parallel_degree 2"),
        (
            {
                "activation_checkpointing": "selected_modules",
                "activation_checkpointing_modules": "blocks.*.mlp",
            },
            "--activation_checkpointing_modules blocks.*.mlp",
        ),
        ({"output_dir": "/dev/null/run"}, "--output_dir"),
        ({"profile_steps": [1, 2]}, "--profile_steps 1 2: the run has 1 step;"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_flags(stderr_of: Callable[..., str], flags: dict[str, Any], told: str) -> None:
    assert told in stderr_of(**flags)


def test_folder_continues_only_its_own_run(
    stderr_of: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stderr_of(exit_code=0)
    told = stderr_of(learning_rate=1e-3)
    assert "--learning_rate" in told and "--overwrite_output_dir" in told
    assert (tmp_path / "out" / "hf_model").is_dir()
    stderr_of(exit_code=0)  # the same again is complete, and says no more
    stop_process()
    rows = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1]
    (tmp_path / "out" / "step1" / "rank0.safetensors").write_bytes(b"damaged")
    told = stderr_of(exit_code=1)
    assert (
        "step1/rank0.safetensors is not what was written" in told
        and "--overwrite_output_dir" in told
    )


def test_start_model_that_was_changed_in_place(
    good: Path, tmp_path: Path, stderr_of: Callable[..., str]
) -> None:
    model = tmp_path / "model"
    shutil.copytree(good / "model", model)
    stderr_of(exit_code=0, model_name_or_path=model)
    stop_process()
    before = {path.name: path.read_bytes() for path in model.iterdir()}

    def told_after(change: Damage) -> str:
        change(model)
        told = stderr_of(model_name_or_path=model)
        stop_process()
        for name, content in before.items():
            (model / name).write_bytes(content)
        return told

    for change in (
        edit_tensors(lambda tensors: tensors[NORM].mul_(1.01)),
        edit_config(rms_norm_eps=0.1),
    ):
        told = told_after(change)
        assert (
            "the start model is not the one that the run of" in told
            and "--overwrite_output_dir" in told
        )
    # Written anew with the same content, it is the same model.
    edit_config(transformers_version="7.0")(model)
    stderr_of(exit_code=0, model_name_or_path=model)


@pytest.mark.parametrize(
    "names",
    [
        ("train/rank0.pt", "model_and_optim/.metadata", ".metadata.json"),
        (".metadata", "__0_0.distcp"),
    ],
)
def test_checkpoint_of_olmo_core(
    stderr_of: Callable[..., str], tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Who has trained with OLMo-core may give its folder: nothing removes what took long to
    make.
    """
    theirs = tmp_path / "out" / "step1"
    for name in names:
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_bytes(b"{}")
    told = stderr_of()
    assert (
        f"{theirs} is a checkpoint of OLMo-core's own format" in told
        and "another --output_dir" in told
    )
    assert all((theirs / name).is_file() for name in names)


@pytest.mark.parametrize("name", ["hf_model", ".hf_model.partial"])
@pytest.mark.parametrize(
    ("put", "told"),
    [
        (lambda place: place.symlink_to(place.parent.parent), "is a link to"),
        (lambda place: place.symlink_to("nowhere"), "is a link to nowhere"),
        (lambda place: place.write_text("mine"), "is a file"),
    ],
    ids=["link", "dangling", "file"],
)
def test_training_does_not_start_when_no_export_can_be_written(
    stderr_of: Callable[..., str], tmp_path: Path, name: str, put: Callable[[Path], Any], told: str
) -> None:
    place = tmp_path / "out" / name
    place.parent.mkdir()
    put(place)
    assert f"{place} {told}" in stderr_of()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_mount_or_a_folder_that_cannot_be_written_takes_no_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "not" / "yet" / "there"
    assert find_replace_problem(out) is None
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert f"{tmp_path} cannot be written" in str(find_replace_problem(out))
    assert "is a mount" in str(find_replace_problem(Path("/proc")))


def test_checkpoint_that_cannot_be_written(
    stderr_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, synced = os.fsync, []

    def full(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent.name == "step2-tmp":
            raise OSError(errno.ENOSPC, "No space left on device")
        synced.append(path)
        sync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    told = stderr_of(exit_code=1, max_train_steps=2, checkpointing_steps=1)
    assert "step 2 cannot be written" in told and "No space left" in told and "same command" in told
    # The half one makes room again, the one before is whole.
    assert [path.name for path in (tmp_path / "out").glob("step*")] == ["step1"]
    assert find_damage(tmp_path / "out" / "step1") == []
    assert any(path.name == "rank0.safetensors" for path in synced)


def test_learning_rate_that_breaks_the_weights(
    stderr_of: Callable[..., str], tmp_path: Path
) -> None:
    """The loss and the gradient of the only step are finite; what is broken is what comes of it."""
    told = stderr_of(exit_code=1, learning_rate=1e30, warmup_ratio=0.0)
    assert "some weights are not finite, or larger than" in told.splitlines()[-1]
    assert (
        "the checkpoint of step 1 was not written" in told and "This run has no checkpoint" in told
    )
    assert (
        not list((tmp_path / "out").glob("step*")) and not (tmp_path / "out" / "hf_model").exists()
    )


def test_only_reference_logprobs(stderr_of: Callable[..., str], tmp_path: Path) -> None:
    stderr_of(exit_code=0, cache_logprobs_only="true", cache_dir=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "reference_logprobs").glob("*.safetensors"))) == 1
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
