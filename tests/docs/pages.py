"""The commands that README and docs show."""

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:open-instruct|torchrun|python|sbatch|scripts/\S+) ")


def commands_of(page: Path) -> Iterator[str]:
    """Those that stand in its blocks, each on one line, without what they print."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
        if language not in ("", "bash", "console"):
            continue
        for line in block.replace("\\\n", " ").splitlines():
            command = line.removeprefix("$ ").partition("  # ")[0].strip()
            if PROGRAM.match(f"{command} ") and (language != "console" or line.startswith("$ ")):
                yield command
