"""A real vLLM as an engine's core: what it answers is what our learners would compute."""

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from open_instruct.batching.documents import pack_documents
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.records import Completion, Document, Span
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.training.model.forward import token_logprobs
from open_instruct.training.model.routing import record_routing
from tests.fleet.grpo_case import finished
from tests.fleet.vllm_session import (
    MAX_TOKENS,
    NUM_REQUESTS,
    STEPS_BEFORE_UPDATE,
    STOP_TOKEN_IDS,
    TEMPERATURE,
    requests,
)
from tests.ranks import programs

SESSION = Path(__file__).with_name("vllm_session.py")
CPU = torch.device("cpu")
TOLERANCE = 1e-4

pytestmark = pytest.mark.extended


class Session:
    """What the engine answered, and the two models that it had."""

    def __init__(self, folders: list[Path], answers: dict[str, Any]) -> None:
        self.folders = folders
        self.answers = answers
        self.tokenizer = AutoTokenizer.from_pretrained(folders[0])

    def completions(self, name: str) -> list[Completion]:
        return [completion_of(answer) for answer in self.answers[name]]


def completion_of(answer: dict[str, Any]) -> Completion:
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in answer.items()
    }
    return Completion(**fields | {"routes": bytes.fromhex(answer["routes"])})


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    pytest.importorskip("vllm", reason="needs vLLM")
    folder = tmp_path_factory.mktemp("session")
    folders = [
        write_tiny_model(folder / f"model{seed}", family="qwen3_moe", seed=seed)
        for seed in range(2)
    ]
    answers = folder / "answers.json"
    words = [str(SESSION), *map(str, folders), str(answers)]
    finished(programs.start(words), exit_code=0)
    return Session(folders, json.loads(answers.read_text()))


@cache
def learner(folder: Path) -> Any:
    hf_config = load_hf_config(folder)
    model = build_model(hf_config)
    model.init_weights(device=CPU, max_seq_len=128)
    files = CheckpointFiles.open(folder)
    stream_load(model, files, TensorNames(hf_config))
    return model


def chosen_experts(folder: Path, token_ids: tuple[int, ...]) -> np.ndarray:
    """The learner's own, of every token: (T, layers, K), in ascending order."""
    document = Document(token_ids=token_ids, responses=(Span(start=1, stop=len(token_ids)),))
    with record_routing(learner(folder)) as layers:
        token_logprobs(learner(folder), pack_documents([document]), device=CPU)
    return np.stack([np.sort(layer.take_routing()[0][1].numpy()) for layer in layers], axis=1)


@torch.no_grad()
def learner_logprobs(
    folder: Path, completions: list[Completion], temperature: float
) -> list[list[float]]:
    """As the learner takes them, with all completions in one packed row."""
    documents = [
        Document(
            token_ids=(*asked.prompt_token_ids, *completion.token_ids),
            responses=(
                Span(
                    start=len(asked.prompt_token_ids),
                    stop=len(asked.prompt_token_ids) + len(completion.token_ids),
                ),
            ),
        )
        for asked, completion in zip(requests(), completions, strict=True)
    ]
    tokens = token_logprobs(
        learner(folder), pack_documents(documents), device=CPU, temperature=temperature
    )
    lengths = [len(completion.token_ids) for completion in completions]
    return [part.tolist() for part in tokens.logprobs_N.split(lengths)]


def largest_difference(
    completions: list[Completion], expected: list[list[float]], *, version: int = 0
) -> float:
    return max(
        abs(ours - theirs)
        for completion, logprobs in zip(completions, expected, strict=True)
        for ours, theirs, made_by in zip(
            logprobs, completion.logprobs, completion.versions, strict=True
        )
        if made_by == version
    )


def test_settings_left_open_on_a_gpu_are_those_of_vllms_llm(session: Session) -> None:
    """And not as for its bare engine, whose step has 2,048 tokens."""
    assert session.answers["on_cuda"] == {
        "as": "LLM_CLASS",
        "max_num_seqs": 256,
        "max_num_batched_tokens": None,
        "async_scheduling": True,
        "logprobs_mode": "processed_logprobs",
    }


def test_gpu_that_another_has_filled_is_told_with_the_share_that_would_work(
    session: Session,
) -> None:
    too_much, a_little_too_much, taken = session.answers["refused_share"].values()
    assert taken is None
    assert (
        "--vllm_gpu_memory_utilization 0.9 is 71.2 of 79.1 GiB, and 30.16 GiB are free" in too_much
    )
    assert "--single_gpu_mode" in too_much
    assert ": use 0.38, or less" in too_much and ": use 0.38, or less" in a_little_too_much


def test_at_the_start_its_log_probs_are_seen_to_know_the_temperature(session: Session) -> None:
    warm, hot = map(dict, session.answers["probed"])
    shared = sorted(warm.keys() & hot.keys())
    assert len(shared) >= 5
    for one, other in pairwise(shared):
        assert warm[one] - warm[other] == pytest.approx(2 * (hot[one] - hot[other]), abs=TOLERANCE)


def test_same_seed_same_tokens(session: Session) -> None:
    first, again = session.completions("sampled"), session.completions("sampled_backwards")[::-1]
    assert [it.token_ids for it in first] == [it.token_ids for it in again]
    # Four of each prompt differ by nothing but their seeds.
    assert len({it.token_ids for it in first}) == NUM_REQUESTS
    assert [it.seed for it in first] == [asked.seed for asked in requests()]


def test_temperature_0_takes_the_likeliest_whatever_the_seed(session: Session) -> None:
    greedy = session.completions("greedy")
    assert len({it.token_ids for it in greedy}) == NUM_REQUESTS // 4


def test_logprobs_are_the_learners_under_the_temperature(session: Session) -> None:
    sampled = session.completions("sampled")
    assert (
        largest_difference(sampled, learner_logprobs(session.folders[0], sampled, TEMPERATURE))
        < TOLERANCE
    )
    assert (
        largest_difference(sampled, learner_logprobs(session.folders[0], sampled, 1.0))
        > 100 * TOLERANCE
    )


@pytest.mark.parametrize("name", ["sampled", "updated", "back"])
def test_stop_token_ends_a_completion_and_is_its_last(session: Session, name: str) -> None:
    completions = session.completions(name)
    reasons = [it.finish_reason for it in completions]
    assert {"stop", "length"} == set(reasons)
    for it in completions:
        *before, last = it.token_ids
        assert not set(before) & set(STOP_TOKEN_IDS)
        assert (last in STOP_TOKEN_IDS) == (it.finish_reason == "stop")
        said = before if it.finish_reason == "stop" else it.token_ids
        assert it.text == session.tokenizer.decode(said, skip_special_tokens=False)
        assert it.finish_reason == "stop" or len(it.token_ids) == MAX_TOKENS


def test_limit_cuts_a_completion(session: Session) -> None:
    short = session.completions("short")
    for cut, whole in zip(short, session.completions("sampled"), strict=True):
        assert cut.token_ids == whole.token_ids[:3]
        assert cut.is_truncated == (len(whole.token_ids) > 3 or whole.is_truncated)


def test_stop_string_ends_a_completion(session: Session) -> None:
    assert len(session.answers["stopped"]) >= 3
    for answer in session.answers["stopped"]:
        whole, stopped = completion_of(answer["whole"]), completion_of(answer["stopped"])
        assert stopped.finish_reason == "stop"
        assert stopped.text.endswith(answer["stop"])
        assert whole.text.startswith(stopped.text)
        assert answer["stop"] not in stopped.text[: -len(answer["stop"])]
        num_tokens = len(stopped.token_ids)
        assert stopped.token_ids == whole.token_ids[:num_tokens]
        assert len(stopped.logprobs) == len(stopped.versions) == num_tokens
        # The tokens say it, and without the last they do not.
        assert answer["stop"] in session.tokenizer.decode(stopped.token_ids)
        assert answer["stop"] not in session.tokenizer.decode(stopped.token_ids[:-1])


def test_too_long_a_prompt_is_refused_and_the_longest_is_not(session: Session) -> None:
    assert session.answers["refused"] == (
        "the prompt has 37 tokens, and a completion of 60 leaves it 1 to 36 of the engine's 96"
    )
    assert len(session.completions("longest")) == 1


def test_update_in_flight_changes_the_version_within_a_completion(session: Session) -> None:
    """The tokens so far stay, with the log-probs of who made them; the rest is of the new weights
    altogether.
    """
    updated, before = session.completions("updated"), session.completions("sampled")
    both = [it for it in updated if set(it.versions) == {0, 1}]
    assert len(both) > NUM_REQUESTS // 2
    assert {it.versions.count(0) for it in both} <= set(range(1, STEPS_BEFORE_UPDATE + 1))
    for it, unchanged in zip(updated, before, strict=True):
        assert list(it.versions) == sorted(it.versions)
        num_old = it.versions.count(0)
        assert it.token_ids[:num_old] == unchanged.token_ids[:num_old]
    for version in range(2):
        expected = learner_logprobs(session.folders[version], updated, TEMPERATURE)
        assert largest_difference(updated, expected, version=version) < TOLERANCE
        assert largest_difference(updated, expected, version=1 - version) > 100 * TOLERANCE


@pytest.mark.parametrize(
    "name", ["sampled", "sampled_backwards", "short", "updated", "back", "after_cancel"]
)
def test_experts_of_a_token_are_those_with_which_the_next_was_sampled(
    session: Session, name: str
) -> None:
    """Also of prompts that were cached, and of tokens that are computed again since the weights
    have changed.
    """
    folders = [*session.folders, session.folders[0]]
    asked = {"sampled_backwards": requests()[::-1], "after_cancel": requests()[1:2]}.get(
        name, requests()
    )
    for request, it in zip(asked, session.completions(name), strict=True):
        num_prompt, token_ids = (
            len(request.prompt_token_ids),
            (*request.prompt_token_ids, *it.token_ids),
        )
        own = {version: chosen_experts(folders[version], token_ids) for version in set(it.versions)}
        experts = np.frombuffer(it.routes, dtype=np.int16).reshape(
            len(token_ids) - 1, *own[it.versions[0]].shape[1:]
        )
        for at, told in enumerate(np.sort(experts)):
            assert np.array_equal(told, own[it.versions[max(at + 1 - num_prompt, 0)]][at])


def test_old_weights_are_gone_after_an_update(session: Session) -> None:
    """Not in the cache of prefixes either: the prompts are those that were asked before the
    update.
    """
    other = session.completions("other")
    assert {version for it in other for version in it.versions} == {1}
    expected = learner_logprobs(session.folders[1], other, TEMPERATURE)
    assert largest_difference(other, expected, version=1) < TOLERANCE
    back = session.completions("back")
    assert {version for it in back for version in it.versions} == {2}
    assert [it.token_ids for it in back] == [it.token_ids for it in session.completions("sampled")]


def test_cancelled_requests_leave_the_others_alone(session: Session) -> None:
    assert session.completions("after_cancel") == session.completions("back")[1:2]


def test_engine_that_ends_makes_no_room_for_another(session: Session) -> None:
    assert session.answers["made_room"] is False
