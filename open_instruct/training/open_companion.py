"""Open the checkpoint of a model that stands beside the policy: a teacher or a critic."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from open_instruct.config.lora import LoRASection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory


def open_companion_model(
    kind: Literal["teacher", "critic"],
    name: str | None,
    student: Pretrained,
    *,
    config: LearnerConfig,
    layout: ShardLayout,
) -> Pretrained:
    """Open the model of --KIND_model_name_or_path; without a `name` the start model.

    A critic is trained, and has the head of a score. `build_teacher` builds a teacher.

    :raises InputError: it cannot be opened, or its vocabulary is not the student's.
    """
    model = config.model
    directory = RunDirectory(path=Path(config.run.output_dir))
    if name is not None:
        model = replace(model.read_from(name), tokenizer_name_or_path=None)
    config = replace(config, model=model, lora=LoRASection())
    if kind == "critic":
        companion = open_pretrained(config, directory.critic, layout=layout, head="score")
    else:
        # A teacher may be dense: its experts are split where they divide, see
        # `SegmentTransformer.apply_fsdp`.
        layout = replace(layout, expert_parallel_degree=1)
        companion = open_pretrained(config, directory.hf_model, layout=layout, is_trained=False)
    require_same_vocabulary(kind, companion, student)
    return companion


def require_same_vocabulary(kind: str, companion: Pretrained, student: Pretrained) -> None:
    """:raises InputError: the tokenizers differ; it names the first token that does."""
    ours = student.tokenizer.get_vocab()
    theirs = companion.tokenizer.get_vocab()
    if ours == theirs:
        return
    differing = dict(ours.items() ^ theirs.items())
    first = min(differing, key=lambda word: min(ours.get(word, 1e9), theirs.get(word, 1e9)))
    there = describe_token(first, theirs)
    here = describe_token(first, ours)
    num_rows_there = companion.hf_config.vocab_size
    num_rows_here = student.hf_config.vocab_size
    raise InputError(
        f"--{kind}_model_name_or_path {companion.folder}: its tokenizer has {len(theirs):,} tokens "
        f"(its head {num_rows_there:,} rows), the student's {len(ours):,} (its head "
        f"{num_rows_here:,}), and they are not the same: {first!r} is {there} there and {here} "
        f"here. Take a {kind} with the student's vocabulary",
        kind="conflict",
    )


def describe_token(word: str, vocabulary: Mapping[str, int]) -> str:
    if word not in vocabulary:
        return "no token"
    return f"id {vocabulary[word]}"
