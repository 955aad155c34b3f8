"""The gated delta rule (Yang et al. 2024, "Gated Delta Networks", arXiv:2412.06464, section 3) over
segments.

A head remembers in a matrix S, from keys to values. At each token it forgets a share of S, reads
what S then holds under the token's key, and writes at some rate the difference to the token's
value::

    S = exp(decay) S;    S = S + rate * key (value - key^T S)^T;    output = query^T S

S begins at zero with every document, and a segment goes on with the S that its prefix left. Over a
chunk of C tokens S becomes M S + A, and what the chunk reads is R S + B, with matrices that do not
depend on S: those of all chunks are made at once, and only S goes from chunk to chunk. Everything
is float32.

Legend of the shape suffixes: T tokens of a row, N chunks, C tokens of a chunk, H value heads, G key
heads, K features of a key, V features of a value.
"""

from typing import Any, NamedTuple

import torch
from olmo_core.nn.attention import flash_linear_attn_api as kernels

from open_instruct.models.attention.segments import Segments
from open_instruct.models.delta_rule.shape import CHUNK
from open_instruct.models.delta_rule.walk import Walk

NORM_EPS = 1e-6


class DeltaRuleInputs(NamedTuple):
    """What the rule is given for every token.

    Attributes:
        query, key: (T, H, K), not normalised.
        value: (T, H, V).
        decay: (T, H) float32, the logarithm of the share that is kept, below 0.
        rate: (T, H), the share of a difference that is written.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    decay: torch.Tensor
    rate: torch.Tensor


def gated_delta_rule(inputs: DeltaRuleInputs, segments: Segments, walk: Walk) -> torch.Tensor:
    """What every token reads, (T, H, V).

    On CUDA by the kernel of flash-linear-attention where that is installed, which knows no
    prefixes, and multiplies float32 in TF32: it is given 16 bits alone.
    """
    can_be = inputs.value.dtype.itemsize == 2 and not any(segments.prefix_lengths)
    return (
        _compute_by_kernel
        if inputs.query.is_cuda and can_be and kernels.has_fla()
        else compute_by_chunks
    )(inputs, walk)


def compute_by_chunks(inputs: DeltaRuleInputs, walk: Walk) -> torch.Tensor:
    """The rule in plain PyTorch, (T, H, V)."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        query, key, value, decay, rate = (
            _gather_chunks(to_float32(each), walk.tokens_NC) for each in inputs
        )
        query, key = (
            each * (each.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt() for each in (query, key)
        )
        query = query * query.shape[-1] ** -0.5
        # From the beginning of the chunk to each token, and between each two tokens.
        kept_NHC1 = decay.cumsum(dim=2)
        is_later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
        between = (kept_NHC1 - kept_NHC1.mT).masked_fill(is_later, -torch.inf).exp()
        # What tokens write depends on what those before them wrote: a triangular system (section
        # 3.3).
        key_at_rate = rate * key
        system_NHCC = key_at_rate @ key.mT * between
        right = torch.cat([rate * value, key_at_rate * kept_NHC1.exp()], dim=-1)
        solved = torch.linalg.solve_triangular(system_NHCC, right, upper=False, unitriangular=True)
        written, corrected = solved.split([value.shape[-1], key.shape[-1]], dim=-1)

        reads = query @ key.mT * between
        leaves = (key * (kept_NHC1[:, :, -1:] - kept_NHC1).exp()).mT
        all_kept = kept_NHC1[:, :, -1:].exp() * torch.eye(
            key.shape[-1], dtype=key.dtype, device=key.device
        )
        found_NHKV = _find_states(all_kept - leaves @ corrected, leaves @ written, walk)
        read = reads @ written + (query * kept_NHC1.exp() - reads @ corrected) @ found_NHKV
        return (
            read.transpose(1, 2).flatten(0, 1).index_select(0, walk.places_T).to(inputs.value.dtype)
        )


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _gather_chunks(tensor: torch.Tensor, tokens_NC: torch.Tensor) -> torch.Tensor:
    """(T, H, ...) into (N, H, C, ...), with zeros after a chunk's last token; (T, H) into (N, H, C,
    1).
    """
    with_zero = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    chunks = with_zero.index_select(0, tokens_NC.flatten()).unflatten(0, tokens_NC.shape)
    # Else every product would copy it, and keep the copy.
    chunks = chunks.transpose(1, 2).contiguous()
    return chunks if tensor.dim() == 3 else chunks.unsqueeze(-1)


def _find_states(
    changes_NHKK: torch.Tensor, additions_NHKV: torch.Tensor, walk: Walk
) -> torch.Tensor:
    """The memory that each chunk finds, (N, H, K, V)."""
    nothing = torch.zeros_like(additions_NHKV[0])
    found, left = list[torch.Tensor](), list[torch.Tensor]()
    for goes_on_from, change, addition in zip(
        walk.goes_on_from, changes_NHKK, additions_NHKV, strict=True
    ):
        found.append(nothing if goes_on_from is None else left[goes_on_from])
        left.append(addition if goes_on_from is None else change @ found[-1] + addition)
    return torch.stack(found)


def _compute_by_kernel(inputs: DeltaRuleInputs, walk: Walk) -> torch.Tensor:
    query, key, value, decay, rate = (each.unsqueeze(0) for each in inputs)
    # Of borders the kernel makes indices, waiting for the device, once for a tensor: all layers
    # have the same.
    given: dict[str, Any] = {
        "q": query,
        "k": key,
        "v": value,
        "g": decay,
        "beta": rate,
        "cu_seqlens": walk.borders,
    }
    output, _ = kernels.dispatch_chunk_gated_delta_rule(**given, use_qk_l2norm_in_kernel=True)
    return output[0]
