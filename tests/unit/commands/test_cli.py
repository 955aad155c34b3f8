"""Exit codes, what is said on stderr and by whom, and what is not loaded for it."""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from open_instruct import __version__, cli
from open_instruct.commands import failures
from open_instruct.commands.failures import LAUNCHER_ERROR_FILE
from open_instruct.commands.process import (
    command_as_typed,
    run_entry,
    run_to_exit_code,
)
from open_instruct.commands.run_flags import find_backend
from open_instruct.core.errors import (
    EXIT_FAILURE,
    EXIT_INPUT,
    EXIT_OF_SIGNAL,
    EXIT_PREEMPTED,
    InputError,
    RunError,
)
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.parallel.launch import COMMAND_VARIABLE
from open_instruct.parallel.status import this_process
from open_instruct.run.cadence import record_signals

REPOSITORY = Path(__file__).resolve().parents[3]
REQUIRED = ["--model_name_or_path", "model", "--mixer_list", "rows.jsonl", "1.0"]
TORCHRUN = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1"}


@pytest.fixture(autouse=True)
def outside_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TORCHRUN, "RANK", "NUM_NODES", LAUNCHER_ERROR_FILE):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been slept."""
    slept: list[float] = []
    monkeypatch.setattr(failures.time, "sleep", slept.append)
    return slept


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `code`, and fail if it loaded torch."""
    guard = (
        "\nheavy = {'torch', 'olmo_core', 'transformers', 'datasets'} & set(sys.modules)\nassert "
        "not heavy, heavy\n"
    )
    return subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}{guard}sys.exit(code)"],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def run_dpo(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python(
        f"from open_instruct.cli import main\ncode = main(['dpo', *{list(words)!r}])", **environment
    )


def test_letter_that_the_terminal_lacks_ends_no_command() -> None:
    code = "from open_instruct.commands.process import run_to_exit_code\n"
    code += "code = run_to_exit_code(lambda: print('caf\\xe9 \\u2264 3') or 0, program='x')"
    done = run_python(code, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout, done.stderr) == (0, "caf\\xe9 \\u2264 3\n", "")


EVERY_HELP = """
from contextlib import redirect_stdout
from io import StringIO
from open_instruct import cli

for name in cli.COMMANDS:
    with redirect_stdout(StringIO()) as said:
        code = cli.main([name, "--help"])
    assert (code, said.getvalue()[:7]) == (0, "usage: "), name
for words in (["--help"], ["--version"], ["nope"], ["layout", "--gpus_per_node", "2", "4", "--json"]):
    cli.main(words)
code = 0
"""

EVERY_LINE = """
import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from open_instruct.cli import main

answers = []
for words in LINES:
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main(["dpo", *words])
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
code = 0
"""


class TestWithoutTorch:
    def test_every_command_answers_help(self) -> None:
        done = run_python(EVERY_HELP)
        assert done.returncode == 0 and "Traceback" not in done.stderr

    def test_help_is_said_by_rank_0_alone(self) -> None:
        done = run_dpo("--help", RANK="1")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    def test_bad_flags_are_refused(self) -> None:
        """Each line in the same process."""
        lines = [
            (["--lerning_rate", "1"], "did you mean --learning_rate?"),
            ([*REQUIRED, "--output_dir", "out", "--beta", "0"], "--beta 0.0: must be above 0"),
            (
                [*REQUIRED, "--output_dir", "out", "--fsdp_shard_degree", "3"],
                "--fsdp_shard_degree 3",
            ),
            ([*REQUIRED, "--output_dir", "out", "--single_gpu_mode"], "--single_gpu_mode"),
            (["gone.yaml"], "gone.yaml: no such file"),
        ]
        done = run_python(f"LINES = {[words for words, _ in lines]!r}\n{EVERY_LINE}", **TORCHRUN)
        assert done.returncode == 0, done.stderr
        answers = json.loads(done.stdout)
        for (words, part), (code, out, err) in zip(lines, answers, strict=True):
            assert (code, out) == (EXIT_INPUT, ""), words
            assert part in err
            assert "Traceback" not in err
            assert "--help" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("words", "code", "out", "err"),
    [
        (["--version"], 0, f"open-instruct {__version__}\n", ""),
        (["--help"], 0, "usage: open-instruct COMMAND", ""),
        *((["--help"], 0, f"  {summary}\n", "") for summary, _ in cli.COMMANDS.values()),
        ([], EXIT_INPUT, "", "usage: open-instruct COMMAND"),
        (["layuot"], EXIT_INPUT, "", "'layuot' is not a command; did you mean layout?"),
        # A refusal steers no terminal.
        (
            ["report", "gone\x9b31m\u202e\x1b[2J"],
            EXIT_INPUT,
            "",
            "gone\\x9b31m\\u202e\\x1b[2J holds no run",
        ),
    ],
)
def test_command_prints_its_usage(
    words: list[str], code: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == code
    said = capsys.readouterr()
    assert out in said.out and err in said.err
    assert bool(said.out) is bool(out) and bool(said.err) is bool(err)


@pytest.mark.parametrize("words", [["--help"], ["dpo", "--help"]])
def test_reader_that_has_read_enough_is_no_failure(words: list[str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "open_instruct.cli", *words],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before the first line
        assert (process.wait(60), process.stderr.read()) == (0, b"")


class TestTyped:
    """The command that messages name."""

    @pytest.mark.parametrize(
        ("argv", "environ", "name"),
        [
            (["/venv/bin/open-instruct", "dpo", "--beta", "0"], {}, "open-instruct dpo"),
            (["/repo/open_instruct/cli.py", "grpo"], {}, "open-instruct grpo"),
            (["open_instruct/dpo.py", "--beta", "0"], {}, "dpo.py"),
            (
                ["open_instruct/dpo.py", "--beta", "0"],
                {COMMAND_VARIABLE: "open-instruct dpo"},
                "open-instruct dpo",
            ),
        ],
    )
    def test_program_is_named_as_typed(
        self, argv: list[str], environ: dict[str, str], name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys, "argv", argv)
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        assert command_as_typed("dpo.py") == name

    @pytest.mark.parametrize(
        ("argv", "says", "asks"),
        [
            (["/bin/open-instruct", "dpo"], "open-instruct dpo: ", "`open-instruct dpo --help`"),
            (["there/dpo.py"], "dpo.py: ", "`python there/dpo.py --help`"),
        ],
    )
    def test_refusal(
        self,
        argv: list[str],
        says: str,
        asks: str,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", argv)
        assert (
            run_entry(DPOConfig, lambda config: 0, [], program="dpo.py", validate=validate_dpo)
            == EXIT_INPUT
        )
        first, last = capsys.readouterr().err.splitlines()
        assert first.startswith(says) and asks in last


Outcome = Callable[..., tuple[int, str]]


@pytest.fixture
def outcome(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Outcome:
    """Run an entry with more `words`, whose `main` returns or raises `result`: its exit code, and
    what it said.
    """

    def run(
        words: str = "", result: int | BaseException = 0, output_dir: Path = tmp_path
    ) -> tuple[int, str]:
        def main(config: DPOConfig) -> int:
            if isinstance(result, BaseException):
                raise result
            return result

        argv = [*REQUIRED, "--output_dir", str(output_dir), *words.split()]
        code = run_entry(DPOConfig, main, argv, program="dpo", validate=validate_dpo)
        said = capsys.readouterr()
        assert said.out == ""
        return code, said.err

    return run


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def while_handling(error: Exception, context: Exception) -> Exception:
    error.__context__ = context
    return error


NOT_CALLED = AssertionError("main was called")
FULL_DISK = OSError(errno.ENOSPC, "No space left on device")


class TestEntry:
    @pytest.mark.parametrize("code", [0, EXIT_PREEMPTED])
    def test_code_of_main_is_the_exit_code(self, outcome: Outcome, code: int) -> None:
        assert outcome(result=code) == (code, "")

    def test_unneeded_flags_are_named_in_one_line(self, outcome: Outcome) -> None:
        code, said = outcome(
            "--with_tracking --hf_repo_url u --logging_steps 1 --deepspeed_stage 3"
        )
        assert code == 0
        (line,) = [line for line in said.splitlines() if "left out" in line]
        assert line.startswith(
            "dpo: not needed here, and left out: --with_tracking (metrics.jsonl is always written;"
        )
        assert "; --hf_repo_url (--hub_model_id says" in line and "; --logging_steps (" in line

    def test_main_gets_the_config_of_the_command_line(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(
            sys, "argv", ["dpo.py", *REQUIRED, "--output_dir", str(tmp_path), "--beta", "5"]
        )
        betas: list[float] = []

        def main(config: DPOConfig) -> int:
            betas.append(config.loss.beta)
            return 7

        assert run_entry(DPOConfig, main, None, program="dpo", validate=validate_dpo) == 7
        assert betas == [5.0]

    @pytest.mark.parametrize(
        ("installed", "environ", "told"),
        [
            (
                False,
                {"WANDB_API_KEY": "key"},
                "--report_to wandb needs the wandb package: pip install",
            ),
            (
                True,
                {},
                (
                    "--report_to wandb: nobody has logged in here: run `wandb login`, or set "
                    "WANDB_API_KEY"
                ),
            ),
            (
                True,
                {"WANDB_BASE_URL": "https://wandb.example.org", "NETRC": "netrc"},
                "nobody has logged in",
            ),
            (True, {"NETRC": "netrc"}, ""),
            (True, {"WANDB_API_KEY": "key"}, ""),
            (True, {"WANDB_MODE": "offline"}, ""),
        ],
    )
    def test_wandb_is_there_before_anything_starts(
        self,
        installed: bool,
        environ: dict[str, str],
        told: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        outcome: Outcome,
    ) -> None:
        # The path that is set below has no installed packages, nor Python's own.
        find_backend("olmo_core")
        for name in ("requests", "netrc"):
            pytest.importorskip(name)
        for name in [name for name in os.environ if name.startswith("WANDB_") or name == "NETRC"]:
            monkeypatch.delenv(name)
        for name, value in (environ | {"HOME": str(tmp_path)}).items():
            monkeypatch.setenv(name, value)
        monkeypatch.chdir(tmp_path)
        (tmp_path / "netrc").write_text("machine api.wandb.ai login user password key\n")
        (tmp_path / "wandb").mkdir()  # of earlier runs: no package
        (tmp_path / "packages").mkdir()
        if installed:
            (tmp_path / "packages" / "wandb.py").write_text("raise AssertionError('imported')")
        monkeypatch.setattr(sys, "path", [str(tmp_path / "packages"), str(tmp_path)])
        code, said = outcome("--report_to wandb", NOT_CALLED if told else 0)
        assert code == (EXIT_INPUT if told else 0) and told in said

    def test_main_is_not_called_with_bad_flags(self, outcome: Outcome) -> None:
        code, said = outcome("--beta x", NOT_CALLED)
        assert code == EXIT_INPUT and said.startswith(
            "dpo: --beta takes a number, or none, not 'x'\n"
        )

    def test_other_ranks_leave_bad_flags_to_rank_0(
        self, tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, waits: list[float]
    ) -> None:
        monkeypatch.setenv("RANK", "3")
        monkeypatch.setenv(LAUNCHER_ERROR_FILE, str(tmp_path / "error.json"))
        assert outcome("--beta x") == (EXIT_INPUT, "")
        assert waits == [failures.OTHER_RANKS_WAIT_S]
        assert not (tmp_path / "error.json").exists()

    def test_launcher_is_left_the_message(
        self, tmp_path: Path, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error_file = tmp_path / "error.json"
        monkeypatch.setenv(LAUNCHER_ERROR_FILE, str(error_file))
        assert outcome("--beta x")[0] == EXIT_INPUT
        failure = json.loads(error_file.read_text())["message"]
        assert failure["message"].startswith(
            "dpo: --beta takes a number, or none, not 'x'\nNothing was started."
        )
        assert int(failure["extraInfo"]["timestamp"]) > 0

    def test_warnings_do_not_stop(self, outcome: Outcome) -> None:
        code, said = outcome("--eval_mixer_list held_out.jsonl 1")
        assert (
            code == 0
            and "dpo: warning: --eval_mixer_list held_out.jsonl 1 takes a single row" in said
        )

    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (InputError("rows.jsonl line 3: fix it"), EXIT_INPUT),
            (RunError("the disk went away"), EXIT_FAILURE),
        ],
    )
    def test_known_failures_are_a_message(
        self, tmp_path: Path, outcome: Outcome, waits: list[float], error: Exception, code: int
    ) -> None:
        assert outcome(result=error) == (code, f"dpo: {error}\n")
        assert waits == []
        assert not (tmp_path / "run.log").exists()

    def test_unknown_failures_leave_their_traceback_in_the_log(
        self, tmp_path: Path, outcome: Outcome
    ) -> None:
        (tmp_path / "run.log").write_text("earlier lines\n")
        code, said = outcome(result=KeyError("lost"))
        first, last = said.splitlines()
        assert (code, first) == (EXIT_FAILURE, "dpo failed: KeyError: 'lost'")
        assert f"The traceback is in {tmp_path / 'run.log'}." in last and "again" in last
        log = (tmp_path / "run.log").read_text()
        assert log.startswith("earlier lines\nrank 0 failed:\nTraceback") and log.endswith(
            "KeyError: 'lost'\n"
        )

    def test_traceback_is_on_stderr_without_a_run_directory(
        self, tmp_path: Path, outcome: Outcome
    ) -> None:
        code, said = outcome(result=KeyError("lost"), output_dir=tmp_path / "never made")
        assert code == EXIT_FAILURE and said.startswith("Traceback")
        assert "The traceback is above." in said.splitlines()[-1]

    def test_out_of_memory_names_the_flags_that_help(self, outcome: Outcome) -> None:
        code, said = outcome(result=OutOfMemoryError("CUDA out of memory"))
        assert (
            code == EXIT_FAILURE and "halve --per_device_train_batch_size" in said.splitlines()[-1]
        )

    @pytest.mark.parametrize(
        "error",
        [
            FULL_DISK,
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            RuntimeError(
                "[enforce fail at inline_container.cc:672] . PytorchStreamWriter failed writing "
                "file data/0"
            ),
            ValueError("Error while serializing: I/O error: No space left on device (os error 28)"),
            while_handling(RuntimeError("unexpected pos 640 vs 534"), FULL_DISK),
        ],
    )
    def test_full_disk_is_one_sentence_whoever_meets_it(
        self, tmp_path: Path, outcome: Outcome, error: Exception
    ) -> None:
        (tmp_path / "step20").mkdir()
        (tmp_path / "step100").mkdir()
        code, said = outcome(result=error)
        (line,) = said.splitlines()
        assert code == EXIT_FAILURE and "the disk is full" in line and "make room" in line
        assert f"go on from the last checkpoint, {tmp_path / 'step100'}" in line

    def test_disk_that_holds_stderr_too_is_met_in_silence(
        self, outcome: Outcome, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Path("/dev/full").open("w") as full:
            monkeypatch.setattr(sys, "stderr", full)
            assert outcome(result=FULL_DISK)[0] == EXIT_FAILURE
            monkeypatch.undo()
            with contextlib.suppress(OSError):
                full.close()

    def test_sigterm_is_one_line_and_143(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = signal.getsignal(signal.SIGTERM)

        def main(config: DPOConfig) -> int:
            this_process.begin("reading the rows")
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("it came back")

        argv = [*REQUIRED, "--output_dir", str(tmp_path)]
        assert run_entry(DPOConfig, main, argv, program="dpo", validate=validate_dpo) == 143
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("dpo: SIGTERM while reading the rows. There is no checkpoint yet")
        assert signal.getsignal(signal.SIGTERM) is before

    def test_ctrl_c_is_one_line(self, outcome: Outcome) -> None:
        code, said = outcome(result=KeyboardInterrupt())
        (line,) = said.splitlines()
        assert code == EXIT_FAILURE and "interrupted while" in line
        assert "the same command, given again, starts from the beginning" in line

    def test_rank_that_fails_alone_is_heard_after_rank_0_had_its_say(
        self, outcome: Outcome, monkeypatch: pytest.MonkeyPatch, waits: list[float]
    ) -> None:
        monkeypatch.setenv("RANK", "3")
        error = InputError("model-3.safetensors is truncated")
        assert outcome(result=error) == (
            EXIT_INPUT,
            "[rank 3] dpo: model-3.safetensors is truncated\n",
        )
        assert waits == [failures.OTHER_RANKS_WAIT_S]

    def test_commands_without_a_run_promise_no_checkpoint(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted() -> int:
            raise KeyboardInterrupt

        assert run_to_exit_code(interrupted, program="open-instruct layout") == EXIT_FAILURE
        assert "checkpoint" not in capsys.readouterr().err


UNEQUAL_NODES = {"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("environ", "words", "code"),
    [
        (TORCHRUN, "--fsdp_shard_degree 3", EXIT_INPUT),
        (TORCHRUN, "--fsdp_shard_degree 2", 0),
        (TORCHRUN, "--single_gpu_mode", EXIT_INPUT),
        ({}, "--single_gpu_mode", 0),
        (UNEQUAL_NODES, "--fsdp_shard_degree 4", 0),  # checked once the ranks have met
    ],
)
def test_nodes_of_the_launcher_are_checked(
    outcome: Outcome,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    words: str,
    code: int,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert outcome(words)[0] == code


@pytest.fixture
def heeded() -> Iterator[None]:
    """Ctrl-C and a hangup, also where the tests were started by something that has them ignored."""
    own = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in own.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("number", "code"), [*EXIT_OF_SIGNAL.items()])
def test_stop_that_a_library_catches_is_none_the_less_one(
    number: int, code: int, heeded: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """As PyTorch's C++ does, which takes whatever is raised while it imports numpy for numpy's
    being absent.
    """

    def main() -> int:
        this_process.begin("starting")
        with contextlib.suppress(BaseException):
            os.kill(os.getpid(), number)
        this_process.begin("reading the rows")
        return 0

    assert run_to_exit_code(main, program="dpo.py") == code
    assert " while starting. " in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL


class StopsWhenDeleted:
    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def test_stop_that_comes_where_nothing_can_be_raised_leaves_no_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main() -> int:
        this_process.begin("starting")
        del_at_once = StopsWhenDeleted()
        del del_at_once
        this_process.begin("reading the rows")
        return 0

    assert run_to_exit_code(main, program="dpo.py") == EXIT_PREEMPTED
    (line,) = capsys.readouterr().err.splitlines()
    assert "SIGTERM while starting. " in line


def test_stop_inside_a_library_is_reported_as_a_stop(capsys: pytest.CaptureFixture[str]) -> None:
    """Functions in C may return with the stop set, of which Python makes a SystemError."""

    def main() -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        except BaseException as stop:
            raise SystemError("returned a result with an exception set") from stop
        return 0

    assert run_to_exit_code(main, program="dpo.py") == EXIT_PREEMPTED
    assert "SystemError" not in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signals_stay_ignored_and_sigterm_stops(number: int, heeded: None) -> None:
    """`nohup COMMAND`, and `COMMAND &` in a script."""
    signal.signal(number, signal.SIG_IGN)

    def main() -> int:
        with record_signals() as noted:
            os.kill(os.getpid(), number)
            assert noted.number is None
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    assert run_to_exit_code(main, program="dpo.py") == EXIT_PREEMPTED
    assert signal.getsignal(number) is signal.SIG_IGN


def test_second_signal_ends_at_once_but_for_a_hangup_which_comes_twice(heeded: None) -> None:
    for number, ends in ((signal.SIGHUP, False), (signal.SIGTERM, True)):
        with (
            record_signals(second_ends_at_once=True) as noted,
            pytest.raises(KeyboardInterrupt) if ends else contextlib.nullcontext(),
        ):
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)
        assert noted.number == number
