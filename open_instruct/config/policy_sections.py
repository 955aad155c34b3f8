"""Flags of what GRPO learns from completions: rewards, the policy loss, the critic."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.flags import OWN
from open_instruct.config.rollout_sections import WITH_CRITIC
from open_instruct.config.sections import Switch, flag, resumable_flag
from open_instruct.losses.policy import OVER_TOKENS, POLICY_LOSSES

R1_STYLE = "apply_r1_style_format_reward"
JUDGE = "llm_judge_model"
BOUNDS = "rho_correction bounds"
CAPPED = "rho_correction clamp token_mask sequence_mask"


def loss_fns_reading(flag: str) -> str:
    """The losses that read a flag: some of ours, and any of the user's own."""
    return (
        f"loss_fn {' '.join(name for name, loss in POLICY_LOSSES.items() if flag in loss.reads)} "
        f"{OWN}"
    )


@dataclass(kw_only=True)
class RewardSection:
    """How completions are judged."""

    title: ClassVar[str] = "Rewards"

    verification_reward: float = flag(
        "reward of a completion that its verifiers accept in full", 1.0, above=0
    )
    verifier: list[str] = flag(
        "judges of prompts that name no verifier, which prompts may name too: the NAME of an "
        "installed one, FILE.py:NAME or module:NAME of a function or class of your own, "
        "reward_model:FOLDER or prm:FOLDER of a run",
        [],
        is_path=True,
    )
    remap_verifier: list[str] = flag(
        "OLD=NEW: prompts that name the verifier OLD are judged by NEW", []
    )
    several_verifiers: Literal["mean", "sum"] = flag(
        "how weighted scores of a prompt's verifiers are combined", "mean"
    )
    verifier_timeout_s: float = resumable_flag(
        "seconds that one verdict may take before it counts as 0", 10.0, above=0
    )
    code_sandbox: Literal["required", "auto"] = resumable_flag(
        "walls around programs: all, or those there are", "required"
    )
    code_api_url: str | None = flag(
        "server that runs programs in the sandbox's place: http://HOST/test_program", None
    )
    code_max_execution_time: float = flag("seconds of one test of a program", 1.0, above=0)
    code_pass_rate_reward_threshold: float = flag(
        "least share of tests that counts", 0.0, minimum=0, maximum=1
    )
    num_verifier_processes: int = resumable_flag(
        "processes for verifiers that run foreign code", 2, minimum=1
    )
    llm_judge_model: str | None = flag(
        "model that judges for the verifiers judge, rubric and general-…", None
    )
    llm_judge_url: str | None = resumable_flag(
        "its server; default: $OPENAI_BASE_URL or OpenAI's", None, requires=JUDGE
    )
    llm_judge_prompt: str | None = flag(
        "what the verifier judge asks: a file, or general-…", None, requires=JUDGE
    )
    llm_judge_temperature: float = flag(
        "temperature of its sampling", 1.0, requires=JUDGE, minimum=0
    )
    llm_judge_max_tokens: int = flag(
        "tokens of a verdict, with its thoughts", 2048, requires=JUDGE, minimum=1
    )
    llm_judge_max_context_length: int = flag(
        "tokens of a question and its verdict", 8192, requires=JUDGE, minimum=1
    )
    llm_judge_timeout: float = resumable_flag(
        "seconds that a verdict may take", 60.0, requires=JUDGE, above=0
    )
    llm_judge_max_retries: int = resumable_flag(
        "times that a request is sent again", 3, requires=JUDGE, minimum=0
    )
    llm_judge_concurrency: int = resumable_flag(
        "requests to it at once", 64, requires=JUDGE, minimum=1
    )
    llm_judge_requests_per_minute: int | None = resumable_flag(
        "none: no limit", None, requires=JUDGE, minimum=1
    )
    llm_judge_tokens_per_minute: int | None = resumable_flag(
        "of questions and verdicts", None, requires=JUDGE, minimum=1
    )
    max_length_verifier_max_length: int = flag(
        "tokens off at which max_length gives 0", 32768, minimum=1
    )
    apply_r1_style_format_reward: bool = flag("reward <think>…</think><answer>…</answer>", False)
    r1_style_format_reward: float = flag("reward of that form", 1.0, requires=R1_STYLE)
    additive_format_reward: bool = flag(
        "add verifiers' rewards where the form is wrong too", False, requires=R1_STYLE
    )
    non_stop_penalty: bool = flag(
        "give completions that were cut at the length limit a fixed reward", False
    )
    non_stop_penalty_value: float = flag(
        "reward of completions that were cut", 0.0, requires="non_stop_penalty"
    )
    overlong_penalty: int | None = flag(
        "DAPO's: over this many last tokens of --response_length a completion's reward falls by "
        "up to 1",
        None,
        minimum=1,
    )


@dataclass(kw_only=True)
class PolicyLossSection:
    """The policy loss, its penalties, and the correction of the engines' log-probs."""

    title: ClassVar[str] = "Loss"

    loss_fn: str = flag("the policy loss", "dapo", choices=POLICY_LOSSES, takes_own=True)
    clip_lower: float = flag(
        "the ratio of new to old policy is clipped to at least 1 minus this; gmpo: its logarithm "
        "to minus this",
        0.2,
        above=0,
        below=1,
    )
    clip_higher: float = flag(
        (
            "the ratio of new to old policy is clipped to at most 1 plus this; gmpo: its "
            "logarithm to this"
        ),
        0.2,
        above=0,
    )
    delta: float | None = flag(
        "largest ratio for negative advantages, or dppo's for all; above 1 plus --clip_higher",
        None,
        requires=loss_fns_reading,
    )
    cispo_clamp_below: bool = flag(
        "clamp the ratio from below too, at 1 minus --clip_lower", False, requires=loss_fns_reading
    )
    sapo_temperature_pos: float = flag(
        "steepness of the gate for positive advantages", 1.0, requires=loss_fns_reading, above=0
    )
    sapo_temperature_neg: float = flag(
        "steepness of the gate for other advantages", 1.05, requires=loss_fns_reading, above=0
    )
    cov_fraction: float = flag(
        "share of the tokens that are clipped or penalised for their covariance",
        2e-4,
        requires=loss_fns_reading,
        above=0,
        maximum=1,
    )
    clip_cov_lower: float = flag(
        "least covariance of a clipped token", 1.0, requires=loss_fns_reading
    )
    clip_cov_upper: float = flag(
        "largest covariance of a clipped token", 5.0, requires=loss_fns_reading
    )
    kl_cov_coef: float = flag(
        "weight of the covariance penalty", 1.0, requires=loss_fns_reading, minimum=0
    )
    top_entropy_quantile: float = flag(
        "learn from this share of the tokens, those where the policy is least certain",
        1.0,
        above=0,
        maximum=1,
    )
    rl_coef: float = flag(
        "weight of the policy loss; 0: learn from the teacher alone", 1.0, minimum=0
    )
    ce_coef: float = flag(
        "weight of the cross-entropy of conversations", 1.0, requires="sft_mixer_list", minimum=0
    )
    teacher_model_name_or_path: str | None = flag(
        "folder of a frozen model with the same tokenizer, from which the policy learns on its "
        "own completions",
        None,
        is_path=True,
    )
    teacher_kl_coef: float = flag(
        "weight of the divergence from the teacher",
        1.0,
        requires="teacher_model_name_or_path",
        above=0,
    )
    beta: float = flag(
        "weight of the divergence from the reference policy; 0: there is no reference",
        0.0,
        minimum=0,
    )
    kl_estimator: Literal["0", "1", "2", "3"] = flag(
        "0 difference, 1 half its square, 2 unbiased and positive, 3 importance-weighted",
        "2",
        requires="beta >0",
    )
    kl_importance_weighted: bool = flag(
        "multiply the estimate by the ratio of new to old policy, which removes its bias",
        False,
        requires="beta >0",
    )
    loss_denominator: str = flag(
        f"'token', or a constant number of tokens per completion: {', '.join(OVER_TOKENS)}", "token"
    )
    rho_correction: Literal["none", "clamp", "token_mask", "sequence_mask", "bounds"] = flag(
        (
            "clamp the importance weight of learner to engine, mask tokens or sequences, or use "
            "separate 'bounds'"
        ),
        "clamp",
    )
    rho_level: Literal["token", "sequence"] = flag(
        "a ratio a token, or their geometric mean over the completion", "token", requires=BOUNDS
    )
    rho_clamp_lower: float = flag("the least importance weight", 0.0, requires=BOUNDS, minimum=0)
    rho_clamp_upper: float | None = flag(
        "largest importance weight; none: no bound", None, requires=BOUNDS, above=0
    )
    rho_mask_lower: float = flag("least ratio that is kept", 0.0, requires=BOUNDS, minimum=0)
    rho_mask_upper: float | None = flag(
        "largest ratio that is kept; none: no bound", None, requires=BOUNDS, above=0
    )
    rho_cap: float = flag(
        "clamp to this, or mask outside 1/cap to cap",
        2.0,
        requires=CAPPED,
        above=1,
        note=" (1 is perfect agreement)",
    )
    num_mini_batches: int = flag(
        "optimizer steps that a step's completions are split into", 1, minimum=1
    )
    num_epochs: int = flag("passes over the completions of a step", 1, minimum=1)
    record_entropy: bool = resumable_flag("measure the policy's entropy at every token", False)
    alpha: float = flag(
        "share of the policy in the updated reference",
        0.6,
        requires="ref_policy_update_freq",
        above=0,
        maximum=1,
    )
    ref_policy_update_freq: int | None = flag(
        "steps between updates of the reference policy", None, requires="beta >0", minimum=1
    )
    pack_length: int | None = resumable_flag(
        "tokens of a packed microbatch; default: 4096, or those of the longest sample if more", None
    )
    prefix_sharing: Switch = resumable_flag(
        "compute once what completions of a group begin with, the prompt and any turns; 'auto': "
        "where that saves at least 5% of the tokens",
        "auto",
    )


@dataclass(kw_only=True)
class CriticSection:
    """The critic of PPO."""

    title: ClassVar[str] = "Critic"

    section_requirement: ClassVar[str] = f"advantage_normalization_type {WITH_CRITIC}"

    critic_model_name_or_path: str | None = flag(
        "its start, such as a reward model; default: the policy's start", None, is_path=True
    )
    critic_learning_rate: float = flag("peak learning rate of the critic", 1e-5, above=0)
    critic_warmup_steps: int = flag("first steps in which the critic alone learns", 0, minimum=0)
    gamma: float = flag("how much a reward counts one token earlier", 1.0, above=0, maximum=1)
    gae_lambda: float = flag(
        "1: advantages are rewards less values; 0: one token ahead", 0.95, minimum=0, maximum=1
    )
    value_clip: float | None = flag(
        "how far a value may move in a step; none: no bound", 0.2, above=0
    )
    whiten_advantages: bool = flag(
        "advantages of a step have mean 0 and standard deviation 1", True
    )
