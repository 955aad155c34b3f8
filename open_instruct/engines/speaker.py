"""A model that talks by vLLM, in this process, one reply at a time, each piece of it as it comes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from open_instruct.engines.requests import Dtype, SamplingSettings
from open_instruct.engines.vllm_core import CPU_KV_CACHE_BYTES, engine_environment
from open_instruct.models.hf_config import load_hf_config


class VLLMSpeaker:
    """Says what follows on a prompt; Ctrl-C ends it.

    Raises:
        InputError: there is no model in the folder.
    """

    def __init__(
        self, model: Path, *, sampling: SamplingSettings, stop_token_ids: Sequence[int], dtype: Dtype | None
    ) -> None:
        import torch

        load_hf_config(str(model))
        on_cuda = torch.cuda.is_available()
        for name, value in (engine_environment(on_cuda) | {"VLLM_LOGGING_LEVEL": "ERROR"}).items():
            os.environ.setdefault(name, value)

        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.sampling_params import RequestOutputKind
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=str(model),
            load_format="safetensors",
            dtype=dtype or ("bfloat16" if on_cuda else "float32"),
            max_model_len=-1,  # as long as fits
            max_num_seqs=1,
            enforce_eager=not on_cuda,
            kv_cache_memory_bytes=None if on_cuda else CPU_KV_CACHE_BYTES,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        self._engine: Any = LLMEngine.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        self.max_tokens: int = self._engine.model_config.max_model_len
        self._params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(stop_token_ids),
            output_kind=RequestOutputKind.DELTA,
        )

    def say(self, token_ids: Sequence[int], write: Callable[[str], None]) -> None:
        self._engine.add_request("reply", {"prompt_token_ids": list(token_ids)}, self._params)
        try:
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    write(output.outputs[0].text)
        except BaseException:
            self._engine.abort_request(["reply"])
            raise
