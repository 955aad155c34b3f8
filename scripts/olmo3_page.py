"""`docs/olmo3.md` on stdout: allenai's recipes of OLMo 3 beside the configurations here, setting by
setting, and what each needs on 8, 16 and 64 GPUs.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.plan import parse_request
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.flags import spell_value
from open_instruct.config.resolved import as_flat_dict
from open_instruct.migrate.from_suite import READERS
from open_instruct.migrate.launch import read_launch
from open_instruct.migrate.migration import migrate
from open_instruct.migrate.suites.tables import find_table
from open_instruct.migrate.translation import translate
from open_instruct.objectives.registry import load_objective
from open_instruct.planning.plan import Plan, make_plan
from open_instruct.planning.subject import units

REPOSITORY = Path(__file__).resolve().parent.parent
FACTS = yaml.safe_load(Path(__file__).with_name("olmo3_recipes.yaml").read_text(encoding="utf-8"))
SOURCES = "https://github.com/allenai/open-instruct/blob/main/scripts/train/olmo3"
STAGES = {"sft": "Supervised tuning", "dpo": "Preference tuning", "grpo": "Reinforcement learning"}
NODES = {8: "8", 16: "2x8", 64: "8x8"}
MAX_CELL = 44  # characters of a value


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One of allenai's launches, and the configuration here that is made after it.

    Example: `Recipe(config="dpo/olmo3_7b_think_8gpu", source="7b_think_dpo.sh", launch="accelerate
    launch …", plans={8: "", 16: "--gradient_accumulation_steps 8"})`.
    """

    config: str
    source: str
    launch: str
    plans: Mapping[int, str]

    @property
    def command(self) -> str:
        return self.config.partition("/")[0]

    @property
    def file(self) -> Path:
        return REPOSITORY / "configs" / f"{self.config}.yaml"

    def translate(self) -> dict[str, Any]:
        """All flags of the launch, as `migrate-args` translates it."""
        suite = FACTS["suites"][self.command]
        words = shlex.split(self.launch)
        if suite in READERS:
            settings = READERS[suite](words)
            table = find_table(suite, settings.trainer)
            translation = translate(table, settings, {})
            assert translation.is_whole, translation.refused
            return self.read(translation.words)
        migration = migrate(self.command, read_launch(self.command, words))
        assert not migration.refused, migration.refused
        return self.read(migration.arguments)

    def read(self, words: list[str]) -> dict[str, Any]:
        return as_flat_dict(parse_run(load_objective(self.command).config_class, words))

    def plan(self, num_gpus: int) -> Plan:
        words = [self.command, str(self.file), "--gpus_per_node", NODES[num_gpus]]
        return make_plan(parse_request([*words, *self.plans[num_gpus].split()]).setting)


RECIPES = [Recipe(**facts) for facts in FACTS["recipes"]]

HEAD = """\
# OLMo 3, as allenai trained it

Written by `python scripts/olmo3_page.py > docs/olmo3.md`; tests hold it up to date.

allenai trained OLMo 3's Instruct, Think and RL-Zero models by the launches in
[scripts/train/olmo3]({sources}) of open-instruct (August 2026), supervised tuning by the scripts in `src/scripts/train/sft` of
[OLMo-core](https://github.com/allenai/OLMo-core/tree/main/src/scripts/train/sft). Each of them is a configuration here. `open-instruct migrate-args --from open-instruct LAUNCH.sh`,
for supervised tuning `--from olmo-core`, translates a launch setting by setting and says what is otherwise; the tables below are made of its answer
and of the configurations, so nothing stands in them that the files do not say. The number of GPUs is another, the batch the same. Of a long mixture the first data sets stand here.
The files are checked and planned; nobody has trained with them here.

Of the launches as they stand, `migrate-args` refuses two settings (exit code 2): 7b_rlzero_math.sh has two `--dataset_mixer_eval_list_splits` for one data set, of which the configuration has one, and
7b_instruct_rl.sh takes its data from a variable that it does not set; the one that it does set, and does not use, stands below. 7b_rlzero_mix.sh, which repeats a data set, has no configuration.

What differs by no flag, such as the denominators of losses, `migrate-args` lists with every launch; it is in [upstream.md](upstream.md#defaults), too.
"""

PLANS = """
What a GPU needs, by `open-instruct plan` (79.1 GiB are there, but where the flags name an H200 of 139.8 or a B200 of 178.3), for GRPO a learner's; and the least that a step takes,
were every sequence as long as allowed:

| configuration | GPUs | flags | GiB | seconds |
|---|---|---|---|---|
"""


def make_page() -> str:
    """The whole page."""
    parts = [HEAD.format(sources=SOURCES)]
    for command, title in STAGES.items():
        recipes = [recipe for recipe in RECIPES if recipe.command == command]
        first = recipes[0]
        parts.append(f"\n## {title}\n\n")
        for recipe in recipes:
            path = recipe.file.relative_to(REPOSITORY)
            source = f"[{recipe.source}]({SOURCES}/{recipe.source})"
            parts.append(f"- [{path}](../{path}), after {source}\n")
        parts += ["\n", *_write_settings(recipes), PLANS]
        parts += [row for recipe in recipes for row in _write_plans(recipe)]
        words = (
            f"{command} {first.file.relative_to(REPOSITORY)} --gpus_per_node 2x8 {first.plans[16]}"
        )
        parts.append(f"\n```\nopen-instruct plan {words}\n```\n")
    return "".join(parts)


def find_differences(recipe: Recipe) -> dict[str, tuple[Any, Any]]:
    """The flags whose value there is another in the configuration here, with both values."""
    theirs = recipe.translate()
    ours = recipe.read([str(recipe.file)])
    return {name: (theirs[name], value) for name, value in ours.items() if theirs[name] != value}


def _write_settings(recipes: list[Recipe]) -> Iterator[str]:
    """A row for each flag that a configuration sets, or a launch has otherwise."""
    names = [recipe.file.stem.removeprefix("olmo3_").rsplit("_", 1)[0] for recipe in recipes]
    yield f"| flag | {' | '.join(names)} | where two values stand: there, then here |\n"
    yield f"|{'---|' * (len(names) + 2)}\n"
    differences = [find_differences(recipe) for recipe in recipes]
    values = [recipe.read([str(recipe.file)]) for recipe in recipes]
    flags = {
        flag: None
        for recipe in recipes
        for flag in yaml.safe_load(recipe.file.read_text(encoding="utf-8"))
    }
    for difference in differences:
        flags |= dict.fromkeys(difference)
    for flag in flags:
        cells = []
        for difference, value in zip(differences, values, strict=True):
            pair = difference.get(flag)
            here = _write_value(value[flag])
            cells.append(here if pair is None else f"{_write_value(pair[0])} **{here}**")
        is_same = not any(flag in difference for difference in differences)
        why = "the same" if is_same else FACTS["reasons"][flag]
        yield f"| `--{flag}` | {' | '.join(cells)} | {why} |\n"


def _write_value(value: Any) -> str:
    text = spell_value(value)
    if len(text) > MAX_CELL:
        text = f"{text[:MAX_CELL]}…"
    return f"`{text}`"


def _write_plans(recipe: Recipe) -> Iterator[str]:
    for num_gpus, flags in recipe.plans.items():
        plan = recipe.plan(num_gpus)
        gib = plan.peak.total_bytes / units.GIB
        seconds = plan.time.step_s
        flags = f"`{flags}`" if flags else ""
        yield f"| {recipe.config} | {num_gpus} | {flags} | {gib:.0f} | {seconds:.0f} |\n"


if __name__ == "__main__":
    sys.stdout.write(make_page())
