"""`open-instruct tiny-model DIR`: a small random checkpoint with a tokenizer of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from open_instruct.errors import EXIT_INPUT, InputError
from open_instruct.families import FAMILIES
from open_instruct.models.tiny import DTYPES, SIZES, write_tiny_model


def tiny_model_command(args: Sequence[str]) -> int:
    """Write the checkpoint that `args` describe; returns the exit code. Torch is loaded only to write it."""
    try:
        options = _parser().parse_args(args)
        folder = write_tiny_model(
            options.dir,
            family=options.family,
            size=options.size,
            seed=options.seed,
            vocab_size=options.vocab_size,
            corpus=list(_texts(options.text)) if options.text else None,
            tie=options.tie_word_embeddings,
            dtype=options.dtype,
        )
    except InputError as error:
        print(f"tiny-model: {error}", file=sys.stderr)
        return EXIT_INPUT
    print(f"wrote a random {options.family} model ({options.size}) and its tokenizer to {folder}")
    return 0


class _Parser(argparse.ArgumentParser):
    """Reports what is wrong as an InputError, in one line, instead of printing the whole usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see open-instruct tiny-model --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="open-instruct tiny-model",
        description="Write a small random checkpoint in Hugging Face format, with a byte-level BPE tokenizer "
        "and a chat template: for tests, demos and trying things out.",
        allow_abbrev=False,
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="a new or empty folder")
    parser.add_argument("--family", required=True, choices=list(FAMILIES), help="architecture")
    sizes = ", ".join(f"{name} ({size.roughly})" for name, size in SIZES.items())
    parser.add_argument("--size", default="tiny", choices=list(SIZES), help=f"{sizes}; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights; default: %(default)s")
    parser.add_argument("--vocab_size", type=int, help="rows of the embedding; default: the size's")
    parser.add_argument(
        "--text",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="text files to train the tokenizer on; default: a few pages that come with the package",
    )
    parser.add_argument(
        "--tie_word_embeddings",
        type=_boolean,
        default=False,
        metavar="true|false",
        help="whether the embedding is also the head; default: false",
    )
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="of the weights; default: %(default)s")
    return parser


def _boolean(word: str) -> bool:
    if word.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{word!r} is neither true nor false")
    return word.lower() == "true"


def _texts(files: Sequence[Path]) -> Iterator[str]:
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"--text {file}: not UTF-8 ({error.reason} at byte {error.start})") from None
        except OSError as error:
            raise InputError(f"--text {file}: cannot be read ({error.strerror})") from None
        if not text:
            raise InputError(f"--text {file}: the file is empty")
        yield from text.splitlines(keepends=True)
