"""Memory and time of streaming weights into shards and out again, beside OLMo-core's own way.

    python benchmarks/load_memory.py                     # ~520M parameters, on 2 and on 4 ranks
    python benchmarks/load_memory.py --size tiny --ranks 2

Each measurement is a fresh set of processes over gloo. Load: from the build of the model to loaded
shards (fp32 master weights from a bf16 checkpoint), against build + initialisation +
`load_hf_model`. Export: of the loaded model to bf16, against gathering the full state dict and
saving it with `save_hf_model`. Native: a load from OLMo-core's own checkpoint of the same weights,
against its `load_model_and_optim_state`.

Memory is anonymous memory (RssAnon) above what the same process held after its imports and the
start of the process group (export: after loading); "resident" counts mapped pages of files too. The
budget is 1.1 x (the rank's shard + the largest tensor) while loading, and the same without the
shard, which is there already, plus a tenth of it, while exporting.
"""

import argparse
import math
import tempfile
from pathlib import Path

from harness.memory import MIB
from harness.processes import numbers_of_ranks
from harness.program import parser_of

from open_instruct.commands.model_conversion import convert_model
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles

WAYS = {
    "load": ("ours", "load_hf_model"),
    "export": ("ours", "save_hf_model"),
    "native": ("ours", "load_model_and_optim_state"),
}
GOAL_TIME_RATIO = 0.15
# What a load from OLMo-core's checkpoint may take beside one of the same weights from safetensors.
GOAL_NATIVE_RATIO = 1.05


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--size", default="base", help="of `open-instruct tiny-model`: tiny, mini, small, base"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tasks", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument(
        "--scratch_dir", help="where the checkpoint is written; default: a temporary folder"
    )
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        from load_runs.rank import run_rank

        task, way, checkpoint, scratch = arguments.worker
        return run_rank(task, way, Path(checkpoint), Path(scratch))

    with tempfile.TemporaryDirectory(dir=arguments.scratch_dir) as folder:
        checkpoint = write_tiny_model(
            Path(folder, "model"), family="olmo2", size=arguments.size, dtype="bfloat16"
        )
        files = CheckpointFiles.open(checkpoint)
        num_params = sum(map(math.prod, files.shapes.values()))
        print(
            f"{num_params / 1e6:.0f}M parameters, bf16 on disk, fp32 shards; MiB of the largest "
            "rank above the start"
        )
        print(
            f"{'task':8}{'ranks':>6} "
            f"{'way':28}{'seconds':>9}{'anonymous':>11}{'resident':>10}{'budget':>8}"
        )
        native = Path(folder, "olmo_core")
        if "native" in arguments.tasks:
            convert_model(checkpoint, native, export_dtype="source")
        for num_ranks in arguments.ranks:
            ours: dict[str, dict[str, float]] = {}
            for task in arguments.tasks:
                source = native if task == "native" else checkpoint
                results = {way: measure(task, way, source, num_ranks) for way in WAYS[task]}
                for way, result in results.items():
                    print(_row(task, num_ranks, way, result))
                print(_ratio(task, num_ranks, results), flush=True)
                ours[task] = results["ours"]
            if {"load", "native"} <= ours.keys():
                print(_native_ratio(num_ranks, ours["native"], ours["load"]), flush=True)


def measure(task: str, way: str, checkpoint: Path, num_ranks: int) -> dict[str, float]:
    """The slowest rank's time and the largest rank's memory of one measurement in processes of its
    own.
    """
    words = [task, way, checkpoint]
    of_ranks = numbers_of_ranks(Path(__file__), num_ranks, words, scratch_dir=checkpoint.parent)
    return {key: max(of_rank[key] for of_rank in of_ranks) for key in of_ranks[0]}


def _budget(task: str, result: dict[str, float]) -> float:
    present = result["shard"] if task == "export" else 0
    return 1.1 * (result["shard"] + result["largest_tensor"]) - present


def _row(task: str, num_ranks: int, way: str, result: dict[str, float]) -> str:
    sizes = (result["anonymous"], result["resident"], _budget(task, result))
    anonymous, resident, budget = (f"{size / MIB:.0f}" for size in sizes)
    return (
        f"{task:8}{num_ranks:>6} "
        f"{way:28}{result['wall_time_s']:>9.2f}{anonymous:>11}{resident:>10}{budget:>8}"
    )


def _ratio(task: str, num_ranks: int, results: dict[str, dict[str, float]]) -> str:
    ours, other = results.values()
    time_ratio = ours["wall_time_s"] / other["wall_time_s"]
    memory_ratio = ours["anonymous"] / other["anonymous"]
    within = ours["anonymous"] <= _budget(task, ours)
    return (
        f"{task:8}{num_ranks:>6} {'ratio':28}{time_ratio:>9.3f}{memory_ratio:>11.2f}   "
        f"time {'<=' if time_ratio <= GOAL_TIME_RATIO else '>'} {GOAL_TIME_RATIO}, "
        f"memory {'within' if within else 'OVER'} its budget"
    )


def _native_ratio(num_ranks: int, native: dict[str, float], load: dict[str, float]) -> str:
    ratio = native["anonymous"] / load["anonymous"]
    return (
        f"native{num_ranks:>8} {'beside load':28}"
        f"{native['wall_time_s'] / load['wall_time_s']:>9.3f}{ratio:>11.2f}   "
        f"memory {'<=' if ratio <= GOAL_NATIVE_RATIO else '>'} {GOAL_NATIVE_RATIO}"
    )


if __name__ == "__main__":
    main()
