"""Train on conversations (a warm start before DPO or GRPO): parse, build, fit, export.

    torchrun --nproc_per_node 2 open_instruct/sft.py --model_name_or_path DIR --mixer_list rows.jsonl 1.0 \
        --output_dir OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.sft import SFTConfig, validate_sft
from open_instruct.entry import leave, run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the flags in `argv` (default: the command line) and return the exit code."""
    return run_entry(SFTConfig, train, argv, program="sft.py", validate=validate_sft)


def train(config: SFTConfig) -> int:
    """The whole run, as every rank walks it. Returns the exit code."""
    # torch, and all that hangs on it, loads only once the flags are known to be good.
    from open_instruct.data.sft_dataset import load_sft_dataset
    from open_instruct.olmo_core_train_modules import SFTTrainModule
    from open_instruct.training.closing import export_policy, preempted
    from open_instruct.training.datasets import load_datasets
    from open_instruct.training.evaluation import evaluate_loss
    from open_instruct.training.plan_check import check_plan_of_run
    from open_instruct.training.policy import build_policy
    from open_instruct.training.pretrained import open_pretrained
    from open_instruct.training.run import open_run
    from open_instruct.training.sample_loader import BatchShape, SampleLoader
    from open_instruct.training.scoring import Scorer
    from open_instruct.training.sft_steps import sft_step
    from open_instruct.training.start_model import start_model_of
    from open_instruct.training.trainer import build_trainer

    with open_run(config) as run:
        pretrained = open_pretrained(
            config.model,
            max_seq_length=config.data.max_seq_length,
            export_folder=run.directory.hf_model,
            layout=run.layout,
        )
        check_plan_of_run(config, run, pretrained.folder)
        start_model = start_model_of(pretrained, run)
        conversations, heldout = load_datasets(
            load_sft_dataset, config.data, pretrained=pretrained, seed=config.optim.seed, console=run.console
        )
        shape = BatchShape.of(
            config.optim, config.data, run.layout, documents_per_sample=1, pad_token_id=pretrained.pad_token_id
        )
        num_steps = shape.num_steps(len(conversations), optim=config.optim, layout=run.layout)

        policy = build_policy(SFTTrainModule, pretrained, run=run, config=config, num_steps=num_steps)
        scorer = Scorer(policy, sft_step, shape=shape, console=run.console)
        if heldout is not None:
            evaluate_loss(heldout, scorer, step=0, run=run)

        loader = SampleLoader(
            conversations,
            sft_step,
            shape=shape,
            seed=config.optim.seed,
            work_dir=run.directory.path,
            dp_group=policy.dp_process_group,
        )
        trainer = build_trainer(policy, loader, config=config, run=run, start_model=start_model, num_steps=num_steps)
        trainer.fit()
        if trainer.is_canceled:
            return preempted(trainer, run)

        if heldout is not None:
            evaluate_loss(heldout, scorer, step=trainer.global_step, run=run)
        export_policy(policy, pretrained, run=run, config=config)
        return 0


if __name__ == "__main__":
    leave(main())
