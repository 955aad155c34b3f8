"""What a plan says of a GPU's memory is what a step there really holds, storage by storage
(`memory.py`).
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fake_cuda.memory import CASES, table
from tests.fake_cuda.program import results_of, skip_without_compiler

pytestmark = pytest.mark.extended

NUM_PROCESSES = 2

OF_PEAK, OF_PHASE = 0.02, 0.03
TABLES_OF_ROPE = 32 * 2**20
"""A plan counts sines and cosines of all positions of a row, twice where a model has windows; a row
of several documents has those of the longest. Next to adapters alone that is more than a phase may
be off.
"""


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """Of each case, its bytes by plan and by trace.

    Processes of their own, which alone have the hooks.
    """
    skip_without_compiler()
    names = [*CASES]
    with ThreadPoolExecutor() as threads:
        parts = threads.map(
            _compared, (names[part::NUM_PROCESSES] for part in range(NUM_PROCESSES))
        )
        found = {name: of_case for part in parts for name, of_case in part.items()}
    return {name: found[name] for name in names}


def _compared(names: list[str]) -> dict[str, Any]:
    return results_of("tests.fake_cuda.memory", "--json", *names)


@pytest.mark.parametrize("name", CASES)
def test_plan_is_what_a_step_holds(name: str, results: dict[str, Any]) -> None:
    found = results[name]
    assert "error" not in found, found["error"]
    planned, traced = found["planned"], found["traced"]
    peak = max(planned.values()) / max(traced.values()) - 1
    assert abs(peak) <= OF_PEAK, table(results)
    for phase in planned:
        off_bytes = abs(planned[phase] - traced[phase])
        assert off_bytes <= max(OF_PHASE * traced[phase], TABLES_OF_ROPE), (
            f"{phase}\n{table(results)}"
        )
