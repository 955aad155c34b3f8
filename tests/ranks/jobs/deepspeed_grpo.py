"""GRPO's learner steps on DeepSpeed, what goes to engines between them, and what a stopped run goes
on from.
"""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from open_instruct.models.export import export_hf
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.lora.adapters import find_merged_weights as merged_weights_of
from open_instruct.models.shards import find_local_shards
from open_instruct.parallel.process import stop_process
from open_instruct.training.deepspeed import zero
from open_instruct.weight_sync.receiver import IncomingWeights
from open_instruct.weight_sync.sender import WeightSender
from tests.ranks.files import told
from tests.ranks.grpo_case import is_computed
from tests.ranks.jobs import grpo_steps
from tests.ranks.jobs.deepspeed_runs import as_for_large_models
from tests.ranks.jobs.weight_sync import CPU, offer, own_rank, received

NUM_COMPLETIONS = 9


def run_each(**arguments: Any) -> list[list[dict[str, float]]]:
    zero.engine_settings = as_for_large_models
    return grpo_steps.run_each(**arguments)


def sync(
    cases: list[dict[str, Any]], ports: list[int], num_learners: int, folder: str
) -> list[list[str]]:
    """For each case, what the receiver, which is the last rank, got other than an export of the
    masters.
    """
    zero.engine_settings = as_for_large_models
    os.environ.update(WORLD_SIZE=str(num_learners), LOCAL_WORLD_SIZE=str(num_learners))
    differing = []
    for number, (case, port) in enumerate(zip(cases, ports, strict=True)):
        out, info_path = Path(folder, str(number)), Path(folder, f"{number}.told")
        if own_rank() < num_learners:
            os.environ["MASTER_PORT"] = str(port)
            _send_twice(**case, info_path=info_path, out=out)
            continue
        info = told(info_path)
        incoming = IncomingWeights(info, index=0, device=CPU)
        before, last = (received(incoming, info, version, info_path) for version in (0, 1))
        files = CheckpointFiles.open(out)
        assert set(last) == set(files)
        moved = {name for name in files if not torch.equal(before[name], last[name])}
        assert moved == {
            name for name in files if "_proj." in name or "--use_lora" not in case["flags"]
        }
        differing.append([name for name in files if not torch.equal(last[name], files.read(name))])
    return differing


def _send_twice(flags: list[str], way: str, dtype: str, info_path: Path, out: Path) -> None:
    learner = grpo_steps.Learner(flags, num_steps=1)
    model, names, engines_dtype = (
        learner.policy.model,
        learner.pretrained.names,
        getattr(torch, dtype),
    )
    sender = WeightSender(
        model, names, backend=way, dtype=engines_dtype, bucket_bytes=100_000, timeout_s=60
    )
    # Every value is brought once, and where there is something shared every rank brings some. What
    # adapters are beside is whole on every rank below stage 3.
    num_values = sum(
        parameter.numel() for parameter in learner.pretrained.build(init_device="meta").parameters()
    )
    assert sender.manifest.num_bytes == num_values * engines_dtype.itemsize
    is_shared = (learner.config.parallel.deepspeed_stage or 0) > (
        0 if learner.config.adapters is None else 2
    )
    assert sender.manifest.ranks == list(range(dist.get_world_size() if is_shared else 1))
    offer(sender, 1, info_path)
    sender.join()
    sender.send(0)
    learner.take_step(NUM_COMPLETIONS)
    if way == "gathered":
        learner.move_to_host()
        assert learner.move_to_device().num_bytes
    settings = {"source_folder": flags[1], "out_folder": out, "dtype": engines_dtype}
    export_hf(model, names, weights=merged_weights_of(model), **settings)
    sender.send(1)
    sender.close()
    stop_process()


def weights_of(learner: grpo_steps.Learner) -> torch.Tensor:
    """What this rank holds of the trained models, on either backend."""
    policies = (
        [learner.policy] if learner.critic is None else [learner.policy, learner.critic.policy]
    )
    held = [each.local for policy in policies for each in find_local_shards(policy.model).values()]
    return torch.cat([local.detach().flatten().float() for local in held]).clone()


def stop_and_go_on(flags: list[str], ports: list[int], num_steps: int) -> dict[str, Any]:
    """The rows after a checkpoint in the middle: of the run that wrote it, and of one that began
    with it.
    """
    zero.engine_settings = as_for_large_models
    rows, ends = [], []
    for port, resumes in zip(ports, (False, True), strict=True):
        os.environ["MASTER_PORT"] = str(port)
        learner = grpo_steps.Learner(flags, num_steps=num_steps)
        if resumes:
            assert learner.resume(warn=print) == {"asked": 7}
        while learner.loop.step < num_steps:
            if learner.loop.step == num_steps // 2 and not resumes:
                learner.save({"asked": 7})
                rows.clear()
            rows.append(learner.take_step(NUM_COMPLETIONS))
        ends.append(weights_of(learner))
        stop_process()
    told_rows = [{name: value for name, value in row.items() if is_computed(name)} for row in rows]
    return {"rows": told_rows, "same_weights": torch.equal(*ends)}
