"""What reading a run's rows needs besides the rows, without loading torch."""

import os
import sys
from typing import Any

from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.training import LearnerConfig


def find_judges(config: LearnerConfig) -> dict[str, Any]:
    """The verifiers and environments that rows may name, as arguments of a `PromptBuilder`."""
    if not isinstance(config, GRPOConfig):
        return {}
    from open_instruct.environments.registry import known_environments
    from open_instruct.rewards.registry import known_verifiers

    return {
        "known_verifiers": known_verifiers(config.reward),
        "known_environments": known_environments(config.environment),
    }


def hide_torch_from_transformers() -> None:
    """Import transformers so that it takes torch for not installed, unless one is loaded already.

    Tokenizers need no torch, but transformers imports one that is there, which takes seconds. It
    looks for torch once. Only then is torch hidden, not while rows are read: the datasets library
    takes what stands under the name in sys.modules for a loaded torch, and imports it.
    """
    modules: dict[str, Any] = sys.modules
    if modules.keys() & {"torch", "transformers"}:
        return
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    modules["torch"] = None
    try:
        from transformers.utils import is_torch_available

        is_torch_available()  # it remembers the answer
    finally:
        del modules["torch"]
