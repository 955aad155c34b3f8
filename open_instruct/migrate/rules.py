"""Rules for upstream's flags that only mean something together: each settles some of a sheet."""

import json
import re
from typing import Any

from open_instruct.config.suites.upstream_flags import (
    Entry,
    decide_fate,
    read_table,
    upstream_table,
)
from open_instruct.core.families import FAMILIES
from open_instruct.data.templates.chat_templates import built_in_templates
from open_instruct.migrate.launch import Sheet

ZERO_FLAGS = (
    "zero_stage",
    "zero_hpz_partition_size",
    "offload_optimizer",
    "offload_param",
    "deepspeed_stage",
    "deepspeed_zpg",
    "deepspeed_offload_param",
    "deepspeed_offload_optimizer",
)
SPLIT_ROWS = ("sequence_parallel_size", "context_parallel_degree", "cp_degree")
SOURCES = ("dataset_name", "train_file", "dataset_mixer", "mixer_list", "dataset_mixer_list")
# Those whose scheduler holds the rate from the first step where it is constant.
TRACKERS = ("wandb", "tensorboard", "mlflow", "swanlab", "trackio")
WITHOUT_WARMUP = ("dpo_tune_cache", "finetune", "grpo_fast", "ppo_fast", "reward_modeling")
# Those that spare norms and biases of the decay, and embeddings no more than the others do.
SPARING_NORMS = ("dpo_tune_cache", "finetune", "grpo_fast", "ppo_fast")

# OpenRLHF's flags (without `_key`) that name the columns of our keys.
COLUMNS_OF_STEPS = {"input": "input", "values": "label"}

TOOLS = ("python", "serper_search", "jina_browse", "crawl4ai_browse", "s2_search", "generic_mcp")
GAMES = ("counter", "guess_number", "wordle")
MAX_STEPS = "5"  # upstream's default
SETTINGS_OF_SERVERS = ("api_endpoint", "pool_size", "max_retries", "retry_backoff")


def apply_rules(command: str, sheet: Sheet) -> None:
    """Apply every rule of `command`."""
    _settle_uploads(sheet)
    _settle_tracking(sheet)
    _settle_schedule(sheet)
    _settle_model(sheet)
    _settle_names(sheet)
    _settle_sharding(sheet)
    if command == "grpo":
        _settle_ratio(sheet)
        _settle_rewards(sheet)
        _settle_checkpoints(sheet)
        _settle_evaluation(sheet)
        _settle_tools(sheet)
    elif command == "prm":
        _settle_steps(sheet)
    else:
        _settle_rows(command, sheet)


def _settle_uploads(sheet: Sheet) -> None:
    """A run has a branch of a shared repository upstream, and a repository here."""
    name = sheet.find_first(("hf_repo_id", "save_to_hub", "exp_name"))
    if sheet.is_on("push_to_hub") and name:
        parts = [*sheet.theirs.get("hf_entity", []), *sheet.theirs[name]]
        repository = "/".join(part for part in parts if part.lower() != "none")
        sheet.set("hub_model_id", [repository], "push_to_hub")
    sheet.drop(
        "says where a model goes: --hub_model_id, with --push_to_hub",
        "hf_entity",
        "hf_repo_id",
        "save_to_hub",
    )
    sheet.drop("is a branch: a model is uploaded to the main one", "hf_repo_revision")


def _settle_tracking(sheet: Sheet) -> None:
    trackers = [word for word in sheet.theirs.pop("report_to", []) if word in TRACKERS]
    if sheet.trainer == "trl_prm" and trackers:
        sheet.set("report_to", trackers, "report_to")
    elif sheet.is_on("with_tracking"):
        sheet.set("report_to", trackers or ["wandb"], "with_tracking")
        del sheet.theirs["with_tracking"]
    elif "report_to" in sheet.launch_flags:
        sheet.dropped["report_to"] = "reports nothing without --with_tracking"
    if "run_name" in sheet.launch_flags:
        sheet.drop("the run has the name of --run_name", "exp_name")


def _settle_schedule(sheet: Sheet) -> None:
    shape = sheet.word("lr_scheduler_type", "linear")
    if shape == "constant_with_warmup":
        sheet.theirs["lr_scheduler_type"] = ["constant"]
    elif shape == "constant" and sheet.trainer in WITHOUT_WARMUP and sheet.number("warmup_ratio"):
        sheet.drop("is not read by upstream's constant schedule", "warmup_ratio")
        sheet.set("warmup_ratio", ["0"], "lr_scheduler_type")
    if sheet.number("weight_decay"):
        target = "all"
        decays_norms = sheet.word("set_weight_decay_on_bias_and_norm") == "false"
        if sheet.trainer in SPARING_NORMS and not decays_norms:
            target = "matrices"
        sheet.set("weight_decay_on", [target], "weight_decay")
    if sheet.word("checkpointing_steps") == "none":
        sheet.drop("is none", "checkpointing_steps")


def _settle_model(sheet: Sheet) -> None:
    reason = find_family_problem(sheet.word("model_name_or_path"))
    if reason:
        sheet.refuse("model_name_or_path", reason)


def find_family_problem(model: str) -> str | None:
    """Why a model cannot be loaded, if its name is like those of another family."""
    name = model.lower().rstrip("/").rpartition("/")[2]
    for family, form in read_table("defaults.yaml")["families"].items():
        if re.search(form, name):
            family_names = ", ".join(each.name for each in FAMILIES.values())
            return (
                f"names a model of the family {family}, which cannot be loaded: {family_names} can"
            )
    return None


def _settle_names(sheet: Sheet) -> None:
    for name in ("chat_template_name", "chat_template"):
        template = " ".join(sheet.theirs.get(name, []))
        if template and template not in read_table("defaults.yaml")["templates"]:
            fallback = "which then takes the tokenizer's own, as is done here"
            sheet.drop(f"names no template of upstream's, {fallback}", name)
        elif template and template not in built_in_templates():
            template_names = ", ".join(built_in_templates())
            sheet.refuse(
                name, f"names {template}, which is not among the templates here: {template_names}"
            )
    if sheet.word("model_name_or_path").startswith(("/", ".", "~")):
        sheet.drop("is not read of a folder", "model_revision", "tokenizer_revision")
    if "tokenizer_name_or_path" in sheet.launch_flags:
        sheet.drop("is an older name of --tokenizer_name_or_path, which is given", "tokenizer_name")


def _settle_sharding(sheet: Sheet) -> None:
    """A launch that names a stage of DeepSpeed may be a run on DeepSpeed too."""
    names_a_stage = bool(sheet.launch_flags & {"zero_stage", "deepspeed_stage"})
    for name in ZERO_FLAGS:
        if names_a_stage and name in sheet.launch_flags:
            becomes = decide_fate(upstream_table().get(name, Entry(ours=name)), sheet.theirs[name])
            sheet.deepspeed += [f"--{becomes.ours}", *becomes.words]
    fsdp = "FSDP2 shards weights, gradients and optimizer states; see --backend deepspeed"
    sheet.drop(f"is DeepSpeed's: {fsdp}", *ZERO_FLAGS)
    if sheet.number("activation_memory_budget", 1.0) < 1:
        sheet.drop("--activation_memory_budget says what is recomputed", "gradient_checkpointing")


def _settle_rows(command: str, sheet: Sheet) -> None:
    if command != "reward_model" and sheet.word("max_seq_length") == "none":
        sheet.refuse(
            "max_seq_length",
            "is left out, so upstream cuts nothing; give the longest that is to be learned",
        )
    sheet.drop("is worked out anew by upstream, from --num_evals", "eval_freq")
    if max(map(sheet.number, SPLIT_ROWS)) > 1:
        sheet.drop("rows that are split over ranks are packed", "packing")
    source = sheet.find_first(SOURCES)
    names = sheet.theirs.get(source, [])
    if sheet.word("max_train_samples") != "none" and names and names[1:] in ([], ["1.0"]):
        del sheet.theirs[source]
        amount = sheet.theirs.pop("max_train_samples")
        sheet.theirs["dataset_mixer_list"] = [names[0], *amount]
        sheet.launch_flags |= {"dataset_mixer_list"}


# Process reward models, for which open-instruct has no trainer


def _settle_steps(sheet: Sheet) -> None:
    """TRL's flags of its script, and OpenRLHF's of train_prm, that only mean something together."""
    if sheet.trainer != "train_prm":
        sheet.drop("is of a loss that is never scaled: bfloat16 needs no scaling", "fp16")
        return
    if "adam_betas" in sheet.theirs:
        betas = sheet.theirs.pop("adam_betas")
        for ours, beta in zip(("adam_beta1", "adam_beta2"), betas, strict=False):
            sheet.set(ours, [beta], "adam_betas")
    columns = []
    for ours, theirs in COLUMNS_OF_STEPS.items():
        words = sheet.theirs.pop(f"{theirs}_key", [])
        if words and words[0] != ours:
            columns.append(f"{ours}={words[0]}")
    if columns:
        source = "label_key" if "label_key" in sheet.launch_flags else "input_key"
        sheet.set("columns", columns, source)
    if sheet.number("lora_rank") > 0:
        sheet.set("use_lora", ["true"], "lora_rank")
    else:
        sheet.drop(
            "0 trains no adapters", "lora_rank", "lora_alpha", "lora_dropout", "target_modules"
        )
    if "reward_tokens" not in sheet.launch_flags:
        sheet.refuse(
            "reward_tokens",
            "is left out, so the whole vocabulary is learned there; give two words, + -",
        )
    if "gradient_accumulation_steps" in sheet.launch_flags:
        sheet.drop("follows from --gradient_accumulation_steps and the ranks", "train_batch_size")
        return
    micro = max(sheet.number("micro_train_batch_size", 1), 1)
    parts = f"{sheet.number('train_batch_size') / micro:g} microbatches of {micro:g}"
    remedy = "add --gradient_accumulation_steps, that number divided by the ranks"
    sheet.refuse("train_batch_size", f"is {parts} over all ranks: {remedy}")


# GRPO


def _settle_ratio(sheet: Sheet) -> None:
    """The weight of what engine and learner see differently: 0 is no bound upstream."""
    bounds = (
        "rho_clamp_lower_bound",
        "rho_clamp_upper_bound",
        "rho_mask_lower_bound",
        "rho_mask_upper_bound",
    )
    names = ("use_rho_correction", *bounds, "rho_mask_sequence_level")
    source = sheet.find_first(names) or "use_rho_correction"
    clamp_lower, clamp_upper, mask_lower, mask_upper = map(sheet.number, bounds)
    is_on = sheet.is_on("use_rho_correction")
    by_sequence = sheet.is_on("rho_mask_sequence_level")
    for name in names:
        sheet.theirs.pop(name, None)
    if not is_on:
        sheet.set("rho_correction", ["none"], source)
    elif clamp_upper > 0 and not (clamp_lower or mask_lower or mask_upper or by_sequence):
        sheet.set("rho_correction", ["clamp"], source)
        sheet.set("rho_cap", [f"{clamp_upper:g}"], source)
    else:
        sheet.set("rho_correction", ["bounds"], source)
        sheet.set("rho_level", ["sequence" if by_sequence else "token"], source)
        sheet.set("rho_clamp_lower", [f"{clamp_lower:g}"], source)
        sheet.set("rho_clamp_upper", [_write_upper_bound(clamp_upper)], source)
        sheet.set("rho_mask_lower", [f"{mask_lower:g}"], source)
        sheet.set("rho_mask_upper", [_write_upper_bound(mask_upper)], source)
    if "cliprange" in sheet.theirs:
        clip_range = sheet.theirs.pop("cliprange")
        sheet.set("clip_lower", clip_range, "cliprange")
        sheet.set("clip_higher", clip_range, "cliprange")
    if sheet.word("loss_denominator") != "token":
        sheet.refuse(
            "loss_denominator",
            "divides a whole batch by that upstream, and each completion here; use token",
        )


def _write_upper_bound(bound: float) -> str:
    return f"{bound:g}" if bound else "none"


def _settle_rewards(sheet: Sheet) -> None:
    if not sheet.is_on("additive_format_reward"):
        # Upstream the form then only decides whether the verifiers count.
        sheet.drop("adds nothing without --additive_format_reward", "r1_style_format_reward")
        sheet.set("r1_style_format_reward", ["0"], "additive_format_reward")
    for model in sheet.theirs.get("llm_judge_model", []):
        if model.startswith("azure/"):
            sheet.refuse(
                "llm_judge_model",
                "is asked by LiteLLM there; name a model of a server of OpenAI's form",
            )
        else:
            sheet.theirs["llm_judge_model"] = [model.removeprefix("hosted_vllm/")]
    if sheet.number("beta") == 0 and "beta" in sheet.launch_flags:
        sheet.drop("--beta 0 builds no reference policy", "load_ref_policy")


def _settle_checkpoints(sheet: Sheet) -> None:
    """A checkpoint of ours is a model and a whole state, which upstream writes apart."""
    if "checkpoint_state_dir" not in sheet.launch_flags:
        sheet.drop("is read with --checkpoint_state_dir", "checkpoint_state_freq")
    elif sheet.launch_flags >= {"checkpoint_state_freq", "save_freq"}:
        rarer = "save_freq"
        if sheet.number("save_freq") <= sheet.number("checkpoint_state_freq"):
            rarer = "checkpoint_state_freq"
        sheet.drop("the other writes more checkpoints", rarer)


def _settle_evaluation(sheet: Sheet) -> None:
    if sheet.word("eval_response_length") == sheet.word("response_length"):
        sheet.drop("is --response_length", "eval_response_length")
    num_samples = int(sheet.number("eval_pass_at_k", 1))
    ks = [str(2**power) for power in range(num_samples.bit_length()) if 2**power < num_samples]
    sheet.theirs["eval_pass_at_k"] = [*ks, str(num_samples)]
    if sheet.number("temperature", 1.0) != 1:
        sheet.set("eval_temperature", sheet.theirs["temperature"], "temperature")


def _settle_tools(sheet: Sheet) -> None:
    """Tools are called the same here, and a game is an environment."""
    tools = [word for word in sheet.theirs.pop("tools", []) if word != "none"]
    if tools and not sheet.launch_flags & {"max_steps", "max_tool_calls"}:
        sheet.set("max_turns", [MAX_STEPS], "max_steps")
    unknown = [word for word in tools if word not in TOOLS]
    has_settings = bool(sheet.launch_flags & {"tool_call_names", "tool_configs"})
    if len(tools) == 1 and tools[0] in (*TOOLS, *GAMES) and not has_settings:
        sheet.set("environment", tools, "tools")
    elif unknown:
        tool_names = (
            f"{', '.join(TOOLS)} are, and one alone of {', '.join(GAMES)}, without settings"
        )
        sheet.refuse("tools", f"names {unknown[0]}, which is no tool here: {tool_names}")
    elif tools:
        sheet.set("tools", tools, "tools")
        _settle_settings(tools, sheet)
    if "tools" not in sheet.ours:
        sheet.drop("says something of --tools alone", "tool_call_names", "tool_configs")


def _settle_settings(tools: list[str], sheet: Sheet) -> None:
    texts = sheet.theirs.pop("tool_configs", ["{}"] * len(tools))
    try:
        settings = [json.loads(text) for text in texts]
        ours = [_leave_out_server_settings(each) for each in settings]
    except (ValueError, TypeError) as error:
        sheet.refuse("tool_configs", f"is no list of JSON objects: {error}")
        return
    if any(each.get("env") or each.get("transport") == "sse" for each in ours):
        sheet.refuse(
            "tool_configs",
            "asks for a server with variables of its own, or by SSE, which are not offered",
        )
    if ours != settings:
        server_settings = ", ".join(SETTINGS_OF_SERVERS)
        sheet.dropped["tool_configs"] = f"is read, but for {server_settings}: these are of servers"
    if any(ours):
        sheet.set("tool_configs", [json.dumps(each) for each in ours], "tool_configs")
    call_names = sheet.theirs.pop("tool_call_names", tools)
    names = []
    for tool, name, each in zip(tools, call_names, ours, strict=False):
        # A server's tools keep their names upstream, where its settings name none of them.
        keeps_name = tool == "generic_mcp" and "tool_name" not in each
        names.append(tool if keeps_name else name)
    if names != tools:
        sheet.set("tool_call_names", names, "tool_call_names")


def _leave_out_server_settings(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: settings[key] for key in settings if key not in SETTINGS_OF_SERVERS}
