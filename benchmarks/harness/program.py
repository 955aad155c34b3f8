"""The outside of a program: its flags, its ratio and its end."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence


def parser_of(text: str | None) -> ArgumentParser:
    """A parser whose help shows the program's own text as it stands."""
    return ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)


def print_ratio(between: str, ratio: float) -> None:
    print(f"ratio, {between}: {ratio:.2f}x")


def end(missed: Sequence[str]) -> None:
    """End with code 1 and say which goals were missed; go on where none was."""
    if missed:
        sys.exit("\n".join(missed))
