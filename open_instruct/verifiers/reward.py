"""The reward of a completion, from the scores of its prompt's verifiers."""

from collections.abc import Sequence

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.records import Completion, Prompt, Verdict
from open_instruct.verifiers.answers import has_r1_format
from open_instruct.verifiers.pool import Outcome, VerifierPool


class RewardManager:
    """Verifiers, format and penalty, as `RewardSection` weighs them."""

    def __init__(self, pool: VerifierPool, config: RewardSection) -> None:
        self._pool = pool
        self._config = config

    def judges_groups(self, prompt: Prompt) -> bool:
        """Whether a verifier of this prompt scores all of its completions at once."""
        return any(self._pool.verifiers[check.verifier].judges_groups for check in prompt.checks)

    def judge(self, prompt: Prompt, completions: Sequence[Completion]) -> list[Verdict]:
        """The verdict on each completion of a prompt; callable from many threads.

        The reward is `verification_reward` times the mean (or the sum: `several_verifiers`) of the scores, weighted by
        the checks' weights. With the format reward, `r1_style_format_reward` is added where the form is right;
        elsewhere the verifiers' part does not count, unless `additive_format_reward`. An environment's rewards are
        added. With the non-stop penalty a completion that was cut gets `non_stop_penalty_value` instead. Scores of a
        verifier that appears twice are averaged.
        """
        check_outcomes = [self._pool.scores(check, prompt.text, completions) for check in prompt.checks]
        return [
            self._verdict(prompt, completion, [outcomes[at] for outcomes in check_outcomes])
            for at, completion in enumerate(completions)
        ]

    def _verdict(self, prompt: Prompt, completion: Completion, outcomes: Sequence[Outcome]) -> Verdict:
        """The verdict on a completion, from the outcomes of its checks."""
        config = self._config
        judged = list(zip(prompt.checks, outcomes, strict=True))
        by_name: dict[str, list[float]] = {}
        for check, outcome in judged:
            by_name.setdefault(check.verifier, []).append(outcome.score)
        scores = {name: sum(values) / len(values) for name, values in by_name.items()}
        total_weight = 1.0 if config.several_verifiers == "sum" else sum(check.weight for check in prompt.checks)
        reward = config.verification_reward * sum(check.weight * outcome.score for check, outcome in judged)
        reward = reward / total_weight if total_weight else 0.0
        problems = [outcome.problem for outcome in outcomes if outcome.problem]
        if (episode := completion.episode) is not None:
            scores |= episode.rewards
            reward += sum(episode.rewards.values())
            problems += [episode.problem] if episode.problem else []
        if config.apply_r1_style_format_reward:
            scores["format"] = float(has_r1_format(completion.text))
            if scores["format"]:
                reward += config.r1_style_format_reward
            elif not config.additive_format_reward:
                reward = 0.0
        if config.non_stop_penalty and completion.is_truncated:
            reward = config.non_stop_penalty_value
        return Verdict(reward=reward, scores=scores, problems=tuple(problems))
