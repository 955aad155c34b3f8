"""vLLM's OpenAI server on loopback, as the docs start it: python tests/fleet/openai_server.py MODEL
PORT
"""

import os
import runpy
import sys

from open_instruct.generation.vllm_options import engine_environment

if __name__ == "__main__":
    model, port = sys.argv[1:]
    os.environ.update(engine_environment(on_cuda=False))
    # The server's engine is a process of its own.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    sys.argv = [
        "api_server",
        "--model",
        model,
        "--served-model-name",
        "mine",
        "--host",
        "127.0.0.1",
        "--port",
        port,
    ]
    sys.argv += [
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
        "--kv-cache-memory-bytes",
        str(64 << 20),
        "--enforce-eager",
    ]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
