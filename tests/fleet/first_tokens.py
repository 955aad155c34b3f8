"""A process with one real engine, which is asked for one reply as the exported folder has it.

    python tests/fleet/first_tokens.py MODEL_FOLDER OUT.json

Its own process, because vLLM and transformers' models do not go together in one.
"""

import json
import os
import sys
from pathlib import Path

from open_instruct.generation.vllm_options import engine_environment

MAX_TOKENS = 8
CACHE_BYTES = 2**26


def main(folder: str, out: str) -> None:
    os.environ |= engine_environment(on_cuda=False)
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
    found = {
        "prompt_token_ids": answer.prompt_token_ids,
        "token_ids": list(reply.token_ids),
        "finish_reason": reply.finish_reason,
    }
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
