"""What an engine of ours takes for granted of vLLM's scheduler and second model runner, as GPUs
have them, holds there.

`queue_session.py` runs both without a GPU, as far as they are Python; the table is in docs/gpu.md.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.generation.requests import make_sampling_seed
from tests.fleet.grpo_case import finished
from tests.fleet.queue_case import STOP, TEMPERATURE, logits_of, requests
from tests.ranks import programs

pytestmark = pytest.mark.extended

SESSION = Path(__file__).with_name("queue_session.py")
CANCELLED = 3


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm", reason="needs vLLM")
    folder = tmp_path_factory.mktemp("queue")
    model = write_tiny_model(folder / "model", family="olmo2")
    words = [str(SESSION), str(model), str(folder / "out.json")]
    finished(programs.start(words), exit_code=0)
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def faults(round_: dict[str, Any], *, without: int | None = None) -> list[str]:
    """What is wrong with the completions of a round; every token and its log-prob must be what the
    weights of its version give after the prompt and all tokens before it.
    """
    found = []
    for number, (asked, answer) in enumerate(zip(requests(), round_["answers"], strict=True)):
        if number == without:
            continue
        tokens, versions = answer["token_ids"], answer["versions"]
        if not len(tokens) == len(versions) == len(answer["logprobs"]):
            found.append(f"{number}: {len(tokens)} tokens, {len(versions)} versions")
        if answer["seed"] != asked.seed:
            found.append(f"{number}: the seed of another")
        ends = (
            tokens[-1] == STOP
            if answer["finish_reason"] == "stop"
            else len(tokens) == asked.sampling.max_tokens
        )
        if not ends:
            found.append(f"{number}: ends after {len(tokens)} tokens")
        before = list(asked.prompt_token_ids)
        num_prompt = len(before)
        for token, version, logprob in zip(tokens, versions, answer["logprobs"], strict=True):
            logits = logits_of(before, num_prompt=num_prompt, version=version, vocab_size=512)
            expected = (logits / TEMPERATURE).log_softmax(-1)[token]
            if token != int(logits.argmax()) or abs(float(expected) - logprob) > 1e-5:
                found.append(f"{number}: token {token} of version {version}")
            before.append(token)
    return found


def test_two_steps_are_in_flight(said: dict[str, Any]) -> None:
    assert said["in flight at most"] == 2


def test_settling_leaves_nothing_in_flight_and_loses_no_token(said: dict[str, Any]) -> None:
    """Whichever step the weights change before, and then again a step or four later."""
    seen = said["settled seen"]
    assert (
        seen["in flight while weights change"] == seen["updated in flight"] == 0 < seen["updated"]
    )
    assert [fault for round_ in said["settled"] for fault in faults(round_)] == []
    changes = [
        set(answer["versions"]) for round_ in said["settled"] for answer in round_["answers"]
    ]
    assert {len(each) for each in changes} == {1, 2, 3}


def test_preempted_request_keeps_its_token_in_flight(said: dict[str, Any]) -> None:
    """Where the cache is full; and it goes on from all of its tokens, in a slot of its own."""
    assert said["settled seen"]["preempted in flight"] > 0
    assert said["slots left"] == [0, 8]


def test_token_in_flight_is_dropped_where_an_update_does_not_wait(said: dict[str, Any]) -> None:
    """vLLM's own guard behind ours: it is drawn again, of the new weights, and called so."""
    assert said["unsettled seen"]["updated in flight"] > 0
    assert [fault for round_ in said["unsettled"] for fault in faults(round_)] == []


def test_wrong_version_would_be_seen(said: dict[str, Any]) -> None:
    assert any("of version" in fault for fault in faults(said["mislabelled"]))


def test_cancelling_one_in_flight_leaves_the_others(said: dict[str, Any]) -> None:
    assert (
        faults(said["cancelled"], without=CANCELLED) == []
        and said["cancelled"]["answers"][CANCELLED] == {}
    )


def test_requests_of_several_versions_name_one_adapter(said: dict[str, Any]) -> None:
    """The first runner counts adapters, the second their names; both have one slot, and it holds
    the newest.
    """
    assert faults(said["adapted"]) == []
    assert said["names of an adapter"] == 3


def test_second_runner_answers_after_the_temperature(said: dict[str, Any]) -> None:
    """All engines here have been started, and so were asked; one without is refused, with the
    flag.
    """
    assert (
        "at temperature 1 and by 0.45 at temperature 2" in said["raw"]
        and "--vllm_runner v1" in said["raw"]
    )


def test_seeds_fit_into_the_second_runner() -> None:
    """It keeps them as 64 bits with a sign."""
    assert max(make_sampling_seed(number) for number in range(100)) < 2**63
