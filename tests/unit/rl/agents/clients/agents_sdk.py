"""An agent of the OpenAI Agents SDK, with its defaults: it speaks to /v1/responses."""

import json
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


row = json.load(sys.stdin)
agent = Agent(name="adder", instructions="Use the tool.", tools=[add], model="policy")
result = Runner.run_sync(agent, row["messages"][-1]["content"])
text = result.final_output
share = sum(map(str.isdigit, text)) / max(len(text), 1)
print(json.dumps({"reward": share}))
