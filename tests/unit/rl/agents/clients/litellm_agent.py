"""A call by litellm."""

import json
import sys

import litellm

row = json.load(sys.stdin)
tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
history = list(row["messages"])
for _ in range(3):
    answer = litellm.completion(model="openai/policy", messages=history, tools=[tool])
    message = answer.choices[0].message
    history.append(message)
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        total = str(sum(json.loads(call.function.arguments).values()))
        history.append({"role": "tool", "tool_call_id": call.id, "content": total})
text = message.content or ""
share = sum(map(str.isdigit, text)) / max(len(text), 1)
print(json.dumps({"reward": share}))
