"""Learners start together, fail with the first cause, and come back; whatever ends the driver ends them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from open_instruct.cluster.learner_call import LearnerLost
from open_instruct.cluster.learner_group import LearnerGroup
from open_instruct.cluster.placement import FleetShape, Placement, place
from open_instruct.cluster.watchdog import MARK_VARIABLE
from open_instruct.errors import InputError, RunError
from open_instruct.parallel import peers
from open_instruct.run.run_directory import RunDirectory
from tests.fleet.forked_workers import OF_RAY, python_that_forks
from tests.fleet.learners import Recruit
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY

READY_TIMEOUT_S = 600.0
SHAPE = FleetShape(learners_per_node=(2,), num_engines=1, devices_per_engine=1, shares_device=False)


def silent(text: str) -> None:
    pass


@pytest.fixture(scope="module")
def placement(local_ray: None) -> Iterator[Placement]:
    with place(SHAPE, timeout_s=60, say=silent, is_one_machine=True) as placement:
        yield placement


@pytest.fixture(scope="module")
def group_of_two(placement: Placement) -> Iterator[LearnerGroup[Recruit]]:
    group = LearnerGroup(Recruit, placement)
    group.wait_ready(READY_TIMEOUT_S)
    yield group
    group.shutdown()


@pytest.fixture
def group(group_of_two: LearnerGroup[Recruit]) -> Iterator[LearnerGroup[Recruit]]:
    """Both learners live and are free; a test may leave them in ruins."""
    try:
        group_of_two.start(Recruit.sum_of_ranks).result(3)
    except (LearnerLost, RuntimeError):
        group_of_two.restart(timeout_s=60)
        group_of_two.wait_ready(READY_TIMEOUT_S)
    return group_of_two


def test_every_rank_answers_in_rank_order(group: LearnerGroup[Recruit]) -> None:
    assert group.start_each(Recruit.double, [1, 2]).result(30) == [2, 4]
    assert group.start(Recruit.sum_of_ranks).result(30) == [1, 1]
    assert len(set(group.pids())) == 2


def test_ray_knows_learners_by_the_name_of_their_class(group: LearnerGroup[Recruit]) -> None:
    titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group.pids()]
    assert all(title.startswith("ray::Recruit") for title in titles)


def test_a_call_runs_beside_the_driver(group: LearnerGroup[Recruit]) -> None:
    first, second = group.start(Recruit.add, 1, 2), group.start(Recruit.add, 3, 4)
    assert (second.result(30), first.result(30)) == ([7, 7], [3, 3])


@pytest.mark.parametrize(
    ("kind", "error_type", "message"),
    [("input", InputError, "row 7 has no prompt"), ("run", RunError, "the disk is full"), ("bug", KeyError, "no such")],
)
def test_what_a_learner_raises_arrives_as_it_was(
    group: LearnerGroup[Recruit], kind: str, error_type: type[Exception], message: str
) -> None:
    with pytest.raises(error_type) as caught:
        group.start(Recruit.fail, kind, 1).result(30)
    assert type(caught.value) is error_type
    assert message in str(caught.value)
    assert "Traceback" not in str(caught.value)


def test_a_killed_rank_is_named_and_not_those_that_missed_it(group: LearnerGroup[Recruit]) -> None:
    pid = group.pids()[1]
    call = group.start(Recruit.meet, 1, 600.0)
    time.sleep(1.0)  # into the barrier
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(LearnerLost, match=rf"rank 1 .*pid {pid}\) was lost during meet: .*killed") as caught:
        call.result(timeout_s=60)  # far below the ten minutes for which rank 1 would sleep
    assert "rank 0" not in str(caught.value)


def test_a_restarted_group_meets_anew(group: LearnerGroup[Recruit]) -> None:
    before = group.pids()
    group.restart(timeout_s=60)
    group.wait_ready(READY_TIMEOUT_S)
    assert group.start(Recruit.sum_of_ranks).result(60) == [1, 1]
    assert not set(before) & set(group.pids())


def test_a_frozen_rank_is_told_from_those_that_wait_for_it(group: LearnerGroup[Recruit]) -> None:
    with pytest.raises(LearnerLost, match=r"no answer to fail within 3 s .*the process of rank 0 is stopped"):
        group.start(Recruit.fail, "freeze", 0).result(3)


def test_a_frozen_rank_is_known_long_before_a_step_may_be_over(
    group: LearnerGroup[Recruit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENT_S", 6.0)  # in earnest a minute and a half
    pid = group.pids()[0]
    with pytest.raises(
        LearnerLost, match=rf"rank 0 .*pid {pid}\) was lost during fail, while .+: its process is stopped"
    ):
        group.start(Recruit.fail, "freeze", 0).result(3600)


def test_a_rank_that_works_for_long_is_left_alone(
    group: LearnerGroup[Recruit], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "SILENT_S", 1.0)
    group.start(Recruit.meet, 1, 12.0).result(60)


def test_a_constructor_refuses_in_its_own_words(local_ray: None) -> None:
    with place(SHAPE, timeout_s=60, say=silent, is_one_machine=True) as placement:
        refused = LearnerGroup(Recruit, placement, arguments={"fault": "input"})
        with pytest.raises(InputError, match=r"^the checkpoint lacks blocks\.0\.w1$"):
            refused.wait_ready(READY_TIMEOUT_S)
        refused.shutdown()


DRIVER = """
import os, sys, time
from pathlib import Path
from open_instruct.config.rollout_sections import FleetSection
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.cluster.learner_group import LearnerGroup
from open_instruct.run.run_directory import RunDirectory
from open_instruct.cluster.placement import FleetShape
from tests.fleet.idler import Idler
from tests.fleet.learners import Recruit

end, learner_class = sys.argv[1], {"kill": Idler, "leave": Recruit}[sys.argv[1]]
shape = FleetShape(learners_per_node=(1, 1), num_engines=1, devices_per_engine=1, shares_device=False)
start = start_cluster(FleetSection(), shape, say=print, logs_folder=Path("logs"))
with start as cluster, cluster.placing(shape) as places:
    group = LearnerGroup(learner_class, places)
    group.wait_ready(120)
    import ray
    Path("folder").write_text(ray._private.worker._global_node.get_session_dir_path())
    # As the sender of weights does.
    read_mark = ray.remote(num_cpus=0)(lambda: os.environ["OPEN_INSTRUCT_FLEET"])
    Path("/dev/shm", ray.get(read_mark.remote())).touch()
    group.start(learner_class.fail, "freeze", 1)
    RunDirectory(path=Path()).write_pids(driver=0, learners=group.pids(), engines=[])
    if end == "kill":
        time.sleep(600)
"""


def processes_of(driver: int, folder: Path) -> list[int]:
    """Living processes of a local Ray: those that carry the driver's mark, and those that were given its folder."""
    mark = f"{MARK_VARIABLE}=open_instruct-{driver}-".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile; one that waits to be reaped has neither
            marked = mark in (process / "environ").read_bytes()
            if marked or (str(folder).encode() in (process / "cmdline").read_bytes()):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_nothing_outlives_the_driver(tmp_path: Path, end: str) -> None:
    """Workers are what Ray starts for its users where the driver is killed, and are forked where it leaves."""
    (tmp_path / "driver.py").write_text(DRIVER)
    driver = programs.start(
        [str(tmp_path / "driver.py"), end],
        environment={"PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": "127.0.0.1:1"} | (OF_RAY if end == "leave" else {}),
        cwd=tmp_path,
        constants={"sys:executable": python_that_forks()} if end == "leave" else None,
    )
    try:
        pids_file = tmp_path / "pids.json"
        deadline = time.monotonic() + 120
        while not pids_file.exists():
            assert driver.poll() is None, driver.said()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        folder = Path((tmp_path / "folder").read_text()).parent
        if end == "kill":
            assert {*json.loads(pids_file.read_text())["learners"]} < {*processes_of(driver.pid, folder)}
            driver.send_signal(signal.SIGKILL)
        assert driver.wait(60) == (0 if end == "leave" else -signal.SIGKILL)
    finally:
        driver.send_signal(signal.SIGKILL)

    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (folder.exists() or processes_of(driver.pid, folder)):
        time.sleep(0.1)
    assert processes_of(driver.pid, folder) == []
    assert not folder.exists()
    assert not {name for name in os.listdir("/dev/shm") if f"open_instruct-{driver.pid}-" in name}
    assert list((tmp_path / "logs").glob("learner-[01].*"))


def test_the_file_of_process_ids_is_whole(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.write_pids(driver=1, learners=[2, 3], engines=[4])
    assert json.loads(directory.pids.read_text()) == {"driver": 1, "learners": [2, 3], "engines": [4]}
    directory.write_pids(driver=1, learners=[5, 6], engines=[4])
    assert json.loads(directory.pids.read_text())["learners"] == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["pids.json"]
