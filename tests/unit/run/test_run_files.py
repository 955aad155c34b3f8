"""Files of a run that are replaced as a whole, and what a crash or a bad disk may leave of them."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cli import main
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.resolved import write_config
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.core.files import replace_text
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.run.console import Console
from open_instruct.run.earlier_command import refuse_another_command
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.opening import claim_run_folder
from open_instruct.run.run_directory import RunDirectory
from tests.refusals import refused

LAYOUT = ShardLayout(gpus_per_node=(2,), shard_degree=2, num_replicas=1)


def config_of(folder: Path, *words: str) -> DPOConfig:
    return parse_run(
        DPOConfig,
        [
            "--model_name_or_path",
            "m",
            "--mixer_list",
            "r",
            "1.0",
            "--output_dir",
            str(folder),
            *words,
        ],
    )


def start(config: DPOConfig, layout: ShardLayout = LAYOUT, *, speaks: bool = False) -> None:
    """Open the run's folder, as every start does, and leave it."""
    directory = RunDirectory(path=Path(config.run.output_dir))
    with claim_run_folder(directory, config, layout, Console(speaks=speaks), "dpo"):
        pass


def with_checkpoint(folder: Path, *words: str) -> DPOConfig:
    """The folder of a run that has taken two steps."""
    config = config_of(folder, *words)
    start(config)
    (folder / "step2").mkdir()
    (folder / "step2" / "checkpoint.json").touch()
    return config


WRITERS: dict[str, Any] = {
    "layout.json": lambda folder: RunDirectory(path=folder).write_layout(LAYOUT),
    "plan.json": lambda folder: RunDirectory(path=folder).write_plan({"memory_bytes": 1}),
    "eval.jsonl": lambda folder: RunDirectory(path=folder).write_evaluation(
        {"step": 3, "score": 0.5}
    ),
    "pids.json": lambda folder: RunDirectory(path=folder).write_pids(
        driver=1, learners=[2], engines=[]
    ),
    "config.yaml": lambda folder: write_config(config_of(folder), folder / "config.yaml"),
    "metrics.jsonl": lambda folder: MetricsLog(folder / "metrics.jsonl").keep_until(1),
}


@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_leaves_the_old_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = '{"step": 1}\n'
    (tmp_path / name).write_text(before)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        WRITERS[name](tmp_path)
    assert (tmp_path / name).read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_replaced_file_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    move = Path.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: events.append("sync"))
    monkeypatch.setattr(Path, "replace", lambda path, to: (events.append("move"), move(path, to)))
    replace_text(tmp_path / "file", "content")
    assert events == ["sync", "move", "sync"]


def test_unfinished_files_of_a_killed_run_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".layout.json.4711-1.partial").write_text("{")
    (tmp_path / ".hf_model.partial").mkdir()
    with_checkpoint(tmp_path)
    assert sorted(path.name for path in tmp_path.glob(".*.partial")) == [".hf_model.partial"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"num_replicas": "x"}'])
def test_damaged_layout_blocks_no_later_start(tmp_path: Path, content: str) -> None:
    config = with_checkpoint(tmp_path)
    (tmp_path / "layout.json").write_text(content)
    start(config)
    assert json.loads((tmp_path / "layout.json").read_text())["shard_degree"] == 2


def test_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    config = with_checkpoint(tmp_path)
    with refused("other_run", "output_dir", "global batch"):
        start(config, ShardLayout(gpus_per_node=(4,), shard_degree=4, num_replicas=1))
    (tmp_path / "config.yaml").write_text("")
    with refused("unreadable_file", "model_name_or_path", "config.yaml"):
        start(config)
    (tmp_path / "config.yaml").unlink()
    with refused("other_run", "output_dir", "config.yaml"):
        start(config)
    assert not (tmp_path / "config.yaml").exists()


@pytest.mark.parametrize("result", ["step2", "hf_model", "adapter"])
def test_folder_of_another_command_is_refused_by_one_sentence(tmp_path: Path, result: str) -> None:
    config = config_of(tmp_path)
    refuse_another_command(config.run, "sft")  # an empty folder
    start(config)
    refuse_another_command(config.run, "sft")  # a run that has left nothing yet
    (tmp_path / result).mkdir()
    refuse_another_command(config.run, "dpo")
    with refused("other_run", "output_dir", "dpo", "sft") as caught:
        refuse_another_command(config.run, "sft")
    assert "\n" not in str(caught.value)
    refuse_another_command(config_of(tmp_path, "--overwrite_output_dir").run, "sft")


OTHERS: dict[str, Any] = {
    "a folder": Path.mkdir,
    "a FIFO": os.mkfifo,
    "a link to nothing": lambda path: path.symlink_to("gone"),
    "a device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(
    "name",
    [
        *(
            "run.lock",
            "run.lease",
            "layout.json",
            "config.yaml",
            "metrics.jsonl",
            "eval.jsonl",
            "run.log",
        ),
        *("plan.json", "step3"),
    ],
)
def test_fifo_in_a_files_place_is_named_and_not_opened(
    tmp_path: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if (name, kind) == ("step3", "a folder"):
        return
    config = with_checkpoint(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    OTHERS[kind](path)
    told = f"{path} is {kind}, and a run has "
    with pytest.raises(InputError) as caught:
        start(config)
    assert str(caught.value).startswith(told) and "move it away" in str(caught.value)
    for command in (
        ["report", str(tmp_path)],
        ["export", str(tmp_path), "--output_dir", str(tmp_path / "model")],
    ):
        assert main(command) == EXIT_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert told in line


def test_file_that_is_called_like_a_checkpoint_is_named(tmp_path: Path) -> None:
    (tmp_path / "step3").touch()
    (tmp_path / "step_by_step").touch()  # the user's own
    with refused("other_run", None, "step3 is a file"):
        RunDirectory(path=tmp_path).create()


def test_other_stage_of_zero_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stage = ("--backend", "deepspeed", "--deepspeed_stage")
    start(with_checkpoint(tmp_path, *stage, "2"), speaks=True)
    assert "ZeRO" not in capsys.readouterr().out
    start(config_of(tmp_path, *stage, "3"), speaks=True)
    assert "had DeepSpeed ZeRO-2, and goes on with DeepSpeed ZeRO-3" in capsys.readouterr().out


BAD_LINES = (
    b'{"step": 2, "loss": \xff\xfe}\n\xff\n\n[1]\n{"loss": 1}\n{"step": null}\n{"step": 3, "lo'
)


def test_damaged_metrics_are_passed_over(tmp_path: Path) -> None:
    file = MetricsLog(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": float("nan")})
    with file.path.open("ab") as raw:
        raw.write(BAD_LINES)
    assert [row["step"] for row in file.rows()] == [1]
    file.keep_until(5)
    file.write({"step": 2, "loss": 0.5})
    lines = file.path.read_text().splitlines()
    assert lines == ['{"step": 1, "loss": null}', '{"step": 2, "loss": 0.5}']


def test_damaged_evaluations_are_passed_over(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.evaluations.write_bytes(b'{"step": 0, "score": 0.4}\n' + BAD_LINES)
    directory.write_evaluation({"step": 8, "score": 0.5})
    rows = [json.loads(line) for line in directory.evaluations.read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 8]


def test_functions_that_run_uncompiled_are_warned_of_when_there_are_more(tmp_path: Path) -> None:
    warned: list[str] = []
    file = MetricsLog(tmp_path / "metrics.jsonl", warn=warned.append)
    for step, number in enumerate((None, 0.0, 1.0, 1.0, 1.5, 2.0), 1):
        file.write({"step": step} | ({} if number is None else {"uncompiled_functions": number}))
    assert [warning.split(" a function")[0] for warning in warned] == [
        "since step 3",
        "since step 5",
        "since step 6",
    ]
