"""Log-probs of the frozen start model: computed once with the sharded model itself, kept by content.

The file's name covers the weights, the configuration, the precision, and the layout of rows (padded, packed, or with
shared prompts), since layouts differ by rounding. The cache keeps sums over the reply: a loss that averages divides by
the length itself, so all losses share the same file. Sums that leave tokens out have a folder of their own.
"""

from pathlib import Path

import numpy as np

from open_instruct.config.sections import ModelSection
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.learner.rows.row_cache import RowCache, open_row_cache
from open_instruct.learner.scoring import Scorer
from open_instruct.packing.steps import BatchShape
from open_instruct.parallel.process import on_main_process
from open_instruct.run.pretrained import Pretrained
from open_instruct.wording import counted


def reference_logprobs(scorer: Scorer, dataset: TokenDataset, *, cache: RowCache, title: str) -> np.ndarray:
    """Reference log-probs of all rows, float32 (N, D): from the cache, and by a forward pass for those it lacks.

    The model must still hold the weights it started from. Every rank enters together and all return
    the same arrays; rank 0 writes the file.
    """
    missing = cache.missing(dataset)
    scorer.console.say(f"{title}: {counted(len(cache), 'row')} cached, {len(missing):,} to compute")
    if missing:
        for row, values_D in zip(missing, scorer.score(dataset, missing, title=title), strict=True):
            cache.add(dataset.key(row), values_D)
        on_main_process(cache.write)
    return cache.numbers(dataset)


def open_reference_cache(folder: Path, pretrained: Pretrained, *, model: ModelSection, shape: BatchShape) -> RowCache:
    """The cache file of these weights in this precision and layout; every rank reads what is in it now."""
    laid_out = f"packed-sharing-{shape.prefix_sharing}" if shape.packing else "padded"
    return open_row_cache(folder, pretrained, model.param_dtype, laid_out, str(shape.documents_per_sample))
