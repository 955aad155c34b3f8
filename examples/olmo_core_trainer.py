"""OLMo-core's own Trainer with our DPO train module, over gloo.

open-instruct tiny-model tiny --family olmo2 && python examples/olmo_core_trainer.py tiny OUT
"""

import sys
from typing import Any

from dpo_by_hand import encode_pairs, load_weights
from olmo_core import train
from olmo_core.data.data_loader import DataLoaderBase
from olmo_core.optim import AdamWConfig

from open_instruct.batching.documents import pack_documents
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.core.batch_values import PreferenceValues
from open_instruct.core.records import Batch, StepBatch
from open_instruct.models.build import build_model
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.olmo_core_train_modules import DPOTrainModule


class PairLoader(DataLoaderBase):
    """An epoch is one step, `{"step": StepBatch}`: two pairs, the same again and again."""

    total_batches, folder = 1, ""

    def _iter_batches(self) -> Any:
        packed = pack_documents(encode_pairs(self.folder))
        batch = Batch(packed=packed, row_ids=(0, 1), values=PreferenceValues())
        yield {"step": StepBatch(microbatches=(batch,), counts={"rows": 2})}  # of all ranks

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...
    def reshuffle(self, epoch: int | None = None, **_: Any) -> None: ...
    def get_mock_batch(self) -> dict[str, Any]:
        raise NotImplementedError("the Trainer then begins without a dry run")


def main(folder: str, output_dir: str) -> None:
    train.prepare_training_environment(backend="cpu:gloo")
    loss = PreferenceLossSection(loss_type="orpo")  # which needs no reference
    model = build_model(load_hf_config(folder), init_device="cpu")
    limits = {"rank_microbatch_size": 64, "max_sequence_length": 64, "max_grad_norm": 1.0}
    module = DPOTrainModule(loss=loss, model=model, optim=AdamWConfig(lr=1e-3), **limits)
    load_weights(module.model, folder)
    loader = PairLoader(work_dir=output_dir, global_batch_size=2)
    loader.folder = folder
    config = train.TrainerConfig(save_folder=output_dir, device="cpu")
    config.max_duration = train.Duration.steps(5)
    config.async_bookkeeping = False  # over gloo its second thread hangs now and then
    config.no_checkpoints = True
    config.callbacks["console_logger"] = train.callbacks.ConsoleLoggerCallback(metrics=["loss"])
    config.build(module, loader).fit()


if __name__ == "__main__":
    main(*sys.argv[1:])
