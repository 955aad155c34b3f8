"""vLLM as an engine's core: requests in, finished completions out, one step at a time.

Beside this file only `vllm_options.py`, `vllm_checks.py`, `expert_routes.py` and the receivers of
weights know vLLM.
"""

from __future__ import annotations

import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from open_instruct.cluster.watchdog import FOLDER_VARIABLE
from open_instruct.core.errors import InputError
from open_instruct.core.garbage import no_garbage_collection
from open_instruct.core.records import Completion
from open_instruct.data.tokenizer_class import copy_tokenizer
from open_instruct.generation.expert_routes import read_routes, record_routes
from open_instruct.generation.matrix_unit import allow_matrix_unit
from open_instruct.generation.reply_text import decode_reply
from open_instruct.generation.requests import EngineSettings, GenerationRequest
from open_instruct.generation.vllm_checks import (
    NUM_PROBED,
    PROBED_TEMPERATURES,
    check_targets,
    check_temperature,
    explain_memory_error,
)
from open_instruct.generation.vllm_options import engine_options
from open_instruct.weight_sync.engine_memory import MEMORY_PARTS, MemoryPart
from open_instruct.weight_sync.receiver import ADAPTER_ID, AdapterReceiver, WeightReceiver

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=WeightReceiver)

Outcome = Completion | str
"""A completion, or the reason why there can be none."""


class VLLMCore:
    """vLLM's `LLMEngine` in this process, with one more process for each further GPU of an engine.

    It makes the tokens. It has no loop and no queue of its own: `Engine` calls all of its methods,
    from one thread.

    Args:
        settings: of the model and of vLLM.
        weight_receiver: class that vLLM adds to its workers. None: `WeightReceiver`, or with an
            adapter `AdapterReceiver`.

    Raises:
        InputError: the key-value cache is too small, less of the GPU is free than the flags ask
            for, or there can be no such adapter.
    """

    def __init__(
        self, settings: EngineSettings, *, weight_receiver: type[WeightReceiver] | None = None
    ) -> None:
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder:
            # vLLM leaves files there when it is killed.
            tempfile.tempdir = folder
            os.environ["TMPDIR"] = folder
        with no_garbage_collection():
            from vllm.engine.arg_utils import EngineArgs
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.llm_engine import LLMEngine
        # What libraries made is never garbage, and vLLM has all of it looked through below.
        gc.freeze()

        on_cuda = torch.cuda.is_available()
        adapter = settings.adapter
        self._settings = settings
        self._records_routes = settings.fleet.routing_replay == "on" and not on_cuda
        self._routes: dict[int, Any] = {}  # by key, of tokens that older weights sampled
        self._absent_parts: set[MemoryPart] = set()  # of its memory, given up
        default_receiver = WeightReceiver if adapter is None else AdapterReceiver
        receiver = weight_receiver or default_receiver
        # A folder of its own, in which vLLM takes the class that changes nothing, whatever family
        # the model is of.
        self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="tokenizer-")
        copy_tokenizer(Path(settings.tokenizer_folder), Path(self._tokenizer_folder.name))
        with_tokenizer = replace(settings, tokenizer_folder=self._tokenizer_folder.name)
        arguments = EngineArgs(
            worker_extension_cls=f"{receiver.__module__}.{receiver.__name__}",
            **engine_options(with_tokenizer, on_cuda=on_cuda),
        )
        try:
            # As vLLM's `LLM` it chooses what the options leave out; otherwise a step would have
            # 2,048 tokens on any device.
            self._engine = LLMEngine.from_engine_args(
                arguments, usage_context=UsageContext.LLM_CLASS
            )
        except ValueError as error:
            has_cache_size = settings.fleet.kv_cache_mib(on_cuda=on_cuda) is not None
            refusal = explain_memory_error(str(error), settings, has_cache_size=has_cache_size)
            if refusal is None:
                raise
            raise InputError(refusal) from error
        self._tokenizer: Any = self._engine.get_tokenizer()
        self._requests: dict[int, GenerationRequest] = {}  # in the engine, by key
        if self._records_routes:
            self._engine.collective_rpc(record_routes)
        self._adapter_names: Iterator[LoRARequest | None] = itertools.repeat(None)
        if adapter is not None:
            check_targets(adapter, self.call_workers(AdapterReceiver.adapted_layers)[0])
            self.call_workers(AdapterReceiver.hold_no_adapter)
            self._adapter_names = yield_adapter_names()
        self._adapter = next(self._adapter_names)
        self._engine.collective_rpc(allow_matrix_unit)
        self._check_logprobs()
        self._engine.set_weight_version("0")

    def add(self, key: int, request: GenerationRequest) -> None:
        """Begin a request; raises a ValueError if the engine cannot take it."""
        from vllm.exceptions import VLLMClientError

        room = self._settings.max_model_len - request.sampling.max_tokens
        if not 1 <= len(request.prompt_token_ids) <= room:
            raise ValueError(
                f"the prompt has {len(request.prompt_token_ids)} tokens, and a completion of "
                f"{request.sampling.max_tokens} leaves it 1 to {room} of the engine's "
                f"{self._settings.max_model_len}"
            )
        params = self._build_sampling_params(request)
        try:
            self._add(str(key), list(request.prompt_token_ids), params)
        except VLLMClientError as error:  # such as a grammar that is none
            raise ValueError(str(error)) from error
        self._requests[key] = request

    def abort(self, key: int) -> None:
        """Give a request up."""
        self._engine.abort_request([str(key)])
        self._requests.pop(key, None)

    def step(self) -> Mapping[int, Outcome]:
        """Make one token for each request; returns the outcomes of those that it ended."""
        outputs: list[Any] = self._engine.step()
        return {int(output.request_id): self._build_outcome(output) for output in outputs}

    def settle(self) -> Mapping[int, Outcome]:
        """Finish the steps that vLLM runs ahead; nothing is computed until the next one.

        Returns as `step` does.
        """
        self._engine.sleep(level=0, mode="keep")  # schedules nothing any more
        client: Any = self._engine.engine_core
        outcomes: dict[int, Outcome] = {}
        # A token that came later would be called one of the new weights.
        while client.engine_core.batch_queue:
            outcomes |= self.step()
        self._engine.wake_up(["scheduling"])
        return outcomes

    def call_workers(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method in every process that holds weights, and return the results."""
        return self._engine.collective_rpc(method.__name__, args=args, kwargs=kwargs)

    def weights_changed(self, version: int) -> None:
        """Count tokens as of `version` from now on, and drop all that other weights computed."""
        self._drop_cached_keys()
        self._adapter = next(self._adapter_names)
        self._engine.set_weight_version(str(version))

    def release_memory(self) -> None:
        """Give up weights and cache; running requests go back to the queue.

        They keep their tokens, whose keys and values are computed again.
        """
        self._drop_cached_keys()
        if torch.cuda.is_available():
            self._engine.sleep(level=2, mode="keep")
        else:
            self.call_workers(WeightReceiver.release_memory)
        self._absent_parts = set(MEMORY_PARTS)

    def take_memory(self, part: MemoryPart) -> None:
        """Take the memory of a part that was given up; weights have to be received then."""
        if part not in self._absent_parts:
            return
        if torch.cuda.is_available():
            self._engine.wake_up([part])
        else:
            self.call_workers(WeightReceiver.take_memory, part)
        self._absent_parts.remove(part)

    def close(self) -> None:
        """End the other processes of an engine that has any.

        Its own is to end next. For another engine in the same process vLLM would make room, which
        takes two seconds; it does so too where this object is collected.
        """
        if self._settings.fleet.vllm_tensor_parallel_size > 1:
            self._engine.engine_core.shutdown()
        self._tokenizer_folder.cleanup()

    def _drop_cached_keys(self) -> None:
        """Drop all keys and values; running requests go back to the queue with their tokens."""
        self._routes = {key: self._find_routes(key) for key in self._requests}
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def _check_logprobs(self) -> None:
        """Check that vLLM's model runner takes log-probs after the temperature.

        Raises:
            RunError: it does not.
        """
        from vllm import SamplingParams

        probes: list[dict[int, float]] = []
        for temperature in PROBED_TEMPERATURES:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=1,
                logprobs=NUM_PROBED,
                detokenize=False,
            )
            # Of two tokens, as vLLM 0.32 cannot take one alone where a layer remembers (on a CPU).
            self._add(f"probe at {temperature}", [0, 0], params)
            outputs: list[Any] = []
            while self._engine.has_unfinished_requests():
                outputs += self._engine.step()
            logprobs = outputs[0].outputs[0].logprobs[0]
            probes.append({token: each.logprob for token, each in logprobs.items()})
        warm, hot = probes
        check_temperature(warm, hot)

    def _add(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        """Add a request, with the adapter's name: without it vLLM may ignore the adapter."""
        self._engine.add_request(
            request_id, {"prompt_token_ids": token_ids}, params, lora_request=self._adapter
        )

    def _build_sampling_params(self, request: GenerationRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sampling = request.sampling
        structured = None
        if sampling.json_schema:
            structured = StructuredOutputsParams(json=sampling.json_schema)
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            stop=list(sampling.stop_strings),
            stop_token_ids=list(self._settings.stop_token_ids),
            include_stop_str_in_output=True,  # the text has all tokens
            # Token by token only where it must be looked at; as `decode_reply` does.
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            structured_outputs=structured,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _find_routes(self, key: int, reported: Any = None) -> Any:
        """The experts of a request's tokens, as the weights that sampled the next token chose them.

        Args:
            key: of the request.
            reported: the experts in vLLM's own output, where it reports them (on CUDA).
        """
        if not self._records_routes:
            return () if reported is None else reported
        recorded_routes = self._engine.collective_rpc(lambda worker: read_routes(worker, key))[0]
        known_routes = self._routes.pop(key, recorded_routes[:0])
        return np.concatenate([known_routes, recorded_routes[len(known_routes) :]])

    def _build_outcome(self, finished: RequestOutput) -> Outcome:
        key = int(finished.request_id)
        output = finished.outputs[0]
        request = self._requests.pop(key)
        if output.finish_reason == "error" and request.sampling.json_schema:
            self._routes.pop(key, None)
            return "vLLM could not hold the text to this JSON schema"
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
        finish_reason: Literal["stop", "length"] = "stop"
        if output.finish_reason == "length":
            finish_reason = "length"
        routes = self._find_routes(key, output.routed_experts)
        num_fed = len(finished.prompt_token_ids or ()) + len(output.token_ids) - 1
        if self._settings.fleet.routing_replay == "on" and len(routes) != num_fed:
            raise RuntimeError(
                f"vLLM reported experts of {len(routes)} tokens, not {num_fed}: use "
                "--routing_replay off"
            )
        logprobs: Any = output.logprobs
        versions: list[int] = []
        for span in output.weight_versions or []:
            versions += [int(span.version)] * (span.end - span.start)
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(logprobs.logprobs),
            versions=tuple(versions),
            text=decode_reply(
                self._tokenizer,
                output.token_ids,
                finish_reason=finish_reason,
                stop_reason=output.stop_reason,
            ),
            finish_reason=finish_reason,
            seed=request.seed,
            routes=bytes(np.asarray(routes, dtype=np.int16)),
        )


def yield_adapter_names() -> Iterator[LoRARequest]:
    """Yield the adapter's name for requests: a new name and path for each version.

    vLLM shares cached prefixes among requests of one name. There is nothing at the path: vLLM reads
    it only for an adapter that it does not hold.
    """
    from vllm.lora.request import LoRARequest

    return (
        LoRARequest(f"policy {number}", ADAPTER_ID, f"memory/{number}")
        for number in itertools.count()
    )
