"""The order in which prompts are asked: endless, shuffled anew in each epoch, and the same after a resume."""

from __future__ import annotations

from typing import Any

import numpy as np

from open_instruct.data.prompts import Prompts
from open_instruct.data.saved_place import check_saved_place
from open_instruct.errors import RunError
from open_instruct.records import Prompt


class PromptStream:
    """Prompts without end; epoch e is a permutation of all of them that depends on the seed and e alone.

    Every prompt handed out has a ticket, counted from 0; excluded prompts are passed over and take none.
    """

    def __init__(self, dataset: Prompts, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._epoch = 0
        self._position = 0  # in the order of the epoch
        self._next_ticket = 0
        self._excluded: set[int] = set()
        self._fingerprint = dataset.fingerprint
        self._order_N = self._order_of_epoch()

    @property
    def num_left(self) -> int:
        """Prompts that are not excluded."""
        return len(self.dataset) - len(self._excluded)

    def next(self) -> tuple[int, Prompt]:
        """The next ticket and its prompt.

        Raises:
            RunError: every prompt is excluded.
        """
        if self.num_left == 0:
            raise RunError(
                f"all {len(self.dataset):,} prompts have reached --no_resampling_pass_rate, so there is none left to "
                "ask; the policy has learned this data: give more or harder prompts, or raise that rate"
            )
        while (row_id := self._next_row_id()) in self._excluded:
            pass
        ticket = self._next_ticket
        self._next_ticket += 1
        return ticket, self.dataset[row_id]

    def exclude(self, row_id: int) -> None:
        """Never hand out this prompt again."""
        assert 0 <= row_id < len(self.dataset)
        self._excluded.add(row_id)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands, as JSON can say it."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "next_ticket": self._next_ticket,
            "excluded": sorted(self._excluded),
            "data_fingerprint": self._fingerprint,
            "seed": self.seed,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where another stream over the same prompts stood.

        Raises:
            InputError: the state is of other prompts, or of another seed.
        """
        check_saved_place(
            state_dict,
            ("data_fingerprint", self._fingerprint, "give the same prompts, template and --max_prompt_token_length"),
            ("seed", self.seed, f"give --seed {state_dict['seed']}"),
        )
        self._epoch = state_dict["epoch"]
        self._position = state_dict["position"]
        self._next_ticket = state_dict["next_ticket"]
        self._excluded = set(state_dict["excluded"])
        self._order_N = self._order_of_epoch()

    def _next_row_id(self) -> int:
        if self._position == len(self._order_N):
            self._epoch += 1
            self._position = 0
            self._order_N = self._order_of_epoch()
        row_id = int(self._order_N[self._position])
        self._position += 1
        return row_id

    def _order_of_epoch(self) -> np.ndarray:
        return np.random.default_rng([self.seed, self._epoch]).permutation(len(self.dataset))
