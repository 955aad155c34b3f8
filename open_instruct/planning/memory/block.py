"""The memory of one block, operation by operation.

Sources, in OLMo-core 3.0 and PyTorch 2.13: `TransformerBlock` and `ReorderedNormTransformerBlock`,
`Attention`, `RotaryEmbedding` and `FeedForward` for the operations; `derivatives.yaml` of PyTorch
for what each saves; `models/attention/attention.py` here for attention.

RoPE computes in float32 for OLMo, whatever dtype the rest uses.

Documents are taken to be of different lengths. A window changes the time that attention takes, not
what it keeps: true of the kernels on CUDA, while on a CPU a document longer than the window is
copied in pieces, which is not counted. Tensor parallelism splits heads, features and vocabulary,
and the positions of a row between matrices. Compiled blocks fuse what stands between matrices; they
are counted as uncompiled ones, which is an upper bound.

Where adapters are trained, the input of the first block needs no gradient; the block is counted
like the others, an upper bound too.
"""

from collections.abc import Callable

from open_instruct.planning.memory.autograd_sizes import Gradient, Tensor
from open_instruct.planning.memory.delta_layer import record_delta_rule
from open_instruct.planning.memory.experts import record_experts
from open_instruct.planning.memory.piece import FLOAT32, Piece, PieceSplit, full_gradient
from open_instruct.planning.memory.scratch import attention_scratch, parts_scratch
from open_instruct.planning.subject.model import LayerShape, ModelShape
from open_instruct.planning.subject.workload import Workload

# Modules that can be checkpointed by themselves; "" is the block. A residual sum keeps nothing in
# any case.
BLOCK_MODULES = (
    "",
    "attention",
    "attention.q_norm",
    "attention.k_norm",
    "attention_norm",
    "attention_residual_stream",
    "feed_forward",
    "feed_forward_norm",
    "feed_forward_residual_stream",
)


class Block(Piece):
    """One block: from the residual stream to itself."""

    def __init__(
        self,
        layer: LayerShape,
        shape: ModelShape,
        degrees: PieceSplit,
        workload: Workload,
        splits_rows: bool,
    ) -> None:
        super().__init__(shape, degrees, workload, splits_rows)
        self.layer = layer

    def record(self) -> Tensor:
        """Record both sublayers with their residual sums."""
        x = self.tape.source
        with self.recompute(""):
            attended = self._sublayer("attention_norm", self._attention, x)
            h = self.sum(x, attended)
            mapped = self._sublayer("feed_forward_norm", self._feed_forward, h)
            output = self.sum(h, mapped)
            self.tape.hold(h)
        return output

    def _sublayer(self, norm: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A sublayer with its norm: OLMo normalises the output, other families the input."""
        if self.shape.traits.norm_after and self.layer.delta is None:
            return self._norm_stream(norm, run(x))
        return run(self._norm_stream(norm, x))

    def _norm_stream(self, module: str, x: Tensor) -> Tensor:
        with self.recompute(module):
            return self.norm(x, self.num_rows, self.shape.d_model)

    def _feed_forward(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        width = self.split(self.layer.d_ff)
        with self.recompute("feed_forward"):
            if self.layer.num_experts:
                num_experts = self.layer.num_experts
                return record_experts(self, x, num_experts=num_experts, width=width)
            # All tokens, where tensor ranks hold a part each between matrices; of their sum this
            # rank's part.
            x = self.cast(x, self.num_tokens * d_model, self.item_bytes)
            gate = self.linear("feed_forward.w1", x, d_model, width)
            active = self.copy(gate, gate)
            up = self.linear("feed_forward.w3", x, d_model, width)
            product = self.multiply(active, up)
            output = self.linear("feed_forward.w2", product, width, d_model)
            self.tape.hold(x)
            return self.cast(output, self.num_rows * d_model, self.item_bytes)

    def _attention(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        q_width = self.split(self.shape.q_width)
        kv_width = self.split(self.shape.kv_width)
        with self.recompute("attention"):
            if self.layer.delta is not None:
                return record_delta_rule(self, self.layer.delta, x)
            x = self.cast(x, self.num_tokens * d_model, self.item_bytes)
            is_gated = self.shape.traits.gates_attention
            num_halves = 2 if is_gated else 1
            query = self.linear("attention.w_q", x, d_model, num_halves * q_width)
            gate = query
            if is_gated:
                query = self.tape.run(0, gate)  # both halves are views
            key = self.linear("attention.w_k", x, d_model, kv_width)
            value = self.linear("attention.w_v", x, d_model, kv_width)
            if self.shape.traits.qk_norm != "none":
                query = self._qk_norm("attention.q_norm", query, q_width)
                key = self._qk_norm("attention.k_norm", key, kv_width)
            if self.shape.turned_dim:
                query, key = self._rotate(query, key, q_width, kv_width)
            attended = self._attend(query, key, value, q_width)
            self.tape.hold(x, query, key, value)
            if is_gated:
                open_gate = self.tape.run(attended.num_bytes, gate, saves_output=True)
                attended = self.multiply(attended, open_gate)
            output = self.linear("attention.w_out", attended, q_width, d_model)
            return self.cast(output, self.num_rows * d_model, self.item_bytes)

    def _qk_norm(self, module: str, x: Tensor, width: int) -> Tensor:
        """Over all features (OLMo), or head by head with one weight for all heads (Qwen 3)."""
        num_parts = 1
        if self.shape.traits.qk_norm != "full":
            num_parts = width // self.shape.head_dim
        with self.recompute(module):
            return self.norm(x, self.num_tokens * num_parts, width // num_parts)

    def _rotate(
        self,
        query: Tensor,
        key: Tensor,
        q_width: int,
        kv_width: int,
    ) -> tuple[Tensor, Tensor]:
        """RoPE; cosine and sine of every token are kept, once for both."""
        num_tokens = self.num_tokens
        item_bytes = self.item_bytes
        if self.shape.traits.in_float32:
            item_bytes = FLOAT32
        angle_bytes = num_tokens * self.shape.turned_dim * item_bytes
        sine = self.tape.run(angle_bytes, gradients=())
        cosine = self.tape.run(angle_bytes, gradients=())

        def rotate(heads: Tensor, width: int) -> Tensor:
            tensor = self.cast(heads, num_tokens * width, item_bytes)
            near = self.tape.run(
                tensor.num_bytes,
                tensor,
                sine,
                cosine,
                saved=[cosine],
                gradients=[full_gradient(tensor)],
            )
            halves_swapped = self.copy(tensor)
            far = self.copy(halves_swapped, sine)
            turned = self.sum(near, far)
            self.tape.hold(tensor)
            return turned

        turned_query = rotate(query, q_width)
        turned_key = rotate(key, kv_width)
        self.tape.hold(query, key)
        query = self.cast(turned_query, num_tokens * q_width, self.item_bytes)
        key = self.cast(turned_key, num_tokens * kv_width, self.item_bytes)
        self.tape.hold(turned_query, turned_key)
        return query, key

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        q_width: int,
    ) -> Tensor:
        """Queries, keys, values, output and a float32 a head and token are kept.

        One kernel makes all gradients; in float32 on CUDA each document is a call of its own.
        """
        run = self.tape.run
        num_heads = q_width // self.shape.head_dim
        statistics_bytes = self.num_tokens * num_heads * FLOAT32
        if self.workload.on_cuda and self.item_bytes == FLOAT32:
            return self._attend_by_document(query, key, value, statistics_bytes)
        input_bytes = query.num_bytes + key.num_bytes + value.num_bytes
        if self.workload.on_cuda and self.workload.rows.prefix:
            key = self._gather_prefixes(key)
            value = self._gather_prefixes(value)
        statistics = run(statistics_bytes, query, gradients=())
        scratch_bytes = 0
        kernel_bytes = 0
        if self.workload.on_cuda:
            kernel_bytes = self._kernel_scratch(key, q_width)
        else:
            share_of_longest = min(1.0, self.workload.rows.length / self.num_tokens)
            scratch_bytes = parts_scratch(input_bytes, self.item_bytes, share_of_longest)
        inputs = [query, key, value]
        value_gradient = Gradient(
            tensor=value,
            num_bytes=value.num_bytes,
            scratch_bytes=scratch_bytes,
            kernel_bytes=kernel_bytes,
        )
        return run(
            query.num_bytes,
            *inputs,
            saved=[*inputs, statistics],
            saves_output=True,
            gradients=[full_gradient(query), full_gradient(key), value_gradient],
        )

    def _attend_by_document(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        statistics_bytes: int,
    ) -> Tensor:
        """Attention in float32 on CUDA, whose calls read views and write into one output."""
        run = self.tape.run
        inputs = [query, key, value]
        views = [run(0, tensor) for tensor in inputs]
        gradients = []
        for view, tensor in zip(views, inputs, strict=True):
            gradients.append(Gradient(tensor=view, num_bytes=tensor.num_bytes))
        by_document = run(
            query.num_bytes + statistics_bytes,
            *views,
            saved=inputs,
            saves_output=True,
            gradients=gradients,
        )
        passed_on = Gradient(tensor=by_document, num_bytes=None)
        return run(query.num_bytes, by_document, gradients=[passed_on])

    def _gather_prefixes(self, keys: Tensor) -> Tensor:
        """Keys or values with those of shared prefixes before each document of their group."""
        num_keys = -(-self.workload.gathered_keys // self.degrees.context_degree)
        return self.tape.run(keys.num_bytes * num_keys // self.num_tokens, keys)

    def _kernel_scratch(self, key: Tensor, q_width: int) -> int:
        dim = self.shape.head_dim
        kv_width = self.split(self.shape.kv_width)
        document_tokens = min(self.num_tokens, self.workload.rows.length)
        return attention_scratch(
            num_queries=self.num_tokens,
            num_keys=key.num_bytes // (kv_width * self.item_bytes),
            num_documents=-(-self.num_tokens // document_tokens),
            heads=(q_width // dim, kv_width // dim),
            dim=dim,
        )
