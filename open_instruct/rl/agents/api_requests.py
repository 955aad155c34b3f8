"""Requests of OpenAI's form: read whole, or refused with a word about what is not read.

What would sample otherwise than the run does is refused, or with `--agent_sampling follow` sampled
so and left out of the loss.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from open_instruct.data.conversations.tool_turns import read_schemas
from open_instruct.rl.agents.api_errors import APIError
from open_instruct.rl.agents.messages import Turn, read_messages
from open_instruct.rl.episodes.tool_calls import MAX_CALLS

MODEL = "policy"  # the name of the policy for its agents
MAX_REPLIES = 64  # of one request
MAX_STOPS = 16
MAX_SCHEMA_CHARACTERS = 1 << 16  # an engine takes no step while it reads one

Count = Annotated[int, Field(ge=1)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
Number = Annotated[float, Field(ge=0, le=2)]


class AnyBody(BaseModel):
    """What a request to any path may say without a word about the reply.

    A field that no body names is refused.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CommonBody(AnyBody):
    """What requests to /v1/chat/completions and /v1/completions may say."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_REPLIES)] | None = None
    max_tokens: Count | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    temperature: Number | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None


class ChatBody(CommonBody):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Any], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None


class CompletionBody(CommonBody):
    """A request to /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None


Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSampling:
    """How the run samples, and whether an agent may ask for something else.

    An evaluation may sample otherwise than training does. What an agent says of training's sampling
    then means the evaluation's: `trained_temperature` and `trained_top_p`.

    Example: `RunSampling(temperature=1.0, top_p=1.0, follows=False)`.
    """

    temperature: float
    top_p: float
    follows: bool
    trained_temperature: float | None = None
    trained_top_p: float | None = None
    model_names: tuple[str, ...] = (MODEL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyRequest:
    """What is asked of the policy: replies to turns, or to a text of the agent's own.

    `temperature` and `top_p` are None where they are the run's. What is sampled so, and without a
    `json_schema`, is learned.
    """

    turns: tuple[Turn, ...] = ()
    text: str | tuple[int, ...] | None = None  # or token ids, in place of turns
    tools: tuple[Mapping[str, Any], ...] = ()
    max_calls: int = 0  # that the agent is given of a reply
    num_replies: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    json_schema: str = ""
    model: str = MODEL
    streams: bool = False
    has_usage: bool = False
    has_logprobs: bool = False

    @property
    def is_learned(self) -> bool:
        return self.temperature is None and self.top_p is None and not self.json_schema

    @property
    def agent(self) -> str:
        """The name of the agent, which may follow the policy's: `policy/planner`."""
        name, _, agent = self.model.partition("/")
        return agent if name == MODEL else ""


def read_chat_request(body: Any, run: RunSampling) -> ReplyRequest:
    """Read a body of /v1/chat/completions.

    Raises:
        APIError: it asks for something that there is not.
    """
    chat = parse_body(ChatBody, body)
    refuse_others(
        {
            "top_logprobs": bool(chat.top_logprobs),
            "modalities": chat.modalities not in (None, ["text"]),
        }
    )
    tools = read_tools(chat.tools or ())
    return ReplyRequest(
        turns=read_messages(chat.messages),
        tools=tools,
        max_calls=read_tool_choice(chat.tool_choice, tools, are_parallel=chat.parallel_tool_calls),
        max_tokens=chat.max_completion_tokens or chat.max_tokens,
        has_logprobs=bool(chat.logprobs),
        json_schema=read_format(chat.response_format, run, param="response_format"),
        **_read_common(chat, run),
    )


def read_completion_requests(body: Any, run: RunSampling) -> list[ReplyRequest]:
    """Read a body of /v1/completions: a request for each of its prompts.

    Raises:
        APIError: it asks for something that there is not.
    """
    asked = parse_body(CompletionBody, body)
    refuse_others(
        {
            "echo": bool(asked.echo),
            "best_of": asked.best_of not in (None, 1, asked.n),
            "suffix": bool(asked.suffix),
            "logprobs": bool(asked.logprobs),
        }
    )
    prompt = asked.prompt
    prompts: Sequence[Any] = [prompt]
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompts = prompt
    common = _read_common(asked, run)
    requests: list[ReplyRequest] = []
    for each in prompts:
        text = each if isinstance(each, str) else tuple(each)
        if not text:
            raise APIError("a prompt is empty", param="prompt")
        requests.append(
            ReplyRequest(
                text=text,
                max_tokens=asked.max_tokens or 16,  # OpenAI's default
                has_logprobs=asked.logprobs is not None,
                **common,
            )
        )
    return requests


def parse_body(kind: type[Body], body: Any) -> Body:
    """Parse a body; raises an `APIError` that names the field that is wrong.

    A field that is null says nothing, whatever its name: clients send all that they know of.
    """
    if isinstance(body, Mapping):
        body = {name: value for name, value in body.items() if value is not None}
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problem = error.errors()[0]
        field = str(problem["loc"][0]) if problem["loc"] else "body"
        reason = problem["msg"]
        if problem["type"] == "extra_forbidden":
            reason = "nothing here reads it"
        raise APIError(f"{field}: {reason}", param=field) from None


def refuse_others(found: Mapping[str, bool]) -> None:
    """Refuse fields whose values are not among those that are read."""
    for name, is_refused in found.items():
        if is_refused:
            raise APIError(
                f"{name}: the policy is sampled freely, and not so; leave it out", param=name
            )


def check_model(name: str, run: RunSampling) -> None:
    """Refuse a model that is not the policy, behind whose name an agent's own may stand.

    Raises:
        APIError: it is another.
    """
    if name not in run.model_names and name.partition("/")[0] != MODEL:
        raise APIError(
            f"there is no model {name!r:.100}: the policy is {MODEL!r}",
            status=404,
            param="model",
            code="model_not_found",
        )


def read_sampling(
    temperature: float | None, top_p: float | None, run: RunSampling
) -> dict[str, Any]:
    """What is sampled otherwise than the run does, as fields of `ReplyRequest`.

    Raises:
        APIError: there is such a thing, and the run does not follow its agents.
    """
    others: dict[str, Any] = {}
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if value in (None, getattr(run, name), getattr(run, f"trained_{name}")):
            continue
        if not run.follows:
            raise APIError(
                f"{name} {value:g}: the run samples with {getattr(run, name):g}, and learns what "
                "is sampled so; leave it out, or let the run have --agent_sampling follow",
                param=name,
            )
        others[name] = value
    return others


def read_format(text_format: Mapping[str, Any] | None, run: RunSampling, *, param: str) -> str:
    """The JSON schema that a reply is held to, as JSON; "" where its text is free.

    Raises:
        APIError: there is one, and the run does not follow its agents; or it is no schema.
    """
    kind = (text_format or {}).get("type", "text")
    if text_format is None or kind == "text":
        return ""
    schema: Any = {"type": "object"}
    if kind == "json_schema":
        schema = text_format.get("json_schema", text_format).get("schema")
    if kind not in ("json_object", "json_schema") or not isinstance(schema, dict):
        raise APIError(f"{param}: text, json_object, or a json_schema with its schema", param=param)
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_CHARACTERS:
        raise APIError(
            f"{param}: the schema has more than {MAX_SCHEMA_CHARACTERS:,} characters", param=param
        )
    if not run.follows:
        raise APIError(
            f"{param}: the run samples freely, and learns what is sampled so; ask for the form in "
            "words, or let the run have --agent_sampling follow",
            param=param,
        )
    return text


def read_tools(tools: Sequence[Any]) -> tuple[Mapping[str, Any], ...]:
    """The schemas of tools, in the form of chats.

    Raises:
        APIError: one is no function.
    """
    schemas = tuple(read_schemas(list(tools)))
    for schema in schemas:
        function = schema.get("function")
        is_named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if schema.get("type", "function") != "function" or not is_named:
            raise APIError("a tool is {'type': 'function', 'function': {…}}", param="tools")
    if len(schemas) != len(tools):
        raise APIError("a tool is {'type': 'function', 'function': {…}}", param="tools")
    return schemas


def read_tool_choice(
    choice: Any, tools: Sequence[Mapping[str, Any]], *, are_parallel: bool | None
) -> int:
    """How many calls of a reply the agent is given; one that must be made is as free as any other.

    Raises:
        APIError: a call must be made, and there is no such tool; or it is no choice.
    """
    names = [tool["function"]["name"] for tool in tools]
    most_calls = 1 if are_parallel is False else MAX_CALLS
    if isinstance(choice, Mapping):
        name = choice.get("function", choice)
        if isinstance(name, Mapping):
            name = name.get("name")
        if choice.get("type") != "function" or name not in names:
            raise APIError(f"tool_choice: there is no tool {name!r:.100}", param="tool_choice")
        return most_calls
    if choice not in (None, "auto", "none", "required"):
        raise APIError("tool_choice: auto, none, required, or a function", param="tool_choice")
    if choice == "required" and not names:
        raise APIError("tool_choice: there are no tools", param="tool_choice")
    return most_calls if names and choice != "none" else 0


def _read_common(body: CommonBody, run: RunSampling) -> dict[str, Any]:
    """What requests of all kinds have, as fields of `ReplyRequest`."""
    check_model(body.model, run)
    refuse_others(
        {
            "presence_penalty": bool(body.presence_penalty),
            "frequency_penalty": bool(body.frequency_penalty),
            "logit_bias": bool(body.logit_bias),
        }
    )
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if "" in stop or len(stop) > MAX_STOPS:
        raise APIError(f"stop: at most {MAX_STOPS} texts, and no empty one", param="stop")
    return {
        "num_replies": body.n or 1,
        "stop": tuple(stop),
        "seed": body.seed,
        "model": body.model,
        "streams": bool(body.stream),
        "has_usage": bool((body.stream_options or {}).get("include_usage")),
        **read_sampling(body.temperature, body.top_p, run),
    }
