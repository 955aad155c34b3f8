"""The Ray cluster of a run: one that it joins and leaves, or a local one that ends with it."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from open_instruct.cluster.own_ray import OwnRay
from open_instruct.cluster.placement import FleetShape, Placement, Say, place
from open_instruct.cluster.watchdog import Watchdog
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.core.errors import InputError, RunError
from open_instruct.parallel.listening import LOOPBACK
from open_instruct.parallel.status import this_process
from open_instruct.run.cadence import set_handler

if TYPE_CHECKING:
    from ray.job_config import JobConfig

MAX_FOLDER_CHARACTERS = 26  # of the 107 that the path of a Unix socket may have; Ray adds over 60
MAX_OBJECT_STORE_BYTES = 2 << 30  # batches of tokens pass through it, never weights
MIN_OBJECT_STORE_BYTES = 96 << 20
SHARE_OF_MEMORY = 0.05
CONNECT_TIMEOUT_S = 10.0
WAY_OUT = "start a cluster with `ray start --head`, or leave the flag out for a local one"
AGAIN = (
    "Give the same command again, free memory first, or `ray start --head` by hand and give "
    "--ray_address auto"
)
HTTP2_SETTINGS = b"\0\0\0\4\0\0\0\0\0"  # a frame without any; its fourth byte is the type of frame
RAY_FOLDER = "r"
TOKEN_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@contextlib.contextmanager
def start_cluster(
    fleet: FleetSection,
    shape: FleetShape,
    *,
    say: Say,
    logs_folder: Path | None = None,
) -> Iterator[Placement]:
    """Join the cluster of `--ray_address` or start a local one, and reserve the places of `shape`.

    Whatever ends the driver, `kill -9` included, ends the local Ray with all its actors. Nothing
    stays in shared memory or on the disk but the workers' logs, in `logs_folder`. A cluster that
    was joined is left running.

    Raises:
        InputError: there is no cluster at the address, the dashboard cannot be started, or this
            machine has too little.
        RunError: the local Ray did not start, or a joined cluster had too little until
            --cluster_timeout_s passed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # When a learner dies, nobody reads the failures of its peers.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # By default Ray's workers yield to all other processes of the machine; here they are the run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    is_local = fleet.ray_address is None
    with contextlib.ExitStack() as stack:
        if fleet.ray_address is None:
            say("starting Ray for this run")
            stack.enter_context(_run_local_cluster(fleet, shape, logs_folder))
        else:
            _join(fleet.ray_address)
            stack.callback(_disconnect)
            say(f"joined Ray at {fleet.ray_address}")
        yield stack.enter_context(
            place(shape, timeout_s=fleet.cluster_timeout_s, say=say, is_one_machine=is_local)
        )


def _join(address: str) -> None:
    if address != "auto":
        _check_address(address)
    token = _find_token()
    if token:
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # else Ray does not show it
    import ray

    try:
        _connect(address)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.AuthenticationError) as error:
        reason = _first_line(error)
        remedy = WAY_OUT
        is_refused = isinstance(error, ray.exceptions.AuthenticationError) or reason.startswith(
            "Failed to connect"
        )
        if is_refused and _has_had_own_token():
            reason = "this process has had a Ray of its own, with whose token Ray goes on"
            remedy = "restart the process (the notebook's kernel), and give the flag again"
        elif is_refused:
            reason = (
                "what answers there does not let this process in. If the cluster has a token, "
                "give it here too, as RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH (now: "
                f"{token or 'none'})"
            )
            remedy = f"if it is no cluster, {remedy}"
        raise InputError(f"--ray_address {address}: {reason}; {remedy}", kind="remote") from error


def _find_token() -> str | None:
    """The variable or file from which Ray takes its token, in Ray's own order; None without any."""
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        if os.environ.get(name):
            return name
    home = Path.home() / ".ray" / "auth_token"
    return str(home) if home.exists() else None


def _check_address(address: str) -> None:
    # Ray itself would try for minutes, or for ever, and then end the process.
    host, colon, port = address.rpartition(":")
    if "://" in address or not (host and colon and port.isdecimal()):
        raise InputError(
            f"--ray_address {address}: takes 'auto', or HOST:PORT of a node that runs this command "
            "too",
            kind="remote",
        )
    # A server with TLS does not answer plain bytes.
    is_encrypted = os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")
    try:
        target = (host.strip("[]"), int(port))
        with socket.create_connection(target, timeout=CONNECT_TIMEOUT_S) as connection:
            is_ray = is_encrypted or _answers_as_grpc(connection)
    except OSError as error:
        raise InputError(
            f"--ray_address {address}: nothing answers there ({error}); {WAY_OUT}", kind="remote"
        ) from error
    if not is_ray:
        raise InputError(
            f"--ray_address {address}: what answers there is no Ray; {WAY_OUT}", kind="remote"
        )


def _answers_as_grpc(connection: socket.socket) -> bool:
    """Whether the server answers HTTP/2's preface (RFC 9113, section 3.4), as gRPC servers do."""
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HTTP2_SETTINGS)
    with connection.makefile("rb") as answer:
        return answer.read(len(HTTP2_SETTINGS))[3:4] == HTTP2_SETTINGS[3:4]


@contextlib.contextmanager
def _run_local_cluster(
    fleet: FleetSection, shape: FleetShape, logs_folder: Path | None
) -> Iterator[None]:
    folder = make_short_folder()
    watchdog = Watchdog(folder, logs_folder=logs_folder)
    with contextlib.ExitStack() as stack:
        stack.callback(watchdog.finish)
        stack.enter_context(_require_token(folder))
        with watchdog.marking():
            cluster = _start(fleet, shape, folder / RAY_FOLDER)
        stack.callback(cluster.finish)
        stack.callback(_disconnect)
        yield


@contextlib.contextmanager
def _require_token(folder: Path) -> Iterator[None]:
    """While it runs, Ray requires a token from a file of `folder` that only this user can read."""
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(_make_token())
    before = {name: os.environ.pop(name) for name in TOKEN_VARIABLES if name in os.environ}
    # Without these Ray takes the user's token, or leaves one in the home folder that others can
    # read.
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    try:
        yield
    finally:
        for name in TOKEN_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(before)


@functools.cache
def _make_token() -> str:
    """The token of this process, one for all its runs, since Ray reads it once."""
    return secrets.token_hex(32)


def _has_had_own_token() -> bool:
    return _make_token.cache_info().currsize > 0


def refuse_imported_ray() -> None:
    """Refuse a run if Ray has been imported before, and so has read which token it takes.

    Raises:
        InputError: it has.
    """
    if "ray" in sys.modules and not _has_had_own_token():
        raise InputError(
            "ray was imported in this process before a run began, and has settled then with which "
            "token it talks: restart the process (the notebook's kernel), and import ray after "
            "the first run, or not at all",
            kind="machine",
        )


def _start(fleet: FleetSection, shape: FleetShape, folder: Path) -> OwnRay:
    # Ray takes its node's outward address for the loopback one, and then listens on every
    # interface, unless this says that there is to be no cluster of several machines. It is read
    # when Ray is imported.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    options = {
        # Slots, not cores: the fleet must fit on a laptop too.
        "num_cpus": max(shape.num_cpu_slots, os.cpu_count() or 1),
        "object_store_memory": _object_store_bytes(),
        "_node_ip_address": LOOPBACK,
        "_temp_dir": str(folder),
        "include_dashboard": fleet.ray_dashboard_host is not None,
        "dashboard_host": fleet.ray_dashboard_host or LOOPBACK,
    }
    cluster = OwnRay(options)
    import ray  # noqa: F401 (which takes a while, as the start does)

    try:
        _connect(cluster.address())
    except Exception as error:
        if fleet.ray_dashboard_host is not None:
            raise InputError(
                f"--ray_dashboard_host {fleet.ray_dashboard_host}: Ray did not start with its "
                f"dashboard ({_first_line(error)}); it needs `pip install 'ray[default]'`, or "
                "leave the flag out",
                kind="remote",
            ) from error
        raise RunError(f"the local Ray did not start: {_first_line(error)}. {AGAIN}") from error
    cluster.watch(_report_own_loss)
    return cluster


def _report_own_loss() -> None:
    this_process.report_loss(f"the run's own Ray was killed or crashed while {this_process.status}")


def _connect(address: str) -> None:
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            configure_logging=False,
            job_config=_make_job_config(),
        )
    finally:
        # Ray would end the process at SIGTERM; the run decides what happens then.
        set_handler(signal.SIGTERM, handler)


def _make_job_config() -> JobConfig:
    """Set the import path of actors: the folder of this package, and not the working folder.

    Ray puts the working folder first on the path of every actor, where a user's file would shadow a
    library. It has no public option against that.
    """
    from ray.job_config import JobConfig

    folder = str(Path(__file__).resolve().parents[2])
    return JobConfig(_client_job=True, _py_driver_sys_path=[folder])


def _disconnect() -> None:
    import ray

    ray.shutdown()


def make_short_folder() -> Path:
    """Make a temporary folder for this user alone, with a path short enough for Ray's sockets.

    Ray opens its own folder to all users. Inside this one they cannot reach it.
    """
    parent = tempfile.gettempdir()
    if len(parent) > MAX_FOLDER_CHARACTERS:
        parent = "/tmp"
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent))


def _object_store_bytes() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(MIN_OBJECT_STORE_BYTES, min(MAX_OBJECT_STORE_BYTES, int(memory * SHARE_OF_MEMORY)))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
