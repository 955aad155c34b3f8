"""A whole run from a notebook or a script: rows in memory, metrics through a callback, a model on disk.

The same walk as the commands', on one device; docs/notebook.md shows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.parser import parse
from open_instruct.errors import RunError
from open_instruct.hub.upload import open_repository, upload
from open_instruct.objectives.objective import Objective
from open_instruct.run.run_directory import exported_by
from open_instruct.train import train
from open_instruct.whole_file import replace_text

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

ROWS = "rows.jsonl"


def fit(
    objective: Objective,
    rows: Iterable[Mapping[str, Any]],
    *,
    output_dir: str | Path,
    callbacks: Mapping[str, Callback] | None = None,
    **flags: Any,
) -> Path:
    """Train `objective` on `rows` and return the folder of the trained model, which transformers opens.

    The rows are kept as `rows.jsonl` in `output_dir`, so that the run can be given again, or gone on with, from the
    command line.

    Args:
        objective: as those in `open_instruct/objectives/`.
        rows: of the form that the objective reads.
        output_dir: of the run.
        callbacks: OLMo-core's, by a name of your own; `log_metrics(step, metrics)` is called after every step.
        flags: the command's, without dashes; `docs/flags.md` lists them.

    Raises:
        InputError: a flag or a row cannot work; says what would.
        RunError: the run failed, or a signal stopped it.
    """
    file = Path(output_dir) / ROWS
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_text(file, "".join(f"{json.dumps(row)}\n" for row in rows))
    words: list[str] = []
    for name, value in ({"mixer_list": [file, 1.0], "output_dir": output_dir} | flags).items():
        words += [f"--{name}", *(str(each) for each in (value if isinstance(value, list | tuple) else [value]))]
    config: Any = parse(objective.config_class, words)
    for warning in objective.validate(config):
        print(f"warning: {warning}")
    if config.run.push_to_hub:
        open_repository(config.run)
    try:
        code = train(config, objective=objective, callbacks=callbacks)
    finally:
        from open_instruct.parallel.process import stop_process

        stop_process()  # the next cell may start another run
    if code != 0:
        raise RunError(f"the run was stopped; give the same again to go on from the last checkpoint in {output_dir}")
    if config.run.push_to_hub:
        print(upload(config.run, exported_by(config)))
    return exported_by(config)
