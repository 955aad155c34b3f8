"""An exported reward model on one device: a score for each conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from olmo_core.nn.transformer import Transformer
from transformers import PretrainedConfig

from open_instruct.errors import InputError
from open_instruct.learner.model.forward import token_logprobs
from open_instruct.models.build import build_model
from open_instruct.models.heads.value_head import is_classifier
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, parameter_shapes, stream_load
from open_instruct.packing.balance import best_fit
from open_instruct.packing.documents import pack_documents
from open_instruct.records import Document

DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringModel:
    """A model with the head of a score, and the numbers that scores are normalised with."""

    model: Transformer
    hf_config: PretrainedConfig
    device: torch.device
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def open(cls, folder: Path, *, dtype: str | None, normalize: bool) -> ScoringModel:
        """Load it onto the GPU, or the CPU where there is none; without a `dtype`, in that device's.

        Raises:
            InputError: the folder is damaged, its model does not score, or it has no numbers to normalise with.
        """
        hf_config = load_hf_config(str(folder))
        if not is_classifier(hf_config):
            raise InputError(
                f"{folder} is no reward model (config.json: architectures {hf_config.architectures}): give the "
                "hf_model of a run of open-instruct reward_model"
            )
        if normalize and not hasattr(hf_config, "score_std"):
            raise InputError(
                f"--normalize: {folder}/config.json has no score_mean and score_std, which a run with "
                "--eval_mixer_list writes; leave the flag out"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = build_model(hf_config, head="score").to(getattr(torch, dtype or DTYPES[device.type]))
        names = TensorNames(hf_config, head="score")
        with CheckpointFiles.open(folder) as files:
            check_cover(names, files, parameter_shapes(model))
            model.init_weights(device=device, max_seq_len=hf_config.max_position_embeddings)
            stream_load(model, files, names)
        scale = {"mean": hf_config.score_mean, "std": hf_config.score_std} if normalize else {}
        return cls(model=model.eval(), hf_config=hf_config, device=device, **scale)

    @property
    def max_seq_length(self) -> int:
        return int(self.hf_config.max_position_embeddings)

    @torch.no_grad()
    def scores(self, documents: Sequence[Document], *, batch_tokens: int) -> list[float]:
        """The score at the end of each document; documents of similar length are packed together."""
        lengths = list(map(len, documents))
        scores = [0.0] * len(documents)
        for batch in best_fit(range(len(lengths)), lengths, max(batch_tokens, max(lengths, default=0))):
            packed = pack_documents([documents[document] for document in batch])
            output = token_logprobs(self.model, packed, device=self.device)
            for index, score in zip(output.sequence_ids_N.tolist(), output.logprobs_N.tolist(), strict=True):
                scores[batch[index]] = (score - self.mean) / self.std
        return scores
