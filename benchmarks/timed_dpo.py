"""dpo.py, with the seconds that the policy takes to be there and to be exported, and its processor
time at the end of each step; run by `backends.py` and `lora.py` under torchrun.

Rank 0 writes OUT/times.json, where OUT is the first word; the others are dpo.py's.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parents[1])

from open_instruct.dpo import main
from open_instruct.run import pretrained
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.training.olmo_core import fsdp2 as on_fsdp2


def timed(module: Any, name: str, seconds: dict[str, Any]) -> None:
    """Have a function of a module note how long it took."""
    function: Callable[..., Any] = getattr(module, name)

    def noted(*args: Any, **more: Any) -> Any:
        began_s = time.perf_counter()
        result = function(*args, **more)
        seconds[name] = time.perf_counter() - began_s
        return result

    setattr(module, name, noted)


def stamped(stamps_s: list[float]) -> None:
    """Note the processor time of each row of metrics.jsonl."""
    write = MetricsLog.write

    def noted(self: MetricsLog, row: Mapping[str, Any]) -> None:
        stamps_s.append(time.process_time())
        write(self, row)

    MetricsLog.write = noted  # type: ignore[method-assign]


if __name__ == "__main__":
    out, words = Path(sys.argv[1]), sys.argv[2:]
    seconds: dict[str, Any] = {"processor_stamps": []}
    stamped(seconds["processor_stamps"])
    timed(pretrained, "export_hf", seconds)
    if "--backend" in words:
        from open_instruct.training.deepspeed import zero as on_deepspeed

        timed(on_deepspeed, "build_backend", seconds)
    else:
        timed(on_fsdp2, "build_backend", seconds)
    code = main(words)
    if os.environ["RANK"] == "0":
        (out / "times.json").write_text(json.dumps(seconds))
    sys.exit(code)
