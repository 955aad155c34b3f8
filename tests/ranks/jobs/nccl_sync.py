"""Weight syncs of the way of NCCL, over gloo, with all calls noted."""

from typing import Any

from tests.ranks.jobs import weight_sync
from tests.ranks.nccl_rules import recorded


def sync(**arguments: Any) -> dict[str, Any]:
    with recorded() as notes:
        differing = weight_sync.sync(**arguments)
    return {"differing": differing, "notes": notes}


def feed_engine(**arguments: Any) -> dict[str, Any]:
    with recorded() as notes:
        differences = weight_sync.feed_engine(**arguments)
    return {"differences": differences, "notes": notes}
