"""The plan of a run that starts: against which memory, what is said, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from open_instruct.config.dpo import DPOConfig
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import parse
from open_instruct.errors import InputError
from open_instruct.parallel.layout import layout_of
from open_instruct.parallel.process import Process
from open_instruct.rollout.checked_run import _say_plan
from open_instruct.run import plan_check
from open_instruct.run.console import Console
from open_instruct.run.opened import Run
from open_instruct.run.run_directory import RunDirectory

GIB = 2**30
# 1.14B parameters: 16 bytes each are 17.0 GiB.
FIELDS = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return tmp_path


def start_on_host(folder: Path, host_gib: float, nodes: tuple[int, ...], *words: str, monkeypatch: Any) -> None:
    """What `dpo.py` does on the first rank of CPU nodes with so much memory."""
    monkeypatch.setattr(plan_check, "_host_bytes", lambda: round(host_gib * GIB))
    required = ["--model_name_or_path", str(folder), "--mixer_list", "rows.jsonl", "1.0", "--output_dir", str(folder)]
    small = ["--per_device_train_batch_size", "1", "--max_seq_length", "64"]
    config = parse(DPOConfig, [*required, *([] if "--max_seq_length" in words else small), *words])
    process = Process(rank=0, world_size=sum(nodes), local_rank=0, device=torch.device("cpu"), gpus_per_node=nodes)
    run = Run(
        process=process,
        layout=layout_of(config.parallel, nodes),
        directory=RunDirectory(path=folder),
        console=Console(speaks=True),
    )
    plan_check.check_plan_of_run(config, run, folder)


def test_processes_of_a_node_share_its_memory(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_on_host(folder, 64, (2, 2), monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert said.startswith("plan: needs ") and " of 32.0 GiB for each process of a node (most in: " in said


def test_a_run_that_surely_cannot_fit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"states alone need 17\.0 GiB.*It would fit .*--no_plan_check"):
        start_on_host(folder, 64, (4,), "--fsdp_shard_degree", "1", monkeypatch=monkeypatch)


def test_it_goes_on_when_told_to(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--fsdp_shard_degree", "1", "--no_plan_check"]
    start_on_host(folder, 64, (4,), *words, monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert "plan: needs" in said and "warning: the run cannot fit" in said


def test_a_plan_that_does_not_fit_is_said_in_colour_with_the_change_that_fits(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    rows = ["--per_device_train_batch_size", "64", "--max_seq_length", "1024"]
    start_on_host(folder, 4 * 20, (4,), *rows, monkeypatch=monkeypatch)  # states need 4.3 of 20 GiB
    said, yellow = capsys.readouterr().out, "\x1b[33m"
    assert said.startswith(f"{yellow}plan: needs ")
    _, warning = said.split(
        f"{yellow}warning: the plan does not fit: memory will most likely run out. It would fit with "
    )
    assert "--per_device_train_batch_size" in warning and "--gradient_accumulation_steps" in warning
    start_on_host(folder, 4 * 20, (4,), "--activation_checkpointing", "full", monkeypatch=monkeypatch)
    said = capsys.readouterr().out
    assert said.startswith("plan: needs ") and "warning" not in said and yellow not in said


class TestLauncher:
    """All learners of a cluster that is this machine share its memory; of another's nodes nothing is known here."""

    @pytest.fixture(autouse=True)
    def on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(plan_check, "_host_bytes", lambda: 64 * GIB)

    def config(self, folder: Path, *words: str) -> GRPOConfig:
        required = ["--model_name_or_path", str(folder), "--dataset_mixer_list", "rows.jsonl", "1.0"]
        return parse(GRPOConfig, [*required, "--output_dir", str(folder), *words])

    def test_this_machine(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = self.config(folder, "--num_learners_per_node", "2", "2")
        _say_plan(config, folder, Console(speaks=True))
        assert " of 16.0 GiB for each process" in capsys.readouterr().out
        with pytest.raises(InputError, match="the run cannot fit"):
            _say_plan(self.config(folder, "--num_learners_per_node", *"1111"), folder, Console(speaks=True))

    def test_another_cluster(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        config = self.config(folder, "--num_learners_per_node", *"1111", "--ray_address", "auto")
        _say_plan(config, folder, Console(speaks=True))
        assert capsys.readouterr().out == ""
