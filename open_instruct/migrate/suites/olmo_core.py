"""Launches of OLMo-core's own SFT scripts: a run's name, a checkpoint, a cluster, then settings.

Example: `python src/scripts/train/sft/Olmo-3-7B-SFT.py train RUN STEP/model_and_optim CLUSTER
--seq_len=32768 --train_module.optim.lr=5e-5`.
"""

import re

from open_instruct.core.errors import InputError
from open_instruct.migrate.suites.settings import (
    Settings,
    first_command,
    read_flags,
    split_at_program,
)
from open_instruct.migrate.suites.shell_script import expand_script

PROGRAM = re.compile(r"(?:.*/)?(scripts/train/sft/[\w.-]+)\.py")
LARGE = re.compile(r"32b", re.IGNORECASE)
# What the scripts take for what a launch does not say.
SEQUENCE_LENGTH = 16_384
BATCH_SEQUENCES = 64
GPUS_PER_NODE = 8
# The context degree of the script for 32B; that for 7B splits rows that are longer than so many
# tokens, each part of which one GPU can take.
CONTEXT_DEGREE_OF_32B = 8
TOKENS_PER_GPU = 16_384
WEIGHTS_FOLDER = "model_and_optim"


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: they are no launch of these scripts.
    """
    _, program, rest = split_at_program(expand_script(words, _starts_trainer), PROGRAM)
    rest = first_command(rest)
    places = [word for word in rest[:4] if not word.startswith("--")]
    if not program or len(places) < 4:
        raise InputError(
            "no launch of OLMo-core's SFT: it is src/scripts/train/sft/NAME.py train RUN "
            "CHECKPOINT CLUSTER, then settings",
            kind="stray_word",
        )
    _, run_name, checkpoint, cluster = places
    values = read_flags(rest[4:])
    values |= {"run_name": [run_name], "cluster": [cluster]}
    # The folder above has config.json and the tokenizer's name, which are read here too.
    values["checkpoint"] = [checkpoint.rstrip("/").removesuffix(f"/{WEIGHTS_FOLDER}")]
    num_gpus = _read_number(values, "num_nodes", 1) * _read_number(
        values, "launch.num_gpus", GPUS_PER_NODE
    )
    values |= _share_batch(values, num_gpus, is_large=_is_large(program, values))
    return Settings(trainer="sft", values=values, num_gpus=num_gpus)


def _starts_trainer(words: list[str]) -> bool:
    return any(map(PROGRAM.fullmatch, words))


def _is_large(program: str, values: dict[str, list[str]]) -> bool:
    """Whether the model is of 32B, by the script's name or by a setting of older ones."""
    return LARGE.search(" ".join([program, *values.get("model_name", [])])) is not None


def _share_batch(
    values: dict[str, list[str]], num_gpus: int, *, is_large: bool
) -> dict[str, list[str]]:
    """How the scripts share a batch: by ranks that split a row, and by microbatches of one row."""
    length = _read_number(values, "seq_len", SEQUENCE_LENGTH)
    degree = CONTEXT_DEGREE_OF_32B if is_large else -(-length // TOKENS_PER_GPU)
    num_ranks = max(num_gpus // degree, 1)
    num_tokens = _read_number(values, "global_batch_size", BATCH_SEQUENCES * SEQUENCE_LENGTH)
    shared = {"ranks that split a row": [str(degree)]}
    num_rows, num_tokens_left = divmod(num_tokens, length)
    num_microbatches, num_rows_left = divmod(num_rows, num_ranks)
    if num_microbatches and not num_tokens_left and not num_rows_left:
        shared["microbatches"] = [str(num_microbatches)]
    return shared


def _read_number(values: dict[str, list[str]], name: str, default: int) -> int:
    word = " ".join(values.get(name, []))
    return int(word) if word.isdecimal() and int(word) else default
