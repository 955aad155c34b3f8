"""The blocks of README and docs: what of them a reader pastes, and which commands are in it."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
# Blocks of these languages are pasted into a shell; what a command prints is in one of `console` or
# `text`.
SHELL_LANGUAGES = ("", "bash")
# A block that a reader saves begins with the name of its file, as in `# mine.py`.
FILE_NAME = re.compile(r"# (\w+\.(?:py|yaml))\n")
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:open-instruct|torchrun|python|sbatch|scripts/\S+) ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block of a page.

    Attributes:
        line: of the page, where its text begins.
    """

    language: str
    text: str
    line: int

    @property
    def file_name(self) -> str | None:
        """The file that a reader saves it as."""
        match = FILE_NAME.match(self.text)
        return match[1] if match else None


def find_blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(language=match[1], text=match[2], line=line)


def commands_of(page: Path) -> Iterator[str]:
    """Those that stand in its blocks, each on one line, without what they print."""
    for block in find_blocks(page):
        if block.language not in (*SHELL_LANGUAGES, "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").partition("  # ")[0].strip()
            is_typed = block.language != "console" or line.startswith("$ ")
            if PROGRAM.match(f"{command} ") and is_typed:
                yield command


def write_script(page: Path) -> str:
    """What somebody does who takes the page's blocks in their order: one script, which saves files
    and runs commands.

    It says on stderr at which line of the page each block begins.
    """
    parts = []
    for block in find_blocks(page):
        if block.file_name:
            parts.append(
                f"cat > {block.file_name} <<'END_OF_THE_FILE'\n{block.text}END_OF_THE_FILE\n"
            )
        elif block.language in SHELL_LANGUAGES:
            place = shlex.quote(f"{page.name}, line {block.line}")
            parts.append(f"echo {place} >&2\n{block.text}")
    return "".join(parts)
