"""Agents of frameworks, each with its own client and its defaults, from an environment of its own.

`python -m venv CLIENTS && CLIENTS/bin/pip install openai-agents langchain-openai smolagents litellm`
makes one; OPEN_INSTRUCT_AGENT_CLIENTS names its interpreter.
"""

import os
from pathlib import Path

import pytest

from tests.unit.rl.agents.test_agent_episodes import CALL, Play
from tests.unit.rl.agents.test_agent_episodes import play as play
from tests.unit.rl.agents.test_agent_episodes import tokenizer as tokenizer

CLIENTS = os.environ.get("OPEN_INSTRUCT_AGENT_CLIENTS", "")
PROGRAMS = sorted((Path(__file__).parent / "clients").glob("*.py"))
FINAL = '<tool_call>{"name": "final_answer", "arguments": {"answer": "It is 5."}}</tool_call>'

pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not CLIENTS, reason="OPEN_INSTRUCT_AGENT_CLIENTS names no interpreter"),
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.stem)
def test_agent_of_a_framework_is_run_as_it_is(play: Play, program: Path) -> None:
    is_smolagents = "smol" in program.name
    last = f"{FINAL}<|im_end|>" if is_smolagents else "It is 5.<|im_end|>"
    completion, engines = play(
        f"env -u PYTHONPATH {CLIENTS} {program}",
        [CALL, last],
        prompt_tokens=20_000,
        environment_timeout_s=120.0,
    )
    episode = completion.episode
    assert episode is not None and episode.problem == ""
    assert episode.rewards == {"agent": pytest.approx(1 / len("It is 5."))}
    # It writes its calls anew as texts, and so begins a branch with every step.
    assert len(episode.branches) == is_smolagents
    assert len(engines.requests) == 2
