"""Microbatches of rows that share their prompts, made up and real."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from open_instruct.core.records import Document, Span
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer

PAIRS_GOAL, GROUPS_GOAL, TREE_GOAL, NOTHING_GOAL = 1.3, 0.7, 0.85, 0.97
GROUP = 8
NUM_SHOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Documents of one microbatch, which of them may share, and the ratio of shared to packed that
    is wanted.
    """

    name: str
    documents: list[Document]
    groups: list[tuple[int, ...]]
    goal: float | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))

    @property
    def num_distinct(self) -> int:
        """Positions that no two documents compute alike: tokens that differ, or that other tokens
        come before.
        """
        places: dict[tuple[int, int], int] = {}  # of a token behind another place
        for each in self.documents:
            place = 0
            for token in each.token_ids:
                place = places.setdefault((place, token), len(places) + 1)
        return len(places)


def made_up_pairs(scale: int, *, with_prompt: bool) -> Rows:
    """Prompt and replies of equal length; without a common prompt, each conversation has its
    own.
    """
    rng, length = random.Random(0), 192 * scale
    documents: list[Document] = []
    for _ in range(4):
        prompt = tokens(length, rng)
        documents += [
            document(prompt if with_prompt else tokens(length, rng), tokens(length, rng))
            for _ in range(2)
        ]
    return Rows(
        name="pairs, prompt as long as a reply" if with_prompt else "pairs that share nothing",
        documents=documents,
        groups=[(i, i + 1) for i in range(0, len(documents), 2)],
        goal=PAIRS_GOAL if with_prompt else NOTHING_GOAL,
    )


def made_up_groups(scale: int) -> Rows:
    """Groups of 8 completions; the prompt is 4 times as long as each."""
    rng, length = random.Random(0), 96 * scale
    documents: list[Document] = []
    for _ in range(1):
        prompt = tokens(4 * length, rng)
        documents += [document(prompt, tokens(length, rng)) for _ in range(GROUP)]
    bound = (GROUP * 4 + GROUP) / (4 + GROUP)
    return Rows(
        name=f"groups of {GROUP}, prompt 4 times a completion",
        documents=documents,
        groups=[tuple(range(i, i + GROUP)) for i in range(0, len(documents), GROUP)],
        goal=GROUPS_GOAL * bound,
    )


def made_up_tree(scale: int) -> Rows:
    """8 episodes of three learned turns, each turn followed by two others; prompt and turns are of
    one length.
    """
    rng, length = random.Random(0), 96 * scale
    paths = [tokens(length, rng)]
    for _ in range(3):
        paths = [path + tokens(length, rng) for path in paths for _ in range(2)]
    spans = tuple(Span(start=turn * length, stop=(turn + 1) * length) for turn in (1, 2, 3))
    rows = Rows(
        name=f"a tree of depth 3 with {len(paths)} episodes",
        documents=[Document(token_ids=path, responses=spans) for path in paths],
        groups=[tuple(range(len(paths)))],
        goal=None,
    )
    return replace(rows, goal=TREE_GOAL * rows.num_tokens / rows.num_distinct)


def real_pairs(file: Path, checkpoint: Path, folder: Path) -> Rows:
    pairs, _ = load_token_dataset(
        PreferenceBuilder,
        entries=parse_mixer_list([str(file), "8"]),
        chat=ChatFormat.choose(load_tokenizer(str(checkpoint)), None),
        on_bad_row="error",
        max_seq_length=1024,
        seed=0,
        cache_dir=folder / "cache",
    )
    documents = [each for pair in pairs for each in pair]
    groups = [(i, i + 1) for i in range(0, len(documents), 2)]
    return Rows(name=f"real pairs of {file.name}", documents=documents, groups=groups, goal=None)


def real_groups(file: Path, checkpoint: Path) -> Rows:
    """A problem behind 8 solved ones, with 8 solutions of other problems for their lengths."""
    problems = [
        json.loads(line)
        for line in file.read_text(encoding="utf-8").splitlines()[: NUM_SHOTS + 1 + GROUP]
    ]
    encode = load_tokenizer(str(checkpoint)).encode
    shots = "\n\n".join(
        f"{p['messages'][0]['content']}\n{p['solution']}" for p in problems[:NUM_SHOTS]
    )
    documents, groups = [], []
    for problem in problems[NUM_SHOTS : NUM_SHOTS + 1]:
        prompt = tuple(encode(f"{shots}\n\n{problem['messages'][0]['content']}\n"))
        groups.append(tuple(range(len(documents), len(documents) + GROUP)))
        documents += [document(prompt, tuple(encode(p["solution"]))) for p in problems[-GROUP:]]
    name = f"groups of {GROUP} with {NUM_SHOTS} shots of {file.name}"
    return Rows(name=name, documents=documents, groups=groups, goal=None)


def document(prompt: Sequence[int], reply: Sequence[int]) -> Document:
    return Document(
        token_ids=(*prompt, *reply),
        responses=(Span(start=len(prompt), stop=len(prompt) + len(reply)),),
    )


def tokens(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(500) for _ in range(count))
