"""Flags and YAML into a config, its checks, its file, and what a resumed run may change."""

import contextlib
import os
import re
import subprocess
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from open_instruct.commands.layout import LayoutFlags
from open_instruct.commands.run_flags import join_backend, parse_run
from open_instruct.config import resolved
from open_instruct.config.flags import LARGEST_INT, NONE_WORDS, Flag, list_flags
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.help import (
    MOST_USED,
    docstring_parts,
    help_page,
    help_topic,
    select_flags,
)
from open_instruct.config.resolved import (
    _git_state,
    as_flat_dict,
    refuse_conflicts,
    resume_conflicts,
    write_config,
)
from open_instruct.config.suites.upstream_flags import translate_flag, upstream_table
from open_instruct.core.errors import InputError
from open_instruct.core.user_code import load_named
from open_instruct.losses.preference import PREFERENCE_LOSSES
from open_instruct.objectives.dpo import DPOConfig, validate_dpo
from open_instruct.objectives.registry import list_objectives, load_objective
from open_instruct.objectives.sft import SFTConfig
from tests.refusals import refused
from tests.tiers import num_examples

REPOSITORY = Path(__file__).resolve().parents[3]
SECTIONS = ("every", "dpo", "sft", "grpo", "reward_model")

REQUIRED = [
    "--model_name_or_path",
    "model",
    "--mixer_list",
    "rows.jsonl",
    "1.0",
    "--output_dir",
    "out",
]
GRPO_REQUIRED = [
    "--model_name_or_path",
    "model",
    "--dataset_mixer_list",
    "prompts.jsonl",
    "1.0",
    "--output_dir",
    "out",
]
CONFIGS = (DPOConfig, GRPOConfig)


def config_of(*words: str) -> DPOConfig:
    return parse_run(DPOConfig, [*REQUIRED, *words])


def refusal(*words: str) -> str:
    """What the parser says of these words after the required flags."""
    with pytest.raises(InputError) as caught:
        config_of(*words)
    return str(caught.value)


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(
        "model_name_or_path: model\nmixer_list: [rows.jsonl, 1.0]\noutput_dir: out\n" + text
    )
    return str(path)


def yaml_refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        parse_run(DPOConfig, [yaml_file(tmp_path, text)])
    return str(caught.value)


class TestCommandLine:
    def test_minimal_command_takes_every_default(self) -> None:
        config = config_of()
        assert config.model.model_name_or_path == "model"
        assert config.data.mixer_list == ["rows.jsonl", "1.0"]
        defaults = {
            flag.name: flag.default for flag in list_flags(DPOConfig).values() if not flag.required
        }
        defaults |= {"beta": 5.0}  # of dpo_norm
        assert {
            name: value for name, value in as_flat_dict(config).items() if name in defaults
        } == defaults

    @pytest.mark.parametrize(
        ("loss_type", "beta"),
        [
            *((name, loss.beta) for name, loss in PREFERENCE_LOSSES.items()),
            *[("dpo_norm", 5.0), ("dpo", 0.1)],
            # Of several losses it is that of the first with a reference.
            *[("dpo_norm sft", 5.0), ("sft dpo_norm", 5.0), ("orpo simpo", 0.1)],
        ],
    )
    def test_beta_follows_the_loss(self, loss_type: str, beta: float, tmp_path: Path) -> None:
        words = ["--loss_type", *loss_type.split()]
        config = config_of(*words)
        assert config.loss.beta == beta
        assert config_of(*words, "--beta", "none") == config
        assert config_of(*words, "--beta", "0.3").loss.beta == 0.3
        write_config(config, tmp_path / "config.yaml")
        assert f"\nbeta: {beta}\n" in (tmp_path / "config.yaml").read_text()
        # What is not given again is what it was, so the run is the same; with the default of
        # another loss it is not.
        assert resume_conflicts(as_flat_dict(config), config_of(*words)) == []
        assert len(resume_conflicts(as_flat_dict(config) | {"beta": 0.03}, config)) == 1

    @pytest.mark.parametrize(
        "text", ["loss_type: dpo\n", "loss_type: [dpo]\n", "loss_type:\n- dpo\n"]
    )
    def test_single_loss_is_one_word_in_every_spelling(self, tmp_path: Path, text: str) -> None:
        config = parse_run(DPOConfig, [yaml_file(tmp_path, text)])
        assert config.loss.loss_type == "dpo"
        write_config(config, tmp_path / "config.yaml")
        assert "\nloss_type: dpo\n" in (tmp_path / "config.yaml").read_text()
        several = parse_run(
            DPOConfig, [yaml_file(tmp_path, "loss_type: [dpo, sft]\nloss_weights: [1, 0.5]\n")]
        )
        assert several.loss.loss_type == ["dpo", "sft"] and several.loss.loss_weights == [1.0, 0.5]

    @pytest.mark.parametrize("words", [["--exp_name", "a\0b"], ["--eval_mixer_list", "a\udc80"]])
    def test_words_that_are_no_text_are_refused(self, words: list[str]) -> None:
        assert (
            refusal(*words) == f"{words[0]} holds a null byte or one that is not UTF-8; give text"
        )

    def test_all_missing_flags_are_listed(self) -> None:
        with refused("missing_flag", "model_name_or_path", "--mixer_list", "--output_dir"):
            parse_run(DPOConfig, [])

    def test_flag_with_a_bad_value_is_not_missing_too(self) -> None:
        with pytest.raises(InputError) as caught:
            parse_run(
                DPOConfig, ["--model_name_or_path", "--mixer_list", "a", "1.0", "--output_dir", "o"]
            )
        assert "missing" not in str(caught.value)

    def test_everything_wrong_is_said_at_once(self) -> None:
        message = refusal("--beta", "x", "--load_in_8bit", "--sed", "3", "--packing", "maybe")
        assert [line.split()[0] for line in message.splitlines()] == [
            "--beta",
            "--load_in_8bit",
            "--sed",
            "--packing",
        ]

    @pytest.mark.parametrize("words", [["rows.jsonl"], ["-x", "1"], ["1.0", "--beta", "2"]])
    def test_words_before_the_first_flag_are_refused(self, words: list[str]) -> None:
        with refused("stray_word", "name", f"{words[0]}"):
            parse_run(DPOConfig, [*words, *REQUIRED])

    @given(
        st.lists(
            st.one_of(
                st.text(), st.sampled_from(["--beta", "--packing", "--mixer_list", "x=", "1"])
            )
        )
    )
    @settings(max_examples=num_examples(25))
    def test_no_words_give_anything_but_a_config_or_an_input_error(self, words: list[str]) -> None:
        with contextlib.suppress(InputError):
            assert isinstance(parse_run(DPOConfig, words), DPOConfig)


class TestUpstreamFlags:
    def test_flag_without_use_is_refused_where_nothing_lists_it(self) -> None:
        for elsewhere, words in ((LayoutFlags, []), (DPOConfig, REQUIRED)):
            with refused("foreign_flag", "hf_repo_url", "--hub_model_id"):
                parse_run(elsewhere, [*words, "--hf_repo_url", "u"])

    def test_command_hears_its_own_sentence(self) -> None:
        assert (
            parse_run(GRPOConfig, [*GRPO_REQUIRED, "--eval_steps", "3"]).evaluation.local_eval_every
            == 3
        )
        with refused("foreign_flag", "num_processes", "--num_learners_per_node"):
            parse_run(GRPOConfig, [*GRPO_REQUIRED, "--num_processes", "3"])

    @pytest.mark.parametrize(
        ("words", "mixer_list"),
        [
            ("--dataset_mixer_list a.jsonl 2.0", ["a.jsonl", "2.0"]),
            ('--dataset_mixer {"a":1.0,"b":500}', ["a", "1.0", "b", "500"]),
            ("--dataset_name a", ["a", "1.0"]),
        ],
    )
    def test_mixtures_are_taken(self, words: str, mixer_list: list[str]) -> None:
        assert (
            parse_run(DPOConfig, [*REQUIRED[:2], *REQUIRED[5:], *words.split()]).data.mixer_list
            == mixer_list
        )

    @pytest.mark.parametrize(
        "words", [["--push_to_hub", "false"], ["--no_push_to_hub"], ["--hf_repo_id", "none"]]
    )
    def test_upstream_launches_ask_for_no_upload(self, words: list[str]) -> None:
        assert parse_run(DPOConfig, [*REQUIRED, *words], unneeded=[]) == config_of()

    @pytest.mark.parametrize(
        "words",
        [
            *(
                "--with_tracking",
                "--hf_repo_url u",
                "--hf_entity none",
                "--try_launch_beaker_eval_jobs False",
            ),
            *(
                "--logging_steps 1",
                "--use_slow_tokenizer",
                "--trust_remote_code false",
                "--load_in_8bit False",
            ),
            *("--no_load_balancing_loss", "--oe_eval_tasks a,b", "--deepspeed_config_file ds.conf"),
        ],
    )
    def test_flags_without_use_are_left_out_and_named(self, words: str) -> None:
        told: list[str] = []
        assert parse_run(DPOConfig, [*REQUIRED, *words.split()], unneeded=told) == config_of()
        (line,) = told
        assert line.startswith(f"{words.split()[0]} (")

    @pytest.mark.parametrize(
        ("words", "never"),
        [
            ("--apply_verifiable_reward false", "--verification_reward"),
            ("--tool_parser_type x --tools code", "--lr_scheduler_type"),
            ("--max_steps some --tools code", "--async_steps"),
        ],
    )
    def test_none_is_taken_for_a_flag_that_it_is_not(self, words: str, never: str) -> None:
        with pytest.raises(InputError) as caught:
            parse_run(GRPOConfig, [*GRPO_REQUIRED, *words.split()])
        assert never not in str(caught.value)

    def test_beta_is_0_without_a_reference_policy(self) -> None:
        for words in (
            "--load_ref_policy false",
            "--load_ref_policy false --beta 0.0",
            "--beta 0 --no_load_ref_policy",
        ):
            assert parse_run(GRPOConfig, [*GRPO_REQUIRED, *words.split()]).loss.beta == 0
        with refused("repeated_flag", "beta", "--load_ref_policy"):
            parse_run(GRPOConfig, [*GRPO_REQUIRED, "--beta", "0.1", "--load_ref_policy", "false"])

    @pytest.mark.parametrize("section", SECTIONS)
    def test_reasons_name_only_flags_that_exist(self, section: str) -> None:
        known = {
            name
            for config_class in (DPOConfig, SFTConfig, GRPOConfig)
            for name in list_flags(config_class)
        }
        known |= {"nproc_per_node", "nnodes", "tools", "additive_format_reward"}
        for name, entry in upstream_table(section).items():
            named = re.findall(r"--(\w+)", f"{entry.unneeded} {entry.refused}")
            assert set(named) <= known, name
            assert entry.ours is None or entry.ours in known, name

    def test_yaml_key_means_the_same(self, tmp_path: Path) -> None:
        told: list[str] = []
        text = "dpo_beta: 3\nwith_tracking: true\ncheckpointing_steps: epoch\nlogging_steps: 1\n"
        config = parse_run(DPOConfig, [yaml_file(tmp_path, text)], unneeded=told)
        assert (config.loss.beta, config.run.checkpointing_steps, len(told)) == (3.0, 0, 2)
        path = tmp_path / "mixture.yaml"
        path.write_text(
            "model_name_or_path: m\noutput_dir: o\ndataset_mixer:\n  a: 1.0\n  b: 500\n"
        )
        assert parse_run(DPOConfig, [str(path)]).data.mixer_list == ["a", "1.0", "b", "500"]
        assert "line 4: trust_remote_code is refused" in yaml_refusal(
            tmp_path, "trust_remote_code: true\n"
        )


class TestYaml:
    def test_values_mean_what_they_mean_on_the_command_line(self, tmp_path: Path) -> None:
        path = yaml_file(
            tmp_path,
            "learning_rate: 5e-7\nmax_train_steps: null\ntokenizer_name_or_path: ~\npacking: "
            "False\nmax-seq-length: 1_024\nreport_to:\n  - wandb\neval_mixer_list: [a.jsonl, 1.0, "
            "b.jsonl, 2]\nbeta: 5\n",
        )
        config = parse_run(DPOConfig, [path])
        assert config.optim.learning_rate == 5e-7
        assert config.optim.max_train_steps is None
        assert config.model.tokenizer_name_or_path is None
        assert config.data.packing is False
        assert config.data.max_seq_length == 1024
        assert config.logging.report_to == ["wandb"]
        assert config.data.eval_mixer_list == ["a.jsonl", "1.0", "b.jsonl", "2"]
        assert config.loss.beta == 5.0

    def test_held_out_rows_of_the_command_line_replace_those_of_the_file(
        self, tmp_path: Path
    ) -> None:
        file = yaml_file(
            tmp_path,
            ("eval_mixer_list: [held.jsonl, 1.0]\neval_mixer_list_splits: [test]\neval_steps: 5\n"),
        )
        told: list[str] = []
        data = parse_run(DPOConfig, [file, *REQUIRED, "--eval_split", "0.1"], unneeded=told).data
        assert (data.eval_split, data.eval_mixer_list, data.eval_mixer_list_splits) == (
            0.1,
            [],
            ["train"],
        )
        assert data.eval_steps == 5 and [word.split()[0] for word in told] == [
            "eval_mixer_list",
            "eval_mixer_list_splits",
        ]
        assert parse_run(DPOConfig, [file, *REQUIRED, "--eval_split", "none"]).data.eval_mixer_list
        file = yaml_file(tmp_path, "eval_split: 0.1\n")
        data = parse_run(
            DPOConfig, [file, *REQUIRED, "--eval_mixer_list", "held.jsonl", "1.0"]
        ).data
        assert (data.eval_split, data.eval_mixer_list) == (None, ["held.jsonl", "1.0"])

    def test_command_line_replaces_and_completes_the_file(self, tmp_path: Path) -> None:
        path = yaml_file(tmp_path, "beta: 5\nreport_to: [wandb]\npacking: false\n")
        config = parse_run(DPOConfig, [path, "--beta", "2", "--report_to", "--packing"])
        assert (config.loss.beta, config.logging.report_to, config.data.packing) == (2.0, [], True)
        (tmp_path / "part.YML").write_text("model_name_or_path: model\n")
        assert parse_run(DPOConfig, [str(tmp_path / "part.YML"), *REQUIRED[2:]]) == config_of()
        (tmp_path / "empty.yaml").write_text("# nothing yet\n")
        assert parse_run(DPOConfig, [str(tmp_path / "empty.yaml"), *REQUIRED]) == config_of()

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            (
                "beta: 1\nlerning_rate: 1\n",
                ("unknown_flag", "lerning_rate", "line 5", "learning_rate"),
            ),
            ("beta: 1\nseed: 2\nbeta: 3\n", ("repeated_flag", "beta", "line 6")),
            ("beta: 1\ndpo_beta: 3\n", ("repeated_flag", "beta", "line 5")),
            ("beta: much\n", ("bad_value", "beta", "line 4", "'much'")),
            ("seed: null\n", ("bad_value", "seed", "line 4")),
            ("seed:\n", ("bad_value", "seed", "line 4")),
            ("beta: [1, 2]\n", ("stray_word", "beta", "line 4", "'2'", "'1'")),
            ("loss:\n  beta: 1\n", ("unknown_flag", "loss", "line 4")),
            ("beta: {x: 1}\n", ("stray_word", "beta", "line 4")),
            ("dpo_beta: &a [*a]\n", ("bad_value", "dpo_beta", "line 4")),
            ("beta: &a {x: *a}\n", ("bad_value", "beta", "line 4")),
            ("report_to: [[wandb]]\n", ("bad_value", "report_to", "line 4")),
            (
                "eval_mixer_list: null\nstop_strings: ~\n",
                ("unknown_flag", "stop_strings", "line 5"),
            ),
            ("[a, b]: 1\n", ("unreadable_file", None, "line 4")),
            ("packing: yes\n", ("bad_value", "packing", "line 4", "'yes'")),
            ("no_packing: true\n", ("unknown_flag", "no_packing", "line 4", "packing")),
        ],
    )
    def test_refusals_name_file_line_and_key(
        self, tmp_path: Path, text: str, problem: tuple[Any, ...]
    ) -> None:
        with refused(*problem) as caught:
            parse_run(DPOConfig, [yaml_file(tmp_path, text)])
        assert str(caught.value).startswith(str(tmp_path / "run.yaml"))

    def test_none_is_an_empty_list_where_that_is_the_default(self) -> None:
        given = ["--output_dir", "o", "--model_name_or_path", "m", "--mixer_list", "r", "1.0"]
        assert parse_run(DPOConfig, [*given, "--report_to", "none"]).logging.report_to == []
        with refused("bad_value", "report_to", "wandb tensorboard"):
            parse_run(DPOConfig, [*given, "--report_to", "wandb,tensorboard"])

    def test_word_is_a_list_of_one_and_null_an_empty_list(self, tmp_path: Path) -> None:
        config = parse_run(
            DPOConfig, [yaml_file(tmp_path, "report_to: wandb\neval_mixer_list: null\n")]
        )
        assert (config.logging.report_to, config.data.eval_mixer_list) == (["wandb"], [])

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (b"beta: 1\nseed: [1\n  x: }\n", " line 3: not valid YAML"),
            (b"[" * 600, ": lists or mappings nested too deep"),
            (b"{a: " * 600, ": lists or mappings nested too deep"),
            (b"report_to: " + b"[" * 600 + b"]" * 600, ": lists or mappings nested too deep"),
            (b"- beta\n- 1\n", ": expected lines of 'flag: value'"),
            (b"just words\n", ": expected lines of 'flag: value'"),
            (b"beta: \xff\xfe\n", ": cannot be read as UTF-8"),
            (b"beta: \x00\n", ": not valid YAML"),
            (None, ": no such file"),
        ],
        ids=range(9),
    )
    def test_yaml_that_is_no_flat_mapping_is_refused(
        self, tmp_path: Path, content: bytes | None, told: str
    ) -> None:
        path = tmp_path / "bad.yaml"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=re.escape(f"{path}{told}")):
            parse_run(DPOConfig, [str(path)])

    def test_home_and_variables_are_filled_in_for_every_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/home/me")
        monkeypatch.setenv("SCRATCH", "/scratch")
        text = "cache_dir: ${SCRATCH}/cache\n"
        words = ["--output_dir", "~/runs/a", "--mixer_list", "$SCRATCH/rows.jsonl", "0.5"]
        config = parse_run(DPOConfig, [yaml_file(tmp_path, text), *words])
        assert config.run.output_dir == "/home/me/runs/a"
        assert config.data.mixer_list == ["/scratch/rows.jsonl", "0.5"]
        assert config.data.cache_dir == "/scratch/cache"

    @pytest.mark.parametrize("path", ["$NOT_SET/a", "${NOT_SET}/a", "~no_such_user/a"])
    def test_path_that_cannot_be_filled_in_is_refused(self, path: str) -> None:
        with refused("bad_value", "output_dir", path.partition("/")[0].strip("${}")):
            parse_run(
                DPOConfig,
                ["--output_dir", path, "--model_name_or_path", "m", "--mixer_list", "r", "1.0"],
            )

    def test_folder_is_no_file(self, tmp_path: Path) -> None:
        folder = tmp_path / "folder.yaml"
        folder.mkdir()
        with refused("unreadable_file"):
            parse_run(DPOConfig, [str(folder)])

    @pytest.mark.parametrize(
        "word", ["dpo/tiny_cpu", "configs/dpo/tiny_cpu.yaml", "configs/dpo/tiny_cpu"]
    )
    def test_file_of_the_package_goes_by_its_name(
        self, word: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir("/")
        assert parse_run(DPOConfig, [word, "--seed", "3"]).run.output_dir == "runs/tiny_cpu"
        with refused("stray_word", None, "dpo/tiny_cpu"):
            parse_run(DPOConfig, ["dpo/tini_cpu"])

    def test_only_one_file(self, tmp_path: Path) -> None:
        path = yaml_file(tmp_path, "")
        with refused("stray_word"):
            parse_run(DPOConfig, [path, path])


class TestHelp:
    def test_every_flag_is_shown_with_its_meaning_and_default(self) -> None:
        text = help_page(DPOConfig, "program", 100, topic="all").plain
        joined = " ".join(text.split())
        for flag in list_flags(DPOConfig).values():
            assert f"--{flag.name} {flag.metavar}" in joined
            assert " ".join(flag.help.split()) in joined
        assert "--max_seq_length INT [default: 2048]" in joined
        assert "--output_dir STR [required]" in joined
        assert "usage: program [FILE.yaml] --model_name_or_path STR" in joined
        examples = docstring_parts(DPOConfig)[1]
        assert "--help all" not in joined
        assert len(examples) == 2 and all(example in text for example in examples)

    @pytest.mark.parametrize("command", list_objectives())
    def test_few_flags_are_shown_at_first_with_an_example_that_names_no_checkout(
        self, command: str
    ) -> None:
        config_class = load_objective(command).config_class
        chosen = [flag for flags in select_flags(config_class, None).values() for flag in flags]
        assert 10 <= len(chosen) <= 22 and {flag.name for flag in chosen if flag.required} >= {
            "output_dir"
        }
        page = help_page(config_class, "program", 100).plain
        assert f"{len(chosen)} of {len(list_flags(config_class))} flags" in " ".join(page.split())
        assert all(
            "configs/" not in example and ".py" not in example
            for example in docstring_parts(config_class)[1]
        )

    def test_flags_most_runs_set_are_flags(self) -> None:
        known = set().union(
            *(list_flags(load_objective(name).config_class) for name in list_objectives())
        )
        assert known >= MOST_USED

    def test_word_behind_help_chooses_the_flags_about_it(self) -> None:
        assert help_topic(["run.yaml", "--help", "--lora-r"]) == "lora-r"
        assert help_topic(["--seed", "1", "-h"]) is None
        chosen = {flag.name for flags in select_flags(DPOConfig, "lora").values() for flag in flags}
        assert chosen >= {"use_lora", "lora_r", "adapter_name_or_path"} and "beta" not in chosen
        assert {
            flag.name for flags in select_flags(DPOConfig, "lora-r").values() for flag in flags
        } == {"lora_r"}
        page = help_page(DPOConfig, "program", 100, topic="nowhere").plain
        assert "No flag is about 'nowhere'" in page and " 0 of " not in page

    def test_examples_are_told_apart_from_the_description(self, tmp_path: Path) -> None:
        description, examples = docstring_parts(GRPOConfig)
        assert "Examples" not in description
        assert [example.split()[0] for example in examples] == ["open-instruct", "open-instruct"]
        assert "--model_name_or_path MODEL_DIR --dataset_mixer_list" in examples[0]
        own = (
            (REPOSITORY / "docs" / "your_own_loss.md")
            .read_text()
            .partition("```python\n")[2]
            .partition("```")[0]
        )
        (tmp_path / "mine.py").write_text(own)
        objective = load_named(f"{tmp_path / 'mine.py'}:PULL", origin="--objective", what="NAME")
        assert docstring_parts(objective.config_class)[1][0].startswith(
            "open-instruct train --objective mine.py:PULL "
        )

    @pytest.mark.parametrize("width", [40, 72, 110])
    def test_text_is_wrapped_to_the_width(self, width: int) -> None:
        for line in help_page(DPOConfig, "program", width).split("\n"):
            is_prose = not line.spans
            assert not is_prose or len(line.plain) <= width


class TestValidation:
    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            ([], ("bad_value", "mixer_list")),
            (["a"], ("bad_value", "mixer_list", "'a'", "a 1.0")),
            (["a", "1.0", "b"], ("bad_value", "mixer_list", "'b'")),
            (["1.0", "a"], ("bad_value", "mixer_list", "'a'", "'1.0'")),
            (["a", "1e-1"], ("bad_value", "mixer_list", "'1e-1'", "'a'")),
            (["a", "0"], ("bad_value", "mixer_list", "'0'", "'a'")),
            (["a", "-0.5"], ("bad_value", "mixer_list", "'-0.5'", "'a'")),
            (["a", "1.0e999"], ("bad_value", "mixer_list", "0")),
        ],
    )
    def test_mixer_lists_need_names_and_amounts(
        self, words: list[str], problem: tuple[Any, ...]
    ) -> None:
        with refused(*problem):
            validate_dpo(
                parse_run(DPOConfig, ["--mixer_list", *words, *REQUIRED[:2], *REQUIRED[5:]])
            )

    def test_all_problems_are_listed(self) -> None:
        with pytest.raises(InputError) as caught:
            validate_dpo(config_of("--beta", "0", "--seed", "-1", "--max_grad_norm", "-1"))
        assert len(str(caught.value).splitlines()) == 3


def values_of(flag: Flag) -> st.SearchStrategy[Any]:
    """Any value that a word can say of this flag."""
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")).filter(
        lambda word: word.lower() not in NONE_WORDS
    )
    strategy: st.SearchStrategy[Any]
    if flag.choices:
        strategy = st.sampled_from(flag.choices)
        if flag.or_one:
            strategy = st.one_of(strategy, st.lists(strategy, min_size=2))
        elif flag.kind is list:
            strategy = st.lists(strategy)
    else:
        number = st.floats(allow_nan=False, allow_infinity=False)
        if flag.is_path:  # which is filled in before it is in a config
            text = text.filter(lambda path: "$" not in path and not path.startswith("~"))
        of_kinds = {
            bool: st.booleans(),
            int: st.integers(-LARGEST_INT, LARGEST_INT),
            float: number,
            str: text,
        }
        strategy = st.lists(of_kinds[flag.item_kind]) if flag.kind is list else of_kinds[flag.kind]
        # 0 where upstream's 0 says `none`: no config holds it.
        strategy = strategy.filter(
            lambda value: translate_flag(flag.name, [str(value)], list_flags(DPOConfig)) is None
        )
    # In a config there is always a beta: without one given, the loss's own.
    return st.one_of(st.none(), strategy) if flag.optional and flag.name != "beta" else strategy


class TestSavedConfig:
    def test_saved_config_is_the_config(self, tmp_path: Path) -> None:
        config = config_of(
            "--beta", "5", "--report_to", "wandb", "--max_train_steps", "7", "--exp_name", "1.0"
        )
        path = tmp_path / "config.yaml"
        write_config(
            config, path, {"versions": {"torch": "2.13.0"}, "git": "abc\ndef", "world_size": 4}
        )
        assert parse_run(DPOConfig, [str(path)]) == config
        text = path.read_text()
        assert text.startswith(
            "# versions:\n#   torch: 2.13.0\n# git: 'abc\n# \n#   def'\n# world_size: 4\n"
        )
        assert "\n# Optimisation\nlearning_rate: 5.0e-07\n" in text
        assert "\nmixer_list:\n- rows.jsonl\n- '1.0'\n" in text
        assert [entry.name for entry in tmp_path.iterdir()] == ["config.yaml"]

    @pytest.mark.parametrize(
        "word", ["\x85'", "a\u2028b", "é ", " x", "1.0", "a: b", "#", "- a", "\r\n", "\t", ""]
    )
    def test_odd_words_survive_the_file(self, tmp_path: Path, word: str) -> None:
        config = config_of(f"--exp_name={word}", "--eval_mixer_list", word, word)
        path = tmp_path / "config.yaml"
        write_config(config, path)
        assert parse_run(DPOConfig, [str(path)]) == config

    @given(st.data())
    @settings(
        deadline=None,
        max_examples=num_examples(8),
        phases=[Phase.generate],  # shrinking two hundred values takes minutes and tells little
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    def test_any_config_survives_the_file(self, tmp_path: Path, data: st.DataObject) -> None:
        config = config_of()
        for flag in list_flags(DPOConfig).values():
            values = (
                st.sampled_from(["olmo_core", "deepspeed"])
                if flag.name == "backend"
                else values_of(flag)
            )
            setattr(getattr(config, flag.section), flag.name, data.draw(values, label=flag.name))
        config = join_backend(config)
        path = tmp_path / "config.yaml"
        write_config(config, path)
        assert parse_run(DPOConfig, [str(path)]) == config

    def test_old_file_survives_a_failed_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "config.yaml"
        write_config(config_of(), path)

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("disk full")

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="disk full"):
            write_config(config_of("--beta", "5"), path)
        assert parse_run(DPOConfig, [str(path)]) == config_of()

    def test_provenance_names_versions_and_commit(self) -> None:
        provenance = resolved.collect_provenance()
        assert {"python", "open_instruct", "torch", "ai2-olmo-core"} <= provenance[
            "versions"
        ].keys()
        assert provenance["git"]


def config_with(name: str) -> DPOConfig | GRPOConfig:
    """A config, with nothing but what it needs, that has the flag `name`."""
    if name in list_flags(DPOConfig):
        return config_of()
    return parse_run(GRPOConfig, GRPO_REQUIRED)


def flags_that_are(resume: str) -> list[str]:
    flags = {
        name: flag for config_class in CONFIGS for name, flag in list_flags(config_class).items()
    }
    return [name for name, flag in flags.items() if flag.resume == resume]


class TestResume:
    def conflicts(
        self, before: list[str], after: list[str], worlds: tuple[int, int] = (4, 4)
    ) -> list[str]:
        return resume_conflicts(as_flat_dict(config_of(*before)), config_of(*after), worlds=worlds)

    @pytest.mark.parametrize("name", flags_that_are("same"))
    def test_run_with_another_identity_is_not_continued(self, name: str) -> None:
        config = config_with(name)
        saved = as_flat_dict(config) | {name: "something else"}
        conflicts = resume_conflicts(saved, config)
        assert len(conflicts) == 1
        assert conflicts[0].startswith(f"--{name} was something else, is ")

    @pytest.mark.parametrize("name", flags_that_are("free"))
    def test_free_flags_may_change_when_a_run_resumes(self, name: str) -> None:
        config = config_with(name)
        assert resume_conflicts(as_flat_dict(config) | {name: "something else"}, config) == []

    def test_global_batch_must_stay(self) -> None:
        batch = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "4"]
        assert self.conflicts(batch, batch, (4, 2)) == [
            "the global batch was 32 rows (2 x 4 x 4 data-parallel ranks), is 16 rows (2 x 4 x 2 "
            "data-parallel ranks); --gradient_accumulation_steps 8 keeps it"
        ]
        kept = ["--per_device_train_batch_size", "2", "--gradient_accumulation_steps", "8"]
        assert self.conflicts(batch, kept, (4, 2)) == []
        regrouped = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "2"]
        assert self.conflicts(batch, regrouped) == []
        impossible = ["--per_device_train_batch_size", "7"]
        assert "keeps it" not in self.conflicts(batch, impossible)[0]

    @pytest.mark.parametrize(
        ("both", "before", "after", "conflicts"),
        [
            ("", "", "", []),
            (
                "",
                "--max_train_steps 10",
                "--max_train_steps 20",
                ["--max_train_steps was 10, is 20"],
            ),
            ("", "", "--num_epochs 2", ["--num_epochs was 1, is 2"]),
            # A flat schedule has no length, and steps overrule epochs.
            (
                "--lr_scheduler_type constant --warmup_ratio 0",
                "--max_train_steps 10",
                "--num_epochs 3",
                [],
            ),
            (
                "--lr_scheduler_type constant",
                "--num_epochs 1",
                "--num_epochs 3",
                ["--num_epochs was 1, is 3"],
            ),
            ("--max_train_steps 10", "", "--num_epochs 5", []),
        ],
    )
    def test_length_sets_the_schedule(
        self, both: str, before: str, after: str, conflicts: list[str]
    ) -> None:
        assert (
            self.conflicts([*both.split(), *before.split()], [*both.split(), *after.split()])
            == conflicts
        )

    @pytest.mark.parametrize(
        ("before", "after", "num_conflicts"),
        [
            (["--max_train_steps", "10"], ["--max_train_steps", "20"], 0),
            (["--max_train_steps", "10"], ["--max_train_steps", "9"], 1),
            (["--num_epochs", "2"], ["--num_epochs", "3"], 0),
            (["--num_epochs", "2"], ["--num_epochs", "1"], 1),
            ([], ["--max_train_steps", "10"], 0),  # as many as the epoch had
            ([], ["--max_train_steps", "9"], 1),
            (["--max_train_steps", "10"], ["--num_epochs", "3"], 1),  # which may be fewer
            (["--max_train_steps", "10"], ["--max_train_steps", "20", "--seed", "1"], 1),
        ],
    )
    def test_run_that_had_ended_may_become_longer(
        self, before: list[str], after: list[str], num_conflicts: int
    ) -> None:
        conflicts = resume_conflicts(
            as_flat_dict(config_of(*before)), config_of(*after), ended_after=10
        )
        assert len(conflicts) == num_conflicts

    def test_trailing_slash_is_the_same_folder(self) -> None:
        saved = as_flat_dict(config_of())
        saved["model_name_or_path"] = "./model/"
        assert resume_conflicts(saved, config_of()) == []

    def test_flag_that_the_saved_run_did_not_know_is_passed_over(self) -> None:
        saved = as_flat_dict(config_of())
        del saved["beta"], saved["gradient_accumulation_steps"]
        assert resume_conflicts(saved, config_of("--beta", "7")) == []

    def test_refusal_lists_conflicts_and_ways_out(self) -> None:
        saved = as_flat_dict(config_of())
        refuse_conflicts(saved, config_of())
        with pytest.raises(InputError) as caught:
            refuse_conflicts(saved, config_of("--beta", "7", "--seed", "1"))
        message = str(caught.value)
        for part in (
            "--beta was 5.0, is 7.0",
            "--seed was 42, is 1",
            "another --output_dir",
            "--overwrite_output_dir",
        ):
            assert part in message


def test_flag_vocabulary_covers_every_field() -> None:
    sections = [field.name for field in fields(DPOConfig) if field.name != "backend_record"]
    assert {flag.section for flag in list_flags(DPOConfig).values()} == set(sections)
    flag = list_flags(DPOConfig)["max_train_steps"]
    assert (flag.kind, flag.optional, flag.required, flag.default) == (int, True, False, None)
    assert list_flags(DPOConfig)["init_device"].choices == ("meta", "cpu")


def test_provenance_tells_a_commit_from_one_with_changes(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert _git_state(tmp_path) == "not a git checkout"
    git("init")
    assert _git_state(tmp_path) == "unknown"  # without a commit
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-m", "first")
    git("tag", "v1")
    (tmp_path / "other").write_text("not tracked")
    commit = git("rev-parse", "HEAD")
    os.utime(tmp_path / "file", (0, 0))
    index = (tmp_path / ".git" / "index").read_bytes()
    assert _git_state(tmp_path) == commit
    # A run that were killed while it wrote there would leave a lock.
    assert (tmp_path / ".git" / "index").read_bytes() == index
    (tmp_path / "file").write_text("2")
    assert _git_state(tmp_path) == f"{commit} with uncommitted changes"
    git("add", "file")
    assert _git_state(tmp_path) == f"{commit} with uncommitted changes"
