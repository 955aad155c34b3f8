"""`open-instruct COMMAND ...`: each command's module is imported only when it is called."""

import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from open_instruct import __version__
from open_instruct.commands.process import exit_process, run_to_exit_code
from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.name_hints import suggest_nearest
from open_instruct.config.packaged import packaged_name, packaged_settings
from open_instruct.core.errors import EXIT_INPUT, InputError
from open_instruct.objectives.registry import OBJECTIVES, list_objectives, load_objective

PROGRAM = "open-instruct"
CONFIGS_USAGE = """\
usage: open-instruct configs            lists the files
       open-instruct configs NAME       prints one: open-instruct configs sft/tiny_cpu > my.yaml"""


# Each command with its summary, and its `module:function`, which takes the words after it and
# returns the exit code.
COMMANDS = {
    **{
        name: (f"train on {rows} (all GPUs: --num_processes auto)", "")
        for name, (_, rows) in OBJECTIVES.items()
    },
    "train": ("train on an objective of your own (all GPUs: --num_processes auto)", "train:main"),
    "grpo": (
        "train on verifiable rewards: starts Ray, learners and engines",
        "grpo_olmo_core_actor:main",
    ),
    "configs": ("list the files of settings in the package, or print one", "cli:configs_command"),
    "layout": ("show how a model would be sharded over nodes of GPUs", "commands.layout:main"),
    "check": (
        "look at everything that a run could be refused for, and start nothing",
        "commands.check:main",
    ),
    "plan": (
        "say what memory, traffic and time a run would need, and how it would fit",
        "commands.plan:main",
    ),
    "preview": (
        "show rows of a run as the model will see them, and what is learned",
        "commands.preview:main",
    ),
    "report": (
        "make a page of what runs have left: curves, health, rollouts",
        "commands.report:main",
    ),
    "migrate-args": (
        "translate a launch of another suite into our flags",
        "migrate.migration:migrate_args",
    ),
    "replay": (
        "take one step of a GRPO run again, under its own or another loss",
        "commands.replay:main",
    ),
    "export": ("write a checkpoint of a run as a Hugging Face folder", "commands.export:main"),
    "merge": ("add an adapter to the model that it was trained beside", "commands.merge:main"),
    "convert": (
        "write a checkpoint of OLMo-core as a Hugging Face folder, or the other way",
        "commands.convert:main",
    ),
    "sessions": (
        "make of recorded sessions the best of each prompt, pairs, or groups to learn from",
        "commands.talking.sessions:main",
    ),
    "score": (
        "write a file's rows with a reward model's score of each, or of its steps",
        "commands.score:main",
    ),
    "chat": ("talk to what a run has trained, or to any model", "commands.chat:main"),
    "serve": ("serve what a run has trained as OpenAI's API does, by vLLM", "commands.serve:main"),
    "tiny-model": ("write a small random checkpoint, to try things on", "commands.tiny_model:main"),
    "get-model": (
        "download a small real model, to talk to and to train",
        "commands.get_model:main",
    ),
}
RUN = "{commands} [FILE.yaml] --model_name_or_path STR"
# For `--help` of commands with flags of their own: where these are, how it begins, and a usage line
# if not theirs.
FLAGS = {
    "layout": ("commands.layout:LayoutFlags", "layout", ""),
    "check": ("commands.check:CheckFlags", "check", RUN + " --output_dir STR"),
    "plan": ("commands.plan:PlanFlags", "plan", f"{RUN} --gpus_per_node N ..."),
    "preview": ("commands.preview:PreviewFlags", "preview", f"{RUN} --mixer_list WORD ..."),
    "report": ("commands.report:ReportFlags", "report RUN [RUN ...]", ""),
    "replay": ("commands.replay:ReplayFlags", "replay", "RUN --step N"),
    "export": ("commands.export:ExportFlags", "export RUN", ""),
    "merge": ("commands.merge:MergeFlags", "merge", ""),
    "convert": ("commands.convert:ConvertFlags", "convert FROM TO", ""),
    "sessions": ("commands.talking.sessions:SessionsFlags", "sessions FILE", ""),
    "score": ("commands.score:ScoreFlags", "score MODEL FILE", ""),
    "chat": ("commands.chat:ChatFlags", "chat RUN|MODEL", ""),
    "tiny-model": ("commands.tiny_model:TinyModelFlags", "tiny-model DIR", ""),
    "get-model": ("commands.get_model:GetModelFlags", "get-model NAME DIR", ""),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that `argv` (default: the command line) names; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if not words:
        print(usage(), file=sys.stderr)
        return EXIT_INPUT
    name, *rest = words
    if asks_for_help([name]):
        print(usage())
        return 0
    if name == "--version":
        print(f"{PROGRAM} {__version__}")
        return 0
    if name not in COMMANDS:
        hint = suggest_nearest(name, COMMANDS)
        print(f"{PROGRAM}: '{name}' is not a command{hint}", file=sys.stderr)
        print(
            f"The commands are {', '.join(COMMANDS)}; `{PROGRAM} --help` says what they do.",
            file=sys.stderr,
        )
        return EXIT_INPUT
    return run_to_exit_code(lambda: _run(name, rest), program=f"{PROGRAM} {name}")


def _run(name: str, words: Sequence[str]) -> int:
    if name in OBJECTIVES:
        from open_instruct.train import run_objective

        return run_objective(load_objective(name), words)
    if name in FLAGS and asks_for_help(words):
        flags, command, line = FLAGS[name]
        line = line.format(commands="|".join(list_objectives()))
        print_help(resolve_name(f"open_instruct.{flags}"), f"{PROGRAM} {command}", words, line)
        return 0
    return resolve_name(f"open_instruct.{COMMANDS[name][1]}")(words)


def program() -> NoReturn:
    """The console script: `main` as a whole process."""
    exit_process(run_to_exit_code(main, program=PROGRAM))


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = "\n".join(f"  {name:{width}}  {summary}" for name, (summary, _) in COMMANDS.items())
    return f"""\
usage: {PROGRAM} COMMAND [--flag value ...]

To begin: `{PROGRAM} tiny-model DIR` writes a small model, `{PROGRAM} preview dpo
--model_name_or_path DIR --mixer_list rows.jsonl 1.0` shows what would be learned, and `dpo`
with the same flags and --output_dir OUT learns it.

{lines}

`{PROGRAM} COMMAND --help` shows a command's flags; `{PROGRAM} --version` prints the version."""


def configs_command(words: Sequence[str]) -> int:
    """List the files of settings that come with the package, or print the one that `words` names.

    :raises InputError: there is no such file.
    """
    if asks_for_help(words):
        print(CONFIGS_USAGE)
        return 0
    configs = packaged_settings()
    if not words:
        width = max(map(len, configs))
        for name, path in configs.items():
            print(f"{name:{width}}  {_first_sentence(path)}")
        return 0
    name = packaged_name(words[0])
    if len(words) > 1 or name not in configs:
        raise InputError(
            (
                f"'{' '.join(words)}' is not one of the "
                f"files{suggest_nearest(name, configs)}\n{CONFIGS_USAGE}"
            ),
            kind="bad_value",
        )
    print(configs[name].read_text(encoding="utf-8"), end="")
    return 0


def _first_sentence(path: Path) -> str:
    """The first sentence of the comment that a file begins with."""
    comment = path.read_text(encoding="utf-8").partition("\n#\n")[0]
    return (
        " ".join(comment.replace("\n# ", " ").removeprefix("# ").split())
        .partition(". ")[0]
        .rstrip(".")
    )


if __name__ == "__main__":
    program()
