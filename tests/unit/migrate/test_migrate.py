"""Launches of open-instruct in our flags: what is the same run, and what is said of the rest."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from open_instruct.cli import main
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import list_flags
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.resolved import as_flat_dict
from open_instruct.config.suites.upstream_flags import upstream_defaults, upstream_table
from open_instruct.migrate.launch import ALL_TRAINERS, DEFAULTS_FROM, read_launch
from open_instruct.migrate.migration import Migration, migrate
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.objectives.registry import load_objective
from tests.refusals import refused

DPO = "--model_name_or_path m --mixer_list rows.jsonl 1.0 --max_seq_length 512"
SFT = "--model_name_or_path m --dataset_mixer_list rows.jsonl 1.0 --max_seq_length 512"
GRPO = "--model_name_or_path m --dataset_mixer_list prompts.jsonl 1.0"


NEEDED = {"dpo": DPO, "sft": SFT, "olmo_core sft": DPO, "grpo": GRPO, "reward_model": SFT}
NEEDED["prm"] = "examples/scripts/prm.py --model_name_or_path m --dataset_name rows.jsonl"
OPENRLHF = (
    "deepspeed --module openrlhf.cli.train_prm --pretrain m --dataset rows.jsonl "
    "--placeholder_token @"
)
NEEDED["openrlhf prm"] = f"{OPENRLHF} --reward_tokens + - --gradient_accumulation_steps 4"
NEEDED["ppo grpo"] = f"open_instruct/ppo_fast.py {GRPO}"


def of(command: str, words: str) -> Migration:
    return migrate(command, read_launch(command, words.split()))


def beside_needed(launch: str, words: str) -> Migration:
    """The launch with these words behind those that its trainer needs."""
    return of(launch.split()[-1], f"{NEEDED[launch]} {words}")


def grpo_config(words: str) -> GRPOConfig:
    """The run that a launch becomes."""
    migration = of("grpo", f"{GRPO} {words}")
    assert migration.refused == {}
    return parse_run(GRPOConfig, migration.arguments)


class TestDefaults:
    def test_differing_defaults_of_dpo_are_set_and_named(self) -> None:
        migration = of("dpo", DPO)
        assert not migration.refused
        assert {name: tuple(both.values()) for name, both in migration.defaults.items()} == {
            "output_dir": ("output/", None),
            "packing": (False, True),
            "learning_rate": (2e-5, 5e-7),
            "warmup_ratio": (0.1, 0.03),
            "max_grad_norm": (0.0, 1.0),
            "upload": (
                "to the hub unless --push_to_hub is false",
                "to the hub with --push_to_hub alone",
            ),
        }
        config = parse_run(DPOConfig, migration.arguments)
        assert (config.optim.learning_rate, config.optim.warmup_ratio, config.data.packing) == (
            2e-5,
            0.1,
            False,
        )

    def test_differing_defaults_of_grpo_are_set_and_named(self) -> None:
        defaults = of("grpo", GRPO).defaults
        expected = {
            "beta": (0.05, 0.0),
            "clip_higher": (0.272, 0.2),
            "verification_reward": (10.0, 1.0),
            "async_steps": (8, 1),
            "advantage_normalization_type": ("centered", "standard"),
            "several_verifiers": ("sum", "mean"),
            "learning_rate": (2e-5, 5e-7),
            "warmup_ratio": (0.0, 0.03),
        }
        assert {name: tuple(defaults[name].values()) for name in expected} == expected
        config = grpo_config("")
        assert (
            config.loss.beta,
            config.rollout.async_steps,
            config.reward.verification_reward,
        ) == (0.05, 8, 10.0)

    def test_flag_that_is_given_has_no_default(self) -> None:
        assert "warmup_ratio" not in of("dpo", f"{DPO} --warmup_ratio 0.1").defaults

    def test_upstream_has_one_beta_and_we_one_for_each_loss(self) -> None:
        assert "beta" not in of("dpo", f"{DPO} --loss_type dpo_norm").defaults
        assert of("dpo", f"{DPO} --loss_type dpo").defaults["beta"] == {
            "upstream": 5.0,
            "here": 0.1,
        }

    def test_two_trainers_of_sft_have_their_own(self) -> None:
        assert of("sft", SFT).defaults["num_epochs"] == {"upstream": 2, "here": 1}
        other = of("sft", f"open_instruct/olmo_core_finetune.py {DPO}")
        assert other.defaults["num_epochs"] == {"upstream": 3, "here": 1}
        assert not other.refused and other.defaults["packing_strategy"] == {
            "upstream": "bfd",
            "here": "step",
        }
        assert (
            "rank" in other.defaults["denominators"]["upstream"] and "documents" in other.defaults
        )
        assert "microbatch" in of("sft", SFT).defaults["denominators"]["upstream"]
        assert (
            "documents" not in of("sft", SFT).defaults
            and "documents" not in of("dpo", DPO).defaults
        )
        # By the name of its mixer list.
        assert of("sft", DPO).defaults["num_epochs"]["upstream"] == 3

    @pytest.mark.parametrize(
        "trainer",
        sorted(
            {DEFAULTS_FROM.get(name, name) for names in ALL_TRAINERS.values() for name in names}
        ),
    )
    def test_each_default_is_of_a_flag_that_is_known(self, trainer: str) -> None:
        command = next(name for name, names in ALL_TRAINERS.items() if trainer in names)
        tables = (upstream_table(trainer), upstream_table(command), upstream_table())
        known = {
            *list_flags(load_objective(command).config_class),
            *(name for table in tables for name in table),
        }
        # Which a rule reads.
        known |= {"adam_betas", "train_batch_size"} if trainer == "train_prm" else set()
        assert set(upstream_defaults(trainer)) <= known


CASES: dict[str, Any] = yaml.load(
    Path(__file__).with_name("migration_cases.yaml").read_text(encoding="utf-8"),
    Loader=yaml.CSafeLoader,
)


def cases(kind: str) -> list[tuple[Any, ...]]:
    return [(launch, *case) for launch, listed in CASES[kind].items() for case in listed.items()]


class TestFlags:
    @pytest.mark.parametrize(("launch", "words", "expected"), cases("same"))
    def test_translated_flags_keep_their_meaning(
        self, launch: str, words: str, expected: dict[str, Any]
    ) -> None:
        migration = beside_needed(launch, words)
        assert migration.refused == {}
        config_class = load_objective(launch.split()[-1]).config_class
        values = as_flat_dict(parse_run(config_class, migration.arguments))
        assert {name: values[name] for name in expected} == expected

    @pytest.mark.parametrize(("launch", "words", "flag"), cases("dropped"))
    def test_flags_without_effect_are_dropped_with_a_reason(
        self, launch: str, words: str, flag: str
    ) -> None:
        migration = beside_needed(launch, words)
        assert migration.refused == {}
        assert migration.dropped[flag]
        assert f"--{flag}" not in migration.arguments

    @pytest.mark.parametrize(("launch", "words", "expected"), cases("refused"))
    def test_flags_without_counterpart_are_refused_with_a_reason(
        self, launch: str, words: str, expected: dict[str, str]
    ) -> None:
        migration = beside_needed(launch, words)
        assert migration.refused
        for flag, part in expected.items():
            assert part in migration.refused[flag]

    @pytest.mark.parametrize(
        "name",
        [
            *(
                "allenai/OLMo-2-1124-7B-SFT",
                "allenai/Olmo-3-7B-Think-DPO",
                "allenai/tulu-2-7b",
                "Qwen/Qwen2.5-0.5B",
            ),
            *(
                "Qwen/Qwen3-0.6B",
                "meta-llama/Llama-3.1-8B",
                "HuggingFaceTB/SmolLM2-135M",
                "/weka/pythia/tulu_7B",
            ),
        ],
    )
    def test_models_of_our_families_are_the_same(self, name: str) -> None:
        assert not of(
            "dpo", f"--mixer_list r 1.0 --max_seq_length 8 --model_name_or_path {name}"
        ).refused

    @pytest.mark.parametrize(
        ("words", "deepspeed"),
        [
            ("", ""),
            ("--deepspeed_stage 2 --single_gpu_mode", "--deepspeed_stage 2"),
            ("--deepspeed_stage 3 --num_learners_per_node 8 8", "--deepspeed_stage 3"),
            ("--deepspeed_stage 3 --deepspeed_zpg 1", "--deepspeed_stage 3 --deepspeed_zpg 1"),
            (
                "--deepspeed_stage 3 --deepspeed_offload_optimizer",
                "--deepspeed_stage 3 --adam_offload true",
            ),
            ("--deepspeed_stage 0", ""),  # which has no float32 weights beside those in bfloat16
            ("--deepspeed_stage 2 --optimizer muon", ""),  # which it does not take
        ],
    )
    def test_launch_on_deepspeed_may_be_one_here(self, words: str, deepspeed: str) -> None:
        migration = beside_needed("grpo", words)
        assert not migration.refused and "--backend" not in migration.arguments
        expected = f"--backend deepspeed {deepspeed}".split() if deepspeed else []
        assert migration.deepspeed == expected
        validate_grpo(parse_run(GRPOConfig, [*migration.arguments, *expected]))

    def test_number_of_rows_becomes_an_amount(self) -> None:
        words = "--model_name_or_path m --max_seq_length 8 --max_train_samples 500"
        for rows in (
            "--dataset_name rows",
            "--mixer_list rows 1.0",
            "--dataset_mixer_list rows 1.0",
        ):
            migration = of("dpo", f"{words} {rows}")
            assert not migration.refused and "--mixer_list rows 500" in " ".join(
                migration.arguments
            )
        refused = of("dpo", f"{words} --mixer_list a 1.0 b 1.0").refused
        assert "--mixer_list NAME COUNT" in refused["max_train_samples"]

    def test_mixture_in_yaml_becomes_a_list(self, tmp_path: Path) -> None:
        path = tmp_path / "run.yaml"
        path.write_text(
            "model_name_or_path: m\nmax_seq_length: 8\ndataset_mixer:\n  a: 1.0\n  b: 500\n"
        )
        assert "--mixer_list a 1.0 b 500" in " ".join(of("sft", str(path)).arguments)
        assert "--seed 7" in " ".join(of("sft", f"{path} --seed 7").arguments)


class TestCommand:
    def test_whole_line_of_a_launcher_may_be_given(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        line = (
            f"accelerate launch --num_processes 8 open_instruct/dpo_tune_cache.py {DPO} "
            "--push_to_hub false && ls"
        )
        assert main(["migrate-args", "dpo", "--", *line.split()]) == 0
        told = capsys.readouterr().out
        assert told.startswith("open-instruct dpo \\\n    --model_name_or_path m")
        assert "--push_to_hub false" in told and "num_processes" not in told
        assert "--warmup_ratio: 0.1 upstream, 0.03 here" in told

    def test_shell_script_may_be_given(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """With a value over several lines, and of a loop its first turn."""
        script = tmp_path / "launch.sh"
        script.write_text(
            'ROWS="\nfirst 125000\nsecond 1.0\n"\nfor LR in 7e-8 8e-8\ndo\n'
            "    python mason.py --gpus 8 -- source env.sh \\&\\& accelerate launch \\\n"
            "        open_instruct/dpo_tune_cache.py --model_name_or_path m --learning_rate $LR \\\n"
            "        --max_seq_length 64 --dataset_mixer_list $ROWS --push_to_hub false\ndone\n"
        )
        assert main(["migrate-args", "--from", "open-instruct", "--json", str(script)]) == 0
        arguments = " ".join(json.loads(capsys.readouterr().out)["arguments"])
        assert "--learning_rate 7e-8" in arguments
        assert "--mixer_list first 125000 second 1.0" in arguments

    def test_json_has_all_of_it_and_the_exit_code_says_whether_it_is_the_same(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert (
            main(["migrate-args", "grpo", "--json", "--", *GRPO.split(), "--tools", "search"]) == 2
        )
        told = json.loads(capsys.readouterr().out)
        assert list(told) == ["arguments", "deepspeed", "renamed", "dropped", "refused", "defaults"]
        assert told["defaults"]["beta"] == {"upstream": 0.05, "here": 0.0}
        assert list(told["refused"]) == ["tools"]

    @pytest.mark.parametrize(
        ("words", "part"),
        [
            (
                ["ppo", "--", "--seed", "1"],
                "'ppo' has no launches upstream; use one of dpo, sft, grpo, reward_model, prm",
            ),
            (["dpo", "--seed", "1"], "stands before --"),
            (["dpo", "--", "rows.jsonl"], "'rows.jsonl': expected a flag"),
            (
                ["grpo", "--", "python", "-m", "verl.trainer.main_ppo"],
                "of another trainer, give its flags to",
            ),
            (["dpo", "--", "open_instruct/grpo_fast.py"], "use migrate-args grpo"),
            (["dpo", "--", "examples/scripts/prm.py"], "use migrate-args prm"),
            (["dpo", "--", "open_instruct/ppo.py"], "no command here that does the same"),
            (["dpo", "none.yaml"], "none.yaml: no such file"),
        ],
    )
    def test_text_that_is_no_launch_is_refused(
        self, words: list[str], part: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["migrate-args", *words]) == 2
        assert part in capsys.readouterr().err

    def test_openrlhfs_launch_needs_its_words_and_the_parts_of_its_batch(self) -> None:
        migration = of("prm", f"{OPENRLHF} --train_batch_size 256 --micro_train_batch_size 8")
        assert set(migration.refused) == {"reward_tokens", "train_batch_size"}
        assert "32 microbatches of 8" in migration.refused["train_batch_size"]

    def test_migrate_args_loads_no_torch(self) -> None:
        program = (
            "import sys; from open_instruct.cli import main; "
            f"code = main(['migrate-args', 'grpo', '--', *{GRPO.split()}]); "
            "sys.exit(9 if {'torch', 'transformers', 'pyarrow'} & set(sys.modules) else code)"
        )
        assert (
            subprocess.run(
                [sys.executable, "-c", program], capture_output=True, check=False
            ).returncode
            == 0
        )

    def test_yaml_file_that_is_no_mapping_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "list.yaml"
        path.write_text("- 1\n")
        with refused("unreadable_file", None, "'flag: value'"):
            read_launch("dpo", [str(path)])
