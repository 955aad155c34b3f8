"""A head that computes a score, or the logits of two classes, in place of logits over words.

Its product is float32 even where the model computes in 16 bits, because two replies to one prompt
often have equal scores to three digits. Its parameters are float32 too, except under a backend that
holds all weights in one dtype.

B rows, T tokens of a row, K positions kept of a row, D width of the model, C numbers at a position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from olmo_core.nn.lm_head import LMHead
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.parallel import (
    PrepareModuleInput,
    SequenceParallel,
    parallelize_module,
)
from transformers import PretrainedConfig

from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.head_kinds import (
    CLASS_ENDINGS,
    HEAD_SIZES,
    HEAD_TENSORS,
    HF_SCORE,
    HF_SCORE_BIAS,
    Head,
    has_head,
)
from open_instruct.models.hf.names import HF_LM_HEAD


class ValueHead(LMHead):
    """The model's last norm, and a matrix of one row, or of two rows with a bias."""

    keeps_float32 = True

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        """The numbers at the positions to keep (all, where none are chosen), in float32.

        Of shape (B, K) where there is one at a position, and (B, K, C) where there are more.
        """
        h_BKD = x if self.norm is None else self.norm(x)
        keep_BK = kwargs.get("logits_to_keep")
        if isinstance(keep_BK, torch.Tensor):
            h_BKD = h_BKD.gather(1, keep_BK.unsqueeze(-1).expand(-1, -1, h_BKD.size(-1)))
        h_BKD = h_BKD.float()
        if self.keeps_float32:
            values_BKC = self.w_out(h_BKD)
        else:
            bias_C: Any = self.w_out.bias
            if bias_C is not None:  # a score has none
                bias_C = bias_C.float()
            values_BKC = F.linear(h_BKD, self.w_out.weight.float(), bias_C)
        if self.vocab_size == 1:
            return values_BKC.squeeze(-1)
        return values_BKC

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ValueHead:
        """Called by `Module.to`: the matrix moves with the model, and keeps its dtype."""
        super()._apply(fn, recurse)
        if self.keeps_float32 and self.w_out.weight.dtype != torch.float32:
            self.w_out.float()
        return self

    def apply_tp(
        self, tp_mesh: DeviceMesh, input_layouts: tuple[Placement, Placement] | None = None
    ) -> None:
        """Leave norm and matrix whole: each rank computes at its own positions of the rows."""
        layout = None if input_layouts is None else input_layouts[0]
        split_rows = PrepareModuleInput(input_layouts=layout, desired_input_layouts=Shard(1))
        parallelize_module(self, tp_mesh, split_rows)
        if self.norm is not None:
            parallelize_module(self.norm, tp_mesh, SequenceParallel())
        parallelize_module(self.w_out, tp_mesh, SequenceParallel())
        self._tp_mesh = tp_mesh

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Nothing is worth compiling here."""


def draw_score_matrix(hidden_size: int, *, seed: int, num_rows: int = 1) -> torch.Tensor:
    """Draw a new matrix of shape (C, D), the same on every rank.

    It is normal with standard deviation 1 / sqrt(D + 1), as Stiennon et al. draw it (2020,
    arXiv:2009.01325): scores then begin with a variance of about 1.
    """
    digest = hashlib.sha256(f"{HF_SCORE} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    return torch.randn(num_rows, hidden_size, generator=generator) / (hidden_size + 1) ** 0.5


def replace_head(
    files: CheckpointFiles, hf_config: PretrainedConfig, head: Head, *, seed: int
) -> CheckpointFiles:
    """Take a head of this kind into a checkpoint's opened files, in place of the words' head.

    It is drawn at random, unless the checkpoint has one of its kind.
    """
    files.tensors.pop(HF_LM_HEAD, None)
    if has_head(hf_config, head):
        return files
    if any(has_head(hf_config, other) for other in CLASS_ENDINGS):
        for name in (HF_SCORE, HF_SCORE_BIAS):
            files.tensors.pop(name, None)
    size = HEAD_SIZES[head]
    drawn = {
        HF_SCORE: draw_score_matrix(hf_config.hidden_size, seed=seed, num_rows=size),
        HF_SCORE_BIAS: torch.zeros(size),
    }
    for name in HEAD_TENSORS[head].values():
        files.tensors.setdefault(name, drawn[name])
    return files
