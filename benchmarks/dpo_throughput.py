"""Tokens a second, model FLOPs utilisation and peak memory of packed DPO, with the shape of OLMo 2
1B.

    python benchmarks/dpo_throughput.py                                       # one GPU, bfloat16
    python benchmarks/dpo_throughput.py --prefix_sharing on -- --compile_model
    python benchmarks/dpo_throughput.py --ranks 8                             # FSDP; figures of memory are of rank 0
    python benchmarks/dpo_throughput.py --size mini --peak_tflops 0.1         # a CPU, to see that it runs

FLOPs of a token, forward and backward: 6 for each weight of the blocks; 6 for each weight of the
head where there is a label; and for attention 12 x layers x width for each earlier token of its
conversation, of which a conversation of L tokens has L/2 on average (Chowdhery et al. 2022, PaLM,
appendix B, with causality counted). What activation checkpointing computes again does not count;
what sharing prompts saves does, as if it were computed.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu_check.devices import peak_flops
from gpu_check.runner import check_environment
from harness.program import parser_of

from open_instruct.commands.tiny_model import SIZES, write_tiny_model
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.models.hf.hf_config import load_hf_config
from scripts.demo_data.pairs import write_synthetic_preferences

GOAL_MFU = 0.45


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--size", choices=SIZES, default="olmo2-1b")
    parser.add_argument(
        "--rows", type=Path, help="preference pairs (.jsonl); default: 512 made-up ones"
    )
    parser.add_argument("--max_seq_length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8, help="pairs a microbatch of a rank")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--num_steps", type=int, default=12)
    parser.add_argument("--num_warmup_steps", type=int, default=4)
    parser.add_argument(
        "--prefix_sharing", choices=("off", "on"), default="off", help="of the prompts of pairs"
    )
    parser.add_argument(
        "--peak_tflops", type=float, help="of the device in bfloat16; default: of the GPU found"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="keep the model and what is cached here; default: nothing is kept",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("flags", nargs="*", help="more flags for dpo.py, after --")
    args = parser.parse_args()
    peak = args.peak_tflops * 1e12 if args.peak_tflops else peak_flops()
    if peak is None:
        sys.exit("there is no GPU here whose peak is known; give --peak_tflops to measure against")

    with tempfile.TemporaryDirectory(prefix="dpo_throughput_") as name:
        kept = args.folder or Path(name)
        model = kept / "model"
        if not model.exists():
            write_tiny_model(model, family="olmo2", size=args.size, dtype="bfloat16")
        rows = args.rows
        if rows is None:
            rows = kept / "rows.jsonl"
            write_synthetic_preferences(rows, num_rows=512, seed=0)
        flags: list[object] = [
            *(
                "--model_name_or_path",
                model,
                "--mixer_list",
                rows,
                "1.0",
                "--output_dir",
                Path(name) / "run",
            ),
            *(
                "--cache_dir",
                kept / "cache",
                "--max_seq_length",
                args.max_seq_length,
                "--param_dtype",
                "bfloat16",
            ),
            *(
                "--per_device_train_batch_size",
                args.batch,
                "--prefix_sharing",
                args.prefix_sharing,
                *args.flags,
            ),
        ]
        file = Path(name) / "figures.json"
        words = ["dpo", "--figures", file, "--num_steps", args.num_steps, "--", *flags]
        launcher = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(args.ranks),
        ]
        program = [
            sys.executable,
            *(launcher if args.ranks > 1 else []),
            "-m",
            "gpu_check.measured_run",
        ]
        program += map(str, words)
        subprocess.run(program, check=True, env=check_environment(rehearse=False))
        run = json.loads(file.read_text())
        timed = run["steps"][args.num_warmup_steps :]
        tokens_per_second = statistics.median(step["tokens"] / step["seconds"] for step in timed)
        flops_per_token = mean_flops_per_token(
            model, read_pairs(model, rows, args.max_seq_length, kept / "cache")
        )

    figures = {
        "tokens/s": tokens_per_second,
        "tokens a step": round(statistics.mean(step["tokens"] for step in timed)),
        "FLOPs a token, G": flops_per_token / 1e9,
        "MFU": tokens_per_second * flops_per_token / (peak * args.ranks),
        "planned, GiB": run["planned_gib"],
        "allocated, GiB": run["allocated_gib"],
        "reserved, GiB": run["reserved_gib"],
        "padding": statistics.mean(step["padding_fraction"] for step in timed),
    }
    for title, figure in figures.items():
        print(f"{title:18s}{figure:,.4g}" if figure < 1000 else f"{title:18s}{figure:,.0f}")
    print(
        f"the goal of MFU is {GOAL_MFU:.0%} of {peak / 1e12:,.0f} TFLOP/s a device: "
        f"{figures['MFU'] / GOAL_MFU:.2f}x"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures), encoding="utf-8")


def read_pairs(model: Path, rows: Path, max_seq_length: int, cache_dir: Path) -> TokenDataset:
    """The pairs as the run saw them."""
    pairs, _ = load_token_dataset(
        PreferenceBuilder,
        entries=parse_mixer_list([str(rows), "1.0"]),
        chat=ChatFormat.choose(load_tokenizer(str(model)), None),
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
    attention = (
        width * head_width * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    )
    block_weights = layers * (attention + 3 * width * config.intermediate_size)
    lengths = [len(document) for pair in pairs for document in pair]
    num_labels = int(pairs.num_label_tokens.sum())
    flops = 6 * block_weights * sum(lengths)
    flops += 6 * width * config.vocab_size * num_labels
    flops += 6 * layers * width * sum(length**2 for length in lengths)
    return flops / sum(lengths)


if __name__ == "__main__":
    main()
