"""The memory of the last norm and the head, whose logits are computed in chunks.

Source: `models/heads/logprob_head.py` here, and `ValueHead` for scores.
"""

from collections.abc import Sequence

from open_instruct.planning.memory.autograd_sizes import Gradient, Kind, Tensor
from open_instruct.planning.memory.piece import FLOAT32, Piece, full_gradient
from open_instruct.planning.subject.model import ModelShape

# Those of `models.heads.logprob_head`, which cannot be imported without torch; a test holds them
# equal.
MAX_LOGITS_BYTES = 1 << 30
MAX_KEPT_BYTES = 2 << 30

# Chunks of the head are alike; from the second on the gradient of the matrix already exists.
CHUNKS_RECORDED = 2


def logit_chunks(shape: ModelShape, num_positions: int) -> tuple[int, ...]:
    """Positions in each chunk of the head; of several, backward recomputes the logits."""
    most = max(1, MAX_LOGITS_BYTES // (FLOAT32 * shape.num_outputs))
    num_whole, rest = divmod(num_positions, most)
    chunks = [most] * num_whole
    if rest > 0:
        chunks.append(rest)
    return tuple(chunks)


def num_kept_chunks(shape: ModelShape, chunks: Sequence[int], item_bytes: int) -> int:
    """The chunks, of several, whose product with the head's matrix is kept; none with 0 bytes."""
    if not item_bytes or len(chunks) < 2:
        return 0
    chunk_bytes = chunks[0] * shape.num_outputs * item_bytes
    return min(len(chunks), MAX_KEPT_BYTES // chunk_bytes)


class Head(Piece):
    """The last norm and the head: from the residual stream to the labels' log-probs."""

    def record(self) -> Tensor:
        """Record chunks of at most `MAX_LOGITS_BYTES` of logits, recomputed if there are more."""
        run = self.tape.run
        d_model = self.shape.d_model
        # Where tokens are split the head runs at every position.
        is_whole = self.num_rows == self.num_tokens
        hidden = self.norm(self.tape.source, self.num_rows, d_model)
        num_positions = self.num_rows
        if is_whole:
            num_labels = self.workload.label_tokens_per_microbatch
            num_positions = -(-num_labels // self.degrees.context_degree)
            hidden = self._select(hidden, num_positions)
        if self.shape.scores:  # see `ValueHead`
            hidden = self.cast(hidden, num_positions * d_model, FLOAT32)

        all_chunks = logit_chunks(self.shape, num_positions)
        num_kept = 0
        if self.workload.on_cuda and is_whole:
            num_kept = num_kept_chunks(self.shape, all_chunks, self.item_bytes)
        # Of chunks that keep nothing any two will do; of those that do, the last, beside which all
        # others are kept.
        last_are_kept = num_kept == len(all_chunks)
        if last_are_kept:
            other_chunks = all_chunks[:-CHUNKS_RECORDED]
            chunks = all_chunks[-CHUNKS_RECORDED:]
        else:
            other_chunks = all_chunks[:num_kept]
            chunks = all_chunks[:CHUNKS_RECORDED]
        logit_bytes = self.shape.num_outputs * self.item_bytes  # of one position
        kept_logits = Tensor(sum(other_chunks) * logit_bytes)
        run(0, hidden, saved=[kept_logits], gradients=())

        weight = self._weight(is_whole=is_whole)
        # A chunk is a view; the gradients of the chunks are laid end to end.
        view = run(0, hidden, gradients=[full_gradient(hidden)])
        has_several = len(all_chunks) > 1
        losses = []
        for num_labels in chunks:
            hidden_bytes = num_labels * d_model * self.item_bytes
            gradients = [
                full_gradient(weight),
                Gradient(tensor=view, num_bytes=hidden_bytes),
            ]
            with self.tape.recompute(has_several and not last_are_kept):
                product = run(
                    num_labels * logit_bytes,
                    view,
                    hidden,
                    weight,
                    saved=[hidden],
                    gradients=gradients,
                )
                with self.tape.recompute(has_several):
                    chunk_losses = self._losses(product, num_labels)
                losses.append(chunk_losses)
        return run(num_positions * FLOAT32, *losses)

    def _select(self, normed: Tensor, num_positions: int) -> Tensor:
        """The hidden states at the positions of labels."""
        index = self.index(num_positions)
        return self.tape.run(
            num_positions * self.shape.d_model * self.item_bytes,
            normed,
            index,
            saved=[normed, index],
            gradients=[full_gradient(normed)],
        )

    def _weight(self, *, is_whole: bool) -> Tensor:
        """The head's matrix; one that is tied to the embeddings is not split."""
        kind: Kind = "weight" if self.shape.scores else self.kind
        num_outputs = self.split(self.shape.num_outputs)
        if self.shape.is_tied and is_whole:
            num_outputs = self.shape.vocab_size
        return Tensor(num_outputs * self.shape.d_model * self.item_bytes, kind=kind)

    def _losses(self, product: Tensor, num_labels: int) -> Tensor:
        run = self.tape.run
        num_logits = num_labels * self.shape.num_outputs
        logits = self.cast(product, num_logits, FLOAT32)
        if self.workload.temperature != 1.0:
            logits = self.copy(logits)
        logprobs = run(logits.num_bytes, logits, saves_output=True)
        losses = run(num_labels * FLOAT32, logprobs, saved=[logprobs])
        if self.workload.records_entropy:
            # The probabilities exist only within the operation.
            run(num_labels * FLOAT32, logprobs, scratch_bytes=logits.num_bytes, gradients=())
        self.tape.hold(product)  # the caller's
        return losses
