"""How many engines a run has, on GPUs of their own and on those of its learners."""

from open_instruct.config.fleet_sections import FleetSection


def count_engines(fleet: FleetSection, num_learners: int) -> int:
    """The engines of a run; where all take turns, as many as fit on the learners' GPUs."""
    if fleet.placement == "shared":
        return fleet.count_turning_engines(num_learners)
    return fleet.vllm_num_engines
