"""Tokenizers, opened and checked: the library that reads them trusts their files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.data.chat import panics_as_errors
from open_instruct.data.files.foreign_json import check_files, one_line, read_object
from open_instruct.errors import InputError
from open_instruct.whole_file import near_files

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 2**24


def load_tokenizer(
    name_or_path: str, *, flag: str = "--tokenizer_name_or_path", revision: str | None = None
) -> PreTrainedTokenizerFast:
    """The fast tokenizer of a folder or of a hub name, in a revision; code that comes with it is never run.

    Raises:
        InputError: no such folder, or it is asked for a revision; the tokenizer's files are missing or damaged; it has
            no fast (tokenizer.json) form; or it adds characters of its own to the start of a text.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if (folder := given_folder(name_or_path, revision=revision, flag=flag)) is not None:
        check_tokenizer_folder(folder, flag=flag)
        _check_token_ids(folder / "tokenizer.json")
        name_or_path = str(folder)
    try:
        with panics_as_errors(f"{flag}: the tokenizer of {name_or_path}"):
            if folder is not None and not (folder / "tokenizer_config.json").is_file():
                tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            else:
                tokenizer = AutoTokenizer.from_pretrained(name_or_path, revision=revision, trust_remote_code=False)
            if not tokenizer.is_fast:
                raise InputError(
                    f"{flag}: {name_or_path} has only a slow tokenizer; a tokenizer.json is needed.", kind="bad_model"
                )
            a, b = (tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in ("a", "b"))
            text = tokenizer.backend_tokenizer.decode(a + b)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds of errors: its own, its parsers' and those of downloads
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} cannot be loaded: {type(error).__name__}: {one_line(error)}",
            kind="bad_model",
        ) from error
    if text != "ab":
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} does not keep a text as it is ('a' and 'b' end to end read "
            f"{text!r}), so a prompt and its reply cannot be joined; use a byte-level tokenizer without a prefix "
            "space.",
            kind="bad_model",
        )
    return tokenizer


def given_folder(name_or_path: str, *, revision: str | None = None, flag: str | None = None) -> Path | None:
    """The folder itself; None for the name of a hub repository. A refusal begins with the `flag`, if there is one.

    Raises:
        InputError: it is neither, or a revision is asked of a folder.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        if revision not in (None, "main"):
            raise InputError(
                f"--model_revision {revision}: {name_or_path} is a folder, which has none; leave the flag out",
                kind="conflict",
            )
        return path
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
        asked = name_or_path if flag is None else f"{flag}: {name_or_path}"
        wanted = "give the one that holds its files (config.json, tokenizer.json)"
        raise InputError(f"{asked}: there is no such folder; {wanted}.{near_files(path)}", kind="missing_file")
    return None


def check_tokenizer_folder(path: Path, *, flag: str) -> None:
    """:raises InputError: the folder has no tokenizer that can be read."""
    if path.is_file():
        raise InputError(f"{flag}: {path} is a file; give the folder that has the tokenizer's files.", kind="bad_model")
    if not (path / "tokenizer.json").is_file():
        raise InputError(
            f"{flag}: {path} has no tokenizer.json (nor is a slow tokenizer enough); copy it, with "
            "tokenizer_config.json, from the checkpoint that the model was trained from.",
            kind="bad_model",
        )
    check_files(path)


def _check_token_ids(file: Path) -> None:
    """Refuse ids out of range: the library allocates a place for every id up to the largest."""
    fields = read_object(file)
    ids: list[Any] = []
    match fields.get("model"):
        case {"vocab": dict(vocabulary)}:
            ids += vocabulary.values()
    match fields.get("added_tokens"):
        case list(added):
            ids += [token.get("id") for token in added if isinstance(token, dict)]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS:
            raise InputError(
                f"{file}: {token_id!r} is no token id; they are whole numbers from 0 to {MAX_TOKENS - 1}",
                kind="bad_model",
            )
