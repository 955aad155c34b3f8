"""At which address a fleet meets, with its hosts pretended."""

import pytest

from open_instruct.cluster import actor_host
from open_instruct.cluster.actor_host import allocator_environment, apply_environment
from open_instruct.cluster.addresses import Host, Whereabouts, find_interface
from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE, open_listening_store
from open_instruct.weight_sync.transports import choose_transport

A, B, C = Host("10.0.0.1", "a"), Host("10.0.0.2", "b"), Host("10.0.0.3", "c")
TWIN = Host("10.0.0.2", "a")  # a container with the name of host A
ALONE = Host(LOOPBACK, "laptop")


@pytest.mark.parametrize(
    ("driver", "learners", "engines", "address", "way_on_cpus"),
    [
        (ALONE, {ALONE}, {ALONE}, LOOPBACK, "shm"),
        (A, {A}, {A}, LOOPBACK, "shm"),
        (A, {A}, {B}, A.address, "gloo"),
        (A, {A}, {A, B}, A.address, "gloo"),
        (A, {B}, {A}, A.address, "gloo"),
        (A, {A, B}, {A}, A.address, "gloo"),
        (A, {B}, {B}, A.address, "shm"),
        (A, {B}, {C}, A.address, "gloo"),
        (A, {B, C}, {B, C}, A.address, "gloo"),
        (A, {A}, {TWIN}, A.address, "gloo"),
    ],
)
def test_loopback_only_where_everything_is_on_one_host(
    driver: Host, learners: set[Host], engines: set[Host], address: str, way_on_cpus: str
) -> None:
    where = Whereabouts(driver=driver, learners=frozenset(learners), engines=frozenset(engines))
    assert where.meeting_address() == address
    way = choose_transport(
        "auto", on_cuda=False, single_device=False, same_host=where.share_memory()
    )
    assert way == way_on_cpus


def test_interface_of_an_address() -> None:
    assert find_interface(LOOPBACK) == LOOPBACK_INTERFACE
    assert find_interface("203.0.113.77") is None  # nobody's: kept for documents


class TestProcessEnvironment:
    """What a learner, or an engine, sets before torch is imported there."""

    @pytest.fixture(autouse=True)
    def own_environment(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        environment = {"PATH": "/bin"}
        monkeypatch.setattr(actor_host.os, "environ", environment)
        return environment

    def test_gloo_and_nccl_take_the_interface_that_leads_to_the_others(
        self, monkeypatch: pytest.MonkeyPatch, own_environment: dict[str, str]
    ) -> None:
        """An engine's node has several, and NCCL would begin with the first one it likes."""
        ways = {A.address: "10.0.0.2", "192.0.2.1": "192.0.2.9"}
        names = {"10.0.0.2": "bond0", "192.0.2.9": "eth0"}
        monkeypatch.setattr(actor_host, "find_address_towards", lambda host, port: ways[host])
        monkeypatch.setattr(actor_host, "find_interface", names.get)
        apply_environment({"RANK": "1"}, meeting_address=A.address)
        assert own_environment["RANK"] == "1"
        assert own_environment["GLOO_SOCKET_IFNAME"] == "bond0"
        # And not every one whose name begins so.
        assert own_environment["NCCL_SOCKET_IFNAME"] == "=bond0"

    def test_addresses_stay_on_loopback_on_one_host(self, own_environment: dict[str, str]) -> None:
        apply_environment({}, meeting_address=LOOPBACK)
        assert own_environment["GLOO_SOCKET_IFNAME"] == LOOPBACK_INTERFACE
        assert own_environment["NCCL_SOCKET_IFNAME"] == f"={LOOPBACK_INTERFACE}"

    @pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
    def test_environment_of_a_node_is_kept(
        self, own_environment: dict[str, str], name: str
    ) -> None:
        own_environment |= {name: "max_split_size_mb:128", "NCCL_SOCKET_IFNAME": "ib0", "RANK": "7"}
        given = allocator_environment(on_gpus=True, hands_over_memory=False)
        apply_environment({**given, "RANK": "1"}, meeting_address=LOOPBACK)
        assert own_environment["NCCL_SOCKET_IFNAME"] == "ib0"
        assert {key: value for key, value in own_environment.items() if "ALLOC" in key} == {
            name: "max_split_size_mb:128"
        }
        assert own_environment["RANK"] == "1"

    @pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
    @pytest.mark.parametrize(
        ("of_the_node", "left"),
        [
            ("expandable_segments:True", None),
            ("expandable_segments: True, max_split_size_mb:128", "max_split_size_mb:128"),
            (
                "roundup_power2_divisions:[256:1,512:2],expandable_segments:True",
                "roundup_power2_divisions:[256:1,512:2]",
            ),
            ("expandable_segments:False", "expandable_segments:False"),
        ],
    )
    def test_nodes_memory_does_not_grow_either_where_it_is_handed_over(
        self,
        own_environment: dict[str, str],
        capsys: pytest.CaptureFixture[str],
        name: str,
        of_the_node: str,
        left: str | None,
    ) -> None:
        own_environment[name] = of_the_node
        stays = allocator_environment(on_gpus=True, hands_over_memory=True)
        apply_environment(stays, meeting_address=LOOPBACK)
        settings = {key: value for key, value in own_environment.items() if "ALLOC" in key}
        assert settings == (stays if left is None else {name: left})
        assert (name in capsys.readouterr().out) == (left != of_the_node)

    def test_memory_grows_in_segments_unless_it_is_handed_over(self) -> None:
        grows, stays = (
            {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{each}"} for each in (True, False)
        )
        assert allocator_environment(on_gpus=True, hands_over_memory=False) == grows
        assert allocator_environment(on_gpus=True, hands_over_memory=True) == stays
        assert allocator_environment(on_gpus=False, hands_over_memory=False) == {}


def test_store_listens_where_it_is_told_to() -> None:
    import psutil

    before = {connection.laddr for connection in psutil.Process().net_connections()}
    store = open_listening_store(LOOPBACK)
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr not in before
    }
    assert listening == {(LOOPBACK, store.port)}
