"""The flags that only GRPO has, in the groups `--help` shows them in; see sections.py for the
rules.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.flags import OWN
from open_instruct.config.sections import ParallelSection, RowsSection, Switch, flag, free_flag
from open_instruct.losses.advantages import ADVANTAGES
from open_instruct.losses.policy import OVER_TOKENS, POLICY_LOSSES

# vLLM's `_MAX_TEMP`: vLLM raises any temperature between 0 and this to this.
LEAST_TEMPERATURE = 0.01
# What several flags are read with.
HELD_OUT = "dataset_mixer_eval_list"
HELD_OUT_FLAGS = f"{HELD_OUT} {HELD_OUT}_splits"
R1_STYLE = "apply_r1_style_format_reward"
JUDGE = "llm_judge_model"
BOUNDS = "rho_correction bounds"
CAPPED = "rho_correction clamp token_mask sequence_mask"
THROUGH_FOLDER = "weight_sync_backend files"
WITH_CRITIC = "gae"  # the advantages that a critic estimates
TOOL_SET = "tools"  # the environment of --tools
CPU_KV_CACHE_MIB = 256  # of an engine on a CPU, where vLLM would take gigabytes


def loss_fns_reading(flag: str) -> str:
    """What a flag is read with that only some policy losses read: those of ours, and any of the
    user's own.
    """
    return (
        f"loss_fn {' '.join(name for name, loss in POLICY_LOSSES.items() if flag in loss.reads)} "
        f"{OWN}"
    )


@dataclass(kw_only=True)
class PromptDataSection(RowsSection):
    """Prompts to train on, and prompts that are held out."""

    title: ClassVar[str] = "Prompts"

    dataset_mixer_list: list[str] = flag(
        "alternating names and amounts: 'prompts.jsonl 1.0 other.parquet 500'; an amount with a "
        "dot is a fraction of the rows (above 1.0 repeats rows), one without is a count",
        is_path=True,
    )
    dataset_mixer_list_splits: list[str] = flag("split of each data set, or one for all", ["train"])
    dataset_mixer_eval_list: list[str] = free_flag(
        "held-out prompts, in the same form", [], is_path=True, replaces="eval_split"
    )
    dataset_mixer_eval_list_splits: list[str] = free_flag(
        "split of each held-out data set, or one for all", ["train"], read_with=HELD_OUT
    )
    eval_split: float | None = flag(
        "share of the prompts that is held out, by what is in each",
        None,
        above=0,
        below=1,
        replaces=HELD_OUT_FLAGS,
    )
    sft_mixer_list: list[str] = flag(
        "conversations, in the same form, that steps learn from beside completions",
        [],
        is_path=True,
    )
    sft_mixer_list_splits: list[str] = flag(
        "split of each data set of conversations, or one for all", ["train"]
    )
    sft_rows_per_step: int = flag("conversations of one step", 0, minimum=0)
    max_prompt_token_length: int = flag(
        "tokens; longer prompts are left out and counted", 256, minimum=1
    )
    response_length: int = flag("tokens that the policy may generate for a prompt", 256, minimum=1)
    system_prompt_override_file: str | None = flag(
        ("text file whose content is the system turn of every prompt, in place of the row's own"),
        None,
        is_path=True,
    )

    length_flags: ClassVar[str] = "--max_prompt_token_length and --response_length together:"

    @property
    def has_held_out_rows(self) -> bool:
        return bool(self.dataset_mixer_eval_list) or self.eval_split is not None

    @property
    def max_seq_length(self) -> int:
        """Tokens of the longest prompt plus those of the longest response."""
        return self.max_prompt_token_length + self.response_length


@dataclass(kw_only=True)
class RolloutSection:
    """How completions are sampled, and how rewards become advantages."""

    title: ClassVar[str] = "Rollouts"

    num_unique_prompts_rollout: int = flag("prompts of one step", 16, minimum=1)
    num_samples_per_prompt_rollout: int = flag(
        "completions of each prompt: the size of a group", 4, minimum=1
    )
    total_episodes: int = flag("completions of the whole run", 102400, minimum=1, resume="length")
    temperature: float = flag(
        "temperature of sampling, and of the learner's log-probs",
        1.0,
        minimum=LEAST_TEMPERATURE,
        note=" (vLLM takes no lower one)",
    )
    vllm_top_p: float = flag(
        "nucleus sampling; only 1.0 leaves the ratio of learner to engine unbiased", 1.0
    )
    stop_strings: list[str] = flag("texts that end a completion, beside the end-of-turn token", [])
    async_steps: int = flag(
        "steps that generation may run ahead of training; 0 is on-policy", 1, minimum=0
    )
    inflight_updates: bool = flag(
        "update weights in the midst of completions; otherwise finish those first",
        True,
        read_with="async_steps >0",
    )
    num_spare_prompts: int = flag(
        "prompts asked beyond those of a step, which then gives up the slowest: long completions "
        "are learned from less",
        0,
        minimum=0,
    )
    active_sampling: bool = flag(
        "replace groups without a learning signal by further prompts", False
    )
    no_resampling_pass_rate: float | None = flag(
        "never ask a prompt again once this share of its group scored the full reward",
        None,
        above=0,
        maximum=1,
    )
    filter_zero_std_samples: bool = flag(
        "leave out groups whose rewards are all the same; gae never does", True
    )
    mask_truncated_completions: bool = flag(
        "learn nothing from completions that were cut at the length limit", False
    )
    answers_ce_coef: float = flag(
        ("weight of the cross-entropy of what environments answer, which is not learned otherwise"),
        0.0,
        minimum=0,
    )
    learn_from_failed_episodes: bool = flag(
        "learn from episodes whose environment failed or took too long, too", False
    )
    advantage_normalization_type: str = flag(
        "how rewards become advantages: docs/losses.md (also: --advantages)",
        "standard",
        choices=ADVANTAGES,
        takes_own=True,
    )
    advantage_pass_k: int = flag(
        "k of pass@k", 4, read_with="advantage_normalization_type pass_at_k", minimum=1
    )

    @property
    def has_critic(self) -> bool:
        """Whether a critic turns rewards into an advantage for each token: PPO."""
        return self.advantage_normalization_type == WITH_CRITIC


@dataclass(kw_only=True)
class EnvironmentSection:
    """What answers a reply of the policy: tools, games, servers."""

    title: ClassVar[str] = "Environments"

    environment: str | None = flag(
        "answers the replies of prompts that name none in `env_config`: calculator, python, "
        "counter, guess_number, wordle, search, serper_search and others of the web, "
        "FILE.py:factory or module:factory of your own, or mcp:COMMAND, mcp:http://… or "
        "openenv:http://… for a server's, or verifiers:NAME for a taskset",
        None,
    )
    tools: list[str] = flag("such tools, several at once, in place of --environment", [])
    tool_call_names: list[str] = flag(
        "what the policy calls each; default: its own name", [], read_with="tools"
    )
    tool_configs: list[str] = flag(
        "settings of each, a JSON object: '{}' '{\"timeout\": 3}'", [], read_with="tools"
    )
    search_corpus: str | None = flag(
        "what the tool search searches: a file of rows with `text`, or a folder", None
    )
    max_turns: int = flag("replies of an episode in an environment, at most", 8, minimum=1)
    turn_length: int | None = flag(
        "tokens of one reply, at most; --response_length is all that follows the first prompt",
        None,
        minimum=1,
    )
    tool_call_form: Literal[
        "auto", "hermes", "llama3_json", "function_calls", "pythonic", "qwen3_xml"
    ] = flag(
        ("form in which the policy calls tools; 'auto' is the one that the chat template writes"),
        "auto",
    )
    reward_aggregator: Literal["last", "sum"] = flag(
        "the reward of an environment is that of its last answer, or the sum over its answers",
        "last",
    )
    environment_timeout_s: float = flag(
        "seconds that an environment may take to answer", 60.0, above=0
    )

    @property
    def of_all_rows(self) -> str | None:
        """The name of the environment of rows that name none."""
        return TOOL_SET if self.tools else self.environment


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
    verifier_timeout_s: float = free_flag(
        "seconds that one verdict may take before it counts as 0", 10.0, above=0
    )
    code_sandbox: Literal["required", "auto"] = free_flag(
        "walls around programs: all, or those there are", "required"
    )
    code_api_url: str | None = flag(
        "server that runs programs in the sandbox's place: http://HOST/test_program", None
    )
    code_max_execution_time: float = flag("seconds of one test of a program", 1.0, above=0)
    code_pass_rate_reward_threshold: float = flag(
        "least share of tests that counts", 0.0, minimum=0, maximum=1
    )
    num_verifier_processes: int = free_flag(
        "processes for verifiers that run foreign code", 2, minimum=1
    )
    llm_judge_model: str | None = flag(
        "model that judges for the verifiers judge, rubric and general-…", None
    )
    llm_judge_url: str | None = free_flag(
        "its server; default: $OPENAI_BASE_URL or OpenAI's", None, read_with=JUDGE
    )
    llm_judge_prompt: str | None = flag(
        "what the verifier judge asks: a file, or general-…", None, read_with=JUDGE
    )
    llm_judge_temperature: float = flag(
        "temperature of its sampling", 1.0, read_with=JUDGE, minimum=0
    )
    llm_judge_max_tokens: int = flag(
        "tokens of a verdict, with its thoughts", 2048, read_with=JUDGE, minimum=1
    )
    llm_judge_max_context_length: int = flag(
        "tokens of a question and its verdict", 8192, read_with=JUDGE, minimum=1
    )
    llm_judge_timeout: float = free_flag(
        "seconds that a verdict may take", 60.0, read_with=JUDGE, above=0
    )
    llm_judge_max_retries: int = free_flag(
        "times that a request is sent again", 3, read_with=JUDGE, minimum=0
    )
    llm_judge_concurrency: int = free_flag("requests to it at once", 64, read_with=JUDGE, minimum=1)
    llm_judge_requests_per_minute: int | None = free_flag(
        "none: no limit", None, read_with=JUDGE, minimum=1
    )
    llm_judge_tokens_per_minute: int | None = free_flag(
        "of questions and verdicts", None, read_with=JUDGE, minimum=1
    )
    max_length_verifier_max_length: int = flag(
        "tokens off at which max_length gives 0", 32768, minimum=1
    )
    apply_r1_style_format_reward: bool = flag("reward <think>…</think><answer>…</answer>", False)
    r1_style_format_reward: float = flag("reward of that form", 1.0, read_with=R1_STYLE)
    additive_format_reward: bool = flag(
        "add verifiers' rewards where the form is wrong too", False, read_with=R1_STYLE
    )
    non_stop_penalty: bool = flag(
        "give completions that were cut at the length limit a fixed reward", False
    )
    non_stop_penalty_value: float = flag(
        "reward of completions that were cut", 0.0, read_with="non_stop_penalty"
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
        read_with=loss_fns_reading,
    )
    cispo_clamp_below: bool = flag(
        "clamp the ratio from below too, at 1 minus --clip_lower", False, read_with=loss_fns_reading
    )
    sapo_temperature_pos: float = flag(
        "steepness of the gate for positive advantages", 1.0, read_with=loss_fns_reading, above=0
    )
    sapo_temperature_neg: float = flag(
        "steepness of the gate for other advantages", 1.05, read_with=loss_fns_reading, above=0
    )
    cov_fraction: float = flag(
        "share of the tokens that are clipped or penalised for their covariance",
        2e-4,
        read_with=loss_fns_reading,
        above=0,
        maximum=1,
    )
    clip_cov_lower: float = flag(
        "least covariance of a clipped token", 1.0, read_with=loss_fns_reading
    )
    clip_cov_upper: float = flag(
        "largest covariance of a clipped token", 5.0, read_with=loss_fns_reading
    )
    kl_cov_coef: float = flag(
        "weight of the covariance penalty", 1.0, read_with=loss_fns_reading, minimum=0
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
        "weight of the cross-entropy of conversations", 1.0, read_with="sft_mixer_list", minimum=0
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
        read_with="teacher_model_name_or_path",
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
        read_with="beta >0",
    )
    kl_importance_weighted: bool = flag(
        "multiply the estimate by the ratio of new to old policy, which removes its bias",
        False,
        read_with="beta >0",
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
        "a ratio a token, or their geometric mean over the completion", "token", read_with=BOUNDS
    )
    rho_clamp_lower: float = flag("the least importance weight", 0.0, read_with=BOUNDS, minimum=0)
    rho_clamp_upper: float | None = flag(
        "largest importance weight; none: no bound", None, read_with=BOUNDS, above=0
    )
    rho_mask_lower: float = flag("least ratio that is kept", 0.0, read_with=BOUNDS, minimum=0)
    rho_mask_upper: float | None = flag(
        "largest ratio that is kept; none: no bound", None, read_with=BOUNDS, above=0
    )
    rho_cap: float = flag(
        "clamp to this, or mask outside 1/cap to cap",
        2.0,
        read_with=CAPPED,
        above=1,
        note=" (1 is perfect agreement)",
    )
    num_mini_batches: int = flag(
        "optimizer steps that a step's completions are split into", 1, minimum=1
    )
    num_epochs: int = flag("passes over the completions of a step", 1, minimum=1)
    record_entropy: bool = free_flag("measure the policy's entropy at every token", False)
    alpha: float = flag(
        "share of the policy in the updated reference",
        0.6,
        read_with="ref_policy_update_freq",
        above=0,
        maximum=1,
    )
    ref_policy_update_freq: int | None = flag(
        "steps between updates of the reference policy", None, read_with="beta >0", minimum=1
    )
    pack_length: int | None = free_flag(
        "tokens of a packed microbatch; default: 4096, or those of the longest sample if more", None
    )
    prefix_sharing: Switch = free_flag(
        "compute once what completions of a group begin with, the prompt and any turns; 'auto': "
        "where that saves at least 5% of the tokens",
        "auto",
    )


@dataclass(kw_only=True)
class CriticSection:
    """The critic of PPO."""

    title: ClassVar[str] = "Critic"

    all_read_with: ClassVar[str] = f"advantage_normalization_type {WITH_CRITIC}"

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


@dataclass(kw_only=True)
class LearnerParallelSection(ParallelSection):
    """Sharding of GRPO's learners, which Ray starts."""

    more_ranks: ClassVar[str] = "--num_learners_per_node {0} starts them"

    num_learners_per_node: list[int] = free_flag(
        "learner processes on each node, such as '8 8' or '2 4'", [1]
    )


@dataclass(kw_only=True)
class FleetSection:
    """The engines, and how weights reach them."""

    title: ClassVar[str] = "Fleet"

    vllm_num_engines: int = free_flag("vLLM engines", 1, minimum=1)
    vllm_tensor_parallel_size: int = free_flag("GPUs of one engine", 1, minimum=1)
    vllm_gpu_memory_utilization: float = free_flag(
        "an engine's share of a GPU's memory", 0.9, above=0, maximum=1
    )
    vllm_kv_cache_mib: int | None = free_flag(
        "MiB of an engine's key-value cache; default: 256 on a CPU, the rest on CUDA",
        None,
        minimum=1,
    )
    vllm_max_num_seqs: int | None = free_flag(
        "completions in an engine at once; default: 256 on CUDA, 64 on a CPU", None, minimum=1
    )
    vllm_max_num_batched_tokens: int | None = free_flag(
        "tokens in a step of an engine; default: vLLM's on CUDA, 4096 or a sample's on a CPU",
        None,
        minimum=1,
    )
    vllm_async_scheduling: Switch = free_flag(
        "schedule the next step during this one; 'auto': on CUDA", "auto"
    )
    vllm_runner: Literal["auto", "v1", "v2"] = free_flag(
        "vLLM's model runner; 'auto': v2 on CUDA, v1 on a CPU", "auto"
    )
    vllm_enable_prefix_caching: bool = free_flag(
        "compute a prompt's keys and values once for its group", True
    )
    routing_replay: Literal["on", "off"] = flag(
        "route the learner's tokens to the experts that engines chose", "off"
    )
    vllm_enforce_eager: bool = free_flag("run the engine without CUDA graphs", False)
    vllm_dtype: Literal["bfloat16", "float32", "policy"] = flag(
        "dtype of the engines' weights; 'policy': --param_dtype", "policy"
    )
    ray_address: str | None = free_flag(
        "'auto' or the address of a Ray cluster; default: start a local one", None
    )
    ray_dashboard_host: str | None = free_flag(
        "address that Ray's dashboard binds to; default: no dashboard", None
    )
    cluster_timeout_s: int = free_flag(
        "seconds to wait for the nodes and GPUs that were asked for", 600, minimum=1
    )
    engine_timeout_s: int = free_flag(
        "seconds to wait for an engine's start or health check", 600, minimum=1
    )
    step_timeout_s: int = free_flag(
        "seconds to wait for the learners to finish one step", 3600, minimum=1
    )
    max_restarts: int = free_flag(
        "times that dead learners or engines are started again", 3, minimum=0
    )
    weight_sync_backend: Literal["auto", "nccl", "gloo", "shm", "ipc", "files"] = free_flag(
        (
            "'auto': ipc on one shared device, nccl on CUDA, shm on one host, gloo across hosts; "
            "files: a folder"
        ),
        "auto",
    )
    weight_sync_folder: str | None = free_flag(
        "seen by all hosts, with room for 3 times the weights; default: in --output_dir",
        None,
        read_with=THROUGH_FOLDER,
        is_path=True,
    )
    weight_sync_anchor_every: int = free_flag(
        "versions from one that is written whole to the next",
        16,
        read_with=THROUGH_FOLDER,
        minimum=1,
    )
    weight_sync: Literal["auto", "dense", "delta"] = free_flag(
        (
            "send all weights, or of each version what has changed; 'auto': delta of 16-bit "
            "weights across hosts"
        ),
        "auto",
    )
    weight_sync_check: int = free_flag(
        "of how many delta versions one is compared with the learners' to the bit, by digests; 0 "
        "for none",
        1,
        read_with="weight_sync auto delta",
        minimum=0,
    )
    weight_sync_bucket_mib: int = free_flag("MiB of weights that travel at once", 256, minimum=1)
    weight_sync_timeout_s: int = free_flag(
        "seconds to wait for an engine during a weight sync", 300, minimum=1
    )
    lora_sync: Literal["merged", "adapter"] = free_flag(
        "send engines the whole model, or the adapter alone", "merged", read_with="use_lora"
    )

    @property
    def num_gpus(self) -> int:
        """GPUs of all engines together."""
        return self.vllm_num_engines * self.vllm_tensor_parallel_size

    def kv_cache_mib(self, *, on_cuda: bool) -> int | None:
        """MiB of an engine's keys and values;

        None: on CUDA, what --vllm_gpu_memory_utilization leaves.
        """
        return self.vllm_kv_cache_mib or (None if on_cuda else CPU_KV_CACHE_MIB)


@dataclass(kw_only=True)
class EvaluationSection:
    """Answers to held-out prompts."""

    title: ClassVar[str] = "Evaluation"

    all_read_with: ClassVar[str] = f"{HELD_OUT}|eval_split"

    local_eval_every: int = free_flag(
        "steps between evaluations; 0: only at the end", 100, minimum=0
    )
    eval_on_step_0: bool = free_flag("evaluate before the first step too", False)
    eval_num_samples: int | None = free_flag(
        "completions of each prompt; default: the largest --eval_pass_at_k", None, minimum=1
    )
    eval_pass_at_k: list[int] = free_flag("report pass@k for each of these k", [1])
    eval_temperature: float = free_flag(
        "temperature of sampling; 0: the likeliest token", 1.0, minimum=0
    )
    eval_top_p: float = free_flag("nucleus sampling", 1.0, above=0, maximum=1)

    @property
    def num_samples(self) -> int:
        """Completions of each held-out prompt."""
        return self.eval_num_samples or max([1, *self.eval_pass_at_k])
