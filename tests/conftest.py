"""In which order tests run, beside which others, and where those marked `gpu` do.

They are skipped where there is no CUDA device, but for a rehearsal of them on the CPU.
"""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)
from tests.tiers import num_examples

# Models here are small, and files run beside each other: threads of one would take the cores of
# another. It is read when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of the terminals that tests pretend, whichever one they are started from.
os.environ["TERM"] = "xterm-256color"

# A test asserts behaviour, never wall time.
settings.register_profile("any_time", deadline=None, max_examples=num_examples(30))
settings.load_profile("any_time")


# What is imported with the tests stays: looking for garbage in it took a quarter of the time.
gc.disable()


@pytest.fixture(autouse=True, scope="session")
def empty_folder_to_work_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests work in an empty folder: a relative name must not find what lies beside the sources, as
    a demo does.
    """
    folder = tmp_path_factory.mktemp("empty")
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)
    assert [path.name for path in folder.iterdir()] == []  # a test writes into a folder of its own


@pytest.fixture(autouse=True, scope="module")
def environment_to_put_back() -> Iterator[None]:
    """What a file's tests let libraries set, such as OLMo-core's TORCH_DIST_INIT_BARRIER, ends with
    that file.
    """
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _begin_with_slow_files(items)
    _skip_gpu_tests(items)


def _begin_with_slow_files(items: list[pytest.Item]) -> None:
    """So that no worker has one left when the others have ended."""
    marks = ("slow", "extended")
    slow = {item.path for item in items if any(map(item.get_closest_marker, marks))}
    items.sort(key=lambda item: item.path not in slow)


def _skip_gpu_tests(items: list[pytest.Item]) -> None:
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests or os.environ.get("REHEARSE_GPU_TESTS"):
        return
    import torch  # only now: most selections of tests do without it

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
