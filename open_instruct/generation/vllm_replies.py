"""Replies of a conversation from vLLM, piece by piece."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import read_object
from open_instruct.data.report import WARNING
from open_instruct.generation.matrix_unit import allow_matrix_unit
from open_instruct.generation.replies import Sampling
from open_instruct.generation.vllm_options import engine_environment

if TYPE_CHECKING:
    from vllm import RequestOutput

# Fields of a generation_config.json.
READ_ALWAYS = ("repetition_penalty",)
READ_IF_SAMPLED = ("temperature", "top_p", "top_k", "min_p")
DEFAULTS_IF_SAMPLED = {"top_k": 50}  # transformers', where a model says nothing
# Those that vLLM has nothing for, with the values at which transformers does nothing.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "guidance_scale": (1.0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0.0,),
    "sequence_bias": ({},),
    "suppress_tokens": ([],),
    "typical_p": (1.0,),
}


def has_vllm_for_gpu() -> bool:
    return torch.cuda.is_available() and find_spec("vllm") is not None


class VLLMEngine:
    """A model in vLLM, in this process: the folder has its config, weights and tokenizer.

    Raises:
        InputError: vLLM is not installed.
    """

    def __init__(self, folder: Path, *, dtype: str | None) -> None:
        on_cuda = torch.cuda.is_available()
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
        os.environ.update(engine_environment(on_cuda) | quiet)  # read when vLLM is imported
        try:
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise InputError(
                f"--engine vllm: vLLM cannot be imported ({error}); take --engine transformers",
                kind="missing_package",
                flag="engine",
            ) from error
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(folder),
                dtype=cast(Any, dtype or ("auto" if on_cuda else "float32")),
                enforce_eager=not on_cuda,
                kv_cache_memory_bytes=None if on_cuda else 1 << 30,
                disable_log_stats=True,
            )
        )
        self._engine.collective_rpc(allow_matrix_unit)
        path = folder / "generation_config.json"
        self._fields = read_object(path) if path.is_file() else {}
        unread = find_unread(self._fields)
        if unread:
            print(
                f"{WARNING}{path}: {', '.join(unread)} would be read by --engine transformers "
                "alone",
                file=sys.stderr,
            )
        self._num_requests = 0
        self._is_stopped = False
        self.was_cut = False

    def stream(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> Iterator[str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._num_requests += 1
        self._is_stopped = False
        self.was_cut = False
        request_id = str(self._num_requests)
        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.end_token_ids),
            seed=sampling.seed,
            output_kind=RequestOutputKind.DELTA,
            **choose_options(self._fields, sampling),
        )
        self._engine.add_request(
            request_id, TokensPrompt(prompt_token_ids=list(prompt_token_ids)), params
        )
        while self._engine.has_unfinished_requests():
            if self._is_stopped:
                self._engine.abort_request([request_id])
                return
            for output in self._engine.step():
                (reply,) = cast("RequestOutput", output).outputs
                self.was_cut = reply.finish_reason == "length"
                yield reply.text

    def stop(self) -> None:
        self._is_stopped = True


def choose_options(fields: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams`, whose names are those of transformers.

    Args:
        fields: of the model's generation_config.json, read as transformers' `generate` reads them.

    Example: of `{"repetition_penalty": 1.1}` and no flags it is
    `{"repetition_penalty": 1.1, "temperature": 0.0}`: a model is greedy unless it says otherwise.
    """
    always = {name: fields[name] for name in READ_ALWAYS if fields.get(name) is not None}
    flags = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    flags = {name: value for name, value in flags.items() if value is not None}
    is_sampled = bool(flags or fields.get("do_sample")) and sampling.temperature != 0
    if not is_sampled:
        return always | {"temperature": 0.0}
    model = {name: fields[name] for name in READ_IF_SAMPLED if fields.get(name) is not None}
    return always | DEFAULTS_IF_SAMPLED | model | flags


def find_unread(fields: Mapping[str, Any]) -> list[str]:
    """Find the fields of a generation_config.json that change transformers' replies, not vLLM's."""
    return [
        name for name, neutral in NEUTRAL_VALUES.items() if fields.get(name) not in (None, *neutral)
    ]
