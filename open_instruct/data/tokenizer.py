"""Load a tokenizer as its tokenizer.json is written, and check its files.

The ids are those of `tokenizers.Tokenizer.from_file(tokenizer.json)`, whatever class a folder
names. AutoTokenizer would put the normalizer and the pre-tokenizer of that class, or of the model's
family, in the place of the file's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.core.files import near_files
from open_instruct.data.files.foreign_json import check_files, one_line, read_object
from open_instruct.data.templates.text_compare import squeeze
from open_instruct.data.tokenizer_ids import WHITE_SPACE, find_other_ids
from open_instruct.data.tokenizer_panics import refuse_panics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"
DOWNLOADED = (
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.jinja",
)
MAX_TOKENS = 2**24


def load_tokenizer(
    name_or_path: str, *, flag: str = "--tokenizer_name_or_path", revision: str | None = None
) -> PreTrainedTokenizerFast:
    """The tokenizer in the tokenizer.json of a folder or of a hub name, in a revision.

    The special tokens and the chat template are those of tokenizer_config.json. Code that comes
    with it is never run.

    Raises:
        InputError: no such folder, or it is asked for a revision; the tokenizer's files are missing
            or damaged; their ids contradict each other; transformers gives a text other ids than
            tokenizer.json does; or the tokenizer does not keep a text as it is.
    """
    from transformers import PreTrainedTokenizerFast

    folder = find_tokenizer_folder(name_or_path, revision=revision, flag=flag)
    fields, settings = read_tokenizer_files(folder)
    try:
        with refuse_panics(f"{flag}: the tokenizer of {name_or_path}"):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            # Settings of an earlier call, which the file may have kept.
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
            text = _join_pieces(tokenizer, "a", "b")
            white_space = _join_pieces(tokenizer, WHITE_SPACE)
            other_ids = find_other_ids(tokenizer.backend_tokenizer, fields)
    except InputError:
        raise
    except Exception as error:  # the library raises many kinds of errors: its own and its parsers'
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} cannot be loaded: {type(error).__name__}: "
            f"{one_line(error)}",
            kind="bad_model",
        ) from error
    _check_ids(tokenizer, folder, fields, settings)
    if other_ids is not None:
        raise InputError(
            f"{flag}: transformers opens the tokenizer of {name_or_path} with other ids than its "
            f"tokenizer.json gives: {other_ids}. Take out of {CONFIG_NAME} what changes it, or "
            "write that into tokenizer.json",
            kind="bad_model",
        )
    if text != "ab":
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} does not keep a text as it is ('a' and 'b' "
            f"end to end read {text!r}), so a prompt and its reply cannot be joined; use a "
            "byte-level tokenizer without a prefix space.",
            kind="bad_model",
        )
    if white_space != WHITE_SPACE and squeeze(white_space) == squeeze(WHITE_SPACE):
        raise InputError(
            f"{flag}: the tokenizer of {name_or_path} does not keep white space ({WHITE_SPACE!r} "
            f"reads {white_space!r}), so it would teach another text; use a byte-level tokenizer.",
            kind="bad_model",
        )
    return tokenizer


def find_tokenizer_folder(name_or_path: str, *, flag: str, revision: str | None = None) -> Path:
    """The folder of a tokenizer: the one named, or the local copy of a hub repository's files.

    Raises:
        InputError: there is no such folder or repository, or it has no tokenizer that can be read.
    """
    folder = find_local_folder(name_or_path, revision=revision, flag=flag)
    if folder is None:
        folder = _download(name_or_path, revision, flag)
    check_tokenizer_folder(folder, flag=flag)
    return folder


def _download(name: str, revision: str | None, flag: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(DOWNLOADED)))
    except Exception as error:  # of the library, of the network, of the disk
        raise InputError(
            f"{flag}: the tokenizer of {name} cannot be loaded: there is no such folder, and the "
            f"hub did not give it ({type(error).__name__}: {one_line(error)})",
            kind="remote",
        ) from error


def find_token_id(tokenizer: PreTrainedTokenizerFast, word: str) -> int:
    """The id of the one token that a word is.

    Raises:
        InputError: the tokenizer makes several tokens of it, or none.
    """
    token_ids: list[int] = tokenizer(word, add_special_tokens=False)["input_ids"]
    if len(token_ids) != 1:
        raise InputError(
            f"{word!r} has to be one token, and this tokenizer makes {len(token_ids)} of it: "
            "choose another word, or add it to the tokenizer",
            kind="bad_value",
        )
    return token_ids[0]


def find_local_folder(
    name_or_path: str, *, revision: str | None = None, flag: str | None = None
) -> Path | None:
    """The folder that a name is of; None for the name of a hub repository.

    An error begins with the `flag`, if there is one.

    Raises:
        InputError: it is neither, or a revision is asked of a folder.
    """
    path = Path(name_or_path).expanduser()
    if path.exists():
        if revision not in (None, "main"):
            raise InputError(
                f"--model_revision {revision}: {name_or_path} is a folder, which has none; leave "
                "the flag out",
                kind="conflict",
            )
        return path
    if path.is_absolute() or name_or_path.startswith((".", "~")) or name_or_path.count("/") != 1:
        name = name_or_path if flag is None else f"{flag}: {name_or_path}"
        raise InputError(
            f"{name}: there is no such folder; give the one that holds its files (config.json, "
            f"tokenizer.json).{near_files(path)}",
            kind="missing_file",
        )
    return None


def check_tokenizer_folder(path: Path, *, flag: str) -> None:
    """Refuse a folder that has no tokenizer that can be read.

    Raises:
        InputError: the path is a file, there is no tokenizer.json, or a file is unreasonable.
    """
    if path.is_file():
        raise InputError(
            f"{flag}: {path} is a file; give the folder that has the tokenizer's files.",
            kind="bad_model",
        )
    if not (path / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{flag}: {path} has no tokenizer.json (nor is a slow tokenizer enough); copy it, with "
            "tokenizer_config.json, from the checkpoint that the model was trained from.",
            kind="bad_model",
        )
    check_files(path)


def read_tokenizer_files(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of tokenizer.json, and of tokenizer_config.json, none where that is missing.

    Raises:
        InputError: a file is damaged, or has what makes ids random, impossible, or other than a
            template writes.
    """
    fields = read_object(folder / TOKENIZER_NAME)
    settings = {}
    if (folder / CONFIG_NAME).is_file():
        settings = read_object(folder / CONFIG_NAME)
    _check_range(folder / TOKENIZER_NAME, fields)
    model = fields.get("model")
    if isinstance(model, dict) and model.get("dropout"):
        raise InputError(
            f"{folder / TOKENIZER_NAME}: dropout = {model['dropout']!r} gives a text other ids "
            "each time; set it to null",
            kind="bad_model",
        )
    if settings.get("split_special_tokens"):
        raise InputError(
            f"{folder / CONFIG_NAME}: split_special_tokens = {settings['split_special_tokens']!r} "
            "spells special tokens out in letters, so that no reply would end: remove that field",
            kind="bad_model",
        )
    return fields, settings


def _check_range(file: Path, fields: Mapping[str, Any]) -> None:
    """Refuse ids out of range: the library allocates a place for every id up to the largest."""
    ids: list[Any] = []
    match fields.get("model"):
        case {"vocab": dict(vocabulary)}:
            ids += vocabulary.values()
    ids += [token.get("id") for token in _list_added_tokens(fields)]
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < MAX_TOKENS:
            raise InputError(
                f"{file}: {token_id!r} is no token id; they are whole numbers from 0 to "
                f"{MAX_TOKENS - 1}",
                kind="bad_model",
            )


def _list_added_tokens(fields: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The entries of `added_tokens` in a tokenizer.json."""
    added = fields.get("added_tokens")
    if not isinstance(added, list):
        return []
    return [token for token in added if isinstance(token, dict)]


def _check_ids(
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    fields: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Check that every added token is loaded with the id that its file says.

    Libraries pass over such an id, and take the next free one.

    Raises:
        InputError: names the token, the file, and both ids.
    """
    for file_name, content, token_id in _list_ids_in_files(folder, fields, settings):
        loaded_id = tokenizer.backend_tokenizer.token_to_id(content)
        if loaded_id != token_id:
            loaded = "is no token" if loaded_id is None else f"has the id {loaded_id}"
            raise InputError(
                f"{folder / file_name} gives the token {content!r} the id {token_id}, and with "
                f"tokenizer.json it {loaded}: mend the ids, or use the files of the model's origin",
                kind="bad_model",
            )


def _list_ids_in_files(
    folder: Path, fields: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[tuple[str, str, int]]:
    """List every added token of the files: the file's name, the token, its id there."""
    for token in _list_added_tokens(fields):
        if isinstance(token.get("content"), str):
            yield TOKENIZER_NAME, token["content"], token["id"]
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        decoder = {}
    for token_id, entry in decoder.items():
        content = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(content, str) and token_id.isdecimal():
            yield CONFIG_NAME, content, int(token_id)
    if (folder / "added_tokens.json").is_file():
        for content, token_id in read_object(folder / "added_tokens.json").items():
            yield "added_tokens.json", content, token_id


def _join_pieces(tokenizer: PreTrainedTokenizerFast, *pieces: str) -> str:
    """The text of the ids of pieces that are tokenised apart and laid end to end."""
    token_ids: list[int] = []
    for piece in pieces:
        token_ids += tokenizer(piece, add_special_tokens=False)["input_ids"]
    text: str = tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=False)
    return text
