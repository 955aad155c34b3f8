"""Clusters that a run joins or starts: simulated nodes, tokens, refusals."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cluster import ray_cluster
from open_instruct.cluster.placement import FleetShape
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import InputError, RunError
from tests.fleet.grpo_case import finished
from tests.fleet.simulated_cluster import simulated_cluster
from tests.ranks import programs

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).resolve().parents[2]
GUARDED = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "a" * 64}
ONE_LEARNER = FleetShape(
    learners_per_node=(1,), num_engines=1, devices_per_engine=1, shares_device=False
)

# The smaller one comes second, so that the order of the list is not the order of the nodes.
NODES = ({"num_cpus": 1, "num_gpus": 0}, *({"num_cpus": 6, "num_gpus": each} for each in (3, 1)))

DRIVER = """
import json, os, sys
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import RunError
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.cluster.learner_group import LearnerGroup
from open_instruct.cluster.placement import FleetShape
from tests.fleet.learners import Recruit

def shape_of(*nodes):
    return FleetShape(learners_per_node=nodes, num_engines=1, devices_per_engine=1, shares_device=False)

said = []
fleet = FleetSection(ray_address=sys.argv[1], cluster_timeout_s=3)
with start_cluster(fleet, shape_of(1, 2), say=said.append) as placement:
    group = LearnerGroup(Recruit, placement)
    group.wait_ready(600)
    learners = group.start(Recruit.whereabouts).result(600)
    sums = group.start(Recruit.sum_of_ranks).result(600)
    group.shutdown()
try:
    with start_cluster(fleet, shape_of(3, 3), say=said.append):
        refusal = "none"
except RunError as error:
    refusal = str(error)
patient = FleetSection(ray_address=sys.argv[1], cluster_timeout_s=60)
with start_cluster(patient, shape_of(1, 2), say=said.append):  # it is running, and the places are free again
    pass
print(json.dumps({"learners": learners, "sums": sums, "refusal": refusal, "said": said}))
"""


def run(
    program: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    cwd: Path | None = None,
    tmp_path: Path,
) -> Any:
    """The last line that a Python program prints, as JSON."""
    file = tmp_path / "program.py"
    file.write_text(program)
    process = programs.start(
        [str(file), *arguments],
        environment={"PYTHONPATH": str(REPOSITORY)} | (environment or {}),
        cwd=cwd or tmp_path,
    )
    return json.loads(finished(process, exit_code=0).splitlines()[-1])


@pytest.fixture(scope="module")
def simulated() -> Iterator[str]:
    """The address of a cluster with a token."""
    with simulated_cluster(NODES, GUARDED) as address:
        yield address


class TestSimulatedNodes:
    @pytest.fixture(scope="class")
    def report(self, simulated: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        """What a driver saw of the cluster that it joined."""
        return run(
            DRIVER, simulated, environment=GUARDED, tmp_path=tmp_path_factory.mktemp("programs")
        )

    def test_learners_of_a_node_are_on_one_node(self, report: dict[str, Any]) -> None:
        first, *others = (learner["node_id"] for learner in report["learners"])
        assert len(set(others)) == 1 and first not in others

    def test_ranks_are_node_major_and_the_sizes_arrive_as_they_are(
        self, report: dict[str, Any]
    ) -> None:
        learners = report["learners"]
        assert [learner["rank"] for learner in learners] == [0, 1, 2]
        assert [learner["local_rank"] for learner in learners] == [0, 0, 1]
        assert all(learner["gpus_per_node"] == [1, 2] for learner in learners)
        assert report["sums"] == [3, 3, 3]

    def test_learner_sees_the_gpus_of_its_node_that_are_learners(
        self, report: dict[str, Any]
    ) -> None:
        """Those of each node in one order, whichever of them Ray gave to which learner."""
        for learner in report["learners"]:
            seen = learner["seen_gpus"].split(",")
            assert len(set(seen)) == (1 if learner["rank"] == 0 else 2)
            given = [
                gpu
                for each in report["learners"]
                if each["node_id"] == learner["node_id"]
                for gpu in each["own_gpus"]
            ]
            assert seen == sorted(given)

    def test_shape_that_never_fits_is_refused_after_the_timeout(
        self, report: dict[str, Any]
    ) -> None:
        assert (
            "asked: 2 nodes of 3 GPUs for learners, and 1 engine of 1 GPU; the cluster has nodes "
            "of 1 and 3 GPUs, of which" in report["refusal"]
        )
        assert "--cluster_timeout_s" in report["refusal"]

    def test_joined_cluster_is_left_running_and_its_places_free(
        self, report: dict[str, Any]
    ) -> None:
        assert [
            words for words in report["said"] if words.startswith("joined Ray at 127.0.0.1:")
        ] == ([report["said"][0]] * 3)


class TestRefusals:
    @pytest.mark.parametrize(
        ("address", "message"),
        [
            ("127.0.0.1:9", "--ray_address 127.0.0.1:9: nothing answers there"),
            ("ray://127.0.0.1:10001", "takes 'auto', or HOST:PORT"),
            ("here", "takes 'auto', or HOST:PORT"),
        ],
    )
    def test_address_without_a_cluster_is_refused(self, address: str, message: str) -> None:
        refuse(address, message)

    def test_listener_that_never_answers_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert ray_cluster.CONNECT_TIMEOUT_S <= 10
        monkeypatch.setattr(ray_cluster, "CONNECT_TIMEOUT_S", 0.5)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            refuse(
                address,
                (
                    rf"^--ray_address {address}: nothing answers there \(timed out\); start .* "
                    r"leave "
                    r"the flag"
                ),
            )

    def test_server_that_is_no_ray_is_refused(self) -> None:
        with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
            threading.Thread(target=server.serve_forever).start()
            address = f"127.0.0.1:{server.server_port}"
            try:
                refuse(
                    address,
                    (
                        rf"^--ray_address {address}: what answers there is no Ray; start .* leave "
                        r"the flag"
                    ),
                )
            finally:
                server.shutdown()

    def test_ray_that_does_not_start_ends_with_its_last_words(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What Ray says last, and what to do."""
        monkeypatch.setattr(ray_cluster, "_object_store_bytes", lambda: 1)
        words = (
            r"^the local Ray did not start: ValueError: .* Give the same command again, .* "
            r"--ray_address auto$"
        )
        starting = start_cluster(FleetSection(), ONE_LEARNER, say=lambda text: None)
        with pytest.raises(RunError, match=words), starting:
            pass


def refuse(address: str, message: str) -> None:
    with (
        pytest.raises(InputError, match=message),
        start_cluster(FleetSection(ray_address=address), ONE_LEARNER, say=lambda text: None),
    ):
        pass


# One run after the other, in one process, which then would join a cluster.
TWO_RUNS = """
import contextlib, importlib.util, json, os, stat, sys, time
from pathlib import Path
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import InputError
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.cluster.placement import FleetShape

def what_an_actor_has():
    found = [importlib.util.find_spec(name) is not None for name in ("planted", "open_instruct")]
    return {"token": os.environ["RAY_AUTH_TOKEN_PATH"], "found": found, "niceness": os.nice(0)}

actors, modes, tokens, programs, listening = [], {}, [], [], set()
for num_learners in (1, 4):
    shape = FleetShape(
        learners_per_node=(num_learners,), num_engines=1, devices_per_engine=1, shares_device=False
    )
    with start_cluster(FleetSection(), shape, say=print):
        import psutil, ray
        actors.append(ray.get(ray.remote(num_cpus=0)(what_an_actor_has).remote(), timeout=60))
        token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
        modes = {str(path): stat.S_IMODE(path.stat().st_mode) for path in (token, token.parent)}
        tokens.append((actors[-1]["token"] == str(token), len(token.read_text()) == 64))
        # Of all that it has started, whoever's children: in a session of their own, as the one that started Ray is.
        mark = f"OPEN_INSTRUCT_FLEET=open_instruct-{os.getpid()}-".encode()
        deadline, found = time.monotonic() + 60, []
        while "ray::DashboardAgent" not in found and time.monotonic() < deadline:  # it names itself in its time
            found, sessions = [], set()
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    # A process that names itself writes over its environment.
                    if mark in Path(f"/proc/{process.pid}/environ").read_bytes():
                        sessions.add(os.getsid(process.pid))
            for process in psutil.process_iter():
                with contextlib.suppress(psutil.Error, OSError):
                    if process.pid == os.getpid() or os.getsid(process.pid) in sessions:
                        found.append(process.name())
                        connections = process.net_connections()
                        listening |= {it.laddr.ip for it in connections if it.status == psutil.CONN_LISTEN}
            time.sleep(0.1)
        programs += found
left = [path for path in modes if os.path.exists(path)]
variables = [os.environ.get(name) for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")]
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": sys.argv[2]}  # as it should be
refusal = "none"
try:
    with start_cluster(FleetSection(ray_address=sys.argv[1]), shape, say=print):
        pass
except InputError as error:
    refusal = str(error)
print(json.dumps({"modes": list(modes.values()), "tokens": tokens, "left": left,
                  "programs": programs, "listening": sorted(listening),
                  "found": [actor["found"] for actor in actors], "marked": "OPEN_INSTRUCT_FLEET" in os.environ,
                  "niceness": [os.nice(0), *(actor["niceness"] for actor in actors)],
                  "variables": variables, "refusal": refusal}))
"""


class TestALocalRay:
    @pytest.fixture(scope="class")
    def home(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return tmp_path_factory.mktemp("home")

    @pytest.fixture(scope="class")
    def report(
        self, home: Path, simulated: str, tmp_path_factory: pytest.TempPathFactory
    ) -> dict[str, Any]:
        """Of two runs, the second with places for five processes, in a folder with a module."""
        folder = tmp_path_factory.mktemp("working")
        (folder / "planted.py").touch()
        environment = {
            "HOME": str(home),
            "RAY_AUTH_MODE": "disabled",
            "RAY_AUTH_TOKEN": "for another cluster",
        }
        # A script's own one is on the path of Ray's actors.
        programs_folder = tmp_path_factory.mktemp("programs")
        words = (simulated, GUARDED["RAY_AUTH_TOKEN"])
        return run(TWO_RUNS, *words, environment=environment, cwd=folder, tmp_path=programs_folder)

    def test_local_ray_listens_to_this_machine_only(self, report: dict[str, Any]) -> None:
        assert {"gcs_server", "raylet", "ray::DashboardAgent"} <= set(report["programs"])
        assert set(report["listening"]) <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}

    def test_programs_that_the_driver_starts_later_are_their_own_masters(
        self, report: dict[str, Any]
    ) -> None:
        assert not report["marked"]

    def test_actors_import_nothing_from_the_working_folder(self, report: dict[str, Any]) -> None:
        assert report["found"] == [[False, True]] * 2

    def test_actors_give_way_to_nothing_that_the_driver_does_not(
        self, report: dict[str, Any]
    ) -> None:
        """Beside three busy processes a niced learner and engine took 16 times as long to start."""
        assert len(set(report["niceness"])) == 1

    def test_run_has_a_token_in_a_folder_of_its_own(
        self, report: dict[str, Any], home: Path
    ) -> None:
        """Nothing is read from HOME, where a token for other clusters may be, or written there."""
        assert report["modes"] == [0o600, 0o700]
        assert report["tokens"] == [[True, True]] * 2
        assert report["left"] == []
        assert report["variables"] == ["disabled", "for another cluster"]
        assert list(home.iterdir()) == []

    def test_cluster_with_another_token_is_for_another_process(
        self, report: dict[str, Any]
    ) -> None:
        assert "this process has had a Ray of its own" in report["refusal"]
        assert report["refusal"].endswith(
            "restart the process (the notebook's kernel), and give the flag again"
        )


class TestWhoMayTalkToRay:
    @pytest.mark.parametrize(
        ("given", "said"),
        [
            (
                {},
                (
                    r"does not let this process in\. If the cluster has a token, give it here "
                    r"too.*\(now: none\)"
                ),
            ),
            ({"RAY_AUTH_MODE": "token"}, r"\(now: none\)"),
            ({"RAY_AUTH_TOKEN": "b" * 64}, r"\(now: RAY_AUTH_TOKEN\)"),
            ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, r"\(now: RAY_AUTH_TOKEN_PATH\)"),
        ],
        ids=["no token", "mode alone", "another token", "no file"],
    )
    def test_joined_cluster_wants_its_token(
        self,
        simulated: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        given: dict[str, str],
        said: str,
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in given.items():
            monkeypatch.setenv(name, value)
        assert re.search(said, run(JOINING, simulated, tmp_path=tmp_path))


JOINING = """
import json, sys
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import InputError
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.cluster.placement import FleetShape
shape = FleetShape(learners_per_node=(1,), num_engines=1, devices_per_engine=1, shares_device=False)
try:
    with start_cluster(FleetSection(ray_address=sys.argv[1]), shape, say=print):
        pass
except InputError as error:
    print(json.dumps(str(error)))
"""
