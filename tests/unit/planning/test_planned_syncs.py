"""What a plan says of weight syncs, against what learners keep and send; and the rule of
--weight_sync auto.
"""

from dataclasses import replace

import pytest
import torch

from open_instruct.commands.plan import parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.models.shards import select_box
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import SENT
from open_instruct.planning.memory.sync_buckets import sync_buckets
from open_instruct.planning.memory.trained_shard import pinned_bytes
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.presentation import render_words
from open_instruct.planning.step_time import SHARES
from open_instruct.weight_sync.changes import SentParts
from open_instruct.weight_sync.manifest import WeightManifest

GRPO = ["--model_name_or_path", "Qwen/Qwen3-0.6B"]
DATA = ["--dataset_mixer_list", "prompts.jsonl", "1.0", "--output_dir", "out"]
NODES = ["--num_nodes", "2", "--gpus_per_node", "2"]
IN_A_NODE = ["--gpus_per_node", "4", "--num_learners_per_node", "2", "--vllm_num_engines", "2"]
DELTA = ["--weight_sync", "delta"]


def planned(*words: str) -> Plan:
    return make_plan(parse_request(["grpo", *GRPO, *words]).setting)


@pytest.mark.parametrize(
    ("flags", "same_host", "takes"),
    [
        ([], False, "delta"),
        ([], True, "dense"),
        (["--param_dtype", "float32"], False, "dense"),
        (["--param_dtype", "float32", "--vllm_dtype", "bfloat16"], False, "delta"),
        (["--use_lora"], False, "delta"),
        (["--use_lora", "--lora_sync", "adapter"], False, "dense"),
        (["--weight_sync", "dense"], False, "dense"),
        (["--weight_sync", "delta"], True, "delta"),
    ],
    ids=str,
)
def test_weight_sync_auto_chooses_by_dtype_and_distance(
    flags: list[str], same_host: bool, takes: str
) -> None:
    assert (
        parse_run(GRPOConfig, [*GRPO, *DATA, *flags]).choose_sync(same_host=same_host)[0] == takes
    )


@pytest.mark.parametrize(
    ("words", "takes"),
    [(NODES, "delta"), (IN_A_NODE, "dense"), (["--single_gpu_mode"], "dense")],
    ids=str,
)
def test_plan_knows_what_auto_takes(words: list[str], takes: str) -> None:
    plan = planned(*words)
    assert plan.workload.sync_choice[0] == takes
    assert (SENT in dict(plan.host.parts)) == (takes == "delta")
    assert render_words("weight_sync", plan)[0].startswith(
        "What has changed" if takes == "delta" else "All weights"
    )


@pytest.mark.extended
def test_bytes_and_memory_are_those_of_the_learners() -> None:
    """Of changes at random, in a bucket that has one part of each of two ranks."""
    plan = planned(*NODES, "--fsdp_shard_degree", "2")
    own, whole = max(sync_buckets(plan.memory.shape, plan.layout, plan.workload))
    num_values = own // 2
    boxes = {rank: (slice(rank * num_values, (rank + 1) * num_values),) for rank in range(2)}
    manifest = WeightManifest(
        {"w": (2 * num_values,)}, {"w": boxes}, dtype=torch.bfloat16, bucket_bytes=whole
    )
    learner = SentParts(manifest, rank=0)
    weights = torch.zeros(2 * num_values, dtype=torch.bfloat16)

    def told() -> int:
        (message,) = learner.encode_messages(
            lambda name: select_box(weights, boxes[0]), has_digests=True
        )
        return sum(map(len, message))

    assert told() >= own
    for cost in plan.syncs[1:]:
        weights[torch.randperm(num_values)[: int(cost.changed * num_values)]] += 1
        assert told() / own == pytest.approx(cost.num_bytes / plan.syncs[0].num_bytes, rel=0.01)
    held = sum(bits.nbytes for bits in learner._sent.values())
    kept = sum(
        pinned_bytes(size)
        for size, _ in sync_buckets(plan.memory.shape, plan.layout, plan.workload)
    )
    assert held == own and dict(plan.host.parts)[SENT] == kept + 4 * own


def test_seconds_are_the_longer_of_comparing_and_travelling() -> None:
    """And those of loading all of it from the host.

    Within a node 9 times as fast a way does not hasten comparing.
    """
    slow, fast = (
        planned(*NODES, *DELTA, "--cross_node_gb_s", rate).syncs for rate in ("0.01", "1000")
    )
    assert [cost.changed for cost in slow] == [1.0, *SHARES]
    load_s = fast[1].seconds - slow[0].num_bytes / 2 / 64e9
    assert load_s == pytest.approx(slow[0].num_bytes / 64e9)
    for cost in slow[1:]:
        assert cost.seconds - load_s == pytest.approx(
            slow[0].seconds * cost.num_bytes / slow[0].num_bytes
        )
    assert len({cost.seconds for cost in fast[1:]}) == 1


def test_plan_says_where_all_weights_take_no_longer() -> None:
    remedy = "--weight_sync dense"
    assert remedy in render_words("weight_sync", planned(*NODES))[-1]
    assert remedy not in " ".join(
        render_words("weight_sync", planned(*NODES, "--cross_node_gb_s", "0.5"))
    )


def test_plan_knows_no_seconds_of_a_folder() -> None:
    plan = planned(*NODES, "--weight_sync_backend", "files")
    assert plan.workload.num_engines and plan.syncs == ()


def test_sent_copy_is_in_planned_memory_without_a_gpu() -> None:
    plan = planned(*NODES)

    def held(takes: str) -> int:
        workload = replace(plan.workload, on_cuda=False, sync_choice=(takes, ""))
        return sum(
            MemoryModel(plan.setting.shape, plan.layout, workload).resident_parts(0).values()
        )

    own = [size for size, _ in sync_buckets(plan.memory.shape, plan.layout, plan.workload)]
    assert held("delta") - held("dense") == sum(own) + 4 * max(own) < dict(plan.host.parts)[SENT]
