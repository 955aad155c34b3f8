"""Where a step of DPO, of SFT and of GRPO makes the host wait for the GPU: by PyTorch's sync debug
mode.
"""

import math
import random
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu_check.devices import device_of
from gpu_check.findings import Findings
from gpu_check.host_waits import counted_host_waits
from gpu_check.measured_run import measured
from gpu_check.rows import write_rows
from open_instruct.commands.tiny_model import SIZES, write_tiny_model
from open_instruct.parallel.process import stop_process

# The first steps allocate, and compile what is compiled.
MEASURED_STEP = 4
NUM_MICROBATCHES = 2
MOST_WAITS = 2


def check(findings: Findings, work: Path, rehearse: bool) -> None:
    size = "tiny" if rehearse else "small"
    model = write_tiny_model(work / "model", family="olmo2", size=size)
    counts: dict[str, Mapping[str, int]] = {}
    for objective in ("dpo", "sft", "grpo"):
        try:
            if objective == "grpo":
                vocab_size = SIZES[size]["vocab_size"]
                counts[objective] = waits_of_grpo(
                    model, work, vocab_size=vocab_size, rehearse=rehearse
                )
            else:
                counts[objective] = waits_of_run(objective, model, work)
        except Exception as error:  # the others may still say something
            traceback.print_exc()
            findings.require(False, f"{objective}: {type(error).__name__}: {error}")
        finally:
            stop_process()
    if rehearse:
        findings.note("On a CPU there is nothing to wait for: that there are none says nothing.")
    places = [
        {"objective": objective, "waits": count, "where": where}
        for objective, waits in counts.items()
        for where, count in sorted(waits.items(), key=lambda item: -item[1])
    ]
    totals = {objective: sum(waits.values()) for objective, waits in counts.items()}
    findings.table(
        "Host waits in one step",
        [{"objective": name, "waits": total} for name, total in totals.items()],
    )
    findings.table("Where", places)
    for name, total in totals.items():
        findings.require(
            total <= MOST_WAITS,
            f"{name}: {total} waits in a step, and at most {MOST_WAITS} are needed",
        )
    findings.headline = f"a step of {NUM_MICROBATCHES} microbatches waits: " + ", ".join(
        f"{name} {total}" for name, total in totals.items()
    )


def waits_of_run(objective: str, model: Path, work: Path) -> Mapping[str, int]:
    rows = work / f"{objective}.jsonl"
    write_rows(rows, num_rows=64, prompt_words=8, reply_words=8, in_pairs=objective == "dpo")
    flags = [*flags_of_run(model, work, objective), "--mixer_list", str(rows), "1.0"]
    flags += [
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        str(NUM_MICROBATCHES),
    ]
    figures = measured(objective, flags, num_steps=MEASURED_STEP, waits_in_step=MEASURED_STEP)
    assert figures is not None, "there is one rank"
    waits: Mapping[str, int] = figures["waits"]
    return waits


def flags_of_run(model: Path, work: Path, name: str) -> list[str]:
    return [
        *(
            "--model_name_or_path",
            str(model),
            "--output_dir",
            str(work / name),
            "--cache_dir",
            str(work / "cache"),
        ),
        *("--max_seq_length", "256", "--param_dtype", "bfloat16", "--no_compile_model"),
    ]


def waits_of_grpo(model: Path, work: Path, *, vocab_size: int, rehearse: bool) -> Mapping[str, int]:
    """Those of a learner that is brought made-up completions, as a driver would bring them."""
    from open_instruct.batching.rollouts import plan_steps_of_ranks
    from open_instruct.commands.run_flags import parse_run
    from open_instruct.config.grpo import GRPOConfig, validate_grpo
    from open_instruct.run.opening import join_run
    from open_instruct.run.pretrained import open_pretrained
    from open_instruct.training.grpo import GRPOLearner

    (work / "grpo").mkdir()
    words = flags_of_run(model, work, "grpo")
    del words[words.index("--cache_dir") : words.index("--cache_dir") + 4]  # and --max_seq_length
    words += ["--dataset_mixer_list", "prompts.jsonl", "1.0", "--max_prompt_token_length", "32"]
    words += ["--response_length", "32", "--pack_length", "256", "--temperature", "0.7"]
    config = parse_run(GRPOConfig, words)
    validate_grpo(config)
    run = join_run(config)
    pretrained = open_pretrained(config, run.directory.hf_model)
    learner = GRPOLearner(pretrained, run=run, config=config)

    def take_step(seed: int) -> None:
        (work_of_rank,) = plan_steps_of_ranks(
            made_up_samples(32, vocab_size=vocab_size, seed=seed),
            num_ranks=1,
            max_tokens_per_microbatch=config.max_tokens_per_microbatch,
            num_mini_batches=config.loss.num_mini_batches,
            prefix_sharing=config.loss.prefix_sharing,
        )
        learner.step(work_of_rank)

    for seed in range(1, MEASURED_STEP):
        take_step(seed)
    with counted_host_waits(on_cuda=device_of(rehearse).type == "cuda") as waits:
        take_step(MEASURED_STEP)
    return waits


def made_up_samples(count: int, *, vocab_size: int, seed: int) -> list[Any]:
    """Completions of random tokens, eight of a prompt, with log-probs of an engine that knows
    nothing.
    """
    from open_instruct.core.records import Document, RolloutSample, Span

    rng = random.Random(seed)
    samples: list[RolloutSample] = []
    prompt: tuple[int, ...] = ()
    for index in range(count):
        if index % 8 == 0:
            prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(8, 32)))
        reply = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(4, 32)))
        document = Document(
            token_ids=prompt + reply,
            responses=(Span(start=len(prompt), stop=len(prompt) + len(reply)),),
        )
        logprobs = tuple(-math.log(vocab_size) + rng.gauss(0, 0.1) for _ in reply)
        samples.append(
            RolloutSample(document=document, engine_logprobs=logprobs, advantage=rng.gauss(0, 1))
        )
    return samples
