"""The driver checks and opens a run before any learner or engine exists, so that mistakes are
refused at once.

A run that has taken all its steps exports its model here too, without starting a fleet.
"""

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PretrainedConfig

from open_instruct.checkpoints.saved_place import read_saved_place
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.rollout_sections import TOOL_SET, RewardSection
from open_instruct.core.errors import InputError, refuse_first
from open_instruct.core.families import FAMILIES
from open_instruct.core.metrics import HELD_OUT_PREFIX
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import counted, one_of
from open_instruct.core.user_code import own_function
from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompts import Prompts, PromptStream, load_prompt_dataset, row_changes
from open_instruct.data.token_dataset import TokenDataset, cache_root, check_saved_place, rows_fact
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.environments.environment import Factory, begin_run
from open_instruct.environments.registry import known_environments
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import POLICY_LOSSES
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.peers import doing
from open_instruct.parallel.wording import describe_layout
from open_instruct.planning.shown import check_plan
from open_instruct.rewards.code import SHARE_OF_TIME, Code, CodeStdio
from open_instruct.rewards.registry import known_verifiers
from open_instruct.rewards.reward_models import ModelVerifier
from open_instruct.rewards.sandbox.trial import try_walls
from open_instruct.rewards.verifier import Verifier
from open_instruct.rl.episodes.bridge import check_bridges
from open_instruct.rl.samples import load_conversations
from open_instruct.run.cadence import cadence_of
from open_instruct.run.console import Console
from open_instruct.run.opened import (
    made_ready,
    memory_of,
    say_plan,
    say_what_changes_nothing,
    with_chosen,
)
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory, log_to
from open_instruct.run.trackers import Tracker, build_trackers
from open_instruct.run.untrained_rows import find_untrained_rows
from open_instruct.training.best_step_watch import find_idle_watch
from open_instruct.training.reference import open_beside
from open_instruct.training.rows.datasets import reading

CONVERSATIONS = "conversations_fingerprint"
"""The key in the driver's state of the fingerprint of the rows of --sft_mixer_list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRun:
    """A run whose flags, folder, checkpoint and prompts are known to be good."""

    config: GRPOConfig
    layout: ShardLayout
    directory: RunDirectory
    console: Console
    pretrained: Pretrained
    chat: ChatFormat
    prompts: Prompts
    held_out: Prompts | None
    environments: Mapping[str, Factory] | None  # by name; None where no prompt has one
    conversations: TokenDataset | None
    trackers: tuple[Tracker, ...]


@contextmanager
def open_rollout_run(config: GRPOConfig) -> Iterator[RolloutRun]:
    """Check everything that needs no cluster, and keep the run's folder ready, and to this run,
    while the block runs.

    Raises:
        InputError: names the flag, row, file or tensor that cannot be used.
    """
    layout = find_layout(config.parallel, config.parallel.num_learners_per_node, config.backend)
    config.backend.refuse_unfit()
    verifiers = known_verifiers(config.reward)
    environments = known_environments(config.environment)
    own_function(config.loss.loss_fn, flag="--loss_fn", known=POLICY_LOSSES)
    own_function(config.rollout.advantage_normalization_type, flag="--advantages", known=ADVANTAGES)
    directory = RunDirectory(path=Path(config.run.output_dir))
    console = Console(speaks=True)
    doing("starting")
    with made_ready(directory, config, layout, console, "grpo"):
        log_to(directory.log, rank=0)
        trackers = build_trackers(
            config.logging, folder=directory.path, config=as_flat_dict(config)
        )
        for warning in layout.warnings:
            console.warn(warning)
        console.say(describe_layout(layout, config.parallel, config.backend, who="learner"))
        pretrained = open_pretrained(config, directory.hf_model, layout=layout)
        if config.fleet.routing_replay == "on" and not getattr(
            pretrained.hf_config, "num_experts", None
        ):
            raise InputError(
                (f"--routing_replay on: the model in {pretrained.folder} has no experts; use off"),
                kind="conflict",
            )
        _check_models_beside(pretrained, config, layout)
        check_engine(config, pretrained.hf_config)
        config = _planned(config, pretrained.folder, console, directory)
        data = config.data
        chat = ChatFormat.choose(
            pretrained.tokenizer, data.chat_template_name, add_bos=data.add_bos
        )
        for warning in _warnings(config, pretrained, chat, verifiers):
            console.warn(warning)
        prompts, held_out = _read_prompts(config, pretrained, verifiers, environments, console)
        if (metric := config.run.keep_best) is not None:
            refuse_unknown_score(config, (prompts, held_out))
            if idle := find_idle_watch(metric, cadence_of(config), flag="--local_eval_every"):
                console.warn(idle)
        answering = _prepare_judges_and_environments(
            config, (prompts, held_out), verifiers, environments, console
        )
        if answering:
            check_bridges(chat)
        conversations = load_conversations(config, pretrained.tokenizer, console=console)
        refuse_other_rows(directory.path, prompts, conversations, seed=config.optim.seed)
        yield RolloutRun(
            config=config,
            layout=layout,
            directory=directory,
            console=console,
            pretrained=pretrained,
            chat=chat,
            prompts=prompts,
            held_out=held_out,
            environments=environments if answering else None,
            conversations=conversations,
            trackers=tuple(trackers),
        )


def _warnings(
    config: GRPOConfig, pretrained: Pretrained, chat: ChatFormat, verifiers: Mapping[str, Verifier]
) -> list[str]:
    """Warnings about the start model, its template, and what adapters leave frozen."""
    untrained = (
        find_untrained_rows(pretrained, chat.turn_end_token_ids()) if config.adapters else None
    )
    return [*pretrained.warnings, *_other_templates(verifiers, chat), *filter(None, [untrained])]


def _check_models_beside(pretrained: Pretrained, config: GRPOConfig, layout: ShardLayout) -> None:
    """:raises InputError: a teacher or a critic cannot stand beside the policy."""
    if (teacher := config.loss.teacher_model_name_or_path) is not None:
        open_beside("teacher", teacher, pretrained, config=config, layout=layout)
    if config.rollout.has_critic:
        open_beside(
            "critic",
            config.critic.critic_model_name_or_path,
            pretrained,
            config=config,
            layout=layout,
        )


def _prepare_judges_and_environments(
    config: GRPOConfig,
    datasets: tuple[Prompts, Prompts | None],
    verifiers: Mapping[str, Verifier],
    environments: Mapping[str, Factory],
    console: Console,
) -> set[str]:
    """Have what the prompts name begin the run; returns the names of the environments and tools
    that answer replies.
    """
    named = [each.named() for each in datasets if each is not None]
    judges, answering = (set[str]().union(*names) for names in zip(*named, strict=True))
    for name in verifiers.keys() & judges:
        verifiers[name].begin_run(cache_root(config.data.cache_dir))
    for name in sorted(answering):
        begin_run(environments[name])
    if TOOL_SET in answering:
        answering |= set(config.environment.tools)
    if config.environment.search_corpus and "search" not in answering:
        console.warn("--search_corpus is not read: the tool search answers none of the prompts")
    _look_at_programs(config.reward, judges, answering, console)
    return answering


def _read_prompts(
    config: GRPOConfig,
    pretrained: Pretrained,
    verifiers: Mapping[str, Verifier],
    environments: Mapping[str, Factory],
    console: Console,
) -> tuple[Prompts, Prompts | None]:
    """The prompts, and the held-out prompts if any are named; says what becomes of the rows."""
    data = config.data
    changes = row_changes(config)

    def read(title: str, flag: str, *, is_held_out: bool = False) -> Prompts:
        with console.counting(title) as on_progress:
            prompts, report = load_prompt_dataset(
                max_prompt_token_length=data.max_prompt_token_length,
                known_verifiers=verifiers,
                known_environments=environments,
                on_progress=on_progress,
                **reading(config, pretrained.tokenizer, flag, is_held_out=is_held_out),
                **changes,
            )
        console.report(title, report.lines())
        return prompts

    doing("reading the prompts")
    prompts = read("prompts", "dataset_mixer_list")
    if not data.has_held_out_rows:
        return prompts, None
    flag = "dataset_mixer_eval_list" if data.dataset_mixer_eval_list else "dataset_mixer_list"
    held_out = read("held-out prompts", flag, is_held_out=True)
    if num_shared := held_out.count_shared(prompts):
        console.warn(
            f"{num_shared:,} of {counted(len(held_out), 'held-out prompt')} "
            f"{'is' if num_shared == 1 else 'are'} among the training prompts: scores on them do "
            "not show what is new; take them out of --dataset_mixer_list or "
            "--dataset_mixer_eval_list"
        )
    return prompts, held_out


def refuse_unknown_score(config: GRPOConfig, datasets: tuple[Prompts, Prompts | None]) -> None:
    """:raises InputError: `--keep_best` names the score of a verifier that judges none of the
    prompts it is of.

    An environment's rewards have names that only its answers show.
    """
    metric = config.run.keep_best or ""
    prompts = datasets[metric.startswith(HELD_OUT_PREFIX)]
    what, _, name = metric.removeprefix(HELD_OUT_PREFIX).partition("/")
    if what != "verifier" or prompts is None:
        return
    judges, answering = prompts.named()
    names = judges | ({"format"} if config.reward.apply_r1_style_format_reward else set())
    if name not in names and not answering:
        known = one_of(f"{metric.removesuffix(name)}{each}" for each in sorted(names))
        raise InputError(
            f"--keep_best {metric}: no verifier of that name judges the prompts; give {known}",
            kind="bad_value",
            flag="keep_best",
        )


def refuse_other_rows(
    folder: Path, prompts: Prompts, conversations: TokenDataset | None, *, seed: int
) -> None:
    """:raises InputError: the newest checkpoint in `folder` was written with other rows; Ray is not
    started yet.
    """
    place = read_saved_place(folder)
    if place is None or (state := place.get("drivers_state")) is None:
        return
    PromptStream(prompts, seed).check_state(state["conductor"]["prompts"])
    if conversations is not None:
        fact = rows_fact(
            conversations.fingerprint,
            key=CONVERSATIONS,
            flag="sft_mixer_list",
            limit="--max_seq_length",
        )
        check_saved_place(state, fact)


def _look_at_programs(
    reward: RewardSection, judges: Container[str], answering: Container[str], console: Console
) -> None:
    """Try the walls if programs of the policy are to run here, and say how long they may take."""
    are_judged = Code.name in judges or CodeStdio.name in judges
    if are_judged:
        time_s = f"{SHARE_OF_TIME * reward.verifier_timeout_s:g} s (--verifier_timeout_s)"
        console.say(f"tests of a program that are not reached in {time_s} have failed")
    if (are_judged and not reward.code_api_url) or "python" in answering:
        try_walls(reward.code_sandbox, say=console.say, warn=console.warn)


def check_engine(config: GRPOConfig, hf_config: PretrainedConfig) -> None:
    """Refuse what vLLM will not do with a model of this family, as far as this host is like the
    engines'.

    Raises:
        InputError: says what to change.
    """
    family = FAMILIES[hf_config.model_type]
    if (needed := family.engine_needs) is not None and find_spec(needed) is None:
        raise InputError(
            f"vLLM's {family.name} imports {needed}, which is not installed: install it for this "
            "PyTorch",
            kind="missing_package",
        )
    if family.delta is None or torch.cuda.is_available() or config.fleet.ray_address is not None:
        return
    lacking = f"vLLM's layers of {family.name} are for GPUs, and there is none here"
    head_dims = {hf_config.linear_key_head_dim, hf_config.linear_value_head_dim}
    other_dims = " and ".join(sorted(str(dim) for dim in head_dims - {64, 128}))
    takes = f"vLLM's layers of {family.name} take on a CPU"
    problems = {
        (
            f"{lacking}: generate where there are, or learn from rows (sft, dpo, kto, distill)"
        ): family.delta != "fused",
        f"{takes} bfloat16 alone: give --vllm_dtype bfloat16": config.engine_dtype != "bfloat16",
        (
            f"{takes} no cache of prefixes: give --no_vllm_enable_prefix_caching"
        ): config.fleet.vllm_enable_prefix_caching,
        f"{takes} no adapters: give --lora_sync merged": config.sent_adapter is not None,
        f"{takes} heads of 64 or 128 features, not {other_dims}": other_dims != "",
    }
    refuse_first(problems)


def _planned(
    config: GRPOConfig, folder: Path, console: Console, directory: RunDirectory
) -> GRPOConfig:
    """The flags with the choices of the learners' plan, if this host is like theirs: it has GPUs,
    or no node joins.

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
    say_what_changes_nothing(config, console, on_cuda=on_cuda)
    memory_bytes = memory_of(
        torch.device("cuda", 0) if on_cuda else torch.device("cpu"), num_sharing=sum(learners)
    )
    check = check_plan(
        config, learners, model_folder=str(folder), memory_bytes=memory_bytes, on_cuda=on_cuda
    )
    return with_chosen(config, say_plan(check, console, directory))


def _other_templates(verifiers: Mapping[str, Verifier], chat: ChatFormat) -> Iterator[str]:
    """A warning for each judge that was trained with another chat template than the policy's."""
    for judge in verifiers.values():
        if isinstance(judge, ModelVerifier) and has_other_template(judge.folder, chat):
            yield (
                f"--verifier {judge.name}: the model in {judge.folder} was trained with another "
                "chat template than the policy's: it is given the policy's prompts as they are, "
                "and may judge what it has never seen"
            )


def has_other_template(folder: Path, chat: ChatFormat) -> bool:
    """Whether the model in `folder` has a chat template, and it is another than the policy's."""
    return load_tokenizer(str(folder), flag="--verifier").chat_template not in (
        None,
        chat.template.text,
    )
