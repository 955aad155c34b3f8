"""Check that engines and learners agree on the log-probs of sampled tokens, after every sync.

Where all tokens of a step were sampled with the learners' weights, the step itself has measured it.
Where engines are ahead (--async_steps), a probe does, after the first sync and every `PROBE_EVERY`
steps: an engine answers one prompt briefly with the weights that it has just been sent, and the
learners, which hold the same, compute its log-probs. A probe changes nothing that is learned.
"""

from collections.abc import Mapping
from concurrent.futures import Future

from open_instruct.batching.rollouts import RankStep, plan_steps_of_ranks
from open_instruct.config.rollout_sections import RolloutSection
from open_instruct.core.errors import RunError
from open_instruct.core.records import Completion, Document, RolloutSample, Span
from open_instruct.generation.requests import (
    GenerationRequest,
    SamplingSettings,
    make_sampling_seed,
)

PROBE_EVERY = 20
PROBE_TOKENS = 32

# Engine and learner hold the very same weights. In float32 only the order of additions differs; in
# bfloat16 rounding.
MAX_DIFFERENCE = {"float32": 1e-2, "bfloat16": 1.0}
MAX_MEAN_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1}
# A mean difference that is so many times the run's first, and above this, is worth a warning.
GROWTH = 5.0
MIN_GROWN_DIFFERENCE = {"float32": 2e-5, "bfloat16": 0.02}

# A log-prob's difference of engine and learner, in nats: over the tokens of a step, or of a probe.
STEP_METRICS = ("logprob_diff/mean", "logprob_diff/max")
PROBE_METRICS = ("logprob_diff/probe_mean", "logprob_diff/probe_max")


class AgreementWatch:
    """Compares the log-probs of engines and learners, step after step; it ends or warns a run.

    Args:
        param_dtype: in which learners compute.
        engine_dtype: in which engines compute.
        async_steps: how many steps engines may lag behind the learners.
    """

    def __init__(self, *, param_dtype: str, engine_dtype: str, async_steps: int) -> None:
        self._async_steps = async_steps
        self._dtype = "bfloat16"
        if param_dtype == engine_dtype == "float32":
            self._dtype = "float32"
        self._first_mean: float | None = None
        self._has_compared_sync = False
        self._has_warned = False

    def needs_probe(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether to probe the weights of `step`, which the engines have just been sent.

        Args:
            step: 1-based.
            metrics: of that step.
        """
        if self._measures_same_weights(metrics) and self._has_compared_sync:
            return False
        is_on_policy = self._async_steps == 0
        return not is_on_policy and (not self._has_compared_sync or step % PROBE_EVERY == 0)

    def check(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Compare what a step and its probe have measured.

        Returns a warning if the difference grows, once in a run.

        Args:
            step: 1-based.
            metrics: of that step.

        Raises:
            RunError: they differ by more than rounding explains.
        """
        warning = None
        if self._measures_same_weights(metrics):
            warning = self._compare(metrics, STEP_METRICS, version=step - 1)
        if PROBE_METRICS[0] in metrics:
            warning = warning or self._compare(metrics, PROBE_METRICS, version=step)
        return warning

    def _measures_same_weights(self, metrics: Mapping[str, float]) -> bool:
        return STEP_METRICS[0] in metrics and metrics.get("staleness/max", 0.0) == 0.0

    def _compare(
        self, metrics: Mapping[str, float], names: tuple[str, str], *, version: int
    ) -> str | None:
        mean = metrics[names[0]]
        largest = metrics[names[1]]
        agrees = largest <= MAX_DIFFERENCE[self._dtype] or mean <= MAX_MEAN_DIFFERENCE[self._dtype]
        if not agrees:  # NaN does not either
            raise RunError(_describe_disagreement(mean, largest, version=version))
        if self._first_mean is None:
            self._first_mean = mean
        self._has_compared_sync |= version > 0
        limit = max(GROWTH * self._first_mean, MIN_GROWN_DIFFERENCE[self._dtype])
        if self._has_warned or mean <= limit:
            return None
        self._has_warned = True
        return (
            f"engines and learners drift apart: with the weights of step {version} their "
            f"log-probs of the same tokens differ by {mean:.2g} nats on average, and by "
            f"{self._first_mean:.2g} when the run was first measured. If this grows on, "
            "completions come from another policy than the one that learns: compare with "
            "--vllm_dtype float32 --param_dtype float32, and report it if the difference stays"
        )


def build_probe(
    prompt_token_ids: tuple[int, ...],
    *,
    step: int,
    rollout: RolloutSection,
    response_length: int,
    seed: int,
) -> GenerationRequest:
    """A short completion of a prompt, asked of an engine after the sync of `step`."""
    return GenerationRequest(
        request_id=f"agreement/{step}",
        prompt_token_ids=prompt_token_ids,
        seed=make_sampling_seed(seed, "agreement", step),
        sampling=SamplingSettings(
            temperature=rollout.temperature,
            top_p=rollout.vllm_top_p,
            max_tokens=min(PROBE_TOKENS, response_length),
        ),
    )


def plan_probe(
    request: GenerationRequest,
    answer: Future[Completion],
    *,
    max_tokens_per_microbatch: int,
    num_ranks: int,
) -> tuple[RankStep, ...]:
    """What each data-parallel rank computes of the answer, once it has come.

    Raises:
        RunError: no engine answered in time.
    """
    completion = answer.result()
    start = len(request.prompt_token_ids)
    stop = start + len(completion.token_ids)
    sample = RolloutSample(
        document=Document(
            token_ids=request.prompt_token_ids + completion.token_ids,
            responses=(Span(start=start, stop=stop),),
        ),
        engine_logprobs=completion.logprobs,
        advantage=0.0,
        routes=completion.routes,
    )
    return plan_steps_of_ranks(
        (sample,) * num_ranks,
        num_ranks=num_ranks,
        max_tokens_per_microbatch=max_tokens_per_microbatch,
        num_mini_batches=1,
    )


def _describe_disagreement(mean: float, largest: float, *, version: int) -> str:
    difference = f"by {mean:.2g} on average and {largest:.2g} at most"
    if version == 0:
        return (
            "engines and learners disagree on the log-probs of the first step's tokens "
            f"{difference}, "
            "although both hold the same weights: training on them would be off-policy from the "
            "start. Is --tokenizer_name_or_path of another model? If not, give the command again "
            "with --vllm_runner v1 (on a GPU v2, if it was v1): where that agrees, keep it, as "
            "vLLM's other runner gives log-probs that it does not sample from. If neither "
            "agrees, this is a defect: please report the model and the command"
        )
    return (
        f"after the weight sync of step {version} engines and learners disagree on the log-probs "
        f"of the same tokens {difference}: the engines do not compute with the weights that the "
        "learners have. The run ends, and its checkpoints stand. Another --weight_sync_backend "
        "may help; this is a defect: please report the model and the command"
    )
