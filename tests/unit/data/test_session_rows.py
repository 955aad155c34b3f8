"""Recorded sessions become the best of each prompt, pairs, and groups."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from open_instruct.cli import main
from open_instruct.core.errors import InputError
from open_instruct.data.files.opening import open_rows
from open_instruct.data.preference_rows import check_preference_row
from open_instruct.data.sampled.sampled_rows import SampledBranch
from open_instruct.data.sampled.session_rows import SessionsByPrompt, read_sessions

Row = dict[str, Any]
PROMPT = (7, 8)
BETWEEN = (5,)


def make_row(
    session: str,
    replies: Sequence[tuple[int, ...]],
    *,
    prompt: tuple[int, ...] = PROMPT,
    numbers: Sequence[int] | None = None,
    **facts: Any,
) -> Row:
    """A branch whose replies are these ids, with `BETWEEN` between them."""
    token_ids: tuple[int, ...] = ()
    spans: list[tuple[int, int]] = []
    messages: list[dict[str, str]] = []
    for reply in replies:
        token_ids += BETWEEN if spans else ()
        spans.append((len(token_ids), len(token_ids) + len(reply)))
        token_ids += reply
        messages.append({"role": "user", "content": "?"})
        messages.append({"role": "assistant", "content": str(reply)})
    branch = SampledBranch(
        chat_format="format",
        temperature=1.0,
        top_p=1.0,
        prompt_token_ids=prompt,
        token_ids=token_ids,
        replies=tuple(spans),
        numbers=tuple(numbers or range(len(replies))),
        turns=tuple(range(1, 2 * len(replies), 2)),
        logprobs=tuple(-0.1 * token_id for token_id in chain.from_iterable(replies)),
        is_cut=False,
    )
    return {
        "messages": messages,
        "session": session,
        "agent": "",
        "sampled": asdict(branch),
        **facts,
    }


def read(folder: Path, *rows: Row, reward_key: str = "reward") -> SessionsByPrompt:
    path = folder / "sessions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_rows(str(path))
    return read_sessions(source.rows(range(len(source))), reward_key)


def test_best_session_of_each_prompt_is_chosen_and_learns_a_reply_once(tmp_path: Path) -> None:
    sessions = read(
        tmp_path,
        make_row("a", [(1,), (2,)], reward=0.0),
        make_row("b", [(3,), (4, 4)], reward=1.0),
        make_row("b", [(3,), (6,)], numbers=[0, 2], reward=1.0),
        make_row("c", [(9,)], prompt=(1,), reward=0.5),
        make_row("d", [(9,)], prompt=(1,)),
    )
    assert sessions.left_out == {"session without a reward": 1}
    first, second, other = sessions.choose_best(None)
    assert [row["session"] for row in (first, second, other)] == ["b", "b", "c"]
    assert first["sampled"]["replies"] == ((0, 1), (2, 4))
    assert second["sampled"]["replies"] == ((2, 3),) and second["sampled"]["turns"] == (3,)
    assert second["sampled"]["logprobs"] == pytest.approx([-0.6])
    assert len(list(sessions.choose_best(0.7))) == 2


def test_pair_is_of_the_first_replies_that_differ_behind_the_same_ids(tmp_path: Path) -> None:
    sessions = read(
        tmp_path,
        make_row("worst", [(1,), (2,), (3,)], reward=-1.0),
        make_row("middle", [(4,)], reward=0.0),
        make_row("best", [(1,), (6, 6)], reward=1.0),
        make_row("alone", [(1,)], prompt=(1,), reward=1.0),
    )
    (pair,) = sessions.make_pairs()
    assert pair["sampled"] == {
        "chat_format": "format",
        "prompt_token_ids": (*PROMPT, 1, *BETWEEN),
        "chosen_token_ids": (6, 6),
        "rejected_token_ids": (2,),
    }
    assert len(pair["chosen"]) == len(pair["rejected"]) == 4
    assert pair["chosen"][:-1] == pair["rejected"][:-1]
    check_preference_row(json.loads(json.dumps(pair)))
    assert sessions.left_out == {"prompt whose sessions have one reward": 1}


def test_sessions_that_part_between_replies_are_no_pair(tmp_path: Path) -> None:
    row = make_row("best", [(1,), (6,)], reward=1.0)
    row["sampled"]["token_ids"] = (1, 99, 6)  # a tool has answered otherwise
    sessions = read(tmp_path, row, make_row("worst", [(1,), (2,)], reward=0.0))
    assert not list(sessions.make_pairs())
    assert sessions.left_out == {"prompt whose sessions part before no reply of both": 1}


def test_groups_have_all_of_their_size(tmp_path: Path) -> None:
    rows = [make_row(str(number), [(number,)], score=float(number)) for number in range(1, 6)]
    sessions = read(tmp_path, *rows, reward_key="score")
    groups = list(sessions.make_groups(2))
    assert len(groups) == 2 and sessions.left_out == {"session beyond groups of --group_size": 1}
    settings = groups[1]["env_config"]
    assert groups[1]["messages"] == [{"role": "user", "content": "?"}]
    assert settings["env_name"] == "recorded"
    assert [answer["reward"] for answer in settings["sessions"]] == [3.0, 4.0]


@pytest.mark.parametrize(
    "change", [{"reward": "good"}, {"reward": True}, {"session": None}, {"sampled": None}]
)
def test_row_of_no_session_is_refused(tmp_path: Path, change: Row) -> None:
    with pytest.raises(InputError, match="line 1"):
        read(tmp_path, make_row("a", [(1,)], reward=1.0) | change)


def test_command_writes_what_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, make_row("a", [(1,)], reward=0.0), make_row("b", [(2,)], reward=1.0))
    path = str(tmp_path / "sessions.jsonl")
    outputs = {name: str(tmp_path / f"{name}.jsonl") for name in ("best", "pairs", "groups")}
    words = list(chain.from_iterable((f"--{name}", file) for name, file in outputs.items()))
    assert main(["sessions", path, *words, "--group_size", "2"]) == 0
    assert "2 sessions of 1 prompt" in capsys.readouterr().out
    for file in outputs.values():
        assert len(Path(file).read_text().splitlines()) == 1
    assert main(["sessions", path]) == 2 and "--best" in capsys.readouterr().err
