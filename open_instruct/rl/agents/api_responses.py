"""OpenAI's newer API, /v1/responses: its items are read into turns, and replies become items.

What it stores on the server is a session's own: `previous_response_id` goes on from the turns of an
earlier answer.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.api_replies import count_usage
from open_instruct.rl.agents.api_requests import (
    AnyBody,
    ReplyRequest,
    RunSampling,
    check_model,
    parse_body,
    read_format,
    read_sampling,
    read_tool_choice,
    read_tools,
    refuse_others,
)
from open_instruct.rl.agents.messages import Turn, read_messages, read_text
from open_instruct.rl.agents.session import DeliveredReply

Stored = dict[str, tuple[Turn, ...]]
"""The turns up to the end of each answer, without instructions, by the answer's id."""


class ResponseBody(AnyBody):
    """What a request to /v1/responses may say."""

    model: str
    input: str | list[Any]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    top_logprobs: int | None = None
    background: bool | None = None
    truncation: str | None = None
    reasoning: dict[str, Any] | None = None
    include: list[str] | None = None

    stream_options: Any = None  # says nothing about the reply


def read_response_request(
    body: Any, run: RunSampling, stored: Stored
) -> tuple[ReplyRequest, tuple[Turn, ...]]:
    """Read a body of /v1/responses.

    Returns:
        The request, and its turns without instructions.

    Raises:
        APIError: it asks for something that there is not.
    """
    asked = parse_body(ResponseBody, body)
    check_model(asked.model, run)
    refuse_others(
        {
            "top_logprobs": bool(asked.top_logprobs),
            "background": bool(asked.background),
            "truncation": asked.truncation not in (None, "disabled"),
            "reasoning": bool((asked.reasoning or {}).get("effort")),
            "text": bool((asked.text or {}).get("verbosity")),
            "include": "message.output_text.logprobs" in (asked.include or ()),
        }
    )
    items: Sequence[Any] = asked.input if isinstance(asked.input, list) else [_user(asked.input)]
    turns = read_messages(list(_join_items(items)))
    if asked.previous_response_id is not None:
        before = stored.get(asked.previous_response_id)
        if before is None:
            raise APIError(
                "this session has no such answer", status=404, param="previous_response_id"
            )
        turns = (*before, *turns)
    if not turns:
        raise APIError("input is empty", param="input")
    tools = read_tools(asked.tools or ())
    with_instructions = turns
    if asked.instructions:
        with_instructions = ({"role": "system", "content": asked.instructions}, *turns)
    request = ReplyRequest(
        turns=with_instructions,
        tools=tools,
        max_calls=read_tool_choice(
            asked.tool_choice, tools, are_parallel=asked.parallel_tool_calls
        ),
        max_tokens=asked.max_output_tokens,
        model=asked.model,
        streams=bool(asked.stream),
        json_schema=read_format((asked.text or {}).get("format"), run, param="text"),
        **read_sampling(asked.temperature, asked.top_p, run),
    )
    return request, turns


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _join_items(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The items of an input as messages; calls belong to the assistant's text before them."""
    message: dict[str, Any] | None = None  # an assistant's, to which calls may be added
    for number, item in enumerate(items):
        where = f"input[{number}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind == "reasoning":  # thoughts, which the ids of a reply have
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if message is None:
                message = {"role": "assistant", "content": "", "tool_calls": []}
            call = {"id": item.get("call_id"), "function": function}
            message.setdefault("tool_calls", []).append(call)
            continue
        if message is not None:
            yield message
            message = None
        if kind == "function_call_output":
            yield {
                "role": "tool",
                "content": read_text(item.get("output"), where),
                "tool_call_id": item.get("call_id"),
            }
        elif kind == "message":
            new = {"role": item.get("role"), "content": item.get("content")}
            if new["role"] == "assistant":
                message = new
            else:
                yield new
        else:
            raise APIError(f"{where}: an item {kind!r:.100} is not read here", param="input")
    if message is not None:
        yield message


def build_response(
    request: ReplyRequest, turns: tuple[Turn, ...], reply: DeliveredReply, stored: Stored
) -> dict[str, Any]:
    """The answer to a request of /v1/responses, whose turns are then stored."""
    name = f"{reply.node.completion.seed:016x}"
    message = reply.message
    output: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        thoughts = {"type": "reasoning_text", "text": message["reasoning_content"]}
        output.append(
            {
                "type": "reasoning",
                "id": f"rs_{name}",
                "summary": [],
                "content": [thoughts],
            }
        )
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        output.append(_build_message(message["content"] or "", f"msg_{name}"))
    for number, call in enumerate(calls):
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{name}_{number}",
                "call_id": call["id"],
                "name": call["function"]["name"],
                "arguments": call["function"]["arguments"],
                "status": "completed",
            }
        )
    answer_id = f"resp_{name}"
    stored[answer_id] = (*turns, reply.turn)
    is_cut = reply.finish_reason == "length"
    usage = count_usage([reply])
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "model": request.model,
        "output": output,
        "parallel_tool_calls": request.max_calls != 1,
        "tool_choice": "auto",
        "tools": [{"type": "function", **each["function"]} for each in request.tools],
        "metadata": {},
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def _build_message(text: str, name: str) -> dict[str, Any]:
    part = {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": [],
    }
    return {
        "type": "message",
        "id": name,
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def stream_response(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of an answer's stream."""
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
    ]
    for index, item in enumerate(answer["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        events.append(
            {
                "type": "response.output_item.added",
                "output_index": index,
                "item": {**item, "status": "in_progress"},
            }
        )
        if item["type"] == "message":
            events += _stream_text(item["content"][0], {**place, "content_index": 0})
        elif item["type"] == "function_call":
            arguments = item["arguments"]
            kind = "response.function_call_arguments"
            events.append({"type": f"{kind}.delta", **place, "delta": arguments})
            events.append(
                {
                    "type": f"{kind}.done",
                    **place,
                    "name": item["name"],
                    "arguments": arguments,
                }
            )
        events.append({"type": "response.output_item.done", "output_index": index, "item": item})
    events.append({"type": f"response.{answer['status']}", "response": answer})
    for number, event in enumerate(events):
        yield {**event, "sequence_number": number}


def _stream_text(part: Mapping[str, Any], place: Mapping[str, Any]) -> list[dict[str, Any]]:
    text = part["text"]
    logprobs: dict[str, Any] = {"logprobs": []}
    return [
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": text, **logprobs},
        {"type": "response.output_text.done", **place, "text": text, **logprobs},
        {"type": "response.content_part.done", **place, "part": part},
    ]
