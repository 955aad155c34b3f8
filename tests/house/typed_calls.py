"""Calls across processes are checked: `make lint` has mypy read this file, and nothing runs it.

A wrong call is one that mypy refuses. It stands beside an `ignore`, and mypy refuses an `ignore`
that nothing needs.
"""

from typing import Any, assert_type

from open_instruct.batching.rollouts import RankStep
from open_instruct.cluster.learner_group import LearnerGroup, LearnerProcess
from open_instruct.generation.engine import Engine, Outcomes
from open_instruct.generation.engine_host import RayEngine
from open_instruct.generation.engine_pool import EnginePool
from open_instruct.generation.vllm_core import VLLMCore
from open_instruct.grpo_olmo_core_actor import PolicyTrainerOLMoCoreProcess
from open_instruct.weight_sync.receiver import WeightReceiver

LEARNER: type[LearnerProcess] = PolicyTrainerOLMoCoreProcess


def to_learners(learners: LearnerGroup[LearnerProcess], work: list[RankStep]) -> None:
    assert_type(learners.start_each(LearnerProcess.step, work).result(1.0), list[dict[str, float]])
    assert_type(
        learners.start(LearnerProcess.open_weight_channel, 2).result(1.0), list[dict[str, Any]]
    )
    learners.start(LearnerProcess.broadcast_to_vllm, "3")  # type: ignore[arg-type]
    learners.start(LearnerProcess.broadcast_to_vllm)  # type: ignore[call-arg]
    learners.start_each(LearnerProcess.step, [3])  # type: ignore[arg-type]
    learners.start("broadcast_to_vllm", 3)  # type: ignore[arg-type]
    learners.start(Engine.pid)  # type: ignore[arg-type]


def to_engines(pool: EnginePool, engine: RayEngine) -> None:
    assert_type(engine.ask(1.0, Engine.poll, 0.5), Outcomes)
    assert_type(pool.call_all(1.0, Engine.begin_update, True), list[None])
    engine.tell(Engine.cancel, 7)  # type: ignore[arg-type]
    pool.start_all(1.0, Engine.finish_update)  # type: ignore[call-arg]
    pool.start_each(1.0, Engine.open_channel, [7])  # type: ignore[arg-type]


def to_weight_workers(core: VLLMCore) -> None:
    core.call_workers(WeightReceiver.receive_weights)
    core.call_workers(WeightReceiver.open_channel)  # type: ignore[call-arg]
