"""`open-instruct configs`: the files of settings that come with the package, listed, or one of them to go on from."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from open_instruct.config.help import asks_for_help
from open_instruct.config.parser import nearest
from open_instruct.errors import InputError

USAGE = """\
usage: open-instruct configs            lists the files
       open-instruct configs NAME       prints one, as in: open-instruct configs dpo/tiny_cpu > mine.yaml"""


def shipped() -> dict[str, Path]:
    """By names such as `dpo/tiny_cpu`, in the order of the folders and files."""
    folder = Path(str(files("open_instruct"))) / "configs"
    return {str(path.relative_to(folder).with_suffix("")): path for path in sorted(folder.glob("*/*.yaml"))}


def configs_command(words: Sequence[str]) -> int:
    """Print what `words` ask for; returns the exit code.

    :raises InputError: there is no such file.
    """
    if asks_for_help(words):
        print(USAGE)
        return 0
    configs = shipped()
    if not words:
        print(*(f"{name:{max(map(len, configs))}}  {_summary(path)}" for name, path in configs.items()), sep="\n")
        return 0
    (name, *more) = words
    name = name.removeprefix("configs/").removesuffix(".yaml")
    if more or name not in configs:
        raise InputError(f"'{' '.join(words)}' is not one of the files{nearest(name, configs)}\n{USAGE}")
    print(configs[name].read_text(encoding="utf-8"), end="")
    return 0


def _summary(path: Path) -> str:
    """The first sentence of its header."""
    comment = path.read_text(encoding="utf-8").partition("\n#\n")[0]
    return " ".join(comment.replace("\n# ", " ").removeprefix("# ").split()).partition(". ")[0].rstrip(".")
