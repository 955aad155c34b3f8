"""The output of `open-instruct check`: a line for each check, and all refusals at the end."""

from collections.abc import Callable, Sequence
from textwrap import indent

from open_instruct.core.errors import InputError, Problem
from open_instruct.core.text import escape_controls, spell_count

TITLE_WIDTH = 16
FLAGS = "flags"
NOTHING_WRITTEN = "Nothing was started, and nothing written to"


class Report:
    """Prints a line for each check as it is made, and collects the refusals."""

    def __init__(self) -> None:
        self.refusals: list[Problem] = []
        self._failed_titles: set[str] = set()

    def check(self, title: str, find: Callable[[], str], *, needs: Sequence[str] = ()) -> None:
        """Print what `find` finds, or that it refuses; skip it where one of `needs` was refused."""
        missing = [need for need in needs if need in self._failed_titles]
        if missing:
            self._failed_titles.add(title)
            self._print(title, f"not looked at, as the {missing[0]} will not do")
            return
        try:
            finding = find()
        except InputError as error:
            self._failed_titles.add(title)
            self.refusals += [problem for problem in error.problems if problem not in self.refusals]
            places = [self.refusals.index(problem) + 1 for problem in error.problems]
            finding = f"refused, see {', '.join(map(str, places))} below"
        except Exception:
            if FLAGS not in self._failed_titles:
                raise
            # Wrong values may lead anywhere: what depends on them is checked once they are right.
            self._failed_titles.add(title)
            finding = "not looked at, as the flags will not do"
        self._print(title, finding)

    def _print(self, title: str, finding: str) -> None:
        first, *more = escape_controls(finding, "\n\t").splitlines() or [""]
        print(f"{title:{TITLE_WIDTH}}{first}", flush=True)
        for line in more:
            print(indent(line, " " * TITLE_WIDTH), flush=True)

    def conclude(self, folder: str) -> int:
        """Print that there are no problems; returns the exit code.

        Raises:
            InputError: lists all refusals.
        """
        if not self.refusals:
            print(f"\nNo problems found. {NOTHING_WRITTEN} {folder}.")
            return 0
        numbered_lines = [
            f"{place}. {problem}" for place, problem in enumerate(self.refusals, start=1)
        ]
        what = spell_count(len(numbered_lines), "problem")
        raise InputError(
            "\n".join([f"{what}, for which the run would be refused", *numbered_lines]),
            problems=self.refusals,
        )


def check_all(*checks: Callable[[], object]) -> None:
    """Make each of the checks, whatever the others find.

    Raises:
        InputError: with the problems of all of them.
    """
    problems: list[Problem] = []
    for check in checks:
        try:
            check()
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError("\n".join(problems), problems=problems)
