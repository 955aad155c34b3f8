"""What is checked of the flags of every objective."""

from __future__ import annotations

from collections.abc import Iterable

from open_instruct.config.training import TrainingConfig
from open_instruct.config.validation import refuse, training_problems, training_warnings


def validated(config: TrainingConfig, problems: Iterable[str] = ()) -> list[str]:
    """Check everything that the flags alone can tell, and return warnings; `problems` are those of the objective.

    Raises:
        InputError: listing every problem, each with its remedy.
    """
    refuse([*training_problems(config), *problems])
    return list(training_warnings(config))
