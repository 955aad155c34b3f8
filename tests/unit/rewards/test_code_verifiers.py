"""Verifiers that run programs: what is judged right, what cheats get, and how long a verdict
takes.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import yaml

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Check
from open_instruct.parallel.processes import has_ended
from open_instruct.rewards import code as code_module
from open_instruct.rewards.code import Code, CodeStdio, find_program, read_literal, split_assertion
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.sandbox import sandbox
from open_instruct.rewards.sandbox.walls import TABLES
from open_instruct.rl.checked_run import open_rollout_run
from tests.refusals import refused
from tests.unit.scored import score

CHEATS = yaml.safe_load(Path(__file__).with_name("cheats.yaml").read_text())
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add(2, 2) == 4"]
RIGHT = "def add(a, b):\n    return a + b"


def code(kind: type[Code] | type[CodeStdio] = Code, **flags: Any) -> Code | CodeStdio:
    """With time for what has an end, also on a machine that is busy."""
    verifier = kind()
    verifier.configure(
        RewardSection(**{"code_max_execution_time": 10, "verifier_timeout_s": 60, **flags})
    )
    return verifier


def sandboxes() -> set[int]:
    """The ids of the warm processes that this one has started, and of their children."""
    ids = set()
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if "open_instruct.rewards.sandbox.server" in " ".join(process.cmdline()):
                ids.add(process.pid)
    return ids


class TestCode:
    @pytest.mark.parametrize("cheat", CHEATS)
    def test_no_cheat_passes(self, cheat: str) -> None:
        verifier = code(code_max_execution_time=2)
        assert verifier.score(f"```python\n{CHEATS[cheat]}\n```", TESTS) < 1.0

    @pytest.mark.parametrize(
        ("program", "tests"),
        [
            (RIGHT, TESTS),
            (RIGHT, json.dumps(TESTS)),
            ("import sys\ndef add(a, b):\n    print('adding' * 100)\n    return a + b", TESTS),
            (f"{RIGHT}\nif __name__ == '__main__':\n    print(input())", TESTS),
            (
                "from collections import Counter as count",
                ["assert count('aab') == {'a': 2, 'b': 1}"],
            ),
            (
                "import numpy\ndef f(n): return [numpy.int64(n)] * n",
                ["assert f(2) == [2, 2], 'twice'"],
            ),
            (
                "from fractions import Fraction\ndef f(): return Fraction(1, 2)",
                ["assert f() == 0.5"],
            ),
            ("def f(): return frozenset({1})", ["assert f() == {1}"]),
            (
                "import enum\nclass C(str, enum.Enum): R = 'red'\ndef f(): return C.R",
                ["assert f() == 'red'"],
            ),
            ("def f(): return float('nan')", ["x = f()\nassert x != x", "assert abs(f()) != 0"]),
            ("def f(): pass", ["assert f() == None", "assert f() is None"]),
            (
                "def f(*n): return {*n}, n",
                ["assert f(1, 2) == ({2, 1}, (1, 2))", "assert f() == (set(), ())"],
            ),
            (
                "from __future__ import annotations\nclass A:\n    def f(self) -> A: return self",
                ["assert A().f()"],
            ),
            ("import asyncio\nasync def f(): return 1", ["assert asyncio.run(f()) == 1"]),
        ],
    )
    def test_right_program_scores_1(self, program: str, tests: Any) -> None:
        verifier = code()
        verifier.check_ground_truth(tests)
        assert verifier.score(f"So:\n```python\n{program}\n```", tests) == 1.0

    @pytest.mark.parametrize(
        ("program", "tests", "rate"),
        [
            ("def add(a, b): return 3", TESTS, 1 / 3),
            (
                "def add(a, b):\n    if a == 1: import os; os._exit(0)\n    return a + b",
                TESTS,
                2 / 3,
            ),
            ("def add(a, b):\n    while a == 1: pass\n    return a + b", TESTS, 2 / 3),
            ("def add(a, b):\n    while a == 1: print('x' * 9999)\n    return a + b", TESTS, 2 / 3),
            ("def add(a, b):\n    return a + b if a > 1 else '(' * 999", TESTS, 1 / 3),
            (
                "def f(): return [1]",
                ["assert f() == (1,)", "assert f() == [1]", "assert f() is not None", "f(3)"],
                2 / 4,
            ),
            ("def add(a, b): return '\ud800'", TESTS, 0.0),
            ("def f(): return '\\ud800'", ["assert f() == '\\ud800'"], 1.0),
            ("def add(a, b)", TESTS, 0.0),
            ("", TESTS, 0.0),
        ],
    )
    def test_test_that_fails_costs_itself(
        self, program: str, tests: list[str], rate: float
    ) -> None:
        verifier = code(code_max_execution_time=2)
        assert verifier.score(f"```python\n{program}\n```", tests) == pytest.approx(rate)

    @pytest.mark.parametrize(
        "members",
        [
            "{",
            "{1: {",
            "[{(",
        ],
    )
    def test_set_of_numbers_with_one_hash_is_no_value(self, members: str) -> None:
        """Of 4,000 members the slow way would compare 8 million; what is refused is not built at
        all.
        """
        numbers = [str(each * (2**61 - 1)) for each in range(4000)]
        ends = {"{": "}", "{1: {": "}}", "[{(": ",)}]"}
        between = ",), (" if members.endswith("(") else ", "
        text = members + between.join(numbers) + ends[members]
        with pytest.raises(ValueError, match="hash"):
            read_literal(text)
        assert read_literal("{-1, -2, (1,), 'a', 1.5}") == {-1, -2, (1,), "a", 1.5}

    @pytest.mark.parametrize(
        ("threshold", "rate"), [(0.0, 2 / 3), (2 / 3, 2 / 3), (0.7, 0.0), (1.0, 0.0)]
    )
    def test_below_the_threshold_nothing_counts(self, threshold: float, rate: float) -> None:
        verifier = code(code_pass_rate_reward_threshold=threshold)
        assert (
            verifier.score("```\ndef add(a, b): return a + b if a > 0 else 9\n```", TESTS) == rate
        )

    def test_verdict_comes_in_its_time(self) -> None:
        """Tests that it does not reach have failed; the first two, which are quick, have passed."""
        verifier = code(code_max_execution_time=1, verifier_timeout_s=3)
        program = "```python\nimport time\ndef f(n): time.sleep(0 if n < 2 else 60); return n\n```"
        began_s = time.monotonic()
        assert verifier.score(program, [f"assert f({n}) == {n}" for n in range(40)]) == 2 / 40
        assert time.monotonic() - began_s < 3

    def test_no_test_is_run_once_the_score_is_0(self) -> None:
        verifier = code(code_max_execution_time=1, code_pass_rate_reward_threshold=0.8)
        began_s = time.monotonic()
        assert (
            verifier.score(
                "```\nwhile True: pass\n```", [f"assert f({n}) == {n}" for n in range(10)]
            )
            == 0.0
        )
        assert 3 <= time.monotonic() - began_s < 6

    def test_pool_judges_by_them_and_leaves_nothing_behind(self) -> None:
        said: list[str] = []
        flags = RewardSection(
            num_verifier_processes=1, verifier_timeout_s=60, code_max_execution_time=10
        )
        before = sandboxes()
        with closing(VerifierPool(flags, say=said.append)) as pool:
            text = f"<think>```\n1\n```</think>```\n{RIGHT}\n```"
            outcome = score(pool, Check(verifier="code", ground_truth=TESTS), text)
            started = sandboxes() - before
        assert (outcome.score, outcome.problem, said) == (1.0, None, [])
        if sys.platform == "linux":
            deadline_s = time.monotonic() + 20
            while (
                not (have_ended := all(map(has_ended, started))) and time.monotonic() < deadline_s
            ):
                time.sleep(0.01)
            assert started and have_ended

    @pytest.mark.parametrize(
        "truth", ["assert add(1, 2) == 3", [], [3], "eJxrYEwtZgAA", None, {"a": 1}]
    )
    def test_ground_truth_without_a_list_of_tests_is_refused(self, truth: Any) -> None:
        with pytest.raises(ValueError, match="no list of tests"):
            code().check_ground_truth(truth)


class TestCodeStdio:
    SUM = "import sys\nprint(sum(map(int, sys.stdin.read().split())))"

    @pytest.mark.parametrize(
        ("program", "test", "expected"),
        [
            (SUM, {"input": "1 2\n", "output": "3\n"}, 1.0),
            (SUM, {"input": ["1", "2"], "output": "3"}, 1.0),
            (SUM, {"input": "1 2\n", "output": "4\n"}, 0.0),
            ("if __name__ == '__main__':\n    print(' 3.0 ')", {"input": "", "output": "3"}, 1.0),
            ("print('1.50 x')", {"input": "", "output": "1.5 x"}, 0.0),
            ("print(1); print(); print(2)", {"input": "", "output": "1\n2"}, 0.0),
            ("print('1_000')", {"input": "", "output": "1000"}, 0.0),
            ("print('\u0661\u0662')", {"input": "", "output": "12"}, 0.0),
            ("print('1e3', '+.5', '2.')", {"input": "", "output": "1000 0.5 2"}, 1.0),
            ("print('1e' + '9' * 99)", {"input": "", "output": "1"}, 0.0),
            ("print(input() == '?')", {"input": "\ud800", "output": "True"}, 1.0),
            ("print('a\ud800')", {"input": "", "output": "a\ud800"}, 0.0),
            ("print('\\ud800')", {"input": "", "output": "?"}, 0.0),
            ("print(1, flush=True); import os; os._exit(0)", {"input": "", "output": "1"}, 0.0),
            ("print(input()); import sys; sys.exit()", {"input": "a", "output": "a"}, 1.0),
            ("print(input()); 1 / 0", {"input": "a", "output": "a"}, 0.0),
            ("print(input()); input()", {"input": "a", "output": "a"}, 0.0),
            (
                "import os; os.write(1, os.read(0, os.fstat(0).st_size))",
                {"input": "a\nb", "output": "a\nb"},
                1.0,
            ),
            (
                "import threading as t\nt.Thread(target=lambda: print(input())).start()",
                {"input": "a", "output": "a"},
                1.0,
            ),
            (
                "import sys; print('no', file=sys.stderr); print('x' * (1 << 21))",
                {"input": "", "output": "x" * (1 << 21)},
                1,
            ),
        ],
    )
    def test_lines_are_compared(self, program: str, test: Any, expected: float) -> None:
        verifier = code(CodeStdio)
        verifier.check_ground_truth(json.dumps([test]))
        assert verifier.score(f"```python\n{program}\n```", [test]) == expected

    @pytest.mark.parametrize(
        "test", [{"input": "1"}, {"output": "1"}, {"input": 1, "output": "1"}, "1"]
    )
    def test_ground_truth_with_a_malformed_test_is_refused(self, test: Any) -> None:
        with pytest.raises(ValueError, match="no list of tests"):
            code(CodeStdio).check_ground_truth([test])


class TestServer:
    @pytest.fixture
    def asked(self) -> Iterator[list[tuple[str, Any]]]:
        """What a server is asked, which finds the first of three tests passed; its address is the
        first entry.
        """
        asked: list[tuple[str, Any]] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(
                    (self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                )
                self.send_response(500 if "broken" in self.path else 200)
                self.end_headers()
                self.wfile.write(
                    json.dumps({"results": [1, 0, 0], "runtimes": [0.1, 0.1, -1.0]}).encode()
                )

            def log_message(self, *args: Any) -> None: ...

        with HTTPServer(("127.0.0.1", 0), Handler) as server:
            asked.append((f"http://127.0.0.1:{server.server_port}", None))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield asked
            server.shutdown()

    def test_code_api_is_asked_in_place_of_the_sandbox(self, asked: list[tuple[str, Any]]) -> None:
        (address, _) = asked.pop()
        url = f"{address}/test_program"
        assert code(code_api_url=url).score(
            f"```python\n{RIGHT}\n```", json.dumps(TESTS)
        ) == pytest.approx(1 / 3)
        flags = {"code_api_url": url, "code_pass_rate_reward_threshold": 0.5}
        assert code(CodeStdio, **flags).score("print(1)", [{"input": "", "output": "1"}] * 3) == 0.0
        (path, body), (path_of_stdio, _) = asked
        assert (path, path_of_stdio) == ("/test_program", "/test_program_stdio")
        assert body == {"program": f"{RIGHT}\n", "tests": TESTS, "max_execution_time": 10}

    def test_failures_of_the_code_api_are_problems(self, asked: list[tuple[str, Any]]) -> None:
        flags = RewardSection(code_api_url=f"{asked[0][0]}/broken", num_verifier_processes=1)
        with closing(VerifierPool(flags)) as pool:
            outcome = score(pool, Check(verifier="code", ground_truth=TESTS), RIGHT)
        assert (
            outcome.score == 0.0
            and outcome.problem is not None
            and "HTTP Error 500" in outcome.problem
        )


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("```python\na\n```\n```text\nb\n```", "a\n"),
        ("```python\na\n```\n```py\nb\n```\nand", "b\n"),
        ("```\na\n```\n```cpp\nb\n```", "b\n"),
        ("a = 1", "a = 1"),
        ("```python\ncut", "cut"),
        ("one `x` and ```y```", "one `x` and ```y```"),
    ],
)
def test_last_block_of_python_is_the_program(completion: str, program: str) -> None:
    assert find_program(completion) == program


@pytest.mark.parametrize(
    ("test", "parts"),
    [
        ("assert add(1, 2) == 3", ("add(1, 2)", "3")),
        ("assert f(x=[1])[0] == -1.5, 'why'", ("f(x=[1])[0]", "-1.5")),
        *(
            (test, (test, ""))
            for test in (
                "assert f(1)",
                "assert f(1) == g(2)",
                "assert f() == 1 == 1",
                "f(",
                "a = 1",
            )
        ),
    ],
)
def test_only_the_call_of_a_test_is_seen(test: str, parts: tuple[str, str]) -> None:
    assert split_assertion(test) == parts


def test_program_that_the_sandbox_cannot_run_is_not_called_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_walls = "from open_instruct.rewards.sandbox.server import Walls\nWalls.put_up = None\nmain("
    monkeypatch.setattr(sandbox, "START", sandbox.START.replace("main(", no_walls))
    with closing(sandbox.Sandbox()) as broken:
        monkeypatch.setattr(code_module, "SANDBOX", broken)
        verifier = code()
        with pytest.raises(RunError, match="ran no program"):
            verifier.score("x = 1", ["assert x == 1"])


class TestRun:
    """A run whose rows are judged by code, or answered by Python, as its driver opens it."""

    ROWS: ClassVar = {
        "code": {"prompt": "Add.", "ground_truth": TESTS, "dataset": "code"},
        "code_stdio": {
            "prompt": "Add.",
            "ground_truth": [{"input": "1", "output": "1"}],
            "dataset": "code_stdio",
        },
        "python": {"prompt": "Add.", "env_config": {"env_name": "python"}},
        "gsm8k": {"prompt": 'Say "verifier": "code".', "ground_truth": "1", "dataset": "gsm8k"},
    }

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return write_tiny_model(tmp_path_factory.mktemp("model"), family="olmo2")

    @pytest.fixture
    def opened(
        self,
        model: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> Callable[..., str]:
        def open_it(name: str, *words: str, has_walls: bool = True) -> str:
            rows = [json.dumps(self.ROWS[each]) for each in ("gsm8k", name)]
            (tmp_path / "rows.jsonl").write_text("\n".join(rows))
            if not has_walls:
                trial = {"ways": ["pass"], "without": "gets out"}
                monkeypatch.setitem(TABLES["trials"], "files", trial)
            required = [
                "--model_name_or_path",
                model,
                "--dataset_mixer_list",
                tmp_path / "rows.jsonl",
                "1.0",
            ]
            required += [
                "--output_dir",
                tmp_path / "out",
                "--cache_dir",
                tmp_path / "cache",
                "--no_plan_check",
            ]
            with open_rollout_run(parse_run(GRPOConfig, [*map(str, required), *words])):
                return " ".join("".join(capfd.readouterr()).split())

        return open_it

    @pytest.mark.parametrize("name", ["code", "code_stdio", "python"])
    def test_wall_that_is_missing_stops_it(self, name: str, opened: Callable[..., str]) -> None:
        missing = "without the wall around files a program gets out"
        with refused("machine", "code_sandbox", "auto", missing):
            opened(name, has_walls=False)
        said = opened(name, "--code_sandbox", "auto", has_walls=False)
        assert missing in said and "these walls stand: network" in said

    def test_code_api_gets_the_time_limit(self, opened: Callable[..., str]) -> None:
        said = opened("code", "--code_sandbox", "auto")
        assert (
            "tests of a program that are not reached in 9 s (--verifier_timeout_s) have failed"
        ) in said and "walls stand" in said

    @pytest.mark.parametrize("name", ["gsm8k", "code"])
    def test_sandbox_is_not_needed_with_a_code_api(
        self, name: str, opened: Callable[..., str]
    ) -> None:
        said = opened(
            name,
            *(["--code_api_url", "http://localhost/test_program"] if name == "code" else []),
            has_walls=False,
        )
        assert "walls" not in said and "prompts" in said
