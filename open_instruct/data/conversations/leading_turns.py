"""Conversations that begin with a reply, which `--on_bad_row trim` reads from the user's turn on.

ShareGPT's rows often do, since they were cut out of longer ones. A system turn in front stays.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from open_instruct.core.text import spell_count
from open_instruct.data.conversations.messages import find_role
from open_instruct.data.files.rows import RawRow, RowSource
from open_instruct.data.files.token_files import TokenSource

REPLY_ROLES = ("assistant", "tool")
TOOL_KEYS = ("tools", "functions")  # which say something of the whole conversation


def trim_leading_turns(source: RowSource) -> RowSource:
    """A source whose conversations begin with the user, which warns of those that did not."""
    if isinstance(source, TokenSource):
        return source
    trimmed_rows: dict[int, str] = {}  # by index the place of the first such row, "" of others

    def trim(index: int, row: RawRow) -> RawRow:
        changed = {
            key: turns
            for key, value in row.value.items()
            if (turns := _drop_leading_replies(value)) is not None
        }
        if not changed:
            return row
        trimmed_rows.setdefault(index, "" if trimmed_rows else str(row))
        return replace(row, value=row.value | changed)

    def read_rows(indices: Sequence[int]) -> Iterator[RawRow]:
        return map(trim, indices, source.rows(indices))

    def list_warnings() -> list[str]:
        warnings = source.warnings()
        if trimmed_rows:
            warnings.append(
                f"{spell_count(len(trimmed_rows), 'row')} of {source.name} begin with a reply, and "
                f"are read from the user's first turn on, as --on_bad_row trim asks; the first is "
                f"{next(iter(trimmed_rows.values()))}"
            )
        return warnings

    return replace(source, rows=read_rows, warnings=list_warnings)


def _drop_leading_replies(value: Any) -> list[Any] | None:
    """A conversation without the replies before the user's first turn; None if nothing changes.

    Replies that no turn of the user follows are all that there is, such as the `chosen` of a pair.
    """
    if not isinstance(value, list) or not all(isinstance(turn, Mapping) for turn in value):
        return None
    roles = [find_role(turn) for turn in value]
    start = 1 if roles[:1] == ["system"] else 0
    first = start
    while first < len(roles) and roles[first] in REPLY_ROLES:
        first += 1
    if first == start or roles[first : first + 1] != ["user"]:
        return None
    if any(turn.get(key) for turn in value[start:first] for key in TOOL_KEYS):
        return None
    return value[:start] + value[first:]
