"""Models of every family on the GPU give what float32 on the CPU does: log-probs, entropy and
gradients.
"""

import random
from functools import cache
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.documents import pack_documents
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.core.families import FAMILIES
from open_instruct.core.records import Document, PackedBatch, Span
from open_instruct.models.build import build_model
from open_instruct.training.model.forward import token_logprobs

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
VOCAB_SIZE = 512
SIZE = SIZES["tiny"]
FLOAT32_TOLERANCE = 1e-4
# A GPU in bfloat16 may err by so much more than the CPU in bfloat16 does, each from the CPU in
# float32.
MORE_THAN_THE_CPU = 3.0
LEAST_ERROR = 2e-3


class Computed(NamedTuple):
    """On the CPU in float32: log-probs and entropies of the labels, logits of one document, all
    gradients in one.
    """

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor
    logits_TV: torch.Tensor
    gradient: torch.Tensor


@cache
def model_of(family: str) -> Transformer:
    model = build_model(tiny_config(family, SIZE, vocab_size=VOCAB_SIZE, tie=family == "llama"))
    model.init_weights(device=CPU, max_seq_len=256)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(mean=1.0 if "norm" in name else 0.0, std=0.08, generator=generator)
    return model


def documents() -> list[Document]:
    """Two groups of three replies to one prompt, of lengths on both sides of the window."""
    rng = random.Random(0)
    found = []
    for prompt_length in (40, 9):
        prompt = tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(prompt_length))
        for reply_length in (30, 1, 17):
            ids = prompt + tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(reply_length))
            found.append(
                Document(token_ids=ids, responses=(Span(start=prompt_length, stop=len(ids)),))
            )
    return found


BATCHES = {
    "packed": lambda: pack_documents(documents()),
    "shared": lambda: pack_documents(documents(), groups=[(0, 1, 2), (3, 4, 5)]),
    "padded": lambda: pack_documents(documents(), packing=False),
}


def computed(family: str, batch: PackedBatch, device: torch.device, dtype: torch.dtype) -> Computed:
    model = build_model(tiny_config(family, SIZE, vocab_size=VOCAB_SIZE, tie=family == "llama"))
    model.init_weights(device=device, max_seq_len=256)
    model.load_state_dict(model_of(family).state_dict())
    model = model.to(device, dtype)
    scores = token_logprobs(model, batch, device=device, with_entropy=True)
    weights = torch.linspace(-1, 1, len(scores.logprobs_N), device=device)
    gradients = torch.autograd.grad(
        (scores.logprobs_N.float() * weights).sum(), list(model.parameters())
    )
    with torch.no_grad():
        logits = model(torch.tensor([documents()[0].token_ids], device=device))
    assert scores.entropy_N is not None
    return Computed(
        *(
            tensor.detach().float().cpu()
            for tensor in (
                scores.logprobs_N,
                scores.entropy_N,
                logits[0],
                torch.cat([gradient.flatten() for gradient in gradients]),
            )
        )
    )


def errors(ours: Computed, theirs: Computed) -> dict[str, float]:
    """The largest difference, as a share of the largest value."""
    return {
        name: float((getattr(ours, name) - value).abs().max() / value.abs().max())
        for name, value in theirs._asdict().items()
    }


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_float32(device: torch.device, family: str, kind: str) -> None:
    batch = BATCHES[kind]()
    found = errors(
        computed(family, batch, device, torch.float32), computed(family, batch, CPU, torch.float32)
    )
    assert max(found.values()) < FLOAT32_TOLERANCE, found


@pytest.mark.parametrize("kind", BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16(device: torch.device, family: str, kind: str) -> None:
    batch = BATCHES[kind]()
    exact = computed(family, batch, CPU, torch.float32)
    found = errors(computed(family, batch, device, torch.bfloat16), exact)
    of_cpu = errors(computed(family, batch, CPU, torch.bfloat16), exact)
    for name, error in found.items():
        assert error < MORE_THAN_THE_CPU * of_cpu[name] + LEAST_ERROR, (name, found, of_cpu)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_are_those_of_the_logits(device: torch.device, family: str) -> None:
    """On the device itself: the head in chunks against the whole table of logits."""
    batch = pack_documents(documents()[:1])
    model = build_model(tiny_config(family, SIZE, vocab_size=VOCAB_SIZE, tie=family == "llama"))
    model.init_weights(device=device, max_seq_len=256)
    model.load_state_dict(model_of(family).state_dict())
    model = model.to(device)
    ids = torch.tensor(documents()[0].token_ids, device=device)
    with torch.no_grad():
        ours = token_logprobs(model, batch, device=device).logprobs_N
        logprobs_TV = F.log_softmax(model(ids.unsqueeze(0))[0, :-1].float(), dim=-1)
    theirs = logprobs_TV.gather(1, ids[1:, None]).squeeze(1)[-len(ours) :]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=FLOAT32_TOLERANCE)
