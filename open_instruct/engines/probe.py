"""Whether an engine's log-probs are of the distribution that it samples from, asked before a run relies on them."""

from __future__ import annotations

from collections.abc import Mapping

from open_instruct.errors import RunError

PROBED_TEMPERATURES = (1.0, 2.0)
NUM_PROBED = 10
LEAST_SPREAD = 0.1  # nats; where all tokens are as likely, rounding decides


def check_temperature(warm: Mapping[int, float], hot: Mapping[int, float]) -> None:
    """Compare the log-probs of the likeliest tokens after one prompt at both of `PROBED_TEMPERATURES`.

    Twice the temperature halves all differences between log-probs. Where it is not applied they are the same.

    Raises:
        RunError: it was not applied.
    """
    shared = warm.keys() & hot.keys()
    spread_warm, spread_hot = (max(it[key] for key in shared) - min(it[key] for key in shared) for it in (warm, hot))
    if LEAST_SPREAD < spread_warm < 1.5 * spread_hot:
        raise RunError(
            f"vLLM's log-probs are not those that it samples from: between {len(shared)} tokens they differ by up to "
            f"{spread_warm:.3g} at temperature 1 and by {spread_hot:.3g} at temperature 2, which should be half of it. "
            "Set VLLM_USE_V2_MODEL_RUNNER=0 (or 1, if it is 0) where the engines run, to have vLLM's other model runner"
        )
