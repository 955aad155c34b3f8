"""One step of a learner on given completions, in one process and without a fleet."""

import gc
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.core.records import RolloutGroup
from open_instruct.parallel.data_parallel import set_mesh
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.process import Process
from open_instruct.parallel.resolve import reduce_to_one_process
from open_instruct.rl.samples import RolloutStepBatch, load_conversations, plan_rank_work
from open_instruct.run.console import Console
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained, open_pretrained
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training.grpo import GRPOLearner


def take_lone_step(
    config: GRPOConfig,
    groups: Sequence[RolloutGroup],
    *,
    step: int,
    model: str,
    checkpoint: Path | None,
    process: Process,
) -> dict[str, float]:
    """Take `step` (1-based) on `groups` with a real learner; returns its metrics.

    The files that it writes are removed.

    Args:
        model: the folder of the weights that the step begins with.
        checkpoint: of a run; it is loaded over these weights.

    Raises:
        InputError: the model does not know a token of the completions, or cannot be opened.
    """
    config = reduce_to_one_process(config)
    with tempfile.TemporaryDirectory(prefix="replay_") as folder:
        run = Run(
            process=process,
            layout=find_layout(config.parallel, process.gpus_per_node, config.backend),
            directory=RunDirectory(path=Path(folder)),
            console=Console(speaks=False),
        )

        def open_model(model: str) -> Pretrained:
            section = config.model
            if model != section.model_name_or_path:
                section = section.read_from(model)
            return open_pretrained(replace(config, model=section), run.directory.hf_model)

        pretrained = open_model(model)
        check_trace_fits(groups, pretrained.hf_config.vocab_size)
        conversations = load_conversations(
            config.data, pretrained.tokenizer, seed=config.optim.seed
        )
        batch = RolloutStepBatch(groups=tuple(groups))
        step_samples, (work,) = plan_rank_work(
            batch,
            step=step,
            config=config,
            conversations=conversations,
            num_ranks=1,
        )
        start: Pretrained | None = None
        if config.loss.beta > 0:
            start = open_model(config.model.model_name_or_path)
        learner = GRPOLearner(pretrained, reference=start, run=run, config=config)
        learner.loop.rewind_to(step, checkpoint=checkpoint)
        row = learner.step(work)
    set_mesh(None)
    # Model and trainer hold each other: their memory is wanted before the next ones are built.
    del learner
    gc.collect()
    return {"num_trained_completions": float(len(step_samples.samples))} | row


def check_trace_fits(groups: Sequence[RolloutGroup], vocab_size: int) -> None:
    """Check that the model knows all tokens of a trace.

    Raises:
        InputError: it does not.
    """
    largest = 0
    for group in groups:
        completions = [completion.token_ids for completion in group.completions]
        largest = max(largest, max(chain(group.prompt.token_ids, *completions), default=0))
    if largest >= vocab_size:
        raise InputError(
            f"the trace has token {largest}, and the model has vocab_size {vocab_size}: they do "
            "not belong together",
            kind="conflict",
        )
