"""`docs/upstream.md` on stdout: what becomes of upstream's flags and defaults, from the tables that
commands read.
"""

import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import yaml

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.config.flags import spell_value
from open_instruct.config.suites.upstream_flags import (
    LEFT_OUT,
    Entry,
    upstream_behaviours,
    upstream_table,
)
from open_instruct.migrate.launch import DEFAULTS_FROM, TRAINERS, read_launch
from open_instruct.migrate.migration import migrate

# What makes each of upstream's sections count.
ALL_SECTIONS_READ = (
    *(
        "--with_tracking",
        "--use_lora",
        "--additive_format_reward",
        "--apply_r1_style_format_reward",
    ),
    *("--dataset_mixer_eval_list", "r", "1.0"),
)

HEAD = """\
# From open-instruct

Written by `python scripts/upstream_page.py > docs/upstream.md`; a test holds it up to date.

`open-instruct migrate-args` tells a launch of [allenai/open-instruct](https://github.com/allenai/open-instruct) in the
flags of this project. It starts nothing and loads no torch. Launches of other suites are told by `migrate-args --from`
([migrate.md](migrate.md)).

```
open-instruct migrate-args dpo -- --model_name_or_path allenai/OLMo-2-1124-7B-SFT --mixer_list pairs.jsonl 1.0 \\
    --max_seq_length 2048 --dpo_beta 5 --gradient_checkpointing --push_to_hub false
```

- The words behind `--` may be the flags alone, a YAML file and flags, or the whole line with its launcher
  (`accelerate launch … open_instruct/dpo_tune_cache.py …`). The trainer is read from the script's name; without one it
  is {trainers}.
- It prints the command here, with the flags that bring upstream's defaults; what is called otherwise; what is left out,
  and why nothing is learned differently; what cannot be had; and every default that differs.
- The exit code is 0 where the run is the same, 2 where something cannot be had. The same means: the same rows, loss,
  schedule and rewards, but for what differs by no flag, which is printed and in the second table below. Order of
  rows, rounding and sampled tokens differ.
- Where the launch names a stage of DeepSpeed, the command is for FSDP2, and a second line has the words that make it a
  run on DeepSpeed ([backends.md](backends.md)).
- Of a model the name is looked at: one of a family that cannot be loaded is refused.
- `--json` prints `arguments` (a list), `deepspeed` (the words behind them), `renamed`, `dropped` and `refused` (a
  sentence a flag) and `defaults` (a flag's `upstream` and `here`, and what differs by no flag).

Training commands take the flags of the table below too: a renamed one as ours, and one that is not needed is left out,
which one line says. One that cannot be had is refused with its sentence.

## Defaults

**A flag that has upstream's name and meaning has upstream's default, but where this table gives a reason.**

| flag | upstream | here | why |
|---|---|---|---|
"""

BEHAVIOURS = """
By no flag:

| command, or upstream's trainer | what | upstream | here |
|---|---|---|---|
"""

ROWS_OF_TOKENS = """
## Rows of tokens

`olmo_core_finetune.py` fills rows of `--max_seq_length` tokens with whole conversations before it trains, longest
first, each into the fullest row that still takes it; its batches count those rows. `--packing_strategy bfd` is the same
([packing.md](packing.md#rows-that-are-filled-once)). No conversation is cut at the end of a row, and none sees another.

Of its eight launches, all in scripts/train/debug (August 2026), four are the same run here: `oc_sft.sh`,
`oc_sft_cache.sh`, `oc_sft_multinode.sh` and the first of `oc_sft_olmo3_7b_1node.sh`, which tokenises. Not the same are

- the second of `oc_sft_olmo3_7b_1node.sh`, and `oc_sft_olmo3_7b_full.sh`: they scale RoPE by a flag. Write
  `rope_scaling` into the checkpoint's config.json and leave `--rope_scaling_factor` out. The latter starts from a
  checkpoint of OLMo-core, which `--model_name_or_path` takes ([olmo_core.md](olmo_core.md)).
- both of `oc_sft_olmo_hybrid_7b_1node.sh`: their architecture is named by a flag. Start from the Hugging Face
  checkpoint of Olmo-Hybrid, whose config.json says it.
"""

FLAGS = """
## Flags

`every` are those of all commands; where another section has the same flag, that counts for its command.
"""


def upstream_reasons() -> dict[str, str]:
    """Of each flag of ours with another default than upstream's, why."""
    text = (files("open_instruct.config.suites") / "defaults.yaml").read_text(encoding="utf-8")
    return dict(yaml.safe_load(text)["reasons"])


def page() -> str:
    """The whole page."""
    trainers = ", ".join(f"`{names[0]}.py` for `{command}`" for command, names in TRAINERS.items())
    parts = [HEAD.format(trainers=trainers)]
    reasons = upstream_reasons()
    for name, places in sorted(default_differences().items()):
        for (theirs, ours), commands in places.items():
            cells = f"`{theirs}` | `{ours}`"
            parts.append(f"| `--{name}` ({', '.join(commands)}) | {cells} | {reasons[name]} |\n")
    parts.append(BEHAVIOURS)
    for of in dict.fromkeys(
        name for command, trainers in TRAINERS.items() for name in (command, *trainers)
    ):
        for what, (theirs, ours) in upstream_behaviours(of).items():
            parts.append(f"| {of} | {what} | {theirs} | {ours} |\n")
    parts += [ROWS_OF_TOKENS, FLAGS]
    for section in ("every", *TRAINERS):
        parts.append(f"\n### {section}\n\n| flag | |\n|---|---|\n")
        parts += [
            f"| `--{name}` | {_told(entry)} |\n"
            for name, entry in sorted(upstream_table(section).items())
        ]
    return "".join(parts)


def default_differences() -> dict[str, dict[tuple[str, str], list[str]]]:
    """Of each of our flags the defaults (upstream's, ours) that differ, and upstream's trainers of
    which that is so.
    """
    found: dict[str, dict[tuple[str, str], list[str]]] = {}
    for command, trainers in TRAINERS.items():
        for trainer in trainers:
            rows = "mixer_list" if trainer.startswith(("dpo", "olmo")) else "dataset_mixer_list"
            words = [f"open_instruct/{trainer}.py", f"--{rows}", "r", "1.0", *ALL_SECTIONS_READ]
            migration = migrate(command, read_launch(command, words))
            by_no_flag = upstream_behaviours(command) | upstream_behaviours(trainer)
            for name in migration.defaults.keys() - by_no_flag.keys():
                theirs, ours = map(spell_value, migration.defaults[name].values())
                trainers_of = found.setdefault(name, {}).setdefault((theirs, ours), [])
                trainers_of += (
                    []
                    if DEFAULTS_FROM.get(trainer, trainer) in trainers_of
                    else [DEFAULTS_FROM.get(trainer, trainer)]
                )
    return found


def _told(entry: Entry) -> str:
    return " ".join(part.replace("|", "\\|") for part in _sentences(entry))


def _sentences(entry: Entry) -> Iterator[str]:
    if entry.ours is not None:
        yield f"is `--{entry.ours}`" + (f", times {entry.times}" if entry.times else "")
        for theirs, ours in entry.values.items():
            yield f"(`{theirs}`: {'left out' if ours == LEFT_OUT else f'`{ours}`'})"
    if entry.unneeded is not None:
        yield f"not needed: {entry.unneeded}"
    if entry.refused is not None:
        yield entry.refused + (
            f" (nothing is asked with {' or '.join(f'`{v}`' for v in entry.unless)})"
            if entry.unless
            else ""
        )


if __name__ == "__main__":
    sys.stdout.write(page())
