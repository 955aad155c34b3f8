"""The plan of a run that starts: against which memory, what is said, and when it is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.process import Process
from open_instruct.planning import plan
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.start_check import StartCheck, check_plan
from open_instruct.rl.checked_run import _apply_plan
from open_instruct.run import opening
from open_instruct.run.console import Console
from open_instruct.run.opening import Run
from open_instruct.run.run_directory import RunDirectory
from tests.refusals import refused

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


Start = Callable[..., str]


@pytest.fixture
def start(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Start:
    """What `dpo.py` does, and says, on the first rank of CPU nodes with so much memory."""

    def start(host_gib: float, nodes: tuple[int, ...], *words: str) -> str:
        monkeypatch.setattr(
            opening.psutil, "virtual_memory", lambda: SimpleNamespace(total=round(host_gib * GIB))
        )
        required = [
            "--model_name_or_path",
            str(folder),
            "--mixer_list",
            "rows.jsonl",
            "1.0",
            "--output_dir",
            "out",
        ]
        small = ["--per_device_train_batch_size", "1", "--max_seq_length", "64"]
        config = parse_run(
            DPOConfig, [*required, *([] if "--max_seq_length" in words else small), *words]
        )
        process = Process(rank=0, local_rank=0, device=torch.device("cpu"), gpus_per_node=nodes)
        layout, directory = (
            find_layout(config.parallel, nodes, config.backend),
            RunDirectory(path=folder),
        )
        run = Run(process=process, layout=layout, directory=directory, console=Console(speaks=True))
        opening.plan_run(config, run, folder)
        return " ".join(capsys.readouterr().out.split())  # lines go on at a word

    return start


def test_processes_of_a_node_share_its_memory(start: Start) -> None:
    said = start(64, (2, 2))
    assert said.startswith("memory: at most ") and " of 32.0 GiB per process (" in said


def test_run_that_surely_cannot_fit_is_refused_unless_told_to(start: Start) -> None:
    words = ["--fsdp_shard_degree", "1"]
    with refused("machine", None, "17.0 GiB", "--no_plan_check"):
        start(64, (4,), *words)
    said = start(64, (4,), *words, "--no_plan_check")
    assert "memory: at most" in said and "warning: the run cannot fit" in said


def test_plan_that_does_not_fit_is_said_in_colour_with_the_change_that_fits(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    yellow = "\x1b[33m"
    said = start(4 * 20, (4,), "--per_device_train_batch_size", "64", "--max_seq_length", "1024")
    assert said.startswith(f"{yellow}memory: at most ")  # states need 4.3 of 20 GiB
    _, warning = said.split(
        f"{yellow}warning: the plan does not fit: memory will most likely run out. "
    )
    assert "--per_device_train_batch_size" in warning and "--gradient_accumulation_steps" in warning
    said = start(4 * 20, (4,), "--activation_checkpointing", "full")
    assert said.startswith("memory: at most ") and "warning" not in said and yellow not in said


@pytest.mark.parametrize(
    "text", ["no json", '{"model_type": "gpt2"}', json.dumps(FIELDS | {"vocab_size": "x"})]
)
def test_model_that_cannot_be_read_has_no_plan_and_runs_all_the_same(
    folder: Path, text: str
) -> None:
    (folder / "config.json").write_text(text)
    verdict = checked(folder, memory_gib=0.001)
    assert verdict.line.startswith("plan: none (InputError: ") and not verdict.warning


def test_model_with_differing_layers_has_no_plan_and_runs(folder: Path) -> None:
    """The memory of one block is taken for that of all."""
    words = ["--activation_checkpointing", "selected_modules", "--activation_checkpointing_modules"]
    verdict = checked(folder, *words, "blocks.0.feed_forward", memory_gib=80)
    assert (
        verdict.line.startswith("plan: none (InputError: ")
        and "treats layers differently" in verdict.line
    )
    assert not verdict.warning
    assert checked(folder, *words, "blocks.*.feed_forward", memory_gib=80).line.startswith(
        "memory: at most"
    )


def checked(folder: Path, *words: str, memory_gib: float) -> StartCheck:
    needed = [
        "--model_name_or_path",
        str(folder),
        "--mixer_list",
        "rows.jsonl",
        "1.0",
        "--output_dir",
        "out",
    ]
    config = parse_run(DPOConfig, [*needed, *words])
    return check_plan(
        config, (8,), model_folder=str(folder), memory_bytes=round(memory_gib * GIB), on_cuda=True
    )


class TestCheckpointing:
    """--activation_checkpointing auto: as little is recomputed as fits, with room."""

    ROWS = ("--per_device_train_batch_size", "1", "--max_seq_length", "16384")

    def chosen(self, folder: Path, gpu_gib: float, *words: str, on_cuda: bool = True) -> str:
        required = [
            "--model_name_or_path",
            str(folder),
            "--mixer_list",
            "rows.jsonl",
            "1.0",
            "--output_dir",
            "out",
        ]
        rows = () if words[:1] == ("--per_device_train_batch_size",) else self.ROWS
        config = parse_run(DPOConfig, [*required, *rows, *words])
        memory_bytes = round(gpu_gib * GIB)
        check = check_plan(
            config, (8,), model_folder=str(folder), memory_bytes=memory_bytes, on_cuda=on_cuda
        )
        mode = opening.say_plan(check, Console(speaks=True), RunDirectory(path=folder))
        chosen = opening.apply_plan(config, mode)
        self.memory, self.optim = chosen.memory, chosen.optim
        return self.memory.activation_checkpointing

    def test_plan_decides(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.chosen(folder, 140) == "none"
        assert "--activation_checkpointing" not in capsys.readouterr().out
        assert self.chosen(folder, 36) == "selected_modules"
        (line,) = " ".join(capsys.readouterr().out.split()).split("memory: ")[1:]
        chosen = ["blocks.*.attention_norm", "blocks.*.feed_forward_norm", "blocks.*.feed_forward"]
        assert self.memory.activation_checkpointing_modules == chosen
        assert line.endswith(f"selected_modules {' '.join(chosen)}, in 1 microbatch a step")
        assert (
            json.loads(RunDirectory(path=folder).plan.read_text())[
                "activation_checkpointing_modules"
            ]
            == chosen
        )
        assert self.chosen(folder, 24) == "full"
        (line,) = " ".join(capsys.readouterr().out.split()).split("memory: ")[1:]
        assert (
            line.endswith("with --activation_checkpointing full, in 1 microbatch a step")
            and "warning" not in line
        )
        assert (
            json.loads(RunDirectory(path=folder).plan.read_text())["activation_checkpointing"]
            == "full"
        )

    def test_no_plan_is_made_twice(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = []
        monkeypatch.setattr(
            plan, "memory_by_phase", lambda run: made.append(run.workload) or memory_by_phase(run)
        )
        assert self.chosen(folder, 140) == "none"
        assert [each.checkpointing for each in made] == ["none"]
        made.clear()
        assert self.chosen(folder, 24) == "full"
        assert [each.checkpointing for each in made] == ["none", "full", *["selected_modules"] * 3]

    def test_microbatch_is_cut_and_the_batch_stays(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        rows = (
            "--per_device_train_batch_size",
            "8",
            "--max_seq_length",
            "2048",
            "--gradient_accumulation_steps",
            "2",
        )
        self.chosen(folder, 24, *rows)
        now, more = self.optim.per_device_train_batch_size, self.optim.gradient_accumulation_steps
        assert now < 8 and now * more == 16
        assert f"in {more} microbatches a step" in " ".join(capsys.readouterr().out.split())
        self.chosen(folder, 24, *rows, "--activation_checkpointing", "full")
        assert self.optim.per_device_train_batch_size == 8
        # All at once does not fit; one by one fits, with as much arithmetic.
        assert self.chosen(folder, 8, *rows) == "full"
        assert (self.optim.per_device_train_batch_size, self.optim.gradient_accumulation_steps) == (
            1,
            16,
        )

    def test_changes_of_the_plan_are_applied(self, folder: Path) -> None:
        for said in ("none", "selected_modules", "full", "offload"):
            assert self.chosen(folder, 24, "--activation_checkpointing", said) == said
        assert self.chosen(folder, 24, "--activation_memory_budget", "0.5") == "none"
        assert self.chosen(folder, 24, on_cuda=False) == "none"

    def test_run_without_a_plan_keeps_everything(self, folder: Path) -> None:
        assert self.chosen(folder / "gone", 24) == "none"


class TestLauncher:
    """All learners of a cluster that is this machine share its memory; of another's nodes nothing
    is known here.
    """

    @pytest.fixture(autouse=True)
    def on_a_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setattr(
            opening.psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GIB)
        )

    def config(self, folder: Path, *words: str) -> GRPOConfig:
        required = [
            "--model_name_or_path",
            str(folder),
            "--dataset_mixer_list",
            "rows.jsonl",
            "1.0",
        ]
        return parse_run(GRPOConfig, [*required, "--output_dir", str(folder), *words])

    def test_plan_knows_this_machine(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = self.config(folder, "--num_learners_per_node", "2", "2")
        directory = RunDirectory(path=tmp_path)
        _apply_plan(config, folder, Console(speaks=True), directory)
        assert json.loads(directory.plan.read_text())["memory_bytes"] == 16 * GIB
        assert (
            " of 16.0 GiB per process" in (said := capsys.readouterr().out)
            and "changes nothing" not in said
        )
        _apply_plan(self.config(folder, "--offload"), folder, Console(speaks=True), directory)
        assert "--offload true changes nothing without CUDA" in capsys.readouterr().out
        too_many = self.config(folder, "--num_learners_per_node", *"1111")
        with refused("machine"):
            _apply_plan(too_many, folder, Console(speaks=True), directory)

    def test_plan_knows_another_cluster(
        self, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = self.config(folder, "--num_learners_per_node", *"1111", "--ray_address", "auto")
        _apply_plan(config, folder, Console(speaks=True), RunDirectory(path=tmp_path))
        assert not RunDirectory(path=tmp_path).plan.exists()
        assert "activation checkpointing is off" in " ".join(capsys.readouterr().out.split())
        full = self.config(folder, "--ray_address", "auto", "--activation_checkpointing", "full")
        _apply_plan(full, folder, Console(speaks=True), RunDirectory(path=tmp_path))
        assert capsys.readouterr().out == ""
