"""The settings beside an exported model that keep its token ids and its ends of replies.

generate(), pipelines and vLLM end a reply at the ids that generation_config.json names.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.foreign_json import read_object
from open_instruct.data.tokenizer_class import build_tokenizer_config

NAME = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def exported_settings(
    folder: Path,
    tokenizer_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    chat: ChatFormat | None,
) -> dict[str, Any]:
    """The arguments `tokenizer_config` and `generation_config` of `export_hf`.

    Args:
        folder: the start model's.
        tokenizer_folder: of the tokenizer that is exported beside it.
        chat: with which the model was trained; None for one that writes no replies.

    Raises:
        InputError: no reader would open the tokenizer with the ids that it has here, or it cannot
            end a turn.
    """
    fields = read_object(folder / "config.json")
    settings = {"tokenizer_config": build_tokenizer_config(tokenizer_folder, fields)}
    if chat is not None:
        settings["generation_config"] = exported_generation_config(
            folder,
            fields,
            tokenizer,
            chat.turn_end_token_ids(),
            is_own_tokenizer=tokenizer_folder == folder,
        )
    return settings


def exported_generation_config(
    source: Path,
    model_fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    turn_end_token_ids: tuple[int, ...],
    *,
    is_own_tokenizer: bool,
) -> dict[str, Any]:
    """The start model's fields, with the trained model's turn ends in `eos_token_id`.

    Args:
        source: the start model's folder; where it has no such file, the ids are those of its
            config.json.
        model_fields: of that config.json.
        turn_end_token_ids: those of the template and the tokenizer that the model was trained with.
        is_own_tokenizer: whether the tokenizer is the start model's. Another one may use an id of
            its eos for a word, so that then only special tokens stay.

    Example: a base model that ends at `[0]`, trained with ChatML, whose `<|im_end|>` is 2, ends at
    `[0, 2]`.
    """
    fields = read_object(source / NAME) if (source / NAME).is_file() else {}
    fields = {
        name: model_fields[name] for name in TOKEN_IDS if model_fields.get(name) is not None
    } | fields
    given = fields.get("eos_token_id")
    known = given if isinstance(given, list) else [given]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    kept = [
        each for each in known if isinstance(each, int) and (is_own_tokenizer or each in special)
    ]
    new = [each for each in turn_end_token_ids if each not in kept]
    if kept + new == known or not kept + new:
        return fields
    return fields | {"eos_token_id": kept + new}
