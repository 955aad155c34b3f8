"""A head that gives a score, one number at a position, in place of logits.

Its product is float32 even where the model computes in 16 bits, because two replies to one prompt often have equal
scores to three digits. Its weight is float32 too, except under a backend that holds all weights in one dtype.

B rows, T tokens of a row, K positions kept of a row, D width of the model.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.lm_head import LMHead
from transformers import PretrainedConfig

from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.names import HF_LM_HEAD, HF_SCORE


class ValueHead(LMHead):
    """The model's last norm, and a matrix of one row."""

    keeps_float32 = True

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        """The score at the positions to keep (all, where none are chosen): float32 of shape (B, K)."""
        h_BKD = x if self.norm is None else self.norm(x)
        keep_BK = kwargs.get("logits_to_keep")
        if isinstance(keep_BK, torch.Tensor):
            h_BKD = h_BKD.gather(1, keep_BK.unsqueeze(-1).expand(-1, -1, h_BKD.size(-1)))
        h_BKD = h_BKD.float()
        score_BK1 = self.w_out(h_BKD) if self.keeps_float32 else F.linear(h_BKD, self.w_out.weight.float())
        return score_BK1.squeeze(-1)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ValueHead:
        """Called by `Module.to`: the matrix moves with the model, and keeps its dtype."""
        super()._apply(fn, recurse)
        if self.keeps_float32 and self.w_out.weight.dtype != torch.float32:
            self.w_out.float()
        return self

    def apply_tp(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a matrix of one row is not split: flags that ask for it are refused before")

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is worth compiling here."""


def drawn_score(hidden_size: int, *, seed: int) -> torch.Tensor:
    """A new matrix of shape (1, D): normal with standard deviation 1 / sqrt(D + 1), the same wherever it is drawn.

    As Stiennon et al. draw it (2020, arXiv:2009.01325): scores then begin with a variance of about 1.
    """
    digest = hashlib.sha256(f"{HF_SCORE} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(1, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5


def open_score_files(folder: Path, hf_config: PretrainedConfig, *, seed: int) -> CheckpointFiles:
    """A checkpoint's files for a model that scores: without the language-model head, and with that of a score.

    The score's head is drawn at random, unless the checkpoint has one.

    Raises:
        InputError: see `CheckpointFiles.open`.
    """
    files = CheckpointFiles.open(folder)
    files.tensors.pop(HF_LM_HEAD, None)
    if HF_SCORE not in files and not is_classifier(hf_config):
        files.tensors[HF_SCORE] = drawn_score(hf_config.hidden_size, seed=seed)
    return files


def is_classifier(hf_config: PretrainedConfig) -> bool:
    """Whether config.json names transformers' sequence classification class."""
    return any(name.endswith("ForSequenceClassification") for name in hf_config.architectures or ())
