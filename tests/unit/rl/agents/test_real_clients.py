"""Agents of the Agents SDK, LangChain, smolagents and litellm, unmodified, with their defaults."""

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.core.records import Completion
from tests.clients.environment import PROGRAMS, find_python
from tests.unit.environments.test_environments import Engines
from tests.unit.rl.agents.test_agent_episodes import CALL, Play, decoded
from tests.unit.rl.agents.test_agent_episodes import play as play
from tests.unit.rl.agents.test_agent_episodes import tokenizer as tokenizer

pytestmark = pytest.mark.extended

CALLS = CALL.replace("<|im_end|>", "\n") + CALL.replace("3", "7")
TEXTS = [CALLS, "It is 5.<|im_end|>", "yes, 5<|im_end|>"]
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "5"}}</tool_call><|im_end|>'


def run_client(play: Play, client: str, texts: list[str]) -> tuple[Completion, Engines]:
    command = f"{find_python()} {PROGRAMS / f'with_{client}.py'}"
    completion, engines = play(
        command,
        texts,
        environment_timeout_s=120.0,
        max_turns=8,
        prompt_tokens=20_000,
    )
    episode = completion.episode
    assert episode is not None and episode.problem == "" and episode.status == "done", episode
    assert len(engines.requests) == len(texts)
    return completion, engines


@pytest.mark.parametrize("client", ["agents_sdk", "langchain", "litellm"])
def test_client_that_appends_is_learned_as_one_branch_of_exact_ids(
    play: Play, client: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    completion, engines = run_client(play, client, TEXTS)
    episode = completion.episode
    assert episode is not None and not episode.branches
    assert episode.rewards["agent"] > 0 and decoded(tokenizer, completion) == TEXTS
    whole = episode.prompt_token_ids + completion.token_ids
    for request, reply in zip(engines.requests, completion.replies, strict=True):
        num_before = len(episode.prompt_token_ids) + reply.start
        assert request.prompt_token_ids == whole[:num_before]


def test_smolagents_is_learned_though_it_writes_its_calls_anew(play: Play) -> None:
    completion, engines = run_client(play, "smolagents", [CALLS, FINAL])
    episode = completion.episode
    assert episode is not None and episode.rewards == {"agent": 1.0}
    (branch,) = episode.branches
    # The last of them first, as it is the episode's own.
    prompts = [branch.prompt_token_ids, episode.prompt_token_ids]
    assert prompts == [request.prompt_token_ids for request in engines.requests]
    assert len(completion.replies) == len(branch.replies) == 1
