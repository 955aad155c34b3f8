"""The memory that one block and the head keep and need temporarily, operation by operation.

Sources, in OLMo-core 3.0 and PyTorch 2.13: `TransformerBlock` and `ReorderedNormTransformerBlock`,
`Attention`, `RotaryEmbedding`, `RMSNorm`, `QwenRMSNorm` and `FeedForward` for the operations;
`derivatives.yaml` of PyTorch for what each saves; `models/attention/attention.py` and
`models/heads/logprob_head.py` here for attention and the head.

Norms, and RoPE for OLMo, compute in float32 whatever dtype the rest uses, and keep float32 copies
of their inputs; in bfloat16 these copies are most of what a block keeps.

Documents are taken to be of different lengths. A window changes the time that attention takes, not
what it keeps: true of the kernels on CUDA, while on a CPU a document longer than the window is
copied in pieces, which is not counted. Tensor parallelism splits heads, features and vocabulary,
and the positions of a row between matrices. Compiled blocks fuse what stands between matrices; they
are counted as uncompiled ones, which is an upper bound.

A matrix that is frozen keeps nothing for its gradient; an adapter beside it keeps its own few
features. The input of the first block needs no gradient then; the block is counted like the others,
an upper bound too.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.delta_rule.shape import CHUNK, DeltaShape
from open_instruct.planning.memory.autograd_sizes import Gradient, Kind, Profile, Tape, Tensor
from open_instruct.planning.memory.scratch import attention_scratch, parts_scratch
from open_instruct.planning.subject.model import LayerShape, ModelShape
from open_instruct.planning.subject.workload import Workload, is_wrapped

FLOAT32 = 4
# Those of `models.heads.logprob_head`, which cannot be imported without torch; a test holds them
# equal.
MAX_LOGITS_BYTES, MAX_KEPT_BYTES = 1 << 30, 2 << 30

# Chunks of the head are alike; from the second on the gradient of the matrix already exists.
CHUNKS_RECORDED = 2
# A cast to float8 has two float32 copies beside the result: what torchao's `_ToFloat8ConstrFunc`
# makes, uncompiled.
BYTES_OF_CAST = 2 * FLOAT32 + 1

# Modules that can be checkpointed by themselves; "" is the block. A residual sum keeps nothing in
# any case.
BLOCK_MODULES = (
    *(
        "",
        "attention",
        "attention.q_norm",
        "attention.k_norm",
        "attention_norm",
        "attention_residual_stream",
    ),
    *("feed_forward", "feed_forward_norm", "feed_forward_residual_stream"),
)


def logit_chunks(shape: ModelShape, num_positions: int) -> tuple[int, ...]:
    """Positions in each chunk of the head; with more than one chunk, logits are recomputed in the
    backward pass.
    """
    most = max(1, MAX_LOGITS_BYTES // (FLOAT32 * shape.num_outputs))
    whole, rest = divmod(num_positions, most)
    return (most,) * whole + ((rest,) if rest else ())


def num_kept_chunks(shape: ModelShape, chunks: Sequence[int], bytes_per_number: int) -> int:
    """The chunks, of several, whose product with the head's matrix is kept; with 0 bytes nothing
    is.
    """
    if not bytes_per_number or len(chunks) < 2:
        return 0
    return min(len(chunks), MAX_KEPT_BYTES // (chunks[0] * shape.num_outputs * bytes_per_number))


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceSplit:
    """How ranks divide a block or the head: all of a layout that its memory depends on."""

    tensor_degree: int
    context_degree: int
    expert_degree: int
    is_single_device: bool  # which has master weights, and gathers nothing


def profile_of(
    kind: LayerShape | None,
    shape: ModelShape,
    layout: ShardLayout,
    workload: Workload,
    *,
    splits_rows: bool,
) -> Profile:
    """One block, from the residual stream to itself; or last norm and head, from there to the
    labels' log-probs.

    Args:
        kind: of the block; None: the head.
        workload: of one microbatch, whose rows are taken to be full; a context degree splits its
            tokens.
        splits_rows: tensor ranks have a part of the tokens each between the matrices that they
            split.
    """
    split = PieceSplit(
        tensor_degree=layout.tensor_parallel_degree,
        context_degree=layout.context_parallel_degree,
        expert_degree=layout.expert_parallel_degree,
        is_single_device=layout.single_device,
    )
    return _profile_piece(kind, shape, split, workload.with_full_rows(), splits_rows)


@lru_cache(maxsize=512)
def _profile_piece(
    kind: LayerShape | None,
    shape: ModelShape,
    split: PieceSplit,
    workload: Workload,
    splits_rows: bool,
) -> Profile:
    sizes = (shape, split, workload, splits_rows)
    run = _Head(*sizes) if kind is None else _Block(kind, *sizes)
    return run.tape.profile(run.record())


def forget_profiles() -> None:
    """Drop all cached profiles: a test that changes a limit of a kernel calls this."""
    _profile_piece.cache_clear()


class _Piece:
    """Operations shared by a block and the head, recorded on a tape."""

    def __init__(
        self, shape: ModelShape, split: PieceSplit, workload: Workload, splits_rows: bool
    ) -> None:
        self.shape = shape
        self.degrees = split
        self.workload = workload
        self.c = workload.compute_bytes
        # Of the model's own parameters.
        self.kind: Kind = "weight" if shape.adapters is None else "frozen"
        self.num_tokens = -(-workload.tokens_per_microbatch // split.context_degree)
        # Tokens between matrices.
        self.num_rows = self.split(self.num_tokens) if splits_rows else self.num_tokens
        self.tape = Tape(Tensor(self.num_rows * shape.d_model * self.c, kind="source"))

    def split(self, count: int) -> int:
        """A tensor rank's share of `count`."""
        return -(-count // self.degrees.tensor_degree)

    def recomputed(self, module: str) -> AbstractContextManager[None]:
        """Within runs a module of the block, which may be checkpointed; "" is the block itself.

        All are alike.
        """
        return self.tape.recomputed(is_wrapped(self.workload.recomputed_modules, 0, module))

    def cast(self, tensor: Tensor, num_elements: int, to_bytes: int) -> Tensor:
        """A copy of `num_elements` in another dtype; the tensor itself if it has that size."""
        num_bytes = num_elements * to_bytes
        return tensor if tensor.num_bytes == num_bytes else self.tape.run(num_bytes, tensor)

    def linear(self, module: str, x: Tensor, num_inputs: int, num_outputs: int) -> Tensor:
        """The output of a matrix of the block for all tokens, with that of its adapter."""
        adapters, num_tokens = self.shape.adapters, self.num_tokens
        given = x
        output = self.product(x, num_inputs, num_outputs, self.kind)
        if adapters is None or module not in adapters.modules:
            return output
        if adapters.drops:
            # Dropout's mask is one byte a value on CUDA, elsewhere one factor.
            mask = self.tape.run(
                num_tokens * num_inputs * (1 if self.workload.on_cuda else self.c), gradients=()
            )
            x = self.tape.run(
                num_tokens * num_inputs * self.c, x, mask, saved=[mask], gradients=[_whole(x)]
            )
        low = self.product(x, num_inputs, adapters.rank)
        added = self.product(low, adapters.rank, num_outputs)
        output = self.sum(output, self.tape.run(added.num_bytes, added))
        self.tape.hold(given, low)
        return output

    def product(
        self,
        x: Tensor,
        num_inputs: int,
        num_outputs: int,
        kind: Kind = "weight",
        *,
        of: int = 1,
        num_rows: int = 0,
    ) -> Tensor:
        """x W^T: keeps x. Its backward makes the gradient of W first, then that of x.

        :param of: so many matrices, each of which multiplies some of the rows.
        """
        num_tokens = num_rows or self.num_tokens
        weight = Tensor(of * num_inputs * num_outputs * self.c, kind=kind)
        # A single device has them in float32; FSDP gathers them in the dtype that is computed in.
        if self.degrees.is_single_device and self.c < FLOAT32 and kind != self.kind:
            weight = self.tape.run(
                weight.num_bytes, weight, gradients=[Gradient(of=weight, num_bytes=None)]
            )
        in_bytes, out_bytes = (num_tokens * size * self.c for size in (num_inputs, num_outputs))
        num_cast = (
            num_tokens * max(num_inputs, num_outputs) if self.workload.multiplies_in_float8 else 0
        )
        made, index_bytes = BYTES_OF_CAST * num_cast, 0
        # Values, and before the product an index of each two of them.
        if self.shape.in_4_bits and kind == "frozen":
            made, index_bytes = weight.num_bytes, weight.num_bytes * 2 // self.c
        on_the_way = [made + max(0, index_bytes - size) for size in (in_bytes, out_bytes)]
        gradients = [
            _whole(weight),
            Gradient(of=x, num_bytes=in_bytes, scratch_bytes=on_the_way[0]),
        ]
        return self.tape.run(
            out_bytes,
            x,
            weight,
            saved=[x, weight],
            gradients=gradients,
            scratch_bytes=on_the_way[1],
        )

    def norm(self, x: Tensor, num_rows: int, width: int) -> Tensor:
        """RMSNorm. float32 inside; keeps its input and what is scaled by the weight."""
        run = self.tape.run
        elements = num_rows * width
        float_bytes = FLOAT32 * elements
        row_bytes = FLOAT32 * num_rows
        weight = Tensor(width * self.c, kind=self.kind)
        x_float = self.cast(x, elements, FLOAT32)
        # The backward of a square makes x, then 2x, before it multiplies by the gradient.
        square_gradient = Gradient(of=x_float, num_bytes=float_bytes, scratch_bytes=2 * float_bytes)
        square = run(float_bytes, x_float, saved=[x_float], gradients=[square_gradient])
        inverse = run(row_bytes, run(row_bytes, square), saves_output=True)
        scaled = run(float_bytes, x_float, inverse, saved=[x_float, inverse])
        # OLMo multiplies by the weight in float32 and rounds then, the others round first.
        if not (self.shape.traits.in_float32 or self.shape.traits.norms_from_zero):
            scaled = self.cast(scaled, elements, self.c)
        weighted = run(
            scaled.num_bytes,
            weight,
            scaled,
            saved=[scaled],
            gradients=[_whole(scaled), _whole(weight)],
        )
        normed = self.cast(weighted, elements, self.c)
        self.tape.hold(x)  # the caller's
        return normed

    def sum(self, residual: Tensor, x: Tensor) -> Tensor:
        """The residual stream; both summands get the gradient of the sum unchanged."""
        handed_on = [Gradient(of=tensor, num_bytes=None) for tensor in (residual, x)]
        return self.tape.run(residual.num_bytes, residual, x, gradients=handed_on)


class _Block(_Piece):
    def __init__(self, layer: LayerShape, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.layer = layer

    def record(self) -> Tensor:
        x = self.tape.source
        with self.recomputed(""):
            h = self.sum(x, self._sublayer("attention_norm", self._attention, x))
            output = self.sum(h, self._sublayer("feed_forward_norm", self._feed_forward, h))
            self.tape.hold(h)
        return output

    def _sublayer(self, norm: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A sublayer with its norm: OLMo normalises the output, other families the input."""
        is_after = self.shape.traits.norm_after and self.layer.delta is None
        return self._normed(norm, run(x)) if is_after else run(self._normed(norm, x))

    def _normed(self, module: str, x: Tensor) -> Tensor:
        with self.recomputed(module):
            return self.norm(x, self.num_rows, self.shape.d_model)

    def _feed_forward(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        width = self.split(self.layer.d_ff)
        with self.recomputed("feed_forward"):
            if self.layer.num_experts:
                return self._routed(x, d_model, width)
            # All tokens, where tensor ranks hold a part each between matrices; of their sum this
            # rank's part.
            x = self.cast(x, self.num_tokens * d_model, self.c)
            gate = self.linear("feed_forward.w1", x, d_model, width)
            active = self.tape.run(gate.num_bytes, gate, saved=[gate])
            up = self.linear("feed_forward.w3", x, d_model, width)
            product = self.tape.run(gate.num_bytes, active, up, saved=[active, up])
            output = self.linear("feed_forward.w2", product, width, d_model)
            self.tape.hold(x)
            return self.cast(output, self.num_rows * d_model, self.c)

    def _routed(self, x: Tensor, d_model: int, width: int) -> Tensor:
        """`models/experts/routed.py`: tokens, each as often as it has experts, in the order of
        these.
        """
        run, num_tokens, c = self.tape.run, self.num_tokens, self.c
        num, chosen = self.layer.num_experts, self.shape.experts_per_token
        own, is_split = (
            num // self.degrees.expert_degree,
            self.degrees.expert_degree > 1,
        )
        pairs = num_tokens * chosen
        logits = self.product(x, d_model, num, self.kind)
        probs = run(
            num_tokens * num * FLOAT32,
            self.cast(logits, num_tokens * num, FLOAT32),
            saves_output=True,
        )
        which = run(pairs * 8, gradients=())
        weights = run(pairs * FLOAT32, probs, saved=[which], gradients=[_whole(probs)])
        weights = self.cast(run(weights.num_bytes, weights, saved=[weights]), pairs, c)
        sorted_by, order, back = (run(pairs * 8, gradients=()) for _ in range(3))
        repeated = run(pairs * d_model * c, x, gradients=[_whole(x)])
        sent = given = run(repeated.num_bytes, repeated, saved=[order])
        if is_split:  # rows arrive, as many as were sent, and are put in another order
            order_there, back_there = (run(pairs * 8, gradients=()) for _ in range(2))
            arrived = run(sent.num_bytes, sent)
            given = run(sent.num_bytes, arrived, saved=[order_there])
        gate, up = (
            self.product(given, d_model, width, self.kind, of=own, num_rows=pairs) for _ in range(2)
        )
        active = run(gate.num_bytes, gate, saved=[gate])
        product = run(gate.num_bytes, active, up, saved=[active, up])
        self.tape.hold(gate, up)
        by_expert = self.product(product, width, d_model, self.kind, of=own, num_rows=pairs)
        if is_split:
            self.tape.hold(given)
            by_expert = run(
                by_expert.num_bytes, run(by_expert.num_bytes, by_expert, saved=[back_there])
            )
            self.tape.hold(arrived)
        by_token = run(by_expert.num_bytes, by_expert, saved=[back])
        self.tape.hold(x, sent, by_expert, sorted_by, logits)
        both = [weights, by_token]
        return run(
            num_tokens * d_model * c, *both, saved=both, gradients=[_whole(each) for each in both]
        )

    def _attention(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        q_width = self.split(self.shape.q_width)
        kv_width = self.split(self.shape.kv_width)
        with self.recomputed("attention"):
            if self.layer.delta is not None:
                return self._remember(self.layer.delta, x)
            x = self.cast(x, self.num_tokens * d_model, self.c)
            is_gated = self.shape.traits.gates_attention
            query = gate = self.linear(
                "attention.w_q", x, d_model, q_width * (2 if is_gated else 1)
            )
            if is_gated:  # both halves are views
                query = self.tape.run(0, query)
            key = self.linear("attention.w_k", x, d_model, kv_width)
            value = self.linear("attention.w_v", x, d_model, kv_width)
            if self.shape.traits.qk_norm != "none":
                query = self._qk_norm("attention.q_norm", query, q_width)
                key = self._qk_norm("attention.k_norm", key, kv_width)
            if self.shape.turned_dim:
                query, key = self._rotated(query, key, q_width, kv_width)
            attended = self._attend(query, key, value, q_width)
            self.tape.hold(x, query, key, value)
            if is_gated:
                open_gate = self.tape.run(attended.num_bytes, gate, saves_output=True)
                attended = self.tape.run(
                    attended.num_bytes, attended, open_gate, saved=[attended, open_gate]
                )
            output = self.linear("attention.w_out", attended, q_width, d_model)
            return self.cast(output, self.num_rows * d_model, self.c)

    def _remember(self, delta: DeltaShape, x: Tensor) -> Tensor:
        """A layer of the gated delta rule (`models/delta_rule/`): its matrices, and all that is
        between them as one.

        Its numbers are those of plain PyTorch. On CUDA the kernel keeps less, and is counted as
        this.
        """
        tensors = {
            name.removesuffix(".weight"): size
            for name, size in delta.tensors(self.shape.d_model).items()
        }
        *matrices, (output, (d_model, width)) = (
            (name, size) for name, size in tensors.items() if len(size) == 2
        )
        x = self.cast(x, self.num_tokens * d_model, self.c)
        inputs = [
            self.linear(f"attention.{name}", x, d_model, self.split(size[0]))
            for name, size in matrices
        ]
        if self.kind == "weight":
            small = sum(prod(size) for size in tensors.values() if len(size) != 2)
            inputs.append(Tensor(self.split(small) * self.c, kind="weight"))
        num_tokens, whole_row = self.num_tokens, self.workload.tokens_per_microbatch
        # The last chunk of a document is half full, on average. A context rank walks whole rows for
        # its heads.
        num_chunks = (
            -(-whole_row // CHUNK) + -(-whole_row // min(whole_row, self.workload.rows.length)) // 2
        )
        degree = self.degrees.tensor_degree * self.degrees.context_degree
        kept, alone, beside, backward = (
            FLOAT32 * num_chunks * number // degree for number in delta.numbers_of_chunk
        )
        # Convolutions keep what they are given and put out; the norm what it is given, its gate,
        # and more in float32.
        kept += self.split(
            num_tokens * (2 * self.c * (sum(delta.widths) + width) + 3 * FLOAT32 * width)
        )
        gradients = [
            Gradient(of=each, num_bytes=each.num_bytes, scratch_bytes=backward) for each in inputs
        ]
        width = self.split(width)
        num_bytes, saved = num_tokens * width * self.c, [Tensor(kept)]
        gated = self.tape.run(
            num_bytes, *inputs, saved=saved, gradients=gradients, scratch_bytes=alone
        )
        self.tape.run(0, gated, gradients=(), scratch_bytes=beside)
        self.tape.hold(x)
        return self.cast(
            self.linear(f"attention.{output}", gated, width, d_model),
            self.num_rows * d_model,
            self.c,
        )

    def _qk_norm(self, module: str, x: Tensor, width: int) -> Tensor:
        """Over all features (OLMo), or head by head with one weight for all heads (Qwen 3)."""
        with self.recomputed(module):
            num_parts = 1 if self.shape.traits.qk_norm == "full" else width // self.shape.head_dim
            return self.norm(x, self.num_tokens * num_parts, width // num_parts)

    def _rotated(
        self, query: Tensor, key: Tensor, q_width: int, kv_width: int
    ) -> tuple[Tensor, Tensor]:
        """RoPE; cosine and sine of every token are kept, once for both."""
        num_tokens = self.num_tokens
        b = FLOAT32 if self.shape.traits.in_float32 else self.c
        angles = [
            self.tape.run(num_tokens * self.shape.turned_dim * b, gradients=())
            for _ in ("sine", "cosine")
        ]
        rotated = []
        for given, width in ((query, q_width), (key, kv_width)):
            tensor = self.cast(given, num_tokens * width, b)
            near = self.tape.run(
                tensor.num_bytes, tensor, *angles, saved=angles[1:], gradients=[_whole(tensor)]
            )
            halves = self.tape.run(tensor.num_bytes, tensor)
            far = self.tape.run(halves.num_bytes, halves, saved=angles[:1])
            rotated.append(self.sum(near, far))
            self.tape.hold(tensor)
        self.tape.hold(query, key)
        query = self.cast(rotated[0], num_tokens * q_width, self.c)
        key = self.cast(rotated[1], num_tokens * kv_width, self.c)
        self.tape.hold(*rotated)
        return query, key

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, q_width: int) -> Tensor:
        """Queries, keys, values, output and a float32 a head and token are kept.

        One kernel makes all gradients; in float32 on CUDA each document is a call of its own."""
        num_tokens, run, whole = self.num_tokens, self.tape.run, [query, key, value]
        num_bytes = num_tokens * (q_width // self.shape.head_dim) * FLOAT32
        if self.workload.on_cuda and self.c == FLOAT32:
            parts = [run(0, tensor) for tensor in whole]
            gradients = [
                Gradient(of=part, num_bytes=of.num_bytes)
                for part, of in zip(parts, whole, strict=True)
            ]
            by_document = run(
                query.num_bytes + num_bytes,
                *parts,
                saved=whole,
                saves_output=True,
                gradients=gradients,
            )
            return run(
                query.num_bytes, by_document, gradients=[Gradient(of=by_document, num_bytes=None)]
            )
        if self.workload.on_cuda and self.workload.rows.prefix:
            num_keys = -(-self.workload.gathered_keys // self.degrees.context_degree)
            key, value = (
                run(tensor.num_bytes * num_keys // num_tokens, tensor) for tensor in (key, value)
            )
        weights = run(num_bytes, query, gradients=())
        scratch = {"kernel_bytes": self._scratch(key, q_width)}  # on CUDA
        if not self.workload.on_cuda:
            longest = min(1.0, self.workload.rows.length / num_tokens)
            scratch = {
                "scratch_bytes": parts_scratch(
                    sum(each.num_bytes for each in whole), self.c, longest
                )
            }
        gradients = [
            _whole(query),
            _whole(key),
            Gradient(of=value, num_bytes=value.num_bytes, **scratch),
        ]
        saved = (query, key, value, weights)
        return run(query.num_bytes, *saved[:3], saved=saved, saves_output=True, gradients=gradients)

    def _scratch(self, key: Tensor, q_width: int) -> int:
        dim, longest_document = self.shape.head_dim, min(self.num_tokens, self.workload.rows.length)
        kv_width = self.split(self.shape.kv_width)
        return attention_scratch(
            num_queries=self.num_tokens,
            num_keys=key.num_bytes // (kv_width * self.c),
            num_documents=-(-self.num_tokens // longest_document),
            heads=(q_width // dim, kv_width // dim),
            dim=dim,
        )


class _Head(_Piece):
    def record(self) -> Tensor:
        """Chunks of at most `MAX_LOGITS_BYTES` of logits, recomputed where there is more than
        one.
        """
        shape, workload, run, d_model = self.shape, self.workload, self.tape.run, self.shape.d_model
        hidden = normed = self.norm(self.tape.source, self.num_rows, d_model)
        num_positions = self.num_rows
        # Where tokens are split the head runs at every position.
        if is_whole := self.num_rows == self.num_tokens:
            num_positions = -(-workload.label_tokens_per_microbatch // self.degrees.context_degree)
            index = run(num_positions * 8, gradients=())
            saved = [normed, index]
            hidden = run(
                num_positions * d_model * self.c,
                normed,
                index,
                saved=saved,
                gradients=[_whole(normed)],
            )
        # See `ValueHead`.
        hidden = self.cast(hidden, num_positions * d_model, FLOAT32) if shape.scores else hidden
        all_chunks = logit_chunks(shape, num_positions)
        kind: Kind = "weight" if shape.scores else self.kind
        num_words = (
            shape.vocab_size if shape.is_tied and is_whole else self.split(shape.num_outputs)
        )
        weight = Tensor(num_words * d_model * self.c, kind=kind)
        num_kept = num_kept_chunks(
            shape, all_chunks, self.c if workload.on_cuda and is_whole else 0
        )
        # Of chunks that keep nothing any two will do; of those that do, the last, beside which all
        # others are kept.
        last_are_kept = num_kept == len(all_chunks)
        others = all_chunks[:-CHUNKS_RECORDED] if last_are_kept else all_chunks[:num_kept]
        run(0, hidden, saved=[Tensor(sum(others) * shape.num_outputs * self.c)], gradients=())
        chunks = all_chunks[-CHUNKS_RECORDED:] if last_are_kept else all_chunks[:CHUNKS_RECORDED]
        # A chunk is a view; the gradients of the chunks are laid end to end.
        views = [run(0, hidden, gradients=[Gradient(of=hidden, num_bytes=hidden.num_bytes)])] * len(
            chunks
        )
        losses = []
        for num_labels, view in zip(chunks, views, strict=True):
            gradients = [_whole(weight), Gradient(of=view, num_bytes=num_labels * d_model * self.c)]
            with self.tape.recomputed(len(all_chunks) > 1 and not last_are_kept):
                num_bytes = num_labels * shape.num_outputs * self.c
                product = run(num_bytes, view, hidden, weight, saved=[hidden], gradients=gradients)
                with self.tape.recomputed(len(all_chunks) > 1):
                    losses.append(self._losses(product, num_labels))
        return run(num_positions * FLOAT32, *losses)

    def _losses(self, product: Tensor, num_labels: int) -> Tensor:
        run, num_logits = self.tape.run, num_labels * self.shape.num_outputs
        logits = self.cast(product, num_logits, FLOAT32)
        if self.workload.temperature != 1.0:
            logits = run(logits.num_bytes, logits)
        logprobs = run(logits.num_bytes, logits, saves_output=True)
        losses = run(num_labels * FLOAT32, logprobs, saved=[logprobs])
        if self.workload.records_entropy:
            # The probabilities exist only within the operation.
            run(num_labels * FLOAT32, logprobs, scratch_bytes=logits.num_bytes, gradients=())
        self.tape.hold(product)  # the caller's
        return losses


def _whole(tensor: Tensor) -> Gradient:
    return Gradient(of=tensor, num_bytes=tensor.num_bytes)
