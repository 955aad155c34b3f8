"""Arguments of calls whose form has no types are converted to what the tool's JSON schema asks for.

| the schema says | `1984` is | `null` is | `[1]` is |
|---|---|---|---|
| string | the text "1984" | the text "null" | the text "[1]" |
| integer, number, array, object, boolean | 1984 | None | [1] |
| string, or null | the text "1984" | None | the text "[1]" |
| string, or integer | 1984 | the text "null" | the text "[1]" |
| nothing | 1984 | None | [1] |

A value of none of the types in the schema stays text, and the tool refuses it.
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
# Python's spellings, which policies use too.
_LITERALS = {
    "True": True,
    "False": False,
    "None": None,
}


def read_arguments(
    texts: Mapping[str, Any], tools: Iterable[Mapping[str, Any]], name: str
) -> dict[str, Any]:
    """Convert the arguments of a call of the tool `name`.

    Args:
        texts: each argument as it was written.
        tools: the schemas of all tools, in OpenAI's form.
    """
    properties: Mapping[str, Any] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters") or {}
            properties = parameters.get("properties") or {}
            break
    return {key: _convert_text(text, properties.get(key)) for key, text in texts.items()}


def _convert_text(text: Any, schema: Any) -> Any:
    if not isinstance(text, str):
        return text
    types = _find_types(schema)
    value = _LITERALS.get(text.strip(), json_or_text(text))
    if not types:
        return value
    if types.intersection(_TYPES.get(type(value), ())):
        return value
    # None for a number is an error of the policy's, which the tool answers.
    if value is None and "string" not in types:
        return value
    return text


def _find_types(schema: Any) -> set[str]:
    """Find the types that a property may have; none where its schema does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kinds = schema.get("type")
    types: set[str] = {kinds} if isinstance(kinds, str) else set(kinds or ())
    for key in ("anyOf", "oneOf", "allOf"):
        for alternative in schema.get(key) or ():
            types |= _find_types(alternative)
    if not types and isinstance(schema.get("enum"), list):
        for value in schema["enum"]:
            types.update(_TYPES.get(type(value), ("string",)))
    if types and schema.get("nullable"):
        types.add("null")
    return types
