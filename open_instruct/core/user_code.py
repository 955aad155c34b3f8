"""What a user names on the command line and has written: `FILE.py:NAME`, or `module:NAME`."""

import importlib
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from open_instruct.core.errors import InputError


def load_named(word: str, *, origin: str, what: str) -> Any:
    """Import what `word` names.

    Args:
        word: as it was given.
        origin: the flag and its value, for errors.
        what: stands for the name in errors: "Class", "function".

    Raises:
        InputError: it cannot be imported, or there is nothing of that name.
    """
    where, _, name = word.rpartition(":")
    try:
        return getattr(_module(where), name)
    except (Exception, SystemExit) as error:  # it is foreign code, which may raise anything
        raise InputError(
            f"{origin} cannot be loaded ({type(error).__name__}: {error}); it takes "
            f"FILE.py:{what}, or module:{what} of a module that is installed or lies in the "
            "working folder",
            kind="own_code",
        ) from error


def load_own_function(
    word: str, *, flag: str, built_in: Container[str]
) -> Callable[..., Any] | None:
    """The function that `word` names; None where it is one of those that are `built_in`.

    Raises:
        InputError: it cannot be imported, or is no function.
    """
    if word in built_in:
        return None
    function: Callable[..., Any] = load_named(word, origin=f"{flag} {word}", what="function")
    if not callable(function):
        raise InputError(
            f"{flag} {word} is a {type(function).__name__}, not a function; docs/losses.md has an "
            "example",
            kind="own_code",
        )
    return function


def accepted_columns(function: Callable[..., Any], columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row that a function has parameters for; all of them where it takes any."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(columns)
    return {name: columns[name] for name in parameters if name in columns}


def _module(where: str) -> ModuleType:
    """A file, exactly that one; or a module: an installed one, else the file of its name in the
    working folder.

    The working folder is not on the path: nothing else that lies there can be imported in place of
    a library.
    """
    beside = Path(f"{where}.py")
    if where.endswith(".py"):
        beside = Path(where).expanduser()
    elif "." in where or find_spec(where) is not None or not beside.is_file():
        return importlib.import_module(where)
    name = str(beside.resolve())
    if name not in sys.modules:
        spec = spec_from_file_location(name, name)
        assert spec is not None and spec.loader is not None, "the name ends in .py"
        module = sys.modules[name] = module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]
