"""Refuses, before training, a model that could not be exported, or a folder to keep as it is."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from open_instruct.core.errors import InputError
from open_instruct.core.text import spell_count
from open_instruct.data.files.foreign_json import one_line
from open_instruct.models import export_files
from open_instruct.models.hf.head_kinds import HEAD_SIZES, Head, explain_missing_class, find_class
from open_instruct.models.hf.names import HF_LM_HEAD, TensorNames, split_as_in_files
from open_instruct.models.load import list_some


def check_exportable(names: TensorNames, expected_shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse, before training, a model whose export transformers would not load.

    Args:
        names: of the model that config.json describes.
        expected_shapes: the model's parameters, as `find_parameter_shapes` gives them.

    Raises:
        InputError: names or shapes of the export differ from what transformers builds from
            config.json.
    """
    hf_names = dict(names)
    ours = {hf_names.get(name, name): tuple(shape) for name, shape in expected_shapes.items()}
    theirs = _find_transformers_shapes(names)
    all_names = ours.keys() | theirs.keys()
    differing = sorted(name for name in all_names if ours.get(name) != theirs.get(name))
    if not differing:
        return
    mismatches = [
        f"{name} (ours {ours.get(name, 'absent')}, theirs {theirs.get(name, 'absent')})"
        for name in differing
    ]
    raise InputError(
        "an export of this model would not open in transformers: what config.json asks for "
        f"is not met by {list_some(mismatches)}. Is config.json of the same model?",
        kind="bad_model",
    )


def _find_transformers_shapes(names: TensorNames) -> dict[str, tuple[int, ...]]:
    """The shapes of the model that transformers builds from config.json, on the meta device."""
    import transformers

    classes: dict[Head, Any] = {
        "vocabulary": transformers.AutoModelForCausalLM,
        "score": transformers.AutoModelForSequenceClassification,
        "classes": transformers.AutoModelForTokenClassification,
    }
    config = copy.deepcopy(names.hf_config)
    with_head = ""
    if names.head != "vocabulary":
        num_rows = HEAD_SIZES[names.head]
        with_head = f", with a head of {spell_count(num_rows, 'row')}"
        config.num_labels = num_rows
        if find_class(names.hf_config, names.head) is None:
            problem = explain_missing_class(names.hf_config.model_type, names.head)
            raise InputError(problem, kind="unsupported_model")
    try:
        with torch.device("meta"):
            # Attention is given, since transformers would otherwise fetch a kernel that the config
            # may name.
            model = classes[names.head].from_config(
                config, attn_implementation="eager", dtype=torch.float32
            )
    except Exception as error:  # its modules may raise anything for a bad value
        raise InputError(
            f"transformers cannot build the model that config.json describes{with_head}: "
            f"{one_line(error)}",
            kind="bad_model",
        ) from error
    return {
        hf_name: tuple(tensor.shape)
        for hf_name, tensor in split_as_in_files(model.state_dict()).items()
        if not (names.tied and hf_name == HF_LM_HEAD)
    }


def check_destination(source_folder: str | Path, out_folder: str | Path) -> None:
    """Refuse, before training, a folder that an export must not replace. Changes nothing.

    Raises:
        InputError: `out_folder` is the source, a file, or a folder of something other than an
            export, or cannot be replaced: it is a link or a mount, or its parent cannot be written.
    """
    source = Path(source_folder)
    out = Path(out_folder)
    if problem := export_files.find_replace_problem(out):
        raise InputError(f"cannot export to {out}: {problem}", kind="unreadable_file")
    if out.exists() and source.is_dir() and out.samefile(source):
        raise InputError(
            f"cannot export to {out}: it is the checkpoint that training starts from; choose "
            "another",
            kind="unreadable_file",
        )
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").is_file():
        raise InputError(
            f"cannot export to {out}: it holds something other than an earlier export; choose "
            "another",
            kind="unreadable_file",
        )
