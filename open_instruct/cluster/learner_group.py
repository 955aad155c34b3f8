"""All learners of a run: started, called and restarted together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from open_instruct.cluster.actor_host import ActorHost, HostFacts
from open_instruct.cluster.learner_call import LearnerCall
from open_instruct.cluster.placement import Placement, Say
from open_instruct.parallel.heartbeats import HeartbeatReader
from open_instruct.parallel.listening import open_listening_store
from open_instruct.parallel.status import STORE_OF_LAUNCHER

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle

    from open_instruct.batching.rollouts import RankStep
    from open_instruct.core.records import BestStep

START_TIMEOUT_S = 300.0

L = TypeVar("L")
P = ParamSpec("P")
A = TypeVar("A")
R = TypeVar("R")


class LearnerProcess(Protocol):
    """One rank of the learners, such as `PolicyTrainerOLMoCoreProcess`.

    Every method is called on all ranks at once. A call names the method of this class:
    `learners.start(LearnerProcess.broadcast_to_vllm, 3).result(timeout_s)`.
    """

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""

    def compare_with_engine(self, work: RankStep) -> dict[str, float]:
        """How far the policy's log-probs of `work` are from the engine's; nothing is learned."""

    def move_to_host(self) -> None:
        """Free the device for an engine; nothing if that was done."""

    def move_to_device(self) -> None:
        """Bring back what `move_to_host` took; nothing else may be called before."""

    def resume(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Load the newest complete checkpoint, if there is one.

        Returns:
            The driver's state that `save_state` got for it, or None; and warnings for people.
        """

    def save_state(
        self, drivers_state: dict[str, Any], *, waits: bool, best_step: int | None
    ) -> None:
        """Write a checkpoint of this step, with the state of the driver.

        If it `waits`, it returns once the checkpoint is complete. The checkpoint of `best_step` is
        not removed.
        """

    def save_model(self, best: BestStep | None) -> None:
        """Export the trained model: of the `best` step, or of the last where there is none."""

    def open_weight_channel(self, num_receivers: int) -> dict[str, Any]:
        """Offer a channel for weights; returns what engines need (see `WeightSender.open`)."""

    def join_weight_channel(self) -> None:
        """Wait until every engine has connected."""

    def broadcast_to_vllm(self, version: int) -> None:
        """Stream the policy from its shards to the engines."""


LearnerMethod = Callable[Concatenate[LearnerProcess, P], R]


class LearnerGroup(Generic[L]):
    """One Ray actor for each learner, in rank order, with the name of the learners' class.

    Every process gets what torchrun would set (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    NUM_NODES, FS_LOCAL_RANK, MASTER_ADDR, MASTER_PORT) before the class is imported there. On GPUs
    it sees those of all learners of its node, so that LOCAL_RANK is the index of its own.
    """

    def __init__(
        self,
        learner_class: type[L],
        placement: Placement,
        *,
        arguments: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        say: Say = lambda text: None,
    ) -> None:
        """Start the processes, which then construct `learner_class(**arguments)`; see `wait_ready`.

        Args:
            learner_class: importable by its name, and picklable; it knows nothing of Ray.
            placement: its places for learners.
            arguments: of the constructor, the same on every rank.
            environment: variables for every process; they replace those that are set here.
            say: called with the progress while a restart waits for a node.

        Raises:
            LearnerLost: a process did not start.
        """
        self._learner_class = learner_class
        self._placement = placement
        self._arguments = dict(arguments or {})
        self._environment = dict(environment or {})
        self._say = say
        self._actors: list[ActorHandle] = []
        self._facts: list[HostFacts] = []
        self._start()

    def __len__(self) -> int:
        return self._placement.shape.num_learners

    def wait_ready(self, timeout_s: float) -> None:
        """Return when every learner is constructed; raises as `LearnerCall.result` does."""
        self._construction.result(timeout_s)

    def start(
        self, method: Callable[Concatenate[L, P], R], *args: P.args, **kwargs: P.kwargs
    ) -> LearnerCall[R]:
        """Have every learner begin a method, with the same arguments."""
        name = method.__name__
        refs = [actor.call.remote(name, *args, **kwargs) for actor in self._actors]
        return self._make_call(name, refs)

    def start_each(self, method: Callable[[L, A], R], arguments: Sequence[A]) -> LearnerCall[R]:
        """Have every learner begin a method, each with the argument of its rank."""
        name = method.__name__
        refs = [
            actor.call.remote(name, argument)
            for actor, argument in zip(self._actors, arguments, strict=True)
        ]
        return self._make_call(name, refs)

    def check(self, timeout_s: float) -> None:
        """Return once every learner has answered; raises as `LearnerCall.result` does."""
        refs = [actor.facts.remote() for actor in self._actors]
        self._make_call("health check", refs).result(timeout_s)

    def restart(self, *, timeout_s: float) -> None:
        """End the learners that live, and start new ones in the same places; see `wait_ready`.

        Raises:
            RunError: a node was lost, and none took its place within `timeout_s`.
        """
        self.shutdown()
        self._placement.wait(timeout_s=timeout_s, say=self._say)
        self._start()

    def pids(self) -> list[int]:
        """Process ids in rank order, each on its own node."""
        return [facts.pid for facts in self._facts]

    def shutdown(self) -> None:
        """End the processes; frozen ones take Ray some seconds. Their places stay reserved."""
        import ray

        if not ray.is_initialized():
            return
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._facts = []

    def _start(self) -> None:
        import ray

        # Ray knows an actor by the name of its class.
        host: Any = ray.remote(type(self._learner_class.__name__, (ActorHost,), {}))
        ranks = range(len(self))
        self._actors = [
            host.options(**self._placement.learner_options(rank)).remote() for rank in ranks
        ]
        # The store through which the ranks of a process group find each other.
        self._meeting_address = self._placement.whereabouts().meeting_address()
        self._store = open_listening_store(self._meeting_address)
        self._heartbeats = HeartbeatReader(self._store, ranks)
        starting = [actor.facts.remote() for actor in self._actors]
        self._facts = self._make_call("start", starting).result(START_TIMEOUT_S)
        refs: list[ObjectRef] = []
        for rank, actor in enumerate(self._actors):
            environment = {**self._build_environment(rank), **self._environment}
            actor.set_environment.remote(
                f"learner-{rank}", environment, meeting_address=self._meeting_address
            )
            refs.append(actor.construct.remote(self._learner_class, self._arguments))
        self._construction = self._make_call(
            f"construction of {self._learner_class.__name__}", refs
        )

    def _build_environment(self, rank: int) -> dict[str, str]:
        nodes = self._placement.shape.learners_per_node
        node, local_rank = self._placement.node_and_local_rank(rank)
        siblings = range(rank - local_rank, rank - local_rank + nodes[node])
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self)),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(nodes[node]),
            "NUM_NODES": str(len(nodes)),
            "FS_LOCAL_RANK": str(rank),
            "TOKENIZERS_PARALLELISM": "false",
            "MASTER_ADDR": self._meeting_address,
            "MASTER_PORT": str(self._store.port),
            STORE_OF_LAUNCHER: "True",  # every rank is a client of the store
        }
        if self._placement.on_gpus:
            gpu_ids = list_gpu_ids([self._facts[sibling] for sibling in siblings])
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
        elif "OMP_NUM_THREADS" not in os.environ:
            facts = self._facts[rank]
            num_neighbours = sum(other.address == facts.address for other in self._facts)
            environment["OMP_NUM_THREADS"] = str(max(1, facts.num_cores // num_neighbours))
        return environment

    def find_gpu_ids(self, rank: int, count: int) -> list[str]:
        """The GPUs of so many ranks of one node, from `rank` on, by their ids."""
        node, local_rank = self._placement.node_and_local_rank(rank)
        first = rank - local_rank
        num_siblings = self._placement.shape.learners_per_node[node]
        gpu_ids = list_gpu_ids(self._facts[first : first + num_siblings])
        return gpu_ids[local_rank : local_rank + count]

    def _make_call(self, what: str, refs: Sequence[ObjectRef]) -> LearnerCall[Any]:
        return LearnerCall(what, refs, self._facts, self._heartbeats)


def list_gpu_ids(facts: Sequence[HostFacts]) -> list[str]:
    """All GPUs of a node's learners, in an order that is the same after a restart.

    The GPU of a learner is the one at its place among them, whichever Ray assigned to it.
    """
    gpu_ids: list[str] = []
    for each in facts:
        gpu_ids += each.gpu_ids
    return sorted(gpu_ids, key=lambda gpu_id: (len(gpu_id), gpu_id))
