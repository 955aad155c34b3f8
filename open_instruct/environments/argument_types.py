"""Arguments of calls whose form has no types: their texts, as the values that the tool's JSON
schema asks for.

| the schema says | `1984` is | `null` is | `[1]` is |
|---|---|---|---|
| string | the text "1984" | the text "null" | the text "[1]" |
| integer, number, array, object, boolean | 1984 | None | [1] |
| string, or null | the text "1984" | None | the text "[1]" |
| string, or integer | 1984 | the text "null" | the text "[1]" |
| nothing | 1984 | None | [1] |

What is none of the types that are asked for stays text, and the tool says so.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from open_instruct.core.text import json_or_text

_TYPES: dict[type, tuple[str, ...]] = {
    type(None): ("null",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number",),
    list: ("array",),
    dict: ("object",),
}
# What Python writes, and policies do, too.
_LITERALS = {"True": True, "False": False, "None": None}


def read_arguments(
    texts: Mapping[str, Any], tools: Iterable[Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """The arguments of a call of the tool `name`.

    Args:
        texts: each argument as it was written.
        tools: the schemas of all tools, in OpenAI's form.
    """
    functions = [tool.get("function", tool) for tool in tools]
    parameters = next(
        (each.get("parameters") or {} for each in functions if each.get("name") == name), {}
    )
    properties = parameters.get("properties") or {}
    return {key: _read(text, properties.get(key)) for key, text in texts.items()}


def _read(text: Any, schema: Any) -> Any:
    if not isinstance(text, str):
        return text
    types = _find_types(schema)
    value = _LITERALS.get(text.strip(), json_or_text(text))
    if not types:
        return value
    is_asked_for = types.intersection(_TYPES.get(type(value), ()))
    # None for a number is an error of the policy's, which the tool answers.
    return value if is_asked_for or (value is None and "string" not in types) else text


def _find_types(schema: Any) -> set[str]:
    """The types that a property may have; none where its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types = {kinds} if isinstance(kinds, str) else set(kinds or ())
    for key in ("anyOf", "oneOf", "allOf"):
        types |= {kind for each in schema.get(key) or () for kind in _find_types(each)}
    if not types and isinstance(schema.get("enum"), list):
        types = {kind for each in schema["enum"] for kind in _TYPES.get(type(each), ("string",))}
    return types | ({"null"} if schema.get("nullable") and types else set())
