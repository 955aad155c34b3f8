"""The first step's proof that engines and learners compute the same policy."""

from collections.abc import Mapping

from open_instruct.errors import RunError

# Both hold the very same weights then. In float32 only the order of additions differs; in bfloat16 rounding does.
MAX_DIFFERENCE = {"float32": 1e-2, "bfloat16": 1.0}
MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}


def check_agreement(metrics: Mapping[str, float], *, param_dtype: str, engine_dtype: str) -> bool:
    """Compare the log-probs of the first step's tokens, which both sides took with the same weights.

    Returns:
        Whether there was something to compare: tokens of a step that had a learning signal.

    Raises:
        RunError: they differ by more than rounding explains: temperature, template, weights or positions disagree.
    """
    dtype = "float32" if param_dtype == engine_dtype == "float32" else "bfloat16"
    if "logprob_diff/max" not in metrics:
        return False
    largest = metrics["logprob_diff/max"]
    mean = metrics["logprob_diff/mean"]
    if largest <= MAX_DIFFERENCE[dtype] or mean <= MAX_MEAN_DIFFERENCE[dtype]:  # neither holds for NaN
        return True
    raise RunError(
        f"engines and learners disagree on the log-probs of the first step's tokens by {mean:.2g} on average and "
        f"{largest:.2g} at most, although both hold the same weights: training on them would be off-policy from the "
        "start. Is --tokenizer_name_or_path of another model? If not, give the command again with --vllm_runner v1 (on "
        "a GPU v2, if it was v1): where that agrees, keep it, as vLLM's other runner gives log-probs that it does not "
        "sample from. If neither agrees, this is a defect: please report the model and the command"
    )
