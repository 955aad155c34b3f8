"""Calls of tools in a reply's text, in the four forms that open models are trained to write.

A call counts only where its name is known and its arguments are an object. Text that begins a call
and is none is a `ToolCallError`, so that a policy is not rewarded for what merely looks like a
call. What was thought before the answer is not looked at, whether those thoughts end or not.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

from open_instruct.data.conversations.tool_turns import ToolCallError, read_python_calls
from open_instruct.environments.environment import ToolCall
from open_instruct.rewards.verifier import remove_thinking

MAX_CALLS = 64

Found = Iterator[tuple[Any, Any]]
"""Names and arguments, unchecked."""


def tool_calls(text: str, form: str, names: Collection[str]) -> tuple[ToolCall, ...]:
    """The calls in a reply, in order; none where it calls nothing.

    Arguments of `qwen3_xml` are texts; `read_arguments` makes of them what the tool's schema says.

    Args:
        form: a key of `FORMS`.
        names: the tools that there are.

    Raises:
        ToolCallError: a call is cut, malformed, or of a tool that there is not.
    """
    _, find_calls = FORMS[form]
    calls = []
    for name, arguments in find_calls(remove_thinking(text)):
        if name not in names:
            raise ToolCallError(
                f"there is no tool {name!r}; the tools are {', '.join(sorted(names))}"
            )
        if not isinstance(arguments, dict) or not all(isinstance(key, str) for key in arguments):
            raise ToolCallError(f"the arguments of {name} are not an object")
        calls.append(ToolCall(name=name, arguments=arguments, are_texts=form in WITHOUT_TYPES))
        if len(calls) > MAX_CALLS:
            raise ToolCallError(f"more than {MAX_CALLS} calls in one reply")
    return tuple(calls)


def detect_call_form(template: str) -> str:
    """Find the form that a chat template asks for: the first whose mark it has, else Hermes'."""
    for form, (mark, _) in FORMS.items():
        if mark and mark in template:
            return form
    return "hermes"


def _hermes(answer: str) -> Found:
    """Qwen's and Hermes' form: `<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>`."""
    for body in _between(answer, "<tool_call>", "</tool_call>"):
        yield _read_call(_json(body))


def _llama3_json(answer: str) -> Found:
    """Llama 3's form: the whole answer is `{"name": "add", "parameters": {"a": 2}}`.

    Several calls have ; between them.
    """
    rest = answer.strip().removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"(name|parameters|arguments|type)"', rest):
        return
    decoder = json.JSONDecoder(strict=False)
    while rest:
        try:
            call, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            raise ToolCallError(f"the call is no JSON: {error}") from error
        yield _read_call(call)
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            raise ToolCallError(f"text behind a call: {rest[:40]!r}")
        rest = rest.removeprefix(";").lstrip()


def _function_calls(answer: str) -> Found:
    """OLMo 3's form: `<function_calls>add(a=2, b=3)</function_calls>`, a line for each call."""
    for body in _between(answer, "<function_calls>", "</function_calls>"):
        yield from read_python_calls(body)


def _pythonic(answer: str) -> Found:
    """Llama 4's form: the whole answer is a list of calls, `[add(a=2, b=3), now()]`."""
    text = answer.strip()
    if re.match(r"\[\s*[A-Za-z_][\w.]*\s*\(", text):
        yield from read_python_calls(text)


def _qwen3_xml(answer: str) -> Found:
    """Qwen 3 Coder's form, which has no types.

    Example: `<tool_call><function=add><parameter=a>2</parameter></function></tool_call>`.
    """
    for body in _between(answer, "<tool_call>", "</tool_call>"):
        call = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", body, re.DOTALL)
        if call is None:
            raise ToolCallError("a <tool_call> has one <function=NAME> … </function> in it")
        pieces = re.split(r"<parameter=([^>\n]+)>(.*?)</parameter>", call[2], flags=re.DOTALL)
        if any(rest.strip() for rest in pieces[::3]):
            raise ToolCallError("text between the parameters of a call")
        arguments: dict[str, str] = {}
        for name, text in zip(pieces[1::3], pieces[2::3], strict=True):
            arguments[name.strip()] = text.removeprefix("\n").removesuffix("\n")
        yield call[1].strip(), arguments


# The mark of each form in a chat template, if it has one, and the function that finds its calls.
FORMS: dict[str, tuple[str, Callable[[str], Found]]] = {
    "qwen3_xml": ("<function=", _qwen3_xml),
    "function_calls": ("<function_calls>", _function_calls),
    "hermes": ("<tool_call>", _hermes),
    "llama3_json": ('"parameters"', _llama3_json),
    "pythonic": ("", _pythonic),
}


# What calls begin with in forms that let text stand before them.
BEGINNINGS = {
    "qwen3_xml": "<tool_call>",
    "function_calls": "<function_calls>",
    "hermes": "<tool_call>",
}


def find_text_before_calls(text: str, form: str) -> str:
    """The text before the first call of a reply that has calls in this form."""
    beginning = BEGINNINGS.get(form)
    return text.partition(beginning)[0] if beginning else ""


# Arguments in these forms stay texts until the tool's schema is known.
WITHOUT_TYPES = ("qwen3_xml",)


def _between(answer: str, begin: str, end: str) -> Iterator[str]:
    """Yield the texts between two marks, in order."""
    pieces = answer.split(begin)
    if end in pieces[0]:
        raise ToolCallError(f"{end} without {begin} before it")
    for piece in pieces[1:]:
        body, closing, behind = piece.partition(end)
        if not closing or end in behind:
            raise ToolCallError(f"{begin} and {end} do not pair up")
        yield body


def _json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError) as error:
        raise ToolCallError(f"the call is no JSON: {error}") from error


def _read_call(call: Any) -> tuple[Any, Any]:
    """Read a call's name and arguments, which Llama 3 calls "parameters"; both words are read."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise ToolCallError("a call is an object with the name of a tool")
    return call["name"], call.get("arguments", call.get("parameters"))
