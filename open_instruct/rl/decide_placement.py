"""`--placement auto` of a run: learners and engines on its GPUs as the plan finds them faster."""

import torch

from open_instruct.config.flags import spell_value
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.planning.placements import choose_placement
from open_instruct.planning.presentation import render_words
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject import units
from open_instruct.planning.subject.build_workload import build_shape
from open_instruct.planning.subject.devices import CPU, Device, find_device, find_gpu


def decide_placement(config: GRPOConfig) -> GRPOConfig:
    """The flags with `--placement split` or `shared` in the place of `auto`, and prints why.

    `--num_learners_per_node` is taken as all GPUs of each node.

    Raises:
        InputError: no placement fits; the message says what the one that needs least would need.
    """
    if config.fleet.placement != "auto":
        return config
    nodes = tuple(config.parallel.num_learners_per_node)
    setting = Setting(
        config=config,
        shape=build_shape(config, config.model.config_path),
        gpus_per_node=nodes,
        device=_find_device(sum(nodes)),
        on_cuda=torch.cuda.is_available(),
    )
    choice = choose_placement(setting, nodes, asked="auto")
    why, *_ = render_words("placement", choice)
    if not choice.chosen.fits:
        raise InputError(
            f"--placement auto, on {spell_value(list(nodes))} GPUs: {why} `open-instruct plan grpo "
            "--placement auto` shows all; give more GPUs (--num_learners_per_node)",
            kind="machine",
        )
    print(f"--placement auto: {why}")
    decided = choice.chosen.set_flags(setting).config
    assert isinstance(decided, GRPOConfig)
    return decided


def _find_device(num_gpus: int) -> Device:
    """The GPU of this process, by its name or else its memory; without one its share of a CPU."""
    if not torch.cuda.is_available():
        return find_device(CPU, num_sharing=num_gpus)
    known = find_gpu(torch.cuda.get_device_name())
    if known is not None:
        return known
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return find_device(f"memory_gib={memory_bytes / units.GIB}")
