"""Tokens a second, model FLOPs utilisation and peak memory of packed DPO on one device, with the shape of OLMo 2 1B.

    python benchmarks/dpo_throughput.py                                       # one GPU, bfloat16
    python benchmarks/dpo_throughput.py --size mini --peak_tflops 0.1         # a CPU, to see that it runs

FLOPs of a token, forward and backward: 6 for each weight of the blocks; 6 for each weight of the head where there
is a label; and for attention 12 x layers x width for each earlier token of its conversation, of which a
conversation of L tokens has L/2 on average (Chowdhery et al. 2022, PaLM, appendix B, with causality counted).
What activation checkpointing computes again does not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from olmo_core.train.callbacks.speed_monitor import get_device_peak_flops_per_second

from open_instruct.data.chat import load_tokenizer
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.models.hf_config import load_hf_config
from open_instruct.toys.synthetic import write_synthetic_preferences
from open_instruct.toys.tiny import SIZES, write_tiny_model

REPOSITORY = Path(__file__).resolve().parents[1]
GOAL_MFU = 0.45


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="olmo2-1b")
    parser.add_argument("--rows", type=Path, help="preference pairs (.jsonl); default: 512 made-up ones")
    parser.add_argument("--max_seq_length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8, help="pairs a microbatch")
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    parser.add_argument("--peak_tflops", type=float, help="of the device in bfloat16; default: of the GPU found")
    parser.add_argument("flags", nargs="*", help="more flags for dpo.py, after --")
    args = parser.parse_args()
    peak_flops = args.peak_tflops * 1e12 if args.peak_tflops else find_peak_flops()

    with tempfile.TemporaryDirectory(prefix="dpo_throughput_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="olmo2", size=args.size, dtype="bfloat16")
        rows = args.rows
        if rows is None:
            rows = folder / "rows.jsonl"
            write_synthetic_preferences(rows, num_rows=512, seed=0)
        flags: list[object] = [
            *("--model_name_or_path", model, "--mixer_list", rows, "1.0", "--output_dir", folder / "run"),
            *("--cache_dir", folder / "cache", "--max_seq_length", args.max_seq_length, "--param_dtype", "bfloat16"),
            # Every token of a row is computed, so that FLOPs can be counted by the row.
            *("--per_device_train_batch_size", args.batch, "--prefix_sharing", "off"),
            *("--max_train_steps", args.num_steps, "--checkpointing_steps", 10**9, *args.flags),
        ]
        program = REPOSITORY / "open_instruct" / "dpo.py"
        subprocess.run([sys.executable, str(program), *map(str, flags)], check=True)
        metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        timed = metrics[args.num_warmup_steps :]
        tokens_per_second = statistics.median(row["tokens_per_second"] for row in timed)
        flops_per_token = mean_flops_per_token(model, read_pairs(model, rows, args.max_seq_length, folder / "cache"))

    mfu = tokens_per_second * flops_per_token / peak_flops
    print(f"tokens/s          {tokens_per_second:,.0f}")
    print(f"FLOPs a token     {flops_per_token / 1e9:.3f} G")
    print(
        f"MFU               {mfu:.1%} of {peak_flops / 1e12:,.0f} TFLOP/s (goal {GOAL_MFU:.0%}: {mfu / GOAL_MFU:.2f}x)"
    )
    print(f"peak memory       {max(row['peak_memory_gib'] for row in metrics):.2f} GiB")
    print(f"padding           {statistics.mean(row['padding_fraction'] for row in timed):.1%} of the slots")


def find_peak_flops() -> float:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; give --peak_tflops to measure against")
    peak = get_device_peak_flops_per_second(torch.cuda.get_device_name(), using_half_precision=True)
    assert peak is not None
    return float(peak)


def read_pairs(model: Path, rows: Path, max_seq_length: int, cache_dir: Path) -> TokenDataset:
    """The pairs as the run saw them."""
    pairs, _ = load_token_dataset(
        PreferenceBuilder,
        mixer_list=[str(rows), "1.0"],
        splits=["train"],
        tokenizer=load_tokenizer(str(model)),
        chat_template_name=None,
        max_seq_length=max_seq_length,
        on_bad_row="error",
        seed=42,
        cache_dir=cache_dir,
    )
    return pairs


def mean_flops_per_token(model: Path, pairs: TokenDataset) -> float:
    """FLOPs of all conversations over their tokens (formula at the top)."""
    config = load_hf_config(str(model))
    width, layers = config.hidden_size, config.num_hidden_layers
    head_width = width // config.num_attention_heads
    attention = width * head_width * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    block_weights = layers * (attention + 3 * width * config.intermediate_size)
    lengths = [len(document) for pair in pairs for document in pair]
    num_labels = int(pairs.num_label_tokens.sum())
    flops = 6 * block_weights * sum(lengths)
    flops += 6 * width * config.vocab_size * num_labels
    flops += 6 * layers * width * sum(length**2 for length in lengths)
    return flops / sum(lengths)


if __name__ == "__main__":
    main()
