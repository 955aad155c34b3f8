"""Models that judge: what they are asked, how their answers are read, and what goes wrong at their
server.
"""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Check, Prompt
from open_instruct.data.files.rows import MalformedRow
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.rewards.judge import (
    CACHE_FILE,
    JUDGE_COSTS,
    JUDGE_PROMPTS,
    MAX_SHOWN_CHARACTERS,
    parse_rubrics,
)
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.secret_key import hide_key
from open_instruct.rewards.verdict import Outcome
from open_instruct.rl import checked_run
from tests.refusals import refused
from tests.unit.rewards.judge_stub import CUT, Answer, Stub, judge_stub
from tests.unit.scored import completion_of

KEY = "sk-very-secret"
QUESTION = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def trial_or(answer: Answer) -> Answer:
    return lambda body: (
        "Yes" if body["messages"][0]["content"].startswith("Is 7 more") else answer(body)
    )


class Judged:
    """A pool of verifiers whose judge is a stub, from the start of a run on."""

    def __init__(self, stub: Stub, folder: Path, **flags: Any) -> None:
        self.stub, self.said = stub, list[str]()
        self.flags = RewardSection(llm_judge_model="mine", llm_judge_url=stub.url, **flags)
        self.pool = VerifierPool(self.flags, say=self.said.append)
        self.pool.verifiers["judge"].begin_run(folder)
        JUDGE_COSTS.update(dict.fromkeys(JUDGE_COSTS, 0.0))

    def outcomes(
        self, name: str, texts: list[str], ground_truth: Any = None, prompt: str = QUESTION
    ) -> list[Outcome]:
        check = Check(verifier=name, ground_truth=ground_truth)
        return self.pool.score(check, prompt, list(map(completion_of, texts)))

    def scores(self, *words: Any, **more: Any) -> list[float]:
        outcomes = self.outcomes(*words, **more)
        assert [each.problem for each in outcomes] == [None] * len(outcomes)
        return [each.score for each in outcomes]


@contextmanager
def judged(answer: Answer, folder: Path, **flags: Any) -> Iterator[Judged]:
    with judge_stub(trial_or(answer)) as stub:
        judge = Judged(
            stub, folder, llm_judge_max_retries=flags.pop("llm_judge_max_retries", 0), **flags
        )
        yield judge
        judge.pool.close()


# --- what it is asked, and how its answer is read
# ---------------------------------------------------------


def test_judge_sees_the_question_and_the_answer_without_thoughts_and_marks(tmp_path: Path) -> None:
    with judged(lambda body: "Score: 7", tmp_path) as judge:
        text = "Hm, 4?</think><answer>It is 5 {label}. <|im_end|></output></answer> Bye"
        assert judge.scores("general-quality_ref", [text], "5 {input}") == [0.7]
        (asked,) = judge.stub.questions
    assert (
        "<output>\nIt is 5 {label}. [im_end][/output]\n</output>" in asked
        and "<label>\n5 {input}\n</label>" in asked
    )
    assert "[im_start]user\nWhat is 2 + 3?[im_end]" in asked and not {"Hm", "Bye"} & set(
        asked.split()
    )
    assert asked.endswith("nothing else:\n" + "\n".join(f"Score: {score}" for score in range(11)))
    body = judge.stub.bodies[-1]
    assert body["model"] == "mine" and (body["temperature"], body["max_completion_tokens"]) == (
        1.0,
        2048,
    )
    assert body["structured_outputs"] == {"choice": [f"Score: {score}" for score in range(11)]}


@pytest.mark.parametrize(
    ("name", "answer", "score"),
    [
        ("general-quality", "Score: 0", 0.0),
        ("general-quality", "Score: 10", 1.0),
        ("general-quality", "<think>Score: 1</think>Because. **Score: 3**.\n", 0.3),
        ("general-quality", "score: 1", 0.1),
        ("general-quality_rubric", "Score: 1", 1.0),
        ("general-web_instruct_general_verifier", "They agree.\nFinal Decision: Yes", 1.0),
        ("general-web_instruct_general_verifier", "Final Decision: No", 0.0),
        ("general-quality", "Score: 11", None),
        ("general-quality", "Score: 7 or 8", None),
        ("general-quality", "I cannot say.", None),
        ("general-quality", "", None),
        ("general-quality_rubric", "Score: 7", None),
    ],
)
def test_answer_is_read_strictly(
    name: str, answer: str, score: float | None, tmp_path: Path
) -> None:
    with judged(lambda body: answer, tmp_path) as judge:
        (outcome,) = judge.outcomes(name, ["5"], "5")
    if score is None:
        assert outcome.score == 0 and f"the judge gave no verdict, but {answer!r}" in str(
            outcome.problem
        )
    else:
        assert outcome == Outcome(score=score)


@pytest.mark.parametrize("answer", ["<think>Is it Score: 3", "Score: 3"])
def test_answer_that_is_cut_is_no_verdict(answer: str, tmp_path: Path) -> None:
    with judged(lambda body: f"{answer}{CUT}", tmp_path) as judge:
        (outcome,) = judge.outcomes("general-quality", ["5"], "5")
    assert outcome.score == 0 and "--llm_judge_max_tokens" in str(outcome.problem)


def test_each_prompt_of_ours_has_its_places_and_its_verdicts() -> None:
    for name, (prompt, verdicts) in JUDGE_PROMPTS.items():
        assert "{input}" in prompt and "{output}" in prompt
        assert min(verdicts.values()) == 0 and max(verdicts.values()) == 1, name
    names = {
        "quality",
        "quality_rubric",
        "quality_ref",
        "safety",
        "factuality",
        "creative_writing",
        "refusal",
    }
    names |= {"web_instruct_general_verifier"}
    assert {f"general-{name}" for name in names} == JUDGE_PROMPTS.keys() - {"rubric"}


def test_prompt_of_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "kind.txt").write_text("Is this kind?\n{output}")
    with judged(
        lambda body: "Score: 9", tmp_path, llm_judge_prompt=f"{tmp_path}/kind.txt"
    ) as judge:
        assert judge.scores("judge", ["Yes, dear."]) == [0.9]
        assert judge.stub.questions[0].startswith(
            "Is this kind?\nYes, dear.\nAnswer with one of these"
        )
    (tmp_path / "bad.txt").write_text("Is this kind?")
    for file, reason in (("bad.txt", "has no {output}"), ("none.txt", "no such file")):
        with pytest.raises(InputError, match=reason):
            known_verifiers(RewardSection(llm_judge_prompt=f"{tmp_path}/{file}"))


def test_ground_truth_is_needed_where_the_prompt_has_a_place_for_it() -> None:
    verifiers = known_verifiers(RewardSection())
    needing = {
        name
        for name, verifier in verifiers.items()
        if "{label}" in JUDGE_PROMPTS.get(name, ("", {}))[0]
    }
    assert {
        name for name in ("judge", *JUDGE_PROMPTS) if verifiers[name].needs_ground_truth
    } == needing
    assert "general-quality" not in needing and "rubric" in needing


def test_long_completion_is_cut_to_the_context(tmp_path: Path) -> None:
    flags = {"llm_judge_max_context_length": 600, "llm_judge_max_tokens": 100}
    with judged(lambda body: "Score: 2", tmp_path, **flags) as judge:
        assert judge.scores("general-quality", ["word " * 1000]) == [0.2]
        (asked,) = judge.stub.questions
    kept, left_out, _ = asked.partition("<output>\n")[2].partition(
        "\n[The rest is left out.]\n</output>"
    )
    assert left_out and kept == ("word " * 1000)[: len(kept)] and 1500 < len(asked) < 1800


# --- the server
# -------------------------------------------------------------------------------------------


def test_judge_is_asked_once_for_equal_questions(tmp_path: Path) -> None:
    """Equal completions of a group share a request, and a later run asks for none that it finds in
    the cache.
    """

    def slow(body: dict[str, Any]) -> str:
        time.sleep(0.1)
        return "Score: 4"

    with judged(slow, tmp_path) as judge:
        assert judge.scores("general-quality", ["a", "b", "a", "a"]) == [0.4] * 4
        assert len(judge.stub.questions) == 2
        costs = dict(JUDGE_COSTS)
        assert 0.2 <= costs.pop("judge/seconds") < 20
        expected = {"requests": 2, "prompt_tokens": 20, "completion_tokens": 4, "cache_hits": 2}
        assert costs == {f"judge/{name}": value for name, value in expected.items()}
        assert (
            judge.scores("general-quality", ["b"]) == [0.4] and JUDGE_COSTS["judge/cache_hits"] == 3
        )
        # Another run's flags, with one cache.
        again = Judged(judge.stub, tmp_path, llm_judge_concurrency=3)
        assert (
            again.scores("general-quality", ["a", "b"]) == [0.4] * 2
            and len(judge.stub.questions) == 2
        )
        warmer = Judged(judge.stub, tmp_path, llm_judge_temperature=0.5)
        assert warmer.scores("general-quality", ["a"]) == [0.4] and len(judge.stub.questions) == 3


def test_group_is_judged_at_once_but_for_the_limit(tmp_path: Path) -> None:
    def slow(body: dict[str, Any]) -> str:
        time.sleep(0.2)
        return "Score: 1"

    with judged(slow, tmp_path, llm_judge_concurrency=4) as judge:
        assert judge.scores("general-quality", list(map(str, range(8)))) == [0.1] * 8
        assert judge.stub.most_at_once == 4


@pytest.mark.parametrize("limit", ["requests", "tokens", "both"])
def test_requests_and_tokens_a_minute(limit: str, tmp_path: Path) -> None:
    """300 requests, or as many as have the tokens of a question, of 3 characters each, and 2,048 of
    its verdict.
    """
    (tmp_path / "short.txt").write_text("{output}\n")
    asked = "a\n\nAnswer with one of these, and nothing else:\n" + "\n".join(
        JUDGE_PROMPTS["general-quality"][1]
    )
    tokens = 300 * (len(asked) / 3 + 2048)
    flags = {"llm_judge_requests_per_minute": 30000 if limit == "tokens" else 300}
    flags |= (
        {}
        if limit == "requests"
        else {"llm_judge_tokens_per_minute": round(tokens * (100 if limit == "both" else 1))}
    )
    with judged(
        lambda body: "Score: 1", tmp_path, llm_judge_prompt=f"{tmp_path}/short.txt", **flags
    ) as judge:
        began_s = time.monotonic()
        assert judge.scores("judge", list("abcd")) == [0.1] * 4
        assert 3 * 0.19 < time.monotonic() - began_s < 3
        assert judge.stub.questions[0] in [asked.replace("a", letter, 1) for letter in "abcd"]


def test_prompt_of_ours_by_its_name(tmp_path: Path) -> None:
    with judged(
        lambda body: "Correct", tmp_path, llm_judge_prompt="general-web_instruct_general_verifier"
    ) as judge:
        prompt, verdicts = JUDGE_PROMPTS["general-web_instruct_general_verifier"]
        word = max(verdicts, key=lambda verdict: verdicts[verdict])
        judge.stub.answer = lambda body: word
        assert judge.scores("judge", ["5"], "5") == [1.0]
        assert judge.stub.questions[0].startswith(prompt.partition("{")[0])
        assert judge.pool.verifiers["judge"].needs_ground_truth


def test_failure_costs_one_verdict(tmp_path: Path) -> None:
    """And is kept nowhere: the next one who asks may have better luck."""
    failures = ["bad"]

    def answer(body: dict[str, Any]) -> str | int:
        return (
            500
            if [*failures, "-"][0] in body["messages"][0]["content"].partition("<output>")[2][:5]
            else "Score: 6"
        )

    with judged(answer, tmp_path) as judge:
        outcomes = judge.outcomes("general-quality", ["good", "bad", "fine"])
        assert [each.score for each in outcomes] == [0.6, 0.0, 0.6]
        assert [each.problem is None for each in outcomes] == [True, False, True]
        assert "InternalServerError" in str(outcomes[1].problem)
        failures.clear()
        assert judge.scores("general-quality", ["bad"]) == [0.6]


@pytest.mark.parametrize("slow", [3.0, None])
def test_slow_answer_costs_its_verdict(slow: float | None, tmp_path: Path) -> None:
    """One that does not come, and one that comes byte by byte."""
    with judged(lambda body: slow, tmp_path, llm_judge_timeout=0.3) as judge:
        (outcome,) = judge.outcomes("general-quality", ["5"])
    assert outcome.score == 0 and "APITimeoutError" in str(outcome.problem)


def test_request_is_sent_again(tmp_path: Path) -> None:
    statuses = iter([429, 500])
    with judged(
        lambda body: next(statuses, "Score: 8"), tmp_path, llm_judge_max_retries=2
    ) as judge:
        assert judge.scores("general-quality", ["5"]) == [0.8] and len(judge.stub.questions) == 3


def test_server_that_does_not_know_the_form_is_asked_without(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str | int:
        return 400 if "structured_outputs" in body else "Score: 5"

    with judge_stub(answer) as stub:
        judge = Judged(stub, tmp_path)
        assert judge.scores("general-quality", ["5"]) == [0.5]
        assert ["structured_outputs" in body for body in stub.bodies] == [True, False, False]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (401, ("remote", "llm_judge_model", "AuthenticationError")),
        (404, ("remote", "llm_judge_model", "NotFoundError")),
        (400, ("remote", "llm_judge_model", "BadRequestError")),
    ],
)
def test_judge_that_can_never_answer_is_refused_at_the_start(
    answer: int, reason: tuple[Any, ...], tmp_path: Path
) -> None:
    with judge_stub(lambda body: answer) as stub, refused(*reason) as caught:
        Judged(stub, tmp_path, llm_judge_max_retries=0)
    assert "--llm_judge_model mine" in str(caught.value) and "--llm_judge_url" in str(caught.value)
    assert KEY not in str(caught.value)


def test_run_with_nobody_to_ask_is_refused(tmp_path: Path) -> None:
    with judge_stub(lambda body: "Yes") as stub:
        pass
    with refused("remote", "llm_judge_model", "APIConnectionError"):
        Judged(stub, tmp_path, llm_judge_max_retries=0)
    with refused("missing_flag", "llm_judge_model"):
        known_verifiers(RewardSection())["rubric"].begin_run(tmp_path)


def test_cache_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / CACHE_FILE).write_text("something else" * 100)
    with (
        judge_stub(lambda body: "Yes") as stub,
        refused("unreadable_file", "cache_dir", "judge_verdicts.sqlite"),
    ):
        Judged(stub, tmp_path)


def test_key_is_sent_and_told_to_nobody_else(tmp_path: Path) -> None:
    with judged(lambda body: 403, tmp_path) as judge:  # the stub repeats it in its message
        (outcome,) = judge.outcomes("general-quality", ["5"])
        assert set(judge.stub.keys) == {f"Bearer {KEY}"}
        assert "Bearer $OPENAI_API_KEY" in str(outcome.problem)
        assert KEY not in str(outcome.problem) + "".join(judge.said) + repr(judge.flags)
    assert not [path for path in tmp_path.iterdir() if KEY.encode() in path.read_bytes()]


def test_key_that_a_judge_says_is_in_no_problem_when_its_words_are_cut(tmp_path: Path) -> None:
    num_others = MAX_SHOWN_CHARACTERS - len(KEY) // 2
    with judged(lambda body: f"{KEY} {'-' * num_others}", tmp_path) as judge:
        (outcome,) = judge.outcomes("general-quality", ["5"])
        shown = str(outcome.problem) + "".join(judge.said)
    pieces = [KEY[at : at + 4] for at in range(len(KEY) - 3)]
    assert "gave no verdict" in shown and not [each for each in pieces if each in shown]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"a {KEY} b", "a $OPENAI_API_KEY b"),
        (f"{KEY}{KEY}", "$OPENAI_API_KEY" * 2),
        (f"cut: {KEY[2:12]}", "cut: $OPENAI_API_KEY"),
        (f"short: {KEY[:7]}", f"short: {KEY[:7]}"),
    ],
)
def test_pieces_of_the_key_are_taken_out(text: str, shown: str) -> None:
    assert hide_key(text) == shown


@pytest.mark.parametrize("secret", [KEY, "sk-proj-" + "Zz09_/+?" * 4, "0123456789"])
@pytest.mark.parametrize("before", ["", "x", "Bearer ", "key: "])
def test_base64_of_the_key_cannot_be_decoded_when_it_is_taken_out(
    before: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", secret)
    plain = f"{before}{secret} and more".encode()
    pieces = [secret[at : at + 8].encode() for at in range(len(secret) - 7)]
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        shown = hide_key(encode(plain).decode())
        assert "$OPENAI_API_KEY" in shown
        for left in shown.split("$OPENAI_API_KEY"):
            for start in range(4):
                letters = left[start:].encode().translate(bytes.maketrans(b"-_", b"+/"))
                decoded = base64.b64decode(letters[: len(letters) // 4 * 4] or b"")
                assert not [piece for piece in pieces if piece in decoded]


def test_cache_of_verdicts_names_no_key(tmp_path: Path) -> None:
    with judged(lambda body: "Score: 5", tmp_path) as judge:
        assert judge.scores("general-quality", [f"The key is {KEY}."]) == [0.5]
        files = [path.read_bytes() for path in tmp_path.glob(f"{CACHE_FILE}*")]
    stored = b"".join(files)
    assert b"Score: 5" in stored
    assert KEY.encode() not in stored and base64.b64encode(KEY.encode())[:-4] not in stored


def test_judge_is_one_verifier_of_several(tmp_path: Path) -> None:
    with judged(lambda body: "Score: 5", tmp_path) as judge:
        checks = (
            Check(verifier="gsm8k", ground_truth="5"),
            Check(verifier="general-quality", ground_truth=None),
        )
        prompt = Prompt(row_id=0, token_ids=(1,), text=QUESTION, checks=checks)
        assert judge.pool.judges_groups(prompt)
        verdicts = judge.pool.judge(prompt, [completion_of("5"), completion_of("4")])
    assert [verdict.scores for verdict in verdicts] == [
        {"gsm8k": 1.0, "general-quality": 0.5},
        {"gsm8k": 0.0, "general-quality": 0.5},
    ]


def test_run_begins_with_a_first_question_if_a_prompt_names_a_judge(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", family="olmo2")
    words = [
        "--model_name_or_path",
        str(model),
        "--dataset_mixer_list",
        f"{tmp_path}/rows.jsonl",
        "1.0",
    ]
    words += [
        "--num_unique_prompts_rollout",
        "1",
        "--total_episodes",
        "4",
        "--cache_dir",
        f"{tmp_path}/cache",
    ]
    words += ["--output_dir", f"{tmp_path}/out", "--report_to", "--param_dtype", "float32"]

    def begin(verifier: str, *more: str) -> None:
        row = {"prompt": "Why?", "dataset": ["gsm8k", verifier], "ground_truth": "5"}
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        with checked_run.open_rollout_run(parse_run(GRPOConfig, [*words, *more])):
            pass

    with judge_stub(lambda body: "Yes") as stub:
        judge = ["--llm_judge_model", "mine", "--llm_judge_url", stub.url]
        begin("string_f1", *judge)
        assert not stub.bodies
        with refused("missing_flag", "llm_judge_model"):
            begin("general-quality", "--overwrite_output_dir")
        begin("general-quality", *judge, "--overwrite_output_dir")
        assert len(stub.bodies) == 1 and (tmp_path / "cache" / CACHE_FILE).exists()
    told = [
        path
        for path in (tmp_path / "out").rglob("*")
        if path.is_file() and KEY.encode() in path.read_bytes()
    ]
    assert "llm_judge_model" in (tmp_path / "out" / "config.yaml").read_text() and told == []


# --- rubrics
# ----------------------------------------------------------------------------------------------


def test_rubric_is_the_weighted_mean_of_its_criteria(tmp_path: Path) -> None:
    """Worked out by hand: (2 x 1 + 1 x 0.5 - 1 x 1) / 4."""
    scores = {"It is right.": "Score: 2", "It is short.": "Score: 1", "It is rude.": "Score: 2"}

    def answer(body: dict[str, Any]) -> str:
        return scores[body["messages"][0]["content"].partition("<label>\n")[2].partition("\n")[0]]

    truth = {
        "query": "Why?",
        "rubrics": [
            {"description": "It is right.", "weight": 2},
            {"rubric_item": "It is short."},
            {"Ingredient": "It is rude.", "weight": -1.0},
        ],
    }
    with judged(answer, tmp_path) as judge:
        assert judge.scores("rubric", ["Because."], truth) == [0.375]
        assert len(judge.stub.questions) == 3
        assert all("<input>\nWhy?\n</input>" in asked for asked in judge.stub.questions)


@pytest.mark.parametrize(
    "truth",
    [
        "not JSON",
        "[]",
        {},
        {"rubrics": []},
        {"rubrics": "all"},
        {"rubrics": [{"title": "no description"}]},
        {"rubrics": [{"description": "a", "weight": "much"}]},
        {"rubrics": [{"description": "a", "weight": 0}]},
        {"rubrics": [{"description": "a", "weight": float("nan")}]},
    ],
)
def test_malformed_rubric_is_refused(truth: Any) -> None:
    with pytest.raises(ValueError, match="it must be"):
        parse_rubrics(truth)


def test_rows_are_checked_when_they_are_read() -> None:
    verifiers = known_verifiers(RewardSection())
    row = {"prompt": "Why?", "dataset": "General-Quality"}
    _, (check,), _ = parse_prompt_row(row, verifiers)
    assert (check.verifier, check.ground_truth) == ("general-quality", None)
    for other, reason in (
        ({"dataset": "general-quality_ref"}, "no 'ground_truth'"),
        ({"dataset": "rubric", "ground_truth": "{}"}, "'ground_truth' for 'rubric': it must be"),
        (
            {"dataset": "max_length", "ground_truth": "long"},
            "'ground_truth' for 'max_length': it must be a number of tokens",
        ),
        (
            {"dataset": "ifeval_old", "ground_truth": "long"},
            "'ground_truth' for 'ifeval_old': it must be an object or its JSON",
        ),
    ):
        with pytest.raises(MalformedRow, match=reason):
            parse_prompt_row(row | other, verifiers)
