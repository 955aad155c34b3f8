"""Replies of a conversation by vLLM, as they come."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from open_instruct.data.files.foreign_json import read_object
from open_instruct.engines.replies import Sampling
from open_instruct.engines.vllm_options import engine_environment
from open_instruct.errors import InputError

if TYPE_CHECKING:
    from vllm import RequestOutput


def has_vllm_for_gpu() -> bool:
    return torch.cuda.is_available() and find_spec("vllm") is not None


class VLLMEngine:
    """A model in vLLM, in this process: the folder has its config, weights and tokenizer.

    :raises InputError: vLLM is not installed.
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
        self._defaults = _generation_defaults(folder)
        self._num_asked = 0
        self._is_stopped = False
        self.was_cut = False

    def stream(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> Iterator[str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt
        from vllm.sampling_params import RequestOutputKind

        self._num_asked += 1
        self._is_stopped = self.was_cut = False
        request_id = str(self._num_asked)
        given = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        drawn = self._defaults | {name: value for name, value in given.items() if value is not None}
        params = SamplingParams(
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.end_token_ids),
            seed=sampling.seed,
            output_kind=RequestOutputKind.DELTA,
            **drawn,
        )
        self._engine.add_request(request_id, TokensPrompt(prompt_token_ids=list(prompt_token_ids)), params)
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


def _generation_defaults(folder: Path) -> dict[str, Any]:
    """What a model's generation_config.json says of sampling; it samples greedily unless it says otherwise."""
    path = folder / "generation_config.json"
    fields = read_object(path) if path.is_file() else {}
    if not fields.get("do_sample"):
        return {"temperature": 0.0}
    return {name: fields[name] for name in ("temperature", "top_p", "top_k") if fields.get(name) is not None}
