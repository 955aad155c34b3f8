"""The tokenised preference pairs of a run, built once by rank 0 and read from the cache by all."""

from __future__ import annotations

from open_instruct.config.sections import PreferenceDataSection
from open_instruct.data.preference_dataset import DataReport, PreferenceDataset, load_preference_dataset
from open_instruct.parallel.process import on_main_process
from open_instruct.training.console import Console
from open_instruct.training.pretrained import Pretrained


def load_pairs(
    data: PreferenceDataSection, *, pretrained: Pretrained, seed: int, console: Console
) -> tuple[PreferenceDataset, PreferenceDataset | None]:
    """The training pairs, and the held-out pairs if any are named.

    Rank 0 reads and tokenises; the others find its work in the cache (or do it again, where a node
    does not share the cache folder).

    :raises InputError: for a bad row, a missing file, a bad amount; on every rank.
    """

    def load(title: str, flag: str, mixer_list: list[str], splits: list[str]) -> PreferenceDataset:
        def read(speaks: bool) -> tuple[PreferenceDataset, DataReport]:
            with Console(speaks=speaks).counting(title) as on_progress:
                return load_preference_dataset(
                    mixer_list=mixer_list,
                    splits=splits,
                    tokenizer=pretrained.tokenizer,
                    chat_template_name=data.chat_template_name,
                    max_seq_length=data.max_seq_length,
                    on_bad_row=data.on_bad_row,
                    seed=seed,
                    cache_dir=data.cache_dir,
                    flag=flag,
                    on_progress=on_progress,
                )

        for line in on_main_process(lambda: read(console.speaks)[1].lines()):
            console.say(f"{title}: {line}")
        return read(False)[0]

    pairs = load("training pairs", "--mixer_list", data.mixer_list, data.mixer_list_splits)
    if not data.eval_mixer_list:
        return pairs, None
    return pairs, load("held-out pairs", "--eval_mixer_list", data.eval_mixer_list, data.eval_mixer_list_splits)
