"""What a CPU computes in its own way beside PyTorch's: attention of long documents, and products of linear layers.

Forward and backward in float32 with one thread. Each number is the least processor time of some rounds, in which all
take turns, so other work on the machine disturbs it little; what is taken in a run is marked with a star.

    OMP_NUM_THREADS=1 python benchmarks/cpu_kernels.py [--rounds 30]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from harness.program import parser_of
from harness.rounds import in_turns

from open_instruct.models.attention import blocks
from open_instruct.models.attention.attention import attend_by_document
from open_instruct.models.attention.segments import QKV, Segments, documents_of
from open_instruct.models.attention.shared_attention import attend_in_tiles
from open_instruct.models.on_cpu import products

CPU = torch.device("cpu")
# Heads, key-value heads, features of a head; documents and their length; a prompt, and the replies that share it.
HEADS = ((6, 2, 32), (8, 4, 64))
DOCUMENTS = ((8, 256), (4, 320), (4, 384), (4, 512), (2, 1024), (1, 2048))
GROUPS = ((200, 312, 2), (400, 32, 8))
# Tokens; and (inputs, outputs) of a layer.
TOKENS, LAYERS = (512, 1024, 2048, 4096), ((192, 192), (192, 64), (192, 512), (512, 192), (192, 2048))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for heads in HEADS:
        for count, length in DOCUMENTS:
            name = f"{heads}, documents of {length} tokens: {count}"
            compare_attention(name, heads, (length,) * count, (0,) * count, rounds=rounds)
        for prompt, reply, replies in GROUPS:
            lengths, prefixes = (prompt, *[reply] * replies), (0, *[prompt] * replies)
            name = f"{heads}, {replies} replies of {reply} tokens to {prompt}"
            compare_attention(name, heads, lengths, prefixes, rounds=rounds)
    for num_tokens in TOKENS:
        for sizes in LAYERS:
            compare_products(num_tokens, *sizes, rounds=rounds)


def compare_attention(
    name: str, heads: tuple[int, int, int], lengths: Sequence[int], prefixes: Sequence[int], *, rounds: int
) -> None:
    segments = Segments.of(tuple(lengths), tuple(prefixes), device=CPU)
    documents = documents_of(segments.lengths, segments.prefix_lengths)
    query, key, value = (
        torch.randn(sum(lengths), n, heads[2], requires_grad=True) for n in (heads[0], *heads[1:2] * 2)
    )
    qkv = QKV(query, key, value)

    def flash() -> torch.Tensor:
        return attend_in_tiles(qkv, segments) if any(prefixes) else attend_by_document(qkv, list(lengths))

    ways = {"flash": flash, "blocks": lambda: blocks.attend_in_blocks(qkv, documents)}
    report(name, ways, [query, key, value], rounds=rounds, is_taken=blocks.pays(query, documents, -1))


def compare_products(num_tokens: int, num_in: int, num_out: int, *, rounds: int) -> None:
    x = torch.randn(num_tokens, num_in, requires_grad=True)
    weight = torch.randn(num_out, num_in, requires_grad=True)
    ways = {"MKL": lambda: F.linear(x, weight), "oneDNN": lambda: products.by_onednn(x, weight)}
    is_taken = products.pays(x, weight)
    report(f"{num_tokens} tokens, {num_in} to {num_out}", ways, [x, weight], rounds=rounds, is_taken=is_taken)


def report(
    name: str,
    ways: dict[str, Callable[[], torch.Tensor]],
    inputs: list[torch.Tensor],
    *,
    rounds: int,
    is_taken: bool,
) -> None:
    def timed(function: Callable[[], torch.Tensor]) -> Callable[[int], float]:
        def seconds(_: int) -> float:
            began_s = time.thread_time()
            output = function()
            torch.autograd.grad(output, inputs, torch.ones_like(output))
            return time.thread_time() - began_s

        return seconds

    turns = in_turns({way: timed(function) for way, function in ways.items()}, num_rounds=rounds)
    least_s = {way: min(seconds) for way, seconds in turns.items()}
    theirs, ours = least_s
    print(
        f"{name:48} {theirs} {1e3 * least_s[theirs]:7.2f} ms   {ours} {1e3 * least_s[ours]:7.2f} ms   "
        f"{least_s[theirs] / least_s[ours]:.2f}x {'*' if is_taken else ''}",
        flush=True,
    )


if __name__ == "__main__":
    main()
