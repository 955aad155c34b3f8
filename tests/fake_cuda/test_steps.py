"""Every CUDA branch of a training step, without a GPU: nothing is of a wrong shape, dtype or
device, and the host waits for the device as often as it is said here, and no oftener.

The numbers are those of a step of two microbatches. Another one than is said is no matter of taste:
a step that waits leaves the device idle until the host has caught up. One that waits less often is
to be said here as well.
"""

from typing import Any

import pytest

from tests.fake_cuda.cases import CASES, MICROBATCHES, MICROBATCHES_TAKEN
from tests.fake_cuda.program import results_of, skip_without_compiler

pytestmark = pytest.mark.extended

HOST_WAITS = {
    name: 3 if name == "grpo_mini_batches" else 2 for name in CASES if name.startswith("grpo")
}
# A critic takes as many updates.
HOST_WAITS |= {"grpo_critic": 3 + 2, "grpo_critic_one_device": 2 + 1}
# For how many rows are exchanged: in each pass over a microbatch, and when it is recomputed.
HOST_WAITS["dpo_experts_split"] = 1 + 2 * MICROBATCHES
HOST_WAITS |= {"zero_1": 5, "zero_2_on_host": 8, "zero_3_adapters": 7, "zero_3_tensor_parallel": 7}
# Each moment of each weight comes from the host and goes back.
HOST_WAITS |= {"dpo_on_host_tensor_parallel": 1 + 2 * 24, "dpo_on_host_one_device": 1 + 2 * 28}
# Until the gradient of each weight is in host memory; with split experts, also where two
# microbatches add up there.
HOST_WAITS |= {
    "dpo_weights_on_host": 26,
    "dpo_weights_on_host_8bit": 13,
    "distill_weights_on_host": 15,
}
HOST_WAITS["dpo_4bit_weights_on_host"] = 15  # there, of adapters
HOST_WAITS["experts_weights_on_host"] = 1 + MICROBATCHES + 15 + 3
"""What is not listed waits once: for every update, where loss and gradient are read. GRPO waits for
its optimizer too: the weights go to the engines next. DeepSpeed waits in its step, for what its
norm and its overflow are.
"""
WITHOUT_KERNEL = {"dpo_float32"}
"""In float32 there is no kernel for documents of several lengths."""
ON_ONE_DEVICE = {name for name in CASES if name.endswith("_one_device")}
ON_ZERO = {name for name in CASES if name.startswith("zero")}
ALL_ON_HOST = {name for name in CASES if "weights_on_host" in name}
OTHER_OPTIMIZERS = {
    "dpo_weights_on_host_8bit",
    "dpo_skip_step",
    "dpo_muon",
    "dpo_8bit",
    "dpo_on_host_tensor_parallel",
    "dpo_on_host_one_device",
}


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Of each case, what tests/fake_cuda/cases.py found.

    One process for all: it alone has the hooks.
    """
    skip_without_compiler()
    return results_of("tests.fake_cuda.cases")


@pytest.fixture
def found(results: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    of_case: dict[str, Any] = results[request.param]
    assert "error" not in of_case, of_case["error"]
    return of_case | {"name": request.param}


of_each_case = pytest.mark.parametrize("found", CASES, indirect=True)


def test_call_that_makes_the_host_wait_is_noted(results: dict[str, Any]) -> None:
    noted = results["waits noted"]
    assert [words for words, waits in noted.items() if not waits] == [
        words for words in noted if "free" in words
    ]


@of_each_case
def test_host_waits_as_often_as_is_said(found: dict[str, Any]) -> None:
    waits = sorted(f"{where} (x{times})" for where, times in found["waits"].items())
    number, said = sum(found["waits"].values()), HOST_WAITS.get(found["name"], 1)
    assert number == said, f"{number} waits for the device in a step, not {said}:\n" + "\n".join(
        waits
    )


@of_each_case
def test_tensors_are_what_they_should_be(found: dict[str, Any]) -> None:
    name = found["name"]
    kind = "FakeTensor" if name in ON_ONE_DEVICE | ON_ZERO else "DTensor"
    dtype = "torch.bfloat16" if name in ON_ZERO else "torch.float32"
    place = "cpu" if name in ALL_ON_HOST else "cuda:0"
    trained = f"{kind} {dtype} {place}"
    # What is frozen beside 4-bit matrices is in 16 bits, and so are their scales; two of their
    # values are in a byte.
    frozen = [f"{kind} torch.{each} {place}" for each in ("bfloat16", "uint8") if "4bit" in name]
    assert found["parameters"] == sorted([trained, *frozen])
    if name in ON_ZERO:
        assert found["masters"] == [
            f"FakeTensor torch.float32 {'cpu' if name.endswith('_host') else 'cuda:0'}"
        ]
    else:
        assert found.get("gradients", [trained]) == [trained]
    assert found["fused"] == (name not in OTHER_OPTIMIZERS)
    if name in WITHOUT_KERNEL:
        assert found["attention"] is None
        return
    query, key, *kind_of_both = found["attention"]
    num_heads, num_kv_heads = (2, 1) if name.endswith(("_parallel", "_host_8bit")) else (4, 2)
    assert kind_of_both == ["torch.bfloat16", "cuda:0"]
    assert query[0] <= key[0] and (query[1:], key[1:]) == (
        [num_heads, query[2]],
        [num_kv_heads, query[2]],
    )


@of_each_case
def test_checkpoint_lists_what_is_there_and_leaves_it_on_the_device(found: dict[str, Any]) -> None:
    kind = "FakeTensor" if found["name"] in ON_ONE_DEVICE else "DTensor"
    # The one takes no step, and DeepSpeed's are listed by their ranges.
    has_state = found["name"] != "reference_logprobs" and not found["name"].startswith("zero_")
    places = ["cpu", "cuda:0"] if "_on_host_" in found["name"] else ["cuda:0"]
    places = ["cpu"] if found["name"] in ALL_ON_HOST else places
    kinds = [f"{kind} torch.float32 {place}" for place in places]
    assert found["saved"] == (
        {"waits": {}, "has_same_names": True, "kinds": kinds} if has_state else {}
    )


@of_each_case
def test_inputs_of_blocks_wait_on_the_host_where_they_are_to(found: dict[str, Any]) -> None:
    if "offloaded" not in found["name"] and found["name"] != "zero_1":
        assert found["on_host"] == []
        return
    num_layers = 2 if found["name"] == "dpo_offloaded" else 1
    kind = "DTensor" if found["name"].endswith("_parallel") else "FakeTensor"
    assert found["on_host"] and len(found["on_host"]) % (num_layers * MICROBATCHES_TAKEN) == 0
    for kept, came_back, shape in found["on_host"]:
        assert (kept, came_back) == ("Tensor torch.bfloat16 cpu", f"{kind} torch.bfloat16 cuda:0")
        assert shape[0] == 1 and shape[2] == 32


def test_keys_of_a_prompt_are_gathered_where_it_is_shared(results: dict[str, Any]) -> None:
    query, key, *_ = results["dpo"]["attention"]
    assert query[0] < key[0]
    query, key, *_ = results["dpo_unshared"]["attention"]
    assert query[0] == key[0]
