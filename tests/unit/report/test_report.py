"""`open-instruct report`: what the page has of a run, what it says of it, and that no text of a run
is markup.
"""

import base64
import gzip
import hashlib
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from open_instruct.cli import main
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import list_flags
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.resolved import write_config
from open_instruct.core.errors import EXIT_INPUT
from open_instruct.core.records import Check, Completion, Prompt, RolloutGroup, Verdict
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.parallel.layout import resolve_layout
from open_instruct.report import health, page
from open_instruct.report.charts import MAX_POINTS, build_histograms, build_series
from open_instruct.report.health import Finding, diagnose, mean_seconds_by_part
from open_instruct.report.run_files import ABSENT, RunFiles, find_differing_flags, read_rollouts
from open_instruct.report.run_forms import PlannedMemory, PlannedPhase
from open_instruct.rl.samples import RolloutStepBatch, training_samples
from open_instruct.rl.traces import write_traces
from open_instruct.run.metrics_log import MetricsLog
from open_instruct.run.run_directory import RunDirectory

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \u2028 <!-- \ud83d\ude00".encode(
    "utf-16", "surrogatepass"
).decode("utf-16")
PROMPT = f"<|im_start|>user\nWhat is {EVIL}?<|im_end|>\n<|im_start|>assistant\n"
NUM_STEPS = 3


def grpo_config(folder: Path, *words: str) -> GRPOConfig:
    needed = [
        "--model_name_or_path",
        EVIL,
        "--dataset_mixer_list",
        "p.jsonl",
        "1.0",
        "--output_dir",
        str(folder),
    ]
    return parse_run(GRPOConfig, [*needed, "--total_episodes", "192", *words])


def group_of(ticket: int, step: int, rewards: tuple[float, ...]) -> RolloutGroup:
    size = len(rewards)
    return RolloutGroup(
        ticket=ticket,
        prompt=Prompt(
            row_id=7,
            token_ids=(1, 2),
            text=PROMPT,
            checks=(Check(verifier="math", ground_truth="4"),),
        ),
        completions=tuple(
            Completion(
                token_ids=tuple(range(index + 1)),
                logprobs=tuple(-0.125 * (place + 1) for place in range(index + 1)),
                versions=(max(0, step - 2),) * index + (step - 1,),
                text=f"{EVIL} answer {index}",
                finish_reason="stop" if index else "length",
                seed=index,
            )
            for index in range(size)
        ),
        verdicts=tuple(Verdict(reward=reward, scores={"math": reward}) for reward in rewards),
    )


def write_step(folder: Path, step: int, rewards: tuple[float, ...] = (0.0, 1.0, 1.0)) -> Path:
    config = grpo_config(folder).rollout
    batch = RolloutStepBatch(groups=(group_of(step, step, rewards),))
    return write_traces(
        folder, step, batch, training_samples(batch, config=config, version=step - 1)
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a short GRPO run leaves, written by what runs write with."""
    directory = RunDirectory(path=tmp_path / "run")
    directory.create()
    write_config(
        grpo_config(directory.path, "--beta", "0.5"),
        directory.config,
        {"world_size": 2, "evil": EVIL},
    )
    directory.write_layout(resolve_layout([2]))
    parts = {"parameters": 2**20, "activations": 2**21}
    phase = {"name": "backward", "total_bytes": 3 * 2**20, "parts": parts}
    directory.write_plan({"memory_bytes": 2**30, "peak_phase": "backward", "phases": [phase]})
    metrics = MetricsLog(directory.metrics)
    for step in range(1, NUM_STEPS + 1):
        times = {"time/generate": 1.0, "time/train": 2.0, "time/sync": 0.5, "time/step": 4.0}
        row = {
            "step": step,
            "reward": 0.25 * step,
            "loss": math.nan if step == 2 else 0.5,
            "peak_memory_gib": 0.5,
        }
        metrics.write(
            row
            | times
            | {"rho/hist_0_to_0.5": 0.25, "rho/hist_0.5_to_inf": 0.75, "eval/reward": 0.5}
        )
        write_step(directory.path, step)
    sample = {
        "row_id": 3,
        "prompt": PROMPT,
        "completion": EVIL,
        "ground_truth": [EVIL],
        "reward": 1.0,
        "scores": {},
    }
    for step in (0, NUM_STEPS):
        directory.write_evaluation(
            {"step": step, "eval/pass_at_1": 0.25 + 0.1 * step, "samples": [sample]}
        )
    directory.hf_model.mkdir()
    words = Tokenizer(WordLevel({"zero": 0, "one": 1, "two": 2}, unk_token="zero"))
    words.save(str(directory.hf_model / "tokenizer.json"))
    return directory.path


def layouts() -> list[str]:
    """Layouts of which one field, or none but one, is as it should be."""
    whole = resolve_layout([2]).as_json()
    changes: list[dict[str, Any]] = [
        {"gpus_per_node": []},
        {"gpus_per_node": [0, 2]},
        {"gpus_per_node": [-1, 3]},
        {"gpus_per_node": ["2"]},
        {"gpus_per_node": [10**9], "shard_degree": 10**9},
        {"shard_degree": "2"},
        {"shard_degree": None},
        {"shard_degree": -2, "num_replicas": -1},
        {"num_replicas": 0},
        {"num_replicas": 2.5},
        {"tensor_parallel_degree": [1]},
        {"warnings": 3},
        {"warnings": [3]},
    ]
    return [json.dumps(whole | change) for change in changes]


def plans() -> list[str]:
    phase = {"name": "backward", "total_bytes": 3, "parts": {"parameters": 3}}
    whole = {"memory_bytes": 2**30, "peak_phase": "backward", "phases": [phase]}
    changes: list[dict[str, Any]] = [
        {"phases": []},
        {"phases": {}},
        {"phases": [3]},
        {"phases": [phase | {"total_bytes": "3"}]},
        {"phases": [phase | {"total_bytes": None}]},
        {"phases": [phase | {"total_bytes": -1}]},
        {"phases": [phase | {"parts": []}]},
        {"phases": [phase | {"parts": {"parameters": "x"}}]},
        {"phases": [phase | {"name": 3}]},
        {"phases": [phase, {"name": "forward"}]},
        {"memory_bytes": "80 GiB"},
        {"memory_bytes": math.inf},
        {"memory_bytes": 10**400},
    ]
    return [json.dumps(whole | change) for change in changes]


class _Page(HTMLParser):
    """The page as a browser's parser has it: every tag, and what is in each script by its id."""

    VOID = ("meta", "input", "line", "br", "rect")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.words: list[str] = []
        self._open: list[str] = []
        self._script: str | None = None
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self._script = dict(attrs).get("id")
            self.scripts[self._script] = ""

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[self._script] += data
        else:
            self.words.append(data)

    def array(self, name: str, kind: str) -> list[int]:
        return numpy.frombuffer(self.unpacked(name), kind).tolist()

    def unpacked(self, name: str) -> bytes:
        return gzip.decompress(base64.b64decode(self.scripts[f"run0-{name}"]))


def page_of(*folders: Path, max_rollouts: int = 100) -> _Page:
    return _Page(page.report_page(folders, max_rollouts=max_rollouts))


class TestPage:
    def test_texts_of_a_run_are_escaped(self, run: Path) -> None:
        text = page.report_page([run], max_rollouts=100)
        assert "alert(1)</script>" not in text and "<img" not in text
        parsed = _Page(text)
        # Of config.yaml's head.
        assert yaml.safe_dump({"evil": EVIL}, width=1000).rstrip() in parsed.words
        assert EVIL in parsed.words  # the flag --model_name_or_path
        rows = json.loads(parsed.unpacked("text"))["rows"]
        assert [row["completion"] for row in rows[:3]] == [
            f"{EVIL} answer {index}" for index in range(3)
        ]
        assert rows[0]["prompt"] == PROMPT

    def test_report_has_one_script_and_fetches_nothing(self, run: Path) -> None:
        parsed = page_of(run)
        scripts = [attributes for tag, attributes in parsed.tags if tag == "script"]
        assert [each for each in scripts if each.get("type") is None] == [{}]
        assert {each.get("type") for each in scripts[:-1]} == {"application/json", "text/plain"}
        digest = base64.b64encode(hashlib.sha256(parsed.scripts[None].encode()).digest()).decode()
        policy = next(each["content"] for tag, each in parsed.tags if each.get("http-equiv"))
        assert policy is not None
        assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy
        assert not {tag for tag, _ in parsed.tags} & {"link", "img", "iframe"}
        assert not [
            attributes
            for _, attributes in parsed.tags
            if attributes.keys() & {"src", "onclick", "onload"}
        ]
        assert (
            "innerHTML" not in parsed.scripts[None]
            and "insertAdjacentHTML" not in parsed.scripts[None]
        )

    def test_every_id_that_the_script_asks_for_is_there(self, run: Path) -> None:
        parsed = page_of(run)
        ids = {attributes.get("id") for _, attributes in parsed.tags}
        assert set(re.findall(r'byId\("([\w-]+)"\)', parsed.scripts[None])) <= ids

    def test_curves_and_scores(self, run: Path) -> None:
        data = json.loads(page_of(run).scripts["data"])
        curves, held_out = data["runs"][0]["curves"], data["runs"][0]["held_out"]
        assert curves["step"] == [1, 2, 3] and curves["columns"]["reward"] == [0.25, 0.5, 0.75]
        assert curves["columns"]["loss"] == [0.5, None, 0.5]
        assert (
            "rho/hist_0_to_0.5" not in curves["columns"] and "eval/reward" not in curves["columns"]
        )
        assert held_out["step"] == [0, 3] and held_out["columns"] == {
            "eval/pass_at_1": [0.25, 0.55]
        }
        assert list(curves["columns"])[:2] == ["reward", "loss"]

    def test_words_and_bars(self, run: Path) -> None:
        parsed = page_of(run)
        words = " ".join(" ".join(parsed.words).split())
        head = words[: words.index("Health")]
        assert "step 3 of 3, ended" in head
        assert "first to last reward 0.25 → 0.75, loss 0.5 → 0.5" in head
        assert "held out pass_at_1 0.25 → 0.55" in head
        assert "Planned 3.0 MiB, most in backward; measured 512.0 MiB; there are 1.0 GiB." in words
        assert "1 replica of the model, shard degree 2" in words
        tips = {attributes.get("title") for _, attributes in parsed.tags}
        assert {"activations: 2.0 MiB", "generate: 1.00 s", "other: 500 ms"} <= tips
        # In a remedy.
        assert "<code>--learning_rate</code>, or raise" in page.report_page([run], max_rollouts=0)

    def test_several_runs_are_compared(self, run: Path, tmp_path: Path) -> None:
        other = tmp_path / "deeper" / "run"
        shutil.copytree(run, other)
        write_config(grpo_config(other, "--beta", "0.25"), other / "config.yaml")
        parsed = page_of(run, other)
        assert [each["name"] for each in json.loads(parsed.scripts["data"])["runs"]] == [
            str(run),
            str(other),
        ]
        words = [word for word in parsed.words if word.strip()]
        differ = words[words.index("flags that differ: 2") : words.index("Health")]
        for flag, values in {
            "--beta": ["0.5", "0.25"],
            "--output_dir": [str(run), str(other)],
        }.items():
            place = differ.index(flag)
            assert differ[place + 1 : place + 3] == values
        assert "--learning_rate" not in differ
        assert "run1-token_ids" in parsed.scripts

    def test_flags_that_differ(self) -> None:
        a = RunFiles(folder=Path(), config={"beta": None, "seed": 1, "loss_fn": "dapo"})
        b = RunFiles(folder=Path(), config={"beta": 0.5, "seed": 1, "packing": True})
        assert list(find_differing_flags([a, b])) == [
            ("beta", [None, 0.5]),
            ("loss_fn", ["dapo", ABSENT]),
            ("packing", [ABSENT, True]),
        ]
        assert list(find_differing_flags([a])) == []

    def test_run_that_has_only_begun(self, tmp_path: Path) -> None:
        write_config(grpo_config(tmp_path), tmp_path / "config.yaml")
        words = " ".join(page_of(tmp_path).words)
        assert (
            "No step was taken yet." in words
            and "the run left no plan" in " ".join(words.split()).lower()
        )

    def test_planned_seconds_stand_beside_those_that_were_taken(self, run: Path) -> None:
        plan = json.loads((run / "plan.json").read_text())
        assert "was planned to take" not in " ".join(page_of(run).words)
        plan["seconds"] = {"generate": 0.75, "train": 1.5, "switch": 0.25}
        (run / "plan.json").write_text(json.dumps(plan))
        words = " ".join(" ".join(page_of(run).words).split())
        assert "generate 750 ms (took 1.00 s)," in words
        assert "train 1.50 s (took 2.00 s), switch 250 ms." in words
        assert "earlier turns" not in words
        plan["older_fraction"] = 0.25
        (run / "plan.json").write_text(json.dumps(plan))
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        lines = [json.dumps(row | {"staleness/older_fraction": 0.5}) for row in rows]
        (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
        words = " ".join(" ".join(page_of(run).words).split())
        assert "25% were planned to be of earlier turns of the engines (50% were)" in words

    @pytest.mark.parametrize(
        ("layout", "plan"),
        [
            ('{"gpus_per_node": [1], "shard', "{"),
            ('{"gpus_per_node": [1], "shard_groups": [[0]]}', '{"a": 1}'),
            ('{"gpus_per_node": 3}', '{"phases": [{}]}'),
            ("", "[]"),
            ("null", "3"),
            ("[" * 100_000, '{"phases":' * 100_000),
            *zip(layouts(), plans(), strict=True),
        ],
    )
    def test_damaged_files_and_others_are_passed_over(
        self, run: Path, layout: str, plan: str
    ) -> None:
        (run / "layout.json").write_text(layout)
        (run / "plan.json").write_text(plan)
        (run / "traces" / "step2.parquet").write_bytes(b"PAR1 no")
        (run / "traces" / "stepX.parquet").write_bytes(b"")
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b'{"step": 4, "los\xff')
        parsed = page_of(run)
        words = " ".join(parsed.words)
        assert "layout.json is of another form" in words and "plan.json is of another form" in words
        assert (
            "traces/step2.parquet cannot be read" in words
            and "traces/stepX.parquet cannot be read" in words
        )
        rows = json.loads(parsed.unpacked("text"))["rows"]
        assert [row["step"] for row in rows[:6]] == [1, 1, 1, 3, 3, 3]


class TestRollouts:
    def test_tokens_come_back(self, run: Path) -> None:
        parsed = page_of(run)
        text = json.loads(parsed.unpacked("text"))
        rows = text["rows"]
        assert [row["num_tokens"] for row in rows] == [1, 2, 3] * NUM_STEPS + [0, 0]
        assert parsed.array("token_ids", "<u4") == [0, 0, 1, 0, 1, 2] * NUM_STEPS
        assert parsed.array("logprobs", "<i2") == [-125, -125, -250, -125, -250, -375] * NUM_STEPS
        assert parsed.array("versions", "<u4")[-6:] == [2, 1, 2, 1, 1, 2]
        assert text["pieces"] == {"0": "zero", "1": "one", "2": "two"}
        advantages = [row["advantage"] for row in rows[:3]]
        assert advantages == [pytest.approx(-math.sqrt(2)), *[pytest.approx(math.sqrt(0.5))] * 2]
        assert [(row["held_out"], row["step"]) for row in rows[-2:]] == [(True, 0), (True, 3)]
        assert (rows[-1]["prompt"], rows[-1]["checks"]) == (PROMPT, json.dumps([EVIL]))

    def test_too_many_are_thinned_by_whole_steps_and_it_is_said(self, run: Path) -> None:
        for step in range(4, 11):
            write_step(run, step)
        table, notes = read_rollouts(run, most=9)
        assert table is not None and set(table["step"].to_pylist()) == {2, 6, 10}
        assert notes == [
            "9 rollouts of 30 are here: those of every 4th step; --max_rollouts takes more"
        ]
        assert read_rollouts(run, most=30)[1] == []
        assert read_rollouts(run, most=0) == (None, [])

    def test_reward_that_is_no_number_is_none(self, run: Path) -> None:
        RunDirectory(path=run).write_evaluation(
            {"step": 4, "samples": [{"reward": math.nan, "completion": "?"}]}
        )
        assert json.loads(page_of(run).unpacked("text"))["rows"][-1]["reward"] is None

    def test_foreign_files_are_left_out(self, run: Path) -> None:
        from pyarrow import array, list_, parquet
        from pyarrow import int32 as kind

        file = run / "traces" / "step1.parquet"
        table = parquet.ParquetFile(file).read()
        place = table.column_names.index("versions")
        parquet.write_table(
            table.set_column(place, "versions", array([[1]] * 3, list_(kind()))), file
        )
        other = run / "traces" / "step2.parquet"
        parquet.write_table(table.drop_columns("reward"), other)
        table, notes = read_rollouts(run, most=100)
        assert set(notes) == {
            f"traces/{each.name} cannot be read, and is left out" for each in (file, other)
        }
        assert table is not None and set(table["step"].to_pylist()) == {3}


class TestHistograms:
    def test_report_warns_of_rollouts_and_ratios(self, run: Path) -> None:
        titles = {each["title"].split(",")[0].split(":")[0]: each for each in shown_histograms(run)}
        lengths = titles["length of a completion"]
        assert (
            lengths["labels"] == ["1", "2", "3"]
            and lengths["late"] == [pytest.approx(1 / 3, rel=1e-5)] * 3
        )
        # In step 1 all is fresh; in step 3 two of a group's three completions begin a step earlier:
        # 3 tokens of 6.
        behind = titles["staleness of a token"]
        assert (behind["labels"], behind["early"], behind["late"]) == (
            ["0", "1"],
            [1.0, 0.0],
            [0.5, 0.5],
        )
        ratio = titles["rho"]
        assert (ratio["labels"], ratio["late"]) == (["0 to 0.5", "0.5 to inf"], [0.25, 0.75])

    def test_many_values_share_bars(self) -> None:
        import pyarrow

        rewards = [index / 100 for index in range(101)]
        lists = {name: [[0]] * 101 for name in ("token_ids", "versions", "logprobs")}
        table = pyarrow.table({"step": [1] * 101, "reward": rewards, **lists})
        of_rewards = build_histograms(RunFiles(folder=Path()), table)[1]
        assert len(of_rewards["labels"]) == 24 and of_rewards["early"] is None
        assert sum(of_rewards["late"]) == pytest.approx(1, abs=1e-4)


def shown_histograms(run: Path) -> list[dict[str, Any]]:
    return build_histograms(RunFiles.read(run), read_rollouts(run, most=100)[0])


def rows_with(num_steps: int = 40, **columns: Any) -> list[dict[str, Any]]:
    """A number, or a function of the step, for each column."""
    return [
        {"step": step}
        | {name: value(step) if callable(value) else value for name, value in columns.items()}
        for step in range(1, num_steps + 1)
    ]


def said_of(rows: list[dict[str, Any]], **more: Any) -> list[Finding]:
    return diagnose(RunFiles(folder=Path("a"), rows=rows, state="ended", **more))


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "not finite": (
        {"loss": lambda step: None if step == 7 else 0.5},
        "loss was not finite in 1 step, first in step 7",
    ),
    "rising": ({"loss": lambda step: 0.5 + step / 100}, "The loss rose from"),
    "nothing learned": ({"loss": 0.6931}, "Nothing was learned: the loss stayed"),
    "jump": (
        {"grad_norm": lambda step: 50.0 if step == 30 else 1.0},
        "its norm was 50 in step 30, and 1 in those",
    ),
    "pairs": (
        {"rewards/accuracy": 0.5, "rewards/margin": 0.0},
        "50% of the last pairs are told apart",
    ),
    "all cut": ({"reward": 0.5, "truncated_fraction": 0.9}, "90% of the completions are cut off"),
    "nothing right": ({"reward": 0.0, "zero_std_fraction": 1.0}, "Nothing was right"),
    "all the same": (
        {"reward": 0.9, "zero_std_fraction": 0.9},
        "90% of the last groups taught nothing",
    ),
    "falling": ({"reward": lambda step: 1 - step / 50}, "The reward fell from 0.91 to 0.27"),
    "flat": ({"reward": 0.5, "zero_std_fraction": 0.1}, "The reward is flat"),
    "verifiers": (
        {"reward": 0.5, "num_verifier_problems": 3},
        "Verifiers failed for 3 answers of a step",
    ),
    "clipped": (
        {"reward": lambda step: step / 40, "clip_fraction": 0.4},
        "40% of the tokens were clipped",
    ),
    "apart": ({"logprob_diff/mean": 0.5}, "Learner and engine differ by 0.5"),
    "one answer": (
        {"entropy": lambda step: 2.0 if step < 20 else 0.01},
        "The policy has lost its variety",
    ),
    "starved": (
        {"reward": 0.5, "time/generate": 8.0, "time/step": 10.0},
        "waits for completions for 80% of its time",
    ),
    "slower": (
        {"tokens_per_second": lambda step: 100 if step < 20 else 10},
        "The run has become slower",
    ),
    "padding": ({"padding_fraction": 0.5}, "50% of what is computed is padding"),
    "retries": ({"allocation_retries/max": 4}, "tried again, 4 times"),
}


class TestHealth:
    @pytest.mark.parametrize("name", CASES)
    def test_report_warns_with_a_remedy(self, name: str) -> None:
        columns, words = CASES[name]
        found = [finding for finding in said_of(rows_with(**columns)) if words in finding.text]
        assert len(found) == 1 and found[0].level != "good" and found[0].remedy

    def test_report_of_a_good_run_has_no_warnings(self) -> None:
        good = {"loss": lambda step: 1 / step, "grad_norm": lambda step: 30 / step}
        assert [finding.level for finding in said_of(rows_with(**good))] == ["good"]
        of_grpo = said_of(rows_with(**good, reward=lambda step: step / 40))
        assert [finding.level for finding in of_grpo] == ["good", "good"]

    def test_nothing_is_red_where_the_reward_rose(self) -> None:
        troubles = {"zero_std_fraction": 0.9, "truncated_fraction": 0.9, "num_verifier_problems": 2}
        evaluations = [{"step": step, "eval/pass_at_1": 0.5 - step / 100} for step in (0, 40)]

        def levels(**columns: Any) -> set[str]:
            return {
                finding.level for finding in said_of(rows_with(**columns), evaluations=evaluations)
            }

        assert levels(reward=lambda step: step / 100, **troubles) == {"good", "fair"}
        assert "bad" in levels(reward=lambda step: 1 - step / 100, **troubles)

    def test_headline_and_findings_have_the_same_numbers(self, run: Path) -> None:
        rewards = [0.1 + 0.0127 * step + 0.05 * (step % 3) for step in range(1, 41)]
        rows = [{"step": step, "reward": reward} for step, reward in enumerate(rewards, start=1)]
        (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        words = " ".join(" ".join(page_of(run).words).split())
        early, late = (f"{sum(part) / 8:.4g}" for part in (rewards[:8], rewards[-8:]))
        assert f"reward {early} → {late} (means of the first and of the last 8 steps)" in words
        assert f"The reward rose from {early} to {late}." in words

    @pytest.mark.parametrize(
        ("scores", "words"),
        [
            ((0.5, 0.75), ["accuracy on held-out pairs went from 0.5 to 0.75"]),
            ((0.5, 0.9, 0.75), ["best in step 1 (0.9; 0.75 at the end)", "went from 0.5 to 0.75"]),
            (
                (0.75, 0.5),
                ["did not improve (0.75 to 0.5)", "best in step 0 (0.75; 0.5 at the end)"],
            ),
        ],
    )
    def test_held_out_scores(self, scores: tuple[float, ...], words: list[str]) -> None:
        evaluations = [
            {"step": step, "eval/preference_accuracy": score} for step, score in enumerate(scores)
        ]
        found = said_of(rows_with(num_steps=2), evaluations=evaluations)
        assert len(found) == len(words) and all(
            word in finding.text for word, finding in zip(words, found, strict=True)
        )

    @pytest.mark.parametrize(
        ("scores", "is_kept"), [((0.5, 0.9, 0.75), True), ((0.75, 0.5), False)]
    )
    def test_best_step_that_is_kept_asks_for_nothing(
        self, scores: tuple[float, ...], is_kept: bool
    ) -> None:
        metric = "eval/preference_accuracy"
        evaluations = [{"step": step, metric: score} for step, score in enumerate(scores)]

        def remedy(**config: str) -> str:
            found = said_of(rows_with(num_steps=2), evaluations=evaluations, config=config)
            return next(finding.remedy for finding in found if "best in step" in finding.text)

        assert f"--keep_best {metric}" in remedy()
        assert (remedy(keep_best=metric) == "") == is_kept

    def test_memory(self) -> None:
        phase = PlannedPhase(name="backward", total_bytes=40 * 2**30, parts={})
        plan = PlannedMemory(memory_bytes=80 * 2**30, peak_phase="backward", phases=(phase,))

        def said(**columns: float) -> str:
            return " ".join(finding.text for finding in said_of(rows_with(**columns), plan=plan))

        assert "60.0 GiB, not 40.0" in said(peak_memory_gib=60.0, peak_reserved_gib=60.0)
        assert "nearly used up" in said(peak_memory_gib=79.0, peak_reserved_gib=60.0)
        # Of a process on a CPU, libraries count too.
        assert "planned" not in said(peak_memory_gib=60.0)

    def test_every_sentence_has_a_rule(self) -> None:
        code = Path(health.__file__)
        said = json.loads(code.with_name("findings.json").read_text(encoding="utf-8"))
        assert said["rules"].keys() <= set(re.findall(r'"(\w+)"', code.read_text(encoding="utf-8")))

    def test_flags_of_remedies_exist(self) -> None:
        files = (Path(health.__file__), Path(health.__file__).with_name("findings.json"))
        named = {
            name
            for file in files
            for name in re.findall(r"--(\w+)", file.read_text(encoding="utf-8"))
        }
        assert len(named) > 10
        assert named <= list_flags(GRPOConfig).keys() | list_flags(DPOConfig).keys()

    def test_parts_of_a_step_leave_the_first_out(self) -> None:
        rows = rows_with(
            num_steps=3,
            **{"time/forward": lambda step: 9.0 if step == 1 else 1.0, "time/backward": 2.0},
        )
        assert mean_seconds_by_part(RunFiles(folder=Path(), rows=rows)) == {
            "forward": 1.0,
            "backward": 2.0,
        }


class TestSeries:
    def test_long_columns_are_averaged(self) -> None:
        rows = [
            {"step": step, "loss": float(step % 2), "word": "a"}
            for step in range(1, 2 * MAX_POINTS + 2)
        ]
        series = build_series(rows)
        assert (
            series["steps_in_a_point"] == 3
            and series["step"][:2] == [3, 6]
            and series["step"][-1] == len(rows)
        )
        assert series["columns"].keys() == {"loss"} and series["columns"]["loss"][:2] == [
            0.666667,
            0.333333,
        ]

    def test_curve_has_gaps_for_values_that_are_no_numbers(self) -> None:
        rows = [
            {"step": 1, "a": 1 / 3, "b": True},
            {"step": 2, "a": None},
            {"step": 3, "a": math.inf},
        ]
        assert build_series(rows)["columns"] == {"a": [0.333333, None, None]}
        assert build_series([]) == {
            "step": [],
            "columns": {},
            "constants": {},
            "steps_in_a_point": 1,
        }

    def test_constant_values_have_no_curve(self) -> None:
        rows = [{"step": step, "loss": 0.5, "z": step, "reward": step} for step in (1, 2)]
        series = build_series(rows)
        assert (series["constants"], list(series["columns"])) == ({"loss": 0.5}, ["reward", "z"])
        assert build_series(rows[:1])["constants"] == {}


class TestCommand:
    def test_report_is_written_into_the_run_or_to_html(
        self,
        run: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["report", str(run)]) == 0
        page = run / "report.html"
        assert f"{page} ({page.stat().st_size / 1e6:.2f} MB, in " in capsys.readouterr().out
        assert main(["report", str(run), str(run)]) == 0
        assert main(["report", str(run), "--out", "other.html", "--max_rollouts", "3"]) == 0
        texts = [
            path.read_text("utf-8")
            for path in (run / "report.html", Path("report.html"), Path("other.html"))
        ]
        assert all(text.startswith("<!doctype html>") for text in texts)
        assert "3 rollouts of 9 are here" in texts[2] and "are here" not in texts[0]

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ([], "the first words are the folders of runs"),
            (["RUN/hf_model"], "holds no run: it has neither config.yaml nor metrics.jsonl"),
            (["RUN", "--out", "RUN/none/a.html"], "none/a.html cannot be written"),
            (["RUN", "--max_rollouts", "-1"], "--max_rollouts"),
        ],
    )
    def test_report_refuses_folders_without_a_run(
        self, words: list[str], said: str, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["report", *(word.replace("RUN", str(run)) for word in words)]) == EXIT_INPUT
        assert said in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("settings", "said"),
        [
            ("a: " + "[" * 3000 + "]" * 3000, "nested too deep"),
            ("a: " + "9" * 5000, "digits"),
            ("a: &a [1, 1]\n" + "".join(f"b{i}: [*a, *a]\n" for i in range(9)), "aliases"),
            ("a: " + "x" * 2**20, "more than 1 MiB"),
        ],
        ids=["brackets", "digits", "aliases", "large"],
    )
    def test_settings_that_no_run_has_are_refused(
        self, settings: str, said: str, run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (run / "config.yaml").write_text(settings)
        assert main(["report", str(run)]) == EXIT_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert (
            said in line and "config.yaml cannot be read as YAML" in line and "Move it away" in line
        )
        (run / "config.yaml").unlink()
        assert main(["report", str(run)]) == 0

    def test_numbers_that_no_float_holds_are_passed_over(self, run: Path) -> None:
        digits = "9" * 400
        with (run / "config.yaml").open("a") as file:
            file.write(f"max_train_steps: {digits}\ntotal_episodes: 0\nbeta: {digits}\n")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {digits}}}\n{{"step": 4, "loss": {digits}}}\n{{"step": NaN}}\n')
        assert main(["report", str(run)]) == 0
        page = (run / "report.html").read_text()
        assert digits in page and "step 4, ended" in page


# What a browser gives the script, as far as it is asked here.
BROWSER = """
global.document = { getElementById: id => id in blocks ? { textContent: blocks[id] } : null };
global.IntersectionObserver = class {};
"""
QUESTIONS = """
async function answers() {
  const { rows } = await rolloutsOf(0);
  await arraysOf(0);
  const asked = (find, kind, order) => chosen(rows, { find, kind, order }).map(row => row.index);
  const longest = rows[asked("", "all", "longest")[0]];
  return {
    tokens: tokensOf(longest, loaded.get(0)),
    best: asked("", "used", "best"),
    cut: asked("", "cut", "newest"),
    found: asked(" Answer 2 ", "all", "step"),
    none: asked("zebra", "all", "step"),
    held_out: asked("", "held_out", "newest"),
    turns: turnsOf(longest.prompt),
    parts: partsOf("a<tool_call>b</tool_call>c<think>d").map(part => [part.kind, part.text]),
    smoothed: smoothed([1, null, 3], 0.5),
    path: pathOf({ steps: [0, 1, 2] }, [0, null, 4], step => step, value => value),
  };
}
answers().then(said => console.log(JSON.stringify(said)));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node, to run the page's script")
def test_script_reads_what_the_page_has(run: Path) -> None:
    parsed = page_of(run)
    script, num_starts = re.subn(r"\nstart\(\);\s*$", "\n", parsed.scripts.pop(None))
    assert num_starts == 1
    program = f"const blocks = {json.dumps(parsed.scripts)};{BROWSER}{script}{QUESTIONS}"
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert [
        (token["id"], token["piece"], token["logprob"], token["version"])
        for token in said["tokens"]
    ] == [
        (0, "zero", -0.125, 0),
        (1, "one", -0.25, 0),
        (2, "two", -0.375, 0),
    ]
    assert said["best"] == [1, 2, 4, 5, 7, 8, 0, 3, 6]
    assert said["cut"] == [6, 3, 0] and said["found"] == [2, 5, 8] and said["none"] == []
    assert said["held_out"] == [10, 9]
    assert said["turns"] == [{"role": "user", "text": f"What is {EVIL}?"}]
    assert said["parts"] == [["", "a"], ["tool_call", "b"], ["", "c"], ["think", "d"]]
    assert said["smoothed"] == [1, None, pytest.approx((0.5 * 1 * 0.5 + 3 * 0.5) / 0.75)]
    assert said["path"] == "M0.0 0.0L2.0 4.0"
