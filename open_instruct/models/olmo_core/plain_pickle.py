"""Reads a pickle as plain data. It may name the classes of a list, and none of them is loaded.

A pickle is a program: whoever reads it calls the functions that it names. Here a name of the list
stands for an empty `Record`, which keeps what it is given, and any other name is refused. So
nothing runs that the pickle chooses, and what comes out is records, containers, texts and numbers.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from open_instruct.core.errors import InputError
from open_instruct.core.text import escape_controls

MAX_NAME = 120


class Record:
    """What a pickle has of a class or a function: its arguments, and its state.

    Example: of `torch.Size([4, 2])` the arguments are `((4, 2),)`, and the state is None.
    """

    __slots__ = ("arguments", "state")
    name: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Record":
        record = super().__new__(cls)
        record.arguments = arguments
        record.state = None
        return record

    def __setstate__(self, state: Any) -> None:
        self.state = state


Names = Mapping[tuple[str, str], type[Record]]


def allow_names(names_by_module: Mapping[str, Sequence[str]]) -> Names:
    """A kind of `Record` for each name, by module and name."""
    allowed = {}
    for module, names in names_by_module.items():
        for name in names:
            allowed[module, name] = type(name, (Record,), {"__slots__": (), "name": name})
    return allowed


class _Refused(Exception):
    """A pickle has what no file of its kind has; the message says what."""


class _Reader(pickle.Unpickler):
    def __init__(self, content: bytes, allowed: Names, *, has_storages: bool) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed
        self._has_storages = has_storages

    def find_class(self, module: str, name: str) -> type[Record]:
        record = self._allowed.get((module, name))
        if record is None:
            raise _Refused(f"it names {escape_controls(f'{module}.{name}')[:MAX_NAME]}")
        return record

    def persistent_load(self, pid: Any) -> Any:
        if not self._has_storages:
            raise _Refused("it refers to an object outside itself")
        return pid


def read_pickle(content: bytes, allowed: Names, *, where: str, has_storages: bool = False) -> Any:
    """Read a pickle as records, containers, texts and numbers.

    :param where: the file, for messages.
    :param has_storages: whether it refers to storages of tensors; a reference is read as what the
        pickle has in its place.
    :raises InputError: the pickle names anything else than what is allowed, or is none.
    """
    try:
        return _Reader(content, allowed, has_storages=has_storages).load()
    except _Refused as refused:
        raise InputError(
            f"{where} is a pickle such as no checkpoint has: {refused}. A pickle can run code, so "
            "it was not read: fetch the checkpoint again, from a source that you trust",
            kind="bad_model",
        ) from None
    except Exception as error:  # of any kind: the pickle is another's program
        raise InputError(
            f"{where} is damaged, or no pickle ({type(error).__name__}): fetch the checkpoint "
            "again",
            kind="bad_model",
        ) from None
