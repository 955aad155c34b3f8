"""The parts of the demos that need no run: their flags, and the summaries that they end with."""

import importlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from rich.console import Console, RenderableType

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.objectives.sft import SFT, SFTConfig
from open_instruct.rewards.ifeval import IFEval

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
WIDTHS = [72, 80, 140]
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.chdir(SCRIPTS.parent)
    return importlib.import_module


def printed(drawing: RenderableType, width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(drawing)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    return text


@pytest.mark.parametrize("name", ["demo_dpo", "demo_grpo", "demo_real", "demo_tools", "demo_agent"])
def test_importing_a_demo_does_not_load_torch(name: str) -> None:
    code = (
        f"import runpy, sys; sys.path.insert(0, 'scripts'); runpy.run_path('scripts/{name}.py'); "
    )
    code += "sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], cwd=SCRIPTS.parent, env={"PYTHONPATH": "."}
        ).returncode
        == 0
    )


@pytest.mark.parametrize(("name", "data"), [("demo_grpo", "DATA"), ("demo_tools", "FOLDER")])
def test_grpo_uses_what_sft_leaves(load: Load, name: str, data: str) -> None:
    demo = load(name)
    folder = getattr(demo, data)
    sft, grpo = parse_run(SFTConfig, demo.sft_flags()), parse_run(GRPOConfig, demo.grpo_flags())
    assert SFT.validate(sft) == [] and validate_grpo(grpo) == []
    assert sft.model.model_name_or_path == str(demo.MODEL)
    assert sft.data.mixer_list[0] == str(folder / "sft.jsonl")
    assert grpo.model.model_name_or_path == f"{sft.run.output_dir}/hf_model"
    assert grpo.data.dataset_mixer_list[0] == str(folder / "prompts.jsonl")
    assert grpo.data.dataset_mixer_eval_list[0] == str(folder / "held_out.jsonl")
    assert grpo.run.output_dir == str(demo.GRPO)
    assert grpo.evaluation.eval_on_step_0


def test_agent_learns_from_the_warm_start_of_the_tools_demo(load: Load) -> None:
    demo, tools = load("demo_agent"), load("demo_tools")
    grpo = parse_run(GRPOConfig, demo.grpo_flags())
    assert validate_grpo(grpo) == []
    assert grpo.model.model_name_or_path == f"{tools.SFT}/hf_model"
    assert grpo.environment.environment == "agent:scripts/demo_data/product_agent.py:solve"
    assert grpo.run.output_dir == str(demo.GRPO)


def test_few_examples_call_the_tool_and_no_held_out_product_is_among_them(
    load: Load, tmp_path: Path
) -> None:
    demo = load("demo_tools")
    demo.TEMPLATE = tmp_path / "template.jinja"
    demo.write_products(tmp_path, seed=0)
    rows = {
        name: load("demo_shell").rows_of(tmp_path / f"{name}.jsonl")
        for name in ("sft", "prompts", "held_out")
    }
    asked = {name: {row["messages"][0]["content"] for row in each} for name, each in rows.items()}
    assert not asked["held_out"] & (asked["sft"] | asked["prompts"])
    calling = [row for row in rows["sft"] if len(row["messages"]) == 4]
    assert 0.3 < len(calling) / len(rows["sft"]) < 0.5
    _, call, said, answer = (turn["content"] for turn in calling[0]["messages"])
    assert said == answer == str(eval(call.split('"')[1])) and call.startswith("[calculate(")


@pytest.mark.parametrize("width", WIDTHS)
def test_tools_summary_fits(load: Load, width: int) -> None:
    demo = load("demo_tools")
    metrics = [
        {"reward": reward, "episodes/turns": 1 + reward, "logprob_diff/max": 2e-6}
        for reward in (0.25, 0.75)
    ]
    evaluations = [{"eval/reward": 0.3}, {"eval/reward": 0.9}]
    text = printed(
        demo.summary(metrics=metrics, evaluations=evaluations, elapsed_s=180.0, width=width), width
    )
    words = " ".join(text.replace("│", " ").split())
    for fact in ("30.0% -> 90.0%", "25% -> 75% of the completions", "2.0e-06", "3.0 minutes"):
        assert fact in words


@pytest.mark.parametrize("width", WIDTHS)
def test_grpo_summary_fits(load: Load, width: int) -> None:
    demo = load("demo_grpo")
    times = {"time/generate": 0.5, "time/train": 0.25, "time/sync": 0.125}
    metrics = [
        {"reward": reward, "sequence_length/mean": 8 * reward, "logprob_diff/max": 2e-6} | times
        for reward in (0.25, 0.5, 0.75)
    ]
    evaluations = [{"eval/reward": 0.3}, {"eval/reward": 0.85}]
    text = printed(
        demo.summary(metrics=metrics, evaluations=evaluations, elapsed_s=240.0, width=width), width
    )
    words = " ".join(text.replace("│", " ").split())
    for fact in (
        "30.0% -> 85.0%",
        "in 3 steps",
        "2.0 -> 6.0 tokens",
        "0.50 waiting",
        "2.0e-06",
        "4.0 minutes",
    ):
        assert fact in words
    assert text.count("┤") == load("demo_shell").CURVE_HEIGHT


def test_grpo_samples_show_both_answers(load: Load) -> None:
    sample = {"prompt": "<|bos|><|user|>\nWhat is 1 + 2?\n<|assistant|>\n", "ground_truth": ["3"]}
    before, after = (
        sample | {"completion": " 4", "reward": 0.0},
        sample | {"completion": "1+2=3 3", "reward": 1.0},
    )
    text = printed(load("demo_grpo").samples([before], [after]), 100)
    assert "What is 1 + 2?" in text and "4 ✗" in text and "1+2=3 3 ✓" in text


def test_real_model_is_given_the_questions_that_the_demo_writes(load: Load, tmp_path: Path) -> None:
    demo = load("demo_real")
    config = parse_run(GRPOConfig, demo.grpo_flags())
    assert validate_grpo(config) == []
    assert config.model.model_name_or_path == str(demo.MODEL)
    assert config.data.dataset_mixer_list[0] == str(demo.FOLDER / demo.PROMPTS_FILE)
    assert config.data.dataset_mixer_eval_list[0] == str(demo.FOLDER / demo.HELD_OUT_FILE)

    demo.write_questions(tmp_path)
    rows_of = load("demo_shell").rows_of
    questions, held_out = (
        {row["messages"][0]["content"] for row in rows_of(tmp_path / name)}
        for name in (demo.PROMPTS_FILE, demo.HELD_OUT_FILE)
    )
    assert len(questions) == 150 and len(held_out) == 32 and not questions & held_out


@pytest.mark.parametrize(
    ("reply", "num_kept"),
    [
        ("the sky is blue because small particles scatter light.", 3),
        ("The sky is blue because small particles scatter light.", 2),
        ("Blue light is scattered. That is why.", 0),
    ],
)
def test_reward_of_a_real_reply_is_the_share_of_constraints(
    load: Load, reply: str, num_kept: int
) -> None:
    constraints = load("demo_data.written_questions").CONSTRAINTS
    assert IFEval().score(reply, constraints) == pytest.approx(num_kept / 3)


def test_recipes_teach_the_first_sentence_of_an_answer(load: Load) -> None:
    recipe = load("recipe_rows")
    answered = [("How far is it?", "It is 3.5 km. That is near."), ("Why?", "Nobody knows.")]
    rows = recipe.build_rows(answered)
    (pair,) = rows["brevity"]
    assert pair["chosen"] == recipe.turns("How far is it?", "It is 3.5 km.")
    assert pair["rejected"] == recipe.turns(*answered[0])
    replies = [row["messages"][-1]["content"] for row in rows["json"]]
    assert [json.loads(reply)["answer"] for reply in replies] == ["It is 3.5 km.", "Nobody knows."]


@pytest.mark.parametrize("width", WIDTHS)
def test_real_replies_and_summary_fit(load: Load, width: int) -> None:
    demo = load("demo_real")
    prompt = f"<|im_start|>user\nWhy is the sky blue? {demo.REQUEST}<|im_end|>\n"
    before = {"prompt": prompt, "completion": "It is blue.", "reward": 1 / 3}
    after = before | {"completion": "it is blue because of the light.", "reward": 1.0}
    text = printed(demo.replies([before], [after]), width)
    assert "Why is the sky blue?" in text.replace("\n", " ") and demo.REQUEST not in text
    assert "1 of 3" in text and "3 of 3" in text

    metrics = [{"reward": reward} for reward in (0.25, 0.5, 0.75)]
    evaluations = [
        {"eval/reward": 0.344, "eval/pass_at_1": 0.0},
        {"eval/reward": 0.719, "eval/pass_at_1": 0.5},
    ]
    summary = demo.summary(metrics=metrics, evaluations=evaluations, elapsed_s=360.0, width=width)
    words = " ".join(printed(summary, width).replace("│", " ").split())
    for fact in ("0.344 -> 0.719 in 3 steps", "0% -> 50%", "6.0 minutes"):
        assert fact in words


def test_dpo_accepts_the_flags(load: Load) -> None:
    demo = load("demo_dpo")
    config = parse_run(DPOConfig, demo.dpo_flags())
    assert validate_dpo(config) == []
    assert config.run.output_dir == str(demo.RUN)
    assert config.run.overwrite_output_dir
    # HSDP needs two copies at least, of two shards at least.
    assert config.parallel.fsdp_shard_degree == 2
    assert demo.NUM_RANKS == 4


@pytest.mark.parametrize("width", WIDTHS)
def test_dpo_summary_fits(load: Load, width: int) -> None:
    demo = load("demo_dpo")
    metrics = [
        {
            "step": step,
            "loss": 0.7 / step,
            "rewards/margin": 0,
            "tokens_per_second": speed,
            "num_tokens": 1000 * step,
        }
        for step, speed in ((1, 1.0), (2, 500.0), (3, 700.0))
    ]
    scores = [
        {"step": 0, "eval/preference_accuracy": 0.5},
        {"step": 3, "eval/preference_accuracy": 0.875},
    ]
    evaluations = [score | {"eval/num_pairs": 128} for score in scores]
    layout = {"num_replicas": 2, "shard_degree": 2, "shard_groups": [[0, 1], [2, 3]]}
    text = printed(
        demo.summary(
            metrics=metrics, evaluations=evaluations, layout=layout, elapsed_s=90.0, width=width
        ),
        width,
    )
    for fact in (
        "50.0% -> 87.5% of 128 pairs",
        "0.7000 -> 0.2333 in 3 steps",
        "600 tokens/s, 3,000 tokens in all",
        "2 copies of 2 shards: [0, 1], [2, 3]",
        "demo_output/run/hf_model",
        "1.5 minutes",
    ):
        assert fact in text
    # Each curve is whole: one axis a line, none broken by the frame.
    assert text.count("┤") == 2 * demo.CURVE_HEIGHT
