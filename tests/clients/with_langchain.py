"""A model of LangChain's with a tool; all answers but the last are streamed."""

import json
import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([add])
history = json.load(sys.stdin)["messages"]


def ask():
    reply = None
    for piece in model.stream(history):
        reply = piece if reply is None else reply + piece
    history.append(reply)
    return reply


reply = ask()
if reply.tool_calls:
    history += [add.invoke(call) for call in reply.tool_calls]
    reply = ask()
history.append(("user", "Are you sure?"))
last = model.invoke(history)
text = f"{reply.content} {last.content}"
print(json.dumps({"reward": sum(map(str.isdigit, text)) / max(len(text), 1), "text": text}))
