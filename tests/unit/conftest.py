"""One thread for small models, and a world of many ranks in one process."""

from collections.abc import Callable, Iterator

import pytest

JoinAs = Callable[[int, int], None]


@pytest.fixture
def join_as() -> Iterator[JoinAs]:
    """Become a rank of a world that has no other processes.

    OLMo-core keeps its mesh in a global, and DTensor remembers process groups with the shapes it
    has worked out.
    """
    import torch.distributed as dist  # only now: most selections of tests do without it
    from olmo_core.distributed import parallel
    from torch.distributed.tensor import debug
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        parallel._WORLD_MESH = None
        debug._clear_sharding_prop_cache()

    def join(rank: int, world_size: int) -> None:
        leave()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    assert not dist.is_initialized()
    yield join
    leave()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Models this small run faster on one thread than on several that wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
