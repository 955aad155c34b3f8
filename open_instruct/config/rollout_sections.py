"""Flags of GRPO's prompts, completions, environments and held-out prompts."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.sections import RowsSection, flag, resumable_flag
from open_instruct.losses.advantages import ADVANTAGES

# vLLM's `_MAX_TEMP`: vLLM raises any temperature between 0 and this to this.
LEAST_TEMPERATURE = 0.01
# What several flags are read with.
HELD_OUT = "dataset_mixer_eval_list"
HELD_OUT_FLAGS = f"{HELD_OUT} {HELD_OUT}_splits"
WITH_CRITIC = "gae"  # the advantages that a critic estimates
TOOL_SET = "tools"  # the environment of --tools

AgentBranches = Literal["last", "all", "advantage_shared"]


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
    dataset_mixer_eval_list: list[str] = resumable_flag(
        "held-out prompts, in the same form", [], is_path=True, replaces="eval_split"
    )
    dataset_mixer_eval_list_splits: list[str] = resumable_flag(
        "split of each held-out data set, or one for all", ["train"], requires=HELD_OUT
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
    split_replies: bool = flag(
        "a row of each reply of these conversations, in place of one text that teaches all",
        False,
        requires="sft_mixer_list",
    )
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
    prompts_ahead: int | None = resumable_flag(
        "prompts of later steps that engines may have begun when a step is whole; default: all of "
        "--async_steps; where engines take turns with learners, as many as the plan finds enough",
        None,
        requires="async_steps >0",
        minimum=0,
    )
    inflight_updates: bool = flag(
        "update weights in the midst of completions; otherwise finish those first",
        True,
        requires="async_steps >0",
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
    agent_branches: AgentBranches = flag(
        "what is learned of an agent's episode with several branches: the last, all with the "
        "advantage of the episode, or all with a share of it",
        "all",
    )
    advantage_normalization_type: str = flag(
        "how rewards become advantages: docs/losses.md (also: --advantages)",
        "standard",
        choices=ADVANTAGES,
        takes_own=True,
    )
    advantage_pass_k: int = flag(
        "k of pass@k", 4, requires="advantage_normalization_type pass_at_k", minimum=1
    )

    @property
    def max_prompts_ahead(self) -> int:
        """Prompts of later steps that may be out while a step waits for its completions."""
        if self.prompts_ahead is not None:
            return self.prompts_ahead
        return self.async_steps * self.num_unique_prompts_rollout

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
        "openenv:http://… for a server's, or verifiers:NAME for a taskset; agent:COMMAND or "
        "agent:FILE.py:function is a program of your own that asks the policy by OpenAI's API",
        None,
    )
    tools: list[str] = flag("such tools, several at once, in place of --environment", [])
    tool_call_names: list[str] = flag(
        "what the policy calls each; default: its own name", [], requires="tools"
    )
    tool_configs: list[str] = flag(
        "settings of each, a JSON object: '{}' '{\"timeout\": 3}'", [], requires="tools"
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

    agent_sampling: Literal["refuse", "follow"] = flag(
        "what becomes of an agent's request for another temperature or top_p than the run's, or "
        "for JSON: an error, or a reply that is sampled so and not learned",
        "refuse",
    )
    agent_concurrency: int = flag(
        "requests of one agent's episode that are answered at once; more wait", 8, minimum=1
    )

    agent_processes: int = flag(
        "agents' processes that run at once on a node; more episodes wait for their turn",
        256,
        minimum=1,
    )
    agent_sandbox: bool = flag(
        "keep an agent, with all that it starts, behind walls: it speaks to its endpoint alone and "
        "writes to a folder of its own that ends with its episode (Linux 6.7)",
        False,
    )

    @property
    def of_all_rows(self) -> str | None:
        """The name of the environment of rows that name none."""
        return TOOL_SET if self.tools else self.environment


@dataclass(kw_only=True)
class EvaluationSection:
    """Answers to held-out prompts."""

    title: ClassVar[str] = "Evaluation"

    section_requirement: ClassVar[str] = f"{HELD_OUT}|eval_split"

    local_eval_every: int = resumable_flag(
        "steps between evaluations; 0: only at the end", 100, minimum=0
    )
    eval_on_step_0: bool = resumable_flag("evaluate before the first step too", False)
    eval_num_samples: int | None = resumable_flag(
        "completions of each prompt; default: the largest --eval_pass_at_k", None, minimum=1
    )
    eval_pass_at_k: list[int] = resumable_flag("report pass@k for each of these k", [1])
    eval_temperature: float = resumable_flag(
        "temperature of sampling; 0: the likeliest token", 1.0, minimum=0
    )
    eval_top_p: float = resumable_flag("nucleus sampling", 1.0, above=0, maximum=1)

    @property
    def num_samples(self) -> int:
        """Completions of each held-out prompt."""
        return self.eval_num_samples or max([1, *self.eval_pass_at_k])
