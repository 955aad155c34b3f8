"""How many engines a run has, on GPUs of their own or on those of its learners."""

from open_instruct.config.fleet_sections import FleetSection


def count_engines(fleet: FleetSection, num_learners: int) -> int:
    """The engines of a run; where they take turns, as many as fit on the learners' GPUs."""
    if fleet.takes_turns:
        return num_learners // fleet.vllm_tensor_parallel_size
    return fleet.vllm_num_engines
