"""Four steps of DPO in every layout of a node against the same steps on one rank: losses and
gradient norms.
"""

import math
from pathlib import Path

from gpu_check.findings import Findings
from gpu_check.ranks import Run, codes_of
from gpu_check.same_run import DPO, all_ended_well, folders, of_small_model, steps_of

ONE_RANK = "one rank"
NUM_STEPS, PAIRS_A_STEP = 4, 8
TOLERANCE = 1e-4
"""Of float32: sums are taken in another order, and by kernels for other shapes.

In the rehearsal it is 1e-5.
"""


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    common = of_small_model(work, num_rows=NUM_STEPS * PAIRS_A_STEP, rehearse=rehearse)
    common += ("--param_dtype", "float32", "--max_train_steps", str(NUM_STEPS))

    def run(
        name: str, flags: str = "", *, num_ranks: int, first_device: int = 0, splits: int = 1
    ) -> Run:
        pairs = PAIRS_A_STEP * splits // num_ranks
        words = (
            *common,
            *folders(work, name),
            "--per_device_train_batch_size",
            str(pairs),
            *flags.split(),
        )
        return Run(
            name=name, module=DPO, words=words, num_ranks=num_ranks, first_device=first_device
        )

    together = [
        [run(ONE_RANK, num_ranks=1), run("FSDP 8", num_ranks=8)],
        [run("HSDP 2x4", "--fsdp_num_replicas 2 --fsdp_shard_degree 4", num_ranks=8)],
        [
            run("TP 2 x FSDP 2", "--tensor_parallel_degree 2", num_ranks=4, splits=2),
            run(
                "CP 2 x FSDP 2",
                "--context_parallel_degree 2",
                num_ranks=4,
                splits=2,
                first_device=4,
            ),
        ],
    ]
    codes: dict[str, int] = {}
    for runs in together:
        codes |= codes_of(runs, rehearse=rehearse)
    all_ended_well(findings, codes)
    ended = [name for name, code in codes.items() if code == 0]
    if ONE_RANK in ended:
        compare(
            findings,
            work,
            [name for name in ended if name != ONE_RANK],
            TOLERANCE / (10 if rehearse else 1),
        )


def compare(findings: Findings, work: Path, names: list[str], tolerance: float) -> None:
    """Hold the runs in `work` against that of one rank; a figure that is no number is too far from
    it.
    """
    alone = steps_of(work / ONE_RANK)
    first, last = alone[0][0], alone[-1][0]
    moved = (
        f"the loss of one rank does not move ({first:.4g} to {last:.4g}): equal ones say nothing"
    )
    findings.require(abs(last - first) > 1e-3, moved)
    table: list[dict[str, object]] = []
    most = 0.0
    for name in names:
        steps = steps_of(work / name)
        findings.require(len(steps) == len(alone), f"{name}: {len(steps)} of {len(alone)} steps")
        apart = [furthest(kind, steps, alone) for kind in (0, 1)]
        most = max(most, *apart)
        table.append(
            {"layout": name, "loss, relative": apart[0], "gradient norm, relative": apart[1]}
        )
        told = (
            f"{name}: losses are {apart[0]:.2g} apart and gradient norms {apart[1]:.2g}, and may "
            f"be {tolerance:g}"
        )
        findings.require(all(each <= tolerance for each in apart), told)
    findings.table(f"The largest difference from one rank in {len(alone)} steps, float32", table)
    findings.headline = f"{', '.join(names)}: at most {most:.1e} from one rank"


def furthest(
    kind: int, steps: list[tuple[float, float]], others: list[tuple[float, float]]
) -> float:
    apart = [abs(a[kind] - b[kind]) / abs(b[kind]) for a, b in zip(steps, others, strict=False)]
    return math.inf if any(map(math.isnan, apart)) else max(apart)
