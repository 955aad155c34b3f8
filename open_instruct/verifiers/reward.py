"""From the scores of a prompt's verifiers to the reward that a completion is trained with."""

from __future__ import annotations

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.records import Check, Completion, Prompt, Verdict
from open_instruct.verifiers.answers import R1Format
from open_instruct.verifiers.pool import Outcome, VerifierPool

FORM = Check(verifier=R1Format.name, ground_truth=None)


class RewardModel:
    """Verifiers, format and penalty, as `RewardSection` weighs them."""

    def __init__(self, pool: VerifierPool, config: RewardSection) -> None:
        self._pool = pool
        self._config = config

    def judge(self, prompt: Prompt, completion: Completion) -> Verdict:
        """The verdict on one completion; callable from many threads.

        The reward is `verification_reward` times the mean (or the sum: `several_verifiers`) of the scores, weighted by
        the checks' weights. With the format reward, `r1_style_format_reward` is added where the form is right, and the
        verifiers' part counts
        only there, unless `additive_format_reward`. With the non-stop penalty a completion that was cut gets
        `non_stop_penalty_value` instead of all that. Scores of a verifier that appears twice are averaged.
        """
        config = self._config
        outcomes = [(check, self._score(check, prompt, completion)) for check in prompt.checks]
        problems = [outcome.problem for _, outcome in outcomes]
        by_name: dict[str, list[float]] = {}
        for check, outcome in outcomes:
            by_name.setdefault(check.verifier, []).append(outcome.score)
        scores = {name: sum(values) / len(values) for name, values in by_name.items()}
        total_weight = 1.0 if config.several_verifiers == "sum" else sum(check.weight for check in prompt.checks)
        reward = config.verification_reward * sum(check.weight * outcome.score for check, outcome in outcomes)
        reward = reward / total_weight if total_weight else 0.0
        if config.apply_r1_style_format_reward:
            form = self._score(FORM, prompt, completion)
            scores["format"] = form.score
            problems.append(form.problem)
            if form.score:
                reward += config.r1_style_format_reward
            elif not config.additive_format_reward:
                reward = 0.0
        if config.non_stop_penalty and completion.is_truncated:
            reward = config.non_stop_penalty_value
        return Verdict(reward=reward, scores=scores, problems=tuple(filter(None, problems)))

    def _score(self, check: Check, prompt: Prompt, completion: Completion) -> Outcome:
        return self._pool.score(check, completion.text, prompt=prompt.text, is_truncated=completion.is_truncated)
