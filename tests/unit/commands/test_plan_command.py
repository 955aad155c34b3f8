"""`open-instruct plan`: what it is asked, prints, draws and advises, and the check when a run
starts.
"""

import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from html.parser import HTMLParser
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from open_instruct.cli import main
from open_instruct.commands import plan as plan_command
from open_instruct.commands import plan as request
from open_instruct.commands.plan import PlanRequest, parse_request
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.planning.advice import Advice, change_to_fit
from open_instruct.planning.memory.memory_model import MemoryModel
from open_instruct.planning.memory.phases import memory_by_phase
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.presentation import LETTERS, PARTS, render_words, traffic_rows
from open_instruct.planning.step_time import flops_per_step
from open_instruct.planning.subject import units
from open_instruct.planning.subject.devices import find_device
from open_instruct.planning.subject.units import GIB
from open_instruct.report.plan_page import MAX_LINES, html_page, print_plan
from tests.refusals import refused
from tests.unit.planning.test_plan_check import FIELDS

REPOSITORY = Path(__file__).parents[3]
DOCS_PAGE = REPOSITORY / "docs" / "planning.md"

OLMO_7B = ["--model_name_or_path", "allenai/OLMo-2-1124-7B"]
OLMO_32B = ["--model_name_or_path", "allenai/OLMo-2-0325-32B"]
TWO_NODES = ["--num_nodes", "2", "--gpus_per_node", "8"]
FULL = ["--activation_checkpointing", "full"]
KEEPS_ALL = ["--activation_checkpointing", "none"]
DPO_7B = ["dpo", *OLMO_7B, *TWO_NODES]
DPO_32B = ["dpo", *OLMO_32B, *FULL, "--per_device_train_batch_size", "1", "--gpus_per_node", "8"]
TENSOR, CONTEXT = ["--tensor_parallel_degree"], ["--context_parallel_degree"]
SHARED = ["--shared_prompt_tokens"]
LEARNERS = ["--num_learners_per_node"]
GRPO_7B = ["grpo", *OLMO_7B, *LEARNERS]
ON_ONE_GPU = ["grpo", "--model_name_or_path", "Qwen/Qwen3-1.7B", "--single_gpu_mode"]
QWEN3_30B_A3B = json.loads(
    '{"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, '
    '"moe_intermediate_size": 768, "hidden_size": 2048, "intermediate_size": 6144, '
    '"num_hidden_layers": 48, "vocab_size": 151936, "dtype": "bfloat16", "num_attention_heads": '
    '32, "num_key_value_heads": 4, "head_dim": 128}'
)
STEPS = ["--gradient_accumulation_steps", "16"]
ESCAPE = "\x1b"


def requested(*words: str) -> PlanRequest:
    return parse_request(words)


def planned(*words: str) -> Plan:
    return make_plan(requested(*words).setting)


def page(plan: Plan, *, console: Console | None = None, encoding: str = "utf-8") -> str:
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    print_plan(plan, Advice(plan), console or Console(file=file, width=80))
    file.flush()
    return file.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]


class TestRequest:
    @pytest.mark.parametrize(
        ("words", "nodes"),
        [
            (["--gpus_per_node", "2x2", "4"], (2, 2, 4)),
            (["--num_nodes", "2", "--gpus_per_node", "2", "4"], (2, 4)),
            (["--num_nodes", "3", "--gpus_per_node", "4"], (4, 4, 4)),
        ],
    )
    def test_nodes(self, words: list[str], nodes: tuple[int, ...]) -> None:
        """Flags of the data and the output folder need not be given."""
        assert requested("sft", *OLMO_7B, *words).setting.gpus_per_node == nodes

    def test_file_of_a_run(self) -> None:
        file = str(REPOSITORY / "configs" / "dpo" / "olmo2_32b_32gpu_tp.yaml")
        plan = planned("dpo", file, "--gpus_per_node", "4x8", "--max_seq_length", "2048")
        assert (plan.layout.shard_degree, plan.layout.tensor_parallel_degree) == (8, 2)
        assert (plan.workload.rows.length, plan.workload.checkpointing) == (2048, "full")

    @pytest.mark.parametrize(
        ("words", "learners"),
        [
            (["--num_learners_per_node", "8", "8"], (8, 8)),
            (["--gpus_per_node", "8", "8"], (8, 8)),
            (["--num_learners_per_node", "8", "8", "--gpus_per_node", "4x8"], (8, 8)),
            # One learner is the default too, but the other GPUs are then not learners'.
            (["--num_learners_per_node", "1", "--gpus_per_node", "16"], (1,)),
            (["run.yaml", "--gpus_per_node", "16"], (1,)),
        ],
    )
    def test_learners_are_planned_and_engines_come_on_top(
        self,
        words: list[str],
        learners: tuple[int, ...],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("run.yaml").write_text("num_learners_per_node: [1]\n")
        engines = ["--vllm_num_engines", "4", "--vllm_tensor_parallel_size", "2"]
        plan = planned("grpo", *words, *OLMO_7B, *engines)
        assert (plan.layout.gpus_per_node, plan.workload.num_engines) == (learners, 4)

    def test_links_of_its_own(self) -> None:
        device = requested(*DPO_7B, "--cross_node_gb_s", "12.5").setting.device
        assert device.cross_node_gb_s == 12.5
        assert device.in_node_gb_s == requested(*DPO_7B).setting.device.in_node_gb_s


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], ("stray_word", None, "grpo")),
        (["dpi", *OLMO_7B], ("stray_word", None, "'dpi'", "dpo")),
        (["dpo", *OLMO_7B], ("missing_flag", "gpus_per_node")),
        (["dpo", *TWO_NODES], ("missing_flag", "model_name_or_path")),
        (["dpo", *OLMO_7B, "--num_nodes", "2"], ("layout", "num_nodes", "0", "--gpus_per_node")),
        (
            ["dpo", *OLMO_7B, "--num_nodes", "0", "--gpus_per_node", "8"],
            ("out_of_range", "num_nodes", "--num_nodes 0", "1"),
        ),
        (
            ["dpo", *OLMO_7B, "--num_nodes", "3", "--gpus_per_node", "8", "8"],
            ("layout", "num_nodes", "2", "--gpus_per_node"),
        ),
        (
            ["dpo", *OLMO_7B, "--num_nodes", "9999", "--gpus_per_node", "8"],
            ("out_of_range", "gpus_per_node", "9999x8", "10000"),
        ),
        (["dpo", *OLMO_7B, "--gpus_per_node", "-8"], ("bad_value", "gpus_per_node", "'-8'", "1")),
        (["dpo", *OLMO_7B, "--gpus_per_node", "eight"], ("bad_value", "gpus_per_node", "8")),
        (
            [*DPO_7B, "--fsdp_shard_degree", "3"],
            ("layout", "fsdp_shard_degree", "--fsdp_shard_degree 3", "16"),
        ),
        (
            [*DPO_32B[:3], *TWO_NODES, *TENSOR, "16"],
            ("layout", "tensor_parallel_degree", "allenai/OLMo-2-0325-32B", "1", "4"),
        ),
        (
            [*DPO_32B[:3], *TWO_NODES, *TENSOR, "4", *CONTEXT, "4"],
            ("layout", "tensor_parallel_degree", "16", "40"),
        ),
        (
            [*DPO_7B, "--max_seq_length", "-5"],
            ("out_of_range", "max_seq_length", "--max_seq_length -5", "2"),
        ),
        (["dpo", "--model_name_or_path", "allenai/OLMo-2-9B", *TWO_NODES], ("bad_model", None)),
        ([*DPO_7B, "--gpu", "h1000"], ("bad_value", "gpu")),
        ([*DPO_7B, "--mfu", "1.5"], ("out_of_range", "mfu", "--mfu 1.5", "0")),
        (
            [*DPO_7B, "--in_node_gb_s", "-450"],
            ("out_of_range", "in_node_gb_s", "--in_node_gb_s -450.0"),
        ),
        ([*DPO_7B, *SHARED, "-1"], ("out_of_range", "shared_prompt_tokens", "1", "2047")),
        ([*DPO_7B, *SHARED, "2048"], ("out_of_range", "shared_prompt_tokens", "1", "2047")),
        (
            [*DPO_7B, *SHARED, "9", "--prefix_sharing", "off"],
            ("unread_flag", "shared_prompt_tokens", "--prefix_sharing"),
        ),
        (
            [*DPO_7B, *SHARED, "9", "--no_packing"],
            ("unread_flag", "shared_prompt_tokens", "--no_packing"),
        ),
        (["sft", *DPO_7B[1:], *SHARED, "9"], ("unread_flag", "shared_prompt_tokens")),
        (
            ["grpo", *DPO_7B[1:], *SHARED, "257"],
            ("out_of_range", "shared_prompt_tokens", "256", "--max_prompt_token_length"),
        ),
        ([*DPO_7B, "--htlm", "x.html"], ("unknown_flag", "htlm", "--html")),
        (
            [*DPO_7B, *KEEPS_ALL, "--html", "gone/plan.html"],
            ("unreadable_file", "html", "gone/plan.html"),
        ),
        ([*DPO_7B, *KEEPS_ALL, "--html", "/dev/full"], ("unreadable_file", "html", "dev/full")),
        (
            ["grpo", *OLMO_7B, *LEARNERS, "8", "8", "--gpus_per_node", "8"],
            ("layout", "num_learners_per_node"),
        ),
        (
            ["grpo", *OLMO_7B, *LEARNERS, "8", "--gpus_per_node", "8"],
            ("layout", "num_learners_per_node", "0", "8"),
        ),
    ],
)
def test_bad_input_is_refused_by_kind_and_flag(words: list[str], problem: tuple[Any, ...]) -> None:
    with refused(*problem):
        plan_command.main(words)


def test_refusal_is_one_line_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "dpi", *OLMO_7B]) == EXIT_INPUT
    streams = capsys.readouterr()
    assert streams.out == "" and len(streams.err.splitlines()) == 1


EXPERTS_30B = ["dpo", "--model_name_or_path", "Qwen/Qwen3-30B-A3B", *TWO_NODES]


class TestExperts:
    """A plan refuses what the run refuses of them, in its words."""

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (
                "--use_lora --use_qlora",
                "--use_qlora: experts lie in stacks, which are not held in 4 bits",
            ),
            ("--optimizer muon", "--optimizer muon: it takes matrices"),
            (
                "--float8_linears tensorwise",
                "--float8_linears: experts multiply in --param_dtype alone",
            ),
        ],
    )
    def test_settings_that_cannot_train_experts_are_refused(self, flags: str, words: str) -> None:
        with pytest.raises(InputError, match=words):
            planned(*EXPERTS_30B, *flags.split())
        planned(*DPO_7B, *flags.split())

    @pytest.mark.parametrize("flags", ["--no_packing", "--context_parallel_degree 2"])
    def test_settings_without_balance_loss_are_refused(self, tmp_path: Path, flags: str) -> None:
        for balances in (True, False):
            fields = QWEN3_30B_A3B | {"output_router_logits": balances}
            (tmp_path / "config.json").write_text(json.dumps(fields))
            words = ["dpo", "--model_name_or_path", str(tmp_path), *TWO_NODES, *flags.split()]
            with (
                pytest.raises(InputError, match="router_logits = true")
                if balances
                else nullcontext()
            ):
                planned(*words)


class TestPlan:
    def test_plan_has_the_layout_and_workload_of_the_run(self) -> None:
        plan = planned(*DPO_7B, *FULL)
        assert (plan.layout.shard_degree, plan.layout.num_replicas) == (8, 2)
        assert plan.phases == memory_by_phase(
            MemoryModel(plan.setting.shape, plan.layout, plan.workload)
        )
        assert plan.peak.total_bytes == max(phase.total_bytes for phase in plan.phases)
        assert plan.headroom_bytes == plan.setting.device.memory_bytes - plan.peak.total_bytes
        assert plan.tokens_per_step == 16 * 8 * 2 * 2048

    def test_completions_of_grpo_are_the_same_on_any_number_of_ranks(self) -> None:
        words = [
            "grpo",
            *OLMO_7B,
            "--num_unique_prompts_rollout",
            "64",
            "--num_samples_per_prompt_rollout",
            "8",
        ]
        steps = {
            planned(*words, "--gpus_per_node", nodes).tokens_per_step
            for nodes in ("8", "2x8", "4x8")
        }
        assert steps == {64 * 8 * 512}

    def test_other_flags_are_the_same_as_on_the_command_line(self) -> None:
        setting = requested(*DPO_7B).setting
        changed = setting.with_flags(
            {"fsdp_shard_degree": 4, "activation_checkpointing": "full", "num_nodes": 4}
        )
        words = ["--fsdp_shard_degree", "4", *FULL, "--num_nodes", "4", "--gpus_per_node", "8"]
        asked = requested("dpo", *OLMO_7B, *words).setting
        assert changed.gpus_per_node == asked.gpus_per_node
        assert make_plan(changed).phases == make_plan(asked).phases
        with refused("out_of_range", "per_device_train_batch_size", "0"):
            setting.with_flags({"per_device_train_batch_size": 0})


class TestSharedPrompts:
    def test_pair(self) -> None:
        """8 pairs of 2 x 2048 tokens, prompts of 1025: a prompt's last token is computed for each
        reply.
        """
        run = [*DPO_7B, *KEEPS_ALL]
        whole, shared = planned(*run), planned(*run, "--shared_prompt_tokens", "1025")
        assert (
            whole.workload.tokens_per_microbatch
            == shared.workload.row_tokens_per_microbatch
            == 8 * 4096
        )
        assert shared.workload.tokens_per_microbatch == 8 * (1024 + 2 * 1024)
        assert shared.tokens_per_step == whole.tokens_per_step
        assert shared.time.compute_s < 0.8 * whole.time.compute_s
        assert shared.peak.total_bytes < 0.85 * whole.peak.total_bytes
        assert "24,576 tokens in a row stand for 32,768" in " ".join(page(shared).split())

    def test_group_needs_fewer_microbatches(self) -> None:
        """16 prompts x 4 completions on 2 learners: 32 of 512 tokens each, 8 to a row of 4096,
        shared 12.
        """
        assert planned(*GRPO_7B, "2").workload.num_microbatches == 4
        shared = planned(*GRPO_7B, "2", "--shared_prompt_tokens", "256").workload
        assert shared.rows.count_tokens(4) == 255 + 4 * 257 == 1283
        assert shared.num_microbatches == 3
        # 11 completions in the fullest: two whole groups and three of a third.
        assert shared.tokens_per_microbatch == 3 * 255 + 11 * 257 < shared.pack_tokens == 4096
        assert shared.row_tokens_per_microbatch == 11 * 512

    def test_padding_of_a_row_takes_memory_and_no_time(self) -> None:
        """Sequences of 512 tokens: a pack of 1,000 holds one of them, and shorter ones fill it."""
        exact, loose = (
            planned(*GRPO_7B, "2", "--pack_length", length) for length in ("512", "1000")
        )
        assert loose.time == exact.time and loose.exchanges == exact.exchanges
        assert loose.peak.total_bytes > exact.peak.total_bytes
        assert (
            loose.phases
            == planned(*GRPO_7B, "2", "--pack_length", "1000", "--response_length", "744").phases
        )


ONE_PAIR = ["--per_device_train_batch_size", "1"]
TWO_PAIRS = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]


class TestRanking:
    def test_equally_fast_layouts_are_ranked_by_the_room_that_they_leave(self) -> None:
        fitting = [
            plan for plan in Advice(planned(*DPO_32B, "--num_nodes", "16")).ranked if plan.fits
        ]
        for sooner, later in pairwise(fitting):
            speeds = [f"{plan.tokens_per_second:.3g}" for plan in (sooner, later)]
            if speeds[0] == speeds[1]:
                assert sooner.headroom_bytes >= later.headroom_bytes
        assert len({f"{plan.tokens_per_second:.3g}" for plan in fitting}) < len(fitting)

    def test_every_triple_is_there_once(self) -> None:
        ranked = Advice(planned(*DPO_7B, *FULL)).ranked
        layouts = [plan.layout for plan in ranked]
        triples = {
            (each.shard_degree, each.num_replicas, each.tensor_parallel_degree) for each in layouts
        }
        powers = [2**i for i in range(5)]
        assert len(ranked) == 15
        assert triples == {triple for triple in product(powers, repeat=3) if prod(triple) == 16}

    def test_layouts_that_fit_are_ranked_first_by_speed(self) -> None:
        ranked = Advice(planned(*DPO_7B, *FULL, "--gpu", "memory_gib=40")).ranked
        fits = [plan.fits for plan in ranked]
        assert fits == sorted(fits, reverse=True) and 0 < sum(fits) < len(fits)
        speeds = [plan.tokens_per_second for plan in ranked if plan.fits]
        assert all(later <= sooner * 1.01 for sooner, later in pairwise(speeds))
        needs = [plan.peak.total_bytes for plan in ranked if not plan.fits]
        assert needs == sorted(needs)

    @pytest.mark.parametrize(
        ("words", "degrees"),
        [
            (["dpo", *OLMO_32B, *TWO_NODES], {1, 2, 4, 8}),  # the key-value heads bound it
            # And what rows are split by.
            ([*DPO_7B, "--context_parallel_degree", "2"], {1, 2, 4, 8}),
            (
                [
                    "dpo",
                    "--model_name_or_path",
                    "Qwen/Qwen3-30B-A3B",
                    *TWO_NODES,
                    "--context_parallel_degree",
                    "2",
                ],
                {1},
            ),
            (["dpo", *OLMO_7B, "--gpus_per_node", "1", "--single_gpu_mode"], set()),
        ],
    )
    def test_tensor_degrees(self, words: list[str], degrees: set[int]) -> None:
        plan = planned(*words)
        layouts = [other.layout for other in Advice(plan).ranked]
        assert {layout.tensor_parallel_degree for layout in layouts} == degrees
        context = plan.layout.context_parallel_degree
        assert all(layout.context_parallel_degree == context for layout in layouts)

    def test_experts_stay_split(self, tmp_path: Path) -> None:
        """Over the shard group of every layout that divides them, and of what is advised."""
        (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
        rows = [*FULL, "--per_device_train_batch_size", "1", "--gpus_per_node", "3x8"]
        model = ["dpo", "--model_name_or_path", str(tmp_path), *rows, "--fsdp_shard_degree", "2"]
        split = [*model, "--expert_parallel_degree", "2"]
        ranked = Advice(planned(*split)).ranked
        assert {plan.layout.expert_parallel_degree for plan in ranked} == {1, 2, 4, 8}
        needs, needs_gathered = (planned(*words).peak.total_bytes for words in (split, model))
        # The state of an expert is cut among all 24, and not among 2.
        assert needs < needs_gathered / 4
        change = change_to_fit(planned(*split, "--gpu", f"memory_gib={needs / GIB - 0.1}"))
        assert change is not None
        assert (
            "--expert_parallel_degree 4" in change.flags and "--fsdp_shard_degree 4" in change.flags
        )


class TestPage:
    def test_every_letter_is_explained(self) -> None:
        grpo = [*GRPO_7B, "8", "--beta", "0.1"]
        single = [
            "grpo",
            "--model_name_or_path",
            "Qwen/Qwen3-0.6B",
            "--single_gpu_mode",
            "--num_epochs",
            "2",
        ]
        distill = [
            "distill",
            *DPO_7B[1:],
            "--teacher_model_name_or_path",
            "allenai/OLMo-2-0325-32B",
        ]
        on_a_cpu = ["dpo", *OLMO_7B, "--gpu", "cpu", "--gpus_per_node", "1"]
        explained = set()
        for words in (
            DPO_7B,
            [*DPO_7B, *FULL],
            grpo,
            [*grpo, *FULL, "--advantages", "gae"],
            single,
            distill,
            on_a_cpu,
        ):
            plan = planned(*words)
            text = page(plan)
            shown = {label for phase in plan.phases for label, _ in phase.parts}
            for label in shown:
                assert f"   {LETTERS[label]}  {label}: {PARTS[label]['meaning'][:20]}" in text
            explained |= shown
        assert explained == set(LETTERS)
        assert len(set(LETTERS.values())) == len(LETTERS)

    def test_lines_are_short_and_plain_in_a_pipe(self) -> None:
        for words in (DPO_7B, [*DPO_7B, *FULL], ["dpo", *OLMO_32B, "--gpus_per_node", "128x8"]):
            text = page(planned(*words))
            assert [line for line in text.splitlines() if len(line) > 96] == []
            assert ESCAPE not in text

    def test_terminal_gets_colours(self) -> None:
        plan = planned(*DPO_7B, *FULL)
        coloured = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=80
        )
        print_plan(plan, Advice(plan), coloured)
        assert ESCAPE in coloured.file.getvalue()  # type: ignore[attr-defined]

    def test_page_is_ascii_when_the_encoding_is(self) -> None:
        page(planned(*DPO_7B, *FULL), encoding="ascii").encode("ascii")

    def test_rows_are_few_and_no_exchange_is_lost(self) -> None:
        for words in (
            [*DPO_7B, "--tensor_parallel_degree", "2"],
            [*DPO_7B, "--optimizer", "muon"],
            [*GRPO_7B, "8", "8", "--beta", "0.1"],
        ):
            plan = planned(*words)
            rows = traffic_rows(plan)
            assert sum(each.sent_bytes for row in rows for each in row) == plan.sent_bytes
            assert len({(row[0].axis, row[0].what) for row in rows}) == len(rows) < 12
            assert all(len(row[0].what) <= 36 for row in rows)

    def test_engines_on_the_learners_node(self) -> None:
        """Four of each on one node of 8; without the node's size they may be anywhere."""
        grpo = [*GRPO_7B, "4", "--vllm_num_engines", "4"]
        shared, apart = planned(*grpo, "--gpus_per_node", "8"), planned(*grpo)
        assert [exchange for exchange in shared.exchanges if exchange.crosses_nodes] == []
        (row,) = (row for row in traffic_rows(apart) if row[0].collective == "broadcast")
        sent_bytes = sum(each.sent_bytes for each in row)
        assert row[0].crosses_nodes and sent_bytes == sum(each.num_bytes for each in row)
        assert apart.setting.shape.num_params * 2 / 4 == pytest.approx(sent_bytes, rel=0.01)

    @pytest.mark.parametrize(
        ("words", "parts"),
        [
            (
                [*DPO_7B, *CONTEXT, "2"],
                ["of them (context groups).", "16 GPUs with context degree 2, the fastest"],
            ),
            ([*GRPO_7B, "8", *TENSOR, "2"], ["of them (tensor groups, weights to the engines)."]),
            # The name that was given, and whose speeds.
            (
                ["dpo", *OLMO_7B[:1], f"{OLMO_7B[1]}-SFT", *TWO_NODES, "--gpu", "memory_gib=40"],
                [
                    "DPO of allenai/OLMo-2-1124-7B-SFT (7.3B parameters) on 2 nodes",
                    "(40 GiB each, speeds of an H100)",
                ],
            ),
        ],
    )
    def test_page_names_groups_and_devices(self, words: list[str], parts: list[str]) -> None:
        text = " ".join(page(planned(*words)).split())
        assert all(part in text for part in parts)


class _Tags(HTMLParser):
    VOID = ("meta", "line", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


class TestHtml:
    def test_html_page_stands_alone(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "plan.html"
        assert main(["plan", *DPO_7B, "--html", str(file)]) == 0
        assert "Memory of one GPU" in capsys.readouterr().out
        text = file.read_text(encoding="utf-8")
        assert text.startswith("<!doctype html>")
        tags = _Tags()
        tags.feed(text)
        assert tags.open == []
        names = {tag for tag, _ in tags.seen}
        assert "figure" in names and not names & {"script", "link", "img", "iframe"}
        assert not re.search(r"https?:|url\(|@import", text)
        assert "prefers-color-scheme: dark" in text

    def test_bars_have_the_bytes_of_the_plan_and_every_part_a_colour(self) -> None:
        plan = planned(*DPO_7B, *FULL)
        advice = Advice(plan)
        text = html_page(plan, advice)
        for phase in plan.phases:
            for label, num_bytes in phase.parts:
                if num_bytes > GIB:
                    assert f'title="{label}: {num_bytes / GIB:,.1f} GiB"' in text
        for other in advice.ranked:
            assert f"{other.tokens_per_second:,.0f}" in text
        for index in range(len(LETTERS)):
            assert (
                f"--c{index}: #" in text and f".b{index} {{ background: var(--c{index}); }}" in text
            )

    def test_names_are_escaped(self, tmp_path: Path) -> None:
        file = tmp_path / "<b>&me.json"  # a config.json alone
        file.write_text(json.dumps(FIELDS))
        plan = planned("dpo", "--model_name_or_path", str(file), "--gpus_per_node", "2")
        text = html_page(plan, Advice(plan))
        assert "&lt;b&gt;&amp;me" in text and "<b>&me" not in text


def test_choice_of_auto_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    sentence, one_row = (
        "--activation_checkpointing auto takes full",
        [*ONE_PAIR, "--max_seq_length", "16384"],
    )
    assert main(["plan", *DPO_7B, *one_row]) == 0
    assert sentence in " ".join(capsys.readouterr().out.split())
    assert main(["plan", *DPO_7B, *one_row, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] and record["workload"]["checkpointing"] == "full"
    assert (
        main(["plan", *DPO_7B, "--per_device_train_batch_size", "1", "--max_seq_length", "256"])
        == 0
    )
    assert sentence not in capsys.readouterr().out
    assert main(["plan", "dpo", *OLMO_7B, "--num_processes", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layout"]["shard_degree"] == 8


def test_free_memory_is_used_and_advised_for_less_arithmetic() -> None:
    """7B on 8 H100 in rows of 16,384 tokens: norms and MLPs are recomputed, not attention and its
    projections.
    """
    rows = [
        "--per_device_train_batch_size",
        "1",
        "--max_seq_length",
        "8192",
        "--gradient_accumulation_steps",
        "16",
    ]
    words = ["dpo", *OLMO_7B, "--gpus_per_node", "8", *rows]
    auto, full = planned(*words), planned(*words, *FULL)
    flops_of_auto, flops_of_full = (
        flops_per_step(plan.setting.shape, plan.layout, plan.workload) for plan in (auto, full)
    )
    assert flops_of_auto <= 0.92 * flops_of_full
    assert auto.leaves(0.1) and "blocks.*.feed_forward" in auto.workload.checkpointing_modules
    change = Advice(full).recomputes_less
    assert change is not None and change.flags == "--activation_checkpointing auto"
    assert change.plan.workload == auto.workload
    assert Advice(auto).recomputes_less is None
    assert "Recomputes less and fits: --activation_checkpointing auto" in list(
        render_words("advice", Advice(full))
    )
    # Where tensor ranks exchange what norms within attention are given, those keep what they have.
    modules = planned(*words, *TENSOR, "2", "--gpu", "memory_gib=60").workload.checkpointing_modules
    assert modules and not any("q_norm" in module for module in modules)


def test_microbatches_are_cut_where_that_saves_arithmetic() -> None:
    """7B on 8 H100, 8 pairs of 2 x 2,048 tokens: two at a time need norms again, not whole
    blocks.
    """
    auto, full = planned(*DPO_7B), planned(*DPO_7B, *FULL)
    optim = auto.setting.config.optim
    assert (optim.per_device_train_batch_size, optim.gradient_accumulation_steps) == (2, 4)
    assert (
        auto.tokens_per_step == full.tokens_per_step and auto.time.step_s < 0.8 * full.time.step_s
    )
    assert auto.leaves(0.1) and not any(
        "feed_forward." in module for module in auto.workload.checkpointing_modules
    )
    # Smaller ones save nothing more; on slow links they would take longer.
    assert planned(*DPO_7B, *TWO_PAIRS).workload == auto.workload
    assert planned(*DPO_7B, "--in_node_gb_s", "2").workload.num_microbatches == 1


class TestJson:
    def test_everything_is_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["plan", *DPO_7B, *KEEPS_ALL, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        plan = planned(*DPO_7B, *KEEPS_ALL)
        assert record["memory_bytes"] - record["headroom_bytes"] == plan.peak.total_bytes
        for phase in record["phases"]:
            assert sum(phase["parts"].values()) == phase["total_bytes"]
        assert record["layout"]["shard_degree"] == 8 and len(record["layouts"]) == 15
        assert record["advice"]["to_fit"]["values"] == {"activation_checkpointing": "full"}
        assert record["advice"]["faster"] is None and not record["fits"]
        assert {exchange["axis"] for exchange in record["exchanges"]} >= {"shard", "replica"}
        assert record["time"]["step_s"] > 0
        assert {layout["context_parallel_degree"] for layout in record["layouts"]} == {1}


class TestScreen:
    @pytest.mark.parametrize(
        "words",
        [
            [*DPO_7B, *KEEPS_ALL],
            pytest.param([*DPO_32B, "--num_nodes", "16"], marks=pytest.mark.extended),
            [*DPO_32B, "--num_nodes", "128"],
            ["sft", *OLMO_7B, "--gpus_per_node", "1", "--gpu", "rtx4090"],
            pytest.param(
                [*DPO_7B, *CONTEXT, "2", *TENSOR, "2", "--fsdp_shard_degree", "4"],
                marks=pytest.mark.extended,
            ),
            [*DPO_7B, "--backend", "deepspeed", "--deepspeed_stage", "3", "--offload"],
            [*GRPO_7B, "8", "8", "--advantages", "gae", "--beta", "0.1", *SHARED, "200"],
            [*ON_ONE_GPU, "--gpu", "memory_gib=24"],
        ],
        ids=lambda words: " ".join(words)[:60],
    )
    def test_plan_fits_into_forty_lines_of_eighty_columns_and_says_the_rest_with_all(
        self, words: list[str], capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["plan", *words]) == 0
        short = capsys.readouterr().out.splitlines()
        assert 12 < len(short) <= MAX_LINES
        assert "--all" in short[-1]
        assert main(["plan", *words, "--all"]) == 0
        whole = capsys.readouterr().out.splitlines()
        assert len(whole) > len(short)
        plan = planned(*words)
        for line in (plan.peak.name, f"{units.gib(plan.peak.total_bytes)}"):
            assert any(line in each for each in short) and any(line in each for each in whole)
        speeds = [f"{each.tokens_per_second:,.0f}" for each in Advice(plan).ranked]
        assert all(any(speed in line for line in whole) for speed in speeds)


class TestCPU:
    WORDS = ("dpo", "dpo/tiny_cpu", "--model_name_or_path", "Qwen/Qwen3-0.6B")

    @pytest.mark.parametrize(
        ("words", "is_cpu"),
        [
            (["--num_processes", "2"], True),
            (["--num_processes", "2", "--gpu", "h100"], False),
            (["--num_processes", "2", "--param_dtype", "bfloat16"], False),
            (["--gpus_per_node", "2"], False),
            (["--gpus_per_node", "2", "--gpu", "cpu"], True),
        ],
    )
    def test_run_without_a_gpu_is_planned_for_this_machine(
        self, words: list[str], is_cpu: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request, "has_gpu_here", lambda: False)
        asked = requested(*self.WORDS, *words)
        assert (asked.setting.device.is_cpu, asked.setting.on_cuda) == (is_cpu, not is_cpu)
        is_said = any("--gpu h100" in warning for warning in asked.warnings)
        assert is_said == (is_cpu and "--gpu" not in words)
        if is_cpu:
            whole = find_device("cpu").memory_bytes
            assert asked.setting.device.memory_bytes == pytest.approx(whole / 2, rel=1e-6)
            text = page(make_plan(asked.setting))
            assert "The layouts of 2 processes" in text
            assert "H100" not in text and "CUDA and libraries" not in text

    def test_machine_with_a_gpu_is_planned_with_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request, "has_gpu_here", lambda: True)
        assert requested(*self.WORDS, "--num_processes", "2").setting.on_cuda

    def test_learners_of_a_run_without_a_gpu_share_the_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(request, "has_gpu_here", lambda: False)
        words = ["grpo", "grpo/tiny_cpu", "--model_name_or_path", "Qwen/Qwen3-0.6B"]
        setting = requested(*words).setting
        assert setting.device.is_cpu and setting.has_engines_in_node
        assert not requested(*words, "--num_learners_per_node", "2", "2").setting.device.is_cpu


@pytest.mark.parametrize(("dtype", "is_warned"), [("bfloat16", True), ("float32", False)])
def test_gpu_without_bfloat16_is_said_to_have_none(dtype: str, is_warned: bool) -> None:
    words = ["sft", *OLMO_7B, "--gpus_per_node", "8", "--gpu", "v100", "--param_dtype", dtype]
    asked = requested(*words)
    assert any("--param_dtype float32" in warning for warning in asked.warnings) == is_warned
    assert "no bfloat16" in " ".join(page(make_plan(asked.setting)).split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    text = capsys.readouterr().out
    for name in (
        "num_nodes",
        "gpus_per_node",
        "gpu",
        "mfu",
        "in_node_gb_s",
        "cross_node_gb_s",
        "all",
        "json",
        "html",
    ):
        assert f"--{name} " in text


def test_plan_loads_neither_torch_nor_deepspeed() -> None:
    program = (
        f"import sys; from open_instruct.cli import main; words = ['plan', *{DPO_7B!r}]; "
        "code = main(words) or main([*words, '--backend', 'deepspeed', '--deepspeed_stage', '3']); "
        "sys.exit(code or bool({'torch', 'transformers', 'deepspeed'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr


# (words, output) of every `$ open-instruct plan …`.
DOCUMENTED = re.findall(
    r"```console\n\$ open-instruct plan (.*?)\n(.*?)```", DOCS_PAGE.read_text(), re.DOTALL
)


@pytest.mark.parametrize(("words", "output"), DOCUMENTED)
def test_page_shows_what_the_command_prints(
    words: str, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(DOCUMENTED) >= 2
    monkeypatch.setenv("NO_COLOR", "1")
    main(["plan", *shlex.split(words.replace("\\\n", " "))])
    streams = capsys.readouterr()
    assert streams.out + streams.err == output
