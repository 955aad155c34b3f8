"""Joins the sections of a run's flags with the backend that shards it.

The room config knows no backend, and a backend knows no parser: what is known of both is here. The
backend itself is found by `commands.run_flags`, since its package stands above this one.
"""

from dataclasses import replace
from typing import Any

from open_instruct.config.flags import list_flags
from open_instruct.config.training import BackendRecord, ConfigT

# Flags of sharding that mean the same on one process.
FLAGS_OF_ONE_PROCESS = ("single_gpu_mode", "backend", "deepspeed_stage")


def resolve(config: ConfigT, backend: BackendRecord) -> ConfigT:
    """The whole configuration of a run under `backend`.

    Flags that were not given, and whose default depends on the backend, have its value.
    """
    flags = list_flags(type(config))
    values_by_section: dict[str, dict[str, Any]] = {}
    for name, value in backend.default_values(config).items():
        values_by_section.setdefault(flags[name].section, {})[name] = value
    sections = {}
    for section, values in values_by_section.items():
        sections[section] = replace(getattr(config, section), **values)
    return replace(config, backend_record=backend, **sections)


def reduce_to_one_process(config: ConfigT) -> ConfigT:
    """The config for one process: the same mathematics without shards, and without compilation."""
    flags = {name: getattr(config.parallel, name) for name in FLAGS_OF_ONE_PROCESS}
    parallel = type(config.parallel)(**flags)
    memory = replace(config.memory, compile_model=False, activation_memory_budget=1.0)
    return resolve(replace(config, parallel=parallel, memory=memory), config.backend)
