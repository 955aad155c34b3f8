"""Tools in conversations: what rows have of them, and the form in which a chat template reads it.

Rows have them as OpenAI writes them, schemas in a column `tools` and the calls of a reply in its
`tool_calls`, or as OLMo 3's data do, as texts: `functions` of a message, and `function_calls` of a
reply, which are written as Python, `add(a=2, b=3)`, a line for each call.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from open_instruct.core.text import json_or_text
from open_instruct.data.files.rows import MalformedRow

CALLS = ("tool_calls", "function_calls")


class ToolCallError(ValueError):
    """A reply begins a call that cannot be read; the message says why."""


def read_python_calls(text: str) -> Iterator[tuple[str, dict[str | None, Any]]]:
    """Names and arguments of calls with literal keyword arguments, one a line or in one list.

    Raises:
        ToolCallError: there is something else.
    """
    literals = {"null": None, "true": True, "false": False}
    try:
        tree = ast.parse(text.strip().replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolCallError(f"the calls are no Python: {type(error).__name__}") from error
    nodes: list[ast.AST] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for node in nodes:
        if (
            not isinstance(node, ast.Call)
            or node.args
            or any(keyword.arg is None for keyword in node.keywords)
        ):
            raise ToolCallError("a call is NAME(argument=value, …)")
        arguments = {}
        for keyword in node.keywords:
            value = keyword.value
            if isinstance(value, ast.Name) and value.id in literals:
                arguments[keyword.arg] = literals[value.id]
                continue
            try:
                arguments[keyword.arg] = ast.literal_eval(value)
            except (ValueError, TypeError, RecursionError, MemoryError) as error:
                raise ToolCallError(f"the argument {keyword.arg} is no literal") from error
        yield ast.unparse(node.func), arguments


def python_call(name: str, arguments: Mapping[str, Any]) -> str:
    """One call; values are written as JSON."""
    written = (f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items())
    return f"{name}({', '.join(written)})"


def schemas_of(value: Any) -> list[Any]:
    """The tools' JSON schemas in `value`, which may be JSON text; none where it has names, or
    nothing.
    """
    listed = json_or_text(value)
    schemas = [json_or_text(entry) for entry in listed] if isinstance(listed, list) else []
    return schemas if all(isinstance(schema, Mapping) for schema in schemas) else []


def calls_of(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls in `value`, which may be JSON text, in OpenAI's form, with arguments as objects.

    Raises:
        MalformedRow: one has no name, or other arguments.
    """
    listed = json_or_text(value) or []
    calls = []
    for call in map(json_or_text, listed if isinstance(listed, list) else [listed]):
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = json_or_text(function.get("arguments") or {}) if isinstance(name, str) else None
        if not isinstance(arguments, Mapping):
            raise MalformedRow(
                "bad_tools",
                f"{where}: a call in 'tool_calls' needs a name, and an object of arguments",
            )
        calls.append(_call(name, arguments))
    return calls


def _call(name: Any, arguments: Mapping[Any, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _in_python(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(python_call(**call["function"]) for call in calls)


def _from_python(text: str) -> list[dict[str, Any]]:
    with suppress(ToolCallError):
        return [_call(*call) for call in read_python_calls(text)]
    return []


# The keys of messages, each with the key of the other form and what makes that of this one; nothing
# where it cannot.
OTHER_FORM: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tools": ("functions", json.dumps),
    "functions": ("tools", schemas_of),
    "tool_calls": ("function_calls", _in_python),
    "function_calls": ("tool_calls", _from_python),
}


def _has_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or not OTHER_FORM.keys().isdisjoint(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """What a chat template reads of tools.

    Example: OLMo 3's `ToolForm(role="environment", reads=frozenset({"functions",
    "function_calls"}))`.
    """

    role: str  # of a turn that has a tool's answer
    reads: frozenset[str]

    @classmethod
    def of(cls, template: str) -> "ToolForm":
        """The form of a template's text: it reads a key that stands there as a name of Jinja's, not
        in plain words.
        """
        reads = {key for key in OTHER_FORM if re.search(rf"[.'\"]{key}\b", template)}
        reads |= {"tools"} & {*re.findall(r"\w+", template)}
        named = re.search("""['"](environment|ipython)['"]""", template)
        role = named[1] if named else "environment" if "functions" in reads else "tool"
        return cls(role=role, reads=frozenset(reads))

    def as_read(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        """The messages and the `tools` to give to the template.

        Raises:
            MalformedRow: the template reads them in neither form, or they cannot be written in the
                one that it reads.
        """
        turns: list[Any] = []
        tools: list[Any] = []
        for message in messages:
            if not _has_tools(message):
                turns.append(message)
                continue
            turn = {name: value for name, value in message.items() if name not in OTHER_FORM}
            turn["role"] = self.role if turn["role"] == "tool" else turn["role"]
            for name, (other, convert) in OTHER_FORM.items():
                key, value = name, message.get(name)
                if key not in self.reads and json_or_text(value):
                    if other not in self.reads or not (value := convert(value)):
                        raise MalformedRow(
                            "template",
                            f"the chat template cannot write {name!r}: choose another by "
                            "--chat_template_name, or put them into 'content'",
                        )
                    key = other
                if key == "tools":
                    tools += value or []
                elif key == "functions" and key != name and turn["role"] != "system":
                    turns.append({"role": "system", "content": "", key: value})
                elif key in self.reads and value is not None:
                    turn[key] = value
            turns.append(turn)
        return turns, tools

    def parts(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Texts that must stand in what the template writes, each as often: what was said, and the
        names of tools.
        """
        turns, tools = self.as_read(list(filter(_has_tools, messages)))
        functions = [*tools, *(call for turn in turns for call in turn.get("tool_calls", ()))]
        names = [str(each.get("function", each).get("name", "")) for each in functions]
        texts = [
            turn[key] for turn in turns for key in ("functions", "function_calls") if key in turn
        ]
        return [*names, *texts, *(turn["content"].rpartition("</think>")[2] for turn in turns)]
