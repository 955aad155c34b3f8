"""Whether pyproject.toml resolves where nobody has tried it: python scripts/resolves.py. Nothing is
installed.

Needs the program `uv` on the PATH, and PyPI. Every extra is resolved for each Python and platform
below as `uv pip compile` does it, from wheels alone but for what is published as sources alone. It
ends with 1 where one does not resolve, and says why.
"""

import subprocess
import sys
import tomllib
from itertools import product
from pathlib import Path

from lock import FROM_SOURCE, PYPI

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
SOURCES_ALONE = sorted(FROM_SOURCE | {"sqlitedict", "word2number"})  # the latter for lm_eval
PLATFORMS = ("x86_64-manylinux_2_34", "aarch64-manylinux_2_34", "aarch64-apple-darwin")


def resolved(*flags: str) -> tuple[int, str]:
    """How many packages these flags of `uv pip compile` give, and what uv says where they give
    none.
    """
    command = [
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-config",
        "--no-header",
        "--no-annotate",
        "--default-index",
        PYPI,
    ]
    command += [
        "--only-binary",
        ":all:",
        *(word for name in SOURCES_ALONE for word in ("--no-binary", name)),
    ]
    done = subprocess.run(
        [*command, *flags, "pyproject.toml"], cwd=REPOSITORY, capture_output=True, text=True
    )
    return (0, done.stderr.strip()) if done.returncode else (len(done.stdout.splitlines()), "")


def main() -> int:
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    code = 0
    for python, platform in product(PYTHONS, PLATFORMS):
        told = []
        for extra in (None, *extras):
            wanted = ["--extra", extra] if extra else []
            count, error = resolved(
                "--python-version", python, "--python-platform", platform, *wanted
            )
            told.append(f"{extra or 'alone'} {count or 'NOT'}")
            if error:
                code = 1
                print(
                    f"Python {python} on {platform}, {extra or 'without extras'}: {error}",
                    file=sys.stderr,
                )
        print(f"Python {python} on {platform}, packages: {', '.join(told)}", flush=True)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except FileNotFoundError as error:
        if error.filename != "uv":
            raise
        sys.exit("resolves: error: the program uv is not on the PATH; `pip install uv` brings it")
