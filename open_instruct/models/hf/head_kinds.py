"""The kinds of heads: what each computes at a position, its tensors, and transformers' class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Logits over the vocabulary, one number, or the logits of two classes.
Head = Literal["vocabulary", "score", "classes"]

LM_HEAD = "lm_head.w_out.weight"
LM_HEAD_BIAS = "lm_head.w_out.bias"
HF_SCORE = "score.weight"
HF_SCORE_BIAS = "score.bias"

# Of the heads that are not the vocabulary's: our names of their tensors with Hugging Face's, and
# their numbers of rows.
HEAD_TENSORS: Mapping[Head, Mapping[str, str]] = {
    "score": {LM_HEAD: HF_SCORE},
    "classes": {LM_HEAD: HF_SCORE, LM_HEAD_BIAS: HF_SCORE_BIAS},
}
HEAD_SIZES: Mapping[Head, int] = {"score": 1, "classes": 2}
# How the name of their class in transformers ends.
CLASS_ENDINGS: Mapping[Head, str] = {
    "score": "ForSequenceClassification",
    "classes": "ForTokenClassification",
}


def has_head(hf_config: PretrainedConfig, head: Head) -> bool:
    """Whether config.json names transformers' class with a head of this kind."""
    return any(name.endswith(CLASS_ENDINGS[head]) for name in hf_config.architectures or ())


def find_class(hf_config: PretrainedConfig, head: Head) -> str | None:
    """The name of transformers' class of this family with a head of this kind, if it has one."""
    from transformers.models.auto import modeling_auto

    if head == "score":
        return modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(
            hf_config.model_type
        )
    return modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.get(hf_config.model_type)


def check_head(model_type: str, head: Head) -> None:
    """Check that transformers has a class for the head, without loading it, which takes seconds.

    :raises InputError: transformers has no class of this family with a head of this kind.
    """
    if head in FAMILIES[model_type].heads_without_class:
        raise InputError(explain_missing_class(model_type, head), kind="unsupported_model")


def explain_missing_class(model_type: str, head: Head) -> str:
    """Say that transformers has no class of this family with such a head, and what to do."""
    remedy = "start from a model of another family"
    if head == "classes":
        remedy = f"give --reward_tokens + -, which are read of the model's own head, or {remedy}"
    return (
        f"transformers has no {model_type}{CLASS_ENDINGS[head]}, so a trained model of this "
        f"family could not be opened anywhere; {remedy}"
    )
