"""Sections of flags are joined with the backend that shards their run.

The room config knows no backend, and a backend knows no parser: what is known of both is here. The
backend itself is found by `commands.run_flags`, since its package stands above this one.
"""

from dataclasses import replace
from typing import Any

from open_instruct.config.flags import flags_of
from open_instruct.config.training import BackendRecord, ConfigT

STAY_ON_ONE_PROCESS = ("single_gpu_mode", "backend", "deepspeed_stage")


def resolve(config: ConfigT, backend: BackendRecord) -> ConfigT:
    """The whole configuration of a run under `backend`.

    Flags that were not given, and whose default depends on the backend, have its value.
    """
    flags = flags_of(type(config))
    values_by_section: dict[str, dict[str, Any]] = {}
    for name, value in backend.default_values(config).items():
        values_by_section.setdefault(flags[name].section, {})[name] = value
    sections = {
        section: replace(getattr(config, section), **values)
        for section, values in values_by_section.items()
    }
    return replace(config, backend_record=backend, **sections)


def on_one_process(config: ConfigT) -> ConfigT:
    """The config for one process: the same mathematics without shards, and without compilation."""
    same = {name: getattr(config.parallel, name) for name in STAY_ON_ONE_PROCESS}
    alone = replace(
        config,
        parallel=type(config.parallel)(**same),
        memory=replace(config.memory, compile_model=False, activation_memory_budget=1.0),
    )
    return resolve(alone, config.backend)
