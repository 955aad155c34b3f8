"""How a fleet is started on GPUs, which are pretended: in which order, with which memory and which
batches.
"""

import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from open_instruct.cluster.addresses import Host, Whereabouts
from open_instruct.cluster.placement import FleetShape
from open_instruct.core.errors import InputError
from open_instruct.rl import fleet
from open_instruct.run.run_directory import RunDirectory
from open_instruct.weight_sync.folder import choose_sync_folder
from tests.unit.fake_rollouts import grpo_config

HERE = Host("10.0.0.1", "a")
GROWS, STAYS = (
    {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{grows}"} for grows in (True, False)
)


class Started:
    """Notes what is started, and waited for, in the place of learners and engines."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.learners: dict[str, Any] = {}
        self.engines: list[tuple[Any, dict[str, str]]] = []
        self.said: list[str] = []

    def learner_group(self, learner_class: type, placement: Any, **options: Any) -> Any:
        self.events.append("learners begin")
        self.learners = options
        return SimpleNamespace(
            wait_ready=lambda timeout_s: self.events.append("learners are ready"),
            start=self.call_learners,
            find_gpu_ids=lambda rank, count: [str(10 + rank + each) for each in range(count)],
            shutdown=lambda: None,
            pids=list,
        )

    def call_learners(self, method: Any) -> Any:
        self.events.append(method.__name__)
        return SimpleNamespace(result=lambda timeout_s: [None])

    def engine(
        self, index: int, settings: Any, placement: Any, *, environment: dict[str, str]
    ) -> Any:
        self.events.append("engine begins")
        self.engines.append((settings, environment))
        return SimpleNamespace(wait_ready=lambda timeout_s: self.events.append("engine is ready"))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def start(*flags: str, on_gpus: bool = True) -> Started:
        config = grpo_config(*flags)
        it = Started()
        where = Whereabouts(driver=HERE, learners=frozenset({HERE}), engines=frozenset({HERE}))
        placement = SimpleNamespace(
            on_gpus=on_gpus,
            whereabouts=lambda: where,
            shape=FleetShape.of(config.fleet, config.parallel),
            first_rank=lambda index: index * config.fleet.vllm_tensor_parallel_size,
            takes_turns=lambda index: index < placement.shape.num_turning_engines,
        )
        monkeypatch.setattr(fleet, "start_cluster", lambda *args, **kwargs: nullcontext(placement))
        monkeypatch.setattr(fleet, "LearnerGroup", it.learner_group)
        monkeypatch.setattr(fleet, "RayEngine", it.engine)
        pool = SimpleNamespace(close=lambda: None, pids=list)
        monkeypatch.setattr(fleet, "EnginePool", lambda *args, **kwargs: pool)
        console = SimpleNamespace(
            say=it.said.append, warn=lambda text: None, report=lambda title, lines: list(lines)
        )
        run = SimpleNamespace(
            config=config,
            console=console,
            directory=RunDirectory(path=tmp_path),
            pretrained=SimpleNamespace(folder=tmp_path, tokenizer_folder=tmp_path),
            engine_folder=tmp_path,
            chat=SimpleNamespace(turn_end_token_ids=tuple),
            environments=None,
            prompts=None,
            held_out=None,
        )
        with fleet.start_fleet(object, run):  # type: ignore[arg-type, type-var]
            pass
        return it

    return start


def test_engine_waits_for_the_learner_whose_device_it_shares(started: Any) -> None:
    """vLLM takes its share of what it finds free."""
    it = started("--single_gpu_mode")
    assert it.events[:3] == ["learners begin", "learners are ready", "engine begins"]
    assert it.learners["arguments"]["weight_sync_backend"] == "ipc"
    # Memory that is handed over does not lie in segments that grow.
    assert it.learners["environment"] == STAYS
    assert STAYS.items() <= it.engines[0][1].items()


def test_engines_start_beside_learners_whose_memory_grows_on_other_devices(started: Any) -> None:
    """Engines of several GPUs hand buffers over to each other's processes, which could not map
    it.
    """
    it = started("--num_learners_per_node", "2", "--vllm_num_engines", "2")
    assert it.events[:4] == [
        "learners begin",
        "engine begins",
        "engine begins",
        "learners are ready",
    ]
    assert it.learners["environment"] == GROWS
    for settings, environment in it.engines:
        assert STAYS.items() <= environment.items()
        assert settings.batching.schedules_ahead
        assert settings.batching.max_num_seqs == 256


def test_engines_that_take_turns_begin_on_the_gpus_that_learners_have_left(started: Any) -> None:
    flags = "--placement shared --num_learners_per_node 4 --vllm_tensor_parallel_size 2"
    it = started(*flags.split())
    assert it.events[:5] == [
        "learners begin",
        "learners are ready",
        "move_to_host",
        "engine begins",
        "engine begins",
    ]
    assert it.learners["arguments"]["weight_sync_backend"] == "gathered"
    assert it.learners["environment"] == STAYS
    seen = [environment["CUDA_VISIBLE_DEVICES"] for _, environment in it.engines]
    assert seen == ["10,11", "12,13"]


def test_first_engines_take_turns_and_the_others_have_gpus_of_their_own(started: Any) -> None:
    it = started(
        *["--placement", "mixed", "--num_learners_per_node", "2", "--vllm_num_engines", "4"]
    )
    assert it.events[2] == "move_to_host"
    assert it.learners["arguments"]["weight_sync_backend"] == "shm"
    seen = [environment.get("CUDA_VISIBLE_DEVICES") for _, environment in it.engines]
    assert seen == ["10", "11", None, None]
    assert any("4 engines, the first 2 in turns" in line for line in it.said)


def test_one_gpu_may_be_shared_in_turns_too(started: Any) -> None:
    it = started("--placement", "shared", "--single_gpu_mode")
    assert it.events[2:4] == ["move_to_host", "engine begins"]
    assert it.learners["arguments"]["weight_sync_backend"] == "ipc"
    assert "CUDA_VISIBLE_DEVICES" not in it.engines[0][1]  # each has half of what Ray gives


def test_engines_that_take_turns_on_a_cpu_have_shared_memory_for_weights(started: Any) -> None:
    it = started("--placement", "shared", "--num_learners_per_node", "2", on_gpus=False)
    assert it.events.count("engine begins") == 2
    assert it.learners["arguments"]["weight_sync_backend"] == "shm"
    assert all("CUDA_VISIBLE_DEVICES" not in environment for _, environment in it.engines)


@pytest.mark.parametrize("flags", ["--vllm_num_engines 2", "--single_gpu_mode"])
def test_settings_of_the_shell_that_engines_drop_are_named_once(
    started: Any, monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:128")
    told = [line for line in started(*flags.split()).said if "PYTORCH_ALLOC_CONF" in line]
    assert [("engines" in line, "learners" in line) for line in told] == [
        (True, flags == "--single_gpu_mode")
    ]
    assert not [line for line in started(on_gpus=False).said if "ALLOC_CONF" in line]


@pytest.mark.parametrize("asked", [None, "there", "not there"])
def test_folder_for_weights_is_there_as_long_as_the_fleet(
    started: Any, tmp_path: Path, asked: str | None
) -> None:
    (tmp_path / "there").mkdir()
    within = tmp_path / (asked or "")
    there: list[list[str]] = []

    def look(*args: Any, **kwargs: Any) -> Any:
        there.append([path.name for path in within.iterdir() if path.name != "there"])
        return SimpleNamespace(wait_ready=lambda timeout_s: None, shutdown=lambda: None, pids=list)

    flags = ["--weight_sync_backend", "files"]
    flags += ["--weight_sync_folder", str(within)] if asked else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Started, "learner_group", look)
        if asked == "not there":
            with pytest.raises(InputError, match=f"--weight_sync_folder {within}: No such file"):
                started(*flags, on_gpus=False)
        else:
            started(*flags, on_gpus=False)
    expected = {None: ["weight_sync"], "there": [choose_sync_folder(str(within), tmp_path).name]}
    assert there == ([expected[asked]] if asked in expected else [])
    assert not (tmp_path / "weight_sync").exists() and not list((tmp_path / "there").iterdir())


def test_memory_settings_are_left_alone_on_a_cpu(started: Any) -> None:
    it = started(on_gpus=False)
    assert "PYTORCH_CUDA_ALLOC_CONF" not in it.learners["environment"]
    ((settings, environment),) = it.engines
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert not settings.batching.schedules_ahead
    assert (settings.batching.max_num_seqs, settings.batching.max_num_batched_tokens) == (64, 4096)


@pytest.mark.parametrize(
    ("flags", "is_held"), [("--use_lora", False), ("--use_lora --lora_sync adapter", True)]
)
def test_engine_holds_the_adapter_where_it_is_sent_alone(
    started: Any, flags: str, is_held: bool
) -> None:
    it = started(*flags.split(), on_gpus=False)
    ((settings, _),) = it.engines
    assert settings.adapter == (it.learners["arguments"]["config"].lora if is_held else None)


@pytest.mark.parametrize(
    ("flags", "of_learners", "of_engines"),
    [
        ("", 4, 4),
        ("--num_learners_per_node 2 --vllm_num_engines 2", 2, 2),
        ("--num_learners_per_node 9", 1, 1),
        ("--single_gpu_mode", 4, 4),
        # In turns: all cores for each; a group of learners divides them by itself.
        ("--async_steps 0", None, 8),
        ("--async_steps 0 --vllm_num_engines 2 --vllm_tensor_parallel_size 2", None, 2),
    ],
)
def test_processes_that_compute_at_once_share_the_cores(
    started: Any,
    monkeypatch: pytest.MonkeyPatch,
    flags: str,
    of_learners: int | None,
    of_engines: int,
) -> None:
    """Two threads for each of two processes on two cores took three times as long as one each."""
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    it = started(*flags.split(), on_gpus=False)
    told = it.learners["environment"].get("OMP_NUM_THREADS")
    assert told == (of_learners and str(of_learners))
    assert {environment["OMP_NUM_THREADS"] for _, environment in it.engines} == {str(of_engines)}
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    it = started(*flags.split(), on_gpus=False)
    # Else it has the run's.
    assert it.learners["environment"].get("OMP_NUM_THREADS") == (of_learners and "3")
    assert {environment["OMP_NUM_THREADS"] for _, environment in it.engines} == {"3"}


def test_threads_on_gpus_are_left_alone(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    it = started()
    assert "OMP_NUM_THREADS" not in it.learners["environment"] | it.engines[0][1]
