"""Log-probs of engine and learner where tokens have experts, with --routing_replay off and on.

    python benchmarks/routing_replay.py
    python benchmarks/routing_replay.py --async_steps 1
    python benchmarks/routing_replay.py --dtypes float32/float32 --four_turns

Runs of GRPO with a tiny random `qwen3_moe` (8 experts of which 2), on a CPU, that differ in that
flag alone. Each step learns from 8 completions of up to 12 tokens; in step 1 off and on learn from
the same. The dtypes are the engine's and the learner's. With --four_turns a completion is an
episode of four replies, with answers between.
"""

import itertools
import sys
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from harness import REPOSITORY
from harness.processes import read_metrics, run
from harness.program import parser_of

from open_instruct.commands.tiny_model import write_tiny_model
from tests.fleet.grpo_case import GRPOCase, write_prompts

DTYPES = ("float32/float32", "bfloat16/float32", "bfloat16/bfloat16")
COLUMNS = (
    *(
        "staleness/mean",
        "logprob_diff/mean",
        "logprob_diff/max",
        "router/differing",
        "router/replayed",
    ),
    *("loss", "grad_norm"),
)


def rows_of(
    args: Namespace, model: Path, folder: Path, dtypes: str, replay: str
) -> list[dict[str, Any]]:
    """Those of metrics.jsonl of one run."""
    prompts = write_prompts(folder / "prompts.jsonl", 2 * (args.num_steps + 2))
    engine, learner = dtypes.split("/")
    flags: dict[str, Any] = {
        "vllm_dtype": engine,
        "param_dtype": learner,
        "routing_replay": replay,
        "async_steps": args.async_steps,
        "total_episodes": 8 * args.num_steps,
        "cache_dir": folder / "cache",
    }
    if args.four_turns:
        flags |= {
            "environment": "tests.fleet.four_turns:FourTurns",
            "response_length": 160,
            "turn_length": 8,
        }
        flags |= {"max_prompt_token_length": 64}
    case = GRPOCase(
        model=model,
        prompts=prompts,
        output_dir=Path(tempfile.mkdtemp(dir=folder)) / "out",
        flags=flags,
    )
    run(
        [sys.executable, *case.command()],
        environment={"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""},
    )
    return read_metrics(case.output_dir)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--num_steps", type=int, default=3)
    parser.add_argument(
        "--async_steps", type=int, default=0, help="as GRPO's flag: how old completions may be"
    )
    parser.add_argument("--four_turns", action="store_true")
    args = parser.parse_args()
    print("engine/learner     replay step", *(f"{column:>17}" for column in COLUMNS))
    with tempfile.TemporaryDirectory(prefix="routing_replay_") as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model", family="qwen3_moe")
        for dtypes, replay in itertools.product(args.dtypes, ("off", "on")):
            for row in rows_of(args, model, folder, dtypes, replay):
                values = (
                    f"{row[column]:17.4g}" if column in row else f"{'-':>17}" for column in COLUMNS
                )
                print(f"{dtypes:18} {replay:>6} {row['step']:4}", *values, flush=True)


if __name__ == "__main__":
    main()
