"""`open-instruct plan`: what a run would need, before any GPU is taken.

Its words become a setting: a run, and the machines that it would run on.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from open_instruct.commands.run_flags import parse_named_run
from open_instruct.config.flags import spell_value
from open_instruct.config.fleet_sections import FleetSection, LearnerParallelSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.parser import list_given_flags
from open_instruct.config.sections import flag
from open_instruct.config.sharding_sections import RanksSection
from open_instruct.config.validation import limit_problems, refuse
from open_instruct.core.errors import InputError
from open_instruct.core.files import write_user_file
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.node_sizes import read_node_sizes
from open_instruct.planning import presentation
from open_instruct.planning.advice import Advice
from open_instruct.planning.placement_choice import PlacementChoice, choose_placement
from open_instruct.planning.plan import make_plan
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject.build_workload import RunConfig, build_shape, find_objective
from open_instruct.planning.subject.devices import CPU, Device, find_device, has_gpu_here
from open_instruct.report.plan_page import html_page, print_placements, print_plan


@dataclass(kw_only=True)
class PlanFlags:
    """Say what a run would need before it is started: the layout, where each GPU's memory goes in
    every phase, what travels within a node and across, a lower bound of a step's time, and which
    flags would make it fit or make it faster. Takes the run's own flags or YAML file
    (`open-instruct dpo --help`, and sft, grpo); those of its data and its folder need not be given.
    --model_name_or_path is a folder, a config.json alone, or the name of a public model of a family
    that can be trained, whose shape is built in. Nothing is started or downloaded.

    Examples:
        open-instruct plan dpo --model_name_or_path allenai/OLMo-2-1124-7B --num_nodes 2
            --gpus_per_node 8
        open-instruct plan dpo configs/dpo/olmo2_32b_32gpu_tp.yaml --gpus_per_node 4x8 --gpu h200
            --html plan.html
        open-instruct plan grpo configs/grpo/olmo3_7b_2x8_plus_8_engines.yaml --json
        open-instruct plan dpo dpo/tiny_cpu --num_processes 2
    """

    num_nodes: int | None = flag(
        "nodes of --gpus_per_node GPUs each; default: as many as that lists", None, minimum=1
    )
    gpus_per_node: list[str] = flag(
        "GPUs that train on each node: one number with --num_nodes, else one for each node; 4x8 "
        "is four nodes of 8; for GRPO default: --num_learners_per_node; with that flag all GPUs "
        "of each node, those of engines too",
        [],
    )
    gpu: str | None = flag(
        "a100, h100, h200, b200, mi300x, l40s, a10g, v100, rtx4090, rtx5090, rtx6000-ada, "
        "rtx6000-blackwell, or memory_gib=N for any other, with the speeds of an H100; cpu: this "
        "machine without one. Default: h100, and cpu for a run in float32 where neither "
        "--gpus_per_node nor a GPU is here",
        None,
    )
    mfu: float = flag(
        "assumed share of the GPU's peak FLOP/s (model FLOPs utilisation)", 0.4, above=0, maximum=1
    )
    shared_prompt_tokens: int = flag(
        "count prompts of so many tokens as computed once for a pair or group, as "
        "--prefix_sharing does",
        0,
    )
    in_node_gb_s: float | None = flag(
        "GB/s that a GPU sends within its node; default: the GPU's", None, above=0
    )
    cross_node_gb_s: float | None = flag(
        "GB/s that a GPU sends to other nodes; default: the GPU's", None, above=0
    )
    rollout_tokens_per_second: float | None = flag(
        "tokens that one GPU of an engine generates in a second, as measured, for GRPO's "
        "--placement; default: by the model's size and the GPU's memory",
        None,
        above=0,
    )
    all: bool = flag(
        "print all that is known: what each phase holds, every exchange, weight syncs, all layouts",
        False,
    )
    json: bool = flag("print the whole plan as JSON", False)
    html: str | None = flag("also write the plan as a page to this file", None)


DEFAULT_GPU = "h100"

# Values of flags that a run cannot do without and a plan does not read.
PLACEHOLDERS = {
    "mixer_list": ["rows.jsonl", "1.0"],
    "dataset_mixer_list": ["rows.jsonl", "1.0"],
    "output_dir": "planned",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The setting to plan, warnings about its flags, and the flags of the plan itself."""

    setting: Setting
    warnings: tuple[str, ...]
    flags: PlanFlags
    choice: PlacementChoice | None = None


def main(argv: Sequence[str]) -> int:
    """Plan what the words after the command describe and print it.

    Returns:
        The exit code, 0 also where the run does not fit: the plan is made.

    Raises:
        InputError: a flag, the model or the GPU will not do, or the page cannot be written.
    """
    request = parse_request(argv)
    choice = request.choice
    plan = make_plan(request.setting) if choice is None else choice.chosen.plan
    advice = Advice(plan)
    for warning in request.warnings:
        print(f"open-instruct plan: warning: {warning}", file=sys.stderr)
    if request.flags.html is not None:
        write_user_file(request.flags.html, html_page(plan, advice, choice), flag="--html")
    if request.flags.json:
        print(json.dumps(presentation.plan_record(plan, advice, choice), indent=2))
    else:
        console = Console(file=sys.stdout)
        if choice is not None:
            print_placements(choice, console)
        print_plan(plan, advice, console, is_short=not request.flags.all)
    return 0


def parse_request(words: Sequence[str]) -> PlanRequest:
    """The request that the words after the command spell.

    Raises:
        InputError: a flag is wrong, of the plan or of the run; there is no such model or GPU.
    """
    example = "open-instruct plan dpo --gpus_per_node 8"
    config, objective, unneeded = parse_named_run(
        words, assumed=PLACEHOLDERS, example=example, plan=PlanFlags
    )
    flags: PlanFlags = config.plan
    refuse(limit_problems(flags))
    sizes = _read_nodes(flags)
    compares = False
    if isinstance(config, GRPOConfig):
        given_names = list_given_flags(type(config), words[1:])
        compares = "placement" in given_names or config.fleet.placement != "split"
        is_given = "num_learners_per_node" in given_names and not compares
        nodes = _choose_learners(config.parallel, config.fleet, sizes, is_given=is_given)
        can_be_here = _is_on_one_node(config.parallel, config.fleet)
        num_here = sum(nodes)
        has_engines_in_node = _has_engines_in_node(config.fleet, nodes, sizes)
        if not config.parallel.single_gpu_mode:
            parallel = replace(config.parallel, num_learners_per_node=list(nodes))
            config = replace(config, parallel=parallel)
    else:
        nodes = _choose_nodes(config.parallel, sizes)
        can_be_here = True
        num_here = max(nodes)
        has_engines_in_node = False
    rate = flags.rollout_tokens_per_second
    if rate is not None and not compares:
        raise InputError(
            f"--rollout_tokens_per_second {rate:g}: read only with GRPO's --placement, such as "
            "auto; leave it out",
            kind="unread_flag",
        )
    param_dtype = config.model.param_dtype
    is_for_cpu = can_be_here and _is_for_this_cpu(flags, param_dtype)
    device, notes = _choose_device(flags, param_dtype, num_here=num_here, is_for_cpu=is_for_cpu)
    warnings = (*_validate(config, objective, compares=compares), *unneeded, *notes)
    _check_shared_prompt(config, flags.shared_prompt_tokens)
    setting = Setting(
        config=config,
        shape=build_shape(config, config.model.config_path),
        gpus_per_node=nodes,
        device=device,
        mfu=flags.mfu,
        on_cuda=not device.is_cpu,
        shared_prompt_tokens=flags.shared_prompt_tokens,
        has_engines_in_node=device.is_cpu or has_engines_in_node,
    )
    return PlanRequest(
        setting=setting,
        warnings=warnings,
        flags=flags,
        choice=_choose_placement(setting, flags, sizes) if compares else None,
    )


def _validate(config: RunConfig, objective: Objective, *, compares: bool) -> list[str]:
    """The warnings of a run; the flags that the plan places it by are checked with its choice."""
    if isinstance(config, GRPOConfig) and compares:
        config = replace(config, fleet=replace(config.fleet, placement="auto"))
    warnings: list[str] = objective.validate(config)
    return warnings


def _choose_placement(setting: Setting, flags: PlanFlags, sizes: list[int]) -> PlacementChoice:
    """The placement that --placement asks for."""
    assert isinstance(setting.config, GRPOConfig)
    return choose_placement(
        setting,
        sizes or setting.gpus_per_node,
        asked=setting.config.fleet.placement,
        tokens_per_second=flags.rollout_tokens_per_second,
    )


def _read_nodes(flags: PlanFlags) -> list[int]:
    """GPUs of each node, from --gpus_per_node and --num_nodes; empty where neither is given."""
    sizes = read_node_sizes(flags.gpus_per_node)
    if flags.num_nodes in (None, len(sizes)):
        return sizes
    if len(sizes) != 1:
        flag_words = f"--num_nodes {flags.num_nodes} with {len(sizes)} numbers in --gpus_per_node"
        raise InputError(
            f"{flag_words}: give one for all nodes, such as 8, or leave --num_nodes out",
            kind="layout",
        )
    return read_node_sizes([f"{flags.num_nodes}x{sizes[0]}"])


def _choose_nodes(parallel: RanksSection, sizes: list[int]) -> tuple[int, ...]:
    """The processes of each node of an offline run: the given nodes, or --num_processes of one."""
    if sizes:
        return tuple(sizes)
    if parallel.num_processes is not None and parallel.num_processes.isdecimal():
        return (int(parallel.num_processes),)
    raise InputError(
        "missing: --gpus_per_node, such as '--num_nodes 2 --gpus_per_node 8' or "
        "'--gpus_per_node 2 4'",
        kind="missing_flag",
    )


def _choose_learners(
    parallel: LearnerParallelSection,
    fleet: FleetSection,
    sizes: list[int],
    *,
    is_given: bool,
) -> tuple[int, ...]:
    """GRPO's learners of each node.

    They are --num_learners_per_node where no nodes are given, or where the flag `is_given` too.
    """
    if sizes and not is_given:
        return tuple(sizes)
    if sizes:
        _check_room(parallel, fleet, sizes)
    return tuple(parallel.num_learners_per_node)


def _check_room(parallel: LearnerParallelSection, fleet: FleetSection, sizes: list[int]) -> None:
    """Learners must find their nodes, and engines what these leave."""
    learners = parallel.num_learners_per_node
    flag_words = f"--num_learners_per_node {spell_value(learners)}"
    largest_first = zip(sorted(learners, reverse=True), sorted(sizes, reverse=True), strict=False)
    if len(learners) > len(sizes) or any(learner > size for learner, size in largest_first):
        nodes = spell_value(sizes)
        raise InputError(
            f"{flag_words} needs a node of its own for each number; the nodes have {nodes} GPUs",
            kind="layout",
        )
    num_free = sum(sizes) - sum(learners)
    if not parallel.single_gpu_mode and fleet.num_gpus > num_free:
        raise InputError(
            f"{flag_words} leaves {num_free} of {sum(sizes)} GPUs for engines, and "
            f"--vllm_num_engines {fleet.vllm_num_engines} x --vllm_tensor_parallel_size "
            f"{fleet.vllm_tensor_parallel_size} = {fleet.num_gpus}; ask for fewer, "
            "or give more GPUs",
            kind="layout",
        )


def _has_engines_in_node(fleet: FleetSection, nodes: tuple[int, ...], sizes: list[int]) -> bool:
    """Whether all engines are on the one node of the learners."""
    return len(sizes) == 1 and fleet.num_gpus <= sizes[0] - sum(nodes)


def _check_shared_prompt(config: RunConfig, num_tokens: int) -> None:
    """Check that a shared prompt leaves room for a reply, in a run that shares prompts."""
    if num_tokens == 0:
        return
    flag_words = f"--shared_prompt_tokens {num_tokens}"
    if isinstance(config, GRPOConfig):
        shares = config.loss.prefix_sharing != "off"
        longest = config.data.max_prompt_token_length
        limit = "--max_prompt_token_length"
    else:
        objective = find_objective(config)
        has_several = objective.choose_rows(config).documents_per_row > 1
        shares = has_several and config.data.packing and objective.prefix_sharing(config) != "off"
        longest = config.data.max_seq_length - 1
        limit = "--max_seq_length less a token of reply"
    if not shares:
        why = (
            "rows of one text share nothing, nor do others with --prefix_sharing off or "
            "--no_packing"
        )
        raise InputError(f"{flag_words}: {why}; leave it out", kind="unread_flag")
    if not 1 <= num_tokens <= longest:
        raise InputError(
            f"{flag_words}: must be at least 1 and at most {longest} ({limit})", kind="out_of_range"
        )


def _choose_device(
    flags: PlanFlags,
    param_dtype: str,
    *,
    num_here: int,
    is_for_cpu: bool,
) -> tuple[Device, list[str]]:
    """The device that a process of the run has, and warnings about it.

    Args:
        num_here: processes that share this machine, where the device is its CPU.
        is_for_cpu: whether that is the device, although no --gpu names it.
    """
    notes = []
    name = flags.gpu
    if is_for_cpu:
        name = CPU
        notes.append(
            "planned for this machine's CPU, as the run computes in float32 and no GPU is here; "
            "--gpu h100 plans for one"
        )
    device = find_device(name or DEFAULT_GPU, num_sharing=num_here)
    if not device.has_bf16 and param_dtype == "bfloat16":
        notes.append(
            f"--gpu {name}: it has no products in bfloat16, and times are those of float32; give "
            "--param_dtype float32"
        )
    if flags.in_node_gb_s is not None:
        device = replace(device, in_node_gb_s=flags.in_node_gb_s)
    if flags.cross_node_gb_s is not None:
        device = replace(device, cross_node_gb_s=flags.cross_node_gb_s)
    return device, notes


def _is_for_this_cpu(flags: PlanFlags, param_dtype: str) -> bool:
    """Whether a run that can be on one node is meant for this machine, which has no GPU."""
    names_machine = flags.gpu or flags.gpus_per_node or flags.num_nodes is not None
    return not names_machine and param_dtype == "float32" and not has_gpu_here()


def _is_on_one_node(parallel: LearnerParallelSection, fleet: FleetSection) -> bool:
    """Whether GRPO's learners are on one node, and no cluster is named."""
    return len(parallel.num_learners_per_node) == 1 and fleet.ray_address is None
