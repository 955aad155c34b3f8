"""OLMo-core's own Trainer with our DPO train module, and a data loader written by hand.

open-instruct tiny-model tiny --family olmo2 && python examples/olmo_core_trainer.py tiny OUT
"""

import sys
from collections.abc import Iterator
from typing import Any

from dpo_by_hand import encode_pairs
from olmo_core import train
from olmo_core.optim import AdamWConfig

from open_instruct import olmo_core_train_modules as modules
from open_instruct.batching.documents import pack_documents
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.records import Batch, StepBatch


class PairLoader(modules.StepLoader):
    """An epoch is one step: two pairs, the same again and again."""

    total_batches = 1

    def _iter_batches(self) -> Iterator[modules.TrainerBatch]:
        packed = pack_documents(encode_pairs(str(self.work_dir)))
        batch = Batch(packed=packed, row_ids=(0, 1), values=PreferenceValues())
        counts = {"rows": 2, "tokens": packed.num_tokens}  # of all ranks
        yield {"step": StepBatch(microbatches=(batch,), counts=counts)}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


def main(folder: str, output_dir: str) -> None:
    train.prepare_training_environment(backend="cpu:gloo")
    start = modules.StartModel.open(folder)
    module = modules.DPOTrainModule(
        loss=PreferenceLossSection(loss_type="orpo"),  # which needs no reference
        model=start.build(),
        param_dtype="float32",
        optim=AdamWConfig(lr=1e-3),
        rank_microbatch_size=64,
        max_sequence_length=64,
    )
    start.load_into(module.model)
    loader = PairLoader(work_dir=folder, global_batch_size=2)
    config = train.TrainerConfig(save_folder=output_dir, device="cpu")
    config.max_duration = train.Duration.steps(5)
    config.async_bookkeeping = False  # over gloo its second thread hangs now and then
    config.no_checkpoints = True
    config.callbacks["console_logger"] = train.callbacks.ConsoleLoggerCallback(metrics=["loss"])
    config.build(module, loader).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
