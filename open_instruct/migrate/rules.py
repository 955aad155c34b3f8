"""Rules for upstream flags that only mean something together: each settles some of a sheet."""

import json
import re

from open_instruct.config.suites.upstream_flags import Entry, fate, read_table, upstream_table
from open_instruct.core.families import FAMILIES
from open_instruct.data.templates.chat_templates import built_in_templates
from open_instruct.migrate.launch import Sheet

ZERO = (
    *(
        "zero_stage",
        "zero_hpz_partition_size",
        "offload_optimizer",
        "offload_param",
        "deepspeed_stage",
    ),
    *("deepspeed_zpg", "deepspeed_offload_param", "deepspeed_offload_optimizer"),
)
SPLIT_ROWS = ("sequence_parallel_size", "context_parallel_degree", "cp_degree")
SOURCES = ("dataset_name", "train_file", "dataset_mixer", "mixer_list", "dataset_mixer_list")
# Those whose scheduler holds the rate from the first step where it is constant.
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
WITHOUT_WARMUP = ("dpo_tune_cache", "finetune", "grpo_fast", "ppo_fast", "reward_modeling")
# Those that spare norms and biases of the decay, and embeddings no more than the others do.
SPARING_NORMS = ("dpo_tune_cache", "finetune", "grpo_fast", "ppo_fast")

# Of our keys of rows OpenRLHF's flags that name the columns.
COLUMNS_OF_STEPS = {"input": "input", "values": "label"}

TOOLS = ("python", "serper_search", "jina_browse", "crawl4ai_browse", "s2_search", "generic_mcp")
GAMES = ("counter", "guess_number", "wordle")
MAX_STEPS = "5"  # upstream's default
SETTINGS_OF_SERVERS = ("api_endpoint", "pool_size", "max_retries", "retry_backoff")


def settle(command: str, sheet: Sheet) -> None:
    """Apply every rule of `command`."""
    _uploads(sheet)
    _tracking(sheet)
    _schedule(sheet)
    _model(sheet)
    _names_of_files(sheet)
    _sharding(sheet)
    if command == "grpo":
        _ratio(sheet)
        _rewards(sheet)
        _checkpoints(sheet)
        _evaluation(sheet)
        _tools(sheet)
    elif command == "prm":
        _steps(sheet)
    else:
        _rows(command, sheet)


def _uploads(sheet: Sheet) -> None:
    """A run has a branch of a shared repository upstream, and a repository here."""
    name = next(
        (word for word in ("hf_repo_id", "save_to_hub", "exp_name") if word in sheet.given), None
    )
    if sheet.is_on("push_to_hub") and name is not None:
        parts = [*sheet.asked.get("hf_entity", []), *sheet.asked[name]]
        sheet.set(
            "hub_model_id",
            ["/".join(part for part in parts if part.lower() != "none")],
            "push_to_hub",
        )
    sheet.drop(
        "says where a model goes: --hub_model_id, with --push_to_hub",
        "hf_entity",
        "hf_repo_id",
        "save_to_hub",
    )
    sheet.drop("is a branch: a model is uploaded to the main one", "hf_repo_revision")


def _tracking(sheet: Sheet) -> None:
    trackers = [word for word in sheet.asked.pop("report_to", []) if word in TRACKERS]
    if sheet.trainer == "trl_prm" and trackers:
        sheet.set("report_to", trackers, "report_to")
    elif sheet.is_on("with_tracking"):
        sheet.set("report_to", trackers or ["wandb"], "with_tracking")
        del sheet.asked["with_tracking"]
    elif "report_to" in sheet.given:
        sheet.dropped["report_to"] = "reports nothing without --with_tracking"
    if "run_name" in sheet.given:
        sheet.drop("the run has the name of --run_name", "exp_name")


def _schedule(sheet: Sheet) -> None:
    shape = sheet.word("lr_scheduler_type", "linear")
    if shape == "constant_with_warmup":
        sheet.asked["lr_scheduler_type"] = ["constant"]
    elif shape == "constant" and sheet.trainer in WITHOUT_WARMUP and sheet.number("warmup_ratio"):
        sheet.drop("is not read by upstream's constant schedule", "warmup_ratio")
        sheet.set("warmup_ratio", ["0"], "lr_scheduler_type")
    if sheet.number("weight_decay"):
        spares_norms = (
            sheet.trainer in SPARING_NORMS
            and sheet.word("set_weight_decay_on_bias_and_norm") != "false"
        )
        sheet.set("weight_decay_on", ["matrices" if spares_norms else "all"], "weight_decay")
    if sheet.word("checkpointing_steps") == "none":
        sheet.drop("is none", "checkpointing_steps")


def _model(sheet: Sheet) -> None:
    if reason := family_problem(sheet.word("model_name_or_path")):
        sheet.refuse("model_name_or_path", reason)


def family_problem(model: str) -> str | None:
    """Why a model cannot be loaded, by its name: one that names a family of others is most likely
    of that.
    """
    name = model.lower().rstrip("/").rpartition("/")[2]
    others = read_table("defaults.yaml")["families"]
    family = next((family for family, form in others.items() if re.search(form, name)), None)
    if family is None:
        return None
    known = ", ".join(each.name for each in FAMILIES.values())
    return f"names a model of the family {family}, which cannot be loaded: {known} can"


def _names_of_files(sheet: Sheet) -> None:
    for name in ("chat_template_name", "chat_template"):
        template = " ".join(sheet.asked.get(name, []))
        if template and template not in read_table("defaults.yaml")["templates"]:
            sheet.drop(
                (
                    "names no template of upstream's, which then takes the tokenizer's own, as is "
                    "done here"
                ),
                name,
            )
        elif template and template not in built_in_templates():
            sheet.refuse(
                name,
                (
                    f"names {template}, which is not among the templates here: "
                    f"{', '.join(built_in_templates())}"
                ),
            )
    if sheet.word("model_name_or_path").startswith(("/", ".", "~")):
        sheet.drop("is not read of a folder", "model_revision", "tokenizer_revision")
    if "tokenizer_name_or_path" in sheet.given:
        sheet.drop("is an older name of --tokenizer_name_or_path, which is given", "tokenizer_name")


def _sharding(sheet: Sheet) -> None:
    """Where a launch names a stage of DeepSpeed, it may be a run on that too."""
    names_a_stage = bool(sheet.given & {"zero_stage", "deepspeed_stage"})
    for name in ZERO:
        if names_a_stage and name in sheet.given:
            becomes = fate(upstream_table().get(name, Entry(ours=name)), sheet.asked[name])
            sheet.deepspeed += [f"--{becomes.ours}", *becomes.words]
    sheet.drop(
        (
            "is DeepSpeed's: FSDP2 shards weights, gradients and optimizer states; see --backend "
            "deepspeed"
        ),
        *ZERO,
    )
    if sheet.number("activation_memory_budget", 1.0) < 1:
        sheet.drop("--activation_memory_budget says what is recomputed", "gradient_checkpointing")


def _rows(command: str, sheet: Sheet) -> None:
    if command != "reward_model" and sheet.word("max_seq_length") == "none":
        sheet.refuse(
            "max_seq_length",
            "is left out, so upstream cuts nothing; give the longest that is to be learned",
        )
    sheet.drop("is worked out anew by upstream, from --num_evals", "eval_freq")
    if max(map(sheet.number, SPLIT_ROWS)) > 1:
        sheet.drop("rows that are split over ranks are packed", "packing")
    source = next((name for name in SOURCES if name in sheet.given), "")
    names = sheet.asked.get(source, [])
    if sheet.word("max_train_samples") != "none" and names and names[1:] in ([], ["1.0"]):
        sheet.asked["dataset_mixer_list"] = [
            *sheet.asked.pop(source)[:1],
            *sheet.asked.pop("max_train_samples"),
        ]
        sheet.given |= {"dataset_mixer_list"}


# Process reward models, which open-instruct has no trainer of


def _steps(sheet: Sheet) -> None:
    """TRL's flags of its script, and OpenRLHF's of train_prm, that only mean something together."""
    if sheet.trainer != "train_prm":
        sheet.drop("is of a loss that is never scaled: bfloat16 needs no scaling", "fp16")
        return
    if "adam_betas" in sheet.asked:
        betas = sheet.asked.pop("adam_betas")
        for ours, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=False):
            sheet.set(ours, [beta], "adam_betas")
    columns = [
        (ours, sheet.asked.pop(f"{theirs}_key", [ours]))
        for ours, theirs in COLUMNS_OF_STEPS.items()
    ]
    renamed = [f"{ours}={words[0]}" for ours, words in columns if words and words[0] != ours]
    if renamed:
        sheet.set("columns", renamed, "label_key" if "label_key" in sheet.given else "input_key")
    if sheet.number("lora_rank") > 0:
        sheet.set("use_lora", ["true"], "lora_rank")
    else:
        sheet.drop(
            "0 trains no adapters", "lora_rank", "lora_alpha", "lora_dropout", "target_modules"
        )
    if "reward_tokens" not in sheet.given:
        sheet.refuse(
            "reward_tokens",
            "is left out, so the whole vocabulary is learned there; give two words, + -",
        )
    if "gradient_accumulation_steps" in sheet.given:
        sheet.drop("follows from --gradient_accumulation_steps and the ranks", "train_batch_size")
        return
    micro = max(sheet.number("micro_train_batch_size", 1), 1)
    parts = f"{sheet.number('train_batch_size') / micro:g} microbatches of {micro:g}"
    sheet.refuse(
        "train_batch_size",
        f"is {parts} over all ranks: add --gradient_accumulation_steps, that number divided by "
        "the ranks",
    )


# GRPO


def _ratio(sheet: Sheet) -> None:
    """The weight of what engine and learner see differently: 0 is no bound upstream."""
    bounds = (
        "rho_clamp_lower_bound",
        "rho_clamp_upper_bound",
        "rho_mask_lower_bound",
        "rho_mask_upper_bound",
    )
    names = ("use_rho_correction", *bounds, "rho_mask_sequence_level")
    source = next((name for name in names if name in sheet.given), "use_rho_correction")
    clamp_lower, clamp_upper, mask_lower, mask_upper = map(sheet.number, bounds)
    is_on, by_sequence = sheet.is_on("use_rho_correction"), sheet.is_on("rho_mask_sequence_level")
    for name in names:
        sheet.asked.pop(name, None)
    if not is_on:
        sheet.set("rho_correction", ["none"], source)
    elif clamp_upper > 0 and not (clamp_lower or mask_lower or mask_upper or by_sequence):
        sheet.set("rho_correction", ["clamp"], source)
        sheet.set("rho_cap", [f"{clamp_upper:g}"], source)
    else:
        sheet.set("rho_correction", ["bounds"], source)
        sheet.set("rho_level", ["sequence" if by_sequence else "token"], source)
        for kind, lower, upper in (
            ("clamp", clamp_lower, clamp_upper),
            ("mask", mask_lower, mask_upper),
        ):
            sheet.set(f"rho_{kind}_lower", [f"{lower:g}"], source)
            sheet.set(f"rho_{kind}_upper", [f"{upper:g}" if upper else "none"], source)
    for ours in ("clip_lower", "clip_higher") if "cliprange" in sheet.asked else ():
        sheet.set(ours, sheet.asked["cliprange"], "cliprange")
    sheet.asked.pop("cliprange", None)
    if sheet.word("loss_denominator") != "token":
        sheet.refuse(
            "loss_denominator",
            "divides a whole batch by that upstream, and each completion here; use token",
        )


def _rewards(sheet: Sheet) -> None:
    if not sheet.is_on("additive_format_reward"):
        # Upstream the form then only decides whether the verifiers count.
        sheet.drop("adds nothing without --additive_format_reward", "r1_style_format_reward")
        sheet.set("r1_style_format_reward", ["0"], "additive_format_reward")
    for model in sheet.asked.get("llm_judge_model", []):
        if model.startswith("azure/"):
            sheet.refuse(
                "llm_judge_model",
                "is asked by LiteLLM there; name a model of a server of OpenAI's form",
            )
        else:
            sheet.asked["llm_judge_model"] = [model.removeprefix("hosted_vllm/")]
    if sheet.number("beta") == 0 and "beta" in sheet.given:
        sheet.drop("--beta 0 builds no reference policy", "load_ref_policy")


def _checkpoints(sheet: Sheet) -> None:
    """A checkpoint of ours is a model and a whole state, which upstream writes apart."""
    if "checkpoint_state_dir" not in sheet.given:
        sheet.drop("is read with --checkpoint_state_dir", "checkpoint_state_freq")
    elif sheet.given >= {"checkpoint_state_freq", "save_freq"}:
        is_rarer = sheet.number("save_freq") <= sheet.number("checkpoint_state_freq")
        sheet.drop(
            "the other writes more checkpoints",
            "checkpoint_state_freq" if is_rarer else "save_freq",
        )


def _evaluation(sheet: Sheet) -> None:
    if sheet.word("eval_response_length") == sheet.word("response_length"):
        sheet.drop("is --response_length", "eval_response_length")
    num_samples = int(sheet.number("eval_pass_at_k", 1))
    ks = [str(2**power) for power in range(num_samples.bit_length()) if 2**power < num_samples]
    sheet.asked["eval_pass_at_k"] = [*ks, str(num_samples)]
    if sheet.number("temperature", 1.0) != 1:
        sheet.set("eval_temperature", sheet.asked["temperature"], "temperature")


def _tools(sheet: Sheet) -> None:
    """Tools are called the same here, and a game is an environment."""
    tools = [word for word in sheet.asked.pop("tools", []) if word != "none"]
    if tools and not sheet.given & {"max_steps", "max_tool_calls"}:
        sheet.set("max_turns", [MAX_STEPS], "max_steps")
    if (
        len(tools) == 1
        and tools[0] in (*TOOLS, *GAMES)
        and not sheet.given & {"tool_call_names", "tool_configs"}
    ):
        sheet.set("environment", tools, "tools")
    elif unknown := [word for word in tools if word not in TOOLS]:
        known = f"{', '.join(TOOLS)} are, and one alone of {', '.join(GAMES)}, without settings"
        sheet.refuse("tools", f"names {unknown[0]}, which is no tool here: {known}")
    elif tools:
        sheet.set("tools", tools, "tools")
        _settings(tools, sheet)
    if "tools" not in sheet.ours:
        sheet.drop("says something of --tools alone", "tool_call_names", "tool_configs")


def _settings(tools: list[str], sheet: Sheet) -> None:
    try:
        settings = [
            json.loads(text) for text in sheet.asked.pop("tool_configs", ["{}"] * len(tools))
        ]
        kept = [
            {key: each[key] for key in each if key not in SETTINGS_OF_SERVERS} for each in settings
        ]
    except (ValueError, TypeError) as error:
        sheet.refuse("tool_configs", f"is no list of JSON objects: {error}")
        return
    if any(each.get("env") or each.get("transport") == "sse" for each in kept):
        sheet.refuse(
            "tool_configs",
            "asks for a server with variables of its own, or by SSE, which are not offered",
        )
    if kept != settings:
        sheet.dropped["tool_configs"] = (
            f"is read, but for {', '.join(SETTINGS_OF_SERVERS)}: these are of servers"
        )
    if any(kept):
        sheet.set("tool_configs", [json.dumps(each) for each in kept], "tool_configs")
    names = zip(tools, sheet.asked.pop("tool_call_names", tools), kept, strict=False)
    # A server's tools keep their names upstream, where its settings name none of them.
    called = [
        tool if tool == "generic_mcp" and "tool_name" not in each else name
        for tool, name, each in names
    ]
    if called != tools:
        sheet.set("tool_call_names", called, "tool_call_names")
