"""Texts of arguments are what the schema of the tool says."""

from typing import Any

import pytest

from open_instruct.environments.argument_types import read_arguments

STRING = {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (STRING, "1984", "1984"),
        (STRING, "null", "null"),
        (STRING, "true", "true"),
        (STRING, "[x]", "[x]"),
        (STRING, '"Emma"', '"Emma"'),
        (STRING, " a\n", " a\n"),
        ({"type": "integer"}, "1949", 1949),
        ({"type": "integer"}, "007", "007"),
        ({"type": "integer"}, "many", "many"),
        ({"type": "number"}, "1.5", 1.5),
        ({"type": "number"}, "2", 2),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "1", "1"),
        ({"type": "array", "items": STRING}, '["a"]', ["a"]),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": "string", "nullable": True}, "1984", "1984"),
        ({"type": ["string", "null"]}, "None", None),
        ({"anyOf": [STRING, {"type": "null"}]}, "5", "5"),
        ({"type": ["integer", "string"]}, "5", 5),
        ({"type": ["integer", "string"]}, "five", "five"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({}, "1", 1),
        (None, "x", "x"),
    ],
)
def test_a_text_becomes_the_type_that_is_asked_for(schema: Any, text: str, value: Any) -> None:
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {"x": schema} if schema else {}}},
    }
    (read,) = read_arguments({"x": text}, [tool], "f").values()
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    "tools", [[], [{"function": {"name": "f"}}], [{"function": {"name": "f", "parameters": None}}]]
)
def test_arguments_of_a_tool_without_a_schema_are_read_as_json(tools: list[Any]) -> None:
    assert read_arguments({"x": "[1]", "y": "a"}, tools, "f") == {"x": [1], "y": "a"}
