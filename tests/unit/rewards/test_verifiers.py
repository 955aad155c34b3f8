"""Verifiers, the processes they are killed in, and the reward made of them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Prompt
from open_instruct.parallel.processes import has_ended
from open_instruct.rewards.answers import Passthrough, has_r1_format
from open_instruct.rewards.event_loop import await_entries
from open_instruct.rewards.pool import VerifierPool, score_completions
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.verdict import Outcome, build_verdict
from tests.refusals import refused
from tests.unit.scored import completion_of, score

REPOSITORY = Path(__file__).resolve().parents[3]
USER_MODULE = Path(__file__).with_name("odd_verifiers.py").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def user_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("users")
    (folder / "odd_verifiers.py").write_text(USER_MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        sys.modules.pop("odd_verifiers", None)
        yield "odd_verifiers"


@contextmanager
def open_pool(
    *words: str, num_processes: int = 1, timeout_s: float = 60, **said: Any
) -> Iterator[VerifierPool]:
    """Within a minute nothing is taken for what does not end, also on a machine that is busy."""
    flags = RewardSection(
        verifier=list(words), num_verifier_processes=num_processes, verifier_timeout_s=timeout_s
    )
    pool = VerifierPool(flags, **said)
    try:
        yield pool
    finally:
        pool.close()


# A pool starts processes that load much, which takes seconds: tests that leave none behind share
# one.
@pytest.fixture(scope="module")
def pool(user_module: str) -> Iterator[VerifierPool]:
    with open_pool(f"{user_module}:Odd", f"{user_module}:Inline", num_processes=2) as pool:
        yield pool


@pytest.fixture(scope="module")
def hasty_pool(user_module: str) -> Iterator[VerifierPool]:
    """For what does not end."""
    with open_pool(f"{user_module}:Odd", num_processes=2, timeout_s=0.5) as pool:
        yield pool


def check(verifier: str, ground_truth: Any = None, weight: float = 1.0) -> Check:
    return Check(verifier=verifier, ground_truth=ground_truth, weight=weight)


@pytest.mark.parametrize(
    ("verifier", "completion", "ground_truth", "expected"),
    [
        ("gsm8k", "3 + 4 is 7, so 7 * 6 = 42.", "42", 1.0),
        ("gsm8k", "#### 1,250", "1250", 1.0),
        ("gsm8k", "it costs $72.00", 72, 1.0),
        ("gsm8k", "72%", "so she has\n#### 72", 1.0),
        ("gsm8k", "-3", "3", 0.0),
        ("gsm8k", "7-2", "2", 1.0),
        ("gsm8k", "42 then 43", "42", 0.0),
        ("gsm8k", "no number", "42", 0.0),
        ("gsm8k", "42", "no number", 0.0),
        ("string_matcher", "I think.\nAnswer: The Eiffel Tower!", "eiffel tower", 1.0),
        ("string_matcher", "Paris", ["Lyon", "paris"], 1.0),
        ("string_matcher", "Answer: Paris\nAnswer: Lyon", "Paris", 0.0),
        ("string_matcher", "It is Paris", "Paris", 0.0),
        ("string_f1", "a big red dog", "the red cat", 0.4),
        ("string_f1", "x", ["y", "x"], 1.0),
        ("string_f1", "", "x", 0.0),
        ("passthrough", "anything", None, 0.0),
        # Upstream's, worked out by hand from its source.
        ("flan", "So.\nThe answer is: A dog. The answer is: The Cat!", "cat", 1.0),
        ("flan", "the cat", "Cat", 1.0),
        ("flan", "The answer is: cat food", "cat", 0.0),
        ("puzzle", "<answer>The red, house</answer>", "red house", 1.0),
        ("puzzle", "It is <answer>red</answer>", "red", 1.0),
        ("puzzle", "Answer: red", "red", 0.0),
        ("re_search", "I found <FINISH> Paris.</finish> <finish>Lyon</finish>", "paris", 1.0),
        ("re_search", "<finish>Lyon</finish>", '["Paris", "lyon"]', 1.0),
        ("re_search", "<finish>42</finish>", "42", 1.0),
        ("re_search", "<finish>Lyon</finish>", ["Paris"], 0.0),
        ("re_search", "<finish> </finish>", "the", 0.0),
        ("re_search", "<finish>Lyon", "Lyon", 0.0),
        ("re_search_f1", "<finish>a</finish> <finish>big red dog</finish>", "the red cat", 0.4),
        ("re_search_f1", "<finish>red dog</finish>", '["blue", "dog"]', 2 / 3),
        ("re_search_f1", "<finish>red</finish>", "blue", 0.1),
        ("re_search_f1", "red</finish>", "red", 1.0),
        ("re_search_f1", "<finish>red", "red", 1.0),
        ("re_search_f1", "<finish></finish>", "blue", 0.0),
        ("re_search_f1", "red", "red", 0.0),
        ("max_length", [7] * 100, "100", 1.0),
        ("max_length", [7] * 16484, 100, 0.5),
        ("max_length", [7] * 16384, "32768", 0.5),
        ("max_length", [7] * 40000, 1, 0.0),
        ("up_to_max_length", [7] * 1, "100", 1.0),
        ("up_to_max_length", [7] * 8292, "100", 0.75),
        (
            "strict_math",
            "Final Answer: The final answer is $\\frac{1}{2}$. I hope it is correct.",
            "0.5",
            1.0,
        ),
        (
            "strict_math",
            "Final Answer: The final answer is 3. I hope it is correct. No, \\boxed{4}.",
            "3",
            1.0,
        ),
        ("strict_math", "\\frac{1}{2}", "0.5", 1.0),
        ("strict_math", "It is \\boxed{4}.", "4", 0.0),
        ("ifeval_old", "no comma", '{"func_name": "validate_no_commas", "N": null}', 1.0),
        ("ifeval_old", "one, comma", {"func_name": "validate_no_commas"}, 0.0),
    ],
)
def test_scores(verifier: str, completion: str, ground_truth: Any, expected: float) -> None:
    assert known_verifiers(RewardSection())[verifier].score(
        completion, ground_truth
    ) == pytest.approx(expected)


WRAPPED = {"re_search": "<finish>{}</finish>", "re_search_f1": "<finish>{}</finish>"}


@pytest.mark.parametrize(
    "name",
    ["gsm8k", "math", "strict_math", "string_matcher", "string_f1", "flan", "puzzle", *WRAPPED],
)
def test_each_verifier_of_answers_takes_any_of_a_list(name: str) -> None:
    verifier = known_verifiers(RewardSection())[name]
    truths: list[Any] = [41, "42"]
    verifier.check_ground_truth(truths)
    for answer, expected in (("41", 1.0), ("42", 1.0), ("43", 0.0)):
        score = verifier.score(WRAPPED.get(name, "{}").format(answer), truths)
        # F1 of ReSearch is 0.1 for an answer of the right form.
        assert score == expected or (expected, score) == (0.0, 0.1)
    for useless in ([], [" "], ["42", ""], ["42", None], [["42"]], {"answer": "42"}, None):
        with pytest.raises(ValueError):
            verifier.check_ground_truth(useless)


@pytest.mark.parametrize("length", [["7"], {}, "long", -1, "nan", None])
def test_length_that_is_none_is_refused(length: Any) -> None:
    with pytest.raises(ValueError, match="number of tokens"):
        known_verifiers(RewardSection())["max_length"].check_ground_truth(length)


@pytest.mark.parametrize(
    ("completion", "ground_truth", "expected"),
    [
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{(\pi, 1)}", r"(1, \pi)", 0.0),
        ("The final answer is 3/4.", r"\boxed{\frac{3}{4}}", 1.0),
        ("I get $x=7$", "7", 1.0),
        ("I do not know", "7", 0.0),
        (r"\boxed{", "7", 0.0),
        (r"\boxed{__import__('os').getpid()}", "7", 0.0),
    ],
)
def test_answers_of_mathematics_are_found(
    completion: str, ground_truth: str, expected: float
) -> None:
    assert known_verifiers(RewardSection())["math"].score(completion, ground_truth) == expected


class TestPool:
    @pytest.mark.parametrize(
        "answer", ["9^9^9^9^9", "(" * 5000 + "1" + ")" * 5000, "factorial(10^9)", "x" * 200_000]
    )
    def test_mathematics_that_does_not_end_is_ended(
        self, hasty_pool: VerifierPool, answer: str
    ) -> None:
        # Loads sympy, which takes its time, or is killed and does not.
        score(hasty_pool, check("math", "2"), r"\boxed{2}")
        assert score(hasty_pool, check("math", "7"), rf"\boxed{{{answer}}}").score == 0.0

    def test_reasoning_is_not_judged(self, pool: VerifierPool) -> None:
        assert score(pool, check("gsm8k", "5"), "5</think> it is 6").score == 0.0
        assert score(pool, check("gsm8k", "6"), "5</think> it is 6").score == 1.0

    def test_length_is_that_in_tokens(self) -> None:
        with open_pool() as pool:
            one = score(pool, check("max_length", 16385), "a long text of one token")
            assert (
                one.score == 0.5
                and score(pool, check("up_to_max_length", 1), "thought</think> it").score == 1.0
            )

    def test_verifier_of_the_users_runs_elsewhere(self, pool: VerifierPool) -> None:
        assert score(pool, check("odd"), "0.25").score == 0.25
        assert score(pool, check("odd"), "pid").score not in (0.0, 1 / os.getpid())

    @pytest.mark.parametrize(
        ("completion", "problem"),
        [
            ("hang", "odd: took more than 0.5 s, or died"),
            ("flood", "odd: took more than 0.5 s, or died"),
            ("die", "odd: took more than 0.5 s, or died"),
            ("exit", "odd: SystemExit"),
            ("not a number", "odd: ValueError"),
            ("7", "odd: gave 7.0, which is not between 0 and 1"),
            ("nan", "odd: gave nan, which is not finite"),
        ],
    )
    def test_failing_verifier_gives_no_score(
        self, hasty_pool: VerifierPool, completion: str, problem: str
    ) -> None:
        outcome = score(hasty_pool, check("odd"), completion)
        assert outcome.score == 0.0
        assert outcome.problem is not None
        assert outcome.problem.startswith(problem)
        assert score(hasty_pool, check("odd"), "0.5").score == 0.5

    def test_processes_of_a_verifier_end_with_it(
        self, user_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        with open_pool(f"{user_module}:Odd", timeout_s=0.5) as pool:
            outcome = score(pool, check("odd"), "leave a child and hang")
        assert outcome.problem == "odd: took more than 0.5 s, or died"
        assert_ends(int(Path("spinning").read_text()))

    @pytest.mark.parametrize("then", ["", " and hang", " and die"])
    def test_daemon_that_a_verifier_has_started_ends_with_it(
        self, user_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
    ) -> None:
        """It has a session of its own, and its parent has ended."""
        monkeypatch.chdir(tmp_path)
        with open_pool(f"{user_module}:Odd", timeout_s=5 if then == " and hang" else 60) as pool:
            outcome = score(pool, check("odd"), f"leave a daemon{then}")
            daemon = int(Path("spinning").read_text())
            if then:
                assert_ends(daemon)
            else:
                assert outcome.problem is None and not has_ended(daemon)
        assert_ends(daemon)

    @pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere nothing tells that a child has ended"
    )
    def test_child_that_holds_its_socket_keeps_nobody_waiting(
        self, user_module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        began_s = time.monotonic()
        with open_pool(f"{user_module}:Odd", timeout_s=300) as pool:
            assert (
                score(pool, check("odd"), "leave a child and die").problem
                == "odd: took more than 300 s, or died"
            )
        assert time.monotonic() - began_s < 200

    @pytest.mark.parametrize("completion", ["twins", "forge", "read"])
    def test_answer_is_that_to_the_question(self, user_module: str, completion: str) -> None:
        """Not that of a child that came back, nor what a verifier wrote wherever it could."""
        with open_pool(f"{user_module}:Odd") as pool:
            scores = [
                score(pool, check("odd"), text).score
                for text in (completion, "0.75", "1", completion, "0", "1")
            ]
        assert scores == [0.25, 0.75, 1, 0.25, 0, 1]

    @pytest.mark.parametrize(("given", "num_threads"), [(None, 4), ("3", 3)])
    def test_workers_divide_the_cores(
        self, user_module: str, monkeypatch: pytest.MonkeyPatch, given: str | None, num_threads: int
    ) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        with open_pool(f"{user_module}:Odd", num_processes=2) as pool:
            outcome = score(pool, check("odd"), "threads")
        assert outcome.score == 1 / num_threads

    def test_long_completion_arrives_whole(self, pool: VerifierPool) -> None:
        outcome = score(pool, check("odd"), "x" * 3_000_000)
        assert outcome.problem is not None and outcome.problem.startswith("odd: ValueError")
        assert len(outcome.problem) < 1000

    @pytest.mark.parametrize("kind", ["odd", "inline"])
    def test_first_problem_is_told_once_with_its_traceback(
        self, user_module: str, kind: str
    ) -> None:
        said: list[str] = []
        words = [f"{user_module}:Odd", f"{user_module}:Inline"]
        with open_pool(*words, say=said.append) as pool:
            for completion in ("good luck", "0.5", "worse luck"):
                score(pool, check(kind), completion)
        assert len(said) == 1
        assert (
            f"the verifier {kind}: ValueError: could not convert string to float: 'good luck'"
            in said[0]
        )
        assert "return float(completion)" in said[0]

    def test_many_threads_share_few_processes(self, pool: VerifierPool) -> None:
        wanted = [index / 40 for index in range(40)]
        with ThreadPoolExecutor(8) as threads:
            assert [
                o.score for o in threads.map(lambda x: score(pool, check("odd"), str(x)), wanted)
            ] == wanted

    @pytest.mark.parametrize("completion", ["not a number", "7", "nan"])
    def test_failure_in_the_driver_is_a_problem(self, pool: VerifierPool, completion: str) -> None:
        outcome = score(pool, check("inline"), completion)
        assert outcome.score == 0.0
        assert outcome.problem == score(pool, check("odd"), completion).problem.replace(
            "odd", "inline", 1
        )

    def test_worker_outlives_the_thread_that_needed_it_first(self, user_module: str) -> None:
        scores = []
        with open_pool(f"{user_module}:Odd") as pool:
            for _ in range(2):
                with ThreadPoolExecutor(1) as thread:
                    scores.append(thread.submit(score, pool, check("odd"), "pid").result().score)
                time.sleep(0.2)
        assert scores[0] == scores[1] > 0

    @pytest.mark.parametrize(
        ("completion", "platform"),
        [
            ("", sys.platform),
            ("spin", sys.platform),
            ("multiply", sys.platform),
            ("leave a child", sys.platform),
            ("leave a daemon", sys.platform),
            ("spin", "other"),
            ("multiply", "other"),
        ],
    )
    def test_workers_end_with_a_parent_that_is_killed(
        self, user_module: str, tmp_path: Path, completion: str, platform: str
    ) -> None:
        """Idle, busy, and not giving other threads a turn; and with them what their verifiers have
        left behind.

        Elsewhere than on Linux no kernel tells of a parent's end.
        """
        code = f"""
import os, signal, threading, time
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.records import Check
from open_instruct.rewards.sandbox import sandbox
from open_instruct.rewards.pool import VerifierPool, score_completions
sandbox.START = "import psutil, sys; sys.platform = {platform!r}" + sandbox.START  # psutil knows no "other"
pool = VerifierPool(RewardSection(verifier=["{user_module}:Odd"], num_verifier_processes=1, verifier_timeout_s=300))
odd = Check(verifier="odd", ground_truth=None)
from tests.unit.scored import completion_of, score
print(round(1 / score(pool, odd, "pid").score), flush=True)
if {completion!r}:
    threading.Thread(target=score, args=(pool, odd, {completion!r})).start()
    while not os.path.exists("spinning"):
        time.sleep(0.05)
os.kill(os.getpid(), signal.SIGKILL)
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.stdout.strip().isdecimal(), run.stderr
        assert_ends(int(run.stdout))
        if completion.startswith("leave a"):
            assert_ends(int((tmp_path / "spinning").read_text()))


class Short(Passthrough):
    """Says too little, or is asked about tokens."""

    reads = "token_ids"

    def judge_all(self, *, completions: Sequence[Any], **asked: Any) -> list[float]:
        return [float(len(completions[0]))]


def test_number_of_scores_that_is_wrong_is_the_verifiers_problem() -> None:
    asked = {"prompt": "", "ground_truth": None}
    assert score_completions(Short(), completions=["ab"], are_truncated=[False], **asked) == {
        "scores": [2.0]
    }
    told = score_completions(Short(), completions=["a", "b"], are_truncated=[False, False], **asked)
    assert "1 reward for 2 completions" in told["problem"]


def test_verifier_of_tokens_gets_those_of_its_thoughts(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pool.verifiers, "passthrough", Short())
    completion = replace(
        completion_of("so</think>it"), token_ids=(1, 2, 3), logprobs=(0.0,) * 3, versions=(0,) * 3
    )
    monkeypatch.setattr(Short, "is_bounded", False)
    (outcome,) = pool.score(check("passthrough"), "", [completion])
    assert outcome == Outcome(score=3.0)


def test_each_completion_has_the_time_of_a_verdict(
    pool: VerifierPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another verifier of its prompt judges groups, and all are asked about together."""
    asked: list[int] = []
    ask = pool._ask_worker
    monkeypatch.setattr(
        pool, "_ask_worker", lambda name, of: asked.append(len(of["completions"])) or ask(name, of)
    )
    outcomes = pool.score(check("odd"), "", [completion_of("pid"), completion_of("pid")])
    assert asked == [1, 1] and len(outcomes) == 2


def test_scores_may_be_awaited_beside_others() -> None:
    async def later() -> float:
        return 2.0

    assert await_entries([1.0, later()]) == [1.0, 2.0]


class TestAsync:
    WORDS = ("Waits", "WaitsTogether", "WaitsForAll")

    @pytest.mark.parametrize("name", ["waits", "waits_together", "waits_for_all"])
    def test_async_verifiers_share_one_loop(self, user_module: str, name: str) -> None:
        """Also from many threads; one that raises, or exits, costs its own score and no other."""
        with (
            open_pool(*(f"{user_module}:{word}" for word in self.WORDS)) as pool,
            ThreadPoolExecutor(4) as threads,
        ):
            texts = ["0.01", "0.02", "no number", "exit", "0.03"]
            outcomes = list(threads.map(lambda text: score(pool, check(name), text), texts))
        assert [outcome.score for outcome in outcomes] == [0.01, 0.02, 0, 0, 0.03]
        told = [str(outcome.problem).partition(": ")[2].partition(":")[0] for outcome in outcomes]
        assert told == ["", "", "ValueError", "SystemExit", ""]

    def test_group_is_awaited_at_once(self, user_module: str) -> None:
        with open_pool(f"{user_module}:WaitsTogether") as pool:
            began_s = time.monotonic()
            outcomes = pool.score(
                check("waits_together"), "", [completion_of(text) for text in ["0.5"] * 8 + ["x"]]
            )
            assert time.monotonic() - began_s < 2
        assert [outcome.score for outcome in outcomes] == [0.5] * 8 + [0]
        assert [outcome.problem is None for outcome in outcomes] == [True] * 8 + [False]

    def test_verifier_that_never_answers_is_ended(self, user_module: str) -> None:
        with open_pool(f"{user_module}:Waits", timeout_s=0.5) as pool:
            assert (
                score(pool, check("waits"), "600").problem == "waits: took more than 0.5 s, or died"
            )


def assert_ends(process_id: int) -> None:
    """The process is gone within seconds; it is killed where it is not."""
    deadline = time.monotonic() + 10
    while not has_ended(process_id):
        if time.monotonic() > deadline:
            os.kill(process_id, signal.SIGKILL)
            pytest.fail("the worker outlived its parent")
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("no_such_module:X", ("own_code", "verifier")),
        ("odd_verifiers:NoSuchClass", ("own_code", "verifier")),
        ("odd_verifiers:NotOne", ("own_code", "verifier", "neither")),
        ("odd_verifiers:Silent", ("own_code", "verifier", "score method")),
        ("odd_verifiers:Clash", ("own_code", "verifier", "'gsm8k'")),
        ("odd_verifiers:ifeval", ("own_code", "verifier", "'ifeval'")),
    ],
)
def test_verifier_that_cannot_be_used_is_refused(
    user_module: str, word: str, message: tuple[Any, ...]
) -> None:
    with refused(*message):
        known_verifiers(RewardSection(verifier=[word]))


def test_form_of_thinking_and_answering() -> None:
    assert has_r1_format("<think>hm\nhm</think>\n<answer>5</answer>")
    assert has_r1_format("hm</think><answer>5</answer>")
    for text in (
        "<answer>5</answer>",
        "<think>hm</think>5",
        "<think>a</think><answer>5</answer> more",
        "",
    ):
        assert not has_r1_format(text)


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "\x1c"])
    ).map("".join)
)
def test_form_is_what_a_pattern_says_slowly(text: str) -> None:
    pattern = r"\s*(?:<think>)?(?:(?!</?think>).)*</think>\s*<answer>.*</answer>\s*"
    assert has_r1_format(text) == (re.fullmatch(pattern, text, flags=re.DOTALL) is not None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "piece", [" ", "<think>", "</think>", "</think><answer>", "</answer> ", "<answer>"]
)
def test_form_of_long_texts_takes_no_time(piece: str) -> None:
    assert not has_r1_format(piece * 1_000_000)


class TestOwnFiles:
    """What `--verifier` names, and nothing else that lies in the working folder."""

    @pytest.fixture(autouse=True)
    def in_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "mine.py").write_text(USER_MODULE)
        monkeypatch.chdir(tmp_path)

    @pytest.mark.parametrize("word", ["mine.py:Odd", "./mine.py:Odd", "mine:Odd"])
    def test_file_of_the_working_folder(self, word: str) -> None:
        with open_pool(word, word.replace("Odd", "Inline")) as pool:
            assert [score(pool, check(name), "0.25") for name in ("odd", "inline")] == [
                Outcome(score=0.25)
            ] * 2
        assert "mine" not in sys.modules

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("word", "entry"),
        [
            ("mine.py:Odd", [str(REPOSITORY / "open_instruct" / "grpo_olmo_core_actor.py")]),
            ("mine:NotThere", ["-P", "-m", "open_instruct.cli", "grpo"]),
        ],
    )
    def test_every_entry_finds_it(
        self, monkeypatch: pytest.MonkeyPatch, word: str, entry: list[str]
    ) -> None:
        monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
        (write_tiny_model("no_weights", family="olmo2") / "model.safetensors").unlink()
        Path("x.jsonl").touch()
        flags = (
            f"--verifier {word} --model_name_or_path ./no_weights --dataset_mixer_list x.jsonl 1.0"
        )
        words = [*entry, *flags.split(), "--output_dir", "out"]
        run = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=300)
        # What is looked at next is not whole either.
        assert run.returncode == 2
        assert ("no_weights" in run.stderr) == ("Odd" in word), run.stderr
        assert ("NotThere" in run.stderr) == ("Odd" not in word), run.stderr

    def test_installed_module_goes_before_a_file_of_its_name(self) -> None:
        Path("mine.py").rename("sympy.py")
        with refused("own_code", "verifier", "'Odd'"):
            known_verifiers(RewardSection(verifier=["sympy:Odd"]))
        assert "odd" in known_verifiers(RewardSection(verifier=["sympy.py:Odd"]))

    def test_file_that_is_gone_or_raises(self) -> None:
        Path("raises.py").write_text("import sys\nsys.exit(3)\n")
        for word, reason in (
            ("gone.py:Odd", "FileNotFoundError"),
            ("raises.py:Odd", "SystemExit: 3"),
        ):
            with pytest.raises(InputError, match=reason):
                known_verifiers(RewardSection(verifier=[word]))

    def test_worker_says_why_it_did_not_start(self) -> None:
        said: list[str] = []
        with open_pool("mine.py:Odd", say=said.append) as pool:
            Path("mine.py").unlink()
            outcomes = [score(pool, check("odd"), "0.5") for _ in range(2)]
        assert all("FileNotFoundError" in str(outcome.problem) for outcome in outcomes)
        assert "Traceback" in said[0]

    @pytest.mark.parametrize("paths", [None, os.pathsep])
    def test_verifier_process_imports_nothing_else(
        self, monkeypatch: pytest.MonkeyPatch, paths: str | None
    ) -> None:
        """An empty entry of PYTHONPATH, which shells make by mistake, means the working folder to
        Python.
        """
        planted = (
            "sympy",
            "mpmath",
            "gmpy2",
            "langdetect",
            "json",
            "re",
            "worker",
            "sitecustomize",
            "open_instruct",
        )
        for name in planted:
            Path(f"{name}.py").write_text("open('planted_ran', 'w').write(__name__)\n")
        if paths is None:
            monkeypatch.delenv("PYTHONPATH", raising=False)
        else:
            monkeypatch.setenv("PYTHONPATH", paths)
        with open_pool("mine.py:Odd", timeout_s=300) as pool:
            outcomes = [
                score(pool, check("math", "2x"), r"\boxed{x + x}"),
                score(pool, check("odd"), "1"),
            ]
        assert not Path("planted_ran").exists()
        assert outcomes == [Outcome(score=1.0)] * 2


class TestReward:
    def reward(
        self, pool: VerifierPool, text: str, *checks: Check, truncated: bool = False, **config: Any
    ) -> float:
        prompt = Prompt(row_id=0, token_ids=(1,), text="?", checks=checks)
        completion = completion_of(text, is_truncated=truncated)
        outcomes = [pool.score(check, prompt.text, [completion])[0] for check in checks]
        return build_verdict(prompt, completion, outcomes, RewardSection(**config)).reward

    def test_scores_are_weighted_or_added_up(self, pool: VerifierPool) -> None:
        checks = (check("gsm8k", "5", weight=3.0), check("string_matcher", "no", weight=1.0))
        assert self.reward(pool, "5", *checks, verification_reward=10.0) == pytest.approx(7.5)
        assert self.reward(
            pool, "5", *checks, verification_reward=10.0, several_verifiers="sum"
        ) == pytest.approx(30.0)

    def test_format_gates_or_adds(self, pool: VerifierPool) -> None:
        good, bad = "x</think><answer>5</answer>", "5"
        config: dict[str, Any] = {
            "apply_r1_style_format_reward": True,
            "r1_style_format_reward": 0.5,
        }
        assert self.reward(pool, good, check("gsm8k", "5"), **config) == 1.5
        assert self.reward(pool, bad, check("gsm8k", "5"), **config) == 0.0
        assert (
            self.reward(pool, bad, check("gsm8k", "5"), **config, additive_format_reward=True)
            == 1.0
        )

    def test_completion_that_was_cut_gets_the_penalty(self, pool: VerifierPool) -> None:
        config: dict[str, Any] = {"non_stop_penalty": True, "non_stop_penalty_value": -1.0}
        assert self.reward(pool, "5", check("gsm8k", "5"), truncated=True, **config) == -1.0
        assert self.reward(pool, "5", check("gsm8k", "5"), **config) == 1.0

    def test_problems_are_reported(self, pool: VerifierPool) -> None:
        prompt = Prompt(row_id=0, token_ids=(1,), text="?", checks=(check("odd"),))
        (verdict,) = pool.judge(prompt, [completion_of("die")])
        assert (verdict.reward, verdict.scores, len(verdict.problems)) == (0.0, {"odd": 0.0}, 1)
