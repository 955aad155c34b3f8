"""The fleet of a GRPO run: Ray, learners, engines and verifiers, beside the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal

from open_instruct.cluster.learner_group import LearnerGroup
from open_instruct.cluster.learner_process import LearnerProcess
from open_instruct.cluster.placement import FleetShape, Placement
from open_instruct.cluster.process_environment import allocator_environment, without_growing_segments
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.config.grpo import GRPOConfig
from open_instruct.data.prompts import PromptStream
from open_instruct.engines.batching import Batching
from open_instruct.engines.engine_host import RayEngine
from open_instruct.engines.engine_pool import EnginePool
from open_instruct.engines.requests import EngineSettings
from open_instruct.engines.vllm_core import engine_environment
from open_instruct.parallel.launch import threads_of_each
from open_instruct.parallel.peers import doing
from open_instruct.rollout.checked_run import RolloutRun
from open_instruct.rollout.conductor import Conductor
from open_instruct.run.console import Console
from open_instruct.verifiers.pool import VerifierPool
from open_instruct.verifiers.reward import RewardManager
from open_instruct.weights.publisher import WeightPublisher
from open_instruct.weights.ways import choose_backend
from open_instruct.wording import counted

LOGS_FOLDER = "logs"


class Fleet:
    """A running fleet: learners, engines, verifiers, and a publisher of the learners' weights to the engines.

    Args:
        run: whose fleet this is.
        learners: constructed, as are the engines in `handles`.
        start_engine: starts the process of the engine of an index; does not wait until it is constructed.
        verifiers: judge completions.
        engines_share_cores: whether all engines compute on the cores of one host.
    """

    def __init__(
        self,
        run: RolloutRun,
        learners: LearnerGroup[LearnerProcess],
        handles: Sequence[RayEngine],
        *,
        start_engine: Callable[[int], RayEngine],
        verifiers: VerifierPool,
        engines_share_cores: bool,
    ) -> None:
        fleet = run.config.fleet
        self.run = run
        self.learners = learners
        self.rewards = RewardManager(verifiers, run.config.reward)
        self.engines_share_cores = engines_share_cores
        self._start_engine = start_engine
        self.publisher = WeightPublisher(learners, fleet, drain=not run.config.rollout.inflight_updates)
        self.engines = EnginePool(
            handles,
            make_engine=self._make_engine,
            on_restart=self._engine_restarted,
            on_failure=self.publisher.engines_failed,
            timeout_s=fleet.engine_timeout_s,
            max_restarts=fleet.max_restarts,
            say=run.console.warn,
        )
        self.publisher.attach(self.engines)

    def new_conductor(self) -> Conductor:
        """A new conductor at the start of the run; it may load another state."""
        config = self.run.config
        return Conductor(PromptStream(self.run.prompts, config.optim.seed), self.engines, self.rewards, config=config)

    def restart_learners(self) -> None:
        """Start new learners in the same places; they hold the start model.

        Raises:
            RunError: a node was lost and none took its place, or they could not be constructed.
        """
        fleet = self.run.config.fleet
        self.publisher.learners_restarted()
        self.learners.restart(timeout_s=fleet.cluster_timeout_s)
        self.learners.wait_ready(fleet.step_timeout_s)
        self.write_pids()

    def write_pids(self) -> None:
        self.run.directory.write_pids(driver=os.getpid(), learners=self.learners.pids(), engines=self.engines.pids())

    def _make_engine(self, index: int) -> RayEngine:
        handle = self._start_engine(index)
        try:
            handle.wait_ready(self.run.config.fleet.engine_timeout_s)
        except BaseException:
            handle.kill()  # the next one needs its place
            raise
        return handle

    def _engine_restarted(self, index: int) -> None:
        self.publisher.engine_restarted(index)
        self.write_pids()


@contextmanager
def start_fleet(learner_class: type[LearnerProcess], run: RolloutRun) -> Iterator[Fleet]:
    """Place and start everything; leaving the block ends everything.

    Raises:
        InputError: the cluster, a flag or the checkpoint cannot be used.
        RunError: something did not start in time; the message names it.
    """
    config, console = run.config, run.console
    shape = FleetShape.of(config.fleet, config.parallel)
    with ExitStack() as stack:
        verifiers = VerifierPool(
            config.reward.verifier,
            num_processes=config.reward.num_verifier_processes,
            timeout_s=config.reward.verifier_timeout_s,
            say=console.warn,
        )
        stack.callback(verifiers.close)
        doing("starting learners and engines")
        logs_folder = run.directory.path / LOGS_FOLDER
        cluster = stack.enter_context(start_cluster(config.fleet, shape, say=console.say, logs_folder=logs_folder))
        placement = stack.enter_context(cluster.placing(shape))
        who = f"{counted(shape.num_learners, 'learner')} and {counted(shape.num_engines, 'engine')}"
        console.say(f"starting {who}: they load their libraries, then the model")
        places = placement.whereabouts()
        backend = choose_backend(
            config.fleet.weight_sync_backend,
            on_cuda=placement.on_gpus,
            single_device=shape.shares_device,
            same_host=places.share_memory(),
        )
        environment = dict[str, str]()
        if config.rollout.async_steps > 0 and not placement.on_gpus and places.share_memory():
            # Threads wait for each other in loops: a thread for every core in the learner and in the engine makes
            # both three times as slow (docs/benchmarks.md, "GRPO against TRL").
            environment |= threads_of_each(shape.num_cpu_slots)
        learners = LearnerGroup(
            learner_class,
            placement,
            arguments={"config": config, "weight_sync_backend": backend, "engine_dtype": engine_dtype(config)},
            environment=environment | _allocator_of_learners(placement, backend, console),
            say=console.say,
        )
        stack.callback(learners.shutdown)
        start_engine = partial(_start_engine, run=run, placement=placement, environment=environment)
        fleet = Fleet(
            run,
            learners,
            _constructed_engines(start_engine, learners, run, together=not shape.shares_device),
            start_engine=start_engine,
            verifiers=verifiers,
            engines_share_cores=not placement.on_gpus and len(places.engines) == 1,
        )
        stack.callback(fleet.engines.close)
        stack.callback(run.directory.pids.unlink, missing_ok=True)
        fleet.write_pids()
        yield fleet


def _constructed_engines(
    start_engine: Callable[[int], RayEngine], learners: LearnerGroup[LearnerProcess], run: RolloutRun, *, together: bool
) -> list[RayEngine]:
    """Start the engines, and wait until they and the learners are constructed; `together` both load side by side."""
    fleet, console = run.config.fleet, run.console
    began_s = time.monotonic()
    if not together:
        # vLLM takes its share of what it finds free, and must not measure while another takes memory.
        learners.wait_ready(fleet.step_timeout_s)
    handles = [start_engine(index) for index in range(fleet.vllm_num_engines)]
    learners.wait_ready(fleet.step_timeout_s)
    console.say(f"learners have loaded the model after {time.monotonic() - began_s:.0f} s")
    for handle in handles:
        handle.wait_ready(fleet.engine_timeout_s)
    console.say(f"engines are ready after {time.monotonic() - began_s:.0f} s")
    return handles


def _allocator_of_learners(placement: Placement, backend: str, console: Console) -> dict[str, str]:
    """Environment of the learners' allocator; warns of settings that engines, or learners beside one, cannot take."""
    hands_over_memory = backend == "ipc"
    for name in without_growing_segments(os.environ) if placement.on_gpus else ():
        whose = "engines and learners" if hands_over_memory else "engines"
        console.say(f"{name}: {whose} go without expandable_segments:True, memory that no other process can map")
    return allocator_environment(on_gpus=placement.on_gpus, hands_over_memory=hands_over_memory)


def engine_dtype(config: GRPOConfig) -> Literal["bfloat16", "float32"]:
    """The dtype in which engines compute and weights travel."""
    return config.model.param_dtype if config.fleet.vllm_dtype == "policy" else config.fleet.vllm_dtype


def _start_engine(index: int, *, run: RolloutRun, placement: Placement, environment: Mapping[str, str]) -> RayEngine:
    config = run.config
    settings = EngineSettings(
        model_folder=str(run.pretrained.folder.resolve()),
        tokenizer_folder=str(run.pretrained.tokenizer_folder.resolve()),
        dtype=engine_dtype(config),
        max_model_len=config.data.max_seq_length,
        batching=Batching.of(config.fleet, on_cuda=placement.on_gpus, max_model_len=config.data.max_seq_length),
        fleet=config.fleet,
        seed=config.optim.seed,
        stop_token_ids=run.chat.turn_end_token_ids(),
        adapter=config.sent_adapter,
    )
    own = engine_environment(on_cuda=placement.on_gpus)
    own |= allocator_environment(on_gpus=placement.on_gpus, hands_over_memory=True)
    if not placement.on_gpus:  # Ray would leave it one thread
        own |= threads_of_each(placement.shape.num_cpu_slots - placement.shape.num_learners)
    return RayEngine(index, settings, placement, environment={**own, **environment})
