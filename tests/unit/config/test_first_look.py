"""Files, folders and templates that will not do are refused before torch is loaded."""

import json
import shutil
from pathlib import Path

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.core.errors import InputError
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.run.first_look import check_paths, fetch_folder
from tests.refusals import refused
from tests.unit.commands.test_cli import run_dpo


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run that has ended, as far as names go, with the rows that it learned."""
    model = tmp_path / "out" / "hf_model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps({"model_type": "olmo2"}))
    (model / "model.safetensors").touch()
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (tmp_path / "config_alone").mkdir()
    shutil.copy(model / "config.json", tmp_path / "config_alone")
    step = tmp_path / "out" / "step3"
    step.mkdir()
    (step / "checkpoint.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    return tmp_path


def words(run: Path, **given: object) -> list[str]:
    settings = {
        "model_name_or_path": run / "out" / "hf_model",
        "mixer_list": f"{run}/rows.jsonl 1.0",
        "output_dir": run / "new",
    }
    return [
        word
        for name, value in (settings | given).items()
        for word in (f"--{name}", *str(value).split())
    ]


@pytest.mark.parametrize(
    "given", [{}, {"model_name_or_path": "a/hub-name"}, {"mixer_list": "a/hub-name 1.0"}]
)
def test_first_look_accepts_what_will_do(run: Path, given: dict[str, str]) -> None:
    check_paths(parse_run(DPOConfig, words(run, **given)))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"model_name_or_path": "{run}/out"}, "did you mean {run}/out/hf_model?"),
        ({"model_name_or_path": "{run}/out/step3"}, "did you mean {run}/out/hf_model?"),
        ({"model_name_or_path": "{run}/gone"}, "{run}/gone: there is no such folder"),
        ({"model_name_or_path": "{run}"}, "{run}/config.json: no such file"),
        ({"model_name_or_path": "{run}/rows.jsonl"}, "{run}/rows.jsonl is a file"),
        (
            {"model_name_or_path": "{run}/config_alone"},
            "{run}/config_alone holds no weights: model.safetensors or",
        ),
        (
            {"mixer_list": "{run}/row.jsonl 1.0"},
            "--mixer_list: {run}/row.jsonl: no such file (a name like this is not looked for on "
            "the hub). Did you mean {run}/rows",
        ),
        (
            {"eval_mixer_list": "{run}/rows.jsonl 1.0 {run}/b.jsonl 1"},
            "--eval_mixer_list: {run}/b.jsonl: no such file",
        ),
        (
            {"tokenizer_name_or_path": "{run}/no"},
            "--tokenizer_name_or_path: {run}/no: there is no such folder",
        ),
        ({"tokenizer_name_or_path": "{run}/out"}, "{run}/out has no tokenizer.json"),
        ({"chat_template_name": "tuluu"}, "--chat_template_name 'tuluu' is not a template"),
    ],
)
def test_first_look_refuses_what_is_not_there(run: Path, given: dict[str, str], part: str) -> None:
    config = parse_run(
        DPOConfig, words(run, **{name: value.format(run=run) for name, value in given.items()})
    )
    with pytest.raises(InputError) as refused:
        check_paths(config)
    assert part.format(run=run) in str(refused.value)


def test_prompts_and_teachers_of_grpo_are_looked_for_too(run: Path) -> None:
    given = words(run, dataset_mixer_list=f"{run}/prompts.jsonl 1.0")
    at = given.index("--mixer_list")
    config = parse_run(GRPOConfig, given[:at] + given[at + 3 :])
    with refused("missing_file", "dataset_mixer_list", "prompts.jsonl"):
        check_paths(config)


@pytest.mark.parametrize(
    ("text", "is_refused"),
    [
        ("{% for message in messages %}", True),
        ("{% for message in messages %}{% break %}{% endfor %}", False),
        # A tag that transformers adds.
        ("{% generation %}{{ messages }}{% endgeneration %}", False),
    ],
)
def test_template_that_cannot_be_parsed(run: Path, text: str, is_refused: bool) -> None:
    template = run / "mine.jinja"
    template.write_text(text)
    config = parse_run(DPOConfig, words(run, chat_template_name=template))
    if is_refused:
        with refused("bad_value", None, "mine.jinja", "1"):
            check_paths(config)
    else:
        check_paths(config)


def test_first_look_loads_no_torch_and_leaves_no_folder(run: Path) -> None:
    done = run_dpo(*words(run, model_name_or_path=run / "out"))
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"did you mean {run}/out/hf_model?")
    assert not (run / "new").exists()
    assert fetch_folder(str(run)) == run, "a folder is its own copy"
