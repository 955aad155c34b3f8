"""What differs on a GPU outside of a training step, run on the pretended one: `python -m
tests.fake_cuda.branches`.

Prints a JSON object: of each branch what it came to, or the error that it ended in; and the lines
of the package that all of them, and some steps, came by.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

from tests.fake_cuda import cases
from tests.fake_cuda.cases import Case, leave_weights_alone, opened
from tests.fake_cuda.device import WAITS, load_hooks, pretend_cuda, pretended_gpu
from tests.fake_cuda.lines import come_by

STEPS = {
    name: Case(f"{flags} {compiling}", objective, world=world)
    for name, (flags, objective, world, compiling) in {
        "dpo": ("--activation_memory_budget 0.5", "dpo", 8, ""),
        "offloaded": (f"{cases.OFFLOAD} --offload --tensor_parallel_degree 2", "dpo", 8, ""),
        "unshared": ("--context_parallel_degree 2 --param_dtype float32", "sft", 8, ""),
        "grpo": ("--single_gpu_mode", "grpo", 1, "--compile_model false"),
        "zero": (f"{cases.ZERO} 2 --adam_offload", "dpo", 8, ""),
    }.items()
}


def step(case: Case, folder: Path) -> Any:
    cases.run(case, folder)
    return True


def host_copies(folder: Path) -> Any:
    """Of a checkpoint, and the thread that writes it."""
    import torch

    from open_instruct.checkpoints.background import copy_to_host, in_background

    taken = []
    with pretended_gpu() as gpu, patch.object(torch.cuda, "set_device", taken.append):
        WAITS.taken()
        kept: dict[str, torch.Tensor] = {}
        of_gpu = {
            "a": torch.ones(3, device="cuda"),
            "b": torch.ones(2, 2, device="cuda").bfloat16(),
        }
        made = copy_to_host(of_gpu, kept)
        waits = WAITS.taken()
        again = copy_to_host({"a": torch.ones(3, device="cuda")}, kept)
        are_pinned = all(copy.untyped_storage().data_ptr() in gpu.pinned for copy in made.values())
        outcome = in_background(lambda: 7).result()
    return {
        "waits": [where.partition(": ")[2] for where in waits],
        "kinds": [f"{copy.dtype} {copy.device} {[*copy.shape]}" for copy in made.values()],
        "are_pinned": are_pinned,
        "are_kept": again["a"] is made["a"],
        "thread": [outcome, taken],
    }


class FakeNCCL:
    """A communicator that sends at once, to nobody."""

    class Options:
        _timeout: Any = None

    sent: list[str]

    def __init__(self, *arguments: Any) -> None: ...

    def broadcast(self, tensors: list[Any]) -> Any:
        self.sent.extend(str(tensor.device) for tensor in tensors)
        return SimpleNamespace(is_completed=lambda: True, wait=lambda: None)

    def abort(self) -> None: ...


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nobody is asked, and nobody waited for: all peers of a channel are pretended."""
    import torch.distributed as dist
    from torch.multiprocessing import reductions

    from open_instruct.weight_sync import broadcasts, gathered_slots, receiver, sender

    def exported(tensor: Any) -> Any:
        return None, tuple(tensor if place == 0 else place for place in range(14))

    def mapped(tensor: Any, *rest: Any) -> Any:
        # The device's index is this process's own.
        assert rest == (1, 2, 3, 4, 5, 0, *range(7, 14)), rest
        return tensor

    group = broadcasts._make_group

    def over_nccl(info: Any, *rest: Any, **more: Any) -> Any:
        return group(info | {"backend": "nccl"}, *rest, **more)

    FakeNCCL.sent = []
    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(sender, "SyncProgress", MagicMock()))
        patches.enter_context(patch.object(receiver, "SyncProgress", MagicMock()))
        patches.enter_context(patch.object(sender, "run_on_main_process", lambda work: work()))
        patches.enter_context(patch.object(gathered_slots, "gather_objects", lambda mine: [mine]))
        patches.enter_context(patch.object(reductions, "reduce_tensor", exported))
        patches.enter_context(patch.object(reductions, "rebuild_cuda_tensor", mapped))
        patches.enter_context(patch.object(dist, "ProcessGroupNCCL", FakeNCCL, create=True))
        patches.enter_context(patch.object(broadcasts, "PrefixStore", lambda *arguments: None))
        patches.enter_context(patch.object(broadcasts, "_make_group", over_nccl))
        yield


def weights(backend: str, folder: Path, flags: str = "") -> Any:
    """All weights of a sharded model from its learner to an engine, by one of the ways."""
    import torch

    from open_instruct.models.hf.names import TensorNames
    from open_instruct.weight_sync.receiver import IncomingWeights
    from open_instruct.weight_sync.sender import WeightSender

    case, device = Case(f"--compile_model false {flags}"), torch.device("cuda", 0)
    with opened(case, folder) as (policy, _), alone():
        names = TensorNames(case.hf_config())
        sending = WeightSender(
            policy.model,
            names,
            backend=backend,
            dtype=torch.bfloat16,
            bucket_bytes=4096,
            timeout_s=1.0,
        )
        info = sending.open(1) | {"address": "127.0.0.1", "port": 0}
        incoming = IncomingWeights(info, index=0, device=device)
        sending.join()
        WAITS.taken()
        sending.send(1)
        waits = WAITS.taken()
        came = {name: tensor for bucket in incoming.buckets() for name, tensor in bucket}
        sending.close()
        incoming.close()
        shapes = {name: [*shape] for name, shape in info["manifest"]["shapes"].items()}
        return {
            "is_all": {name: [*tensor.shape] for name, tensor in came.items()} == shapes,
            "kinds": sorted({f"{tensor.dtype} {tensor.device}" for tensor in came.values()}),
            "sent": sorted({*FakeNCCL.sent}),
            "waits": sorted({where.partition(": ")[2].partition(", of")[0] for where in waits}),
        }


def changes(folder: Path) -> Any:
    """What is compared on a learner's device, and with what; and the device of the thread that
    stages.
    """
    import torch

    from open_instruct.weight_sync import changes
    from open_instruct.weight_sync.manifest import WeightManifest
    from open_instruct.weight_sync.receiver import WeightReceiver

    compared: list[str] = []
    found = changes.find_changes_on_device

    def note(now_N: Any, before_N: Any) -> Any:
        compared.append(
            f"{now_N.dtype} {now_N.device} {[*now_N.shape]}, before {before_N.dtype} "
            f"{before_N.device}"
        )
        return found(now_N, before_N)

    boxes = {0: (slice(0, 4), slice(0, 2))}
    manifest = WeightManifest({"w": (4, 6)}, {"w": boxes}, dtype=torch.bfloat16, bucket_bytes=4096)
    devices: list[str] = []
    channel = SimpleNamespace(
        stage=lambda version: devices.append(f"version {version}"), fail=print
    )
    worker: Any = SimpleNamespace(device=torch.device("cuda", 1), incoming_weights=channel)
    with (
        pretended_gpu() as gpu,
        patch.object(changes, "find_changes_on_device", note),
        patch.object(changes, "MOST_CHANGED", 1.0),
        patch.object(torch.cuda, "set_device", lambda device: devices.append(str(device))),
    ):
        columns = torch.ones(4, 6, device="cuda")[:, :2]
        learner = changes.SentParts(manifest, rank=0)
        waits = []
        for _ in range(2):
            WAITS.taken()
            next(learner.encode_messages(lambda name: columns, has_digests=True))
            waits.append([where.partition(": ")[2] for where in WAITS.taken()])
        are_pinned = all(
            bits.untyped_storage().data_ptr() in gpu.pinned for bits in learner._sent.values()
        )
        WeightReceiver.start_staging(worker, 5)
        worker.staging.result(20)
    return {"compared": compared, "waits": waits, "are_pinned": are_pinned, "staged": devices}


def export(folder: Path) -> Any:
    """The weights of a sharded model into files, gathered by rank 0."""
    import torch
    import torch.distributed as dist

    from open_instruct.models.export_files import append_tensor, plan_files
    from open_instruct.models.export_rounds import write_weights
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.models.load import find_parameter_shapes
    from open_instruct.models.shards import find_local_shards, reshard

    case = Case("--compile_model false")
    folder.mkdir()
    first: list[str] = []
    with opened(case, folder / "run") as (policy, _), torch.no_grad():
        reshard(policy.model)
        held, shapes = find_local_shards(policy.model), find_parameter_shapes(policy.model)
        plan = plan_files(
            TensorNames(case.hf_config()),
            shapes,
            torch.bfloat16,
            max_file_bytes=1 << 30,
            num_ranks=1,
        )
        reduced = dist.all_reduce

        def all_reduce(tensor: Any, *rest: Any, **more: Any) -> Any:
            first.append(str(tensor.device))
            return reduced(tensor, *rest, **more)

        with patch.object(dist, "all_reduce", all_reduce):
            problems = write_weights(folder, plan, held, append_tensor)
    written = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    num_bytes = sum(tensor.num_bytes for tensor in plan[0].tensors)
    return {"problems": problems, "first": first, "is_whole": written >= num_bytes}


def process(folder: Path) -> Any:
    """A rank of torchrun's, as far as its backend and its device; and the number of ranks that a
    machine has.
    """
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from open_instruct.commands.run_flags import parse_run
    from open_instruct.objectives.dpo import DPOConfig
    from open_instruct.parallel.launch import count_ranks_to_start
    from open_instruct.run.opening import open_run, plan_run
    from tests.fake_cuda.memory import CASES

    asked: list[str] = []

    def init(*, backend: str, **more: Any) -> None:
        asked.append(backend)
        dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES["dpo"].fields))
    flags = (
        f"--model_name_or_path {folder} --output_dir {folder / 'run'} --mixer_list none 1.0 "
        "--max_seq_length 64"
    )
    config = parse_run(DPOConfig, [*flags.split(), "--activation_checkpointing", "auto"])
    with (
        patch("open_instruct.parallel.process.init_distributed", init),
        patch.dict(os.environ, {"LOCAL_RANK": "0"}),
        contextlib.redirect_stdout(io.StringIO()) as said,
        open_run(config, "dpo") as run,
    ):
        plan_run(config, run, folder)
    return {
        "backends": asked,
        "device": str(run.process.device),
        "num_to_start": count_ranks_to_start("auto", {}),
        "said": " ".join(said.getvalue().split()),
    }


def placement(folder: Path) -> Any:
    """Learners and engines on the GPUs of a cluster, and what its learners see of them."""
    import ray

    from open_instruct.cluster.actor_host import ActorHost
    from open_instruct.cluster.learner_group import LearnerGroup
    from open_instruct.cluster.placement import FleetShape, place
    from open_instruct.rl.fleet import _choose_allocator

    bundles: list[Any] = []

    def placed(wanted: list[Any], strategy: str) -> Any:
        bundles.append([strategy, wanted])
        return MagicMock()

    found: dict[str, Any] = {}
    resources, context = {"GPU": 8.0, "CPU": 64.0}, MagicMock()
    context.get_accelerator_ids.return_value = {"GPU": ["3"]}
    answers = {
        "cluster_resources": resources,
        "available_resources": {"GPU": 3.0},
        "nodes": [{"Alive": True, "Resources": {"GPU": 4.0}}] * 2,
        "is_initialized": False,
        "get_runtime_context": context,
    }
    patches = {name: lambda answer=answer: answer for name, answer in answers.items()}
    with (
        patch.multiple(ray, **patches),
        patch("ray.util.get_node_ip_address", lambda: "a"),
        patch("ray.util.placement_group.placement_group", placed),
    ):
        for name, shape in {
            "two nodes": FleetShape(
                learners_per_node=(2, 4), num_engines=2, devices_per_engine=2, shares_device=False
            ),
            "one device": FleetShape(
                learners_per_node=(1,), num_engines=1, devices_per_engine=1, shares_device=True
            ),
            "in turns": FleetShape(
                learners_per_node=(4,),
                num_engines=2,
                devices_per_engine=2,
                shares_device=False,
                takes_turns=True,
            ),
            "some in turns": FleetShape(
                learners_per_node=(2,),
                num_engines=4,
                devices_per_engine=1,
                shares_device=False,
                takes_turns=True,
            ),
        }.items():
            bundles.clear()
            with place(shape, timeout_s=1, say=print, is_one_machine=shape.shares_device) as places:
                options = [places.learner_options(0), places.engine_options(0)]
            found[name] = [*bundles, *([each["num_cpus"], each["num_gpus"]] for each in options)]
            if name == "some in turns":
                free = places.engine_options(2)
                found[name].append([free["num_cpus"], free["num_gpus"]])
                found["with learners"] = [
                    places.engine_options(index)["scheduling_strategy"].placement_group
                    is places.learner_bundles
                    for index in range(4)
                ]
            if name == "two nodes":
                facts = [SimpleNamespace(gpu_ids=(str(rank + 2),)) for rank in range(6)]
                group: Any = MagicMock(
                    _placement=places, _facts=facts, _meeting_address="a", _store=MagicMock()
                )
                group.__len__.return_value = 6
                found["missing"] = places._missing_text()
                found["allocator"] = _choose_allocator(places, "nccl", MagicMock())
                found["given"] = ActorHost().facts().gpu_ids
                found["sees"] = [
                    LearnerGroup._build_environment(group, rank)["CUDA_VISIBLE_DEVICES"]
                    for rank in (0, 5)
                ]
            if name == "in turns":
                facts = [SimpleNamespace(gpu_ids=(gpu_id,)) for gpu_id in ("10", "2", "7", "3")]
                group = MagicMock(_placement=places, _facts=facts)
                found["engines see"] = [
                    LearnerGroup.find_gpu_ids(group, places.first_rank(index), 2)
                    for index in (0, 1)
                ]
    return found


class WithArgumentsError(Exception):
    """Ends an engine before there is one."""


@contextlib.contextmanager
def pretended_vllm(given: dict[str, Any]) -> Iterator[None]:
    """A vLLM whose engine ends once it has put its arguments into `given`."""

    def from_engine_args(arguments: Any, **more: Any) -> None:
        given.update(arguments)
        raise WithArgumentsError

    stubs = {
        "vllm": MagicMock(),
        "vllm.engine": MagicMock(),
        "vllm.engine.arg_utils": SimpleNamespace(EngineArgs=dict),
        "vllm.usage": MagicMock(),
        "vllm.usage.usage_lib": MagicMock(),
        "vllm.v1": MagicMock(),
        "vllm.v1.engine": MagicMock(),
        "vllm.v1.engine.llm_engine": SimpleNamespace(
            LLMEngine=SimpleNamespace(from_engine_args=from_engine_args)
        ),
    }
    with patch.dict(sys.modules, stubs):
        yield


def engine(folder: Path) -> Any:
    """What vLLM is told on a GPU; vLLM itself is pretended."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    from open_instruct.config.fleet_sections import FleetSection
    from open_instruct.generation.requests import Batching, EngineSettings
    from open_instruct.generation.vllm_core import VLLMCore
    from open_instruct.generation.vllm_options import engine_environment

    folder.mkdir()
    Tokenizer(WordLevel({"word": 0}, unk_token="word")).save(str(folder / "tokenizer.json"))
    given: dict[str, Any] = {}
    settings = EngineSettings(
        model_folder="m",
        tokenizer_folder=str(folder),
        dtype="bfloat16",
        max_model_len=64,
        batching=Batching.of(FleetSection(), on_cuda=True, max_model_len=64),
        fleet=FleetSection(routing_replay="on", placement="shared"),
        seed=0,
    )
    with pretended_vllm(given), contextlib.suppress(WithArgumentsError):
        VLLMCore(settings)
    core: Any = MagicMock(_absent_parts=set())
    VLLMCore.release_memory(core)
    for part in ("weights", "weights", "kv_cache"):
        VLLMCore.take_memory(core, part)
    told = (
        *("kv_cache_memory_bytes", "enable_chunked_prefill", "enforce_eager", "async_scheduling"),
        "enable_return_routed_experts",
        "enable_sleep_mode",
    )
    return {
        "turns": [[name, [*args], more] for name, args, more in core._engine.method_calls],
        "told": {name: given[name] for name in told},
        "limits_threads": "VLLM_CPU_OMP_THREADS_BIND" in engine_environment(on_cuda=True),
    }


def talking(folder: Path) -> Any:
    """How a trained model is talked to, served and scored with on a GPU."""
    from open_instruct.commands import serve
    from open_instruct.commands.talking.models import TalkingModel
    from open_instruct.commands.tiny_model import write_tiny_model
    from open_instruct.generation.vllm_replies import VLLMEngine, has_vllm_for_gpu
    from open_instruct.run.transformers_model import open_model

    write_tiny_model(folder, family="llama")
    in_process: dict[str, Any] = {}
    with pretended_vllm(in_process), contextlib.suppress(WithArgumentsError):
        VLLMEngine(folder, dtype=None)
    with (
        patch.object(serve, "find_model", lambda name: TalkingModel(name=name, folder=folder)),
        patch.object(serve, "find_spec", lambda name: name),
        patch.object(os, "execve") as replaced,
    ):
        serve.main([str(folder), "--port", "8001"])
    words = replaced.call_args.args[1]
    with pretended_gpu():
        model = open_model(folder, "AutoModelForCausalLM", dtype=None)
        scored_in = [str(model.device), str(model.dtype)]
    return {
        "takes_vllm": has_vllm_for_gpu(),
        "in_process": {name: in_process[name] for name in ("dtype", "enforce_eager")},
        "served_as_on_a_cpu": bool({"--enforce-eager", "--dtype"} & {*words}),
        "scored_in": scored_in,
    }


def check(folder: Path) -> Any:
    """The memory that a look before a run holds its plan against: a GPU's, and a CPU's share."""
    import psutil

    from open_instruct.commands.checks.run_checks import find_process_memory

    share = psutil.virtual_memory().total // 4
    return [
        find_process_memory(4, has_gpu=True) >> 30,
        find_process_memory(4, has_gpu=False) == share,
    ]


def adams(folder: Path) -> Any:
    """DeepSpeed's Adam for the device and for the host, where their kernels can be compiled."""
    import torch
    from olmo_core.optim import AdamWConfig

    from open_instruct.training.deepspeed import adam

    device, warnings = torch.device("cuda", 0), list[str]()
    with (
        patch.dict(os.environ, TORCH_EXTENSIONS_DIR=str(folder)),
        patch.object(adam, "find_build_problem", lambda adam: None),
    ):
        kinds = [
            adam.choose_adam_config(
                AdamWConfig(),
                adam.choose_adam_kind(device, adam_offload=offloads),
                warn=warnings.append,
            )
            for offloads in (False, True)
        ]
    return [kind.optimizer().__name__ for kind in kinds] + warnings


RESTING = {
    "fsdp2": "--advantages gae --beta 0.1 --ref_policy_update_freq 1",
    "hsdp_8bit": f"--optimizer adamw_8bit {cases.HSDP}",
    "4bit": cases.QLORA,
    "moments_on_host": "--adam_offload",
    "zero_2": f"{cases.ZERO} 2 --param_dtype bfloat16",
    "zero_3": f"{cases.ZERO} 3 --param_dtype bfloat16",
    "zero_3_critic": f"{cases.ZERO} 3 --param_dtype bfloat16 --advantages gae",
}


def resting(folder: Path) -> Any:
    """The bytes on the device after a step, while its learner rests, and when it is back."""
    import gc

    import torch

    from open_instruct.training.state_mover import StateMover
    from tests.fake_cuda.memory import Alive, list_state, watching

    found: dict[str, Any] = {}
    for name, flags in RESTING.items():
        alive = Alive()
        case = Case(f"--compile_model false {flags}", "grpo")
        with watching(alive) as watch, opened(case, folder / name, watch) as (policy, take):
            take()
            mover = StateMover(partial(list_state, policy), torch.device("cuda", 0))
            sizes: list[int] = []
            for move in (None, mover.move_to_host, mover.move_to_device):
                if move is not None:
                    WAITS.taken()
                    move()
                waits = WAITS.taken()
                gc.collect()
                alive.begin("now")
                sizes.append(alive._now)
            kinds = {where.partition(": ")[2].partition(", of")[0] for where in waits}
            found[name] = {"bytes": sizes, "waits": sorted(kinds)}
    return found


def driver(folder: Path) -> Any:
    """What a GRPO run decides before it has learners."""
    from open_instruct.commands.run_flags import parse_run
    from open_instruct.config.grpo import GRPOConfig
    from open_instruct.rl.checked_run import _apply_plan
    from open_instruct.weight_sync.transports import choose_transport
    from tests.fake_cuda.memory import CASES

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CASES["grpo"].fields))
    directory = MagicMock()
    _apply_plan(parse_run(GRPOConfig, CASES["grpo"].words), folder, MagicMock(), directory)
    ways = [
        choose_transport(flag, on_cuda=True, single_device=single, same_host=True)
        for flag, single in (("auto", True), ("auto", False), ("nccl", False))
    ]
    return {
        "memory": directory.write_plan.call_args.args[0],
        "ways": ways,
        "placed": _decide_placements(folder),
    }


def _decide_placements(folder: Path) -> list[str]:
    """What --placement auto comes to on this GPU, and on one of a name that no plan knows."""
    from dataclasses import replace

    import torch

    from open_instruct.commands.run_flags import parse_run
    from open_instruct.config.grpo import GRPOConfig
    from open_instruct.rl.decide_placement import decide_placement
    from tests.fake_cuda.memory import CASES

    config = parse_run(GRPOConfig, [*CASES["grpo"].words, "--placement", "auto"])
    config = replace(config, model=replace(config.model, model_name_or_path=str(folder)))
    kinds: list[str] = []
    for name in (torch.cuda.get_device_name(), "another GPU"):
        with patch.object(torch.cuda, "get_device_name", lambda name=name: name):
            kinds.append(decide_placement(config).fleet.placement)
    return kinds


def callbacks(folder: Path) -> Any:
    """Of --profile_steps: a GPU's memory is recorded too."""
    from open_instruct.training.measure.profile import build_profilers

    return sorted(build_profilers([1, 2], num_steps=3, run_folder=folder))


def plans(folder: Path) -> Any:
    """Plans of steps on GPUs, whose bytes test_memory.py holds against what steps hold."""
    from tests.fake_cuda.memory import CASES

    folder.mkdir()
    names = (
        "dpo",
        "dpo, inputs on the host",
        "dpo, context parallel",
        "dpo, zero 2",
        "dpo, modules recomputed",
        "grpo",
    )
    return all(sum(CASES[name].planned(folder).values()) > 0 for name in names)


BRANCHES: dict[str, Callable[[Path], Any]] = {
    "host_copies": host_copies,
    **{
        f"weights_{way}": partial(weights, way)
        for way in ("nccl", "ipc", "gathered", "gloo", "shm")
    },
    **{
        f"weights_{way}_of_the_host": partial(weights, way, flags="--offload")
        for way in ("nccl", "ipc", "shm")
    },
    "changes": changes,
    "export": export,
    "process": process,
    "placement": placement,
    "engine": engine,
    "talking": talking,
    "check": check,
    "adams": adams,
    "resting": resting,
    "driver": driver,
    "callbacks": callbacks,
    "plans": plans,
    **{f"step_{name}": partial(step, case) for name, case in STEPS.items()},
}


def main(names: list[str]) -> None:
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        load_hooks(Path(scratch))
        pretend_cuda()
        with come_by() as seen:
            import torch

            torch.compiler.set_default_backend("eager")
            leave_weights_alone()
            for name in names or BRANCHES:
                try:
                    results[name] = BRANCHES[name](Path(scratch) / name)
                except Exception:
                    results[name] = {"error": traceback.format_exc()}
    print(
        json.dumps(
            {"results": results, "lines": {name: sorted(lines) for name, lines in seen.items()}}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1:])
