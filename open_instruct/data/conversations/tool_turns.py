"""Tools in conversations: their schemas and calls in rows, and the form a chat template reads.

Rows may write them as OpenAI does: schemas in a column `tools`, and the calls of a reply in its
`tool_calls`. Or as OLMo 3's data do, as texts: `functions` of a message, and `function_calls` of a
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

CALLS = ("tool_calls", "function_calls")  # the keys of a message's calls, in either form
# Of a call's arguments: OpenAI's key, Llama 3's, LangChain's and Anthropic's.
ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
# Of the schema of a function's arguments: Anthropic's and MCP's, for "parameters".
SCHEMA_KEYS = ("input_schema", "inputSchema")
JSON_LITERALS = {"null": None, "true": True, "false": False}


class ToolCallError(ValueError):
    """A reply begins a call that cannot be read; the message says why."""


def read_python_calls(text: str) -> Iterator[tuple[str, dict[str | None, Any]]]:
    """Names and arguments of calls with literal keyword arguments, one a line or in one list.

    Raises:
        ToolCallError: there is something else.
    """
    try:
        tree = ast.parse(text.strip().replace("\r\n", "\n"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ToolCallError(f"the calls are no Python: {type(error).__name__}") from error
    nodes: list[ast.AST] = []
    for statement in tree.body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        nodes += value.elts if isinstance(value, ast.List | ast.Tuple) else [value]
    for node in nodes:
        if not isinstance(node, ast.Call) or node.args:
            raise ToolCallError("a call is NAME(argument=value, …)")
        if any(keyword.arg is None for keyword in node.keywords):
            raise ToolCallError("a call is NAME(argument=value, …)")
        yield (
            ast.unparse(node.func),
            {keyword.arg: _read_literal(keyword) for keyword in node.keywords},
        )


def _read_literal(keyword: ast.keyword) -> Any:
    """The value of an argument, which is of JSON: a tuple is a list, and a set is refused."""
    try:
        literal = ast.literal_eval(_JSONNames().visit(keyword.value))
        return json.loads(json.dumps(literal))
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        raise ToolCallError(f"the argument {keyword.arg} is no literal") from error


class _JSONNames(ast.NodeTransformer):
    """Makes constants of JSON's names for them."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # as ast calls it
        if node.id not in JSON_LITERALS:
            return node
        return ast.copy_location(ast.Constant(JSON_LITERALS[node.id]), node)


def write_python_call(name: str, arguments: Mapping[str, Any]) -> str:
    """One call as Python writes it; its values are written as JSON."""
    argument_words = (
        f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in arguments.items()
    )
    return f"{name}({', '.join(argument_words)})"


def read_schemas(value: Any) -> list[Any]:
    """The JSON schemas of tools in a list or its JSON text; none where it has anything else.

    Each is in OpenAI's form, in which servers give tools to a chat template.
    """
    value_list = json_or_text(value)
    if not isinstance(value_list, list):
        return []
    schemas = [json_or_text(entry) for entry in value_list]
    if not all(isinstance(schema, Mapping) for schema in schemas):
        return []
    return [_wrap_function(schema) for schema in schemas]


def _wrap_function(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A bare function, `{"name": "add", ...}`, as `{"type": "function", "function": {...}}`."""
    is_bare = isinstance(schema.get("name"), str) and "function" not in schema
    if not is_bare or schema.get("type", "function") != "function":
        return schema
    function = {
        "parameters" if key in SCHEMA_KEYS else key: value
        for key, value in schema.items()
        if key != "type"
    }
    return {"type": "function", "function": function}


def read_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """The calls in a list or its JSON text, in OpenAI's form, with arguments as objects.

    Raises:
        MalformedRow: one has no name, or other arguments.
    """
    call_list = json_or_text(value) or []
    entries = call_list if isinstance(call_list, list) else [call_list]
    return [_read_call(json_or_text(entry), where) for entry in entries]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        given: Any = next((function[key] for key in ARGUMENT_KEYS if function.get(key)), {})
        arguments = json_or_text(given)
        # Under a key that is not known, they would be lost.
        has_other_objects = any(
            isinstance(value, Mapping) and value
            for key, value in function.items()
            if key not in ARGUMENT_KEYS
        )
        if isinstance(arguments, Mapping) and (arguments or not has_other_objects):
            return _build_call(function["name"], arguments)
    raise MalformedRow(
        "bad_tools", f"{where}: a call in 'tool_calls' needs a name, and an object of arguments"
    )


def _build_call(name: Any, arguments: Mapping[Any, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _calls_to_python(calls: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(write_python_call(**call["function"]) for call in calls)


def _calls_from_python(text: str) -> list[dict[str, Any]]:
    with suppress(ToolCallError):
        return [_build_call(name, arguments) for name, arguments in read_python_calls(text)]
    return []


# The keys of messages that have to do with tools, each with the key of the other form, and the
# function that converts a value to that form; it gives nothing where it cannot.
OTHER_FORM: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "tools": ("functions", json.dumps),
    "functions": ("tools", read_schemas),
    "tool_calls": ("function_calls", _calls_to_python),
    "function_calls": ("tool_calls", _calls_from_python),
}


def _has_tools(message: Mapping[str, Any]) -> bool:
    return message["role"] == "tool" or not OTHER_FORM.keys().isdisjoint(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """The form in which a chat template reads tools, their calls and their answers.

    Example: OLMo 3's `ToolForm(role="environment", reads=frozenset({"functions",
    "function_calls"}))`.
    """

    role: str
    """The role of a turn that has a tool's answer."""
    reads: frozenset[str]
    """The keys of messages that the template reads, of those of `OTHER_FORM`."""

    @classmethod
    def detect(cls, template: str) -> "ToolForm":
        """The form of a template's text.

        The template reads a key that stands in it as a name of Jinja's, not in plain words.
        """
        reads = {key for key in OTHER_FORM if re.search(rf"[.'\"]{key}\b", template)}
        if "tools" in re.findall(r"\w+", template):
            reads.add("tools")
        named = re.search("""['"](environment|ipython)['"]""", template)
        if named:
            role = named[1]
        elif "functions" in reads:
            role = "environment"
        else:
            role = "tool"
        return cls(role=role, reads=frozenset(reads))

    def convert(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
        """The messages and the `tools` to give to the template, as it reads them.

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
            turn = {key: value for key, value in message.items() if key not in OTHER_FORM}
            if turn["role"] == "tool":
                turn["role"] = self.role
            for name in OTHER_FORM:
                key, value = self._convert_value(name, message.get(name))
                if key == "tools":
                    tools += value or []
                elif key == "functions" and name == "tools" and turn["role"] != "system":
                    turns.append(
                        {
                            "role": "system",
                            "content": "",
                            key: value,
                        }
                    )
                elif key in self.reads and value is not None:
                    turn[key] = value
            turns.append(turn)
        return turns, tools

    def _convert_value(self, name: str, value: Any) -> tuple[str, Any]:
        """The key and the value that the template reads in place of these."""
        if name in self.reads or not json_or_text(value):
            return name, value
        other_name, convert = OTHER_FORM[name]
        other_value = convert(value) if other_name in self.reads else None
        if not other_value:
            raise MalformedRow(
                "template",
                f"the chat template cannot write {name!r}: choose another by "
                "--chat_template_name, or put them into 'content'",
            )
        return other_name, other_value

    def list_expected_texts(self, messages: Sequence[Mapping[str, Any]]) -> list[str]:
        """Texts about tools that the template must write, each as often as it is in the list.

        They are the names of tools and of functions called, calls as text, and the tools' answers.
        """
        turns, tools = self.convert(list(filter(_has_tools, messages)))
        functions = list(tools)
        for turn in turns:
            functions += turn.get("tool_calls", ())
        names = [str(each.get("function", each).get("name", "")) for each in functions]
        texts = []
        for turn in turns:
            texts += [turn[key] for key in ("functions", "function_calls") if key in turn]
        answers = [turn["content"].rpartition("</think>")[2] for turn in turns]
        return [*names, *texts, *answers]
