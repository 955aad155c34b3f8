"""Prompts that recorded sessions answer: what is learned of them, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from open_instruct.core.episodes import BEFORE_RUN
from open_instruct.core.errors import InputError
from open_instruct.core.records import RolloutGroup
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import MixerEntry
from open_instruct.data.prompts import Prompts, load_prompt_dataset
from open_instruct.environments.registry import known_environments
from open_instruct.rewards.verdict import build_verdict
from open_instruct.rl.conductor import build_group_requests
from open_instruct.rl.recorded import RecordedEpisodes, check_recorded_sessions
from open_instruct.rl.samples import RolloutStepBatch, training_samples
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.data.test_session_rows import BETWEEN, PROMPT, Row, make_row, read
from tests.unit.fake_rollouts import grpo_config

CONFIG = grpo_config(
    "--num_samples_per_prompt_rollout", "2", "--advantages", "centered", "--response_length", "64"
)


@pytest.fixture(scope="module")
def chat() -> ChatFormat:
    return ChatFormat.choose(make_tokenizer(CHATML), "chatml")


def load_groups(chat: ChatFormat, folder: Path, change: Callable[[Row], object]) -> Prompts:
    """One prompt: a session of two branches that share a reply, and one of a single reply."""
    rows = [
        make_row("a", [(1,), (2,)], reward=1.0),
        make_row("a", [(1,), (3, 3)], numbers=[0, 2], reward=1.0),
        make_row("b", [(4,)], reward=0.0),
    ]
    for row in rows:
        row["sampled"]["chat_format"] = chat.fingerprint
    (group,) = read(folder, *rows).make_groups(2)
    group = json.loads(json.dumps(group))
    change(group["env_config"])
    path = folder / "groups.jsonl"
    path.write_text(json.dumps(group) + "\n")
    prompts, _ = load_prompt_dataset(
        known_verifiers={},
        judges=["math"],  # which are not asked about sessions that have their rewards
        known_environments=known_environments(CONFIG.environment),
        entries=[MixerEntry(name=str(path), amount=1.0, split="train")],
        chat=chat,
        on_bad_row="error",
        seed=0,
        cache_dir=folder,
        max_prompt_token_length=64,
    )
    return prompts


def answer_prompt(prompts: Prompts) -> RolloutGroup:
    """The group of the one prompt, as a run makes it."""
    prompt = prompts[0]
    requests = build_group_requests(3, prompt, rollout=CONFIG.rollout, response_length=64, seed=0)
    episodes = RecordedEpisodes()
    completions = tuple(episodes.ask(prompt, request).result(0) for request in requests)
    verdicts = [build_verdict(prompt, each, [], CONFIG.reward) for each in completions]
    return RolloutGroup(
        ticket=3,
        prompt=prompt,
        completions=completions,
        verdicts=tuple(verdicts),
    )


def test_every_sampled_token_is_learned_once_by_its_id(chat: ChatFormat, tmp_path: Path) -> None:
    prompts = load_groups(chat, tmp_path, lambda settings: None)
    check_recorded_sessions(prompts, None, CONFIG, chat)
    group = answer_prompt(prompts)
    assert group.rewards == (1.0, 0.0)
    learned = training_samples(RolloutStepBatch(groups=(group,)), config=CONFIG.rollout, version=0)
    by_ids = {sample.document.token_ids: sample for sample in learned.samples}
    main = by_ids[(*PROMPT, 1, *BETWEEN, 3, 3)]
    other = by_ids[(*PROMPT, 1, *BETWEEN, 2)]
    alone = by_ids[(*PROMPT, 4)]
    assert len(by_ids) == 3
    assert main.engine_logprobs == pytest.approx((-0.1, -0.3, -0.3))
    assert main.stream_weights("rl") == (1.0, 1.0, 1.0)
    assert other.stream_weights("rl") == (0.0, 1.0)  # the reply that both have is the main's
    assert [sample.advantage for sample in (main, other, alone)] == [0.5, 0.5, -0.5]
    # Older than the start model, so nobody takes them for samples of the learners' weights.
    assert {*group.completions[0].versions} == {BEFORE_RUN}
    assert learned.metrics["staleness/max"] > 0 and learned.metrics["verifier/recorded"] == 0.5


def add_session(settings: Row) -> None:
    settings["sessions"].append(settings["sessions"][0])


def lengthen(settings: Row) -> None:
    branch = settings["sessions"][1]["branches"][0]["sampled"]
    branch["token_ids"] += [1] * 400


def heat(settings: Row) -> None:
    settings["sessions"][0]["branches"][0]["sampled"]["temperature"] = 0.7


def format_otherwise(settings: Row) -> None:
    settings["sessions"][0]["branches"][1]["sampled"]["chat_format"] = "another"


def forget_sessions(settings: Row) -> None:
    del settings["sessions"]


def break_session(settings: Row) -> None:
    settings["sessions"][0]["branches"][0]["sampled"]["replies"] = []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (add_session, "--num_samples_per_prompt_rollout 2"),
        (lengthen, "--response_length"),
        (heat, "--temperature 1"),
        (format_otherwise, "chat template"),
        (forget_sessions, "--groups"),
        (break_session, "cannot be read"),
    ],
)
def test_sessions_that_do_not_fit_the_run_are_refused(
    chat: ChatFormat, tmp_path: Path, change: Callable[[Row], object], problem: str
) -> None:
    prompts = load_groups(chat, tmp_path, change)
    with pytest.raises(InputError, match=problem):
        check_recorded_sessions(prompts, None, CONFIG, chat)


def test_recorded_sessions_are_no_held_out_prompts(chat: ChatFormat, tmp_path: Path) -> None:
    prompts = load_groups(chat, tmp_path, lambda settings: None)
    with pytest.raises(InputError, match="--eval_split"):
        check_recorded_sessions(prompts, prompts, CONFIG, chat)
