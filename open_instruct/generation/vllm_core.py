"""vLLM as an engine's core. Only this file, `vllm_options.py` and the receivers of weights know
vLLM.

The experts that layers choose for tokens lie, where vLLM does not tell them (on a CPU), in slots as
the keys and values of the tokens do: what is shared among requests, computed anew or overwritten
there is so here.

Legend: N blocks of the cache, S slots of a block, L layers, K experts of a token, T tokens of a
step.
"""

from __future__ import annotations

import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import floor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import torch

from open_instruct.cluster.watchdog import FOLDER_VARIABLE
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import InputError, RunError
from open_instruct.core.records import Completion
from open_instruct.data.tokenizer_class import copy_tokenizer
from open_instruct.generation.requests import EngineSettings, GenerationRequest
from open_instruct.generation.vllm_options import engine_options
from open_instruct.weight_sync.receiver import ADAPTER_ID, AdapterReceiver, WeightReceiver

if TYPE_CHECKING:
    from vllm import CompletionOutput, RequestOutput, SamplingParams
    from vllm.lora.request import LoRARequest

P = ParamSpec("P")
R = TypeVar("R")
W = TypeVar("W", bound=WeightReceiver)

# vLLM's message when another process holds the GPU's memory: free and total GiB, rounded to
# hundredths.
FREE_MEMORY = re.compile(r"Free memory on device \S+ \(([\d.]+)/([\d.]+) GiB\)")
ROUNDED_GIB = 0.01
# Temperatures of the check, at start-up, that log-probs are of the distribution that is sampled
# from.
PROBED_TEMPERATURES = (1.0, 2.0)
NUM_PROBED = 10
LEAST_SPREAD = 0.1  # nats; where all tokens are as likely, rounding decides


class VLLMCore:
    """vLLM's `LLMEngine`, in this process (and one more process for each further GPU of a
    tensor-parallel engine).

    It makes the tokens; all methods are called from one thread.

    Args:
        settings: of the model and of vLLM.
        weight_receiver: class that vLLM adds to its workers; default: `WeightReceiver`, or with an
            adapter `AdapterReceiver`.

    Raises:
        InputError: the key-value cache is too small, less of the GPU is free than is asked for, or
            there can be no such adapter.
    """

    def __init__(
        self, settings: EngineSettings, *, weight_receiver: type[WeightReceiver] | None = None
    ) -> None:
        if folder := os.environ.get(FOLDER_VARIABLE):
            # VLLM leaves files there when it is killed.
            tempfile.tempdir = os.environ["TMPDIR"] = folder
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        on_cuda = torch.cuda.is_available()
        adapter = settings.adapter
        self._settings = settings
        self._notes_routes = settings.fleet.routing_replay == "on" and not on_cuda
        self._routes: dict[int, Any] = {}  # by key, of tokens that older weights sampled
        receiver = weight_receiver or (AdapterReceiver if adapter is not None else WeightReceiver)
        # Without a config.json, so that vLLM takes the class that changes nothing, whatever family
        # the model is of.
        self._tokenizer_folder = tempfile.TemporaryDirectory(prefix="tokenizer-")
        copy_tokenizer(Path(settings.tokenizer_folder), Path(self._tokenizer_folder.name))
        with_tokenizer = replace(settings, tokenizer_folder=self._tokenizer_folder.name)
        arguments = EngineArgs(
            worker_extension_cls=f"{receiver.__module__}.{receiver.__name__}",
            **engine_options(with_tokenizer, on_cuda=on_cuda),
        )
        try:
            # What is left out is chosen as for vLLM's `LLM`; otherwise a step would have 2,048
            # tokens on any device.
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
        self._seeds: dict[int, int] = {}
        if self._notes_routes:
            self._engine.collective_rpc(note_routes)
        if adapter is not None:
            check_targets(adapter, self.call_workers(AdapterReceiver.adapted_layers)[0])
            self.call_workers(AdapterReceiver.hold_no_adapter)
        self._names = yield_adapter_names() if adapter is not None else itertools.repeat(None)
        self._adapter = next(self._names)
        self._check_logprobs()
        self._engine.set_weight_version("0")

    def add(self, key: int, request: GenerationRequest) -> None:
        """Begin a request; a ValueError says why it cannot be."""
        room = self._settings.max_model_len - request.sampling.max_tokens
        if not 1 <= len(request.prompt_token_ids) <= room:
            raise ValueError(
                f"the prompt has {len(request.prompt_token_ids)} tokens, and a completion of "
                f"{request.sampling.max_tokens} leaves it 1 to {room} of the engine's "
                f"{self._settings.max_model_len}"
            )
        self._add(str(key), list(request.prompt_token_ids), self._params_of(request))
        self._seeds[key] = request.seed

    def abort(self, key: int) -> None:
        """Give a request up."""
        self._engine.abort_request([str(key)])
        self._seeds.pop(key, None)

    def step(self) -> Mapping[int, Completion]:
        """Make one token for each request; returns those that are finished with it."""
        outputs: list[Any] = self._engine.step()
        return {int(output.request_id): self._completion_of(output) for output in outputs}

    def settle(self) -> Mapping[int, Completion]:
        """Finish the steps that vLLM runs ahead; nothing is computed until the next one.

        Returns as `step` does.
        """
        self._engine.sleep(level=0, mode="keep")  # schedules nothing any more
        client: Any = self._engine.engine_core
        finished: dict[int, Completion] = {}
        # A token that came later would be called one of the new weights.
        while client.engine_core.batch_queue:
            finished |= self.step()
        self._engine.wake_up(["scheduling"])
        return finished

    def call_workers(
        self, method: Callable[Concatenate[W, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> list[R]:
        """Call a method in every process that holds weights, and return the results."""
        return self._engine.collective_rpc(method.__name__, args=args, kwargs=kwargs)

    def weights_changed(self, version: int) -> None:
        """Tokens are of `version` from now on; nothing computed with other weights is used
        again.
        """
        self._routes = {key: self._routes_of(key) for key in self._seeds}
        # Running requests go back to the queue with their tokens: their keys and values are of the
        # old weights too.
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._adapter = next(self._names)
        self._engine.set_weight_version(str(version))

    def close(self) -> None:
        self._engine.engine_core.shutdown()
        self._tokenizer_folder.cleanup()

    def _check_logprobs(self) -> None:
        """Check that log-probs are taken after the temperature, whichever of vLLM's model runners
        is in use.

        Raises:
            RunError: they are not.
        """
        from vllm import SamplingParams

        probes: list[dict[int, float]] = []
        for temperature in PROBED_TEMPERATURES:
            params = SamplingParams(
                temperature=temperature, max_tokens=1, logprobs=NUM_PROBED, detokenize=False
            )
            # Of two tokens, as vLLM 0.32 cannot take one alone where a layer remembers (on a CPU).
            self._add(f"probe at {temperature}", [0, 0], params)
            outputs: list[Any] = []
            while self._engine.has_unfinished_requests():
                outputs += self._engine.step()
            logprobs = outputs[0].outputs[0].logprobs[0]
            probes.append({token: each.logprob for token, each in logprobs.items()})
        check_temperature(*probes)

    def _add(self, request_id: str, token_ids: list[int], params: SamplingParams) -> None:
        """Add a request, with the adapter's name if there is one; without the name vLLM may ignore
        the adapter.
        """
        self._engine.add_request(
            request_id, {"prompt_token_ids": token_ids}, params, lora_request=self._adapter
        )

    def _params_of(self, request: GenerationRequest) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = request.sampling
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            seed=request.seed,
            stop=list(sampling.stop_strings),
            stop_token_ids=list(self._settings.stop_token_ids),
            include_stop_str_in_output=True,  # the text has all tokens
            # Token by token only where it must be looked at.
            detokenize=bool(sampling.stop_strings),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _routes_of(self, key: int, told: Any = None) -> Any:
        """The experts of a request's tokens, each as chosen with the weights that sampled the next;

        `told` by vLLM.
        """
        if not self._notes_routes:
            return () if told is None else told
        noted = self._engine.collective_rpc(lambda worker: routes_of(worker, key))[0]
        known = self._routes.pop(key, noted[:0])
        return np.concatenate([known, noted[len(known) :]])

    def _completion_of(self, asked: RequestOutput) -> Completion:
        key, output = int(asked.request_id), asked.outputs[0]
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended a completion with {output.finish_reason!r}")
        finish_reason: Literal["stop", "length"] = (
            "length" if output.finish_reason == "length" else "stop"
        )
        routes = self._routes_of(key, output.routed_experts)
        num_fed = len(asked.prompt_token_ids or ()) + len(output.token_ids) - 1
        if self._settings.fleet.routing_replay == "on" and len(routes) != num_fed:
            raise RuntimeError(
                f"vLLM told experts of {len(routes)} tokens, not {num_fed}: use --routing_replay "
                "off"
            )
        logprobs: Any = output.logprobs
        spans = output.weight_versions or []
        return Completion(
            token_ids=tuple(output.token_ids),
            logprobs=tuple(logprobs.logprobs),
            versions=tuple(
                int(span.version) for span in spans for _ in range(span.start, span.end)
            ),
            text=self._text_of(output),
            finish_reason=finish_reason,
            seed=self._seeds.pop(key),
            routes=bytes(np.asarray(routes, dtype=np.int16)),
        )

    def _text_of(self, output: CompletionOutput) -> str:
        token_ids = list(output.token_ids)
        if isinstance(output.stop_reason, str):
            # vLLM's own text has some of the prompt in front where that ends within a character.
            before, stop_string, _ = self._decode(token_ids).partition(output.stop_reason)
            return before + stop_string  # which may end within a token
        if output.finish_reason == "stop":
            token_ids.pop()
        return self._decode(token_ids)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


def explain_memory_error(
    words: str, settings: EngineSettings, *, has_cache_size: bool
) -> str | None:
    """vLLM's refusal at start-up for want of memory, in terms of our flags;

    None if its error is another.
    """
    share = settings.fleet.vllm_gpu_memory_utilization
    if match := FREE_MEMORY.match(words):
        free, total = map(float, match.groups())
        percent = max(0, floor(100 * (free - ROUNDED_GIB) / total))
        remedy = (
            f"use {percent / 100:g}, or less where the learner's steps need memory "
            "(open-instruct plan grpo)"
        )
        return (
            f"--vllm_gpu_memory_utilization {share:g} is {share * total:.1f} of {total:g} GiB, "
            f"and {free:g} GiB are free on an engine's GPU, beside the learner of "
            "--single_gpu_mode or other processes: "
            + (remedy if percent else "end what holds it, or give engines a GPU of their own")
        )
    if "KV cache" not in words and "cache blocks" not in words:
        return None
    flag = (
        "--vllm_kv_cache_mib"
        if has_cache_size
        else f"--vllm_gpu_memory_utilization, which is {share:g}"
    )
    return (
        f"the keys and values of one completion, {settings.max_model_len} tokens with its prompt, "
        f"do not fit into an engine's cache: raise {flag}, or lower --response_length or "
        "--max_prompt_token_length"
    )


def check_temperature(warm: Mapping[int, float], hot: Mapping[int, float]) -> None:
    """Compare the log-probs of the likeliest tokens after one prompt at both of
    `PROBED_TEMPERATURES`.

    Twice the temperature halves all differences between log-probs. Where it is not applied they are
    the same.

    Raises:
        RunError: it was not applied.
    """
    shared = warm.keys() & hot.keys()
    spread_warm = np.ptp([warm[token] for token in shared])
    spread_hot = np.ptp([hot[token] for token in shared])
    if LEAST_SPREAD < spread_warm < 1.5 * spread_hot:
        raise RunError(
            f"vLLM's log-probs are not those that it samples from: between {len(shared)} tokens "
            f"they differ by up to {spread_warm:.3g} at temperature 1 and by {spread_hot:.3g} at "
            "temperature 2, which should be half of it. Have vLLM's other model runner by "
            "--vllm_runner v1 (or v2, if it is v1)"
        )


def yield_adapter_names() -> Iterator[LoRARequest]:
    """Yields the adapter's name for requests, with a new name and path for each version.

    vLLM shares cached prefixes among requests of one name. There is nothing at the path: vLLM reads
    it only for an adapter that it does not hold.
    """
    from vllm.lora.request import LoRARequest

    return (
        LoRARequest(f"policy {number}", ADAPTER_ID, f"memory/{number}")
        for number in itertools.count()
    )


def check_targets(adapter: LoRASection, layers: Iterable[str]) -> None:
    """Check that vLLM can adapt the layers that `adapter` is for; `layers` are those that it can
    adapt.

    Raises:
        InputError: it cannot.
    """
    adapted = {layer.rpartition(".")[2] for layer in layers}
    if missing := [target for target in adapter.targets if target not in adapted]:
        raise InputError(
            "--lora_sync adapter: vLLM's layers of this model take no adapter for "
            f"{', '.join(missing)}; use --lora_sync merged",
            kind="unsupported_model",
        )


def note_routes(worker: Any) -> None:
    """Begin to note the experts that the layers of a vLLM worker choose; vLLM refuses layers that
    do not tell them.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
        bind_routed_experts_capturer,
    )

    runner = worker.model_runner
    cache, model = runner.kv_cache_config, runner.model_config
    slots = (cache.num_blocks, cache.kv_cache_groups[0].kv_cache_spec.block_size)
    experts = (model.get_total_num_hidden_layers(), model.get_num_experts_per_tok())
    worker.routes_NSLK = torch.full(slots + experts, -1, dtype=torch.int16)
    # What vLLM asks of a capturer.
    worker.capture = partial(_note, worker.routes_NSLK.flatten(0, 1))
    bind_routed_experts_capturer(runner.get_model(), worker)


def _note(routes_SLK: torch.Tensor, layer: int, experts_TK: torch.Tensor) -> None:
    """:param routes_SLK: those of the slots of all blocks."""
    from vllm.forward_context import get_forward_context

    metadata: Any = get_forward_context().attn_metadata
    routes_SLK[next(iter(metadata.values())).slot_mapping[: len(experts_TK)], layer] = (
        experts_TK.short()
    )


def routes_of(worker: Any, key: int) -> np.ndarray:
    """What is noted of a request that had part in the last step: int16, (tokens that were fed, L,
    K).
    """
    runner = worker.model_runner
    for name in runner.input_batch.req_ids:
        if name.rpartition("-")[0] == str(key):  # vLLM adds some letters of its own
            request = runner.requests[name]
            return (
                worker.routes_NSLK[request.block_ids[0]]
                .flatten(0, 1)[: request.num_tokens - 1]
                .numpy()
            )
    return worker.routes_NSLK[0, :0].numpy()
