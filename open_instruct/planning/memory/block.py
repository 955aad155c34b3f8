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
from math import prod

from open_instruct.models.delta_rule.shape import CHUNK, DeltaShape
from open_instruct.planning.memory.autograd_sizes import Gradient, Tensor
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
        with self.recomputed(""):
            h = self.sum(x, self._sublayer("attention_norm", self._attention, x))
            output = self.sum(h, self._sublayer("feed_forward_norm", self._feed_forward, h))
            self.tape.hold(h)
        return output

    def _sublayer(self, norm: str, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A sublayer with its norm: OLMo normalises the output, other families the input."""
        if self.shape.traits.norm_after and self.layer.delta is None:
            return self._norm_stream(norm, run(x))
        return run(self._norm_stream(norm, x))

    def _norm_stream(self, module: str, x: Tensor) -> Tensor:
        with self.recomputed(module):
            return self.norm(x, self.num_rows, self.shape.d_model)

    def _feed_forward(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        width = self.split(self.layer.d_ff)
        with self.recomputed("feed_forward"):
            if self.layer.num_experts:
                return self._experts(x, width)
            # All tokens, where tensor ranks hold a part each between matrices; of their sum this
            # rank's part.
            x = self.cast(x, self.num_tokens * d_model, self.item_bytes)
            gate = self.linear("feed_forward.w1", x, d_model, width)
            active = self.copy(gate, gate)
            up = self.linear("feed_forward.w3", x, d_model, width)
            product = self._multiply(active, up)
            output = self.linear("feed_forward.w2", product, width, d_model)
            self.tape.hold(x)
            return self.cast(output, self.num_rows * d_model, self.item_bytes)

    def _multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """An elementwise product, which keeps both factors."""
        return self.tape.run(left.num_bytes, left, right, saved=[left, right])

    def _experts(self, x: Tensor, width: int) -> Tensor:
        """`models/experts/routed.py`: tokens, each as often as it has experts, sorted by these."""
        run = self.tape.run
        item_bytes = self.item_bytes
        d_model = self.shape.d_model
        num_tokens = self.num_tokens
        num_local = self.layer.num_experts // self.degrees.expert_degree
        is_split = self.degrees.expert_degree > 1
        num_pairs = num_tokens * self.shape.experts_per_token

        logits, weights = self._route(x, num_pairs)
        sorted_by, order, back = (self.index(num_pairs) for _ in range(3))
        repeated = run(num_pairs * d_model * item_bytes, x, gradients=[full_gradient(x)])
        sent = self.copy(repeated, order)
        received = sent
        if is_split:  # rows arrive, as many as were sent, and are put in another order
            order_there, back_there = (self.index(num_pairs) for _ in range(2))
            arrived = self.copy(sent)
            received = self.copy(arrived, order_there)

        def multiply_experts(rows: Tensor, num_inputs: int, num_outputs: int) -> Tensor:
            return self.product(
                rows,
                num_inputs,
                num_outputs,
                self.kind,
                num_matrices=num_local,
                num_rows=num_pairs,
            )

        gate = multiply_experts(received, d_model, width)
        up = multiply_experts(received, d_model, width)
        active = self.copy(gate, gate)
        product = self._multiply(active, up)
        self.tape.hold(gate, up)
        by_expert = multiply_experts(product, width, d_model)
        if is_split:
            self.tape.hold(received)
            by_expert = self.copy(self.copy(by_expert, back_there))
            self.tape.hold(arrived)
        by_token = self.copy(by_expert, back)
        self.tape.hold(x, sent, by_expert, sorted_by, logits)
        factors = [weights, by_token]
        gradients = [full_gradient(each) for each in factors]
        return run(num_tokens * d_model * item_bytes, *factors, saved=factors, gradients=gradients)

    def _route(self, x: Tensor, num_pairs: int) -> tuple[Tensor, Tensor]:
        """The router's logits, and the weight of each pair of a token and its expert."""
        run = self.tape.run
        num_experts = self.layer.num_experts
        num_logits = self.num_tokens * num_experts
        logits = self.product(x, self.shape.d_model, num_experts, self.kind)
        probs = run(num_logits * FLOAT32, self.cast(logits, num_logits, FLOAT32), saves_output=True)
        chosen = self.index(num_pairs)
        weights = run(num_pairs * FLOAT32, probs, saved=[chosen], gradients=[full_gradient(probs)])
        return logits, self.cast(self.copy(weights, weights), num_pairs, self.item_bytes)

    def _attention(self, x: Tensor) -> Tensor:
        d_model = self.shape.d_model
        q_width = self.split(self.shape.q_width)
        kv_width = self.split(self.shape.kv_width)
        with self.recomputed("attention"):
            if self.layer.delta is not None:
                return self._delta_rule(self.layer.delta, x)
            x = self.cast(x, self.num_tokens * d_model, self.item_bytes)
            is_gated = self.shape.traits.gates_attention
            num_halves = 2 if is_gated else 1
            gate = self.linear("attention.w_q", x, d_model, num_halves * q_width)
            query = gate
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
                attended = self._multiply(attended, open_gate)
            output = self.linear("attention.w_out", attended, q_width, d_model)
            return self.cast(output, self.num_rows * d_model, self.item_bytes)

    def _delta_rule(self, delta: DeltaShape, x: Tensor) -> Tensor:
        """A layer of the gated delta rule (`models/delta_rule/`): its matrices, the rest as one.

        Its numbers are those of plain PyTorch. On CUDA the kernel keeps less, and is counted as
        this.
        """
        d_model = self.shape.d_model
        item_bytes = self.item_bytes
        num_tokens = self.num_tokens
        sizes = {
            name.removesuffix(".weight"): size for name, size in delta.tensors(d_model).items()
        }
        matrices = {name: size for name, size in sizes.items() if len(size) == 2}
        output, (_, width) = matrices.popitem()
        x = self.cast(x, num_tokens * d_model, item_bytes)
        inputs = [
            self.linear(f"attention.{name}", x, d_model, self.split(size[0]))
            for name, size in matrices.items()
        ]
        if self.kind == "weight":
            num_small = sum(prod(size) for size in sizes.values() if len(size) != 2)
            inputs.append(Tensor(self.split(num_small) * item_bytes, kind="weight"))

        kept_bytes, alone_bytes, beside_bytes, backward_bytes = self._delta_chunk_bytes(delta)
        # Convolutions keep what they are given and put out; the norm what it is given, its gate,
        # and more in float32.
        values_bytes = 2 * item_bytes * (sum(delta.widths) + width) + 3 * FLOAT32 * width
        kept_bytes += self.split(num_tokens * values_bytes)
        gradients = [
            Gradient(of=each, num_bytes=each.num_bytes, scratch_bytes=backward_bytes)
            for each in inputs
        ]
        width = self.split(width)
        gated = self.tape.run(
            num_tokens * width * item_bytes,
            *inputs,
            saved=[Tensor(kept_bytes)],
            gradients=gradients,
            scratch_bytes=alone_bytes,
        )
        self.tape.run(0, gated, gradients=(), scratch_bytes=beside_bytes)
        self.tape.hold(x)
        stream = self.linear(f"attention.{output}", gated, width, d_model)
        return self.cast(stream, self.num_rows * d_model, item_bytes)

    def _delta_chunk_bytes(self, delta: DeltaShape) -> tuple[int, int, int, int]:
        """Bytes of all chunks of a rank: kept, scratch alone and beside the output, backward.

        The last chunk of a document is half full, on average. A context rank walks whole rows for
        its heads.
        """
        row_tokens = self.workload.tokens_per_microbatch
        document_tokens = min(row_tokens, self.workload.rows.length)
        num_chunks = -(-row_tokens // CHUNK) + -(-row_tokens // document_tokens) // 2
        degree = self.degrees.tensor_degree * self.degrees.context_degree
        kept, alone, beside, backward = (
            FLOAT32 * num_chunks * number // degree for number in delta.chunk_value_counts
        )
        return kept, alone, beside, backward

    def _qk_norm(self, module: str, x: Tensor, width: int) -> Tensor:
        """Over all features (OLMo), or head by head with one weight for all heads (Qwen 3)."""
        num_parts = 1
        if self.shape.traits.qk_norm != "full":
            num_parts = width // self.shape.head_dim
        with self.recomputed(module):
            return self.norm(x, self.num_tokens * num_parts, width // num_parts)

    def _rotate(
        self, query: Tensor, key: Tensor, q_width: int, kv_width: int
    ) -> tuple[Tensor, Tensor]:
        """RoPE; cosine and sine of every token are kept, once for both."""
        num_tokens = self.num_tokens
        item_bytes = self.item_bytes
        if self.shape.traits.in_float32:
            item_bytes = FLOAT32
        angle_bytes = num_tokens * self.shape.turned_dim * item_bytes
        sine, cosine = (self.tape.run(angle_bytes, gradients=()) for _ in range(2))

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
            far = self.copy(self.copy(tensor), sine)
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

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, q_width: int) -> Tensor:
        """Queries, keys, values, output and a float32 a head and token are kept.

        One kernel makes all gradients; in float32 on CUDA each document is a call of its own.
        """
        run = self.tape.run
        statistics_bytes = self.num_tokens * (q_width // self.shape.head_dim) * FLOAT32
        if self.workload.on_cuda and self.item_bytes == FLOAT32:
            return self._attend_by_document(query, key, value, statistics_bytes)
        num_input_bytes = query.num_bytes + key.num_bytes + value.num_bytes
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
            scratch_bytes = parts_scratch(num_input_bytes, self.item_bytes, share_of_longest)
        value_gradient = Gradient(
            of=value,
            num_bytes=value.num_bytes,
            scratch_bytes=scratch_bytes,
            kernel_bytes=kernel_bytes,
        )
        return run(
            query.num_bytes,
            query,
            key,
            value,
            saved=[query, key, value, statistics],
            saves_output=True,
            gradients=[full_gradient(query), full_gradient(key), value_gradient],
        )

    def _attend_by_document(
        self, query: Tensor, key: Tensor, value: Tensor, statistics_bytes: int
    ) -> Tensor:
        """Attention in float32 on CUDA, whose calls read views and write into one output."""
        run = self.tape.run
        inputs = [query, key, value]
        views = [run(0, tensor) for tensor in inputs]
        gradients = [
            Gradient(of=view, num_bytes=tensor.num_bytes)
            for view, tensor in zip(views, inputs, strict=True)
        ]
        by_document = run(
            query.num_bytes + statistics_bytes,
            *views,
            saved=inputs,
            saves_output=True,
            gradients=gradients,
        )
        passed_on = Gradient(of=by_document, num_bytes=None)
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
