"""Turn panics of the tokenizer library, which is written in Rust, into errors for the user."""

from collections.abc import Iterator
from contextlib import contextmanager

from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import one_line


@contextmanager
def refuse_panics(name: str) -> Iterator[None]:
    """Run a block that calls the tokenizer called `name`.

    Raises:
        InputError: the library panics; Python's PanicException is no `Exception`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise InputError(
            f"{name} fails on a text ({one_line(error)}): mend its tokenizer.json, or use that of "
            "the model's origin",
            kind="bad_model",
        ) from None
