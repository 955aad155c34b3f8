"""A distillation's rows get the numbers that are kept of the teacher's distributions, from a cache or a pass.

Legend: N labelled tokens, V vocabulary, C numbers kept of a distribution.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain

import torch
from olmo_core.nn.transformer import Transformer

from open_instruct.config.training import TrainingConfig
from open_instruct.data.token_dataset import TokenDataset, cache_root
from open_instruct.learner.model.forward import token_logprobs
from open_instruct.learner.reference import Comparison, build_teacher
from open_instruct.learner.rows.row_cache import RowCache, open_row_cache
from open_instruct.learner.scoring import Scorer
from open_instruct.models.heads.logprob_head import Measure
from open_instruct.models.lora.adapters import adapters_off
from open_instruct.models.shards import reshard, whole_of
from open_instruct.parallel.process import gathered, on_main_process
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.wording import counted


def compare_with(
    opened: Comparison,
    rows: TokenDataset,
    heldout: TokenDataset | None,
    *,
    student: Pretrained,
    scorer: Scorer,
    run: Run,
    config: TrainingConfig,
) -> tuple[Comparison, TokenDataset, TokenDataset | None]:
    """The teacher to compare the policy with, and both data sets. Collective; call it after the policy is built.

    Where only a part of each distribution is kept, the rows carry it, from the cache or from a pass of the teacher,
    which is freed afterwards.
    """

    def build() -> Transformer:
        return build_teacher(opened.pretrained, student, scorer.policy.computing_model, run=run, config=config)

    if opened.teacher.keep is None:
        model = build()
        head_VD = whole_of(model.lm_head.w_out.weight, getattr(torch, config.model.param_dtype))
        return replace(opened, model=model, head_VD=head_VD), rows, heldout
    folder, laid_out = cache_root(config.data.cache_dir), "packed" if scorer.shape.packing else "padded"
    words = (config.model.param_dtype, laid_out, opened.teacher.kept_as, str(opened.vocab_size))
    cache = open_row_cache(folder / "teacher_distributions", opened.pretrained, *words)
    datasets = [dataset for dataset in (rows, heldout) if dataset is not None]
    num_missing = len({dataset.key(row) for dataset in datasets for row in cache.missing(dataset)})
    run.console.say(f"teacher's distributions: {counted(len(cache), 'row')} cached, {num_missing:,} to compute")
    if num_missing:
        model = build()
        with adapters_off(model):
            for dataset in datasets:
                _keep(opened, opened.teacher.keep, model, dataset, cache=cache, scorer=scorer)
        on_main_process(cache.write)
    return opened, cache.beside(rows), None if heldout is None else cache.beside(heldout)


@torch.no_grad()
def _keep(
    opened: Comparison,
    keep: Callable[[torch.Tensor], torch.Tensor],
    model: Transformer,
    dataset: TokenDataset,
    *,
    cache: RowCache,
    scorer: Scorer,
) -> None:
    """Run the teacher over the rows that `cache` lacks, and add the kept numbers to the cache, on every rank."""
    measure = Measure(lambda logits_NV: keep(opened.shared_logits(logits_NV)))
    for batch in scorer.batches(dataset, cache.missing(dataset), title="teacher's distributions"):
        kept_NC = token_logprobs(model, batch.packed, device=scorer.policy.device, measure=measure).measured_N
        assert kept_NC is not None
        lengths = dataset.num_label_tokens[list(batch.row_ids)].tolist()
        kept_by_row = zip(batch.row_ids, kept_NC.float().cpu().split(lengths), strict=True)
        own = {dataset.key(row): values_NC.numpy() for row, values_NC in kept_by_row}
        for key, values_NC in chain.from_iterable(
            each.items() for each in gathered(own, scorer.policy.dp_process_group)
        ):
            cache.add(key, values_NC)
    reshard(model)
