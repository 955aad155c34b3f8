"""Check that each wall of the sandbox stands: programs try to get past it, in all known ways."""

from collections.abc import Callable
from contextlib import closing

from open_instruct.core.errors import InputError
from open_instruct.rewards.sandbox.sandbox import Sandbox
from open_instruct.rewards.sandbox.walls import TABLES

TRIAL_TIMEOUT_S = 10.0
REMEDY = (
    "Use Linux 5.13 or newer with Landlock and libseccomp (docs/security.md), a server "
    "(--code_api_url), or the walls that there are (--code_sandbox auto)"
)


def try_walls(choice: str, *, say: Callable[[str], None], warn: Callable[[str], None]) -> None:
    """Find out which walls stand around the programs of the policy.

    Args:
        choice: of `--code_sandbox`.
        say: gets a sentence about the walls that stand.
        warn: gets a warning about those that do not.

    Raises:
        InputError: it is `required`, and one does not.
        RunError: the sandbox does not start.
    """
    standing = []
    missing = []
    with closing(Sandbox()) as sandbox, closing(sandbox.interpreter(cpu_s=10)) as interpreter:
        for name, wall in TABLES["trials"].items():
            tries = [interpreter.run(way, timeout_s=TRIAL_TIMEOUT_S) for way in wall["ways"]]
            if all(result.status == "error" for result in tries):
                standing.append(name)
            else:
                missing.append(f"without the wall around {name} a program {wall['without']}")
    if missing and choice == "required":
        raise InputError(
            "--code_sandbox required: programs of the policy would run here; "
            f"{'; '.join(missing)}. {REMEDY}",
            kind="machine",
        )
    if missing:
        warn(f"programs of the policy run on this machine; {'; '.join(missing)} (docs/security.md)")
    say(
        "programs of the policy run in a sandbox; these walls stand: "
        f"{', '.join(standing) or 'none'}"
    )
