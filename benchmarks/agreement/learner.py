"""The learner's side: its log-probs, and weights that change and are sent."""

from collections.abc import Sequence
from pathlib import Path

import torch

from agreement.engine import LONGEST_COMPLETION, LONGEST_PROMPT, TIMEOUT_S, EngineProcess
from open_instruct.batching.documents import pack_documents
from open_instruct.core.records import Completion, Document, Span
from open_instruct.generation.requests import GenerationRequest
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.training.model.forward import token_logprobs
from open_instruct.weight_sync.sender import WeightSender
from open_instruct.weight_sync.transports import choose_transport

TEMPERATURE = 0.7


class Learner:
    """The policy on the learner's side, and the sender of its weights."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        hf_config = load_hf_config(str(folder))
        names = TensorNames(hf_config)
        self.vocab_size: int = hf_config.vocab_size
        self.model = build_model(hf_config, init_device="cpu").to(getattr(torch, dtype)).eval()
        self.model.init_weights(
            max_seq_len=LONGEST_PROMPT + LONGEST_COMPLETION, device=torch.device("cpu")
        )
        files = CheckpointFiles.open(folder)
        stream_load(self.model, files, names)
        self.sender = WeightSender(
            self.model,
            names,
            backend=choose_transport("auto", on_cuda=False, single_device=False, same_host=True),
            dtype=getattr(torch, dtype),
            bucket_bytes=1 << 20,  # several buckets
            timeout_s=TIMEOUT_S,
        )

    def logprobs(self, sample: Sequence[tuple[GenerationRequest, Completion]]) -> torch.Tensor:
        """Of every token of every completion, in order: shape (N,), float32."""
        documents = []
        for request, completion in sample:
            token_ids = request.prompt_token_ids + completion.token_ids
            response = Span(start=len(request.prompt_token_ids), stop=len(token_ids))
            documents.append(Document(token_ids=token_ids, responses=(response,)))
        with torch.no_grad():
            tokens = token_logprobs(
                self.model,
                pack_documents(documents),
                device=torch.device("cpu"),
                temperature=TEMPERATURE,
            )
        return tokens.logprobs_N

    def change(self, noise: float) -> None:
        """Add `noise` standard deviations of each parameter to it."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += noise * parameter.std() * torch.randn_like(parameter)


def send_weights(learner: Learner, engine: EngineProcess, *, version: int) -> None:
    """As a run sends them; the channel is opened with the first version."""
    engine.ask("begin_update", True)
    if version == 1:
        info = learner.sender.open(num_receivers=1)
        engine.tell("open_channel", {**info, "receiver_index": 0})
        learner.sender.join()
        engine.answer()
    engine.tell("receive_weights")
    learner.sender.send(version)
    engine.answer()
    engine.ask("finish_update", version)
