"""verl's launches: Hydra's `a.b=c` after its program, a shell script, or nested YAML.

Example: `python3 -m verl.trainer.main_ppo data.train_files=rows.parquet`.
"""

import json
import re

from open_instruct.config.parser import YAML_SUFFIXES
from open_instruct.core.errors import InputError
from open_instruct.migrate.suites.settings import (
    Settings,
    count_gpus,
    first_command,
    read_yaml,
    split_at_program,
)
from open_instruct.migrate.suites.shell_script import expand_script

PROGRAM = re.compile(r"(?:.*[./])?(main_ppo|main_dapo|fsdp_sft_trainer|sft_trainer)(?:\.py)?")
TRAINERS = {
    "main_ppo": "ppo",
    "main_dapo": "ppo",
    "fsdp_sft_trainer": "sft",
    "sft_trainer": "sft",
}
OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_][\w.@/]*)=(.*)", re.DOTALL)
REFERENCE = re.compile(r"\$\{([a-z_]+\.[\w.]+)\}")
# Settings that only a run of reinforcement learning has.
PPO_PREFIXES = ("actor_rollout_ref.", "algorithm.")
# Settings that only supervised tuning has.
SFT_NAMES = ("model.partial_pretrain", "data.multiturn.messages_key")
# Flags of Hydra's own, which choose where it writes and which file it reads.
HYDRA_FLAGS = ("--config-path", "--config-name", "--config-dir")


def read_settings(words: list[str]) -> Settings:
    """Read the words of a launch.

    :raises InputError: they are no launch of verl, or a file cannot be read.
    """
    launcher, program, rest = split_at_program(expand_script(words, _starts_trainer), PROGRAM)
    trainer = TRAINERS.get(program, "")
    values: dict[str, list[str]] = {}
    rest = first_command(rest)
    if rest and rest[0].lower().endswith(YAML_SUFFIXES):
        values |= read_yaml(rest.pop(0))
    values |= _read_overrides(rest)
    if not trainer and any(name.startswith(PPO_PREFIXES) for name in values):
        trainer = "ppo"
    elif not trainer and any(name in values for name in SFT_NAMES):
        trainer = "sft"
    if trainer == "ppo" and values.get("algorithm.adv_estimator", ["gae"]) != ["gae"]:
        trainer = "grpo"
    settings = {}
    for name, its_words in values.items():
        settings[name] = [_fill_in(word, values) for word in its_words]
    settings.pop("defaults", None)  # Hydra's list of files, whose settings are defaults
    num_gpus = _count_gpus(settings) or count_gpus(launcher)
    return Settings(trainer=trainer, values=settings, num_gpus=num_gpus)


def _fill_in(word: str, values: dict[str, list[str]]) -> str:
    """The word with `${a.b}` replaced by that setting, where it is given."""
    return REFERENCE.sub(lambda match: " ".join(values.get(match[1], [match[0]])), word)


def _starts_trainer(words: list[str]) -> bool:
    return any(map(PROGRAM.fullmatch, words)) and any(map(OVERRIDE.fullmatch, words))


def _count_gpus(values: dict[str, list[str]]) -> int | None:
    """GPUs of all nodes, on which learners and engines take turns."""
    num_nodes = " ".join(values.get("trainer.nnodes", ["1"]))
    gpus_per_node = " ".join(values.get("trainer.n_gpus_per_node", []))
    if num_nodes.isdecimal() and gpus_per_node.isdecimal():
        return int(num_nodes) * int(gpus_per_node)
    return None


def _read_overrides(words: list[str]) -> dict[str, list[str]]:
    values: dict[str, list[str]] = {}
    words = list(words)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag in HYDRA_FLAGS:
            if not equals and words:
                value = words.pop(0)
            values[flag.removeprefix("--").replace("-", "_")] = [value]
            continue
        match = OVERRIDE.fullmatch(word)
        if match is None:
            raise InputError(
                f"'{word}' is no setting of verl, which are written a.b=c", kind="stray_word"
            )
        values[match[1]] = _read_value(match[2])
    return values


def _read_value(text: str) -> list[str]:
    """The words of a value as Hydra writes it: a list in brackets, or one word."""
    text = text.strip()
    if not text.startswith(("[", "{")):
        text = text.strip("'\"")
    if text.startswith("[") and text.endswith("]"):
        return [part.strip().strip("'\"") for part in text[1:-1].split(",") if part.strip()]
    if text.lower() in ("null", "none", "~"):
        return ["none"]
    if text in ("True", "False"):
        return [json.dumps(text == "True")]
    return [text]
