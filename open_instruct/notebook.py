"""A whole run from a notebook or a script: `fit` trains on rows in memory.

The same walks as the commands': on one device, or with the learners and engines of GRPO;
docs/notebook.md shows them.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct import grpo_olmo_core_actor
from open_instruct.commands.run_flags import parse_run
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.training import TrainingConfig
from open_instruct.core.errors import InputError, Problem, RunError
from open_instruct.core.files import replace_text
from open_instruct.objectives.objective import Objective
from open_instruct.objectives.policy_gradient import GRPO
from open_instruct.rewards.function import write_function_file
from open_instruct.run.hub.upload import open_repository, upload
from open_instruct.run.run_directory import RunDirectory, find_export_folder, is_number, read_rows
from open_instruct.train import preflight, train

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

ROWS = "rows.jsonl"
REWARD = "reward.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The results of a run.

    Example: `fitted.metrics["loss"][-1]`, and `AutoModelForCausalLM.from_pretrained(fitted.model)`.
    """

    model: Path  # the folder that transformers opens
    # A column a metric, with an entry a step; None where a step has none.
    metrics: dict[str, list[float | None]]
    held_out: dict[str, list[float | None]]  # the same of the evaluations of `eval_mixer_list`


def fit(
    objective: Objective,
    rows: str | Path | Iterable[Mapping[str, Any]] | None = None,
    *,
    output_dir: str | Path,
    prompts: str | Path | Iterable[Mapping[str, Any]] | None = None,
    reward: str | Callable[..., Any] | None = None,
    callbacks: Mapping[str, Callback] | None = None,
    **flags: Any,
) -> Fitted:
    """Train `objective` on `rows`.

    Rows that are no file are kept as `rows.jsonl` in `output_dir`, and a reward as `reward.py`, so
    that the run can be given again, or gone on with, from the command line. Nothing in that folder
    is touched before flags, rows and reward are known to be good.

    Args:
        objective: as those in `open_instruct/objectives/`; or `GRPO`.
        rows: of the form that the objective reads: a list, a `datasets.Dataset`, or the path of a
            file.
        output_dir: of the run.
        prompts: another name for the rows of `GRPO`.
        reward: of `GRPO`: a function that stands alone, `FILE.py:NAME` of one in a file, or the
            name of a verifier. It judges the rows that name no verifier.
        callbacks: OLMo-core's, by a name of your own; `log_metrics(step, metrics)` is called after
            every step, and nothing else in a run of `GRPO`, whose learners are other processes.
        flags: the command's, without dashes; `docs/flags.md` lists them.

    Raises:
        InputError: an argument or a row cannot work, or the folder has a run on other rows; says
            what would.
        RunError: the run failed, or a signal stopped it.
    """
    if prompts is not None:
        rows = prompts
    try:
        config = _train(objective, rows, reward, callbacks, output_dir, flags)
    except InputError as error:  # which names flags
        problems = map(_without_dashes, error.problems)
        raise InputError(_without_dashes(error), problems=problems) from error
    directory = RunDirectory(path=Path(output_dir))
    return Fitted(
        model=find_export_folder(config.run, config.adapters),
        metrics=_columns(list(read_rows(directory.metrics))),
        held_out=_columns(list(read_rows(directory.evaluations))),
    )


def _train(
    objective: Objective,
    rows: Any,
    reward: Any,
    callbacks: Mapping[str, Callback] | None,
    output_dir: str | Path,
    flags: dict[str, Any],
) -> Any:
    """Train on rows and a reward with the other flags; returns the run's config."""
    row_flags, texts = _find_row_flags(objective, rows, reward, Path(output_dir))
    repeated_names = sorted(row_flags.keys() & flags.keys())
    if repeated_names:
        raise InputError(
            f"{', '.join(repeated_names)}: rows and reward say that; leave it out",
            kind="conflict",
            flag=repeated_names[0],
        )
    words = _words(row_flags | {"output_dir": output_dir} | flags)
    with _files_written(texts):
        config: Any = parse_run(objective.config_class, words)
        code = _run(config, objective, callbacks)
    if code != 0:
        raise RunError(
            "the run was stopped; give the same again to go on from the last checkpoint in "
            f"{output_dir}"
        )
    if config.run.push_to_hub:
        print(upload(config.run, find_export_folder(config.run, config.adapters)))
    return config


def _run(
    config: GRPOConfig | TrainingConfig,
    objective: Objective,
    callbacks: Mapping[str, Callback] | None,
) -> int:
    """Check what the flags name, and walk the run in this process; returns the exit code."""
    for warning in objective.validate(config):
        print(f"warning: {warning}")
    if isinstance(config, GRPOConfig):
        grpo_olmo_core_actor.preflight(config)
    else:
        preflight(config, objective=objective)
    if config.run.push_to_hub:
        open_repository(config.run)
    from open_instruct.parallel.process import stop_process  # which loads torch

    try:
        if isinstance(config, GRPOConfig):
            return grpo_olmo_core_actor.train(config, callbacks=callbacks)
        return train(config, objective=objective, callbacks=callbacks)
    finally:
        stop_process()  # the next cell may start another run


def _without_dashes(problem: object) -> str:
    """A message, or a `Problem` of it, that names arguments of Python in place of flags."""
    text = re.sub(r"--(?=[a-z_]+)", "", str(problem))
    if not isinstance(problem, Problem):
        return text
    remedy = problem.remedy and _without_dashes(problem.remedy)
    return Problem(text, kind=problem.kind, flag=problem.flag, remedy=remedy)


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as words of a command line."""
    words: list[str] = []
    for name, value in flags.items():
        words.append(f"--{name}")
        words += map(str, value if isinstance(value, list | tuple) else [value])
    return words


def _find_row_flags(
    objective: Objective,
    rows: Any,
    reward: Any,
    folder: Path,
) -> tuple[dict[str, Any], dict[Path, str]]:
    """The flags for rows and reward, and the text of each file that the run's folder needs."""
    rows_flag = "dataset_mixer_list" if objective is GRPO else "mixer_list"
    flags: dict[str, Any] = {rows_flag: [rows, 1.0]}
    texts: dict[Path, str] = {}
    if not isinstance(rows, str | Path):
        try:
            texts[folder / ROWS] = "".join(f"{json.dumps(row)}\n" for row in rows)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"rows: they cannot be written as JSON: {error}", kind="bad_row", flag="rows"
            ) from None
        flags[rows_flag] = [folder / ROWS, 1.0]
    if reward is not None and objective is not GRPO:
        raise InputError("reward: GRPO alone has one; leave it out", kind="conflict", flag="reward")
    if callable(reward):
        texts[folder / REWARD] = write_function_file(reward)
        flags["verifier"] = [f"{folder / REWARD}:{reward.__name__}"]
    elif reward is not None:
        flags["verifier"] = [reward]
    return flags, texts


@contextmanager
def _files_written(texts: Mapping[Path, str]) -> Iterator[None]:
    """Write files with these texts, and remove the new ones where the run is refused."""
    new = [file for file in texts if not file.exists()]
    for file in texts.keys() - new:
        if file.read_text(encoding="utf-8") != texts[file]:
            other = "another reward" if file.name == REWARD else "other rows"
            raise InputError(
                f"{file} has {other}: choose another output_dir, or move what is there away",
                kind="other_run",
            )
    for file in new:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_text(file, texts[file])
        # A reward that was there, and was refused or moved away.
        sys.modules.pop(str(file.resolve()), None)
    try:
        yield
    except InputError:
        for file in new:
            if RunDirectory(path=file.parent).metrics.exists():
                continue
            file.unlink(missing_ok=True)
            # Of a reward that has been looked at.
            shutil.rmtree(file.parent / "__pycache__", ignore_errors=True)
            with suppress(OSError):  # there is something else in it
                file.parent.rmdir()
        raise


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    names: dict[str, None] = {}
    for row in rows:
        names |= {name: None for name, value in row.items() if is_number(value)}
    return {name: [row.get(name) for row in rows] for name in names}
