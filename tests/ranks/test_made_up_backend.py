"""A backend that the package does not know trains DPO: what a third one costs is its own file and
an entry point.
"""

from pathlib import Path

import pytest

from tests.plain_backend.installed import REPOSITORY, environment_with_plain
from tests.ranks import programs
from tests.ranks.launch import run_ranks
from tests.ranks.train_case import TrainCase, free_ports

pytestmark = pytest.mark.extended

DPO = REPOSITORY / "open_instruct" / "dpo.py"
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return environment_with_plain(tmp_path_factory.mktemp("installed"))


def run(words: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    process = programs.start([str(DPO), *words], environment=environment)
    try:
        said, _ = process.communicate(TIMEOUT_S)
    finally:
        process.end()
    return process.wait(), said


def test_third_backend_takes_the_steps_of_the_others_and_resumes(
    dpo_case: TrainCase, environment: dict[str, str]
) -> None:
    own, moving = (
        {"backend": "plain", "checkpointing_steps": 3},
        {"ref_policy_update_freq": 2, "alpha": 0.5},
    )
    of_fsdp2: dict[str, dict[str, object]] = {"of_fsdp2": {}, "moves_of_fsdp2": moving}
    commands = [
        dpo_case.command(name, single_gpu_mode=True, **flags) for name, flags in of_fsdp2.items()
    ]
    run_ranks(
        1,
        "tests.ranks.jobs.train_runs:run_each",
        commands=commands,
        ports=free_ports(len(commands)),
    )
    for name, flags in {
        "plain": own,
        "plain_again": own | {"output_dir": dpo_case.folder / "plain"},
        "plain_moves": own | moving,
    }.items():
        if name == "plain_again":  # what was saved after the last step is gone, as after a kill
            (dpo_case.folder / "plain" / "step5" / "checkpoint.json").unlink()
        code, told = run(dpo_case.command(name, **flags), environment)
        assert code == 0, told
        if name == "plain":
            assert "plain PyTorch on cpu" in told
            first = dpo_case.trajectory("plain")
    assert first == [
        pytest.approx(of_step, rel=1e-5) for of_step in dpo_case.trajectory("of_fsdp2")
    ]
    assert dpo_case.trajectory("plain") == first
    moves = dpo_case.trajectory("moves_of_fsdp2")
    assert dpo_case.trajectory("plain_moves") == [
        pytest.approx(of_step, rel=1e-5) for of_step in moves
    ]
    assert moves[-1] != pytest.approx(first[-1], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"backend": "plian"},
            "--backend plian: takes deepspeed or olmo_core or plain; did you mean plain?",
        ),
        (
            {"backend": "plain", "param_dtype": "bfloat16"},
            "--backend plain computes in float32, not bfloat16",
        ),
    ],
)
def test_third_backend_refuses_flags_that_it_cannot_follow(
    dpo_case: TrainCase, environment: dict[str, str], flags: dict[str, str], said: str
) -> None:
    code, told = run(dpo_case.command("refused", **flags), environment)
    assert code == 2 and said in told, told
    assert not (Path(dpo_case.folder) / "refused").exists()
