"""Log-probs of sampled tokens: a learner against a vLLM engine, before and after syncs of changed weights.

    python benchmarks/engine_agreement.py [--families olmo2 qwen3] [--num_tokens 1000] [--num_syncs 3]

For each family and dtype a tiny model is written. A vLLM engine in a process of its own samples from it; this
process, the only learner, takes the log-probs of the same tokens with the forward pass that GRPO trains with.
Then, several times over, noise is added to the learner's weights, they are sent to the engine, and the same
prompts are asked again. "moved" is what the noise did: the mean difference between the new weights and the
engine's log-probs from before. rho is exp(learner - engine).

CPUs only. The exit code is 1 if float32 log-probs are more than 1e-4 apart anywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.rollout_sections import FleetSection
from open_instruct.engines.requests import Batching, EngineSettings, GenerationRequest, SamplingSettings
from open_instruct.families import FAMILIES
from open_instruct.records import Completion, Document, Span
from open_instruct.toys.tiny import write_tiny_model

if TYPE_CHECKING:  # the engine's process imports this file, and needs none of it
    import torch

BOUND = 1e-4
DTYPES = ("float32", "bfloat16")
TEMPERATURE = 0.7
LONGEST_PROMPT, LONGEST_COMPLETION = 48, 48
NUM_AT_ONCE = 16
NOISE = 0.1  # standard deviations of each parameter
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One version of the weights. `moved` is None for the start model."""

    version: int
    num_tokens: int
    largest: float
    mean: float
    rho_mean: float
    rho_std: float
    rho_min: float
    rho_max: float
    moved: float | None


class EngineProcess:
    """An engine in a process of its own: vLLM and transformers' models must not share one."""

    def __init__(self, settings: EngineSettings) -> None:
        context = get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, settings), daemon=True)
        self._process.start()
        theirs.close()
        self.answer()

    def tell(self, method: str, *args: Any) -> None:
        self._connection.send((method, args))

    def answer(self) -> Any:
        """What came of the last call."""
        try:
            result, error = self._connection.recv()
        except EOFError:
            sys.exit("the engine's process died; its own words are above")
        if error is not None:
            sys.exit(f"the engine failed: {error}")
        return result

    def ask(self, method: str, *args: Any) -> Any:
        self.tell(method, *args)
        return self.answer()

    def generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        """The completions of requests, in their order."""
        self.ask("begin", dict(enumerate(requests)))
        told: dict[int, Completion] = {}
        while len(told) < len(requests):
            answers = self.ask("poll", TIMEOUT_S)
            for key, outcome in answers.outcomes.items():
                if isinstance(outcome, str):
                    sys.exit(f"the engine refused: {outcome}")
                told[key] = outcome
        return [told[key] for key in range(len(requests))]

    def stop(self) -> None:
        self._connection.close()
        self._process.join(TIMEOUT_S)


def serve(connection: Connection, settings: EngineSettings) -> None:
    """What the engine's process runs, until the other end closes."""
    from open_instruct.engines.engine_host import EngineHost
    from open_instruct.engines.vllm_core import engine_environment

    host = EngineHost()
    environment = {"VLLM_LOGGING_LEVEL": "ERROR", **engine_environment(on_cuda=False)}
    host.construct(environment, settings, meeting_address="127.0.0.1")
    connection.send((None, None))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            break
        try:
            connection.send((host.call(method, *args), None))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))
    host.call("shutdown")


class Learner:
    """The policy on the learner's side, and the sender of its weights."""

    def __init__(self, folder: Path, *, dtype: str) -> None:
        import torch

        from open_instruct.models.build import build_model
        from open_instruct.models.hf.checkpoint_files import CheckpointFiles
        from open_instruct.models.hf.hf_config import load_hf_config
        from open_instruct.models.hf.names import TensorNames
        from open_instruct.models.load import stream_load
        from open_instruct.weights.sender import WeightSender
        from open_instruct.weights.ways import choose_backend

        hf_config = load_hf_config(str(folder))
        names = TensorNames(hf_config)
        self.vocab_size: int = hf_config.vocab_size
        self.model = build_model(hf_config, init_device="cpu").to(getattr(torch, dtype)).eval()
        self.model.init_weights(max_seq_len=LONGEST_PROMPT + LONGEST_COMPLETION, device=torch.device("cpu"))
        with CheckpointFiles.open(folder) as files:
            stream_load(self.model, files, names)
        self.sender = WeightSender(
            self.model,
            names,
            backend=choose_backend("auto", on_cuda=False, single_device=False, same_host=True),
            dtype=getattr(torch, dtype),
            bucket_bytes=1 << 20,  # several buckets
            timeout_s=TIMEOUT_S,
        )

    def logprobs(self, sample: Sequence[tuple[GenerationRequest, Completion]]) -> torch.Tensor:
        """Of every token of every completion, in order: shape (N,), float32."""
        import torch

        from open_instruct.learner.model.forward import token_logprobs
        from open_instruct.packing.documents import pack_documents

        documents = []
        for request, completion in sample:
            token_ids = request.prompt_token_ids + completion.token_ids
            response = Span(start=len(request.prompt_token_ids), stop=len(token_ids))
            documents.append(Document(token_ids=token_ids, responses=(response,)))
        with torch.no_grad():
            tokens = token_logprobs(
                self.model, pack_documents(documents), device=torch.device("cpu"), temperature=TEMPERATURE
            )
        return tokens.logprobs_N

    def change(self) -> None:
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += NOISE * parameter.std() * torch.randn_like(parameter)


def sample_tokens(
    engine: EngineProcess, *, num_tokens: int, vocab_size: int, version: int
) -> list[tuple[GenerationRequest, Completion]]:
    """Completions of random prompts with `num_tokens` tokens at least; the same prompts for every version."""
    rng = random.Random(0)
    sampling = SamplingSettings(temperature=TEMPERATURE, top_p=1.0, max_tokens=LONGEST_COMPLETION)
    sample: list[tuple[GenerationRequest, Completion]] = []
    while sum(len(completion.token_ids) for _, completion in sample) < num_tokens:
        requests = []
        for _ in range(NUM_AT_ONCE):
            prompt = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, LONGEST_PROMPT)))
            seed = rng.randrange(2**31)
            requests.append(
                GenerationRequest(request_id=str(seed), prompt_token_ids=prompt, seed=seed, sampling=sampling)
            )
        sample += zip(requests, engine.generate(requests), strict=True)
    assert {number for _, completion in sample for number in completion.versions} == {version}
    return sample


def compare(
    learner: Learner, sample: Sequence[tuple[GenerationRequest, Completion]], *, version: int, moved: float | None
) -> Agreement:
    difference_N = learner.logprobs(sample) - engine_logprobs(sample)
    rho_N = difference_N.exp()
    return Agreement(
        version=version,
        num_tokens=difference_N.numel(),
        largest=float(difference_N.abs().max()),
        mean=float(difference_N.abs().mean()),
        rho_mean=float(rho_N.mean()),
        rho_std=float(rho_N.std()),
        rho_min=float(rho_N.min()),
        rho_max=float(rho_N.max()),
        moved=moved,
    )


def engine_logprobs(sample: Sequence[tuple[GenerationRequest, Completion]]) -> torch.Tensor:
    import torch

    return torch.tensor([value for _, completion in sample for value in completion.logprobs])


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


def measure(folder: Path, *, dtype: str, num_tokens: int, num_syncs: int) -> list[Agreement]:
    """The start model, then each version that was sent."""
    engine = EngineProcess(
        EngineSettings(
            model_folder=str(folder),
            tokenizer_folder=str(folder),
            dtype=dtype,  # type: ignore[arg-type]
            max_model_len=LONGEST_PROMPT + LONGEST_COMPLETION,
            batching=Batching(max_num_seqs=NUM_AT_ONCE, max_num_batched_tokens=4096, schedules_ahead=False),
            fleet=FleetSection(vllm_kv_cache_mib=64, vllm_enforce_eager=True),
            seed=0,
        )
    )
    learner = Learner(folder, dtype=dtype)
    sample = sample_tokens(engine, num_tokens=num_tokens, vocab_size=learner.vocab_size, version=0)
    agreements = [compare(learner, sample, version=0, moved=None)]
    for version in range(1, num_syncs + 1):
        learner.change()
        moved = float((learner.logprobs(sample) - engine_logprobs(sample)).abs().mean())
        send_weights(learner, engine, version=version)
        sample = sample_tokens(engine, num_tokens=num_tokens, vocab_size=learner.vocab_size, version=version)
        agreements.append(compare(learner, sample, version=version, moved=moved))
    learner.sender.close()
    engine.stop()
    return agreements


def row(family: str, dtype: str, each: Agreement) -> str:
    moved = "" if each.moved is None else f"{each.moved:9.2g}"
    return (
        f"{family:7} {dtype:9} {each.version:7} {each.num_tokens:7} {each.largest:9.1e} {each.mean:9.1e}    "
        f"{each.rho_mean:9.6f} {each.rho_std:8.1e} {each.rho_min:8.5f} {each.rho_max:8.5f}{moved}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--size", default="tiny", help="of the models (see open-instruct tiny-model --help)")
    parser.add_argument("--num_tokens", type=int, default=1000, help="sampled from each version, at least")
    parser.add_argument("--num_syncs", type=int, default=3)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

    from open_instruct.parallel.process import start_process, stop_process

    with contextlib.redirect_stdout(sys.stderr):  # OLMo-core's words on it
        start_process(timeout_s=TIMEOUT_S, seed=0)
    apart = dict.fromkeys(args.dtypes, 0.0)
    print("family  dtype     version  tokens   largest      mean    rho: mean      std      min      max    moved")
    for family in args.families:
        with tempfile.TemporaryDirectory(prefix="engine_agreement_") as name:
            folder = write_tiny_model(Path(name) / "model", family=family, size=args.size)
            for dtype in args.dtypes:
                for each in measure(folder, dtype=dtype, num_tokens=args.num_tokens, num_syncs=args.num_syncs):
                    print(row(family, dtype, each), flush=True)
                    # A NaN is as far apart as can be.
                    apart[dtype] = max(apart[dtype], math.inf if math.isnan(each.largest) else each.largest)
    stop_process()
    for dtype, largest in apart.items():
        print(f"{dtype}: at most {largest:.1e} apart" + (f" (bound {BOUND:g})" if dtype == "float32" else ""))
    return int(apart.get("float32", 0.0) > BOUND)


if __name__ == "__main__":
    sys.exit(main())
