"""Workers of Ray are forks here, as in tests/fleet."""

from tests.fleet.warm_workers import forked_workers

__all__ = ["forked_workers"]
