"""Prompts as engines receive them, tokenised once, and the order in which they are sent."""

import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from functools import lru_cache, partial
from typing import Any

import numpy as np

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import RunError
from open_instruct.core.files import read_user_file
from open_instruct.core.records import Check, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.data.conversations.rendered_row import RenderedRow
from open_instruct.data.conversations.row_forms import ends_with_reply
from open_instruct.data.eval_split import join_columns
from open_instruct.data.files.rows import MalformedRow, RawRow
from open_instruct.data.prompt_rows import check_json_value, parse_prompt_row
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.saved_place import check_saved_place, make_rows_fact, make_seed_fact
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.rewards.registry import list_judges
from open_instruct.rewards.verifier import Verifier


class Prompts:
    """The rows of a data set of prompts, as `Prompt`s."""

    def __init__(self, dataset: TokenDataset) -> None:
        self.dataset = dataset
        self.fingerprint = dataset.fingerprint

    def __len__(self) -> int:
        return len(self.dataset)

    def find_names(self) -> tuple[set[str], set[str]]:
        """The verifiers that judge some prompt, and the environments that answer one, by name."""
        # Not read as JSON, which takes 20 times as long. Inside a text, the quotes would have
        # backslashes.
        name = rb'("(?:[^"\\]|\\.)+")'
        verifier = rb'"verifier": %b, "ground_truth": ' % name
        environment = rb'"environment": %b, "row": \{' % name
        pattern = re.compile(verifier + b"|" + environment)
        digests: set[tuple[bytes, bytes]] = set()
        for row_id in range(len(self)):
            digests.update(pattern.findall(self.dataset.details(row_id)))
        verifiers = {json.loads(verifier) for verifier, _ in digests if verifier}
        environments = {json.loads(environment) for _, environment in digests if environment}
        return verifiers, environments

    def count_shared(self, others: "Prompts") -> int:
        """How many of these prompts are, token by token, among `others`, too."""
        digests = set(others._list_digests())
        return sum(digest in digests for digest in self._list_digests())

    def sample_evenly(self, max_prompts: int) -> Iterator[Prompt]:
        """At most so many of the prompts, spread over all of them, so that each file has some."""
        num_prompts = min(max_prompts, len(self))
        places = np.linspace(0, len(self) - 1, num=num_prompts).round().astype(int)
        return map(self.__getitem__, np.unique(places).tolist())

    def _list_digests(self) -> Iterator[bytes]:
        """A digest of the tokens of each prompt."""
        dataset = self.dataset
        for first_edge in dataset.bounds_N4[:, 0]:
            start, stop = dataset.edges_E[first_edge : first_edge + 2]
            token_ids = dataset.token_ids_T[start:stop]
            yield hashlib.blake2b(token_ids.tobytes(), digest_size=16).digest()

    def __iter__(self) -> Iterator[Prompt]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Prompt:
        row_id = range(len(self))[index]
        details = json.loads(self.dataset.details(row_id))
        (document,) = self.dataset[row_id]
        return Prompt(
            row_id=row_id,
            token_ids=document.token_ids,
            text=details["text"],
            checks=tuple(Check(**check) for check in details["checks"]),
            environment=details.get("environment", ""),
            row=details.get("row", {}),
        )


class PromptBuilder(RowBuilder):
    """Builds prompt rows, whose one piece is all text before the reply."""

    unit = "prompt"
    row_example = '{"prompt": "text", "ground_truth": "42", "dataset": "the verifier\'s name"}'
    columns = ("prompt", "ground_truth")
    docs_page = "docs/rewards.md"

    def __init__(
        self,
        chat: ChatFormat,
        *,
        max_prompt_token_length: int,
        on_bad_row: str,
        **row_settings: Any,
    ) -> None:
        """
        Args:
            chat: what makes token ids of conversations.
            max_prompt_token_length: longer prompts are left out.
            on_bad_row: "error", "skip" or "trim".
            row_settings: arguments of `parse_prompt_row`.
        """
        # One more token, for the first of a reply.
        super().__init__(chat, max_seq_length=max_prompt_token_length + 1, on_bad_row=on_bad_row)
        self.row_settings = row_settings

    def render(self, row: Mapping[str, Any]) -> RenderedRow:
        messages, checks, environment = parse_prompt_row(row, **self.row_settings)
        text, _ = self.chat.render(messages, ())
        details: dict[str, Any] = {"text": text, "checks": list(map(asdict, checks))}
        if environment is not None:
            if any(message.get("functions") for message in messages):
                raise MalformedRow(
                    "environment",
                    "the row has 'functions', and an environment, which has its own tools",
                )
            columns = environment.columns | {"messages": messages}
            details["environment"] = environment.name
            details["row"] = check_json_value(columns, "the row")
        # Two rows of one prompt, with another answer each, are on one side of --eval_split.
        return RenderedRow(
            texts=(text,),
            messages=messages,
            details=json.dumps(details).encode(),
            content=join_columns({"messages": messages}),
        )

    def count_marks(
        self, row: RawRow, rendered: RenderedRow, pieces: list[list[int]], replies: range
    ) -> None:
        super().count_marks(row, rendered, pieces, replies)
        self.counts.num_replies_left_out += ends_with_reply(row.value)

    def cut(self, pieces: list[list[int]]) -> list[list[int]] | None:
        return pieces

    def describe_limit(self) -> str:
        return f"--max_prompt_token_length {self.max_seq_length - 1}"


def load_prompt_dataset(
    *,
    known_verifiers: Mapping[str, Verifier],
    known_environments: Collection[str] = (),
    **arguments: Any,
) -> tuple[Prompts, DataReport]:
    """`load_token_dataset` with `max_prompt_token_length` and the known verifiers.

    Raises:
        InputError: see there; a row that names none of `known_verifiers`, or one that refuses its
            ground truth, is malformed.
    """
    make_builder = partial(
        PromptBuilder,
        known_verifiers=known_verifiers,
        known_environments=frozenset(known_environments),
    )
    # Both, so that caches of other names are not read.
    facts = {
        "names_of_verifiers": sorted(known_verifiers),
        "environments": sorted(known_environments),
    }
    dataset, report = load_token_dataset(make_builder, facts=facts, **arguments)
    return Prompts(dataset), report


class PromptStream:
    """An endless stream of prompts, in a new order each epoch.

    The order of an epoch depends on the seed and the number of the epoch alone. Every prompt that
    comes out has a ticket, counted from 0; excluded prompts are skipped and have none.
    """

    def __init__(self, dataset: Prompts, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._num_drawn = 0  # excluded ones too, in all epochs
        self._next_ticket = 0
        self._excluded_ids: set[int] = set()

    @property
    def num_left(self) -> int:
        """Prompts that are not excluded."""
        return len(self.dataset) - len(self._excluded_ids)

    def next(self) -> tuple[int, Prompt]:
        """The next ticket and its prompt.

        Raises:
            RunError: every prompt is excluded.
        """
        if self.num_left == 0:
            raise RunError(
                f"all {len(self.dataset):,} prompts have reached --no_resampling_pass_rate, so "
                "there is none left to ask; the policy has learned this data: give more or "
                "harder prompts, or raise that rate"
            )
        while True:
            epoch, position = divmod(self._num_drawn, len(self.dataset))
            row_id = int(_shuffle_epoch(self.seed, epoch, len(self.dataset))[position])
            self._num_drawn += 1
            if row_id not in self._excluded_ids:
                break
        ticket = self._next_ticket
        self._next_ticket += 1
        return ticket, self.dataset[row_id]

    def exclude(self, row_id: int) -> None:
        """Never hand out this prompt again."""
        assert 0 <= row_id < len(self.dataset)
        self._excluded_ids.add(row_id)

    def state_dict(self) -> dict[str, Any]:
        """The position of the stream, as JSON."""
        return {
            "num_drawn": self._num_drawn,
            "next_ticket": self._next_ticket,
            "excluded": sorted(self._excluded_ids),
            "data_fingerprint": self.dataset.fingerprint,
            "seed": self.seed,
        }

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse the state of another stream.

        Raises:
            InputError: the state is of other prompts, or of another seed.
        """
        rows = make_rows_fact(
            self.dataset.fingerprint, flag="dataset_mixer_list", limit="--max_prompt_token_length"
        )
        check_saved_place(state_dict, rows, make_seed_fact(state_dict, self.seed))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where another stream over the same prompts stood.

        Raises:
            InputError: the state is of other prompts, or of another seed.
        """
        self.check_state(state_dict)
        self._num_drawn = state_dict["num_drawn"]
        self._next_ticket = state_dict["next_ticket"]
        self._excluded_ids = set(state_dict["excluded"])


@lru_cache(maxsize=4)
def _shuffle_epoch(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


def build_row_settings(config: GRPOConfig) -> dict[str, Any]:
    """The arguments of `parse_prompt_row` that flags set for every row.

    Raises:
        InputError: the file of the system prompt cannot be read.
    """
    remapped = {}
    for word in config.reward.remap_verifier:
        old, new = word.split("=")
        remapped[old.lower()] = new
    system_prompt = None
    file = config.data.system_prompt_override_file
    if file is not None:
        where = f"--system_prompt_override_file {file}"
        system_prompt = read_user_file(file, where=where).strip()
    return {
        "judges": list_judges(config.reward.verifier),
        "remapped": remapped,
        "environment": config.environment.of_all_rows,
        "system_prompt": system_prompt,
    }
