"""Launches of other suites in our flags: files and flags of every form, and what is said of what
differs.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.cli import main
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import Flag, list_flags
from open_instruct.config.resolved import as_flat_dict
from open_instruct.migrate.from_suite import READERS
from open_instruct.migrate.suites.rule_values import LEFT_OUT, translate_words
from open_instruct.migrate.suites.settings import Settings
from open_instruct.migrate.suites.tables import Rule, Table, find_table, find_trainers
from open_instruct.migrate.translation import Translation, translate
from open_instruct.objectives.registry import load_objective
from tests.refusals import refused

CASES: dict[str, Any] = yaml.load(
    Path(__file__).with_name("suite_cases.yaml").read_text(encoding="utf-8"),
    Loader=yaml.CSafeLoader,
)
TABLES = [(suite, trainer) for suite in READERS for trainer in find_trainers(suite)]


def translated(suite: str, words: str, trainer: str = "", **known: float) -> Translation:
    settings = READERS[suite](words.split())
    return translate(find_table(suite, trainer or settings.trainer), settings, known)


def config_values(translation: Translation) -> dict[str, Any]:
    """The flags of the run that a translation describes."""
    return as_flat_dict(
        parse_run(load_objective(translation.command).config_class, translation.words)
    )


def cases(kind: str) -> list[tuple[Any, ...]]:
    return [
        (suite, launch, expected)
        for suite, listed in CASES[kind].items()
        for launch, expected in listed.items()
    ]


class TestCases:
    @pytest.mark.parametrize(("suite", "launch", "expected"), cases("same"))
    def test_settings_keep_their_meaning(
        self, suite: str, launch: str, expected: dict[str, Any]
    ) -> None:
        translation = translated(suite, launch, num_gpus=4.0, num_rows=1000.0)
        assert translation.refused == {}
        values = config_values(translation)
        assert {name: values[name] for name in expected} == expected

    @pytest.mark.parametrize(("suite", "launch", "keys"), cases("refused"))
    def test_what_cannot_be_had_is_named(self, suite: str, launch: str, keys: list[str]) -> None:
        translation = translated(suite, launch)
        assert sorted(translation.refused) == sorted(keys)
        assert config_values(translation)

    @pytest.mark.parametrize(("suite", "launch", "flags"), cases("missing"))
    def test_what_the_launch_does_not_say_is_asked_for(
        self, suite: str, launch: str, flags: list[str]
    ) -> None:
        translation = translated(suite, launch)
        assert not translation.is_whole
        assert set(flags) <= set(translation.missing)


@pytest.mark.parametrize(
    ("trainer", "words", "what", "is_listed"),
    [
        ("cpo", "", "the chosen reply's likelihood", False),
        ("cpo", "--loss_type simpo", "the chosen reply's likelihood", True),
        ("cpo", "--loss_type simpo --cpo_alpha 0.0", "the chosen reply's likelihood", False),
        ("sft", "--packing", "what is learned", True),
        ("sft", "--assistant_only_loss true", "what is learned", False),
        ("dpo", "--eval_strategy epoch", "eval_strategy", True),
        ("dpo", "--eval_strategy no --save_strategy no", "eval_strategy", False),
        ("grpo", "--loss_type cispo", "bound of cispo", True),
    ],
)
def test_difference_is_listed_where_it_is_one(
    trainer: str, words: str, what: str, is_listed: bool
) -> None:
    translation = translated(
        "trl", f"trl {trainer} --model_name_or_path m --dataset_name d {words}"
    )
    assert translation.refused == {} and (what in translation.differs) == is_listed


@pytest.mark.parametrize(("suite", "trainer"), TABLES)
class TestTables:
    def test_rules_name_flags_and_values_that_exist(self, suite: str, trainer: str) -> None:
        table = find_table(suite, trainer)
        flags = list_flags(load_objective(table.command).config_class)
        for name, rule in table.rules.items():
            outcomes = (
                rule.flag,
                rule.column,
                rule.part_of,
                rule.unneeded,
                rule.refused,
                rule.differs,
            )
            assert any(outcomes), name
            # Rules of the sections that all trainers share may be of a flag that this command has
            # not.
            if rule.flag in flags:
                for value in rule.values:
                    assert _accept(flags, rule, value), (name, value)

    def test_defaults_are_translated(self, suite: str, trainer: str) -> None:
        table = find_table(suite, trainer)
        flags = list_flags(load_objective(table.command).config_class)
        for name, value in table.defaults.items():
            rule = table.rules[name]
            assert rule.share_of is not None or _accept(flags, rule, value), name

    def test_every_setting_that_is_given_is_translated_or_named(
        self, suite: str, trainer: str
    ) -> None:
        table = find_table(suite, trainer)
        given = {name: ["3"] for name in table.rules if "*" not in name}
        translation = translate(table, Settings(trainer=trainer, values=given), {})
        assert [name for name in given if not _is_named(name, translation, table)] == []


def _accept(flags: dict[str, Flag], rule: Rule, value: str) -> bool:
    """Whether our flags take the words that a value becomes."""
    words = translate_words(rule, value.split())
    for place, name in enumerate(rule.flags if words != [LEFT_OUT] else ()):
        if name in flags:
            flags[name].parse_value(words[place : place + 1] if rule.form == "each" else words)
    return True


def _is_named(name: str, translation: Translation, table: Table) -> bool:
    said = (translation.renamed, translation.dropped, translation.refused, translation.differs)
    rule = table.rules[name]
    return any(name in sentences for sentences in said) or (
        rule.flag == name and name in translation.arguments
    )


class TestCommand:
    def test_yaml_gives_yaml_that_is_the_same_run(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        theirs, ours = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
        theirs.write_text(
            "model_name_or_path: m\ndataset_name: a:b\nlearning_rate: 5e-7\nloss_type: [sigmoid, "
            "sft]\n"
        )
        assert main(["migrate-args", "--from", "trl", "dpo", str(theirs)]) == 0
        ours.write_text(capsys.readouterr().out)
        config = as_flat_dict(parse_run(load_objective("dpo").config_class, [str(ours)]))
        assert (config["mixer_list"], config["learning_rate"]) == (["a:b", "1.0"], 5e-7)
        assert (config["loss_type"], config["max_seq_length"]) == (["dpo", "sft"], 1024)

    def test_json_has_all_of_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = (
            "--from trl --json trl dpo --model_name_or_path m --dataset_name d --use_dora "
            "--logging_steps 1"
        )
        assert main(["migrate-args", *words.split()]) == 2
        translation = json.loads(capsys.readouterr().out)
        assert translation["command"] == "dpo"
        assert list(translation["refused"]) == ["use_dora"] and list(translation["dropped"]) == [
            "logging_steps"
        ]
        assert translation["defaults"]["max_seq_length"] == {"there": 1024, "here": 2048}

    @pytest.mark.parametrize("place", ["in front", "behind"])
    def test_switches_stand_in_front_of_the_launch_or_behind(
        self, place: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        launch = ["trl", "dpo", "--model_name_or_path", "m", "--dataset_name", "d"]
        words = ["--json", *launch] if place == "in front" else [*launch, "--json"]
        assert main(["migrate-args", "--from", "trl", *words]) == 0
        assert json.loads(capsys.readouterr().out)["command"] == "dpo"

    @pytest.mark.parametrize("suite", ["trl", "openrlhf"])
    def test_process_reward_models_have_the_tables_of_their_own_command(
        self, suite: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        launch = "--model_name_or_path m --dataset_name rows.jsonl"
        if suite == "openrlhf":
            launch = (
                "--module openrlhf.cli.train_prm --pretrain m --dataset rows.jsonl "
                "--placeholder_token @ "
            )
            launch += "--reward_tokens + - --gradient_accumulation_steps 4"
        assert main(["migrate-args", "--from", suite, "prm", *launch.split()]) == 0
        assert capsys.readouterr().out.startswith("open-instruct prm")

    def test_help_is_given_behind_the_suites_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["migrate-args", "--from", "trl", "--help"]) == 0
        assert "--num_gpus" in capsys.readouterr().out

    def test_last_line_says_what_differs(self, capsys: pytest.CaptureFixture[str]) -> None:
        main(
            [
                "migrate-args",
                "--from",
                "trl",
                "trl",
                "sft",
                "--model_name_or_path",
                "m",
                "--dataset_name",
                "d",
            ]
        )
        last = capsys.readouterr().out.splitlines()[-1]
        assert "but for" in last and "what is learned" in last

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            ("--from nemo x.yaml", "llamafactory" if "llamafactory" in READERS else "trl"),
            ("--from trl --learning_rate 1e-6", "--from trl TRAINER"),
            ("--from trl trl gkd --learning_rate 1e-6", "'gkd'"),
            ("--from trl dpo", "FILE"),
            ("--from trl dpo none.yaml", "none.yaml: no such file"),
            ("--from trl --num_gpus two dpo --beta 1", "'two'"),
            ("--from open-instruct --seed 1", "--from open-instruct COMMAND"),
        ],
    )
    def test_request_that_cannot_be_followed_is_refused(
        self, words: str, part: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["migrate-args", *words.split()]) == 2
        assert part in capsys.readouterr().err

    def test_open_instructs_command_is_read_from_its_script(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = "open_instruct/dpo.py --model_name_or_path m --mixer_list r 1.0 --max_seq_length 8"
        assert main(["migrate-args", "--from", "open-instruct", *line.split()]) == 0
        output = capsys.readouterr().out
        assert output.startswith("open-instruct dpo") and "but for: upload" in output


class TestPythonScript:
    SCRIPT = """
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

BATCH = 4
model_id = "m"

def close_to_length(completions, **columns):
    raise SystemExit("nothing of a script is executed")

raise SystemExit("nothing of a script is executed")
rows = load_dataset("prompts", "main", split="train")
config = GRPOConfig(learning_rate=2e-6, per_device_train_batch_size=BATCH * 2, num_generations=4, max_steps=10,
                    run_name=pick_name(), output_dir="out")
trainer = GRPOTrainer(model=model_id, args=config, reward_funcs=[close_to_length], train_dataset=rows,
                      peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
"""

    def test_config_classes_are_read_and_not_executed(self, tmp_path: Path) -> None:
        path = tmp_path / "train.py"
        path.write_text(self.SCRIPT)
        translation = translated("trl", str(path), num_gpus=2.0)
        assert (
            list(translation.refused) == ["run_name"]
            and "pick_name()" in translation.refused["run_name"]
        )
        values = config_values(translation)
        expected = {
            "model_name_or_path": "m",
            "learning_rate": 2e-6,
            "num_unique_prompts_rollout": 4,
            "num_samples_per_prompt_rollout": 4,
            "total_episodes": 160,
            "dataset_mixer_list": ["prompts:main", "1.0"],
            "verifier": [f"{path}:close_to_length"],
            "lora_r": 8,
            "lora_target_modules": ["q_proj", "v_proj"],
        }
        assert {name: values[name] for name in expected} == expected

    def test_what_a_script_reads_from_its_flags_is_left_to_these(self, tmp_path: Path) -> None:
        path = tmp_path / "dpo.py"
        path.write_text(
            "rows = "
            "load(script_args.dataset_name)\nDPOTrainer(model=model_args.model_name_or_path, "
            "args=training_args, train_dataset=rows, callbacks=[mine()])\n"
        )
        translation = translated(
            "trl", f"accelerate launch {path} --model_name_or_path m --dataset_name d --beta 0.3"
        )
        assert list(translation.refused) == ["trainer.callbacks"]
        assert config_values(translation)["beta"] == 0.3

    @pytest.mark.parametrize(
        ("arguments", "names", "untranslated"),
        [
            ('"json", data_files="a.jsonl", split="train"', ["a.jsonl", "1.0"], []),
            ('"csv", data_files=["a.csv", "b.csv"]', ["a.csv", "1.0", "b.csv", "1.0"], []),
            ('"them", name="en", split="train"', ["them:en", "1.0"], []),
            ('"json", data_files={"train": "a.jsonl"}', None, ["trainer.train_dataset"]),
            ('"them", data_files="a.jsonl"', None, ["trainer.train_dataset"]),
            ('"them", revision="v2"', ["them", "1.0"], ["trainer.train_dataset.revision"]),
        ],
    )
    def test_files_that_a_script_loads_are_named(
        self, tmp_path: Path, arguments: str, names: list[str] | None, untranslated: list[str]
    ) -> None:
        path = tmp_path / "train.py"
        path.write_text(
            f'DPOTrainer(model="m", args=DPOConfig(), train_dataset=load_dataset({arguments}))'
        )
        translation = translated("trl", str(path))
        assert [name for name in translation.refused if name.startswith("trainer.")] == untranslated
        if names is not None:
            assert config_values(translation)["mixer_list"] == names

    def test_two_trainers_in_a_script_are_refused(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "train.py"
        path.write_text("SFTConfig(seed=1)\nDPOConfig(seed=1)\n")
        assert main(["migrate-args", "--from", "trl", str(path)]) == 2
        assert "sft, dpo" in capsys.readouterr().err


class TestShellScript:
    SCRIPT = """#!/bin/bash
# verl.trainer.main_ppo is not started by a comment
HOME_OF_ROWS=${HOME_OF_ROWS:-"rows"}
prompts=16
answers=$((prompts / 4)) # of each
FILES="['$HOME_OF_ROWS/a.parquet', '$HOME_OF_ROWS/b.parquet']"
DATA=(
    data.train_files="$FILES"   # both of them
    data.train_batch_size=${prompts}
)
python3 -m verl.trainer.main_ppo "${DATA[@]}" \\
    algorithm.adv_estimator=rloo \\
    actor_rollout_ref.model.path=$UNSET_MODEL \\
    actor_rollout_ref.rollout.n=$((answers * (1 + 1))) $@ && echo done
"""

    def test_variables_and_arithmetic_are_filled_in(self, tmp_path: Path) -> None:
        path = tmp_path / "run.sh"
        path.write_text(self.SCRIPT)
        settings = READERS["verl"]([str(path)])
        assert settings.trainer == "grpo"
        assert settings.values == {
            "data.train_files": ["rows/a.parquet", "rows/b.parquet"],
            "data.train_batch_size": ["16"],
            "algorithm.adv_estimator": ["rloo"],
            "actor_rollout_ref.model.path": ["$UNSET_MODEL"],
            "actor_rollout_ref.rollout.n": ["8"],
        }

    def test_text_that_is_read_into_a_variable_is_the_launch(self, tmp_path: Path) -> None:
        path = tmp_path / "run.sh"
        path.write_text(
            "read -r -d '' training <<EOF\nopenrlhf.cli.train_sft \\\n  --pretrain m --dataset "
            "d,e\nEOF\nif true; then\n    deepspeed --module $training\nfi\n"
        )
        settings = READERS["openrlhf"]([str(path)])
        assert (settings.trainer, settings.values) == (
            "sft",
            {"pretrain": ["m"], "dataset": ["d", "e"]},
        )

    def test_script_without_a_launch_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "run.sh"
        path.write_text("echo openrlhf.cli.train_sft\n")
        with refused("unreadable_file", None, "run.sh"):
            READERS["openrlhf"]([str(path)])


def test_nested_yaml_of_verl_is_read_with_its_references(tmp_path: Path) -> None:
    path = tmp_path / "verl.yaml"
    path.write_text(
        "trainer: {project_name: p, default_local_dir: "
        "'out/${trainer.project_name}'}\nactor_rollout_ref: {model: {path: m}, actor: {optim: "
        "{lr: 1e-6}}}\nalgorithm: {adv_estimator: grpo}\n"
    )
    settings = READERS["verl"]([str(path), "data.train_files=a"])
    assert settings.values["trainer.default_local_dir"] == ["out/p"]
    assert (
        config_values(translate(find_table("verl", "grpo"), settings, {}))["learning_rate"] == 1e-6
    )


class TestAxolotl:
    def translation(self, tmp_path: Path, text: str, num_gpus: float = 1.0) -> Translation:
        path = tmp_path / "axolotl.yaml"
        path.write_text(text)
        return translated("axolotl", f"axolotl train {path}", num_gpus=num_gpus)

    def test_nested_yaml_keeps_its_meaning(self, tmp_path: Path) -> None:
        text = """
base_model: m
rl: dpo
datasets:
  - path: a
    name: main
    split: train
    type: chatml.intel
    field_messages: talk
  - path: b
    type: chat_template
    field_messages: talk
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_target_linear: true
sequence_len: 4096
val_set_size: 0.05
micro_batch_size: 2
learning_rate: 2e-5
saves_per_epoch: 1
bf16: auto
wandb_entity:
dpo_loss_type: ["sigmoid"]
"""
        translation = self.translation(tmp_path, text)
        assert translation.refused == {} and translation.missing == {}
        assert translation.dropped["wandb_entity"] and translation.differs["datasets.type"]
        values = config_values(translation)
        expected = {
            "mixer_list": ["a:main", "1.0", "b", "1.0"],
            "mixer_list_splits": ["train", "train"],
            "columns": ["messages=talk"],
            "use_lora": True,
            "use_qlora": True,
            "lora_r": 32,
            "lora_target_modules": ["all-linear"],
            "max_seq_length": 4096,
            "eval_split": 0.05,
            "per_device_train_batch_size": 2,
            "learning_rate": 2e-5,
            "lr_scheduler_type": "cosine",
            "checkpointing_steps": 0,
            "loss_type": "dpo",
            "beta": 0.1,
        }
        assert {name: values[name] for name in expected} == expected

    def test_grpo_takes_its_own_section(self, tmp_path: Path) -> None:
        text = (
            "base_model: m\nrl: grpo\ndatasets: [{path: a}]\nmax_steps: 10\nmicro_batch_size: 8\n"
        )
        text += "trl: {num_generations: 4, loss_type: dr_grpo, max_completion_length: 64}\n"
        values = config_values(self.translation(tmp_path, text, num_gpus=2.0))
        expected = {
            "num_unique_prompts_rollout": 4,
            "total_episodes": 160,
            "response_length": 64,
            "loss_fn": "dr_grpo",
        }
        assert {name: values[name] for name in expected} == expected

    def test_what_cannot_be_had_is_named(self, tmp_path: Path) -> None:
        text = (
            "base_model: mistralai/Mistral-7B\nrl: kto\ndatasets: [{path: a}]\nload_in_8bit: "
            "true\nno_such: {key: 1}\n"
        )
        refused_settings = self.translation(tmp_path, text).refused
        assert sorted(refused_settings) == ["base_model", "load_in_8bit", "no_such.key"]


def test_words_behind_a_script_of_llamafactory_are_read(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "llamafactory-cli train --stage sft --model_name_or_path m --dataset d --output_dir o\n"
    )
    assert (
        config_values(translated("llamafactory", f"{path} learning_rate=0.5"))["learning_rate"]
        == 0.5
    )


def test_names_of_llamafactorys_list_become_files_and_data_sets_of_the_hub(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    facts = {"here": {"file_name": "rows.json"}, "there": {"hf_hub_url": "owner/rows"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(facts))
    path = tmp_path / "run.yaml"
    path.write_text(
        "stage: sft\nmodel_name_or_path: m\ndataset: here,there,unknown\noutput_dir: o\n"
    )
    mixer_list = config_values(translated("llamafactory", str(path)))["mixer_list"]
    assert mixer_list[::2] == [str(tmp_path / "data" / "rows.json"), "owner/rows", "unknown"]


def test_page_names_every_suite() -> None:
    page = (Path(__file__).parents[3] / "docs" / "migrate.md").read_text(encoding="utf-8")
    assert [name for name in (*READERS, "open-instruct") if f"| `{name}` |" not in page] == []


def test_setting_that_one_flag_reads_is_not_left_out_for_another() -> None:
    launch = (
        "llamafactory-cli train stage=dpo model_name_or_path=m dataset=a pref_beta=0.3 output_dir=o"
    )
    translation = translated("llamafactory", launch)
    assert "pref_beta" not in translation.dropped and config_values(translation)["beta"] == 0.3


@pytest.mark.parametrize(
    "text", ["? [a, b]\n: 3\n", "a: {b: {? [c] : 1}}\n", "- a\n", "a: [1\n", "a: &x [*x]\n"]
)
def test_yaml_that_is_no_mapping_of_settings_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with refused("unreadable_file", None, "a.yaml"):
        READERS["axolotl"]([str(path)])


def test_empty_list_or_mapping_is_a_setting_too(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("base_model: m\nplugins: []\nno_such: {}\n")
    assert READERS["axolotl"]([str(path)]).values == {
        "base_model": ["m"],
        "plugins": ["none"],
        "no_such": ["none"],
    }


STRANGE_VALUES = [
    "none",
    "true",
    "-1",
    "0",
    "a b",
    "",
    "1 2",
    "1e400",
    "nan",
    "0.5",
    "{}",
    "$NOT_SET",
    "\u00e9\ud800",
]


@pytest.mark.extended
@pytest.mark.parametrize(("suite", "trainer"), TABLES)
def test_any_values_give_a_run_that_is_accepted_and_lose_no_setting(
    suite: str, trainer: str
) -> None:
    table = find_table(suite, trainer)
    names = [name for name in table.rules if "*" not in name]
    drawn = random.Random(7)
    for number in (1, 5, 40):
        given = {
            name: drawn.choice(STRANGE_VALUES).split()
            for name in drawn.sample(names, min(number, len(names)))
        }
        translation = translate(table, Settings(trainer=trainer, values=given), {"num_gpus": 8.0})
        config_values(translation)
        assert [name for name in given if not _is_named(name, translation, table)] == []
