"""A process with vLLM's own engine, its asynchronous scheduler and what its second model runner
keeps of requests.

    python -m tests.fleet.queue_session MODEL_FOLDER OUT.json

On a GPU two steps are in flight and vLLM's Model Runner V2 computes them; its build for CPUs has
neither. Here all of it runs that is Python: `LLMEngine`, the scheduler, the queue of two batches,
the executor, V2's slots of requests and its sampler. The model is a formula of all tokens so far
and the version of the weights. The few Triton kernels on the way are said again in PyTorch.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from open_instruct.config.fleet_sections import FleetSection
from open_instruct.config.lora import LoRASection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion
from open_instruct.generation.requests import Batching, EngineSettings
from open_instruct.generation.vllm_core import VLLMCore
from open_instruct.generation.vllm_options import engine_environment
from tests.fleet.queue_case import NUM_REQUESTS, STOP, logits_of, requests

os.environ |= {**engine_environment(on_cuda=False), "VLLM_LOGGING_LEVEL": "ERROR"}

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.uniproc_executor import UniProcExecutor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.lora_utils import LoraState
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState
from vllm.v1.worker.worker_base import CompilationTimes

MAX_MODEL_LEN, BLOCK_TOKENS = 96, 16
NUM_BLOCKS = 9  # too few for all requests at once
MAX_STEPS = 80
SPEC = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)


class Later(AsyncModelRunnerOutput):
    def __init__(self, output: ModelRunnerOutput) -> None:
        self.output = output

    def get_output(self) -> ModelRunnerOutput:
        return self.output


class Runner(GPUModelRunner):
    """V2's own bookkeeping of requests and sampling, around the formula."""

    def __init__(self, config: Any) -> None:
        self.vocab_size = config.model_config.get_vocab_size()
        self.max_num_reqs = config.scheduler_config.max_num_seqs
        device = torch.device("cpu")
        most_tokens = config.scheduler_config.max_num_batched_tokens
        self.req_states = RequestState(
            self.max_num_reqs, MAX_MODEL_LEN, most_tokens, 0, self.vocab_size, device
        )
        self.sampler = Sampler(
            vllm_config=config,
            max_num_reqs=self.max_num_reqs,
            vocab_size=self.vocab_size,
            device=device,
            req_states=self.req_states,
            logprobs_mode=config.model_config.logprobs_mode,
        )
        self.lora_state = LoraState(max_num_reqs=self.max_num_reqs)
        self.pooling_runner = self.pp_handler = self.encoder_cache = self.adaptive_verification = (
            None
        )
        self.model_state, self.prompt_logprobs_worker, self.block_tables = (
            MagicMock(),
            MagicMock(),
            MagicMock(),
        )
        self.pcp_manager, self.use_pp, self.is_last_pp_rank, self.decode_query_len = (
            None,
            False,
            True,
            1,
        )
        self.version = 0
        self.most_names = 0
        self.batch: Any = None

    def execute(self, scheduled: Any) -> ModelRunnerOutput | None:
        """As `execute_model` does, up to the model."""
        self.finish_requests(scheduled)
        self.free_states(scheduled)
        self.add_requests(scheduled)
        self.update_requests(scheduled)
        if scheduled.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput(req_ids=[], req_id_to_index={})
        self.batch, _ = self.gather_batch_req_state(scheduled, dummy_run=False)
        self.most_names = max(
            self.most_names, len(self.lora_state.get_activate_loras(self.batch.req_ids))
        )
        return None

    def sample_now(self) -> Later:
        batch, states = self.batch, self.req_states
        places = torch.from_numpy(batch.idx_mapping_np)
        lengths = states.num_computed_tokens_np[batch.idx_mapping_np] + batch.num_scheduled_tokens
        rows = [
            logits_of(
                states.all_token_ids.gpu[place, :length].tolist(),
                version=self.version,
                vocab_size=self.vocab_size,
                num_prompt=int(states.prompt_len.np[place]),
            )
            for place, length in zip(places, lengths, strict=True)
        ]
        everyone = torch.arange(len(rows))
        answer = self.sampler(
            torch.stack(rows),
            SimpleNamespace(
                expanded_idx_mapping=places,
                idx_mapping=places,
                idx_mapping_np=batch.idx_mapping_np,
                cu_num_logits_np=torch.arange(len(rows) + 1).numpy(),
                cu_num_logits=torch.arange(len(rows) + 1),
                expanded_local_pos=torch.zeros(len(rows), dtype=torch.int32),
                positions=torch.from_numpy(lengths) - 1,
                logits_indices=everyone,
                input_ids=everyone,
                seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
                seq_lens=torch.from_numpy(lengths),
                num_reqs=len(rows),
            ),
        )
        tokens = []
        for row, (place, length) in enumerate(zip(places, lengths, strict=True)):
            tokens.append(answer.sampled_token_ids[row].tolist() if answer.num_sampled[row] else [])
            if tokens[-1]:
                states.all_token_ids.gpu[place, length] = tokens[-1][0]
        numbers = {name: number for number, name in enumerate(batch.req_ids)}
        output = ModelRunnerOutput(
            req_ids=batch.req_ids, req_id_to_index=numbers, sampled_token_ids=tokens
        )
        output.logprobs = answer.logprobs_tensors and answer.logprobs_tensors.tolists()
        return Later(output)


class Worker:
    """What an executor asks of a GPU's process."""

    def __init__(self, config: Any) -> None:
        self.model_runner = Runner(config)
        self.determine_available_memory = lambda: NUM_BLOCKS * SPEC.page_size_bytes
        self.get_kv_cache_spec = lambda: {"layer": SPEC}
        self.get_supported_kv_cache_layouts = lambda: ["LBNHC"]
        self.compile_or_warm_up_model = lambda: CompilationTimes(0.0, 0.0)
        self.get_supported_tasks = lambda: ("generate",)
        self.adapted_layers = lambda: ["q_proj"]
        self.execute_model = self.model_runner.execute
        nothing = (
            "set_kv_cache_layout",
            "initialize_from_config",
            "synchronize_device",
            "shutdown",
            "hold_no_adapter",
        )
        for name in (*nothing, "reset_mm_cache"):
            setattr(self, name, lambda *_: None)

    def sample_tokens(self, grammar: Any) -> Later:
        return self.model_runner.sample_now()

    def set_version(self, version: int) -> None:
        self.model_runner.version = version


class Executor(UniProcExecutor):
    def _init_executor(self) -> None:
        self.driver_worker: Any = Worker(self.vllm_config)


# The kernels.


def apply_write(staged: StagedWriteTensor) -> None:
    start = 0
    places = zip(
        staged._staged_write_indices,
        staged._staged_write_starts,
        staged._staged_write_cu_lens,
        strict=True,
    )
    for index, first, stop in places:
        row = staged.gpu[index : index + 1] if staged.gpu.dim() == 1 else staged.gpu[index]
        row[first : first + stop - start] = torch.tensor(staged._staged_write_contents[start:stop])
        start = stop
    staged.clear_staged_writes()


def apply_temperature(
    logits: torch.Tensor, places: torch.Tensor, temperatures: torch.Tensor
) -> None:
    logits /= temperatures[places].unsqueeze(1)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.log_softmax(-1).gather(1, tokens)


def num_sampled(
    sampled: Any, lengths: Any, _: Any, places: Any, prefills: torch.Tensor
) -> tuple[Any, Any]:
    return torch.where(lengths >= prefills[places], sampled, 0), torch.zeros_like(sampled)


@contextmanager
def second_runner(**sampler: Any) -> Iterator[None]:
    """Engines of `VLLMCore` have asynchronous scheduling and V2's Python."""

    def from_engine_args(arguments: EngineArgs, usage_context: Any) -> LLMEngine:
        arguments.enable_chunked_prefill = True  # as on a GPU
        arguments.num_gpu_blocks_override = NUM_BLOCKS
        config = arguments.create_engine_config(usage_context)
        config.scheduler_config.async_scheduling = True  # a CPU's platform has refused it
        seconds.append(config)
        return LLMEngine(config, Executor, log_stats=False, usage_context=usage_context)

    seconds: list[Any] = []
    gpu = "vllm.v1.worker.gpu"
    with ExitStack() as stack:
        for name, meant in {
            "vllm.v1.engine.llm_engine.LLMEngine.from_engine_args": from_engine_args,
            # A config is made as for V1, as it would miss Triton.
            "vllm.config.VllmConfig.use_v2_model_runner": property(
                lambda it: any(it is one for one in seconds)
            ),
            f"{gpu}.buffer_utils.is_uva_available": lambda: False,
            f"{gpu}.buffer_utils.StagedWriteTensor.apply_write": apply_write,
            f"{gpu}.sample.states.apply_temperature": apply_temperature,
            f"{gpu}.sample.logprob.compute_token_logprobs": logprobs_of,
            f"{gpu}.sample.logprob._ranks_kernel": MagicMock(),
            f"{gpu}.sample.sampler.gumbel_sample": lambda logits, *_, **__: logits.argmax(-1),
            f"{gpu}.sample.sampler.get_num_sampled_and_rejected": num_sampled,
            f"{gpu}.sample.sampler.flashinfer_sampler_supported": lambda: False,
            **sampler,
        }.items():
            stack.enter_context(patch(name, meant))
        yield


class Session:
    """One engine, and what was seen of its scheduler."""

    def __init__(self, model_folder: str, **settings: Any) -> None:
        self.core = VLLMCore(
            EngineSettings(
                model_folder=model_folder,
                tokenizer_folder=model_folder,
                dtype="float32",
                max_model_len=MAX_MODEL_LEN,
                batching=Batching(max_num_seqs=8, max_num_batched_tokens=64, schedules_ahead=True),
                fleet=FleetSection(vllm_kv_cache_mib=1, vllm_enforce_eager=True),
                seed=0,
                stop_token_ids=(STOP,),
                **settings,
            )
        )
        client: Any = self.core._engine.engine_core
        self.engine_core = client.engine_core
        self.runner: Runner = self.engine_core.model_executor.driver_worker.model_runner
        self.seen: Counter[str] = Counter()
        self.version = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Count the requests that lose their place in the cache, and what becomes of their tokens
        in flight.
        """
        preempt = Scheduler._preempt_request

        def noted(
            scheduler: Scheduler, request: Any, timestamp: float, drop_stale_output: bool = False
        ) -> None:
            preempt(scheduler, request, timestamp, drop_stale_output)
            kind = "updated" if drop_stale_output else "preempted"
            self.seen[kind] += 1
            self.seen[f"{kind} in flight"] += request.num_stale_output_tokens > 0

        with patch.object(Scheduler, "_preempt_request", noted):
            yield

    def update(self, *, settles: bool = True) -> Mapping[int, Completion]:
        """New weights, in the order in which an engine takes them."""
        finished = self.core.settle() if settles else {}
        self.seen["in flight while weights change"] += len(self.engine_core.batch_queue)
        self.version += 1
        self.core._engine.collective_rpc("set_version", args=(self.version,))
        self.core.weights_changed(self.version)
        return finished

    def answers(
        self, actions: Mapping[int, Callable[[], Mapping[int, Completion] | None]]
    ) -> list[dict[str, Any]]:
        """All requests' completions; before the step of that number, one of `actions` is done."""
        finished: dict[int, Completion] = {}
        for key, request in enumerate(requests()):
            self.core.add(key, request)
        for number in range(MAX_STEPS):
            if number in actions:
                finished |= actions[number]() or {}
            finished |= self.core.step()
        return [asdict(finished[key]) if key in finished else {} for key in range(NUM_REQUESTS)]


def main(model_folder: str, out: Path) -> None:
    said: dict[str, Any] = {}
    with second_runner():
        session = Session(model_folder)
        said["in flight at most"] = session.engine_core.batch_queue_size
        with session.watched():
            for name, settles, last in (("settled", True, 11), ("unsettled", False, 4)):
                update = partial(session.update, settles=settles)
                said[name] = [
                    {
                        "version": session.version,
                        "answers": session.answers({first: update, first + gap: update}),
                    }
                    for first in range(1, last + 1)
                    for gap in (1, 4)
                ]
                said[f"{name} seen"], session.seen = session.seen, Counter()
            cancelled = {4: lambda: session.core.abort(3), 5: session.update}
            said["cancelled"] = {"version": session.version, "answers": session.answers(cancelled)}
        mislabelled = {4: lambda: session.core._engine.set_weight_version(str(session.version + 1))}
        said["mislabelled"] = {"version": session.version, "answers": session.answers(mislabelled)}
        left = session.runner.req_states
        said["slots left"] = [left.num_reqs, len(left.free_indices)]
        session.core.close()
        late = requests()[0]
        adapted = Session(
            model_folder,
            adapter=LoRASection(use_lora=True, lora_r=8, lora_target_modules=["q_proj"]),
        )
        actions = {
            3: adapted.update,
            4: lambda: adapted.core.add(NUM_REQUESTS, late),
            5: adapted.update,
            6: lambda: adapted.core.add(NUM_REQUESTS + 1, late),
        }
        said["adapted"] = {"version": 0, "answers": adapted.answers(actions)}
        said["names of an adapter"] = adapted.runner.most_names
        adapted.core.close()
    with second_runner(**{"vllm.v1.worker.gpu.sample.sampler.PROCESSED_LOGPROBS_MODES": ()}):
        try:
            Session(model_folder)
        except RunError as error:
            said["raw"] = str(error)
    out.write_text(json.dumps(said, default=bytes.hex))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
