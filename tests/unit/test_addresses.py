"""At which address a fleet meets, with its hosts pretended."""

from __future__ import annotations

import pytest

from open_instruct.cluster.addresses import Host, Whereabouts, interface_of
from open_instruct.parallel.listening import LOOPBACK, LOOPBACK_INTERFACE, listen_at
from open_instruct.weights.ways import choose_backend

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
    way = choose_backend("auto", on_cuda=False, single_device=False, same_host=where.share_memory())
    assert way == way_on_cpus


def test_the_interface_of_an_address() -> None:
    assert interface_of(LOOPBACK) == LOOPBACK_INTERFACE
    assert interface_of("203.0.113.77") is None  # nobody's: kept for documents


def test_a_store_listens_where_it_is_told_to() -> None:
    import psutil

    before = {connection.laddr for connection in psutil.Process().net_connections()}
    store = listen_at(LOOPBACK)
    listening = {
        connection.laddr
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN and connection.laddr not in before
    }
    assert listening == {(LOOPBACK, store.port)}
