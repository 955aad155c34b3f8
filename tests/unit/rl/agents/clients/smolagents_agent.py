"""A tool-calling agent of smolagents."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


row = json.load(sys.stdin)
model = OpenAIServerModel(
    "policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"]
)
agent = ToolCallingAgent(tools=[add], model=model, max_steps=3, verbosity_level=0)
answer = agent.run(row["messages"][-1]["content"])
text = str(answer)
share = sum(map(str.isdigit, text)) / max(len(text), 1)
print(json.dumps({"reward": share}))
