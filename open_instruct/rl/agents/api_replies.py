"""Answers of OpenAI's form: whole, or as the pieces of a stream.

A stream has a reply in one piece, as it comes when the reply is whole: its ids are then known, and
a stream that is broken off has no half of one.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from open_instruct.rl.agents.api_requests import ReplyRequest
from open_instruct.rl.agents.session import DeliveredReply

CHAT = "chat.completion"
TEXT = "text_completion"


def build_chat(request: ReplyRequest, replies: Sequence[DeliveredReply]) -> dict[str, Any]:
    """The answer to a request of /v1/chat/completions."""
    choices = []
    for index, reply in enumerate(replies):
        choice: dict[str, Any] = {
            "index": index,
            "message": reply.message,
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        if request.has_logprobs:
            choice["logprobs"] = {"content": _list_logprobs(reply), "refusal": None}
        choices.append(choice)
    return {
        **_head(request, replies, CHAT),
        "choices": choices,
        "usage": count_usage(replies),
    }


def build_text(request: ReplyRequest, replies: Sequence[DeliveredReply]) -> dict[str, Any]:
    """The answer to a request of /v1/completions."""
    choices = []
    for index, reply in enumerate(replies):
        choice: dict[str, Any] = {
            "index": index,
            "text": reply.message["content"],
            "finish_reason": reply.finish_reason,
            "logprobs": None,
        }
        if request.has_logprobs:
            tokens = _list_logprobs(reply)
            choice["logprobs"] = {
                "tokens": [token["token"] for token in tokens],
                "token_logprobs": [token["logprob"] for token in tokens],
                "top_logprobs": None,
                "text_offset": None,
            }
        choices.append(choice)
    return {
        **_head(request, replies, TEXT),
        "choices": choices,
        "usage": count_usage(replies),
    }


def stream_chat(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    """The pieces of a chat's answer."""
    head = {**_without(answer, "choices", "usage"), "object": f"{CHAT}.chunk"}
    if has_usage:
        head["usage"] = None
    for choice in answer["choices"]:
        message = choice["message"]
        delta = {key: value for key, value in message.items() if value is not None}
        calls = delta.pop("tool_calls", None)
        if calls:
            delta["tool_calls"] = [{"index": index} | call for index, call in enumerate(calls)]
        piece = {
            "index": choice["index"],
            "delta": delta,
            "logprobs": choice["logprobs"],
            "finish_reason": None,
        }
        yield head | {"choices": [piece]}
        end = {
            "index": choice["index"],
            "delta": {},
            "logprobs": None,
            "finish_reason": choice["finish_reason"],
        }
        yield head | {"choices": [end]}
    if has_usage:
        yield head | {"choices": [], "usage": answer["usage"]}


def stream_text(answer: Mapping[str, Any], *, has_usage: bool) -> Iterator[dict[str, Any]]:
    """The pieces of a text's answer."""
    head = _without(answer, "choices", "usage")
    for choice in answer["choices"]:
        yield head | {"choices": [choice]}
    if has_usage:
        yield head | {"choices": [], "usage": answer["usage"]}


def count_usage(replies: Sequence[DeliveredReply]) -> dict[str, Any]:
    """The tokens of an answer, in OpenAI's form."""
    num_prompt = max((len(reply.node.prompt_token_ids) for reply in replies), default=0)
    num_sampled = sum(len(reply.node.completion.token_ids) for reply in replies)
    num_known = 0
    if replies and replies[0].node.parent is not None:
        num_known = len(replies[0].node.parent.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {"cached_tokens": num_known},
    }


def list_models(names: Sequence[str]) -> dict[str, Any]:
    """The answer to /v1/models."""
    models = [describe_model(name) for name in names]
    return {"object": "list", "data": models}


def describe_model(name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "open_instruct",
    }


def _head(request: ReplyRequest, replies: Sequence[DeliveredReply], kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind == CHAT else "cmpl"
    return {
        "id": f"{prefix}-{replies[0].node.completion.seed:016x}",
        "object": kind,
        "created": int(time.time()),
        "model": request.model,
    }


def _list_logprobs(reply: DeliveredReply) -> list[dict[str, Any]]:
    tokens: list[dict[str, Any]] = []
    for text, logprob in zip(reply.token_texts, reply.node.completion.logprobs, strict=True):
        tokens.append(
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode()),
                "top_logprobs": [],
            }
        )
    return tokens


def _without(answer: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in answer.items() if key not in keys}
