"""The first loss of a run, taken on one process by `open-instruct check --with_model`."""

import io
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.training import ConfigT, TrainingConfig
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Completion, Prompt, RolloutGroup, Verdict
from open_instruct.data.chat import ChatFormat
from open_instruct.data.prompts import Prompts
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.process import start_process, stop_process
from open_instruct.parallel.resolve import reduce_to_one_process
from open_instruct.planning.subject.build_workload import RunConfig
from open_instruct.rewards.trial import TRIAL_ANSWERS
from open_instruct.rl.lone_step import take_lone_step
from open_instruct.rl.run_checks import check_engine
from open_instruct.run.pretrained import open_pretrained
from open_instruct.training.offline import take_first_loss as take_offline_loss


def take_first_loss(
    config: RunConfig,
    objective: Objective,
    *,
    rows: TokenDataset,
    chat: ChatFormat,
) -> str:
    """Load the model, and take the loss of a first microbatch; returns a sentence.

    Raises:
        InputError: the run would be refused, or fail, where it opens the model.
    """
    # Warnings of libraries belong in the log of a run; a look has none.
    logging.captureWarnings(True)
    with _use_temporary_folder(config) as config, redirect_stdout(io.StringIO()):
        try:
            if isinstance(config, GRPOConfig):
                return _take_rollout_loss(config, Prompts(rows), chat)
            loss = take_offline_loss(
                _shorten_to_one_microbatch(reduce_to_one_process(config)), objective=objective
            )
            return f"{loss:.4f}, of the first microbatch on one process"
        except RunError as error:
            raise InputError(f"the first loss: {error}", kind="machine") from error


@contextmanager
def _use_temporary_folder(config: ConfigT) -> Iterator[ConfigT]:
    with tempfile.TemporaryDirectory(prefix="check_") as folder:
        yield replace(config, run=replace(config.run, output_dir=folder))


def _shorten_to_one_microbatch(config: TrainingConfig) -> TrainingConfig:
    """The config of a run on the rows of one microbatch, as frozen models score all rows."""
    num_rows = str(max(2, config.optim.per_device_train_batch_size))
    mixer_list: list[str] = []
    for name in config.data.mixer_list[::2]:
        mixer_list += [name, num_rows]
    data = replace(config.data, mixer_list=mixer_list, eval_mixer_list=[], eval_split=None)
    optim = replace(config.optim, gradient_accumulation_steps=1)
    return replace(config, data=data, optim=optim)


def _take_rollout_loss(config: GRPOConfig, prompts: Prompts, chat: ChatFormat) -> str:
    pretrained = open_pretrained(config, Path(config.run.output_dir) / "hf_model")
    check_engine(
        pretrained.hf_config,
        config.fleet,
        engine_dtype=config.engine_dtype,
        sends_adapter=config.sent_adapter is not None,
    )
    process = start_process(timeout_s=config.parallel.dist_timeout_s, seed=config.optim.seed)
    try:
        row = take_lone_step(
            config,
            [make_group(prompts[0], chat)],
            step=1,
            model=config.model.model_name_or_path,
            checkpoint=None,
            process=process,
        )
    finally:
        stop_process()
    return f"{row['loss']:.4f}, of two made-up answers to the first prompt, one of them right"


def make_group(prompt: Prompt, chat: ChatFormat) -> RolloutGroup:
    """Two made-up answers to a prompt; the first is rewarded."""
    end = min(chat.turn_end_token_ids())
    answers = [(*ids, end) for ids in chat.tokenize(list(TRIAL_ANSWERS))]
    completions = tuple(
        Completion(
            text=text,
            token_ids=ids,
            logprobs=(-1.0,) * len(ids),
            versions=(0,) * len(ids),
            finish_reason="stop",
            seed=0,
        )
        for text, ids in zip(TRIAL_ANSWERS, answers, strict=True)
    )
    verdicts = (Verdict(reward=1.0, scores={}), Verdict(reward=0.0, scores={}))
    return RolloutGroup(
        ticket=0,
        prompt=prompt,
        completions=completions,
        verdicts=verdicts,
    )
