"""Write the tokenizer_config.json with which others open a tokenizer as its tokenizer.json says.

Transformers and vLLM ask AutoTokenizer, which takes the class that tokenizer_config.json names, or
that of the model's family; most classes put a normalizer, a pre-tokenizer and a decoder of their
own in the place of the file's. PreTrainedTokenizerFast does not, in transformers 4 as in 5. Which
class AutoTokenizer takes, and what it puts in, is seen on the same tokenizer without its
vocabulary, in milliseconds.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from open_instruct.core.errors import InputError
from open_instruct.data.tokenizer import CONFIG_NAME, TOKENIZER_NAME, read_tokenizer_files
from open_instruct.data.tokenizer_ids import (
    MODEL_SETTINGS,
    PARTS,
    PROSE,
    WHITE_SPACE,
    drop_vocabulary,
    find_first_difference,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

GENERIC_CLASS = "PreTrainedTokenizerFast"
# The name that transformers 5 writes for it.
NEW_GENERIC_CLASS = "TokenizersBackend"
# The config.json with which AutoTokenizer opens that class. Where none names a family, vLLM waits
# two seconds and looks again; without a version transformers splits texts as Mistral's where the
# vocabulary is large.
GENERIC_MODEL = {"model_type": "granite", "transformers_version": "5.0.0"}


def build_tokenizer_config(folder: Path, model_fields: Mapping[str, Any]) -> dict[str, Any]:
    """The tokenizer_config.json beside an export of a tokenizer.

    It is the folder's own, without fields that name code, as transformers 4 spells it, and with
    another class only where its class would give other ids.

    Args:
        folder: of the tokenizer.
        model_fields: of the model's config.json.

    Raises:
        InputError: beside a model of this family no class gives the ids of tokenizer.json.
    """
    fields, settings = read_tokenizer_files(folder)
    plain = _spell_for_all_readers(settings)
    problem = None
    for choice in (plain, use_generic_class(plain)):
        problem = _find_difference(fields, choice, model_fields)
        if problem is None:
            return choice
    raise InputError(
        f"{folder}: beside model_type {model_fields.get('model_type')!r}, transformers 5 and vLLM "
        "open every tokenizer as the class of that family, whatever tokenizer_config.json names: "
        f"{problem}. What is learned with these ids would be served with others; use the "
        "tokenizer of a model of that family",
        kind="bad_model",
    )


def _spell_for_all_readers(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without code, in the spelling of transformers 4, which 5 reads too.

    Transformers 4 stops at a class that it does not know, and at a list where it has an object.
    """
    plain = {name: value for name, value in settings.items() if name != "auto_map"}
    if plain.get("tokenizer_class") == NEW_GENERIC_CLASS:
        plain["tokenizer_class"] = GENERIC_CLASS
    if isinstance(plain.get("extra_special_tokens"), list):
        tokens = list(plain.get("additional_special_tokens") or [])
        tokens += [each for each in plain.pop("extra_special_tokens") if each not in tokens]
        plain["additional_special_tokens"] = tokens
    return plain


def use_generic_class(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same tokenizer_config.json with the class that changes nothing of tokenizer.json."""
    plain = {name: value for name, value in settings.items() if name not in ("auto_map", "backend")}
    return plain | {"tokenizer_class": GENERIC_CLASS}


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Put a tokenizer into the empty folder `out`, where AutoTokenizer opens it with its ids.

    Beside it is a config.json of no model, which has it opened so.
    """
    _, settings = read_tokenizer_files(folder)
    shutil.copyfile(folder / TOKENIZER_NAME, out / TOKENIZER_NAME)
    for name in ("special_tokens_map.json", "added_tokens.json"):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
    (out / CONFIG_NAME).write_text(json.dumps(use_generic_class(settings)), encoding="utf-8")
    (out / "config.json").write_text(json.dumps(GENERIC_MODEL), encoding="utf-8")


def _find_difference(
    fields: Mapping[str, Any], settings: Mapping[str, Any], model_fields: Mapping[str, Any]
) -> str | None:
    """What AutoTokenizer would read otherwise than the file; None where it is the same."""
    from tokenizers import Tokenizer

    small = drop_vocabulary(fields)
    try:
        theirs = _open_by_auto_class(small, settings, model_fields)
    except Exception as error:  # of a class that cannot be made of these files
        return f"{type(error).__name__} when they open it"
    ours = Tokenizer.from_str(json.dumps(small))
    return next(_list_differences(ours, theirs), None)


def _open_by_auto_class(
    small: Mapping[str, Any], settings: Mapping[str, Any], model_fields: Mapping[str, Any]
) -> Tokenizer:
    from transformers import AutoTokenizer

    read = {
        name: value
        for name, value in settings.items()
        if name not in ("added_tokens_decoder", "chat_template")
    }
    files = {
        TOKENIZER_NAME: small,
        CONFIG_NAME: read,
        "config.json": model_fields,
    }
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_text(json.dumps(content), encoding="utf-8")
        tokenizer: Any = AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    backend: Tokenizer = tokenizer.backend_tokenizer
    return backend


def _list_differences(ours: Tokenizer, theirs: Tokenizer) -> Iterator[str]:
    if any(_state(getattr(ours, part)) != _state(getattr(theirs, part)) for part in PARTS):
        for text in (PROSE, WHITE_SPACE):
            pieces = _split(ours, text)
            other = _split(theirs, text)
            if pieces != other:
                place = find_first_difference(pieces, other)
                window = slice(place, place + 3)
                yield f"the file splits {pieces[window]}, that class {other[window]}"
    if _state(ours.decoder) != _state(theirs.decoder) and _decode(ours) != _decode(theirs):
        yield "it decodes otherwise"
    if _added_tokens(ours.post_processor) != _added_tokens(theirs.post_processor):
        yield "it puts other special tokens around a text"
    model = json.loads(ours.model.__getstate__())
    other_model = json.loads(theirs.model.__getstate__())
    for name in MODEL_SETTINGS:
        if (model.get(name) or None) != (other_model.get(name) or None):
            yield f"{name} = {model.get(name)!r} of the file is {other_model.get(name)!r} there"


def _state(part: Any) -> Any:
    """A part of a tokenizer as JSON; None for one that does nothing."""
    if part is None:
        return None
    state = json.loads(part.__getstate__())
    if not isinstance(state, dict) or state.get("type") != "Sequence" or len(state) != 2:
        return state
    is_empty = not any(value for name, value in state.items() if name != "type")
    return None if is_empty else state


def _added_tokens(post_processor: Any) -> list[str]:
    """The special tokens that are put around a text."""
    state = _state(post_processor) or {}
    parts = state["processors"] if state.get("type") == "Sequence" else [state]
    names: list[str] = []
    for part in parts:
        for piece in part.get("single") or ():
            if "SpecialToken" in piece:
                names.append(piece["SpecialToken"]["id"])
    for part in parts:
        names += [part[key][0] for key in ("cls", "sep") if key in part]
    return names


def _split(tokenizer: Tokenizer, text: str) -> list[str]:
    """The pieces of a text, as the model of a tokenizer gets them."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _decode(tokenizer: Tokenizer) -> str:
    pieces = _split(tokenizer, PROSE)
    if tokenizer.decoder is None:
        return "".join(pieces)
    return tokenizer.decoder.decode(pieces)
