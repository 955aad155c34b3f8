"""Convert values of Arrow's columns to what a file of JSON would have.

Arrow gives every struct of a column the keys of all rows, and fills those that a row does not have
with nulls. Tables that the datasets library wrote have objects of many forms as JSON text (the type
`arrow.json`).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from open_instruct.data.files.rows import MalformedRow, parse_json

Convert = Callable[[Any], Any]


def build_row_conversion(schema: Any, *, decodes_json: bool) -> Convert:
    """A function that makes a row of a `pyarrow.Schema`, as a dictionary, what JSON would have.

    Keys of structs that are null are left out: `{"a": None, "city": "Rome"}` becomes `{"city":
    "Rome"}`. Columns of the row, entries of lists and maps, and whatever JSON text says stay, null
    or not. Maps become objects.

    Args:
        decodes_json: whether values of the type `arrow.json` are still text.

    Raises (when a row is converted):
        MalformedRow: a map has a key twice, or what should be JSON text is none.
    """
    columns = {
        name: _build_conversion(schema.field(name).type, decodes_json) for name in schema.names
    }

    def convert_row(row: dict[str, Any]) -> dict[str, Any]:
        return {name: _convert(value, columns.get(name)) for name, value in row.items()}

    return convert_row


def _convert(value: Any, convert: Convert | None) -> Any:
    return value if value is None or convert is None else convert(value)


def _build_conversion(kind: Any, decodes_json: bool) -> Convert | None:
    """What converts values of a `pyarrow.DataType` but null; None if they stay as they are."""
    from pyarrow import types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return _read_json if decodes_json else None
    if types.is_struct(kind):
        fields = [kind.field(index) for index in range(kind.num_fields)]
        conversions = {each.name: _build_conversion(each.type, decodes_json) for each in fields}
        return partial(_convert_struct, conversions)
    if types.is_map(kind):
        return partial(_convert_map, _build_conversion(kind.item_type, decodes_json))
    if types.is_nested(kind) and hasattr(kind, "value_type"):  # the kinds of lists
        return partial(_convert_list, _build_conversion(kind.value_type, decodes_json))
    return None


def _read_json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    return parse_json(value.encode("utf-8", "surrogatepass"))


def _convert_struct(fields: Mapping[str, Convert | None], value: Any) -> Any:
    # A feature of the datasets library has made something else of it.
    if not isinstance(value, Mapping):
        return value
    return {
        name: _convert(item, fields.get(name)) for name, item in value.items() if item is not None
    }


def _convert_map(convert: Convert | None, value: Any) -> Any:
    """A map comes as a list of pairs, or as a dictionary."""
    entries = {key: _convert(item, convert) for key, item in dict(value).items()}
    if len(entries) < len(value):
        raise MalformedRow("not_readable", "a map has a key twice")
    return entries


def _convert_list(convert: Convert | None, value: Any) -> Any:
    if convert is None or not isinstance(value, list):
        return value
    return [_convert(item, convert) for item in value]
