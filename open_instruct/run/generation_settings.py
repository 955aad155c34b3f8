"""Builds the settings beside an exported model: its tokenizer's, and where its replies end.

generate(), pipelines and vLLM end a reply at the ids in generation_config.json.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.foreign_json import read_object
from open_instruct.data.tokenizer_class import build_tokenizer_config
from open_instruct.models.model_folder import ModelFolder, open_model_folder

NAME = "generation_config.json"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def build_export_settings(
    source: Path | ModelFolder,
    tokenizer_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    chat: ChatFormat | None,
) -> dict[str, Any]:
    """The arguments `tokenizer_config` and `generation_config` of `export_hf`.

    Args:
        source: the start model's folder.
        tokenizer_folder: of the tokenizer that is exported beside it.
        chat: the chat format of the training; None for a model that writes no replies.

    Raises:
        InputError: no reader would open the tokenizer with the ids that it has here, or it cannot
            end a turn.
    """
    if isinstance(source, Path):
        source = open_model_folder(source)
    fields = source.read_fields()
    settings = {"tokenizer_config": build_tokenizer_config(tokenizer_folder, fields)}
    if chat is not None:
        settings["generation_config"] = build_generation_config(
            source.path,
            fields,
            tokenizer,
            chat.turn_end_token_ids(),
            is_own_tokenizer=tokenizer_folder == source.path,
        )
    return settings


def build_generation_config(
    source: Path,
    model_fields: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast,
    turn_end_token_ids: tuple[int, ...],
    *,
    is_own_tokenizer: bool,
) -> dict[str, Any]:
    """The start model's fields, with the trained model's turn ends in `eos_token_id`.

    Args:
        source: the start model's folder; without such a file, the ids of its config.json hold.
        model_fields: the fields of that config.json.
        turn_end_token_ids: those of the template and the tokenizer that the model was trained with.
        is_own_tokenizer: whether the tokenizer is the start model's. Another one may use an id of
            its eos for a word, so that then only special tokens stay.

    Example: a base model that ends at `[0]`, trained with ChatML, whose `<|im_end|>` is 2, ends at
    `[0, 2]`.
    """
    fields = {name: model_fields[name] for name in TOKEN_IDS if model_fields.get(name) is not None}
    if (source / NAME).is_file():
        fields |= read_object(source / NAME)
    before = fields.get("eos_token_id")
    if not isinstance(before, list):
        before = [before]
    special = {*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids}
    after = []
    for token_id in before:
        if isinstance(token_id, int) and (is_own_tokenizer or token_id in special):
            after.append(token_id)
    after += [token_id for token_id in turn_end_token_ids if token_id not in after]
    if after == before or not after:
        return fields
    return fields | {"eos_token_id": after}
