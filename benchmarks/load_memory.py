"""Memory and time of streaming weights into shards and out again, beside OLMo-core's own way.

    python benchmarks/load_memory.py                     # ~520M parameters, on 2 and on 4 ranks
    python benchmarks/load_memory.py --size tiny --ranks 2

Each measurement is a fresh set of processes over gloo. Load: from the build of the model to loaded shards
(fp32 master weights from a bf16 checkpoint), against build + initialisation + `load_hf_model`. Export: of
the loaded model to bf16, against gathering the full state dict and saving it with `save_hf_model`.

Memory is anonymous memory (RssAnon) above what the same process held after its imports and the start of
the process group (export: after loading); "resident" counts mapped pages of files too. The budget is
1.1 x (the rank's shard + the largest tensor) while loading, and the same without the shard, which is there
already, plus a tenth of it, while exporting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[0] = str(REPOSITORY)

MIB = 2**20
SAMPLE_EVERY_S = 0.003
WAYS = {"load": ("ours", "load_hf_model"), "export": ("ours", "save_hf_model")}
GOAL_TIME_RATIO = 0.15


class PeakMemory(threading.Thread):
    """Samples this process's memory until stopped; peaks in bytes above the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._running = True
        self._anonymous_start, self._resident_start = self._now()
        self.anonymous_bytes = self.resident_bytes = 0

    @staticmethod
    def _now() -> tuple[int, int]:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(fields["RssAnon"].split()[0]) * 1024, int(fields["VmRSS"].split()[0]) * 1024

    def run(self) -> None:
        while self._running:
            anonymous, resident = self._now()
            self.anonymous_bytes = max(self.anonymous_bytes, anonymous - self._anonymous_start)
            self.resident_bytes = max(self.resident_bytes, resident - self._resident_start)
            time.sleep(SAMPLE_EVERY_S)

    def stop(self) -> None:
        self._running = False
        self.join()


def worker(task: str, way: str, checkpoint: Path, scratch: Path) -> None:
    """One rank of one measurement; writes its numbers to `scratch`."""
    import torch
    import torch.distributed as dist
    from olmo_core.config import DType
    from olmo_core.distributed.parallel import DataParallelType, build_world_mesh
    from olmo_core.nn.hf import load_hf_model, save_hf_model
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig
    from olmo_core.train.train_module.transformer.common import parallelize_model
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForCausalLM, Olmo2ForCausalLM

    from open_instruct.models.build import build_model
    from open_instruct.models.export import export_hf
    from open_instruct.models.family import transformer_config
    from open_instruct.models.hf.checkpoint_files import CheckpointFiles
    from open_instruct.models.hf.hf_config import load_hf_config
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.models.load import check_cover, parameter_shapes, stream_load

    del AutoModelForCausalLM, Olmo2ForCausalLM  # imported so that nobody's time includes the import
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    hf_config = load_hf_config(str(checkpoint))
    names = TensorNames(hf_config)
    dp = TransformerDataParallelConfig(
        name=DataParallelType.hsdp, num_replicas=1, shard_degree=num_ranks, param_dtype=DType.bfloat16
    )
    mesh = build_world_mesh(dp=dp, device_type="cpu")

    def sharded(model: Any) -> Any:
        return parallelize_model(
            model, world_mesh=mesh, device=torch.device("cpu"), max_sequence_length=128, dp_config=dp
        )

    def load_ours() -> Any:
        model = build_model(hf_config)
        with CheckpointFiles.open(checkpoint) as files:
            check_cover(names, files, parameter_shapes(model))
            model = sharded(model)
            stream_load(model, files, names)
        return model

    def load_olmo_core() -> Any:
        model = sharded(transformer_config(hf_config).build(init_device="meta"))
        state = model.state_dict()
        load_hf_model(str(checkpoint), state)
        model.load_state_dict(state)
        return model

    def measured(action: Any) -> tuple[Any, dict[str, float]]:
        dist.barrier()
        memory = PeakMemory()
        memory.start()
        started_s = time.perf_counter()
        result = action()
        dist.barrier()
        wall_time_s = time.perf_counter() - started_s
        memory.stop()
        numbers = {"wall_time_s": wall_time_s, "anonymous": memory.anonymous_bytes, "resident": memory.resident_bytes}
        return result, numbers

    out = scratch / "export"
    if task == "load":
        model, numbers = measured(load_ours if way == "ours" else load_olmo_core)
    elif way == "ours":
        model = load_ours()
        _, numbers = measured(
            lambda: export_hf(
                model,
                names,
                source_folder=checkpoint,
                out_folder=out,
                dtype=torch.bfloat16,
                max_file_bytes=max(1, 2 * sum(map(math.prod, parameter_shapes(model).values())) // num_ranks),
            )
        )
    else:
        model = load_ours()
        _, numbers = measured(lambda: save_hf_model(out, model.state_dict(), model, dtype=DType.bfloat16))
    shard = sum(p.to_local().numel() * 4 if isinstance(p, DTensor) else p.numel() * 4 for p in model.parameters())
    largest = max(p.numel() for p in model.parameters()) * (4 if task == "load" else 2)
    with CheckpointFiles.open(checkpoint) as files:
        if task == "load":
            problems = _differing(model, files, names)
        else:
            with CheckpointFiles.open(out) as written:
                problems = [
                    name for name in files if rank == 0 and not torch.equal(written.read(name), files.read(name))
                ]
    assert not problems, f"{way}: wrong numbers in {problems[:3]}"
    (scratch / f"{rank}.json").write_text(json.dumps({**numbers, "shard": shard, "largest_tensor": largest}))
    dist.destroy_process_group()


def _differing(model: Any, files: Any, names: Any) -> list[str]:
    import torch
    from torch.distributed.tensor import DTensor

    from open_instruct.models.shards import own_box

    return [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DTensor)
        and not torch.equal(parameter.to_local(), files.read(names.hf_name(name), own_box(parameter)).float())
    ]


def measure(task: str, way: str, checkpoint: Path, num_ranks: int) -> dict[str, float]:
    """The slowest rank's time and the largest rank's memory of one measurement in processes of its own."""
    with tempfile.TemporaryDirectory(dir=checkpoint.parent) as scratch:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        command += [__file__, "--worker", task, way, str(checkpoint), scratch]
        ended = subprocess.run(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if ended.returncode != 0:
            sys.exit(f"{task} ({way}) on {num_ranks} ranks failed\n{ended.stdout[-4000:]}")
        of_ranks = [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return {key: max(of_rank[key] for of_rank in of_ranks) for key in of_ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="base", help="of `open-instruct tiny-model`: tiny, mini, small, base")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tasks", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--scratch_dir", help="where the checkpoint is written; default: a temporary folder")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        task, way, checkpoint, scratch = arguments.worker
        return worker(task, way, Path(checkpoint), Path(scratch))

    from open_instruct.models.hf.checkpoint_files import CheckpointFiles
    from open_instruct.toys.tiny import write_tiny_model

    with tempfile.TemporaryDirectory(dir=arguments.scratch_dir) as folder:
        checkpoint = write_tiny_model(Path(folder, "model"), family="olmo2", size=arguments.size, dtype="bfloat16")
        with CheckpointFiles.open(checkpoint) as files:
            num_params = sum(map(math.prod, files.shapes.values()))
        print(f"{num_params / 1e6:.0f}M parameters, bf16 on disk, fp32 shards; MiB of the largest rank above the start")
        print(f"{'task':8}{'ranks':>6} {'way':16}{'seconds':>9}{'anonymous':>11}{'resident':>10}{'budget':>8}")
        for num_ranks in arguments.ranks:
            for task in arguments.tasks:
                results = {way: measure(task, way, checkpoint, num_ranks) for way in WAYS[task]}
                for way, result in results.items():
                    print(_row(task, num_ranks, way, result))
                print(_ratio(task, num_ranks, results), flush=True)


def _budget(task: str, result: dict[str, float]) -> float:
    present = result["shard"] if task == "export" else 0
    return 1.1 * (result["shard"] + result["largest_tensor"]) - present


def _row(task: str, num_ranks: int, way: str, result: dict[str, float]) -> str:
    sizes = (result["anonymous"], result["resident"], _budget(task, result))
    anonymous, resident, budget = (f"{size / MIB:.0f}" for size in sizes)
    return f"{task:8}{num_ranks:>6} {way:16}{result['wall_time_s']:>9.2f}{anonymous:>11}{resident:>10}{budget:>8}"


def _ratio(task: str, num_ranks: int, results: dict[str, dict[str, float]]) -> str:
    ours, other = results.values()
    time_ratio = ours["wall_time_s"] / other["wall_time_s"]
    memory_ratio = ours["anonymous"] / other["anonymous"]
    within = ours["anonymous"] <= _budget(task, ours)
    return (
        f"{task:8}{num_ranks:>6} {'ratio':16}{time_ratio:>9.3f}{memory_ratio:>11.2f}   "
        f"time {'<=' if time_ratio <= GOAL_TIME_RATIO else '>'} {GOAL_TIME_RATIO}, "
        f"memory {'within' if within else 'OVER'} its budget"
    )


if __name__ == "__main__":
    main()
