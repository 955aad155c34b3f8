"""Written conversations (--sft_mixer_list): every step learns from some of them beside its completions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from open_instruct.config.grpo import GRPOConfig
from open_instruct.data.sft_rows import SFTBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.records import RolloutSample
from open_instruct.run.console import Console
from open_instruct.run.datasets import reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_conversations(
    config: GRPOConfig, tokenizer: PreTrainedTokenizerFast, *, console: Console | None = None
) -> TokenDataset | None:
    """The rows of --sft_mixer_list, none where there is none; the `console` reports what becomes of them.

    Raises:
        InputError: for a bad row, a missing file, a bad amount.
    """
    data = config.data
    if not data.sft_mixer_list:
        return None
    given = reading(config, tokenizer, "--sft_mixer_list", data.sft_mixer_list, data.sft_mixer_list_splits)
    dataset, report = load_token_dataset(SFTBuilder, max_seq_length=data.max_seq_length, **given)
    if console is not None:
        console.report("conversations", report.lines())
    return dataset


def conversations_of(dataset: TokenDataset | None, *, step: int, config: GRPOConfig) -> list[RolloutSample]:
    """The conversations of `step` (1-based): the next of a shuffled epoch, a function of the step alone."""
    if dataset is None:
        return []
    last = step * config.data.sft_rows_per_step
    samples = []
    for position in range(last - config.data.sft_rows_per_step, last):
        epoch, place = divmod(position, len(dataset))
        row = np.random.default_rng([config.optim.seed, epoch]).permutation(len(dataset))[place]
        (document,) = dataset[int(row)]
        labels = document.num_label_tokens
        weights = {"rl": (0.0,) * labels, "ce": (1.0,) * labels, "kl": (0.0,) * labels}
        samples.append(
            RolloutSample(document=document, engine_logprobs=(0.0,) * labels, advantage=0.0, weights=weights)
        )
    return samples
