"""A process that asks one real engine after the other for one reply, each of an exported folder.

    python tests/fleet/first_tokens.py OUT.json MODEL_FOLDER [MODEL_FOLDER ...]

Its own process, because vLLM and transformers' models do not go together in one.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from open_instruct.generation.vllm_options import engine_environment

MAX_TOKENS = 8
CACHE_BYTES = 2**26


def main(out: str, *folders: str) -> None:
    os.environ |= engine_environment(on_cuda=False)
    Path(out).write_text(json.dumps({folder: ask_for_reply(folder) for folder in folders}))


def ask_for_reply(folder: str) -> dict[str, Any]:
    # It reads its environment when it is imported.
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=CACHE_BYTES,
    )
    settings = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    (answer,) = engine.chat([{"role": "user", "content": "Hello?"}], settings, use_tqdm=False)
    (reply,) = answer.outputs
    engine.llm_engine.engine_core.shutdown()
    return {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
