"""Checks within one section, and between sections that several configs have.

Each function of problems yields a sentence for every problem: which flag, what is wrong, what would
work. Nothing here reads a file or knows the number of GPUs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from open_instruct.config.flags import list_flags, list_section_flags, requirement_met, spell_value
from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.sections import PreferenceDataSection, RowsSection
from open_instruct.config.sharding_sections import MemorySection, ParallelSection
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.core.errors import InputError, Problem, problems_of_kind
from open_instruct.core.metrics import HELD_OUT_PREFIX, metric_entry
from open_instruct.core.text import join_choices, spell_count

# Launches name a run for the hub and for trackers whether they use them or not.
WARNED_OF_WITHOUT = ("push_to_hub", "report_to")
MAX_PROCESSES = 1024  # of one machine
MAX_MICROBATCH_TOKENS = 2**28  # hundreds of times what a device holds


def find_changed(config: object, *names: str) -> list[str]:
    """Find the flags among `names` that are not at their default, each as `--name value`."""
    flags = list_flags(type(config))
    values = {
        name: getattr(getattr(config, flags[name].section, config), name)
        for name in names
        if name in flags
    }
    return [
        f"--{name} {spell_value(value)}"
        for name, value in values.items()
        if value != flags[name].default
    ]


@problems_of_kind("unread_flag")
def idle_problems(*sections: Any, harmless: bool = False) -> Iterator[str]:
    """A problem for each flag that was given and that nothing will read.

    Args:
        harmless: only flags whose sole harm is that their name appears nowhere, in place of all
            others.
    """
    values = {name: value for section in sections for name, value in vars(section).items()}
    remedy = "" if harmless else "; add that, or leave this out"
    for section in sections:
        for name, flag in list_section_flags(type(section)).items():
            if values[name] == flag.default:
                continue
            is_read = flag.other not in values or requirement_met(flag.requires, values)
            if not is_read and harmless == (flag.other in WARNED_OF_WITHOUT):
                yield (
                    f"--{name} {spell_value(values[name])} is read only with "
                    f"{flag.condition}{remedy}"
                )


@problems_of_kind("out_of_range")
def limit_problems(*sections: Any) -> Iterator[str]:
    """A problem for each flag whose number is outside its limits; None passes."""
    for section in sections:
        for name, flag in list_section_flags(type(section)).items():
            value = getattr(section, name)
            if (
                isinstance(value, int | float)
                and (problem := flag.limit_problem(value)) is not None
            ):
                yield f"--{name} {spell_value(value)}: {problem}"


def _find_mixers(data: RowsSection) -> Iterator[tuple[str, list[str], list[str]]]:
    """The mixer lists of a run: their flag, their words and their splits."""
    flags = vars(data)
    for name, words in flags.items():
        if f"{name}_splits" in flags:
            yield name, words, flags[f"{name}_splits"]


@problems_of_kind("bad_value")
def mixer_problems(flag: str, words: Sequence[str], splits: Sequence[str]) -> Iterator[str]:
    """Names and amounts must alternate; there is one split for all data sets, or one for each."""
    names, amounts = words[::2], words[1::2]
    for name, amount in zip(names, amounts, strict=False):
        if not 0 < _amount(amount) < math.inf:
            yield (
                f"--{flag}: '{amount}' after '{name}' is not an amount; names alternate with "
                f"finite amounts above 0: '{name} 1.0' (all rows) or '{name} 500' (so many)"
            )
    if len(names) != len(amounts):
        name, _, amount = names[-1].rpartition(":")
        pair = f"{names[-1]} 1.0"
        if name and amount.replace(".", "", 1).isdecimal():
            pair = f"{name} {amount}"
        yield f"--{flag}: '{names[-1]}' has no amount; write `--{flag} {pair}`"
    if len(splits) not in (1, len(names)):
        sets = spell_count(len(names), "data set")
        yield (
            f"--{flag}_splits: {len(splits)} splits for {sets} in --{flag}; give one for all, or "
            "one for each"
        )


@problems_of_kind("conflict")
def split_problems(data: Any) -> Iterator[str]:
    for flag in ("eval_mixer_list", "dataset_mixer_eval_list"):
        if data.eval_split is not None and getattr(data, flag, None):
            words = f"--eval_split {data.eval_split}"
            yield (
                f"{words} holds out rows of the training mixture, and --{flag} names others: "
                "give one of them as none"
            )


@problems_of_kind("bad_value")
def keep_best_problems(config: LearnerConfig) -> Iterator[str]:
    """`--keep_best` takes a metric of this run of which it is known which values are better."""
    metric = config.run.keep_best
    if metric is None:
        return
    words = f"--keep_best {metric}"
    has_held_out_rows = config.data.has_held_out_rows
    names = [name for name in config.quality_metrics if metric_entry(name).better]
    known_names = [
        name for name in names if has_held_out_rows or not name.startswith(HELD_OUT_PREFIX)
    ]
    is_known = any(fnmatchcase(metric, name) for name in names)
    if is_known and metric.startswith(HELD_OUT_PREFIX) and not has_held_out_rows:
        yield f"{words} is a number of held-out rows: add --eval_split 0.05, or name their file"
    elif not is_known:
        why = "is no metric of this run"
        if metric_entry(metric).meaning and metric_entry(metric).better is None:
            why = "does not say how good the model is"
        yield f"{words} {why}: give {join_choices(known_names)}{suggest_nearest(metric, names)}"


@problems_of_kind("conflict")
def idle_evaluation_problems(config: LearnerConfig, flag: str, interval: int) -> Iterator[str]:
    """`--keep_best` needs evaluations between steps, which an interval of 0 does not give."""
    metric = config.run.keep_best or ""
    if metric.startswith(HELD_OUT_PREFIX) and config.data.has_held_out_rows and interval == 0:
        yield (
            f"--keep_best {metric}: held-out rows are scored after the last step alone: add "
            f"--{flag} N, steps between"
        )


@problems_of_kind("bad_value")
def column_problems(words: Sequence[str]) -> Iterator[str]:
    names = [word.partition("=")[0] for word in words]
    for word, name in zip(words, names, strict=True):
        if not name or not word.partition("=")[2]:
            yield (
                f"--columns {word}: takes what a row should have, =, and its column, such as "
                "messages=conversations"
            )
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"--columns: '{name}' is given {names.count(name)} times; name one column for it"


@problems_of_kind("bad_value")
def template_variable_problems(words: Sequence[str]) -> Iterator[str]:
    """Problems of the words of `--chat_template_kwargs`, whatever the template is."""
    names = [word.partition("=")[0] for word in words]
    for word, name in zip(words, names, strict=True):
        if "=" not in word or not name.isidentifier():
            yield (f"--chat_template_kwargs {word}: takes KEY=VALUE, such as enable_thinking=false")
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield (
            f"--chat_template_kwargs: '{name}' is given {names.count(name)} times; give one value"
        )


def _amount(word: str) -> float:
    """A fraction if it has a dot, else a count; 0 if it is neither."""
    try:
        return float(word) if "." in word else int(word)
    except ValueError:
        return 0


@problems_of_kind("conflict")
def parallel_problems(parallel: ParallelSection) -> Iterator[str]:
    """The checks that need no number of GPUs.

    `parallel/layout.py` checks the degrees against that.
    """
    degrees = [f"--{name} {degree}" for name, degree in parallel.splitting.items()]
    for words in [*degrees, *find_changed(parallel, "fsdp_prefetch_factor", "gradient_reduction")]:
        if parallel.single_gpu_mode:
            yield f"--single_gpu_mode does not shard, so {words} has no use: leave one of them out"


@problems_of_kind("conflict")
def lora_problems(config: LearnerConfig) -> Iterator[str]:
    """Conflicts between the flags of adapters and other flags."""
    if config.adapters is None:
        return
    if not config.adapters.lora_target_modules:
        empty = (
            "--lora_target_modules is empty: use all-linear, or name some matrices of the blocks"
        )
        yield Problem(empty, kind="bad_value")
    if config.optim.optimizer == "muon":
        yield "--optimizer muon cannot go with --use_lora: it is for whole matrices; use adamw"
    for words in (
        find_changed(config, "lora_dropout") if config.parallel.tensor_parallel_degree > 1 else ()
    ):
        yield (
            f"{words}: ranks that split a matrix would each leave out others; use 0, or "
            "--tensor_parallel_degree 1"
        )
    for words in (
        find_changed(config, "tensor_parallel_degree") if config.adapters.use_qlora else ()
    ):
        yield (
            f"{words} cannot go with --use_qlora: matrices in 4 bits are cut by rows alone; use "
            "--fsdp_shard_degree"
        )
    for words in find_changed(config, "ref_policy_update_freq"):
        yield (
            f"{words}: with --use_lora the reference is the model without its adapters, which "
            "stays; leave it out"
        )


@problems_of_kind("conflict")
def float8_problems(config: LearnerConfig) -> Iterator[str]:
    """Flags that float8 products cannot go with."""
    recipe = config.model.float8_linears
    if recipe == "off":
        return
    words = f"--float8_linears {recipe} cannot go with"
    remedy = "leave one of them out"
    if config.adapters is not None:
        why = "whose frozen matrices would be cast anew in every pass"
        yield f"{words} --use_lora, {why}: {remedy}"
    if config.parallel.tensor_parallel_degree > 1:
        degree = "--tensor_parallel_degree above 1"
        yield f"{words} {degree}, where parts of a matrix have other scales: {remedy}"
    if config.model.param_dtype == "float32":
        yield f"{words} --param_dtype float32, which is for exactness: {remedy}"


@problems_of_kind("conflict")
def memory_problems(memory: MemorySection) -> Iterator[str]:
    budget = f"--activation_memory_budget {spell_value(memory.activation_memory_budget)}"
    if memory.activation_memory_budget < 1 and memory.activation_checkpointing not in (
        "none",
        "auto",
    ):
        yield (
            f"{budget} and --activation_checkpointing {memory.activation_checkpointing} both "
            "decide what is recomputed: keep one of them"
        )
    if memory.activation_memory_budget < 1 and memory.compile_model is False:
        yield (
            f"{budget} is carried out by the compiler, which --no_compile_model leaves out: keep "
            "one of them"
        )
    if (
        memory.activation_checkpointing == "selected_modules"
        and not memory.activation_checkpointing_modules
    ):
        yield Problem(
            "--activation_checkpointing_modules is empty: name at least one pattern, such as "
            "'blocks.*.feed_forward', or use --activation_checkpointing full",
            kind="bad_value",
        )


@problems_of_kind("out_of_range")
def microbatch_problems(num_tokens: int, remedy: str) -> Iterator[str]:
    if num_tokens > MAX_MICROBATCH_TOKENS:
        yield (
            f"a microbatch of {num_tokens:,} tokens fits no device (the most is "
            f"{MAX_MICROBATCH_TOKENS:,}): {remedy}"
        )


@problems_of_kind("conflict")
def learner_problems(config: LearnerConfig) -> Iterator[str]:
    """Problems of any config that trains, GRPO's too."""
    yield from limit_problems(*config.all_sections)
    yield from idle_problems(*config.all_sections)
    for flag, words, splits in _find_mixers(config.data):
        if not words and list_flags(type(config))[flag].required:
            empty = f"--{flag} is empty: give 'NAME AMOUNT', such as 'rows.jsonl 1.0'"
            yield Problem(empty, kind="bad_value")
        yield from mixer_problems(flag, words, splits)
    yield from split_problems(config.data)
    yield from keep_best_problems(config)
    yield from column_problems(config.data.columns)
    yield from template_variable_problems(config.data.chat_template_kwargs)
    yield from parallel_problems(config.parallel)
    yield from config.backend.problems(config)
    yield from lora_problems(config)
    yield from float8_problems(config)
    yield from memory_problems(config.memory)
    for flag_words in (
        find_changed(config, "weight_decay_on") if config.optim.optimizer == "muon" else ()
    ):
        unread = f"{flag_words} is read by AdamW, not by --optimizer muon; leave it out"
        yield Problem(unread, kind="unread_flag")
    for flag_words in (
        find_changed(config, "cache_dataset_only", "cache_logprobs_only")
        if config.run.push_to_hub
        else ()
    ):
        yield f"{flag_words} trains nothing that could be uploaded: leave --push_to_hub out"
    if not config.run.output_dir.strip():
        yield Problem("--output_dir is empty: name a folder", kind="bad_value")
    often = config.run.ephemeral_save_interval
    seldom = config.run.checkpointing_steps
    if often and 0 < seldom <= often:
        yield (
            f"--ephemeral_save_interval {often} is not below --checkpointing_steps {seldom}: "
            "lower it or leave it out"
        )
    steps = config.logging.profile_steps
    if steps and not (len(steps) == 2 and 1 <= steps[0] <= steps[1]):
        wrong = (
            f"--profile_steps {spell_value(steps)}: takes the first and the last step to profile, "
            "such as '3 5'"
        )
        yield Problem(wrong, kind="bad_value")


def learner_warnings(config: LearnerConfig) -> Iterator[str]:
    for flag, words, _ in _find_mixers(config.data):
        for name, amount in zip(words[::2], words[1::2], strict=False):
            if amount == "1":
                yield f"--{flag} {name} 1 takes a single row; write 1.0 for all of them"
    yield from config.backend.warnings(config)
    yield from idle_problems(*config.all_sections, harmless=True)


@problems_of_kind("conflict")
def training_problems(config: TrainingConfig) -> Iterator[str]:
    """Problems of a config that trains on the rows of a `DataSection`, whatever its loss."""
    yield from learner_problems(config)
    yield from idle_evaluation_problems(config, "eval_steps", config.data.eval_steps)
    count = config.parallel.num_processes
    if count not in (None, "auto") and not (count.isdecimal() and 1 <= int(count) <= MAX_PROCESSES):
        wrong = (
            f"--num_processes {count}: takes 'auto', or a whole number from 1 to {MAX_PROCESSES}"
        )
        yield Problem(wrong, kind="bad_value")
    shares_prompts = (
        isinstance(config.data, PreferenceDataSection) and config.data.prefix_sharing == "on"
    )
    if shares_prompts and not config.data.packing:
        yield (
            "--prefix_sharing on: only packed rows share prompts; leave --no_packing out, or use "
            "--prefix_sharing off"
        )
    yield from microbatch_problems(
        config.optim.per_device_train_batch_size * config.data.max_seq_length,
        "lower --per_device_train_batch_size or --max_seq_length",
    )
    degree = config.parallel.context_parallel_degree
    if degree > 1 and not config.data.packing:
        yield (
            f"--context_parallel_degree {degree}: only packed rows are split over ranks; leave "
            "--no_packing out"
        )


def training_warnings(config: TrainingConfig) -> Iterator[str]:
    """Settings of such a config that are allowed but seldom meant."""
    if (
        config.parallel.gradient_reduction == "last"
        and config.optim.gradient_accumulation_steps == 1
    ):
        yield (
            "--gradient_reduction last changes nothing with --gradient_accumulation_steps 1, a "
            "microbatch a step"
        )
    yield from learner_warnings(config)


def validate_training(config: TrainingConfig, problems: Iterable[str] = ()) -> list[str]:
    """Check everything that the flags alone can tell, with an objective's `problems`.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    refuse([*training_problems(config), *problems])
    return list(training_warnings(config))


def refuse(problems: Iterable[str]) -> None:
    """Raise an InputError that lists all `problems`, if there are any."""
    if lines := list(problems):
        raise InputError("\n".join(lines), problems=lines)
