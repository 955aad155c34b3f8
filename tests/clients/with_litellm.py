"""Calls of litellm with a tool; all answers but the last are streamed."""

import json
import os
import sys

import litellm

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MODEL = f"openai/{os.environ['OPENAI_MODEL']}"

history = json.load(sys.stdin)["messages"]


def ask():
    pieces = litellm.completion(model=MODEL, messages=history, tools=[ADD], stream=True)
    message = litellm.stream_chunk_builder(list(pieces)).choices[0].message
    history.append(message)
    return message


reply = ask()
for call in reply.tool_calls or ():
    numbers = json.loads(call.function.arguments)
    total = numbers.get("a", 0) + numbers.get("b", 0)
    history.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
if reply.tool_calls:
    reply = ask()
history.append({"role": "user", "content": "Are you sure?"})
last = litellm.completion(model=MODEL, messages=history, tools=[ADD])
text = f"{reply.content} {last.choices[0].message.content}"
print(json.dumps({"reward": sum(map(str.isdigit, text)) / max(len(text), 1), "text": text}))
