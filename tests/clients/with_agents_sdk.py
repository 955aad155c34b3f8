"""An agent of OpenAI's Agents SDK: a tool, two questions, the first with its answers streamed."""

import asyncio
import json
import sys

from agents import Agent, Runner, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


async def solve(messages):
    agent = Agent(name="Adder", instructions="Add with the tool.", tools=[add])
    first = Runner.run_streamed(agent, messages, max_turns=2)
    async for _ in first.stream_events():
        pass
    history = [*first.to_input_list(), {"role": "user", "content": "Are you sure?"}]
    second = await Runner.run(agent, history, max_turns=2)
    return f"{first.final_output} {second.final_output}"


text = asyncio.run(solve(json.load(sys.stdin)["messages"]))
print(json.dumps({"reward": sum(map(str.isdigit, text)) / max(len(text), 1), "text": text}))
