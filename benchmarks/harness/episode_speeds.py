"""What benchmarks of episodes have in common: their flags, the model of their engine, and how their
speeds are compared.
"""

import os
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from harness.program import parser_of, print_ratio
from harness.rounds import in_turns, paired_median
from open_instruct.commands.tiny_model import write_tiny_model


@contextmanager
def prepare_engine(text: str | None) -> Iterator[tuple[Namespace, Path]]:
    """The flags of the command line, and the folder of a tiny model while the block runs.

    Args:
        text: of the program, for its help.
    """
    parser = parser_of(text)
    parser.add_argument("--num_episodes", type=int, default=400)
    parser.add_argument("--at_once", type=int, default=200)
    parser.add_argument("--num_rounds", type=int, default=3)
    args = parser.parse_args()
    # The engine computes on its own thread alone, whose clock is read.
    os.environ.update(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="", VLLM_LOGGING_LEVEL="ERROR")
    from open_instruct.generation.vllm_options import engine_environment

    os.environ.update(engine_environment(on_cuda=False))
    with tempfile.TemporaryDirectory(prefix="episodes_") as name:
        yield args, write_tiny_model(Path(name) / "model", family="olmo2", size="tiny")


def compare_speeds(
    ways: Mapping[str, Callable[[int], float]],
    *,
    num_rounds: int,
    between: str,
    least_ratio: float,
) -> list[str]:
    """Measure two ways in turns, print their speeds and the ratio of the first to the second.

    Args:
        between: what the ratio is of, in words.
        least_ratio: less is said in the sentences that are returned.
    """
    speeds = in_turns(ways, num_rounds=num_rounds, num_warmup_rounds=1)
    for way, speeds_of_way in speeds.items():
        print(f"{way:9} {median(speeds_of_way):8,.0f} tokens for a second of the engine's CPU")
    ratio = paired_median(*speeds.values())
    print_ratio(between, ratio)
    return [f"the ratio is under {least_ratio}"] if ratio < least_ratio else []
