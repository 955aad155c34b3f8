"""The whole configuration of a GRPO run, and what must hold between its flags."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from open_instruct.config import fleet_sections, policy_sections, rollout_sections
from open_instruct.config.flags import spell_value
from open_instruct.config.lora import RANKS_OF_ENGINES, LoRASection
from open_instruct.config.run_sections import RolloutRunSection
from open_instruct.config.training import LearnerConfig, with_held_out
from open_instruct.config.turns import prompts_ahead_problems, shared_gpu_problems
from open_instruct.config.validation import (
    find_changed,
    idle_evaluation_problems,
    learner_problems,
    learner_warnings,
    microbatch_problems,
    refuse,
)
from open_instruct.core.errors import problems_of_kind
from open_instruct.losses.policy import OVER_TOKENS, POLICY_LOSSES

# Every microbatch has a fixed cost, so microbatches of one short completion each would be many
# times slower.
DEFAULT_PACK_LENGTH = 4096


@dataclass(kw_only=True)
class GRPOConfig(LearnerConfig):
    """Train a policy on verifiable rewards: vLLM engines generate, sharded learners train, weights
    flow back.

    Examples:
        open-instruct grpo grpo/tiny_cpu --model_name_or_path MODEL_DIR --dataset_mixer_list
            prompts.jsonl 1.0
            --output_dir runs/first
        open-instruct grpo grpo/olmo3_7b_2x8_plus_8_engines --ray_address auto --output_dir
            runs/olmo3
    """

    data: rollout_sections.PromptDataSection
    rollout: rollout_sections.RolloutSection
    environment: rollout_sections.EnvironmentSection
    reward: policy_sections.RewardSection
    loss: policy_sections.PolicyLossSection
    parallel: fleet_sections.LearnerParallelSection
    fleet: fleet_sections.FleetSection
    evaluation: rollout_sections.EvaluationSection
    run: RolloutRunSection
    critic: policy_sections.CriticSection = field(default_factory=policy_sections.CriticSection)

    @property
    def quality_metrics(self) -> tuple[str, ...]:
        passes = [f"eval/pass_at_{k}" for k in sorted({1, *self.evaluation.eval_pass_at_k})]
        return (*with_held_out("reward", "verifier/*"), *passes)

    @property
    def num_completions_per_step(self) -> int:
        return self.rollout.num_unique_prompts_rollout * self.rollout.num_samples_per_prompt_rollout

    @property
    def num_samples_per_step(self) -> int:
        """Completions of a step, plus the written conversations that are mixed in."""
        return self.num_completions_per_step + self.data.sft_rows_per_step

    @property
    def num_steps(self) -> int:
        return self.rollout.total_episodes // self.num_completions_per_step

    @property
    def sent_adapter(self) -> LoRASection | None:
        """The flags of the adapter where engines are sent the adapter alone; otherwise None."""
        return self.adapters if self.fleet.lora_sync == "adapter" else None

    @property
    def engine_dtype(self) -> Literal["bfloat16", "float32"]:
        """The dtype in which engines compute and weights travel."""
        if self.fleet.vllm_dtype == "policy":
            return self.model.param_dtype
        return self.fleet.vllm_dtype

    def choose_sync(self, *, same_host: bool) -> tuple[str, str]:
        """What `--weight_sync` stands for, dense or delta, and why.

        Args:
            same_host: every learner and every engine is on one host.
        """
        if self.fleet.weight_sync != "auto":
            return self.fleet.weight_sync, "as --weight_sync says"
        if self.sent_adapter is not None:
            return "dense", "as all of an adapter changes in a step"
        if self.engine_dtype == "float32":
            return "dense", "as nearly all float32 weights change in a step"
        if same_host:
            return "dense", "as copying within a host takes no longer than comparing"
        return "delta", "as engines are on other hosts"

    @property
    def max_tokens_per_microbatch(self) -> int:
        return self.loss.pack_length or max(self.data.max_seq_length, DEFAULT_PACK_LENGTH)


def validate_grpo(config: GRPOConfig) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    refuse(
        [
            *learner_problems(config),
            *_rollout_problems(config),
            *prompts_ahead_problems(config.rollout),
            *_reward_problems(config.reward),
            *_length_problems(config),
            *_loss_problems(config),
            *(_critic_problems(config) if config.rollout.has_critic else ()),
            *_fleet_problems(config),
            *shared_gpu_problems(
                config.fleet, config.parallel, sends_adapter=config.sent_adapter is not None
            ),
            *_evaluation_problems(config),
        ]
    )
    return list(_warnings(config))


@problems_of_kind("conflict")
def _rollout_problems(config: GRPOConfig) -> Iterator[str]:
    rollout = config.rollout
    group_size = rollout.num_samples_per_prompt_rollout
    if bool(config.data.sft_mixer_list) != bool(config.data.sft_rows_per_step):
        yield (
            "--sft_mixer_list says which conversations, --sft_rows_per_step how many a step: "
            "give both, or neither"
        )
    if rollout.vllm_top_p != 1.0:
        yield (
            f"--vllm_top_p {spell_value(rollout.vllm_top_p)}: below 1 the engine renormalises over "
            "the tokens it kept, which biases the ratio of learner to engine; use 1.0, and a "
            "lower --temperature"
        )
    if group_size == 1 and config.loss.rl_coef and not rollout.has_critic:
        yield (
            "--num_samples_per_prompt_rollout 1: without --advantages gae every advantage is 0; "
            "use at least 2"
        )
    if 1 <= rollout.total_episodes < config.num_completions_per_step:
        yield (
            f"--total_episodes {rollout.total_episodes} is less than one step: "
            f"--num_unique_prompts_rollout {rollout.num_unique_prompts_rollout} x "
            f"--num_samples_per_prompt_rollout {group_size} = {config.num_completions_per_step}; "
            "raise it or make a step smaller"
        )
    if (
        rollout.advantage_normalization_type == "pass_at_k"
        and rollout.advantage_pass_k > group_size
    ):
        yield (
            f"--advantage_pass_k {rollout.advantage_pass_k} is more than the "
            f"--num_samples_per_prompt_rollout {group_size} of a group; use at most so many"
        )
    if "" in rollout.stop_strings:
        yield (
            "--stop_strings holds an empty text, which would end every completion at once; leave "
            "it out"
        )
    if rollout.active_sampling and not rollout.filter_zero_std_samples:
        yield (
            "--active_sampling replaces the groups that --no_filter_zero_std_samples keeps: "
            "leave one out"
        )


@problems_of_kind("bad_value")
def _reward_problems(reward: policy_sections.RewardSection) -> Iterator[str]:
    for word in reward.verifier:
        module, colon, name = word.rpartition(":")
        if not name or (colon and not module) or word.endswith(".py"):
            yield (
                f"--verifier {word}: takes NAME, FILE.py:NAME or module:NAME, such as "
                "my_rewards.py:reward"
            )
    for word in reward.remap_verifier:
        old, _, new = word.partition("=")
        if not (old and new) or "=" in new:
            yield f"--remap_verifier {word}: takes OLD=NEW, such as math_dapo=math"
    url = reward.code_api_url or ""
    if url and not (url.startswith(("http://", "https://")) and url.endswith("/test_program")):
        yield (
            f"--code_api_url {reward.code_api_url}: is an address such as "
            "http://localhost:1234/test_program"
        )
    if reward.llm_judge_max_tokens >= reward.llm_judge_max_context_length:
        yield (
            "--llm_judge_max_tokens leaves no room for a question: must be below "
            "--llm_judge_max_context_length"
        )


@problems_of_kind("conflict")
def _length_problems(config: GRPOConfig) -> Iterator[str]:
    buffer = config.reward.overlong_penalty
    response_length = config.data.response_length
    if buffer is None:
        return
    if buffer > response_length:
        yield (
            f"--overlong_penalty {buffer} is more tokens than --response_length "
            f"{response_length}: use fewer"
        )
    if config.reward.non_stop_penalty:
        yield (
            f"--overlong_penalty {buffer} and --non_stop_penalty both punish completions that "
            "were cut: keep one"
        )


@problems_of_kind("conflict")
def _loss_problems(config: GRPOConfig) -> Iterator[str]:
    loss = config.loss
    if loss.delta is not None and loss.delta <= 1 + loss.clip_higher:
        yield (
            f"--delta {spell_value(loss.delta)}: must be above 1 plus --clip_higher, or it would "
            "undo that clip"
        )
    if loss.clip_cov_lower >= loss.clip_cov_upper:
        yield (
            f"--clip_cov_lower {spell_value(loss.clip_cov_lower)}: must be below --clip_cov_upper "
            f"{spell_value(loss.clip_cov_upper)}, since tokens with a covariance between the two "
            "are clipped"
        )
    denominator = f"--loss_denominator {loss.loss_denominator}"
    if loss.loss_denominator != "token":
        if not loss.loss_denominator.isdecimal() or int(loss.loss_denominator) == 0:
            yield f"{denominator}: takes 'token' or a whole number of tokens above 0"
        elif loss.loss_fn in POLICY_LOSSES and loss.loss_fn not in OVER_TOKENS:
            yield (
                f"{denominator}: --loss_fn {loss.loss_fn} has a denominator of its own; leave it "
                f"out, or use {' or '.join(OVER_TOKENS)}"
            )
    for kind in ("clamp", "mask"):
        lower = getattr(loss, f"rho_{kind}_lower")
        upper = getattr(loss, f"rho_{kind}_upper")
        if upper is not None and lower > upper:
            yield (
                f"--rho_{kind}_lower {spell_value(lower)} is above --rho_{kind}_upper "
                f"{spell_value(upper)}: swap them"
            )
    if loss.rl_coef == 0 and loss.teacher_model_name_or_path is None:
        yield (
            "--rl_coef 0: without --teacher_model_name_or_path nothing is learned from "
            "completions; add that"
        )
    elif loss.rl_coef == 0 and config.rollout.filter_zero_std_samples:
        yield (
            "--rl_coef 0 learns from a teacher, whatever the rewards are: add "
            "--no_filter_zero_std_samples"
        )
    if loss.pack_length is not None and loss.pack_length < config.data.max_seq_length:
        yield (
            f"--pack_length {loss.pack_length} does not hold the longest sample: "
            f"--max_prompt_token_length {config.data.max_prompt_token_length} + --response_length "
            f"{config.data.response_length} = {config.data.max_seq_length}; use at least that, or "
            "leave it out"
        )
    yield from microbatch_problems(
        config.max_tokens_per_microbatch,
        "lower --max_prompt_token_length, --response_length or --pack_length",
    )
    if loss.num_mini_batches > config.rollout.num_unique_prompts_rollout:
        yield (
            f"--num_mini_batches {loss.num_mini_batches} is more than the "
            f"{config.rollout.num_unique_prompts_rollout} prompts of a step; use at most so many"
        )


@problems_of_kind("conflict")
def _critic_problems(config: GRPOConfig) -> Iterator[str]:
    """What cannot go with a critic, which has a head of one row and an advantage a token."""
    loss = config.loss
    degree = config.parallel.tensor_parallel_degree
    num_steps = config.num_steps
    num_alone = config.critic.critic_warmup_steps
    has_one_ratio = loss.loss_fn in POLICY_LOSSES and POLICY_LOSSES[loss.loss_fn].by_completion
    if degree > 1:
        yield (
            f"--tensor_parallel_degree {degree}: the one row of a critic's head is not split; "
            "leave it out"
        )
    if has_one_ratio:
        yield (
            f"--loss_fn {loss.loss_fn}: one ratio for a completion suits no advantage a token; "
            "use dapo"
        )
    if config.rollout.active_sampling:
        yield "--active_sampling: under gae groups with equal rewards teach; leave it out"
    if loss.rl_coef == 0:
        yield "--rl_coef 0 learns from a teacher, without a critic: leave --advantages gae out"
    if 0 < num_steps <= num_alone:
        yield f"--critic_warmup_steps {num_alone}: the run has {num_steps} steps; use fewer"


@problems_of_kind("conflict")
def _fleet_problems(config: GRPOConfig) -> Iterator[str]:
    fleet = config.fleet
    parallel = config.parallel
    if fleet.ray_address is not None and fleet.ray_dashboard_host is not None:
        yield (
            f"--ray_dashboard_host {fleet.ray_dashboard_host}: a cluster at --ray_address has its "
            "own dashboard, or none; leave it out, or give it to `ray start --head "
            "--dashboard-host`"
        )
    learners = parallel.num_learners_per_node
    if not learners or min(learners) < 1:
        yield (
            f"--num_learners_per_node {spell_value(learners)}: takes at least 1 learner for each "
            "node, such as '8 8'"
        )
    if parallel.single_gpu_mode:
        many = find_changed(
            config, "num_learners_per_node", "vllm_num_engines", "vllm_tensor_parallel_size"
        )
        for flag_words in many:
            yield f"--single_gpu_mode has one device for learner and engine: leave {flag_words} out"
    tokens = fleet.vllm_max_num_batched_tokens
    seqs = fleet.vllm_max_num_seqs
    if tokens is not None and seqs is not None and tokens < seqs:
        yield (
            f"--vllm_max_num_batched_tokens {tokens} is less than --vllm_max_num_seqs {seqs}, "
            "each of which needs a token in a step; raise the one or lower the other"
        )
    if fleet.routing_replay == "on" and (
        fleet.vllm_runner == "v1" or not fleet.vllm_enable_prefix_caching
    ):
        yield (
            "--routing_replay on takes vLLM's prefix caching and, on CUDA, its runner v2: leave "
            "--vllm_… of both out"
        )
    if config.sent_adapter is not None and config.lora.lora_r > RANKS_OF_ENGINES[-1]:
        yield (
            f"--lora_r {config.lora.lora_r}: an engine takes adapters of a rank up to "
            f"{RANKS_OF_ENGINES[-1]}; use at most that, or --lora_sync merged"
        )
    if fleet.weight_sync == "delta" and config.sent_adapter is not None:
        yield (
            "--weight_sync delta: --lora_sync adapter sends little, all of which changes; use "
            "auto or dense"
        )


@problems_of_kind("out_of_range")
def _evaluation_problems(config: GRPOConfig) -> Iterator[str]:
    evaluation = config.evaluation
    yield from idle_evaluation_problems(config, "local_eval_every", evaluation.local_eval_every)
    if config.run.checkpointing_steps == 0:
        yield "--checkpointing_steps 0: a run of prompts has no epochs; give a number of steps"
    least = rollout_sections.LEAST_TEMPERATURE
    if 0 < evaluation.eval_temperature < least:
        value = spell_value(evaluation.eval_temperature)
        yield f"--eval_temperature {value}: must be at least {least}, or 0 for the likeliest token"
    for k in evaluation.eval_pass_at_k:
        if not 1 <= k <= evaluation.num_samples:
            yield (
                f"--eval_pass_at_k {k}: takes numbers from 1 to --eval_num_samples, which is "
                f"{evaluation.num_samples}"
            )


def _warnings(config: GRPOConfig) -> Iterator[str]:
    yield from learner_warnings(config)
    loss = config.loss
    rollout = config.rollout
    if loss.loss_fn == "cispo" and not loss.cispo_clamp_below:
        for flag_words in find_changed(config, "clip_lower"):
            yield (
                f"{flag_words}: cispo clamps the ratio from above only; add --cispo_clamp_below to "
                "clamp it from below too"
            )
    leaves_out = rollout.filter_zero_std_samples and not rollout.has_critic
    if loss.teacher_model_name_or_path and loss.rl_coef and leaves_out:
        yield (
            "groups whose rewards are all the same are left out before the teacher sees them; "
            "--no_filter_zero_std_samples lets it teach from them too"
        )
    if config.data.sft_mixer_list and rollout.temperature != 1:
        yield (
            f"--temperature {spell_value(rollout.temperature)} applies to the cross-entropy of "
            "--sft_mixer_list too"
        )
    if left_over := rollout.total_episodes % config.num_completions_per_step:
        yield (
            f"--total_episodes {rollout.total_episodes} is {config.num_steps} x "
            f"{config.num_completions_per_step} (a step) and {left_over} more, which are not "
            "asked for"
        )
