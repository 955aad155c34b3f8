"""DPO as one loop to read: documents, a packed row, log-probs, the loss, a step.

open-instruct tiny-model tiny --family olmo2 && python examples/dpo_by_hand.py tiny
"""

import sys

import torch

from open_instruct.batching.documents import pack_documents
from open_instruct.core.records import Document, Span
from open_instruct.data.tokenizer import load_tokenizer
from open_instruct.losses.logprobs import sum_by_sequence
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import stream_load
from open_instruct.training.model.forward import token_logprobs

CPU = torch.device("cpu")
PROMPTS = ["Name a prime.", "Name a colour."]
CHOSEN, REJECTED = [" 7", " Red"], [" 8", " Bread"]


def encode_pairs(folder: str) -> list[Document]:
    """The chosen replies, then the rejected ones, each behind its prompt."""
    tokenizer, documents = load_tokenizer(folder), []
    for prompt, reply in zip(PROMPTS * 2, CHOSEN + REJECTED, strict=True):
        start, token_ids = len(tokenizer.encode(prompt)), tokenizer.encode(prompt + reply)
        span = Span(start=start, stop=len(token_ids))
        documents.append(Document(token_ids=tuple(token_ids), responses=(span,)))
    return documents


def load_weights(model: torch.nn.Module, folder: str) -> None:
    stream_load(model, CheckpointFiles.open(folder), TensorNames(load_hf_config(folder)))


def main(folder: str, beta: float = 0.1) -> None:
    model = build_model(load_hf_config(folder), init_device="cpu")
    model.init_weights(device=CPU, max_seq_len=64)
    load_weights(model, folder)
    packed = pack_documents(encode_pairs(folder))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(10):
        scores = token_logprobs(model, packed, device=CPU)
        logps_S, _ = sum_by_sequence(scores.logprobs_N, scores.sequence_ids_N, 4)
        if step == 0:  # the policy is its own reference, so the loss is ln 2
            reference_S = logps_S.detach()
        chosen_P, rejected_P = (logps_S - reference_S).view(2, -1)
        loss = -torch.nn.functional.logsigmoid(beta * (chosen_P - rejected_P)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}  loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
