"""`--placement auto` of a run: learners and engines on its GPUs as the plan finds them faster."""

import logging
from dataclasses import replace

import torch

from open_instruct.config.flags import spell_value
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.planning.placement_choice import choose_placement
from open_instruct.planning.placements import Placement, find_placement
from open_instruct.planning.plan import make_plan
from open_instruct.planning.presentation import render_words
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject import units
from open_instruct.planning.subject.build_workload import build_shape
from open_instruct.planning.subject.devices import CPU, Device, find_device, find_gpu

log = logging.getLogger(__name__)


def decide_placement(config: GRPOConfig) -> GRPOConfig:
    """The flags with what the plan decides of them in the place of defaults, and prints why.

    That is `--placement split`, `shared` or `mixed` in the place of `auto`, which takes
    `--num_learners_per_node` as all GPUs of each node; and where all engines take turns in
    asynchronous steps `--prompts_ahead`.

    Raises:
        InputError: no placement fits; the message says what the one that needs least would need.
    """
    fleet = config.fleet
    if fleet.placement == "auto":
        return _choose_placement(config)
    is_open = config.rollout.prompts_ahead is None and config.rollout.async_steps > 0
    if fleet.placement == "shared" and is_open:
        return _size_turns(config)
    return config


def _choose_placement(config: GRPOConfig) -> GRPOConfig:
    setting = _describe_setting(config)
    nodes = setting.gpus_per_node
    choice = choose_placement(setting, nodes, asked="auto")
    why, *_ = render_words("placement", choice)
    if not choice.chosen.fits:
        raise InputError(
            f"--placement auto, on {spell_value(list(nodes))} GPUs: {why} `open-instruct plan grpo "
            "--placement auto` shows all; give more GPUs (--num_learners_per_node)",
            kind="machine",
        )
    print(f"--placement auto: {why}")
    _print_turns(choice.chosen)
    decided = choice.chosen.set_flags(setting).config
    assert isinstance(decided, GRPOConfig)
    return decided


def _size_turns(config: GRPOConfig) -> GRPOConfig:
    """The flags with `--prompts_ahead`, where the run can be planned."""
    try:
        placement = find_placement(make_plan(_describe_setting(config)))
    except Exception as error:  # a plan is a help; the run itself judges what it can read
        log.info("turns are not planned", exc_info=True)
        most = config.rollout.max_prompts_ahead
        print(f"--prompts_ahead {most}: no plan says less ({type(error).__name__}: {error})")
        return config
    _print_turns(placement)
    rollout = replace(config.rollout, prompts_ahead=placement.prompts_ahead)
    return replace(config, rollout=rollout)


def _print_turns(placement: Placement) -> None:
    if placement.pauses_completions:
        print(*render_words("ahead", placement))


def _describe_setting(config: GRPOConfig) -> Setting:
    nodes = tuple(config.parallel.num_learners_per_node)
    return Setting(
        config=config,
        shape=build_shape(config, config.model.config_path),
        gpus_per_node=nodes,
        device=_find_device(sum(nodes)),
        on_cuda=torch.cuda.is_available(),
    )


def _find_device(num_gpus: int) -> Device:
    """The GPU of this process, by its name or else its memory; without one its share of a CPU."""
    if not torch.cuda.is_available():
        return find_device(CPU, num_sharing=num_gpus)
    known = find_gpu(torch.cuda.get_device_name())
    if known is not None:
        return known
    memory_bytes = torch.cuda.get_device_properties(0).total_memory
    return find_device(f"memory_gib={memory_bytes / units.GIB}")
