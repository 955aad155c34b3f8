"""The sandbox: programs that try to get out of it, what it leaves behind, and machines where walls
are missing.
"""

import ctypes
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from string import Template
from typing import Any

import psutil
import pytest
import yaml

from open_instruct.core.errors import RunError
from open_instruct.parallel import processes
from open_instruct.rewards.sandbox import sandbox as sandbox_module
from open_instruct.rewards.sandbox.sandbox import START, RunResult, Sandbox
from open_instruct.rewards.sandbox.trial import try_walls
from open_instruct.rewards.sandbox.walls import TABLES, _filter, _refused_flags

REPOSITORY = Path(__file__).resolve().parents[4]
ESCAPES = yaml.safe_load(Path(__file__).with_name("escapes.yaml").read_text())
NEVER_END = ("a loop", "a loop in C", "sleep", "ignore signals and loop")
LANDLOCK_CALL = 444
WALLS = "files, network, processes, signals, shared memory, memory"
# Linux, and the version of Landlock that it has.
OLDER_KERNELS = {"5.15": 1, "6.8": 4}
# The programs that Landlock itself has not always contained.
BY_NEWER_LANDLOCK = [
    name for name in ESCAPES if re.search("signal|owner|length|descriptor|abstract", name)
]
# In the warm process: Landlock as an older kernel has it.
OLDER_LANDLOCK = """
from landlockpy import _syscall
newest = _syscall.abi_version
_syscall.abi_version = lambda: min(newest(), {abi})
"""
# In the warm process: the programs of this test's sandboxes may have 150 MB together.
SMALL_MACHINE = """
import os
from open_instruct.rewards.sandbox import usage
find_all = usage.find_sandboxes
usage.find_sandboxes = lambda: [
    pid for pid in find_all() if pid in usage.find_children(os.getppid())
]
usage.Allowance.for_machine = classmethod(lambda cls: cls(max_threads=100, max_bytes=150_000_000))
"""
# In the warm process: the second program cannot be forked, or its walls not be put up.
BREAKS_SECOND = """
import os
from open_instruct.rewards.sandbox.server import Walls
fork, put_up, forks = os.fork, Walls.put_up, []
def second_fails():
    forks.append(1)
    if len(forks) == 2 and fault == "processes":
        raise BlockingIOError(11, fault)
    return fork()
def second_stands_open(walls, cpu_s):
    if len(forks) == 2 and fault == "walls":
        raise OSError(fault)
    put_up(walls, cpu_s=cpu_s)
os.fork, Walls.put_up = second_fails, second_stands_open
"""


def walls_that_stand() -> list[str]:
    said: list[str] = []
    try_walls("auto", say=said.append, warn=lambda text: None)
    return said[0].partition("these walls stand: ")[2].split(", ")


@pytest.fixture(scope="module")
def all_walls() -> None:
    standing = walls_that_stand()
    if len(standing) < len(TABLES["trials"]):
        pytest.skip(f"this machine has only these walls: {', '.join(standing)}")


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_KEY", "hunter2")
        with closing(Sandbox()) as sandbox:
            yield sandbox


@pytest.fixture(scope="module")
def older_sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    with pytest.MonkeyPatch.context() as patch:
        landlock = OLDER_LANDLOCK.format(abi=OLDER_KERNELS[request.param])
        patch.setattr(sandbox_module, "START", START.replace("main(", f"{landlock}main("))
        patch.setenv("SECRET_KEY", "hunter2")
        with closing(Sandbox()) as sandbox:
            sandbox.interpreter(cpu_s=1).close()
            yield sandbox


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Any]]:
    """What the programs could get at, and through."""
    outside = tmp_path_factory.mktemp("outside")
    outside.chmod(0o777)
    (outside / "secret.txt").write_text("hunter2")
    kinds = [
        (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)),
        (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)),
    ]
    kinds += [(socket.AF_UNIX, socket.SOCK_STREAM, str(outside / "u.sock"))]
    kinds += [(socket.AF_UNIX, socket.SOCK_DGRAM, str(outside / "d.sock"))]
    kinds += [(socket.AF_UNIX, socket.SOCK_STREAM, f"\0sandbox-test-{os.getpid()}")]
    opened = []
    for family, kind, address in kinds:
        opened.append(socket.socket(family, kind))
        opened[-1].bind(address)
        if kind == socket.SOCK_STREAM:
            opened[-1].listen(5)
    tcp, udp = (one.getsockname()[1] for one in opened[:2])
    libc = ctypes.CDLL(None)
    shared = {
        "memory": libc.shmget(0, 4096, 0o600),
        "semaphores": libc.semget(0, 1, 0o600),
        "queue": libc.msgget(0, 0o600),
    }
    bystander = subprocess.Popen(["sleep", "600"])
    yield {
        "outside": outside,
        "tcp": tcp,
        "udp": udp,
        "abstract": f"sandbox-test-{os.getpid()}",
        "bystander": bystander.pid,
        **shared,
    }
    for one in opened:
        one.close()
    was_alive = bystander.poll() is None
    bystander.kill()
    bystander.wait()
    removed = [
        libc.shmctl(shared["memory"], 0, None),
        libc.semctl(shared["semaphores"], 0, 0),
        libc.msgctl(shared["queue"], 0, None),
    ]
    assert was_alive and removed == [0, 0, 0]


def run(sandbox: Sandbox, code: str, *, timeout_s: float = 20, **given: Any) -> RunResult:
    with closing(sandbox.interpreter(cpu_s=20, **given)) as interpreter:
        return interpreter.run(code, timeout_s=timeout_s)


def wait_until(is_so: Callable[[], bool], timeout_s: float = 20) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


def assert_contained(name: str, sandbox: Sandbox, facts: Mapping[str, Any]) -> None:
    program = Template(ESCAPES[name]).safe_substitute(facts)
    compile(program, name, "exec")
    ran = run(sandbox, program, timeout_s=1 if name in NEVER_END else 20, stderr=True)
    assert "ESCAPED" not in ran.output
    if name in NEVER_END:
        assert ran.status == "late"
    assert sorted(path.name for path in facts["outside"].iterdir()) == [
        "d.sock",
        "secret.txt",
        "u.sock",
    ]
    secret = facts["outside"] / "secret.txt"
    assert secret.read_text() == "hunter2" and secret.stat().st_mode & 0o777 == 0o644
    # The next program finds the sandbox as it was, without what the last one had started.
    assert run(sandbox, "import math\nmath.sqrt(4) + len([1])").value == "3.0"
    server = sandbox._server
    assert server is not None and server.poll() is None
    assert wait_until(lambda: processes.list_children(server.pid) == [])
    soft, _ = resource_limit(server.pid)
    assert soft > 64


@pytest.mark.usefixtures("all_walls")
class TestEscapes:
    @pytest.mark.parametrize("name", ESCAPES)
    def test_sandboxed_program_is_contained(
        self, name: str, sandbox: Sandbox, facts: Mapping[str, Any]
    ) -> None:
        assert_contained(name, sandbox, facts)

    def test_sandboxed_programs_wrote_nothing(self) -> None:
        """Of the programs above, which come first."""
        for folder in ("/dev/shm", "/tmp", os.path.dirname(os.__file__), os.getcwd()):
            assert not [name for name in os.listdir(folder) if "zz_escape" in name]


@pytest.mark.usefixtures("all_walls")
@pytest.mark.parametrize("older_sandbox", OLDER_KERNELS, indirect=True)
class TestOlderKernels:
    @pytest.mark.parametrize("name", BY_NEWER_LANDLOCK)
    def test_program_that_newer_landlock_contains_is_contained_without_it(
        self, name: str, older_sandbox: Sandbox, facts: Mapping[str, Any]
    ) -> None:
        assert_contained(name, older_sandbox, facts)

    @pytest.mark.extended
    @pytest.mark.parametrize("name", [name for name in ESCAPES if name not in BY_NEWER_LANDLOCK])
    def test_sandboxed_program_is_contained(
        self, name: str, older_sandbox: Sandbox, facts: Mapping[str, Any]
    ) -> None:
        assert_contained(name, older_sandbox, facts)


def resource_limit(pid: int) -> tuple[int, int]:
    import resource

    return resource.prlimit(pid, resource.RLIMIT_NOFILE)


class TestInterpreter:
    def test_sandbox_session_keeps_names_and_returns_each_result(self, sandbox: Sandbox) -> None:
        with closing(sandbox.interpreter(cpu_s=20, stderr=True)) as interpreter:

            def told(code: str, **settings: Any) -> tuple[str, str, str]:
                ran = interpreter.run(code, timeout_s=20, **settings)
                return ran.status, ran.output, ran.value or ran.problem.strip().rpartition("\n")[2]

            assert told("x = 2; print('two')") == ("done", "two\n", "None")
            assert told("y = 3\nx * y") == ("done", "", "6")
            assert told("1 / 0") == ("error", "", "ZeroDivisionError: division by zero")
            assert told("def f(:") == ("error", "", "SyntaxError: invalid syntax")
            assert told("import sys; sys.exit()") == ("exit", "", "")
            assert told("sys.exit(3)") == ("error", "", "SystemExit: 3")
            assert told("import threading; threading.Thread(target=print, args=(x,)).start()") == (
                "done",
                "2\n",
                "None",
            )
            assert (
                told("from collections import Counter; Counter('aab')", is_plain=True)[2]
                == "{'a': 2, 'b': 1}"
            )
            assert told(
                "import numpy; [numpy.int64(3), True, (numpy.float64(.5),), {1}]", is_plain=True
            )[2] == ("[3, True, (0.5,), {1}]")
            assert told("x") == ("done", "", "2")

    def test_sandboxed_program_reads_its_input(self, sandbox: Sandbox) -> None:
        reading = "import os, sys\nprint(input(), sys.stdin.readline(), os.fstat(0).st_size)\n"
        ran = run(sandbox, f"{reading}os.lseek(0, 0, 0); open(0).read()", stdin="1 2\n3\n")
        assert (ran.output, ran.value) == ("1 2 3\n 6\n", "'1 2\\n3\\n'")
        assert run(sandbox, "print(ascii(input()))", stdin="1 \ud800\n").output == "'1 ?'\n"

    @pytest.mark.parametrize(
        ("program", "status"),
        [
            ("while True: pass", "late"),
            ("import os; os._exit(0)", "died"),
            ("print('x' * (1 << 21))", "died"),
        ],
    )
    def test_silent_sandbox_is_not_used_again(
        self, program: str, status: str, sandbox: Sandbox
    ) -> None:
        with closing(sandbox.interpreter(cpu_s=20)) as interpreter:
            assert (
                interpreter.run(program, timeout_s=1 if status == "late" else 20).status == status
            )

    @pytest.mark.parametrize(
        "answer",
        [
            "[1]",
            "[" * 100_000,
            '{"a":' * 100_000,
            "{}",
            '{"status": "great"}',
            '{"status": "done", "value": [1]}',
            '{"status": "done", "value": "1", "output": "2"}',
            '{"status": "done", "value": 1e999}',
        ],
    )
    def test_forged_answer_is_none_when_it_has_another_form(
        self, answer: str, sandbox: Sandbox
    ) -> None:
        find_mark = "import sys\nmark = sys._getframe(1).f_back.f_locals['request']['mark']\n"
        ran = run(sandbox, f"{find_mark}print(mark + {answer!r}, flush=True)")
        assert ran.status == "died"

    @pytest.mark.skipif(sys.platform != "linux", reason="what processes have is read from /proc")
    @pytest.mark.parametrize("num_sandboxes", [1, 2])
    def test_largest_program_is_ended_when_all_take_too_much_memory(
        self, num_sandboxes: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            sandbox_module, "START", START.replace("main(", f"{SMALL_MACHINE}main(")
        )
        with ExitStack() as stack:
            sandboxes = [stack.enter_context(closing(Sandbox())) for _ in range(num_sandboxes)]
            first, last = sandboxes[0], sandboxes[-1]
            small, largest, other = (
                stack.enter_context(closing(each.interpreter(cpu_s=20)))
                for each in (first, first, last)
            )
            for interpreter, num_megabytes in ((small, 20), (largest, 100), (other, 60)):
                ran = interpreter.run(f"x = b'x' * {num_megabytes}_000_000", timeout_s=20)
                assert ran.status == "done"
            assert largest.run("import time; time.sleep(20)", timeout_s=20).status == "died"
            assert [each.run("len(x)", timeout_s=20).status for each in (small, other)] == [
                "done"
            ] * 2

    def test_closing_it_wakes_who_waits(self, sandbox: Sandbox) -> None:
        interpreter = sandbox.interpreter(cpu_s=20)
        ran: list[RunResult] = []
        waiting = threading.Thread(
            target=lambda: ran.append(interpreter.run("import time; time.sleep(60)", timeout_s=60))
        )
        waiting.start()
        time.sleep(0.2)
        interpreter.close()
        waiting.join(20)
        assert [each.status for each in ran] == ["died"]

    def test_sandbox_that_was_killed_is_started_anew(self) -> None:
        with closing(Sandbox()) as sandbox:
            interpreter = sandbox.interpreter(cpu_s=20)
            assert interpreter.run("1", timeout_s=20).value == "1"
            assert sandbox._server is not None
            sandbox._server.kill()
            sandbox._server.wait()
            with pytest.raises(RunError, match="ran no program"):
                interpreter.run("1", timeout_s=20)
            interpreter.close()
            assert interpreter.run("1", timeout_s=20).status == "died"
            assert run(sandbox, "1 + 1").value == "2"

    def test_sandbox_that_does_not_start_raises_and_leaves_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sandbox_module, "START", "import time; time.sleep(600)")
        monkeypatch.setattr(sandbox_module, "START_TIMEOUT_S", 0.5)
        with pytest.raises(RunError, match="did not start"):
            Sandbox().interpreter(cpu_s=20)
        assert not [
            each
            for each in psutil.Process().children()
            if "time.sleep(600)" in " ".join(each.cmdline())
        ]

    def test_sandbox_ends_while_a_fork_holds_its_socket(self) -> None:
        sandbox = Sandbox()
        sandbox.interpreter(cpu_s=20).close()
        if (holder := os.fork()) == 0:
            time.sleep(600)
            os._exit(0)
        try:
            assert sandbox._server is not None
            sandbox.close()
            assert sandbox._server.returncode == 0
        finally:
            os.kill(holder, signal.SIGKILL)
            os.waitpid(holder, 0)

    @pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are Linux's")
    @pytest.mark.parametrize("fault", ["processes", "descriptors", "walls"])
    def test_program_that_cannot_be_started_is_the_only_one_without_an_answer(
        self, fault: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            sandbox_module,
            "START",
            START.replace("main(", f"fault = {fault!r}\n{BREAKS_SECOND}main("),
        )
        with closing(Sandbox()) as sandbox, closing(sandbox.interpreter(cpu_s=20)) as first:
            assert first.run("x = 1", timeout_s=20).status == "done" and sandbox._server is not None
            usual = resource.getrlimit(resource.RLIMIT_NOFILE)
            # Its first free descriptor is the first that it may not have.
            if fault == "descriptors":
                opened = {
                    int(path.name) for path in Path(f"/proc/{sandbox._server.pid}/fd").iterdir()
                }
                free = next(number for number in range(99) if number not in opened)
                resource.prlimit(sandbox._server.pid, resource.RLIMIT_NOFILE, (free, usual[1]))
            with (
                closing(sandbox.interpreter(cpu_s=20)) as second,
                pytest.raises(RunError, match="ran no program"),
            ):
                second.run("1", timeout_s=20)
            resource.prlimit(sandbox._server.pid, resource.RLIMIT_NOFILE, usual)
            assert first.run("x", timeout_s=20).value == "1" and run(sandbox, "2").value == "2"

    @pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere a child that is busy outlives the sandbox"
    )
    def test_sandbox_ends_with_a_killed_driver(self) -> None:
        program = (
            "from open_instruct.rewards.sandbox.sandbox import SANDBOX\nimport os, "
            "time\ninterpreter = SANDBOX.interpreter(cpu_s=60)\nprint(SANDBOX._server.pid, "
            "interpreter.run('import os; os.getpid()', timeout_s=60).value, "
            "flush=True)\ninterpreter.run('while True: pass', timeout_s=60)\n"
        )
        driver = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        assert driver.stdout is not None
        pids = list(map(int, driver.stdout.readline().split()))
        assert len(pids) == 2 and not any(map(processes.has_ended, pids))
        driver.kill()
        driver.wait()
        driver.stdout.close()
        assert wait_until(lambda: all(map(processes.has_ended, pids)))


class TestWalls:
    @pytest.mark.parametrize(
        ("landlock_abi", "refused_flags"),
        [
            (None, os.O_ACCMODE | os.O_CREAT | os.O_TRUNC),
            (1, os.O_TRUNC),
            (2, os.O_TRUNC),
            (3, 0),
            (7, 0),
        ],
    )
    def test_filter_refuses_the_flags_of_files_that_landlock_does_not(
        self, landlock_abi: int | None, refused_flags: int, tmp_path: Path
    ) -> None:
        pytest.importorskip("pyseccomp")
        assert _refused_flags(landlock_abi) == refused_flags
        with (tmp_path / "rules").open("w+") as file:
            _filter(refused_flags=refused_flags).export_pfc(file)
            file.seek(0)
            assert (f"$a2.lo32 & {refused_flags:#010x} == 0" in file.read()) is bool(refused_flags)

    @pytest.mark.usefixtures("all_walls")
    def test_run_is_told_that_all_stand(self) -> None:
        said, warned = list[str](), list[str]()
        try_walls("required", say=said.append, warn=warned.append)
        assert (said, warned) == (
            [f"programs of the policy run in a sandbox; these walls stand: {WALLS}"],
            [],
        )

    @pytest.mark.skipif(
        sys.platform != "linux", reason="there is no seccomp to take Landlock away with"
    )
    @pytest.mark.parametrize("choice", ["required", "auto"])
    def test_missing_wall_is_named(self, choice: str) -> None:
        """A process whose kernel has no Landlock, because a filter of its own takes it away."""
        pytest.importorskip("pyseccomp")
        program = (
            "import errno, json, pyseccomp, sys\n"
            "calls = pyseccomp.SyscallFilter(pyseccomp.ALLOW)\n"
            f"calls.add_rule(pyseccomp.ERRNO(errno.ENOSYS), {LANDLOCK_CALL})\n"
            "calls.load()\n"
            "from open_instruct.core.errors import InputError\n"
            "from open_instruct.rewards.sandbox.trial import try_walls\n"
            "said, warned = [], []\n"
            "try:\n"
            f"    try_walls({choice!r}, say=said.append, warn=warned.append)\n"
            "except InputError as error:\n"
            "    print(json.dumps(str(error)))\n"
            "else:\n"
            "    print(json.dumps([said, warned]))\n"
        )
        told = json.loads(subprocess.check_output([sys.executable, "-c", program], cwd=REPOSITORY))
        missing = (
            f"the wall around files a program reads the files of this user (of {len(ESCAPES)} "
            "programs"
        )
        if choice == "required":
            assert (
                missing in told
                and "--code_sandbox auto" in told
                and "network a program" not in told
            )
        else:
            ((said,), (warned,)) = told
            assert said.endswith(f"stand: {WALLS.removeprefix('files, ')}") and missing in warned

    def test_machine_on_which_no_program_runs_is_told_of(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with closing(Sandbox()) as sandbox:
            dead = sandbox.interpreter(cpu_s=1)
        monkeypatch.setattr(Sandbox, "interpreter", lambda self, **settings: dead)
        with pytest.raises(RunError, match="ran no program"):
            try_walls("required", say=print, warn=print)
