"""What it saves to compute a shared prompt once: forward and backward of the same rows padded, packed, and shared.

    python benchmarks/prefix_sharing.py
    python benchmarks/prefix_sharing.py --size mini [--rows PAIRS.jsonl] [--prompts PROMPTS.jsonl]
    python benchmarks/prefix_sharing.py --device cuda --size olmo2-1b --scale 4

Made-up pairs whose prompt is as long as a reply (goal: 1.3 times the tokens of rows a second of packing), made-up
groups of 8 completions whose prompt is 4 times as long (goal: 0.7 of what the tokens that are left allow,
(G P + G R) / (P + G R)), and pairs of which nothing can be shared (goal: no more than 3% lost). --rows adds real
preference pairs, and --prompts problems behind 8 solved ones, each with the solutions of 8 other problems in place of
completions. Activations are what the forward pass keeps for the backward pass. --profile also says what the time of
packed and of shared rows goes into. The exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.data.chat import ChatFormat
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.token_dataset import load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.families import FAMILIES
from open_instruct.learner.model.forward import token_logprobs
from open_instruct.models.build import build_model
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.packing.documents import pack_documents, pad_documents
from open_instruct.packing.prefixes import groups_that_share
from open_instruct.records import Document, PackedBatch, Span
from open_instruct.toys.tiny import SIZES, write_tiny_model

PAIRS_GOAL, GROUPS_GOAL, NOTHING_GOAL = 1.3, 0.7, 0.97
GROUP = 8
KINDS: dict[str, tuple[str, ...]] = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "gemm"),
    "attention": ("_attention", "flash"),
    "gathering and scattering": ("index_select", "index_copy", "index_add", "aten::cat", "split", "stack"),
    "other": (),
}
NUM_SHOTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Documents of one microbatch, which of them may share, and the ratio of shared to packed that is wanted."""

    name: str
    documents: list[Document]
    groups: list[tuple[int, ...]]
    goal: float | None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.documents))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--family", choices=FAMILIES, default="olmo2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num_threads", type=int, default=1)
    parser.add_argument("--scale", type=int, default=1, help="times the length of the made-up rows")
    parser.add_argument("--rows", type=Path, help="real preference pairs")
    parser.add_argument("--prompts", type=Path, help="problems with the fields 'messages' and 'solution'")
    parser.add_argument("--num_rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    device = torch.device(args.device)

    with tempfile.TemporaryDirectory(prefix="prefix_sharing_") as name:
        folder = Path(name)
        checkpoint = write_tiny_model(folder / "model", family=args.family, size=args.size)
        model = random_model(checkpoint, device)
        cases = [
            made_up_pairs(args.scale, with_prompt=True),
            made_up_groups(args.scale),
            made_up_pairs(args.scale, with_prompt=False),
        ]
        if args.rows is not None:
            cases.append(real_pairs(args.rows, checkpoint, folder))
        if args.prompts is not None:
            cases.append(real_groups(args.prompts, checkpoint))
        missed = []
        for case in cases:
            batches = layouts(case)
            if not compare(model, case, batches, num_rounds=args.num_rounds, device=device):
                missed.append(case.name)
            if args.profile:
                print_profile(model, batches, device)
    for case_name in missed:
        print(f"missed: {case_name}")
    return int(bool(missed))


def layouts(rows: Rows) -> dict[str, PackedBatch]:
    return {
        "padded": pad_documents(rows.documents, pad_token_id=0),
        "packed": pack_documents(rows.documents),
        "shared": pack_documents(rows.documents, groups=groups_that_share(rows.documents, rows.groups, "auto")),
    }


def compare(
    model: Transformer, rows: Rows, batches: dict[str, PackedBatch], *, num_rounds: int, device: torch.device
) -> bool:
    """Time the three layouts in turns and print them; whether the goal was met."""
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for number in range(num_rounds + 1):
        for name, batch in batches.items():
            elapsed = timed(lambda batch=batch: forward_backward(model, batch, device), device)
            if number > 0:  # the first warms up
                seconds[name].append(elapsed)
    best = {name: statistics.median(times) for name, times in seconds.items()}
    print(f"\n{rows.name}: {len(rows.documents)} documents, {rows.num_tokens:,} tokens", flush=True)
    for name, batch in batches.items():
        rate, computed = rows.num_tokens / best[name], batch.input_ids_BT.numel()
        memory = activation_bytes(model, batch, device)
        print(
            f"  {name}  {rate:9,.0f} tokens of rows/s  {best['packed'] / best[name]:5.2f}x packed"
            f"  {best['padded'] / best[name]:5.2f}x padded  {computed:7,} positions  {memory / 2**20:8,.1f} MiB kept"
        )
    ratio = statistics.median(p / s for p, s in zip(seconds["packed"], seconds["shared"], strict=True))
    bound = batches["packed"].num_tokens / batches["shared"].num_tokens
    told = f"  shared over packed: {ratio:.2f}x; {bound:.2f}x fewer positions, so {ratio / bound:.2f} of that bound"
    print(told if rows.goal is None else f"{told} (goal {rows.goal:.2f}x)")
    return rows.goal is None or ratio >= rows.goal


def made_up_pairs(scale: int, *, with_prompt: bool) -> Rows:
    """Prompt and replies of equal length; without a common prompt, each conversation has its own."""
    rng, length = random.Random(0), 192 * scale
    documents: list[Document] = []
    for _ in range(4):
        prompt = tokens(length, rng)
        documents += [document(prompt if with_prompt else tokens(length, rng), tokens(length, rng)) for _ in range(2)]
    return Rows(
        name="pairs, prompt as long as a reply" if with_prompt else "pairs that share nothing",
        documents=documents,
        groups=[(i, i + 1) for i in range(0, len(documents), 2)],
        goal=PAIRS_GOAL if with_prompt else NOTHING_GOAL,
    )


def made_up_groups(scale: int) -> Rows:
    """Groups of 8 completions; the prompt is 4 times as long as each."""
    rng, length = random.Random(0), 96 * scale
    documents: list[Document] = []
    for _ in range(1):
        prompt = tokens(4 * length, rng)
        documents += [document(prompt, tokens(length, rng)) for _ in range(GROUP)]
    bound = (GROUP * 4 + GROUP) / (4 + GROUP)
    return Rows(
        name=f"groups of {GROUP}, prompt 4 times a completion",
        documents=documents,
        groups=[tuple(range(i, i + GROUP)) for i in range(0, len(documents), GROUP)],
        goal=GROUPS_GOAL * bound,
    )


def real_pairs(file: Path, checkpoint: Path, folder: Path) -> Rows:
    pairs, _ = load_token_dataset(
        PreferenceBuilder,
        mixer_list=[str(file), "8"],
        splits=["train"],
        chat=ChatFormat.choose(load_tokenizer(str(checkpoint)), None),
        on_bad_row="error",
        max_seq_length=1024,
        seed=0,
        cache_dir=folder / "cache",
    )
    documents = [each for pair in pairs for each in pair]
    groups = [(i, i + 1) for i in range(0, len(documents), 2)]
    return Rows(name=f"real pairs of {file.name}", documents=documents, groups=groups, goal=None)


def real_groups(file: Path, checkpoint: Path) -> Rows:
    """A problem behind 8 solved ones, with 8 solutions of other problems for their lengths."""
    problems = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()[: NUM_SHOTS + 1 + GROUP]]
    encode = load_tokenizer(str(checkpoint)).encode
    shots = "\n\n".join(f"{p['messages'][0]['content']}\n{p['solution']}" for p in problems[:NUM_SHOTS])
    documents, groups = [], []
    for problem in problems[NUM_SHOTS : NUM_SHOTS + 1]:
        prompt = tuple(encode(f"{shots}\n\n{problem['messages'][0]['content']}\n"))
        groups.append(tuple(range(len(documents), len(documents) + GROUP)))
        documents += [document(prompt, tuple(encode(p["solution"]))) for p in problems[-GROUP:]]
    name = f"groups of {GROUP} with {NUM_SHOTS} shots of {file.name}"
    return Rows(name=name, documents=documents, groups=groups, goal=None)


def document(prompt: Sequence[int], reply: Sequence[int]) -> Document:
    return Document(token_ids=(*prompt, *reply), responses=(Span(start=len(prompt), stop=len(prompt) + len(reply)),))


def tokens(count: int, rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.randrange(500) for _ in range(count))


def random_model(checkpoint: Path, device: torch.device) -> Transformer:
    model = build_model(load_hf_config(str(checkpoint)))
    model.init_weights(device=device)
    for name, parameter in model.named_parameters():
        torch.nn.init.ones_(parameter) if "norm" in name else torch.nn.init.normal_(parameter, std=0.02)
    return model.to(torch.bfloat16) if device.type == "cuda" else model


def forward_backward(model: Transformer, batch: PackedBatch, device: torch.device) -> None:
    model.zero_grad(set_to_none=True)
    token_logprobs(model, batch, device=device).logprobs_N.sum().backward()


def print_profile(model: Transformer, batches: dict[str, PackedBatch], device: torch.device) -> None:
    """Shares of the time by kind of operation."""
    for name in ("packed", "shared"):
        forward_backward(model, batches[name], device)  # the first touch of the memory would count as work
        with torch.profiler.profile() as profiler:
            forward_backward(model, batches[name], device)
        seconds = dict.fromkeys(KINDS, 0.0)
        for event in profiler.key_averages():
            kind = next((kind for kind, parts in KINDS.items() if any(part in event.key for part in parts)), "other")
            seconds[kind] += event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        shares = ", ".join(f"{kind} {value / sum(seconds.values()):.0%}" for kind, value in seconds.items())
        print(f"  time of {name}: {shares}")


def timed(call: Callable[[], Any], device: torch.device) -> float:
    """Seconds on a GPU; on a CPU the process's own, which other work on the machine disturbs less."""
    clock = time.perf_counter if device.type == "cuda" else time.process_time
    began_s = clock()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - began_s


def activation_bytes(model: Transformer, batch: PackedBatch, device: torch.device) -> int:
    """Bytes of the storages that the forward pass keeps for the backward pass, the parameters' own left out."""
    of_parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in of_parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        total = token_logprobs(model, batch, device=device).logprobs_N.sum()
    num_bytes = sum(storage.nbytes() for storage in kept.values())
    del total
    return num_bytes


if __name__ == "__main__":
    sys.exit(main())
