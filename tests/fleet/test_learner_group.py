"""Places on this machine, and learners in them: they start together, fail with the first cause,
come back, and end with the driver.
"""

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
from open_instruct.cluster.placement import FleetShape, place
from open_instruct.cluster.watchdog import MARK_VARIABLE
from open_instruct.core.errors import InputError, RunError
from open_instruct.parallel import heartbeats
from open_instruct.run.run_directory import RunDirectory
from tests.fleet.idler import Idler
from tests.fleet.learners import Recruit
from tests.ranks import programs
from tests.ranks.fork_server import REPOSITORY
from tests.waiting import eventually

pytestmark = pytest.mark.extended

READY_TIMEOUT_S = 600.0


def shape_of(*learners_per_node: int, devices: int = 1, shares_device: bool = False) -> FleetShape:
    return FleetShape(
        learners_per_node=learners_per_node,
        num_engines=1,
        devices_per_engine=devices,
        shares_device=shares_device,
    )


def silent(text: str) -> None:
    pass


class TestPlaces:
    def test_cpu_stands_for_several_nodes_and_says_so(self, local_ray: None) -> None:
        said: list[str] = []
        with place(shape_of(2, 1), timeout_s=30, say=said.append, is_one_machine=True) as placement:
            pass
        assert said == ["this machine stands for 2 nodes of learners"]
        assert [placement.node_and_local_rank(rank) for rank in range(3)] == [
            (0, 0),
            (0, 1),
            (1, 0),
        ]

    def test_nodes_of_a_joined_cluster_are_never_pretended(self, local_ray: None) -> None:
        with pytest.raises(
            RunError, match=r"nodes of 2 and 1 CPU slots for learners.*has 1 node of 16 CPU slots"
        ):
            place(shape_of(2, 1), timeout_s=0.5, say=silent, is_one_machine=False).__enter__()

    def test_progress_is_reported_while_it_waits(
        self, local_ray: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("open_instruct.cluster.placement.SECONDS_BETWEEN_REPORTS", 0.2)
        said: list[str] = []
        with pytest.raises(RunError):
            place(shape_of(17), timeout_s=1, say=said.append, is_one_machine=False).__enter__()
        assert said[0].startswith(
            "waiting for the cluster (0 of 1 s): asked: 1 node of 17 CPU slots"
        )

    def test_too_much_is_refused_at_once(self, local_ray: None) -> None:
        with pytest.raises(
            InputError,
            match=r"1 engine of 2 CPU slots; this machine .* 16 CPU slots.*--ray_address",
        ):
            place(
                shape_of(15, devices=2), timeout_s=60, say=silent, is_one_machine=True
            ).__enter__()

    def test_learner_and_engine_share_a_device(self, local_ray: None) -> None:
        with place(
            shape_of(1, shares_device=True), timeout_s=30, say=silent, is_one_machine=True
        ) as placement:
            learner, engine = placement.learner_options(0), placement.engine_options(0)
        assert learner == engine | {"scheduling_strategy": learner["scheduling_strategy"]}
        assert (
            learner["scheduling_strategy"].placement_group.id
            == engine["scheduling_strategy"].placement_group.id
        )


def test_constructor_refuses_in_its_own_words(local_ray: None) -> None:
    with place(shape_of(2), timeout_s=60, say=silent, is_one_machine=True) as placement:
        refused = LearnerGroup(Idler, placement, arguments={"refuses": True})
        with pytest.raises(InputError, match=r"^the checkpoint lacks blocks\.0\.w1$"):
            refused.wait_ready(READY_TIMEOUT_S)
        refused.shutdown()


class TestTwoLearners:
    """One group for all: the learners live and are free after each test but the last."""

    @pytest.fixture(scope="class")
    def group(self, local_ray: None) -> Iterator[LearnerGroup[Recruit]]:
        with place(shape_of(2), timeout_s=60, say=silent, is_one_machine=True) as placement:
            group = LearnerGroup(Recruit, placement)
            group.wait_ready(READY_TIMEOUT_S)
            yield group
            group.shutdown()

    def test_every_rank_answers_in_rank_order(self, group: LearnerGroup[Recruit]) -> None:
        assert group.start_each(Recruit.double, [1, 2]).result(30) == [2, 4]
        assert group.start(Recruit.sum_of_ranks).result(30) == [1, 1]
        assert len(set(group.pids())) == 2

    def test_ray_knows_learners_by_the_name_of_their_class(
        self, group: LearnerGroup[Recruit]
    ) -> None:
        titles = [Path(f"/proc/{pid}/cmdline").read_text() for pid in group.pids()]
        assert all(title.startswith("ray::Recruit") for title in titles)

    def test_call_runs_beside_the_driver(self, group: LearnerGroup[Recruit]) -> None:
        first, second = group.start(Recruit.add, 1, 2), group.start(Recruit.add, 3, 4)
        assert (second.result(30), first.result(30)) == ([7, 7], [3, 3])

    @pytest.mark.parametrize(
        ("kind", "error_type", "message"),
        [
            ("input", InputError, "row 7 has no prompt"),
            ("run", RunError, "the disk is full"),
            ("bug", KeyError, "no such"),
        ],
    )
    def test_error_of_a_learner_arrives_as_it_was_raised(
        self, group: LearnerGroup[Recruit], kind: str, error_type: type[Exception], message: str
    ) -> None:
        """Also where the other learner waits in a collective meanwhile."""
        with pytest.raises(error_type) as caught:
            group.start(Recruit.fail, kind, 1).result(30)
        assert type(caught.value) is error_type
        assert message in str(caught.value)
        assert "Traceback" not in str(caught.value)
        group.start(Recruit.catch_up, kind, 1).result(30)

    def test_rank_that_works_for_long_is_left_alone(
        self, group: LearnerGroup[Recruit], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(heartbeats, "SILENT_S", 1.0)
        group.start(Recruit.meet, 1, 12.0).result(60)

    def test_killed_rank_is_named_and_the_group_comes_back(
        self, group: LearnerGroup[Recruit]
    ) -> None:
        """The rank that died, and not those that missed it."""
        before = group.pids()
        call = group.start(Recruit.meet, 1, 600.0)
        time.sleep(1.0)  # into the barrier
        os.kill(before[1], signal.SIGKILL)
        with pytest.raises(
            LearnerLost, match=rf"rank 1 .*pid {before[1]}\) was lost during meet: .*killed"
        ) as caught:
            call.result(timeout_s=60)  # far below the ten minutes for which rank 1 would sleep
        assert "rank 0" not in str(caught.value)
        group.restart(timeout_s=60)
        group.wait_ready(READY_TIMEOUT_S)
        assert group.start(Recruit.sum_of_ranks).result(60) == [1, 1]
        assert not set(before) & set(group.pids())

    def test_frozen_rank_is_named_and_long_before_a_step_may_be_over(
        self, group: LearnerGroup[Recruit], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        call = group.start(Recruit.fail, "freeze", 0)
        with pytest.raises(LearnerLost, match=r"no answer to fail within 3 s from learner rank 0 "):
            call.result(3)
        monkeypatch.setattr(heartbeats, "SILENT_S", 6.0)  # in earnest a minute and a half
        pid = group.pids()[0]
        with pytest.raises(
            LearnerLost,
            match=rf"rank 0 .*pid {pid}\) was lost during fail, while .+: its process is stopped",
        ):
            call.result(3600)


DRIVER = """
import os, sys, time
from pathlib import Path
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.cluster.learner_group import LearnerGroup
from open_instruct.run.run_directory import RunDirectory
from open_instruct.cluster.placement import FleetShape
from tests.fleet.idler import Idler

shape = FleetShape(learners_per_node=(1, 1), num_engines=1, devices_per_engine=1, shares_device=False)
with start_cluster(FleetSection(), shape, say=print, logs_folder=Path("logs")) as places:
    group = LearnerGroup(Idler, places)
    group.wait_ready(600)
    import ray
    Path("folder").write_text(ray._private.worker._global_node.get_session_dir_path())
    # As the sender of weights does.
    read_mark = ray.remote(num_cpus=0)(lambda: os.environ["OPEN_INSTRUCT_FLEET"])
    Path("/dev/shm", ray.get(read_mark.remote())).touch()
    group.start(Idler.freeze, 1)
    RunDirectory(path=Path()).write_pids(driver=0, learners=group.pids(), engines=[])
    if sys.argv[1] == "kill":
        time.sleep(600)
"""


def processes_of(driver: int, folder: Path) -> list[int]:
    """Living processes of a local Ray: those that carry the driver's mark, and those that were
    given its folder.
    """
    mark = f"{MARK_VARIABLE}=open_instruct-{driver}-".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        # It ended meanwhile; one that waits to be reaped has neither.
        with contextlib.suppress(OSError):
            marked = mark in (process / "environ").read_bytes()
            if marked or (str(folder).encode() in (process / "cmdline").read_bytes()):
                found.append(int(process.name))
    return found


@pytest.mark.parametrize("end", ["kill", "leave"])
def test_learners_end_with_the_driver(tmp_path: Path, end: str) -> None:
    (tmp_path / "driver.py").write_text(DRIVER)
    environment = {"PYTHONPATH": str(REPOSITORY), "RAY_ADDRESS": "127.0.0.1:1"}
    driver = programs.start(
        [str(tmp_path / "driver.py"), end], environment=environment, cwd=tmp_path
    )
    try:
        pids_file = tmp_path / "pids.json"
        eventually(lambda: pids_file.exists() or driver.poll() is not None)
        assert driver.poll() is None, driver.said()
        folder = Path((tmp_path / "folder").read_text()).parent
        if end == "kill":
            assert {*json.loads(pids_file.read_text())["learners"]} < {
                *processes_of(driver.pid, folder)
            }
            driver.send_signal(signal.SIGKILL)
        assert driver.wait(60) == (0 if end == "leave" else -signal.SIGKILL)
    finally:
        driver.send_signal(signal.SIGKILL)

    eventually(
        lambda: not folder.exists() and not processes_of(driver.pid, folder),
        nap_s=0.1,
        timeout_s=60,
    )
    assert not {name for name in os.listdir("/dev/shm") if f"open_instruct-{driver.pid}-" in name}
    assert list((tmp_path / "logs").glob("learner-[01].*"))


def test_file_of_process_ids_is_whole(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    directory.write_pids(driver=1, learners=[2, 3], engines=[4])
    assert json.loads(directory.pids.read_text()) == {
        "driver": 1,
        "learners": [2, 3],
        "engines": [4],
    }
    directory.write_pids(driver=1, learners=[5, 6], engines=[4])
    assert json.loads(directory.pids.read_text())["learners"] == [5, 6]
    assert [path.name for path in tmp_path.iterdir()] == ["pids.json"]
