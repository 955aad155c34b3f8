"""Which keys a row has, which of them were read, and the names that others give to the same key."""

from collections import UserDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from open_instruct.core.tables import read_yaml_table
from open_instruct.data.files.rows import MalformedRow

# Names of roles and columns in the data of others, by the name here.
OTHER_NAMES = read_yaml_table(Path(__file__).with_name("other_names.yaml"))


class TrackedRow(UserDict[str, Any]):
    """A row that records which of its keys were read, so that the others can be warned of."""

    def __init__(self, value: Mapping[str, Any]) -> None:
        super().__init__(value)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return self.data[key]

    def unread_keys(self) -> Iterator[str]:
        """The keys with a value that nothing has read."""
        for key, value in self.data.items():
            if value is not None and key not in self.keys_read:
                yield key

    def columns_read(self) -> dict[str, Any]:
        """The keys that were read, with their values; those without a value are left out."""
        return {
            key: value
            for key, value in self.data.items()
            if value is not None and key in self.keys_read
        }


def unwrap_row(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """The row itself, to be looked into without its keys counting as read."""
    return row.data if isinstance(row, TrackedRow) else row


def find_key(row: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    """The first of `keys` with a value; Arrow fills missing columns with null, which is none."""
    values = unwrap_row(row)
    for key in keys:
        if values.get(key) is not None:
            return key
    return None


def find_value(row: Mapping[str, Any], name: str) -> Any:
    """The value under a name, or None; a dot reaches into an object: `reward_model.answer`."""
    if name in row or "." not in name:
        return row.get(name)
    first, _, rest = name.partition(".")
    inner = row.get(first)
    return find_value(inner, rest) if isinstance(inner, Mapping) else None


def describe_keys(row: Mapping[str, Any]) -> str:
    """The keys of a row, for messages."""
    return ", ".join(map(repr, row)) or "no keys"


def missing_key_error(row: Mapping[str, Any], key: str, hint: str = "") -> MalformedRow:
    """The error of a row that lacks a key; a `hint` follows the keys that the row has."""
    return MalformedRow(
        "missing_key", f"no key {key!r}; the row has {describe_keys(row)}{hint}", missing_key=key
    )
