"""A whole run from a notebook or a script: rows in memory, metrics through a callback, a model on disk.

The same walk as the commands', on one device; docs/notebook.md shows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.parser import parse
from open_instruct.errors import InputError, RunError
from open_instruct.hub.upload import open_repository, upload
from open_instruct.objectives.objective import Objective
from open_instruct.run.run_directory import RunDirectory, exported_by, is_number, rows_of
from open_instruct.train import look_at_run, train
from open_instruct.whole_file import replace_text

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

ROWS = "rows.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """What a run has left behind.

    Example: `fitted.metrics["loss"][-1]`, and `AutoModelForCausalLM.from_pretrained(fitted.model)`.
    """

    model: Path  # the folder that transformers opens
    metrics: dict[str, list[float | None]]  # a column a metric, with an entry a step; None where a step has none
    held_out: dict[str, list[float | None]]  # the same of the evaluations of `eval_mixer_list`


def fit(
    objective: Objective,
    rows: str | Path | Iterable[Mapping[str, Any]],
    *,
    output_dir: str | Path,
    callbacks: Mapping[str, Callback] | None = None,
    **flags: Any,
) -> Fitted:
    """Train `objective` on `rows`.

    Rows that are no file are kept as `rows.jsonl` in `output_dir`, so that the run can be given again, or gone on with,
    from the command line. Nothing in that folder is touched before flags and rows are known to be good.

    Args:
        objective: as those in `open_instruct/objectives/`.
        rows: of the form that the objective reads: a list, a `datasets.Dataset`, or the path of a file.
        output_dir: of the run.
        callbacks: OLMo-core's, by a name of your own; `log_metrics(step, metrics)` is called after every step.
        flags: the command's, without dashes; `docs/flags.md` lists them.

    Raises:
        InputError: an argument or a row cannot work, or the folder has a run on other rows; says what would.
        RunError: the run failed, or a signal stopped it.
    """
    with _speaking_of_arguments(), _rows_file(rows, Path(output_dir)) as file:
        words: list[str] = []
        for name, value in ({"mixer_list": [file, 1.0], "output_dir": output_dir} | flags).items():
            words += [f"--{name}", *(str(each) for each in (value if isinstance(value, list | tuple) else [value]))]
        config: Any = parse(objective.config_class, words)
        for warning in objective.validate(config):
            print(f"warning: {warning}")
        look_at_run(config, objective=objective)
        if config.run.push_to_hub:
            open_repository(config.run)
        try:
            code = train(config, objective=objective, callbacks=callbacks)
        finally:
            from open_instruct.parallel.process import stop_process

            stop_process()  # the next cell may start another run
        if code != 0:
            raise RunError(
                f"the run was stopped; give the same again to go on from the last checkpoint in {output_dir}"
            )
        if config.run.push_to_hub:
            print(upload(config.run, exported_by(config)))
    directory = RunDirectory(path=Path(output_dir))
    return Fitted(
        model=exported_by(config),
        metrics=_columns(list(rows_of(directory.metrics))),
        held_out=_columns(list(rows_of(directory.evaluations))),
    )


@contextmanager
def _rows_file(rows: str | Path | Iterable[Mapping[str, Any]], folder: Path) -> Iterator[Path]:
    """The file that has the rows; a new one is taken away again where the run is refused."""
    if isinstance(rows, str | Path):
        yield Path(rows)
        return
    file = folder / ROWS
    try:
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise InputError(f"rows: one cannot be written as JSON: {error}") from None
    if is_new := not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(file, text)
    elif file.read_text(encoding="utf-8") != text:
        raise InputError(f"{file} has other rows: choose another output_dir, or move what is there away")
    try:
        yield file
    except InputError:
        if is_new and not RunDirectory(path=folder).metrics.exists():
            file.unlink(missing_ok=True)
            with suppress(OSError):  # there is something else in it
                folder.rmdir()
        raise


@contextmanager
def _speaking_of_arguments() -> Iterator[None]:
    """Refusals of flags, told as those of arguments."""
    try:
        yield
    except InputError as error:
        raise InputError(re.sub(r"--(?=[a-z_]+)", "", str(error))) from error


def _columns(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    names = {name: None for row in rows for name, value in row.items() if is_number(value)}
    return {name: [row.get(name) for row in rows] for name in names}
