"""Compiled blocks on a CPU: attention is one operator, at which nothing that is compiled breaks
off.
"""

import random

import pytest
import torch

from open_instruct.core.records import PackedBatch
from open_instruct.models import compiled
from open_instruct.models.build import build_model
from open_instruct.training.parallelize import Parallelism, parallelize
from tests.unit.batching.test_prefix_sharing import assert_same
from tests.unit.small_models import CPU, hf_config, new_model
from tests.unit.training.test_compiled import (
    MOST_VERSIONS,
    compiler,
    outcome,
    row,
    rows_of_a_run,
    versions_of_blocks,
)

__all__ = ["compiler"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

SOME_ROWS = [(row(random.Random(shares), shares=shares), True) for shares in (True, False)]


@pytest.mark.parametrize(
    ("compiler", "rows"),
    [
        pytest.param("eager", SOME_ROWS, marks=pytest.mark.slow),
        pytest.param("aot_eager", [*rows_of_a_run()], marks=pytest.mark.extended),
    ],
    ids=["some rows", "every kind of row"],
    indirect=["compiler"],
)
def test_few_versions_without_a_break_serve_rows_on_a_cpu(
    rows: list[tuple[PackedBatch, bool]],
) -> None:
    plain, model = new_model("llama"), new_model("llama")
    model.apply_compile()
    for batch, learned in rows:
        expected = outcome(plain, batch, learned=learned)
        assert_same(outcome(model, batch, learned=learned), expected)
    assert 0 < versions_of_blocks(model) <= MOST_VERSIONS
    assert not torch._dynamo.utils.counters["graph_break"]
    assert compiled.FALLBACKS.count == 0


@pytest.mark.parametrize("is_asked", [True, False])
def test_blocks_are_compiled_when_they_are_made_where_that_is_asked(is_asked: bool) -> None:
    model = build_model(hf_config("llama"), init_device="meta")
    parallelize(model, Parallelism(mesh=None, compiles=is_asked))
    model.init_weights(device=CPU, max_seq_len=64)
    assert model.compile_enabled == is_asked
    assert all(
        (block._compiled_call_impl is not None) == is_asked for block in model.blocks.values()
    )
