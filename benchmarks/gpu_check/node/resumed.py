"""Two replicas of two shards: checkpoints written beside the steps, and a resumed run that is the
one never stopped.
"""

from pathlib import Path

from gpu_check.findings import Findings
from gpu_check.ranks import Run, codes_of
from gpu_check.same_run import DPO, all_ended_well, folders, judge_resumed, of_small_model

NUM_RANKS = 4


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    flags = of_small_model(work, num_rows=32, rehearse=rehearse)
    flags += ("--param_dtype", "bfloat16", "--per_device_train_batch_size", "2")
    flags += ("--fsdp_num_replicas", "2", "--fsdp_shard_degree", "2")
    # A checkpoint of every step is still being written when the next one is taken.
    flags += ("--async_checkpoints", "on", "--checkpointing_steps", "1")

    def run(name: str, num_steps: int, *, first_device: int = 0) -> Run:
        words = (*flags, *folders(work, name), "--max_train_steps", str(num_steps))
        return Run(
            name=name, module=DPO, words=words, num_ranks=NUM_RANKS, first_device=first_device
        )

    codes = codes_of(
        [run("whole", 4), run("stopped", 2, first_device=NUM_RANKS)], rehearse=rehearse
    )
    if all_ended_well(findings, codes):
        last = [run("stopped", 4), run("whole_again", 4, first_device=NUM_RANKS)]
        if all_ended_well(findings, codes_of(last, rehearse=rehearse)):
            findings.headline = judge_resumed(findings, work)
