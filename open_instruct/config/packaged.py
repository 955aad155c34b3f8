"""The files of settings that come with the package, by their names: `dpo/tiny_cpu`."""

from functools import cache
from importlib.resources import files
from pathlib import Path

FOLDER = "configs"
SUFFIX = ".yaml"


@cache
def packaged_settings() -> dict[str, Path]:
    folder = Path(str(files("open_instruct"))) / FOLDER
    return {
        str(path.relative_to(folder).with_suffix("")): path
        for path in sorted(folder.glob(f"*/*{SUFFIX}"))
    }


def packaged_name(word: str) -> str:
    """The name that a word may mean:

    `configs/dpo/tiny_cpu.yaml`, a path in a checkout, is dpo/tiny_cpu.
    """
    return word.removeprefix(f"{FOLDER}/").removesuffix(SUFFIX)


def settings_file(word: str) -> str:
    """The file that a word names: one that is there, one of the package, or the word itself."""
    packaged = packaged_settings().get(packaged_name(word))
    if packaged is None or Path(word).expanduser().exists():
        return word
    return str(packaged)
