"""The memory of a GPU in each phase of a run: the worst moment of each.

Between steps a GPU has its state (`state.py`); a forward and a backward pass add what
`forward_backward.py` says; `memory_model.py` has all other moments.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.parts import BUFFERS, Moment

# `models.load.CHUNK_BYTES`, which cannot be imported without torch; a test holds the two equal.
READ_CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """The worst moment of one phase: each label with its bytes, where these are not 0.

    Example::

        Phase(name="optimizer step", parts=(("parameters", 2**30), ("gradients", 2**30),
              ("optimizer states", 2**31)))
    """

    name: str
    parts: tuple[tuple[str, int], ...]

    @property
    def total_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.parts)


def memory_by_phase(model: MemoryModel) -> tuple[Phase, ...]:
    """Find the worst moment of each phase on rank 0, which never needs less than another.

    A phase that the run does not have is left out. A step after the first is meant: optimizer
    states are there.
    """
    workload = model.workload
    # `stream_load` holds a chunk of one tensor beside the shards; nothing else is there yet. In a
    # host's memory the pages of the file that this tensor is read from count too.
    loading = model.resident_parts(0, is_training=False) | {BUFFERS: READ_CHUNK_BYTES}
    if not workload.on_cuda:
        stored_bytes = model.shape.checkpoint_bytes_per_param
        loading[BUFFERS] += stored_bytes * model.shape.num_params_of_largest
    moments: dict[str, Iterable[Moment]] = {"load": [loading]}
    if workload.reference_pass_tokens:
        moments["reference pass"] = model.reference_pass()
    if workload.scorings:
        moments["scoring pass"] = model.scoring_pass()
    if model.critic:
        moments["critic"] = model.critic.step_as_critic()
    resident = model.resident_parts(model.passes.accumulated_bytes(model.gradients))
    moments |= {
        "forward": model.passes.forward(resident),
        "backward": model.passes.backward(resident),
        "optimizer step": model.optimizer_step(),
    }
    if workload.num_engines:
        moments["weight sync"] = [model.weight_sync()]
    moments["export"] = [model.export()]
    phases = [find_worst(name, phase_moments) for name, phase_moments in moments.items()]
    return tuple(phases)


def find_worst(name: str, moments: Iterable[Moment]) -> Phase:
    """The phase `name`, at the worst of its moments."""
    worst = max(moments, key=lambda moment: sum(moment.values()))
    parts = []
    for label, num_bytes in worst.items():
        if num_bytes != 0:
            parts.append((label, num_bytes))
    return Phase(name=name, parts=tuple(parts))
