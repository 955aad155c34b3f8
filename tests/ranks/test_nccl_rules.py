"""A weight sync between GPUs keeps to what NCCL asks for and gloo does not."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.grpo_case import RunRanks
from tests.ranks.nccl_rules import Call, OnDevice, Recorded, breaches
from tests.ranks.shallow import write_shallow_model
from tests.ranks.test_weight_sync import FSDP_2, FSDP_2_TP_2, HSDP_2X2

pytestmark = pytest.mark.extended

NUM_RECEIVERS = 2
Notes = list[list[Call]]


def synced(run_ranks: RunRanks, folder: Path, num_learners: int, layouts: list[Any]) -> Notes:
    model = write_shallow_model(folder / "model", family="olmo2")
    case = {
        "folder": str(model),
        "backend": "nccl",
        "dtype": "bfloat16",
        "bucket_bytes": 20_000,
        "min_buckets": 3,
    }
    results = run_ranks(
        num_learners + NUM_RECEIVERS,
        "tests.ranks.jobs.nccl_sync:sync",
        cases=[
            {**case, "layout": layout, "adapter_alone": False, "changes_alone": False}
            for layout in layouts
        ],
        num_learners=num_learners,
        num_receivers=NUM_RECEIVERS,
        folder=str(folder),
    )
    assert [result["differing"] for result in results[num_learners:]] == [
        [[]] * len(layouts)
    ] * NUM_RECEIVERS
    return [result["notes"] for result in results]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Notes:
    from tests.ranks.launch import run_ranks

    return synced(run_ranks, tmp_path_factory.mktemp("sync"), 2, [FSDP_2])


def test_two_learners(notes: Notes) -> None:
    groups = {call["group"] for calls in notes for call in calls}
    assert groups == {"learner 0 in channel 1", "learner 1 in channel 1"}
    assert all(len(calls) > 8 for calls in notes)
    assert breaches(notes) == []


def test_four_learners_as_replicas_and_tensor_parallel(run_ranks: RunRanks, tmp_path: Path) -> None:
    assert breaches(synced(run_ranks, tmp_path, 4, [HSDP_2X2, FSDP_2_TP_2])) == []


def other_order(notes: Notes) -> None:
    """A receiver asks two learners the other way round."""
    own = notes[-1]
    place = next(at for at, call in enumerate(own[:-1]) if call["group"] != own[at + 1]["group"])
    own[place], own[place + 1] = own[place + 1], own[place]


def other_size(notes: Notes) -> None:
    notes[-1][-1]["what"] = "broadcast of 2 bytes of torch.uint8"


def one_missing(notes: Notes) -> None:
    notes[0].pop()


@pytest.mark.parametrize(
    ("plant", "told"),
    [
        (other_order, "orders that do not agree: operation"),
        (other_size, "its members call broadcast of 2 bytes"),
        (one_missing, "its members call None and broadcast"),
    ],
)
def test_broken_rule_is_reported(plant: Any, told: str, notes: Notes) -> None:
    broken = deepcopy(notes)
    plant(broken)
    assert any(told in breach for breach in breaches(broken))


def test_call_that_nccl_would_not_take_is_noted() -> None:
    device, notes = OnDevice(), []
    make = device.made_by(torch.empty)

    class Group:
        """Its calls are slow enough for a second thread."""

        def broadcast(self, tensors: Any) -> None:
            if len(notes) == 1:
                with ThreadPoolExecutor() as threads:
                    threads.submit(group.broadcast, [make(2, device="cuda")]).result()

    group = Recorded(Group(), "learner 0", 0, device, notes)
    for tensor in (
        make(2, device="cuda"),
        torch.empty(2),
        make(0, device="cuda"),
        make(2, 2, device="cuda").T,
    ):
        group.broadcast([tensor])
    found = [call["faults"] for call in notes]
    cut = ["a tensor that is empty or not in one piece"]
    assert found == [[], ["a second thread"], ["a tensor of the host"], cut, cut]
    assert len(breaches([notes])) == 4
