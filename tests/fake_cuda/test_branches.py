"""Every CUDA branch outside of a training step, without a GPU, and no line that speaks of CUDA
without a test.
"""

from typing import Any

import pytest

from tests.fake_cuda.branches import BRANCHES, RESTING, STEPS
from tests.fake_cuda.lines import PACKAGE, statements
from tests.fake_cuda.program import REPOSITORY, results_of, skip_without_compiler

pytestmark = pytest.mark.extended

COPIES, BACK = "blocking copy, cuda to cpu", "blocking copy, cpu to cuda"
FOUND: dict[str, Any] = {
    "host_copies": {
        "waits": ["synchronize()"],  # of the stream that they are made on
        "kinds": ["torch.float32 cpu [3]", "torch.bfloat16 cpu [2, 2]"],
        "are_pinned": True,
        "are_kept": True,
        "thread": [7, [0]],
    },
    "weights_nccl": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cuda:0"],
        "sent": ["cuda:0"],
        "waits": [],
    },
    "weights_ipc": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cuda:0"],
        "sent": [],
        "waits": ["synchronize()"],
    },
    "weights_gathered": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cuda:0"],
        "sent": [],
        "waits": ["synchronize()"],
    },
    "weights_gloo": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cpu"],
        "sent": ["cpu"],
        "waits": [COPIES],
    },
    "weights_shm": {"is_all": True, "kinds": ["torch.bfloat16 cpu"], "sent": [], "waits": [COPIES]},
    "weights_nccl_of_the_host": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cuda:0"],
        "sent": ["cuda:0"],
        "waits": [BACK],
    },
    "weights_ipc_of_the_host": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cuda:0"],
        "sent": [],
        "waits": [BACK, "synchronize()"],
    },
    "weights_shm_of_the_host": {
        "is_all": True,
        "kinds": ["torch.bfloat16 cpu"],
        "sent": [],
        "waits": [],
    },
    "changes": {
        "compared": ["torch.int16 cuda:0 [8], before torch.int16 cpu"],
        "waits": [
            [f"{COPIES}, of (8,)"],
            ["blocking copy, cpu to cuda, of (8,)", "nonzero", f"{COPIES}, of (8,)"],
        ],
        "are_pinned": True,
        "staged": ["cuda:1", "version 5"],
    },
    "export": {"problems": [], "first": ["cuda:0"], "is_whole": True},
    "placement": {
        "two nodes": [
            ["STRICT_SPREAD", [{"GPU": 2, "CPU": 2}, {"GPU": 4, "CPU": 4}]],
            ["PACK", [{"GPU": 2, "CPU": 1}, {"GPU": 2, "CPU": 1}]],
            *([1, 1], [1, 2]),  # CPUs and GPUs of a learner, and of an engine
        ],
        "one device": [["PACK", [{"GPU": 1, "CPU": 2}]], [1, 0.5], [1, 0.5]],
        "in turns": [["STRICT_SPREAD", [{"GPU": 4, "CPU": 8}]], [1, 1], [1, 0]],
        "some in turns": [
            ["STRICT_SPREAD", [{"GPU": 2, "CPU": 4}]],
            ["PACK", [{"GPU": 1, "CPU": 1}, {"GPU": 1, "CPU": 1}]],
            *([1, 1], [1, 0], [1, 1]),  # of a learner, of an engine on its GPU, and of another
        ],
        "with learners": [True, True, False, False],
        "engines see": [["2", "3"], ["7", "10"]],
        "missing": "asked: nodes of 2 and 4 GPUs for learners, and 2 engines of 2 GPUs; the cluster has "
        "2 nodes of 4 "
        "GPUs, of which 3 are free",
        "allocator": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
        "given": ["3"],
        "sees": ["2,3", "4,5,6,7"],
    },
    "engine": {
        "told": {
            "kv_cache_memory_bytes": None,
            "enable_chunked_prefill": None,
            "enforce_eager": False,
            "async_scheduling": True,
            "enable_return_routed_experts": True,
            "enable_sleep_mode": True,
        },
        "turns": [
            ["sleep", [], {"level": 2, "mode": "keep"}],
            ["wake_up", [["weights"]], {}],
            ["wake_up", [["kv_cache"]], {}],
        ],
        "limits_threads": False,
    },
    "talking": {
        "takes_vllm": True,
        "in_process": {"dtype": "auto", "enforce_eager": False},
        "served_as_on_a_cpu": False,
        "scored_in": ["cuda:0", "torch.bfloat16"],
    },
    "check": [80, True],
    "adams": ["FusedAdam", "DeepSpeedCPUAdam"],
    "callbacks": ["memory_history", "step_profiler"],
    "plans": True,
    **{f"step_{name}": True for name in STEPS},
}
ELSEWHERE = {
    "rl/fleet.py": ("tests/unit/cluster/test_fleet_start.py", "on_gpus: bool = True"),
    "training/model/float8.py": (
        "tests/unit/training/test_float8.py",
        'GPU = torch.device("cuda", 0)',
    ),
    "training/deepspeed/planned": (
        "tests/unit/planning/test_deepspeed_plan.py",
        "on_cuda",
    ),
    "training/deepspeed/deepcompile": (
        "tests/unit/training/test_deepcompile.py",
        'require_cuda(torch.device("cuda", 0))',
    ),
    "host = find_cpu_host": ("tests/unit/run/test_alarms.py", 'find_cpu_host("cuda")'),
    "models/delta_rule/": ("tests/fake_cuda/cases.py", '"dpo_hybrid": Case('),
    "if family.delta is None or torch": ("tests/unit/models/test_delta_rule.py", "lambda: on_gpu"),
    "for layer in model.modules()": ("tests/fleet/test_grpo_kinds.py", "agree_on_experts"),
    'if self.device.type == "cpu":': ("tests/fleet/test_weight_sync_engine.py", "TIED"),
    "has_cache_size = settings": (
        "tests/unit/generation/test_engine_choices.py",
        "explain_memory_error",
    ),
    "plan_check = check_plan(": (
        "tests/unit/commands/test_check.py",
        "where_there_is_a_driver_of_one",
    ),
    'remedy = "Install Triton': (
        "tests/unit/training/test_kernels.py",
        '"--compile_model", "Triton"',
    ),
    "run/scorers.py": (
        "tests/unit/commands/test_score_command.py",
        "test_scores_are_those_of_transformers",
    ),
    "commands/serving/served_sessions.py": (
        "tests/unit/commands/test_served_sessions.py",
        "on_cuda=True",
    ),
    "planning/": ("tests/unit/planning/test_planning_memory.py", "on_cuda"),
}
"""Rooms, files and beginnings of statements that other tests come by: which test does, and the
words that say so.
"""


@pytest.fixture(scope="session")
def found() -> dict[str, Any]:
    skip_without_compiler()
    return results_of("tests.fake_cuda.branches")


@pytest.mark.parametrize("name", FOUND)
def test_branch_comes_to_what_it_should(name: str, found: dict[str, Any]) -> None:
    result = found["results"][name]
    assert not isinstance(result, dict) or "error" not in result, result["error"]
    assert result == FOUND[name]


def test_run_starts_on_its_gpu(found: dict[str, Any]) -> None:
    started = found["results"]["process"]
    assert "error" not in started, started["error"]
    assert (started["backends"], started["device"], started["num_to_start"]) == (
        ["cpu:gloo,cuda:nccl"],
        "cuda:0",
        8,
    )
    assert "this machine has 8 GPUs, and the run takes one" in started["said"]
    assert "on cuda" in started["said"] and "80.0 GiB" in started["said"], started["said"]


def test_driver_plans_its_learners_for_gpus(found: dict[str, Any]) -> None:
    decided = found["results"]["driver"]
    assert "error" not in decided, decided["error"]
    assert decided["ways"] == ["ipc", "nccl", "nccl"]
    assert decided["placed"] == ["shared", "shared"]
    assert decided["memory"]


TABLES_OF_ROPE = 10 * 1024
"""Sines and cosines of two tiny models, and a few seeds: all that stays on the device at rest."""


@pytest.mark.parametrize("name", RESTING)
def test_resting_learner_leaves_next_to_nothing_on_the_device(
    name: str, found: dict[str, Any]
) -> None:
    results = found["results"]["resting"]
    assert "error" not in results, results["error"]
    before, at_rest, back = results[name]["bytes"]
    assert at_rest <= TABLES_OF_ROPE < before
    assert at_rest < back <= before  # ZeRO 3 has dropped what it had gathered
    # All copies are from and into pinned memory, and waited for once.
    assert results[name]["waits"] == ["torch.cuda.synchronize()"]


def test_no_line_that_speaks_of_cuda_is_without_a_test(found: dict[str, Any]) -> None:
    assert found["results"].keys() == BRANCHES.keys()
    seen = found["lines"]
    missed = [
        f"{name}:{first}"
        for name, spans in statements().items()
        for first, last in spans.values()
        if not {*range(first, last + 1)} & {*seen[name]} and not is_elsewhere(name, first)
    ]
    assert missed == [], (
        "a branch in branches.py is to come by these, or a test that ELSEWHERE names"
    )


def is_elsewhere(name: str, line: int) -> bool:
    statement = (PACKAGE / name).read_text().splitlines()[line - 1].strip()
    return any(name.startswith(place) or statement.startswith(place) for place in ELSEWHERE)


@pytest.mark.parametrize("place", ELSEWHERE)
def test_branch_that_is_left_to_another_test_is_tested_there(place: str) -> None:
    test, words = ELSEWHERE[place]
    assert words in (REPOSITORY / test).read_text()
