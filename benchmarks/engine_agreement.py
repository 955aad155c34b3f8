"""Log-probs of sampled tokens: a learner against a vLLM engine, before and after syncs of changed
weights.

    python benchmarks/engine_agreement.py [--families olmo2 qwen3] [--num_tokens 1000] [--num_syncs 3]
    python benchmarks/engine_agreement.py --model FOLDER

For each family and dtype a tiny model is written. A vLLM engine in a process of its own samples
from it; this process, the only learner, takes the log-probs of the same tokens with the forward
pass that GRPO trains with. Then, several times over, noise is added to the learner's weights, they
are sent to the engine, and the same prompts are asked again. "moved" is what the noise did: the
mean difference between the new weights and the engine's log-probs from before. rho is exp(learner -
engine).

With --model it is a real model, asked the questions of `make demo-real`. The line "peer" puts
transformers in bfloat16 against transformers in float32, on the tokens that the bfloat16 engine
sampled: what the dtype does to this model with one library.

CPUs only. The exit code is 1 if float32 log-probs are more than 1e-4 apart anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from agreement.engine import TIMEOUT_S
from harness.program import parser_of

from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.core.families import FAMILIES

if TYPE_CHECKING:
    from agreement.measure import Agreement
    from agreement.prompts import DrawPrompt

BOUND = 1e-4
DTYPES = ("float32", "bfloat16")
NOISE, NOISE_OF_A_REAL_MODEL = 0.1, 0.005  # standard deviations of each parameter
QUESTIONS = Path(__file__).parents[1] / "scripts/demo_data/questions.txt"


def main() -> int:
    parser = parser_of(__doc__)
    served = [name for name, family in FAMILIES.items() if family.delta is None]
    parser.add_argument("--families", nargs="+", choices=served, default=served)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument(
        "--size", default="tiny", help="of the models (see open-instruct tiny-model --help)"
    )
    parser.add_argument(
        "--num_tokens", type=int, default=1000, help="sampled from each version, at least"
    )
    parser.add_argument("--num_syncs", type=int, default=3)
    parser.add_argument("--model", type=Path, help="a real model's folder, in place of tiny ones")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    # The engine's process imports this file too, and vLLM and transformers' models must not share
    # one.
    from agreement.prompts import questions_as_prompts, random_prompts

    from open_instruct.models.hf.hf_config import load_hf_config
    from open_instruct.parallel.process import start_process, stop_process

    with contextlib.redirect_stdout(sys.stderr):  # OLMo-core's words on it
        start_process(timeout_s=TIMEOUT_S, seed=0)
    apart = dict.fromkeys(args.dtypes, 0.0)
    print(
        "family  dtype     version  tokens   largest      mean    rho: mean      std      min    "
        "  max    moved"
    )
    if args.model is not None:
        questions = questions_as_prompts(QUESTIONS, model=args.model)
        measure_dtypes(
            args.model, "real", questions, args=args, noise=NOISE_OF_A_REAL_MODEL, apart=apart
        )
    else:
        for family in args.families:
            with tempfile.TemporaryDirectory(prefix="engine_agreement_") as name:
                folder = write_tiny_model(Path(name) / "model", family=family, size=args.size)
                prompts = random_prompts(load_hf_config(str(folder)).vocab_size)
                measure_dtypes(folder, family, prompts, args=args, noise=NOISE, apart=apart)
    stop_process()
    for dtype, largest in apart.items():
        print(
            f"{dtype}: at most {largest:.1e} apart"
            + (f" (bound {BOUND:g})" if dtype == "float32" else "")
        )
    return int(apart.get("float32", 0.0) > BOUND)


def measure_dtypes(
    folder: Path,
    family: str,
    draw_prompt: DrawPrompt,
    *,
    args: argparse.Namespace,
    noise: float,
    apart: dict[str, float],
) -> None:
    """Print a line for each version of the weights, and put the largest difference into `apart`."""
    from agreement.measure import measure

    for dtype in args.dtypes:
        agreements, sample = measure(
            folder,
            dtype=dtype,
            draw_prompt=draw_prompt,
            num_tokens=args.num_tokens,
            num_syncs=args.num_syncs,
            noise=noise,
        )
        for each in agreements:
            print(row(family, dtype, each), flush=True)
            # A NaN is as far apart as can be.
            largest = math.inf if math.isnan(each.largest) else each.largest
            apart[dtype] = max(apart[dtype], largest)
        if args.model is not None and dtype == "bfloat16":
            from agreement.peer import measure_transformers

            print(row("peer", dtype, measure_transformers(folder, sample)), flush=True)


def row(family: str, dtype: str, each: Agreement) -> str:
    moved = "" if each.moved is None else f"{each.moved:9.2g}"
    return (
        f"{family:7} {dtype:9} {each.version:7} {each.num_tokens:7} {each.largest:9.1e} "
        f"{each.mean:9.1e}    {each.rho_mean:9.6f} {each.rho_std:8.1e} {each.rho_min:8.5f} "
        f"{each.rho_max:8.5f}{moved}"
    )


if __name__ == "__main__":
    sys.exit(main())
