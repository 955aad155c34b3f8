"""An agent that works out products with a calculator, by OpenAI's client.

It would ask any server of OpenAI's API so; trained by

    open-instruct grpo --environment agent:scripts/demo_data/product_agent.py:solve ...

`make demo-agent` shows it.
"""

import json
import re

from openai import OpenAI

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as 12 * 34"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    factors = re.fullmatch(r"\s*(\d{1,9})\s*\*\s*(\d{1,9})\s*", expression)
    return str(int(factors[1]) * int(factors[2])) if factors else "no product"


def solve(messages):
    """Ask, calculate, and ask again: returns the last answer."""
    client = OpenAI()
    history = list(messages)
    for _ in range(2):
        answer = client.chat.completions.create(model="policy", messages=history, tools=[CALCULATE])
        reply = answer.choices[0].message
        history.append(reply)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            arguments = json.loads(call.function.arguments)
            result = calculate(str(arguments.get("expression")))
            history.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return reply.content
