"""`open-instruct tiny-model DIR`: a small random checkpoint with a tokenizer of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.errors import InputError
from open_instruct.families import FAMILIES
from open_instruct.toys.tiny import DTYPES, SIZES, write_tiny_model
from open_instruct.whole_file import read_asked


@dataclass(kw_only=True)
class TinyModelSection:
    """Model"""

    family: str = flag("architecture", choices=FAMILIES)
    size: str = flag(", ".join(f"{name} ({size.roughly})" for name, size in SIZES.items()), "tiny", choices=SIZES)
    seed: int = flag("random seed of the weights", 0)
    vocab_size: int | None = flag("rows of the embedding; default: the size's", None)
    text: list[str] | None = flag(
        "text files to train the tokenizer on; default: a few pages that come with the package", None
    )
    tie_word_embeddings: bool = flag("use the embedding as the head too", False)
    dtype: str = flag("dtype of the weights", "float32", choices=DTYPES)


@dataclass(kw_only=True)
class TinyModelFlags:
    """Write a small random checkpoint in Hugging Face format to DIR, a new or empty folder, with a byte-level BPE
    tokenizer and a chat template: for tests, demos and trying things out.
    """

    examples: ClassVar[tuple[str, ...]] = ("open-instruct tiny-model tiny --family olmo2",)

    model: TinyModelSection


def tiny_model_command(args: Sequence[str]) -> int:
    """Write the checkpoint that `args` describe; returns the exit code. Torch is loaded only to write it.

    Raises:
        InputError: a flag is wrong, or the folder is not empty.
    """
    if asks_for_help(args):
        print_help(TinyModelFlags, "open-instruct tiny-model DIR")
        return 0
    name, words = _folder(args)
    flags = parse(TinyModelFlags, words).model
    folder = write_tiny_model(
        name,
        family=flags.family,
        size=flags.size,
        seed=flags.seed,
        vocab_size=flags.vocab_size,
        corpus=list(_texts(flags.text)) if flags.text else None,
        tie=flags.tie_word_embeddings,
        dtype=flags.dtype,
    )
    print(f"wrote a random {flags.family} model ({flags.size}) and its tokenizer to {folder}")
    return 0


def _folder(args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The first word, or the last one if that is no flag's value, and the words of the flags."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if len(args) > 2 and not any(word.startswith("-") for word in args[-2:]):
        return args[-1], args[:-1]
    raise InputError("the first word is the folder to write: open-instruct tiny-model DIR --family olmo2")


def _texts(files: Sequence[str]) -> Iterator[str]:
    for file in files:
        text = read_asked(file, where=f"--text {file}")
        if not text:
            raise InputError(f"--text {file}: the file is empty")
        yield from text.splitlines(keepends=True)
