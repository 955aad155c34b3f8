"""A fleet over two hosts: network namespaces, each with a loopback and an address of its own."""

import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cluster.ray_cluster import make_short_folder
from tests.fleet import two_hosts

pytestmark = pytest.mark.extended

REPOSITORY = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.213.7.1", "10.213.7.2")
INTERFACES = ("head0", "other0")
PORT = 6390
START_TIMEOUT_S = 600


def sh(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[list[str]]]:
    """Two namespaces: for each, what to write before a command that runs there."""
    if missing := [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]:
        pytest.skip(f"needs network namespaces: there is no `{missing[0]}` (iproute2, util-linux)")
    if os.geteuid() != 0:
        pytest.skip("needs network namespaces: only root can make them")
    with ExitStack() as stack:
        inside = []
        for _ in ADDRESSES:
            # A namespace lives as long as this process, which ends with ours.
            holder = subprocess.Popen(
                ["unshare", "--net", "sh", "-c", "echo && cat"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            stack.callback(holder.communicate)
            assert holder.stdout is not None
            if not holder.stdout.readline():
                pytest.skip("needs network namespaces: they are forbidden here")
            inside.append(["nsenter", "--target", str(holder.pid), "--net"])
        try:
            pids = [enter[2] for enter in inside]
            sh(
                *inside[0],
                "ip",
                "link",
                "add",
                INTERFACES[0],
                "type",
                "veth",
                "peer",
                "name",
                INTERFACES[1],
            )
            sh(*inside[0], "ip", "link", "set", INTERFACES[1], "netns", pids[1])
            for enter, address, interface in zip(inside, ADDRESSES, INTERFACES, strict=True):
                sh(*enter, "ip", "address", "add", f"{address}/24", "dev", interface)
                sh(*enter, "ip", "link", "set", interface, "up")
                sh(*enter, "ip", "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs network namespaces: {error.stderr.decode().strip()}")
        yield inside


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return ours | {
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "HOME": str(tmp_path_factory.mktemp("home")),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture(scope="module")
def cluster(hosts: list[list[str]], environment: dict[str, str]) -> Iterator[str]:
    """Ray on both, with two CPU slots on the first host, which is the driver's, and one on the
    other.
    """
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    folder = make_short_folder()
    address = f"{ADDRESSES[0]}:{PORT}"
    head = [
        "--head",
        f"--port={PORT}",
        f"--temp-dir={folder}",
        "--include-dashboard=false",
        "--num-cpus=2",
    ]
    other = [f"--address={address}", "--num-cpus=1"]
    nodes: list[subprocess.Popen[bytes]] = []
    try:
        for enter, node_address, options in zip(hosts, ADDRESSES, (head, other), strict=True):
            command = [
                *enter,
                *ray,
                "start",
                *options,
                f"--node-ip-address={node_address}",
                "--block",
            ]
            with (folder / f"{node_address}.log").open("wb") as log:
                nodes.append(
                    subprocess.Popen(
                        [*command, "--object-store-memory=80000000"],
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
            answers = (
                "import socket, time\nwhile True:\n try: "
                f"socket.create_connection({ADDRESSES[0], PORT}); break\n"
            )
            answers += " except OSError: time.sleep(0.2)"
            subprocess.run(
                [*hosts[0], sys.executable, "-c", answers], check=True, timeout=START_TIMEOUT_S
            )
        assert all(node.poll() is None for node in nodes), [
            log.read_text()[-2000:] for log in folder.glob("*.log")
        ]
        yield address
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize(
    ("learners_per_node", "interfaces", "of_engine"),
    [(["2"], [INTERFACES[0]] * 2, INTERFACES[1]), (["1", "1"], list(INTERFACES), INTERFACES[0])],
    ids=["learners beside the driver, the engine elsewhere", "learners on both"],
)
def test_weights_reach_engines_wherever_they_are(
    hosts: list[list[str]],
    cluster: str,
    environment: dict[str, str],
    learners_per_node: list[str],
    interfaces: list[str],
    of_engine: str,
) -> None:
    done = subprocess.run(
        [*hosts[0], sys.executable, str(Path(two_hosts.__file__)), cluster, *learners_per_node],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_TIMEOUT_S,
        check=False,
    )
    assert done.stdout, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["arrived"] == [7.0, 7.0, 7.0]
    assert report["channel"] in ADDRESSES
    assert [address for address, *_ in report["met"]] == [ADDRESSES[0]] * 2
    assert sorted(gloo for _, gloo, _ in report["met"]) == sorted(interfaces)
    for gloo, nccl in (report["of_engine"], *(both for _, *both in report["met"])):
        assert nccl == f"={gloo}"
    assert report["of_engine"][0] == of_engine
