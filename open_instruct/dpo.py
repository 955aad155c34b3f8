"""Train DPO: parse, build, cache the reference, fit, export.

    torchrun --nproc_per_node 2 open_instruct/dpo.py --model_name_or_path DIR --mixer_list rows.jsonl 1.0 \
        --output_dir OUT
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.dpo import DPOConfig, validate_dpo
from open_instruct.entry import leave, run_entry


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the flags in `argv` (default: the command line) and return the exit code."""
    return run_entry(DPOConfig, train, argv, program="dpo.py", validate=validate_dpo)


def train(config: DPOConfig) -> int:
    """The whole run, as every rank walks it. Returns the exit code."""
    # torch, and all that hangs on it, loads only once the flags are known to be good.
    from open_instruct.data.cache import cache_root
    from open_instruct.data.preference_dataset import load_preference_dataset
    from open_instruct.losses.preference import LOSSES
    from open_instruct.olmo_core_train_modules import DPOTrainModule
    from open_instruct.parallel.wording import counted
    from open_instruct.training.closing import export_policy, preempted
    from open_instruct.training.datasets import load_datasets
    from open_instruct.training.evaluation import Heldout
    from open_instruct.training.plan_check import check_plan_of_run
    from open_instruct.training.policy import build_policy
    from open_instruct.training.preference_steps import preference_step
    from open_instruct.training.pretrained import open_pretrained
    from open_instruct.training.reference_cache import open_reference_cache, reference_logprobs
    from open_instruct.training.run import open_run
    from open_instruct.training.sample_loader import BatchShape, SampleLoader
    from open_instruct.training.scoring import Scorer
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
        pairs, heldout_pairs = load_datasets(
            load_preference_dataset, config.data, pretrained=pretrained, seed=config.optim.seed, console=run.console
        )
        shape = BatchShape.of(
            config.optim,
            config.data,
            run.layout,
            documents_per_sample=2,
            pad_token_id=pretrained.pad_token_id,
            prefix_sharing=config.data.prefix_sharing,
        )
        num_steps = shape.num_steps(len(pairs), optim=config.optim, layout=run.layout)

        policy = build_policy(DPOTrainModule, pretrained, run=run, config=config, num_steps=num_steps, loss=config.loss)

        scorer = Scorer(policy, preference_step, shape=shape, console=run.console)
        reference = heldout_reference = None
        if LOSSES[config.loss.loss_type].needs_reference:
            cache = open_reference_cache(cache_root(config.data.cache_dir), pretrained, model=config.model, shape=shape)
            reference = reference_logprobs(scorer, pairs, cache=cache, title="reference log-probs")
            if heldout_pairs is not None:
                heldout_reference = reference_logprobs(
                    scorer, heldout_pairs, cache=cache, title="held-out reference log-probs"
                )
            if config.loss.cache_logprobs_only:
                run.console.say(f"reference log-probs of {counted(len(cache), 'row')}: {cache.path}")
                return 0

        heldout = None
        if heldout_pairs is not None:
            heldout = Heldout(heldout_pairs, reference=heldout_reference, loss=config.loss, run=run)
            heldout.evaluate(scorer, step=0)

        loader = SampleLoader(
            pairs,
            partial(preference_step, reference=reference),
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
            heldout.evaluate(scorer, step=trainer.global_step)
        export_policy(policy, pretrained, run=run, config=config)
        return 0


if __name__ == "__main__":
    leave(main())
