"""Optimizer steps of DPO, distillation and GRPO on rows of one given length, with every collective
counted.
"""

import os
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import placement_types
from torch.testing._internal.distributed.fake_pg import FakeStore

from open_instruct.batching.steps import collate
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.training import LearnerConfig, TrainingConfig
from open_instruct.core.batch_values import BatchValues
from open_instruct.core.records import Batch, Document, RolloutSample, Span, StepBatch
from open_instruct.models.heads.logprob_head import LogprobHead
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.lora.adapters import find_merged_weights
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.registry import load_objective
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.process import Process, stop_process
from open_instruct.run.cadence import Cadence
from open_instruct.run.console import Console
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import open_pretrained
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training import critic as critic_module
from open_instruct.training import policy as policy_module
from open_instruct.training.loop import Loop
from open_instruct.training.olmo_core.fsdp2 import build_backend
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Reference, build_reference
from open_instruct.training.teacher import TeacherComparison, build_comparison
from open_instruct.weight_sync.sender import WeightSender
from tests.ranks.collectives import RecordCollectives, calls_by_group
from tests.ranks.jobs import grpo_steps
from tests.unit.token_data import shape_of

Rows = list[tuple[str, int, list[int], int]]
"""(collective, bytes, global ranks, calls), sorted."""


def count_each(cases: list[dict[str, Any]], ports: list[int]) -> list[dict[str, Rows]]:
    """What this rank issues in a step (and in a microbatch of the reference pass, for DPO) of every
    case.
    """
    results = []
    for case, port in zip(cases, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        results.append(_count(**case))
        stop_process()
    return results


def _count(algorithm: str, **job: Any) -> dict[str, Any]:
    return _grpo(**job) if algorithm == "grpo" else _of_rows(load_objective(algorithm), **job)


def _of_rows(objective: Objective, flags: list[str], **job: Any) -> dict[str, Rows]:
    config = parse_run(objective.config_class, flags)
    objective.validate(config)
    return _steps(objective, config, grpo_steps.join_run(config), **job)


def _steps(
    objective: Objective,
    config: TrainingConfig,
    run: Run,
    *,
    num_tokens: int,
    num_microbatches: int,
    logits_per_chunk: int | None = None,
) -> dict[str, Rows]:
    pretrained = open_pretrained(config, run.directory.hf_model)
    backend = build_backend(pretrained, run=run, config=config, num_steps=2)
    reference: Reference | None = None
    if (moves := objective.reference_moves(config)).get("update_freq"):
        reference = Reference(model=build_reference(pretrained, run=run, config=config), **moves)
    comparison: TeacherComparison | None = None
    if (named := objective.teacher(config)) is not None:
        opened = TeacherComparison.open(named, pretrained, config=config, layout=run.layout)
        rows: Any = None
        comparison, _ = build_comparison(
            opened, rows, student=pretrained, backend=backend, run=run, config=config
        )
    policy = Policy(
        backend,
        objective.bind(config),
        reference=reference,
        comparison=comparison,
    )
    if logits_per_chunk is not None:
        assert isinstance(policy.model.lm_head, LogprobHead)
        policy.model.lm_head.max_logits_bytes = (
            logits_per_chunk * 4 * pretrained.hf_config.vocab_size
        )
    # No plan counts the numbers that `BoundLoss.prepare` brings together of all ranks.
    policy_module.gather_rows = lambda rows, **_: rows
    policy._check_first_loss = lambda loss, counts: None  # the reference log-probs are made up
    settings: Any = {"start_model": "", "cadence": Cadence(num_steps=2, save_every=1)}
    place: Any = SimpleNamespace(state_dict=dict, load_state_dict=None)
    loop = Loop(policy, place, run=run, flags=config.run, **settings)
    microbatch = _row(
        num_tokens,
        objective.choose_rows(config).documents_per_row,
        has_reference=objective.needs_reference(config),
        values_class=policy.loss.values_class,
    )
    num_rows = num_microbatches * run.layout.data_parallel_world_size
    counts = {
        "rows": num_rows,
        "tokens": num_tokens * num_rows,
        "labels": num_tokens * num_rows // 2,
    }
    step = StepBatch(microbatches=(microbatch,) * num_microbatches, counts=counts)
    counted = {}
    with torch.no_grad():
        counted["reference"] = _counted(lambda: policy.score(microbatch))
    # The second step, as all that follow: the first one, be it as short as can be, makes what
    # lasts.
    loop.take_step(
        [replace(step, microbatches=step.microbatches[:1])], num_tokens=step.counts["tokens"]
    )
    counted["step"] = _counted(lambda: loop.take_step([step], num_tokens=step.counts["tokens"]))
    return counted


def _grpo(
    flags: list[str], *, num_tokens: int, num_completions: int, sync_bucket_bytes: int
) -> dict[str, Any]:
    learner = grpo_steps.Learner(flags, num_steps=2)
    critic_module.gather_rows = lambda rows, **_: rows
    policy_module.gather_rows = lambda rows, **_: rows
    samples = [
        RolloutSample(
            document=_document(num_tokens),
            engine_logprobs=(-6.0,) * (num_tokens // 2),
            advantage=(-1.0) ** index,
        )
        for index in range(num_completions)
    ]
    learner.learn_from(samples)
    counted = _counted(lambda: learner.learn_from(samples))
    merging = _counted(lambda: find_merged_weights(learner.policy.model))
    is_alone = learner.config.sent_adapter is not None
    sync = messages(
        learner.policy.model,
        learner.hf_config,
        bucket_bytes=sync_bucket_bytes,
        adapter_alone=is_alone,
    )
    return {"step": counted, "sync": sync, "merging": merging}


def messages(
    model: Any, hf_config: Any, *, bucket_bytes: int, adapter_alone: bool = False
) -> list[tuple[int, int, int]]:
    """(bytes that this rank broadcasts of a bucket of a weight sync, bytes of the whole bucket,
    buckets), sorted.
    """
    sender = WeightSender(
        model,
        TensorNames(hf_config),
        backend="gloo",
        dtype=torch.bfloat16,
        bucket_bytes=bucket_bytes,
        timeout_s=1.0,
        adapter_alone=adapter_alone,
    )
    spans = [(bucket.span(dist.get_rank()), bucket.num_bytes) for bucket in sender.manifest.buckets]
    kinds = Counter((stop - start, num_bytes) for (start, stop), num_bytes in spans)
    return sorted(
        (own_bytes, num_bytes, num_calls) for (own_bytes, num_bytes), num_calls in kinds.items()
    )


def _counted(work: Any) -> Rows:
    has_counts = dist.get_backend() == "gloo"
    before = calls_by_group() if has_counts else Counter()
    with RecordCollectives() as recorder:
        work()
    by_group: Counter[tuple[int, ...]] = Counter()
    for kind, num_calls in recorder.issued.items():
        by_group[kind.ranks] += num_calls
    if has_counts:
        assert by_group == calls_by_group() - before, (
            "the groups have seen other calls than were recorded"
        )
    return [(*kind, num_calls) for kind, num_calls in sorted(recorder.issued.items())]


def _row(
    num_tokens: int, num_documents: int, *, has_reference: bool, values_class: type[BatchValues]
) -> Batch:
    """One row of so many tokens: of one document, or of a pair."""
    document = _document(num_tokens // num_documents)
    reference_logps_1D = None
    if has_reference:
        reference_logps_1D = np.full((1, num_documents), -6.0 * (num_tokens // 4), dtype=np.float32)
    return collate(
        [(document,) * num_documents],
        (0,),
        shape=shape_of(),
        reference_logps_ND=reference_logps_1D,
        values_class=values_class,
    )


def _document(num_tokens: int) -> Document:
    """Its second half is learned from."""
    return Document(
        token_ids=tuple(3 + token % 250 for token in range(num_tokens)),
        responses=(Span(start=num_tokens - num_tokens // 2, stop=num_tokens),),
    )


def count_pretended(cases: list[dict[str, Any]]) -> list[dict[str, Rows]]:
    """What rank 0 of a larger world issues in a step: a group that sends nothing stands for the
    others.

    Tensors are split anew as on CUDA, by an all-to-all, which DTensor does without where there is
    no CUDA.
    """
    placement_types.shard_dim_alltoall = _swap_as_on_cuda
    of_memory = ("peak_memory_gib", "peak_reserved_gib", "allocation_retries/max")
    policy_module.measure_peak_memory = lambda device: dict.fromkeys(of_memory, 0.0)  # type: ignore[assignment]
    results = []
    for case in cases:
        job = dict(case)
        gpus_per_node = job.pop("gpus_per_node")
        dist.init_process_group("fake", rank=0, world_size=sum(gpus_per_node), store=FakeStore())
        grpo_steps.join_run = partial(_join_nobody, gpus_per_node=gpus_per_node)
        results.append(_count(**job))
        stop_process()
    return results


def _join_nobody(config: LearnerConfig, *, gpus_per_node: list[int]) -> Run:
    layout = find_layout(config.parallel, gpus_per_node, config.backend)
    process = Process(
        rank=0,
        local_rank=0,
        device=torch.device("cpu"),
        gpus_per_node=layout.gpus_per_node,
    )
    directory = RunDirectory(path=Path(config.run.output_dir))
    return Run(process=process, layout=layout, directory=directory, console=Console(speaks=False))


def _swap_as_on_cuda(
    local: torch.Tensor, gather_dim: int, shard_dim: int, mesh: Any, mesh_dim: int
) -> torch.Tensor:
    group = mesh.get_group(mesh_dim).group_name
    return torch.ops._dtensor.shard_dim_alltoall(local, gather_dim, shard_dim, group)
