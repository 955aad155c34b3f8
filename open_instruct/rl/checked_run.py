"""A GRPO run is checked and opened here, before any learner or engine exists.

So mistakes are refused at once. The checks themselves are in `run_checks.py`.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.rollout_sections import TOOL_SET
from open_instruct.core.episodes import RECORDED
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import spell_count
from open_instruct.core.user_code import load_own_function
from open_instruct.data.chat import ChatFormat
from open_instruct.data.files.array_file import find_cache_folder
from open_instruct.data.prompts import Prompts, build_row_settings, load_prompt_dataset
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.environments.environment import Factory, begin_run
from open_instruct.environments.registry import known_environments
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.status import this_process
from open_instruct.parallel.wording import describe_layout
from open_instruct.planning.start_check import check_plan
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.verifier import Verifier
from open_instruct.rl.engine_folder import find_engine_folder
from open_instruct.rl.episodes.bridge import check_bridges
from open_instruct.rl.recorded import check_recorded_sessions
from open_instruct.rl.run_checks import (
    check_agents,
    check_companion_models,
    check_engine,
    find_template_mismatches,
    refuse_other_rows,
    refuse_unknown_score,
    try_sandbox,
)
from open_instruct.rl.samples import load_conversations
from open_instruct.run.cadence import build_cadence
from open_instruct.run.console import Console
from open_instruct.run.opening import (
    apply_plan,
    claim_run_folder,
    find_memory_bytes,
    say_plan,
    warn_noop_offload,
)
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory, start_log
from open_instruct.run.trackers import Tracker, build_trackers
from open_instruct.run.untrained_rows import find_untrained_rows
from open_instruct.training.best_step_watch import find_idle_watch
from open_instruct.training.rows.datasets import build_load_arguments


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """A run whose flags, folder, checkpoint and prompts are known to be good."""

    config: GRPOConfig
    layout: ShardLayout
    directory: RunDirectory
    console: Console
    pretrained: Pretrained
    engine_folder: Path  # what engines open
    chat: ChatFormat
    prompts: Prompts
    held_out: Prompts | None
    environments: Mapping[str, Factory] | None  # by name; None where no prompt has one
    conversations: TokenDataset | None
    trackers: tuple[Tracker, ...]


@contextmanager
def open_rollout_run(config: GRPOConfig) -> Iterator[RolloutRun]:
    """Check everything that needs no cluster; the run's folder is this run's while the block runs.

    Raises:
        InputError: names the flag, row, file or tensor that cannot be used.
    """
    layout = find_layout(config.parallel, config.parallel.num_learners_per_node, config.backend)
    config.backend.refuse_unfit()
    verifiers = known_verifiers(config.reward)
    environments = known_environments(config.environment)
    load_own_function(config.loss.loss_fn, flag="--loss_fn", built_in=POLICY_LOSSES)
    load_own_function(
        config.rollout.advantage_normalization_type, flag="--advantages", built_in=ADVANTAGES
    )
    directory = RunDirectory(path=Path(config.run.output_dir))
    console = Console(speaks=True)
    this_process.begin("starting")
    with claim_run_folder(directory, config, layout, console, "grpo"):
        start_log(directory.log, rank=0)
        flags = as_flat_dict(config)
        trackers = build_trackers(config.logging, folder=directory.path, config=flags)
        for warning in layout.warnings:
            console.warn(warning)
        console.say(describe_layout(layout, config.parallel, config.backend, who="learner"))
        pretrained = _open_policy(config, directory, layout)
        config = _apply_plan(config, pretrained.folder, console, directory)
        chat = ChatFormat.from_flags(pretrained.tokenizer, config.data)
        trains_adapters = config.adapters is not None
        for warning in _find_warnings(pretrained, chat, verifiers, trains_adapters=trains_adapters):
            console.warn(warning)
        prompts, held_out = _read_prompts(config, pretrained, verifiers, environments, console)
        _check_best_score(config, prompts, held_out, console)
        answering = _prepare_judges_and_environments(
            config, (prompts, held_out), verifiers, environments, console
        )
        if answering - {RECORDED}:
            check_bridges(chat)
            check_agents(config, environments, answering)
        if RECORDED in answering:
            check_recorded_sessions(prompts, held_out, config, chat)
        conversations = load_conversations(
            config.data, pretrained.tokenizer, seed=config.optim.seed, console=console
        )
        refuse_other_rows(directory.path, prompts, conversations, seed=config.optim.seed)
        engine_dtype: torch.dtype = getattr(torch, config.engine_dtype)
        engine_folder = find_engine_folder(pretrained, directory, console, dtype=engine_dtype)
        yield RolloutRun(
            config=config,
            layout=layout,
            directory=directory,
            console=console,
            pretrained=pretrained,
            engine_folder=engine_folder,
            chat=chat,
            prompts=prompts,
            held_out=held_out,
            environments=environments if answering else None,
            conversations=conversations,
            trackers=tuple(trackers),
        )


def _open_policy(config: GRPOConfig, directory: RunDirectory, layout: ShardLayout) -> Pretrained:
    """Open the start model, and check that learners and engines can work with it.

    Raises:
        InputError: they cannot.
    """
    pretrained = open_pretrained(config, directory.hf_model, layout=layout)
    has_experts = bool(getattr(pretrained.hf_config, "num_experts", None))
    if config.fleet.routing_replay == "on" and not has_experts:
        raise InputError(
            f"--routing_replay on: the model in {pretrained.folder} has no experts; use off",
            kind="conflict",
        )
    check_companion_models(pretrained, config, layout)
    check_engine(
        pretrained.hf_config,
        config.fleet,
        engine_dtype=config.engine_dtype,
        sends_adapter=config.sent_adapter is not None,
    )
    return pretrained


def _check_best_score(
    config: GRPOConfig,
    prompts: Prompts,
    held_out: Prompts | None,
    console: Console,
) -> None:
    """Check the metric of `--keep_best`, if there is one.

    Raises:
        InputError: no step can have it.
    """
    metric = config.run.keep_best
    if metric is None:
        return
    judges_format = config.reward.apply_r1_style_format_reward
    refuse_unknown_score(metric, prompts, held_out, judges_format=judges_format)
    warning = find_idle_watch(metric, build_cadence(config), flag="--local_eval_every")
    if warning:
        console.warn(warning)


def _find_warnings(
    pretrained: Pretrained,
    chat: ChatFormat,
    verifiers: Mapping[str, Verifier],
    *,
    trains_adapters: bool,
) -> list[str]:
    """Warnings about the start model, its template, and what adapters leave frozen."""
    warnings = [*pretrained.warnings, *find_template_mismatches(verifiers, chat)]
    if trains_adapters:
        warning = find_untrained_rows(pretrained, chat.turn_end_token_ids())
        if warning is not None:
            warnings.append(warning)
    return warnings


def _prepare_judges_and_environments(
    config: GRPOConfig,
    datasets: tuple[Prompts, Prompts | None],
    verifiers: Mapping[str, Verifier],
    environments: Mapping[str, Factory],
    console: Console,
) -> set[str]:
    """Begin the run of all that the prompts name.

    Returns the names of the environments and tools that answer replies.
    """
    judges: set[str] = set()
    answering: set[str] = set()
    for prompts in datasets:
        if prompts is not None:
            verifier_names, environment_names = prompts.find_names()
            judges |= verifier_names
            answering |= environment_names
    for name in verifiers.keys() & judges:
        verifiers[name].begin_run(find_cache_folder(config.data.cache_dir))
    for name in sorted(answering):
        begin_run(environments[name])
    if TOOL_SET in answering:
        answering |= set(config.environment.tools)
    if config.environment.search_corpus and "search" not in answering:
        console.warn("--search_corpus is not read: the tool search answers none of the prompts")
    try_sandbox(config.reward, judges, answering, console)
    return answering


def _read_prompts(
    config: GRPOConfig,
    pretrained: Pretrained,
    verifiers: Mapping[str, Verifier],
    environments: Mapping[str, Factory],
    console: Console,
) -> tuple[Prompts, Prompts | None]:
    """Read the prompts, and the held-out prompts if there are any; reports what became of rows."""
    data = config.data
    changes = build_row_settings(config)

    def read(title: str, flag: str, *, is_held_out: bool = False) -> Prompts:
        arguments = build_load_arguments(
            data, pretrained.tokenizer, flag, seed=config.optim.seed, is_held_out=is_held_out
        )
        with console.counting(title) as on_progress:
            prompts, report = load_prompt_dataset(
                max_prompt_token_length=data.max_prompt_token_length,
                known_verifiers=verifiers,
                known_environments=environments,
                on_progress=on_progress,
                **arguments,
                **changes,
            )
        console.report(title, report.lines())
        return prompts

    this_process.begin("reading the prompts")
    prompts = read("prompts", "dataset_mixer_list")
    if not data.has_held_out_rows:
        return prompts, None
    flag = "dataset_mixer_list"
    if data.dataset_mixer_eval_list:
        flag = "dataset_mixer_eval_list"
    held_out = read("held-out prompts", flag, is_held_out=True)
    num_shared = held_out.count_shared(prompts)
    if num_shared:
        verb = "is" if num_shared == 1 else "are"
        console.warn(
            f"{num_shared:,} of {spell_count(len(held_out), 'held-out prompt')} "
            f"{verb} among the training prompts: scores on them do "
            "not show what is new; take them out of --dataset_mixer_list or "
            "--dataset_mixer_eval_list"
        )
    return prompts, held_out


def _apply_plan(
    config: GRPOConfig,
    folder: Path,
    console: Console,
    directory: RunDirectory,
) -> GRPOConfig:
    """The flags with the choices of the learners' plan, where this host is like the learners'.

    It is if it has GPUs, or if no other node joins.

    Raises:
        InputError: a learner surely cannot fit.
    """
    learners = config.parallel.num_learners_per_node
    on_cuda = torch.cuda.is_available()
    if not on_cuda and config.fleet.ray_address is not None:
        if config.memory.activation_checkpointing == "auto":
            console.say(
                "activation checkpointing is off: there is no GPU here to plan for "
                "(--activation_checkpointing turns it on)"
            )
        return config
    warn_noop_offload(config, console, on_cuda=on_cuda)
    device = torch.device("cuda", 0) if on_cuda else torch.device("cpu")
    memory_bytes = find_memory_bytes(device, num_sharing=sum(learners))
    check = check_plan(
        config, learners, model_folder=str(folder), memory_bytes=memory_bytes, on_cuda=on_cuda
    )
    return apply_plan(config, say_plan(check, console, directory))
