"""The built-in chat templates, by name (Jinja, as `--chat_template_name` takes them), and templates from a user's file.

A file in templates/ is the template of that name. made.yaml lists the templates that are made from the files in
templates/shared/, each by settings that are written in front of the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from open_instruct.config.parser import nearest
from open_instruct.data.files.names import near_files
from open_instruct.errors import InputError
from open_instruct.whole_file import read_asked

FOLDER = Path(__file__).parent / "templates"
FILE_SUFFIXES = (".jinja", ".jinja2", ".j2")
MAX_BYTES = 2**20
# A template that writes one of these needs it as a single token; otherwise a generated turn would never end.
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")


@cache
def built_in_templates() -> dict[str, str]:
    """The text of every template that has a name."""
    made: dict[str, Any] = yaml.safe_load((FOLDER / "shared" / "made.yaml").read_text(encoding="utf-8"))
    return {
        **{file.stem: file.read_text(encoding="utf-8") for file in sorted(FOLDER.glob("*.jinja"))},
        **{name: _made(**settings) for name, settings in made.items() if not name.startswith(".")},
    }


def template_text(name: str) -> str:
    """The text of the built-in template `name`, or of the file that it names.

    Raises:
        InputError: there is no such template or file, or it cannot be read.
    """
    if name in built_in_templates():
        return built_in_templates()[name]
    if name.endswith(FILE_SUFFIXES) or "/" in name or Path(name).is_file():
        if not (path := Path(name).expanduser()).exists():
            raise InputError(f"--chat_template_name {name}: no such file.{near_files(path)}")
        return read_asked(name, where=f"--chat_template_name {name}", most=MAX_BYTES)
    raise InputError(
        f"--chat_template_name {name!r} is not a template{nearest(name, built_in_templates()) or '.'} Use one of "
        f"{', '.join(built_in_templates())}; a file of your own (FILE{FILE_SUFFIXES[0]}); or leave the flag out for "
        "the tokenizer's own."
    )


def required_tokens(text: str) -> list[str]:
    """Those of `SPECIAL_TOKENS` that a template writes."""
    return [token for token in SPECIAL_TOKENS if token in text]


def _made(file: str, **settings: Any) -> str:
    # JSON and Jinja write these values alike.
    written = "".join(f"{{%- set {name} = {json.dumps(value)} -%}}\n" for name, value in settings.items())
    return written + (FOLDER / "shared" / f"{file}.jinja").read_text(encoding="utf-8")
