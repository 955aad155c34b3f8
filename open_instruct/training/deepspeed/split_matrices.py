"""Matrices of a model that ranks split among them on DeepSpeed, by the layers of its AutoTP.

Of each pair of matrices a rank computes with rows of the first ones, and with columns of the
second: AutoTP's layers take the place of OLMo-core's matrices, chosen by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from olmo_core.nn.attention import Attention
from olmo_core.nn.feed_forward import FeedForward
from olmo_core.nn.layer_norm import LayerNorm, QwenRMSNorm
from olmo_core.nn.transformer import Transformer
from torch import nn

from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.training.deepspeed.library import deepspeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The part of a parameter that a rank has: number `index` of `degree` parts along `dim`.

    Example: the right half of a matrix, `Cut(dim=1, index=1, degree=2)`.
    """

    dim: int
    index: int
    degree: int

    def whole(self, part: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of all parts together."""
        return tuple(
            size * self.degree if dim == self.dim else size for dim, size in enumerate(part)
        )


UNCUT = Cut(dim=0, index=0, degree=1)


def split_matrices(model: Transformer, degree: int) -> None:
    """Have this rank compute with its part of every matrix of `model`, which is on the meta device.

    A parameter that is cut gets a `cut` attribute. A head that is tied, or whose rows cannot be
    divided evenly, stays whole on every rank, and so do embeddings and norms.
    """
    groups = deepspeed.utils.groups
    groups._init_tp_mesh_device(tensor_model_parallel_size=degree)
    # Of this rank and its neighbours, made once a run.
    group = groups.get_tensor_model_parallel_group()
    deepspeed.module_inject.layers.set_autotp_mode(training=True)
    for block in model.blocks.values():
        if isinstance(block.attention, Attention):
            _split_attention(block.attention, group, degree)
        else:
            _split_delta_rule(block.attention, group, degree)
        feed_forward = cast(FeedForward, block.feed_forward)
        if feed_forward.w1.weight.shape[0] % degree == 0:
            _split_pair(feed_forward, ("w1", "w3"), "w2", group)
    head = model.lm_head
    if (
        isinstance(head, LogprobHead)
        and not model.tie_word_embeddings
        and head.vocab_size % degree == 0
    ):
        head.w_out = _column_parallel(head.w_out, group, gather_output=True)
    vars(model)["ds_autotp_parsed"] = True  # else DeepSpeed would look for matrices itself


def _split_attention(attention: Any, group: Any, degree: int) -> None:
    _split_pair(attention, ("w_q", "w_k", "w_v"), "w_out", group)
    attention.n_heads //= degree
    attention.n_kv_heads //= degree
    for name in ("q_norm", "k_norm"):
        norm = getattr(attention, name)
        if norm is not None and attention.use_head_qk_norm:
            norm.weight.sums_over = group  # every rank has the gradient of its own heads
        elif norm is not None:
            setattr(attention, name, SplitNorm(norm, group))


def _split_delta_rule(mixer: Any, group: Any, degree: int) -> None:
    for module, name, parameter in mixer.small_parameters:
        if module is not mixer.o_norm:
            setattr(module, name, _part(parameter, group, degree))
    mixer.o_norm.weight.sums_over = group
    _split_pair(mixer, mixer.input_names, mixer.shape.output, group)


def _split_pair(
    module: Any,
    firsts: Sequence[str],
    second: str,
    group: Any,
) -> None:
    for name in firsts:
        setattr(module, name, _column_parallel(getattr(module, name), group))
    row_parallel = deepspeed.module_inject.layers.LinearAllreduce(getattr(module, second), group)
    _mark(row_parallel.weight, 1, group)
    setattr(module, second, row_parallel)


def _column_parallel(linear: nn.Module, group: Any, **more: Any) -> Any:
    layer = deepspeed.module_inject.layers.LinearLayer(linear, group, **more)
    for parameter in layer.parameters():
        _mark(parameter, 0, group)
    return layer


def _part(whole: torch.Tensor, group: Any, degree: int) -> Any:
    """A rank's rows of a parameter on the meta device, for a layer that is none of AutoTP's."""
    first, *_ = whole.detach().chunk(degree)
    part: Any = nn.Parameter(first.clone())
    _mark(part, 0, group)
    part.tensor_model_parallel = True
    return part


def _mark(parameter: Any, dim: int, group: Any) -> None:
    rank = dist.get_rank(group)
    parameter.cut = Cut(dim=dim, index=rank, degree=dist.get_world_size(group))


class SplitNorm(nn.Module):
    """OLMo-core's norm over all heads, for a rank that has some: they exchange sums of squares."""

    def __init__(self, norm: LayerNorm, group: Any) -> None:
        super().__init__()
        assert norm.bias is None and norm.full_precision
        self.eps: float = norm.eps
        self.group: Any = group
        self.casts_first: bool = isinstance(norm, QwenRMSNorm)
        self.weight: Any = _part(norm.weight, group, dist.get_world_size(group))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        exact_BTD = x_BTD.float()
        squares_BT1 = _sum_over(self.group, exact_BTD.pow(2).mean(-1, keepdim=True))
        mean_BT1 = squares_BT1 / dist.get_world_size(self.group)
        exact_BTD = exact_BTD * torch.rsqrt(mean_BT1 + self.eps)
        if self.casts_first:
            exact_BTD = exact_BTD.type_as(x_BTD)
        return (self.weight.type_as(exact_BTD) * exact_BTD).type_as(x_BTD)


def _sum_over(group: Any, values: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of `group`; backward sums the gradients of these ranks too."""
    layers = deepspeed.module_inject.layers
    sums = layers.RowParallel.apply(group, values, False)
    result: torch.Tensor = layers.ColumnParallel.apply(group, sums)
    return result
