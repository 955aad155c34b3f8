"""What agents do to their histories, and the ids that are sampled and learned whatever they do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from open_instruct.core.records import Completion, RolloutGroup, Verdict
from open_instruct.data.chat import ChatFormat
from open_instruct.data.templates.chat_templates import ChatTemplate, choose_chat_template
from open_instruct.rl.agents.finished_session import build_completion
from open_instruct.rl.agents.messages import Turn
from open_instruct.rl.agents.session_tree import HistoryRefused, ReplyPoint, SessionTree
from open_instruct.rl.branches import make_samples
from open_instruct.rl.episodes.bridge import TurnTemplate
from tests.tiers import num_examples
from tests.unit.data.test_chat import CHATML, LLAMA3, make_tokenizer
from tests.unit.fake_rollouts import PROMPT
from tests.unit.rl.episodes.test_turn_bridges import OWN, TOOL

TEMPLATES = ["chatml", "olmo", "tulu", *OWN]
TEXTS = ["yes", "the reply", "no\n\nno", "<|im_end|>", "naïve", '{"a": 1}', "  spaced ", ""]
SYSTEM = {"role": "system", "content": "Be brief."}
SUMMARY = {"role": "user", "content": "What happened so far: much."}


@pytest.fixture(scope="module")
def templates() -> dict[str, TurnTemplate]:
    tokenizer = make_tokenizer([*CHATML, *LLAMA3])

    def find(name: str) -> ChatTemplate:
        if name in OWN:
            return ChatTemplate(name=name, text=OWN[name])
        return choose_chat_template(tokenizer, name)

    return {name: TurnTemplate(ChatFormat(tokenizer, find(name))) for name in TEMPLATES}


@pytest.fixture(scope="module")
def tokenizer(templates: dict[str, TurnTemplate]) -> PreTrainedTokenizerFast:
    return templates["chatml"]._chat.tokenizer


def user(text: str) -> Turn:
    return {"role": "user", "content": text}


class Agent:
    """An agent that rewrites its history as a test draws it, and a policy that says anything."""

    def __init__(self, template: TurnTemplate) -> None:
        self.template = template
        self.tree = SessionTree(template)
        self.history: list[Turn] = [SYSTEM, user("What?")]
        self.tools: tuple[Any, ...] = ()
        self.open_points: list[tuple[ReplyPoint, list[Turn]]] = []
        self.num_sampled = 0

    def ask(self) -> ReplyPoint:
        point = self.tree.open(self.history, self.tools)
        if point.parent is not None:
            known = point.parent.token_ids
            assert point.prompt_token_ids[: len(known)] == known
        self.open_points.append((point, list(self.history)))
        return point

    def hear(self, text: str, *, has_end: bool, calls: bool, position: int = -1) -> None:
        """The reply of a request that is open comes; the agent goes on from there."""
        point, history = self.open_points.pop(position)
        ids = self.sample(text, has_end=has_end)
        turn: dict[str, Any] = {"role": "assistant", "content": text}
        if calls:
            arguments = {"a": self.num_sampled}
            turn["tool_calls"] = [{"function": {"name": "add", "arguments": arguments}}]
        self.tree.add(point, ids, turn)
        self.history = [*history, turn]

    def sample(self, text: str, *, has_end: bool) -> Completion:
        """Token by token, so that no tokenizer would give these ids for the text."""
        pieces = [text[at : at + 1] for at in range(len(text))]
        ids = [10 + byte for piece in pieces for byte in piece.encode()]
        if has_end or not ids:
            ids.append(min(self.template.end_token_ids))
        first = self.num_sampled
        self.num_sampled += len(ids)
        return Completion(
            token_ids=tuple(ids),
            logprobs=tuple(-float(number) for number in range(first, self.num_sampled)),
            versions=tuple(range(first, self.num_sampled)),
            text=text,
            finish_reason="stop",
            seed=0,
        )


steps = st.lists(
    st.tuples(
        st.sampled_from(["hear", "hear", "hear", "hear", "drop"]),
        st.lists(
            st.sampled_from(
                ["say", "say", "tool", "cut", "compact", "edit", "rollback", "fork", "retool"]
            ),
            max_size=2,
        ),
        st.sampled_from(TEXTS),
        st.integers(0, 99),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def rewrite(agent: Agent, change: str, text: str, number: int) -> None:
    """One of the things that agents do to their histories."""
    history = agent.history
    if change == "say":
        history.append(user(text))
    elif change == "tool":
        history.append({"role": "tool", "content": text})
    elif change == "cut":
        del history[1 : 1 + number % max(1, len(history) - 1)]
    elif change == "compact":
        agent.history = [SYSTEM, SUMMARY, *history[-1 - number % 2 :]]
    elif change == "edit":
        place = number % len(history)
        history[place] = {"role": history[place]["role"], "content": f"edited {text}"}
    elif change == "rollback":
        del history[2 + number % max(1, len(history) - 1) :]
    elif change == "fork":
        agent.ask()
    elif change == "retool":
        agent.tools = () if agent.tools else (TOOL,)
    if agent.history[-1]["role"] == "assistant":
        agent.history.append(user("Go on."))


@settings(max_examples=num_examples(60), deadline=None)
@pytest.mark.parametrize("name", TEMPLATES)
@given(steps=steps)
def test_learned_ids_are_the_sampled_ones_whatever_the_agent_does_to_its_history(
    name: str, steps: Sequence[Any], templates: dict[str, TurnTemplate]
) -> None:
    agent = Agent(templates[name])
    for outcome, changes, text, number, has_end, calls in steps:
        agent.ask()
        if outcome == "drop":  # a stream that is broken off leaves nothing
            agent.open_points.pop()
        while agent.open_points:  # parallel ones come in any order
            position = number % len(agent.open_points)
            agent.hear(text, has_end=has_end, calls=calls, position=position)
        for change in [*changes, "say"]:
            rewrite(agent, change, text, number)
    completion = build_completion(agent.tree, seed=0, status="done", rewards={})
    assert_learned_is_sampled(agent, completion)


def assert_learned_is_sampled(agent: Agent, completion: Completion) -> None:
    """By the versions, which number all sampled tokens of these tests."""
    group = RolloutGroup(
        ticket=0,
        prompt=replace(PROMPT, token_ids=()),
        completions=(completion,),
        verdicts=(Verdict(reward=1.0, scores={}),),
    )
    sampled = {
        version: (token_id, logprob)
        for node in agent.tree.replies
        for version, token_id, logprob in zip(
            node.completion.versions,
            node.completion.token_ids,
            node.completion.logprobs,
            strict=True,
        )
    }
    samples = make_samples(group, completion, {"": 1.0}, "all")
    learned: list[tuple[int, float]] = []
    for sample in samples:
        weights = sample.stream_weights("rl")
        ids = [
            sample.document.token_ids[place]
            for span in sample.document.responses
            for place in range(span.start, span.stop)
        ]
        tokens = zip(ids, sample.engine_logprobs, weights, strict=True)
        learned += [(token_id, logprob) for token_id, logprob, weight in tokens if weight]
    assert sorted(learned) == sorted(sampled.values())
    shared = make_samples(group, completion, {"": 1.0}, "advantage_shared")
    assert sum(sample.advantage for sample in shared) == pytest.approx(1.0 if shared else 0.0)
    last = make_samples(group, completion, {"": 1.0}, "last")
    if agent.tree.replies:
        end = agent.tree.replies[-1]
        assert last[0].document.token_ids == end.token_ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_history_that_is_repeated_goes_on_from_exact_ids(
    name: str, templates: dict[str, TurnTemplate]
) -> None:
    """Also where the agent writes calls anew, and texts with other white space around them."""
    agent = Agent(templates[name])
    for number in range(4):
        point = agent.ask()
        assert (point.parent is None) == (number == 0)
        if number:
            assert point.parent is agent.tree.replies[number - 1]
        agent.hear("the reply ", has_end=True, calls=False)
        agent.history[-1] = {"role": "assistant", "content": "the reply"}
        agent.history.append(user("more"))
    completion = build_completion(agent.tree, seed=0, status="done", rewards={})
    assert completion.episode is not None and not completion.episode.branches
    assert len(completion.replies) == 4


@pytest.mark.parametrize("name", TEMPLATES)
def test_reply_that_a_new_history_repeats_stands_there_by_its_own_ids(
    name: str, templates: dict[str, TurnTemplate]
) -> None:
    agent = Agent(templates[name])
    agent.ask()
    agent.hear("the reply", has_end=True, calls=False)
    reply = agent.tree.replies[0].completion.token_ids[:-1]
    agent.history = [SUMMARY, agent.history[-1], user("more")]
    point = agent.ask()
    assert point.parent is None
    ids = point.prompt_token_ids
    assert any(ids[at : at + len(reply)] == reply for at in range(len(ids)))
    agent.hear("no", has_end=True, calls=False)
    completion = build_completion(agent.tree, seed=0, status="done", rewards={})
    assert completion.episode is not None and len(completion.episode.branches) == 1
    assert_learned_is_sampled(agent, completion)


def test_reply_of_another_history_with_the_same_text_is_another(
    templates: dict[str, TurnTemplate],
) -> None:
    agent = Agent(templates["chatml"])
    agent.ask()
    agent.hear("yes", has_end=True, calls=False)
    agent.history = [SYSTEM, user("Who?"), agent.history[-1], user("more")]
    assert agent.ask().parent is None


def test_template_that_refuses_a_history_says_so() -> None:
    tokenizer = make_tokenizer(CHATML)
    text = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    text += "{{ m.content }}<|im_end|>{% endfor %}A:"
    tree = SessionTree(TurnTemplate(ChatFormat(tokenizer, ChatTemplate(name="own", text=text))))
    with pytest.raises(HistoryRefused):
        tree.open([user("What?"), {"role": "tool", "content": "7"}], ())


@pytest.mark.parametrize("has_reply", [True, False])
def test_call_that_was_not_sampled_is_written_as_a_template_without_tools_asks_for_it(
    templates: dict[str, TurnTemplate], has_reply: bool
) -> None:
    agent = Agent(templates["chatml"])
    agent.tools = (TOOL,)
    if has_reply:
        agent.ask()
        agent.hear("yes", has_end=True, calls=False)
    function = {"name": "add", "arguments": {"a": 7}}
    calls = {"role": "assistant", "content": "so", "tool_calls": [{"function": function}] * 2}
    agent.history += [user("more"), calls, {"role": "tool", "content": "9"}]
    point = agent.ask()
    assert (point.parent is not None) == has_reply
    text = agent.template.decode_reply(point.prompt_token_ids)[0]
    line = '<tool_call>{"name": "add", "arguments": {"a": 7}}</tool_call>'
    assert f"assistant\nso\n{line}\n{line}<|im_end|>" in text
