"""Checks of a GRPO run that need no learner and no engine; each names the flag to change."""

from collections.abc import Collection, Container, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import PretrainedConfig

from open_instruct.checkpoints.saved_place import read_saved_place
from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError, refuse_first
from open_instruct.core.families import FAMILIES
from open_instruct.core.metrics import HELD_OUT_PREFIX
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.core.text import join_choices
from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompts import Prompts, PromptStream
from open_instruct.data.saved_place import check_saved_place, make_rows_fact
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.environments.agent_walls import refuse_missing_walls
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.environment import Factory
from open_instruct.rewards.code import SHARE_OF_TIME, Code, CodeStdio
from open_instruct.rewards.reward_models import ModelVerifier
from open_instruct.rewards.sandbox.trial import try_walls
from open_instruct.rewards.verifier import Verifier
from open_instruct.run.console import Console
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.open_companion import open_companion_model

CONVERSATIONS = "conversations_fingerprint"
"""The key in the driver's state of the fingerprint of the rows of --sft_mixer_list."""


def check_companion_models(pretrained: Pretrained, config: GRPOConfig, layout: ShardLayout) -> None:
    """Check that a teacher and a critic fit beside the policy, where the flags name them.

    Raises:
        InputError: one of them does not.
    """
    teacher = config.loss.teacher_model_name_or_path
    if teacher is not None:
        open_companion_model("teacher", teacher, pretrained, config=config, layout=layout)
    if config.rollout.has_critic:
        open_companion_model(
            "critic",
            config.critic.critic_model_name_or_path,
            pretrained,
            config=config,
            layout=layout,
        )


def check_engine(
    hf_config: PretrainedConfig,
    fleet: FleetSection,
    *,
    engine_dtype: str,
    sends_adapter: bool,
) -> None:
    """Refuse what vLLM cannot do with a model of this family.

    What depends on the device is checked only where this host is like the engines'.

    Raises:
        InputError: says what to change.
    """
    family = FAMILIES[hf_config.model_type]
    library = family.engine_needs
    if library is not None and find_spec(library) is None:
        raise InputError(
            f"vLLM's {family.name} imports {library}, which is not installed: install it for this "
            "PyTorch",
            kind="missing_package",
        )
    if family.delta is None or torch.cuda.is_available() or fleet.ray_address is not None:
        return
    problems = _find_cpu_problems(
        hf_config,
        engine_dtype=engine_dtype,
        caches_prefixes=fleet.vllm_enable_prefix_caching,
        sends_adapter=sends_adapter,
    )
    refuse_first(problems)


def _find_cpu_problems(
    hf_config: PretrainedConfig,
    *,
    engine_dtype: str,
    caches_prefixes: bool,
    sends_adapter: bool,
) -> Iterator[str]:
    """What vLLM's layers of the gated delta rule cannot do on a CPU."""
    family = FAMILIES[hf_config.model_type]
    head_dims = {hf_config.linear_key_head_dim, hf_config.linear_value_head_dim}
    other_dims = " and ".join(sorted(str(dim) for dim in head_dims - {64, 128}))
    takes = f"vLLM's layers of {family.name} take on a CPU"
    if family.delta != "fused":
        yield (
            f"vLLM's layers of {family.name} are for GPUs, and there is none here: generate where "
            "there are, or learn from rows (sft, dpo, kto, distill)"
        )
    if engine_dtype != "bfloat16":
        yield f"{takes} bfloat16 alone: give --vllm_dtype bfloat16"
    if caches_prefixes:
        yield f"{takes} no cache of prefixes: give --no_vllm_enable_prefix_caching"
    if sends_adapter:
        yield f"{takes} no adapters: give --lora_sync merged"
    if other_dims:
        yield f"{takes} heads of 64 or 128 features, not {other_dims}"


def try_sandbox(
    reward: RewardSection,
    judges: Container[str],
    answering: Container[str],
    console: Console,
) -> None:
    """Try the sandbox if programs of the policy will run here, and say how long they may take."""
    are_judged = Code.name in judges or CodeStdio.name in judges
    if are_judged:
        time_s = f"{SHARE_OF_TIME * reward.verifier_timeout_s:g} s (--verifier_timeout_s)"
        console.say(f"tests of a program that are not reached in {time_s} have failed")
    if (are_judged and not reward.code_api_url) or "python" in answering:
        try_walls(reward.code_sandbox, say=console.say, warn=console.warn)


def refuse_unknown_score(
    metric: str,
    training: Prompts,
    held_out: Prompts | None,
    *,
    judges_format: bool,
) -> None:
    """Refuse a `--keep_best` that names the score of a verifier which judges none of the prompts.

    Where an environment answers, any name is taken: only its answers show the names of its rewards.

    Raises:
        InputError: no verifier of that name judges the prompts.
    """
    prompts: Prompts | None = training
    if metric.startswith(HELD_OUT_PREFIX):
        prompts = held_out
    what, _, name = metric.removeprefix(HELD_OUT_PREFIX).partition("/")
    if what != "verifier" or prompts is None:
        return
    judges, answering = prompts.find_names()
    names = set(judges)
    if judges_format:
        names.add("format")
    if name not in names and not answering:
        known_metrics = join_choices(f"{metric.removesuffix(name)}{each}" for each in sorted(names))
        raise InputError(
            f"--keep_best {metric}: no verifier of that name judges the prompts; give "
            f"{known_metrics}",
            kind="bad_value",
            flag="keep_best",
        )


def refuse_other_rows(
    folder: Path,
    prompts: Prompts,
    conversations: TokenDataset | None,
    *,
    seed: int,
) -> None:
    """Refuse to resume with other rows than those of the newest checkpoint in `folder`.

    Raises:
        InputError: names the rows that differ.
    """
    place = read_saved_place(folder) or {}
    state = place.get("drivers_state")
    if state is None:
        return
    PromptStream(prompts, seed).check_state(state["conductor"]["prompts"])
    if conversations is not None:
        fact = make_rows_fact(
            conversations.fingerprint,
            key=CONVERSATIONS,
            flag="sft_mixer_list",
            limit="--max_seq_length",
        )
        check_saved_place(state, fact)


def find_template_mismatches(verifiers: Mapping[str, Verifier], chat: ChatFormat) -> Iterator[str]:
    """Yield a warning for each judge that was trained with another template than the policy's."""
    for judge in verifiers.values():
        if isinstance(judge, ModelVerifier) and has_other_template(judge.folder, chat):
            yield (
                f"--verifier {judge.name}: the model in {judge.folder} was trained with another "
                "chat template than the policy's: it is given the policy's prompts as they are, "
                "and may judge what it has never seen"
            )


def has_other_template(folder: Path, chat: ChatFormat) -> bool:
    """Whether the model in `folder` has a chat template that differs from the policy's."""
    template = load_tokenizer(str(folder), flag="--verifier").chat_template
    return template is not None and template != chat.template.text


def check_agents(
    config: GRPOConfig, environments: Mapping[str, Factory], answering: Collection[str]
) -> None:
    """Check the flags of agents, where agents ask the policy.

    Raises:
        InputError: `--answers_ce_coef`, as they answer nothing themselves; or this machine cannot
            put up the walls of `--agent_sandbox`.
    """
    agents = [name for name in answering if isinstance(environments.get(name), AgentProgram)]
    if not agents:
        return
    if config.rollout.answers_ce_coef:
        raise InputError(
            "--answers_ce_coef: an agent's texts are its own prompts, and no answers; leave it "
            f"out, or name an environment in place of {min(agents)}",
            kind="conflict",
        )
    if config.environment.agent_sandbox:
        refuse_missing_walls()
