"""The small parts of a run: metrics, the loader, optimizers, memory, the run directory."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from olmo_core.nn.transformer import Transformer

from open_instruct.batching.steps import BatchShape, build_step_batch, collate
from open_instruct.commands.tiny_model import SIZES, tiny_config
from open_instruct.config.sections import OptimSection
from open_instruct.config.sharding_sections import MemorySection
from open_instruct.core.batch_values import RowValues
from open_instruct.core.errors import InputError
from open_instruct.core.records import Metric
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.build import build_model
from open_instruct.parallel.reduce import combine_microbatches, reduce_metrics
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.run_directory import RunDirectory
from open_instruct.training.loop import merge_rows
from open_instruct.training.measure.speed import measure_peak_memory, token_fractions
from open_instruct.training.model import kernels
from open_instruct.training.model.kernels import build_activation_checkpointing, kernel_warnings
from open_instruct.training.optim.muon import MuonWithAdamW
from open_instruct.training.optim.optimizers import (
    HostSkipStepAdamW,
    SkipStepHistory,
    build_optimizer_config,
    build_scheduler,
)
from open_instruct.training.row_cache import RowCache
from open_instruct.training.scoring import open_reference_cache
from tests.refusals import refused

CPU = torch.device("cpu")


def make_pairs(num_pairs: int) -> TokenDataset:
    """Pairs of 2 prompt tokens and replies of 1 to 5."""
    token_ids: list[int] = []
    edges: list[int] = []
    lengths = []
    for pair in range(num_pairs):
        start = len(token_ids)
        chosen, rejected = 1 + pair % 5, 1 + (3 * pair + 1) % 5
        token_ids += range(2 + chosen + rejected)
        edges += (start, start + 2, start + 2 + chosen, start + 2 + chosen + rejected)
        lengths.append((4 + chosen + rejected, chosen + rejected))
    keys = np.arange(num_pairs * 32, dtype=np.uint32).astype(np.uint8).reshape(num_pairs, 32)
    keys[:, 0] = np.arange(num_pairs)
    return TokenDataset(
        documents_per_row=2,
        token_ids_T=np.array(token_ids, dtype=np.int32),
        edges_E=np.array(edges, dtype=np.int64),
        details_C=np.zeros(0, dtype=np.uint8),
        bounds_N4=np.array(
            [(4 * pair, 4 * pair + 4, 0, 0) for pair in range(num_pairs)], dtype=np.int64
        ),
        num_tokens=np.array([both for both, _ in lengths], dtype=np.int64),
        num_label_tokens=np.array([labels for _, labels in lengths], dtype=np.int64),
        keys_N32=keys,
    )


def shape_of(**changes: Any) -> BatchShape:
    settings = {
        "max_samples_per_microbatch": 2,
        "max_microbatches": 2,
        "max_seq_length": 8,
        "packing": True,
    }
    return BatchShape(**(settings | {"documents_per_sample": 2} | changes))


class TestMetrics:
    def test_each_reduction_of_one_process(self) -> None:
        metrics = {
            "mean": Metric(value=2.0, weight=3.0),
            "sum": Metric(value=5.0, reduction="sum"),
            "max": Metric(value=-1.0, reduction="max"),
            "of_nothing": Metric(value=float("nan"), weight=0.0),
        }
        reduced = reduce_metrics(metrics, group=None, device=CPU)
        assert math.isnan(reduced.pop("of_nothing"))
        assert reduced == {"mean": 2.0, "sum": 5.0, "max": -1.0}

    def test_microbatches_count_by_their_weight(self) -> None:
        weighted = [(1.0, 3.0), (5.0, 1.0), (0.0, 0.0)]
        losses = [
            {"loss": Metric(value=torch.tensor(value), weight=weight)} for value, weight in weighted
        ]
        assert reduce_metrics(combine_microbatches(losses), group=None, device=CPU) == {"loss": 2.0}

    def test_padding_fraction_counts_slots(self) -> None:
        pairs = make_pairs(2)
        batch = collate([pairs[0], pairs[1]], (0, 1), shape=shape_of(packing=False))
        slots = batch.packed.input_ids_BT.numel()
        metric = token_fractions(batch.packed)["padding_fraction"]
        assert metric.weight == slots
        assert metric.value == pytest.approx(1 - int(pairs.num_tokens.sum()) / slots)

    def test_resumed_file_keeps_rows_up_to_its_step(self, tmp_path: Path) -> None:
        file = MetricsLog(tmp_path / "metrics.jsonl")
        for step in range(1, 5):
            file.write({"step": step, "loss": 0.5})
        with file.path.open("a") as raw:
            raw.write('{"step": 5, "lo')
        file.keep_until(2)
        assert [json.loads(line)["step"] for line in file.path.read_text().splitlines()] == [1, 2]


class TestLoading:
    @pytest.mark.parametrize("num_ranks", [1, 2, 4])
    def test_ranks_share_a_global_batch(self, num_ranks: int) -> None:
        pairs = make_pairs(4)
        steps = [
            build_step_batch(
                pairs, [(3,), (1,), (0,), (2,)], shape=shape_of(), rank=rank, num_ranks=num_ranks
            )
            for rank in range(num_ranks)
        ]
        rows = [row for step in steps for batch in step.microbatches for row in batch.row_ids]
        assert sorted(rows) == [0, 1, 2, 3]
        counts = {
            "rows": 4,
            "labels": int(pairs.num_label_tokens.sum()),
            "tokens": int(pairs.num_tokens.sum()),
        }
        assert [step.counts for step in steps] == [counts] * num_ranks
        assert len({len(step.microbatches) for step in steps}) == 1

    def test_reference_follows_its_rows(self) -> None:
        pairs = make_pairs(4)
        reference_logps_N2 = np.array([[row, 10 + row] for row in range(4)], dtype=np.float32)
        step = build_step_batch(
            pairs,
            [(2,), (0,), (3,)],
            shape=shape_of(),
            rank=0,
            num_ranks=1,
            reference_logps_ND=reference_logps_N2,
        )
        for batch in step.microbatches:
            expected = [*batch.row_ids, *(10 + row for row in batch.row_ids)]
            reference_logps_S = RowValues.read(batch.values).reference_logps_S
            assert reference_logps_S is not None and reference_logps_S.tolist() == expected


class TestReferenceCache:
    def fill(self, folder: Path, pairs: TokenDataset) -> RowCache:
        cache = RowCache(folder / "cache.safetensors")
        for row in range(len(pairs)):
            cache.add(pairs.key(row), np.array([2 * row, 2 * row + 1], dtype=np.float32))
        cache.write()
        return cache

    def test_cached_logprobs_are_found_by_another_mixture(self, tmp_path: Path) -> None:
        again = RowCache(self.fill(tmp_path, make_pairs(6)).path)
        pairs = make_pairs(6)
        order = [5, 1, 1]
        pairs.keys_N32 = pairs.keys_N32[order]
        assert again.find_missing_rows(pairs) == []
        assert again.read_numbers(pairs).tolist() == [[10, 11], [2, 3], [2, 3]]

    def test_other_weights_precision_or_layout_find_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(dist, "barrier", lambda: None)

        def opened(*, weights: str = "a", precision: str = "float32", **layout: Any) -> RowCache:
            pretrained: Any = SimpleNamespace(
                files=SimpleNamespace(fingerprint=weights * 64),
                hf_config=SimpleNamespace(to_dict=lambda: {"model_type": "olmo2"}),
            )
            return open_reference_cache(
                tmp_path, pretrained, precision=precision, shape=replace(shape_of(), **layout)
            )

        cache = opened()
        cache.add(make_pairs(1).key(0), np.zeros(2, dtype=np.float32))
        cache.write()
        assert opened().find_missing_rows(make_pairs(1)) == []
        others: list[dict[str, Any]] = [
            {"weights": "b"},
            {"precision": "bfloat16"},
            {"packing": False},
        ]
        others += [
            {"precision": "float32-nf4"},
            {"documents_per_sample": 3},
            {"prefix_sharing": "on"},
        ]
        assert all(opened(**other).find_missing_rows(make_pairs(1)) == [0] for other in others)
        assert len({opened(**other).path for other in others}) == len(others)

    def test_damaged_file_counts_as_empty(self, tmp_path: Path) -> None:
        cache = self.fill(tmp_path, make_pairs(3))
        cache.path.write_bytes(cache.path.read_bytes()[:40])
        again = RowCache(cache.path)
        assert len(again) == 0


class TestOptimizers:
    def test_schedules_by_hand(self) -> None:
        def rates(shape: str, warmup_ratio: float) -> list[float]:
            optim = OptimSection(lr_scheduler_type=shape, warmup_ratio=warmup_ratio)  # type: ignore[arg-type]
            scheduler = build_scheduler(optim, num_steps=4)
            return [float(scheduler.get_lr(1.0, step, 4)) for step in (1, 2, 3, 4)]

        assert rates("linear", 0.0) == pytest.approx([0.8, 0.6, 0.4, 0.2])
        assert rates("linear", 0.5) == pytest.approx([0.5, 1.0, 2 / 3, 1 / 3])
        assert rates("constant", 0.5) == pytest.approx([0.5, 1.0, 1.0, 1.0])
        assert rates("cosine", 0.0) == pytest.approx(
            [(1 + math.cos(math.pi * step / 5)) / 2 for step in (1, 2, 3, 4)]
        )

    @pytest.mark.parametrize(
        ("on", "decayed"),
        [("linear", {"w.weight"}), ("matrices", {"w.weight", "embeddings.weight"}), ("all", None)],
    )
    @pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
    def test_weight_decay_shrinks_what_was_asked(
        self, on: Any, decayed: set[str] | None, name: Any
    ) -> None:
        model = torch.nn.ModuleDict(
            {
                "embeddings": torch.nn.Embedding(3, 2),
                "w": torch.nn.Linear(2, 2),
                "norm": torch.nn.RMSNorm(2),
            }
        )
        model["rates"] = torch.nn.ParameterDict(
            {name: torch.ones(2) for name in ("A_log", "dt_bias")}
        )
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        optim = OptimSection(
            optimizer=name, weight_decay=0.1, weight_decay_on=on, learning_rate=0.5
        )
        optimizer = build_optimizer_config(optim, device=CPU, names=before).build(model)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            factor = 0.95 if decayed is None or name in decayed else 1.0
            torch.testing.assert_close(parameter.detach(), factor * before[name])

    @pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "skip_step_adamw", "muon"])
    def test_epsilon_bounds_what_a_small_gradient_does(self, optimizer: Any) -> None:
        """The first step of Adam is lr * g / (|g| + epsilon): half of it where the two are
        equal.
        """
        model = torch.nn.ModuleDict({"norm": torch.nn.RMSNorm(2)})
        optim = OptimSection(optimizer=optimizer, learning_rate=0.5, adam_epsilon=1e-3)
        built = build_optimizer_config(optim, device=CPU, names=()).build(model)
        model["norm"].weight.grad = torch.full((2,), 1e-3)
        if optimizer == "skip_step_adamw":
            built.latest_loss, built.latest_grad_norm = torch.tensor(1.0), torch.tensor(1.0)
        built.step()
        torch.testing.assert_close(model["norm"].weight.detach(), torch.full((2,), 0.75))

    @pytest.mark.parametrize("saved", [torch.tensor(3.0), 3.0], ids=["today's", "plain numbers"])
    def test_window_of_skipped_steps_is_read_from_older_checkpoints_too(self, saved: Any) -> None:
        optimizer = HostSkipStepAdamW([torch.nn.Parameter(torch.ones(2))])
        SkipStepHistory(optimizer).load_state_dict({"losses": [saved], "grad_norms": [saved]})
        optimizer.latest_loss = optimizer.latest_grad_norm = torch.tensor(1.0)
        for window in (optimizer._losses, optimizer._grad_norms):
            assert torch.stack(window).tolist() == [3.0, 1.0]

    def test_muon_is_torchs_on_matrices_and_adamw_elsewhere(self) -> None:
        torch.manual_seed(0)
        matrix, vector = torch.randn(4, 3), torch.randn(3)

        def train(build: Any, *starts: torch.Tensor) -> list[torch.Tensor]:
            parameters = [torch.nn.Parameter(start.clone()) for start in starts]
            optimizer = build(parameters)
            for step in range(3):
                for parameter in parameters:
                    parameter.grad = torch.sin(parameter.detach() + step)
                optimizer.step()
                if step == 1:  # what a checkpoint does
                    optimizer.load_state_dict(optimizer.state_dict())
            return [parameter.detach() for parameter in parameters]

        def ours(parameters: list[Any]) -> MuonWithAdamW:
            groups = [
                {"params": parameters[:1], "use_muon": True},
                {"params": parameters[1:], "use_muon": False},
            ]
            return MuonWithAdamW(groups, lr=0.1, weight_decay=0.1)

        both = train(ours, matrix, vector)
        (muon,) = train(
            lambda ps: torch.optim.Muon(
                ps, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            ),
            matrix,
        )
        (adamw,) = train(lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1), vector)
        torch.testing.assert_close(both, [muon, adamw], rtol=0, atol=0)


def small_model(family: Any) -> Transformer:
    return build_model(tiny_config(family, SIZES["tiny"], vocab_size=512, tie=False))


class TestMemory:
    @pytest.mark.parametrize(
        ("flags", "device", "mode", "warned"),
        [
            ({}, "cpu", None, False),
            ({"activation_checkpointing": "full"}, "cpu", "full", False),
            ({"activation_checkpointing": "selected_modules"}, "cuda", "selected_modules", False),
            ({"activation_memory_budget": 0.5, "compile_model": True}, "cuda", "budget", False),
            ({"activation_memory_budget": 0.5}, "cuda", "budget", False),
            ({"activation_memory_budget": 0.5}, "cpu", "full", True),
            ({"activation_memory_budget": 0.5, "compile_model": True}, "cpu", "full", True),
            ({"compile_model": True}, "cpu", None, False),
        ],
    )
    def test_table_of_the_docs(
        self,
        flags: dict[str, Any],
        device: str,
        mode: str | None,
        warned: bool,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(kernels, "compiler_problem", lambda device: None)
        memory, where = MemorySection(**flags), torch.device(device)
        config = build_activation_checkpointing(memory, model=small_model("olmo2"), device=where)
        assert (config.mode if config else None) == mode
        assert any(kernel_warnings(memory, param_dtype="bfloat16", device=where)) == warned

    def selected(self, *patterns: str, family: Any = "olmo2") -> list[str]:
        memory = MemorySection(activation_checkpointing="selected_modules")
        memory.activation_checkpointing_modules = (
            list(patterns) or memory.activation_checkpointing_modules
        )
        config = build_activation_checkpointing(
            memory, model=small_model(family), device=torch.device("cpu")
        )
        assert config is not None and config.modules is not None
        return config.modules

    @pytest.mark.parametrize("family", ["olmo2", "qwen3", "llama"])
    def test_default_is_all_six_parts_of_every_block(self, family: str) -> None:
        parts = ("attention", "attention_norm", "attention_residual_stream")
        parts += tuple(part.replace("attention", "feed_forward") for part in parts)
        of_blocks = [
            f"blocks.{layer}.{part}"
            for layer in range(SIZES["tiny"]["num_hidden_layers"])
            for part in parts
        ]
        assert sorted(self.selected(family=family)) == sorted(of_blocks)

    def test_star_stops_at_dots_and_parts_of_what_is_named_are_left_out(self) -> None:
        layers = range(SIZES["tiny"]["num_hidden_layers"])
        assert self.selected("blocks.*.attention.w_q") == [
            f"blocks.{i}.attention.w_q" for i in layers
        ]
        assert self.selected("blocks.*.attention.w_*", "blocks.*.attention") == [
            f"blocks.{i}.attention" for i in layers
        ]

    @pytest.mark.parametrize("pattern", ["blocks.*.mlp", "blocks.*.w_q", "*_norm", "feed_forward"])
    def test_pattern_that_names_nothing_is_refused(self, pattern: str) -> None:
        with pytest.raises(
            InputError,
            match=re.escape(f"{pattern}: the model has no module") + r".*blocks\.\*\.attention,",
        ):
            self.selected("blocks.*.attention", pattern)


class TestRunDirectory:
    def test_overwriting_spares_what_is_not_ours(self, tmp_path: Path) -> None:
        for name in ("step10", "hf_model", "traces", "step_by_step"):
            (tmp_path / name).mkdir()
        for name in ("metrics.jsonl", "eval.jsonl", "pids.json", "notes.txt"):
            (tmp_path / name).write_text("")
        RunDirectory(path=tmp_path).remove_earlier_run()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_by_step"]

    def test_file_is_no_folder(self, tmp_path: Path) -> None:
        file = tmp_path / "out"
        file.write_text("")
        with refused("unreadable_file", "output_dir", "out cannot"):
            RunDirectory(path=file).create()

    def test_second_evaluation_replaces_the_first(self, tmp_path: Path) -> None:
        directory = RunDirectory(path=tmp_path)
        for step, score in ((0, 0.4), (8, 0.5), (8, 0.6)):
            directory.write_evaluation({"step": step, "score": score})
        rows = [json.loads(line) for line in directory.evaluations.read_text().splitlines()]
        assert rows == [{"step": 0, "score": 0.4}, {"step": 8, "score": 0.6}]


def test_number_of_steps() -> None:
    layout = ShardLayout(gpus_per_node=(2,), shard_degree=2, num_replicas=1)
    shape = shape_of()  # 4 pairs a rank, 8 a step
    assert [
        shape.num_steps_per_epoch(num_samples, layout=layout) for num_samples in (1, 8, 16, 17)
    ] == [1, 1, 2, 3]


def test_gpus_memory_is_its_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peaks of the run so far: nobody resets them, so that several updates' are those of the
    last.
    """
    stats = {
        "allocated_bytes.all.peak": 3 * 2**30,
        "reserved_bytes.all.peak": 5 * 2**30,
        "num_alloc_retries": 2,
    }
    stats |= {"allocated_bytes.all.current": 1, "reserved_bytes.all.current": 1, "num_ooms": 9}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    of_gpu = measure_peak_memory(torch.device("cuda", 0))
    assert of_gpu == {"peak_memory_gib": 3.0, "peak_reserved_gib": 5.0, "allocation_retries/max": 2}
    assert merge_rows([dict.fromkeys(of_gpu, 0.0), of_gpu]) == of_gpu
    assert set(measure_peak_memory(CPU)) == {"peak_memory_gib"}
