"""The fleet of a GRPO run: Ray, learners, engines and verifiers, beside the driver."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A running fleet. `publisher` brings the learners' weights to the engines, which may share one host's cores."""

    run: RolloutRun
    learners: LearnerGroup[LearnerProcess]
    engines: EnginePool
    rewards: RewardManager
    publisher: WeightPublisher
    engines_share_cores: bool

    def new_conductor(self) -> Conductor:
        """A new conductor at the start of the run; it may load another state."""
        config = self.run.config
        return Conductor(PromptStream(self.run.prompts, config.optim.seed), self.engines, self.rewards, config=config)

    def restart_learners(self) -> None:
        """Start new learners in the same places; they hold the start model.

        Raises:
            RunError: a node was lost and none took its place, or they could not be constructed.
        """
        timeout_s = self.run.config.fleet.cluster_timeout_s
        self.publisher.learners_restarted()
        self.learners.restart(timeout_s=timeout_s)
        self.learners.wait_ready(self.run.config.fleet.step_timeout_s)
        self.write_pids()

    def write_pids(self) -> None:
        self.run.directory.write_pids(driver=os.getpid(), learners=self.learners.pids(), engines=self.engines.pids())


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
        placement = stack.enter_context(
            start_cluster(config.fleet, shape, say=console.say, logs_folder=run.directory.path / LOGS_FOLDER)
        )
        began_s = time.monotonic()
        who = f"{counted(shape.num_learners, 'learner')} and {counted(shape.num_engines, 'engine')}"
        console.say(f"starting {who}: they load their libraries, then the model")
        places = placement.whereabouts()
        same_host = places.share_memory()
        backend = choose_backend(
            config.fleet.weight_sync_backend,
            on_cuda=placement.on_gpus,
            single_device=shape.shares_device,
            same_host=same_host,
        )
        environment = dict[str, str]()
        if config.rollout.async_steps > 0 and not placement.on_gpus and same_host:
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
        make_engine = partial(_start_engine, run=run, placement=placement, environment=environment)
        if shape.shares_device:
            # vLLM takes its share of what it finds free, and must not measure while another takes memory.
            learners.wait_ready(config.fleet.step_timeout_s)
        # Elsewhere they import and load side by side.
        handles = [make_engine(index) for index in range(shape.num_engines)]
        learners.wait_ready(config.fleet.step_timeout_s)
        console.say(f"learners have loaded the model after {time.monotonic() - began_s:.0f} s")
        for handle in handles:
            handle.wait_ready(config.fleet.engine_timeout_s)
        console.say(f"engines are ready after {time.monotonic() - began_s:.0f} s")
        publisher = WeightPublisher(learners, config.fleet, drain=not config.rollout.inflight_updates)
        fleet: Fleet | None = None

        def made_again(index: int) -> RayEngine:
            handle = make_engine(index)
            try:
                handle.wait_ready(config.fleet.engine_timeout_s)
            except BaseException:
                handle.kill()  # the next one needs its place
                raise
            return handle

        def restarted(index: int) -> None:
            publisher.engine_restarted(index)
            if fleet is not None:
                fleet.write_pids()

        engines = EnginePool(
            handles,
            make_engine=made_again,
            on_restart=restarted,
            on_failure=publisher.engines_failed,
            timeout_s=config.fleet.engine_timeout_s,
            max_restarts=config.fleet.max_restarts,
            say=console.warn,
        )
        stack.callback(engines.close)
        publisher.attach(engines)
        fleet = Fleet(
            run=run,
            learners=learners,
            engines=engines,
            rewards=RewardManager(verifiers, config.reward),
            publisher=publisher,
            engines_share_cores=not placement.on_gpus and len(places.engines) == 1,
        )
        stack.callback(run.directory.pids.unlink, missing_ok=True)
        fleet.write_pids()
        yield fleet


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
