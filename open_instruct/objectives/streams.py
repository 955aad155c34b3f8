"""Which labelled tokens of a microbatch each of the three losses of a policy gradient learns from, and how much.

Legend: N labelled tokens of a microbatch, M those of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Some of a microbatch's labelled tokens. None: all of them; a weight of 1 for each."""

    tokens_M: torch.Tensor | None
    weights_M: torch.Tensor | None

    @classmethod
    def of(cls, name: str, values: Mapping[str, torch.Tensor]) -> Stream:
        """The stream `name` among the values of a microbatch. Where all tokens are a completion's nothing is listed."""
        return cls(tokens_M=values.get(f"{name}_tokens"), weights_M=values.get(f"{name}_weights"))

    def take(self, values_N: torch.Tensor) -> torch.Tensor:
        """Of the tokens of the stream, (M,). So what lies between them changes nothing, to the last bit."""
        return values_N if self.tokens_M is None else values_N.index_select(0, self.tokens_M.to(values_N.device))

    def weighed(self, values_M: torch.Tensor) -> torch.Tensor:
        return values_M if self.weights_M is None else values_M * self.weights_M
