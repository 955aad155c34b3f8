"""OpenAI's own client, unmodified, against the endpoint: each way in which it asks."""

import re
from pathlib import Path

from tests.unit.rl.agents.test_agent_episodes import CALL, Play
from tests.unit.rl.agents.test_agent_episodes import play as play
from tests.unit.rl.agents.test_agent_episodes import tokenizer as tokenizer

AGENT = """
import asyncio
import json

from openai import AsyncOpenAI, BadRequestError, OpenAI

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def solve(messages):
    client = OpenAI()
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=messages, tools=[TOOL])
    message = answer.choices[0].message
    call = message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    history = [*messages, message, {"role": "tool", "content": "5", "tool_call_id": call.id}]
    with client.chat.completions.stream(model=model, messages=history, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "It is 5."
    history += [final.choices[0].message, {"role": "user", "content": "Sure?"}]
    kwargs = dict(model=model, messages=history, tools=[TOOL], logprobs=True)
    answer = asyncio.run(AsyncOpenAI().chat.completions.create(**kwargs))
    tokens = answer.choices[0].logprobs.content
    assert "".join(token.token for token in tokens) == "yes<|im_end|>"
    assert answer.usage.prompt_tokens_details.cached_tokens > 0
    try:
        client.chat.completions.create(model=model, messages=history, temperature=0.1)
    except BadRequestError as error:
        return float(error.param == "temperature")


def respond(messages):
    client = OpenAI()
    tool = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    answer = client.responses.create(
        model="policy", instructions="Be brief.", input=messages, tools=[tool]
    )
    (call,) = answer.output
    assert json.loads(call.arguments) == {"a": 2, "b": 3}
    items = [*messages, *answer.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "5"})
    second = client.responses.create(
        model="policy", instructions="Be brief.", input=items, tools=[tool]
    )
    assert second.output_text == "It is 5."
    with client.responses.stream(
        model="policy",
        instructions="Be brief.",
        previous_response_id=second.id,
        input="Sure?",
        tools=[tool],
    ) as stream:
        final = stream.get_final_response()
    return float(final.output_text == "yes")
"""
TEXTS = [CALL, "It is 5.<|im_end|>", "yes<|im_end|>"]


def test_one_conversation_by_each_api_is_one_branch_of_exact_ids(
    play: Play, tmp_path: Path
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(AGENT)
    for name in ("solve", "respond"):
        completion, engines = play(f"{path}:{name}", TEXTS)
        episode = completion.episode
        assert episode is not None and episode.problem == ""
        assert episode.rewards == {"agent": 1.0} and not episode.branches
        assert len(completion.replies) == 3
        for request, reply in zip(engines.requests[1:], completion.replies, strict=False):
            learned = episode.prompt_token_ids + completion.token_ids[: reply.stop]
            assert request.prompt_token_ids[: len(learned)] == learned


PAGE = Path(__file__).resolve().parents[4] / "docs" / "agents.md"


def test_programs_of_the_page_work(play: Play, tmp_path: Path) -> None:
    blocks = re.findall(r"```(?:python|sh)\n# (\w+\.\w+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    programs = dict(blocks)
    for_a_server = "reward.sh"  # a server that records, and no episode
    assert {*programs} == {"add.py", "ask.sh", "compact.py", for_a_server}
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
    answers = {
        f"{tmp_path / 'add.py'}:solve": ([CALL, "It is 5.<|im_end|>"], {"agent": 1.0}, 0),
        f"bash {tmp_path / 'ask.sh'}": (["5<|im_end|>"], {"agent": 1.0}, 0),
        f"{tmp_path / 'compact.py'}:solve": (["It is 5.<|im_end|>"] * 3, {"right": 1.0}, 2),
    }
    for where, (texts, rewards, num_branches) in answers.items():
        completion, _ = play(where, texts, ground_truth="5")
        episode = completion.episode
        assert episode is not None and episode.problem == "", episode
        assert episode.rewards == rewards and len(episode.branches) == num_branches
