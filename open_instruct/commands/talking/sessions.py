"""`open-instruct sessions`: makes of recorded sessions what SFT, DPO and GRPO learn from."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import InputError
from open_instruct.core.files import write_user_file
from open_instruct.core.text import spell_count
from open_instruct.data.files.opening import open_rows
from open_instruct.data.sampled.session_rows import read_sessions


@dataclass(kw_only=True)
class SessionsFlags:
    """Make of the rows that `open-instruct serve --record` has written to FILE what others learn
    from: the best session of each prompt (rejection sampling), pairs of the best and the worst, or
    groups with their rewards. All have the ids that were sampled.

    Examples:
        open-instruct sessions sessions.jsonl --best best.jsonl --min_reward 1
        open-instruct sessions sessions.jsonl --pairs pairs.jsonl
        open-instruct sessions sessions.jsonl --groups groups.jsonl --group_size 8
    """

    best: str | None = flag(
        "file (.jsonl) of the rows of each prompt's best session, for sft", None
    )
    pairs: str | None = flag(
        "file (.jsonl) of a pair of each prompt, for dpo and reward_model: the first replies by "
        "which its best and its worst session differ",
        None,
    )
    groups: str | None = flag(
        "file (.jsonl) of prompts with their sessions, for grpo, which learns from them off-policy",
        None,
    )
    reward_key: str = flag(
        "the key of a row that has its reward; a session has that of its last row", "reward"
    )
    min_reward: float | None = flag(
        "leave out prompts whose best session has less", None, requires="best"
    )
    group_size: int = flag(
        "sessions of a group: --num_samples_per_prompt_rollout of the run",
        4,
        minimum=2,
        requires="groups",
    )


def main(words: Sequence[str]) -> int:
    """:raises InputError: the file, a row or a flag cannot be used, or nothing comes of it."""
    if not words or words[0].startswith("-"):
        raise InputError(
            "the first word is a file: open-instruct sessions sessions.jsonl --best best.jsonl",
            kind="stray_word",
        )
    flags = parse(SessionsFlags, words[1:])
    refuse(list(limit_problems(flags)))
    if not (flags.best or flags.pairs or flags.groups):
        raise InputError("name what to write: --best, --pairs or --groups", kind="missing_flag")
    source = open_rows(words[0], flag="FILE")
    sessions = read_sessions(source.rows(range(len(source))), flags.reward_key)
    num_sessions = sum(map(len, sessions.groups))
    prompts = spell_count(len(sessions.groups), "prompt")
    print(f"{spell_count(num_sessions, 'session')} of {prompts}")
    if flags.best:
        _write("--best", flags.best, sessions.choose_best(flags.min_reward), "row")
    if flags.pairs:
        _write("--pairs", flags.pairs, sessions.make_pairs(), "pair")
    if flags.groups:
        _write("--groups", flags.groups, sessions.make_groups(flags.group_size), "group")
    for reason, count in sessions.left_out.items():
        if count:
            print(f"left out: {count:,} × {reason}")
    return 0


def _write(name: str, file: str, rows: Iterable[Mapping[str, Any]], noun: str) -> None:
    """Write the rows to the file that a flag has named.

    Raises:
        InputError: it cannot be written.
    """
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    write_user_file(Path(file), "".join(lines), flag=name)
    print(f"{spell_count(len(lines), noun)}: {file}")
