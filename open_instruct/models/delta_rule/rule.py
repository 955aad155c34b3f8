"""The gated delta rule over segments of packed rows.

It is from Yang et al. 2024, "Gated Delta Networks" (arXiv:2412.06464, section 3). A head remembers
in a matrix S, from keys to values. At each token it forgets a share of S, reads what S then holds
under the token's key, and writes at some rate the difference to the token's value::

    S = exp(decay) S;    S = S + rate * key (value - key^T S)^T;    output = query^T S

S begins at zero with every document, and a segment goes on with the S that its prefix left. Over a
chunk of C tokens S becomes M S + A, and what the chunk reads is R S + B, with matrices that do not
depend on S: those of all chunks are made at once, and only S goes from chunk to chunk. Everything
is float32.

Legend of the shape suffixes: T tokens of a row, N chunks, C tokens of a chunk, H value heads, G key
heads, K features of a key, V features of a value.
"""

from typing import NamedTuple

import torch
from olmo_core.nn.attention import flash_linear_attn_api as kernels

from open_instruct.models.attention.segments import Segments
from open_instruct.models.delta_rule.shape import CHUNK
from open_instruct.models.delta_rule.walk import Walk

NORM_EPS = 1e-6


class DeltaRuleInputs(NamedTuple):
    """The inputs of the rule for every token.

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
    kernel_can_run = inputs.value.dtype.itemsize == 2 and not any(segments.prefix_lengths)
    if inputs.query.is_cuda and kernel_can_run and kernels.has_fla():
        return _compute_by_kernel(inputs, walk)
    return compute_by_chunks(inputs, walk)


def compute_by_chunks(inputs: DeltaRuleInputs, walk: Walk) -> torch.Tensor:
    """The rule in plain PyTorch, (T, H, V)."""
    with torch.autocast(inputs.query.device.type, enabled=False):
        query, key, value, decay, rate = (
            _gather_chunks(to_float32(each), walk.tokens_NC) for each in inputs
        )
        query = _normalize(query) * query.shape[-1] ** -0.5
        key = _normalize(key)
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
        read_THV = read.transpose(1, 2).flatten(0, 1).index_select(0, walk.places_T)
        return read_THV.to(inputs.value.dtype)


def _normalize(tensor: torch.Tensor) -> torch.Tensor:
    """Divide each token's features by their length."""
    return tensor * (tensor.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def to_float32(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _gather_chunks(tensor: torch.Tensor, tokens_NC: torch.Tensor) -> torch.Tensor:
    """Lay (T, H, ...) out as (N, H, C, ...), and (T, H) as (N, H, C, 1).

    There are zeros after a chunk's last token.
    """
    with_zero = torch.cat([tensor, tensor.new_zeros(1, *tensor.shape[1:])])
    chunks = with_zero.index_select(0, tokens_NC.flatten()).unflatten(0, tokens_NC.shape)
    # Else every product would copy it, and keep the copy.
    chunks = chunks.transpose(1, 2).contiguous()
    if tensor.dim() == 2:
        chunks = chunks.unsqueeze(-1)
    return chunks


def _find_states(
    changes_NHKK: torch.Tensor, additions_NHKV: torch.Tensor, walk: Walk
) -> torch.Tensor:
    """The memory that each chunk finds at its beginning, (N, H, K, V)."""
    nothing = torch.zeros_like(additions_NHKV[0])
    found: list[torch.Tensor] = []
    left: list[torch.Tensor] = []
    chunks = zip(walk.goes_on_from, changes_NHKK, additions_NHKV, strict=True)
    for goes_on_from, change, addition in chunks:
        if goes_on_from is None:
            found.append(nothing)
            left.append(addition)
        else:
            found.append(left[goes_on_from])
            left.append(change @ found[-1] + addition)
    return torch.stack(found)


def _compute_by_kernel(inputs: DeltaRuleInputs, walk: Walk) -> torch.Tensor:
    query, key, value, decay, rate = (each.unsqueeze(0) for each in inputs)
    # Of borders the kernel makes indices, waiting for the device, once for a tensor: all layers
    # have the same.
    output, _ = kernels.dispatch_chunk_gated_delta_rule(
        q=query,
        k=key,
        v=value,
        g=decay,
        beta=rate,
        cu_seqlens=walk.borders,
        use_qk_l2norm_in_kernel=True,
    )
    return output[0]
