"""`open-instruct migrate-args`: a launch of open-instruct in our flags."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from open_instruct.config.flags import spelled
from open_instruct.config.help import asks_for_help
from open_instruct.errors import EXIT_INPUT, InputError
from open_instruct.migrate.launch import TRAINERS, read_launch
from open_instruct.migrate.migration import migrate
from open_instruct.wording import pages_in

USAGE = f"""\
usage: open-instruct migrate-args {"|".join(TRAINERS)} [--json] -- ARGS...
       open-instruct migrate-args {"|".join(TRAINERS)} [--json] FILE.yaml

Tells a launch of open-instruct in our flags: what is called otherwise, what is left out and why, what cannot be had,
and every default that differs. ARGS may be the whole line, launcher and script included. Nothing is started.
The exit code is 0 where the run is the same, and 2 where it is not."""


def migrate_args(words: Sequence[str]) -> int:
    """Print the migration that `words` ask for; returns the exit code."""
    end = words.index("--") if "--" in words else len(words)
    ours, theirs = words[:end], words[end + 1 :]
    if not ours or asks_for_help(ours):
        print(USAGE)
        return 0 if ours else EXIT_INPUT
    as_json = "--json" in ours
    command, *rest = [word for word in ours if word != "--json"]
    if command not in TRAINERS:
        raise InputError(f"'{command}' has no launches upstream; use one of {', '.join(TRAINERS)}")
    if flags := [word for word in rest if word.startswith("--")]:
        raise InputError(f"{flags[0]} stands before --: write migrate-args {command} [--json] -- ARGS...")
    migration = migrate(command, read_launch(command, [*rest, *theirs]))
    if as_json:
        print(json.dumps(asdict(migration), indent=2))
    else:
        pages = pages_in(Path(__file__).parent, trim_blocks=True, lstrip_blocks=True)
        names = {"command": command, "migration": migration, "spelled": spelled, "shlex": shlex}
        print(pages.get_template("migration.txt.jinja").render(names))
    return EXIT_INPUT if migration.refused else 0
