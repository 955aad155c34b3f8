"""The commands that scripts/upstream_launches.py finds in shell scripts."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

from upstream_launches import launches_of, table


def words_of(text: str) -> list[tuple[str, ...]]:
    return [launch.words[1:] for launch in launches_of(Path("x.sh"), text)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python open_instruct/dpo.py --beta 5 # weak\nls\n", ("--beta", "5")),
        ("python open_instruct/dpo.py \\\n  --beta \\\n  5\n", ("--beta", "5")),
        (
            'B=5\nexport N="a b"\npython open_instruct/dpo.py --beta $B --exp_name "$N"',
            ("--beta", "5", "--exp_name", "a b"),
        ),
        (
            "L='a 1.0 b 5'\npython open_instruct/dpo.py --mixer_list $L",
            ("--mixer_list", "a", "1.0", "b", "5"),
        ),
        (
            "python open_instruct/dpo.py --model ${1:-tiny} --lr ${LR}",
            ("--model", "tiny", "--lr", "LR"),
        ),
        (
            'A="x y"\nfor L in A; do V="${!L}"\npython open_instruct/dpo.py --mixer_list $V\ndone',
            ("--mixer_list", "x", "y"),
        ),
        (
            r"python open_instruct/dpo.py --url \$CODE_API_URL/t",
            ("--url", "http://localhost:1234/t"),
        ),
        ("for LR in 1e-6 2e-6; do\npython open_instruct/dpo.py --lr $LR\ndone", ("--lr", "1e-6")),
        (
            "N=8\npython open_instruct/dpo.py --ga $((64 / $N / 2)) --id $(date +%s)",
            ("--ga", "4", "--id", "OUTPUT"),
        ),
        (
            'A=(\n --beta 5\n --seed "1"\n)\npython open_instruct/dpo.py ${A[@]} 2>&1 | tee log',
            ("--beta", "5", "--seed", "1"),
        ),
        (
            "python mason.py --gpus 8 -- source env.sh \\&\\& python open_instruct/dpo.py --seed "
            "1 \\&\\& ls",
            ("--seed", "1"),
        ),
        ('run="accelerate launch open_instruct/dpo.py --seed 1"\neval "$run"', ("--seed", "1")),
        ('python open_instruct/dpo.py --oe \'{"a b": 1}\' "$@"', ("--oe", '{"a b": 1}')),
    ],
)
def test_words_are_what_a_shell_would_give(text: str, words: tuple[str, ...]) -> None:
    assert words_of(text) == [words]


def test_mention_of_a_script_is_no_launch() -> None:
    text = "# python open_instruct/dpo.py\necho open_instruct/dpo.py\nit='don'''t'\ncat <<'end\n"
    assert words_of(text) == []


def test_table_counts_what_is_the_same_and_why_not(tmp_path: Path) -> None:
    rows = "--model_name_or_path m --mixer_list r 1.0 --max_seq_length 8"
    (tmp_path / "a.sh").write_text(
        f"python open_instruct/dpo.py {rows}\npython open_instruct/dpo.py {rows} --load_in_8bit\n"
        "python open_instruct/grpo_fast.py words\npython open_instruct/merge_lora.py --seed 1\n"
    )
    configs = tmp_path / "configs" / "train_configs" / "sft"
    configs.mkdir(parents=True)
    (configs / "a.yaml").write_text(
        "model_name_or_path: m\nmax_seq_length: 8\ndataset_mixer: {r: 1.0}\n"
    )
    told = "\n".join(table(tmp_path))
    assert (
        "commands: 1 of 3 are the same run here" in told
        and "YAML files: 1 of 1 are the same run here" in told
    )
    assert "1  dpo --load_in_8bit" in told and "1  grpo --FILE" in told
    assert "1  of merge_lora, which has no command here" in told
