"""The fleet of a GRPO run: Ray, learners, engines and verifiers, beside the driver."""

import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain

from open_instruct.cluster.actor_host import allocator_environment, drop_growing_segments
from open_instruct.cluster.learner_group import LearnerGroup, LearnerProcess
from open_instruct.cluster.placement import FleetShape, Placement
from open_instruct.cluster.ray_cluster import start_cluster
from open_instruct.core.text import spell_count
from open_instruct.data.prompts import PromptStream
from open_instruct.environments.agents import AgentProgram
from open_instruct.environments.environment import Factory
from open_instruct.environments.recorded import RecordedSessions
from open_instruct.generation.engine_host import RayEngine
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.requests import Batching, EngineSettings
from open_instruct.generation.vllm_options import engine_environment
from open_instruct.parallel.launch import share_threads
from open_instruct.parallel.status import this_process
from open_instruct.rewards.pool import VerifierPool
from open_instruct.rl.agents.episodes import AgentEpisodes
from open_instruct.rl.agents.node import AgentNode
from open_instruct.rl.agents.nodes import AgentNodes, NodeHandle
from open_instruct.rl.checked_run import RolloutRun
from open_instruct.rl.conductor import Conductor
from open_instruct.rl.episodes.conversations import Conversations
from open_instruct.rl.episodes.walk import EpisodeRunner, Episodes
from open_instruct.rl.publisher import WeightPublisher
from open_instruct.rl.recorded import RecordedEpisodes
from open_instruct.run.console import Console
from open_instruct.weight_sync.folder import choose_sync_folder, make_folder
from open_instruct.weight_sync.transports import FOLDER, GATHERED, TRANSPORT_WORDS, choose_transport

LOGS_FOLDER = "logs"
MOST_TRIED = 64  # prompts in which reward functions to try are looked for


class Fleet:
    """A running fleet: learners, engines, verifiers, and a publisher of weights between them.

    Args:
        run: whose fleet this is.
        placement: the reserved places of learners and engines.
        learners: started there; they may still load the model.
        verifiers: judge completions.
        environment: variables for the engines' processes, over those that are set here.

    Raises:
        RunError: learners or engines were not constructed in time.
    """

    def __init__(
        self,
        run: RolloutRun,
        placement: Placement,
        learners: LearnerGroup[LearnerProcess],
        verifiers: VerifierPool,
        environment: Mapping[str, str],
    ) -> None:
        fleet = run.config.fleet
        self.run = run
        self.learners = learners
        self.verifiers = verifiers
        self.engines_share_cores = (
            not placement.on_gpus and len(placement.whereabouts().engines) == 1
        )
        shape = placement.shape
        self.engines_are_alike = not (shape.takes_turns and shape.num_free_engines)
        self._placement = placement
        self._environment = environment
        self.publisher = WeightPublisher(
            learners, fleet, drain=not run.config.rollout.inflight_updates
        )
        self.engines = EnginePool(
            self._first_engines(),
            make_engine=self._make_engine,
            on_restart=self._publish_to_new_engine,
            on_failure=self.publisher.handle_engine_failure,
            fleet=fleet,
            say=run.console.warn,
        )
        self.publisher.engines = self.engines
        self.runners = make_runners(run, self.engines, placement)

    def new_conductor(self) -> Conductor:
        """A new conductor at the start of the run; it may load another state."""
        config = self.run.config
        seed = config.optim.seed
        return Conductor(
            PromptStream(self.run.prompts, seed),
            self.new_episodes(),
            rollout=config.rollout,
            num_steps=config.num_steps,
            response_length=config.data.response_length,
            seed=seed,
        )

    def new_episodes(self) -> Episodes:
        """New episodes, which ask the engines and judge their answers until they are closed."""
        return Episodes(self.engines, self.verifiers, self.runners.__getitem__)

    def restart_learners(self) -> None:
        """Start new learners in the same places; they hold the start model.

        Raises:
            RunError: a node was lost and none took its place, or they could not be constructed.
        """
        fleet = self.run.config.fleet
        with self.publisher.learners_at_work():
            self.publisher.handle_learner_restart()
            self.learners.restart(timeout_s=fleet.cluster_timeout_s)
            self.learners.wait_ready(fleet.step_timeout_s)
        self.write_pids()

    def write_pids(self) -> None:
        self.run.directory.write_pids(
            driver=os.getpid(), learners=self.learners.pids(), engines=self.engines.pids()
        )

    def _first_engines(self) -> list[RayEngine]:
        """Start the engines, and wait until they and the learners are constructed."""
        fleet = self.run.config.fleet
        console = self.run.console
        began_s = time.monotonic()
        shape = self._placement.shape
        if shape.shares_device or fleet.takes_turns:
            # vLLM measures the free memory at its start: the learner on the same device must have
            # loaded by then.
            self.learners.wait_ready(fleet.step_timeout_s)
        if fleet.takes_turns:
            self.learners.start(LearnerProcess.move_to_host).result(fleet.step_timeout_s)
        # Elsewhere they import and load side by side.
        engines = [self._start_engine(index) for index in range(shape.num_engines)]
        self.learners.wait_ready(fleet.step_timeout_s)
        console.say(f"learners have loaded the model after {time.monotonic() - began_s:.0f} s")
        for engine in engines:
            engine.wait_ready(fleet.engine_timeout_s)
        console.say(f"engines are ready after {time.monotonic() - began_s:.0f} s")
        return engines

    def _make_engine(self, index: int) -> RayEngine:
        with self.publisher.engine_start():
            engine = self._start_engine(index)
            try:
                engine.wait_ready(self.run.config.fleet.engine_timeout_s)
            except BaseException:
                engine.kill()  # the next one needs its place
                raise
        return engine

    def _start_engine(self, index: int) -> RayEngine:
        config = self.run.config
        placement = self._placement
        on_gpus = placement.on_gpus
        settings = EngineSettings(
            model_folder=str(self.run.engine_folder.resolve()),
            tokenizer_folder=str(self.run.pretrained.tokenizer_folder.resolve()),
            dtype=config.engine_dtype,
            max_model_len=config.data.max_seq_length,
            batching=Batching.of(
                config.fleet, on_cuda=on_gpus, max_model_len=config.data.max_seq_length
            ),
            fleet=config.fleet,
            seed=config.optim.seed,
            stop_token_ids=self.run.chat.turn_end_token_ids(),
            adapter=config.sent_adapter,
            dtype_of_scales=config.model.param_dtype,
        )
        environment = engine_environment(on_cuda=on_gpus, runner=config.fleet.vllm_runner)
        environment |= allocator_environment(on_gpus=on_gpus, hands_over_memory=True)
        if not on_gpus:  # Ray would leave it one thread
            environment |= share_threads(
                placement.shape.num_cpu_slots - placement.shape.num_learners
            )
        elif placement.takes_turns(index) and not placement.shape.shares_device:
            gpu_ids = self.learners.find_gpu_ids(
                placement.first_rank(index), placement.shape.devices_per_engine
            )
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        return RayEngine(
            index, settings, placement, environment={**environment, **self._environment}
        )

    def _publish_to_new_engine(self, index: int) -> None:
        self.publisher.handle_engine_restart(index)
        self.write_pids()


def make_runners(
    run: RolloutRun, engines: EnginePool, placement: Placement
) -> dict[str, EpisodeRunner]:
    """What runs the episodes of each environment of the run, by the environment's name."""
    if run.environments is None:
        return {}
    programs: dict[str, AgentProgram] = {}
    others: dict[str, Factory] = {}
    runners: dict[str, EpisodeRunner] = {}
    for name, factory in run.environments.items():
        if isinstance(factory, AgentProgram):
            programs[name] = factory
        elif isinstance(factory, RecordedSessions):
            runners[name] = RecordedEpisodes()
        else:
            others[name] = factory
    warn = run.console.warn
    conversations = Conversations(engines, run.chat, others, run.config, warn=warn)
    runners |= dict.fromkeys(others, conversations)
    if programs:
        agents = make_agents(run, engines, placement, programs)
        runners |= dict.fromkeys(programs, agents)
    return runners


def make_agents(
    run: RolloutRun,
    engines: EnginePool,
    placement: Placement,
    programs: Mapping[str, AgentProgram],
) -> EpisodeRunner:
    """What runs the episodes of agents: on every node that has engines, or here if that is all."""
    nodes = placement.find_engine_nodes()
    if nodes.keys() == {placement.find_driver_node()}:
        return AgentEpisodes(engines, run.chat, programs, run.config)
    first_engines = list(nodes.values())
    environment = {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}

    def start_node(index: int) -> NodeHandle:
        return NodeHandle(
            AgentNode,
            {
                "config": run.config,
                "tokenizer_folder": str(run.pretrained.tokenizer_folder.resolve()),
                "names": tuple(programs),
                "working_folder": os.getcwd(),
            },
            name=f"agents {index}",
            actor_class="AgentNode",
            options=placement.beside_engine_options(first_engines[index]),
            environment=environment,
            placement=placement,
        )

    for program in programs.values():
        program.end_run()  # it was tried here, and runs there
    run.console.say(f"agents run on {spell_count(len(nodes), 'node')} with engines")
    return AgentNodes(
        engines,
        len(nodes),
        start_node=start_node,
        timeout_s=run.config.fleet.engine_timeout_s,
        max_restarts=run.config.fleet.max_restarts,
        say=run.console.warn,
    )


@contextmanager
def start_fleet(learner_class: type[LearnerProcess], run: RolloutRun) -> Iterator[Fleet]:
    """Place and start everything; leaving the block ends everything.

    :raises InputError: the cluster, a flag or the checkpoint cannot be used.
    :raises RunError: something did not start in time; the message names it.
    """
    config = run.config
    console = run.console
    shape = FleetShape.of(config.fleet, config.parallel)
    with ExitStack() as stack:
        verifiers = VerifierPool(
            config.reward, say=console.warn, max_tokens=config.data.response_length
        )
        stack.callback(verifiers.close)
        try_functions(run, verifiers)
        this_process.begin("starting learners and engines")
        logs_folder = run.directory.path / LOGS_FOLDER
        placement = stack.enter_context(
            start_cluster(config.fleet, shape, say=console.say, logs_folder=logs_folder)
        )
        console.say(f"starting {_describe(shape)}: they load their libraries, then the model")
        same_host = placement.whereabouts().share_memory()
        backend = choose_transport(
            config.fleet.weight_sync_backend,
            on_cuda=placement.on_gpus,
            single_device=shape.shares_device,
            same_host=same_host,
            takes_turns=shape.takes_turns,
            has_free_engines=shape.num_free_engines > 0,
        )
        if backend == FOLDER:
            folder = choose_sync_folder(config.fleet.weight_sync_folder, run.directory.path)
            stack.callback(shutil.rmtree, make_folder(folder), ignore_errors=True)
        # Engines that give up their memory take all weights.
        sync, why = config.choose_sync(same_host=same_host or shape.takes_turns)
        changes = ""
        if sync == "delta":
            changes = f": what has changed alone, {why}"
        console.say(f"weights go to engines {TRANSPORT_WORDS[backend]}{changes}")
        environment = dict[str, str]()
        works_at_once = config.rollout.async_steps > 0 and shape.works_at_once
        if works_at_once and not placement.on_gpus and same_host:
            # Threads wait for each other in loops: a thread for every core in the learner and in
            # the engine makes both three times as slow (docs/benchmarks.md, "GRPO against TRL").
            environment |= share_threads(shape.num_cpu_slots)
        learners = LearnerGroup(
            learner_class,
            placement,
            arguments={"config": config, "weight_sync_backend": backend, "weight_sync": sync},
            environment=environment | _choose_allocator(placement, backend, console),
            say=console.say,
        )
        stack.callback(learners.shutdown)
        fleet = Fleet(run, placement, learners, verifiers, environment)
        stack.callback(fleet.engines.close)
        for runner in {id(each): each for each in fleet.runners.values()}.values():
            stack.callback(runner.close)
        stack.callback(run.directory.pids.unlink, missing_ok=True)
        fleet.write_pids()
        yield fleet


def _describe(shape: FleetShape) -> str:
    """Who is started: "2 learners and 1 engine"."""
    learners = spell_count(shape.num_learners, "learner")
    engines = spell_count(shape.num_engines, "engine")
    words = f"{learners} and {engines}"
    if shape.takes_turns and shape.num_free_engines:
        return f"{words}, the first {shape.num_turning_engines} in turns on the same devices"
    return f"{words}, in turns on the same devices" if shape.takes_turns else words


def try_functions(run: RolloutRun, verifiers: VerifierPool) -> None:
    """Call every reward function once, before anything is started, and say what it is given.

    Raises:
        InputError: one of them raises.
    """
    this_process.begin("trying the reward functions")
    datasets = [each for each in (run.prompts, run.held_out) if each is not None]
    prompts = chain.from_iterable(each.sample_evenly(MOST_TRIED) for each in datasets)
    run.console.report("rewards", verifiers.try_functions(prompts))


def _choose_allocator(placement: Placement, backend: str, console: Console) -> dict[str, str]:
    """The variables of the learners' allocator; says which of the user's settings do not fit."""
    hands_over_memory = backend in ("ipc", GATHERED)
    if placement.on_gpus:
        processes = "engines and learners" if hands_over_memory else "engines"
        for name in drop_growing_segments(os.environ):
            console.say(
                f"{name}: {processes} go without expandable_segments:True, memory that no other "
                "process can map"
            )
    return allocator_environment(on_gpus=placement.on_gpus, hands_over_memory=hands_over_memory)
