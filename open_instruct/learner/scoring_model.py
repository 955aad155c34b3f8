"""An exported model that judges, on one device: a reward for a conversation, or P(right) of each of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from olmo_core.nn.transformer import Transformer
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from open_instruct.data.chat import single_token_id
from open_instruct.errors import InputError
from open_instruct.learner.model.forward import token_logprobs
from open_instruct.models.build import build_model
from open_instruct.models.heads.value_head import is_classifier
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import Head, TensorNames
from open_instruct.models.load import check_cover, parameter_shapes, stream_load
from open_instruct.objectives.prm import REWARD_TOKENS
from open_instruct.packing.balance import best_fit
from open_instruct.packing.documents import pack_documents
from open_instruct.records import Document

DTYPES = {"cuda": "bfloat16", "cpu": "float32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringModel:
    """A model with the head that it was trained with, and the rule that turns the head's output into a score."""

    model: Transformer
    hf_config: PretrainedConfig
    device: torch.device
    classes: tuple[int, ...] = ()
    mean: float = 0.0
    std: float = 1.0

    @classmethod
    def open(
        cls, folder: Path, tokenizer: PreTrainedTokenizerFast, *, dtype: str | None, normalize: bool
    ) -> ScoringModel:
        """Load it onto the GPU, or the CPU where there is none; without a `dtype`, in that device's.

        Raises:
            InputError: the folder is damaged, its model does not score, or it has no numbers to normalise with.
        """
        hf_config = load_hf_config(str(folder))
        words: list[str] = getattr(hf_config, REWARD_TOKENS, [])
        if not words and not is_classifier(hf_config):
            raise InputError(
                f"{folder} is no reward model (config.json: architectures {hf_config.architectures}): give the "
                "hf_model of a run of open-instruct reward_model or prm"
            )
        if normalize and not hasattr(hf_config, "score_std"):
            raise InputError(
                f"--normalize: {folder}/config.json has no score_mean and score_std, which a run with "
                "--eval_mixer_list writes; leave the flag out"
            )
        head: Head = "vocabulary" if words else "score"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = build_model(hf_config, head=head).to(getattr(torch, dtype or DTYPES[device.type]))
        names = TensorNames(hf_config, head=head)
        with CheckpointFiles.open(folder) as files:
            check_cover(names, files, parameter_shapes(model))
            model.init_weights(device=device, max_seq_len=hf_config.max_position_embeddings)
            stream_load(model, files, names)
        scale = {"mean": hf_config.score_mean, "std": hf_config.score_std} if normalize else {}
        classes = tuple(single_token_id(tokenizer, word) for word in words)
        return cls(model=model.eval(), hf_config=hf_config, device=device, classes=classes, **scale)

    @property
    def max_seq_length(self) -> int:
        longest: int = self.hf_config.max_position_embeddings
        return longest

    @torch.no_grad()
    def scores(self, documents: Sequence[Document], *, batch_tokens: int) -> list[list[float]]:
        """The scores at each place of each document; documents of similar length are packed together."""
        lengths = list(map(len, documents))
        scores: list[list[float]] = [[] for _ in documents]
        for batch in best_fit(range(len(lengths)), lengths, max(batch_tokens, max(lengths, default=0))):
            packed = pack_documents([documents[document] for document in batch])
            output = token_logprobs(self.model, packed, device=self.device, classes=self.classes)
            values_N = output.logprobs_N.exp() if self.classes else output.logprobs_N
            for index, value in zip(output.sequence_ids_N.tolist(), values_N.tolist(), strict=True):
                scores[batch[index]].append((value - self.mean) / self.std)
        return scores
