"""Verifiers that have a model judge: one for each prompt of ours, one for a prompt of the user's, one for rubrics."""

import asyncio
import json
import re
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.errors import InputError
from open_instruct.verifiers.judge_server import CHARACTERS_A_TOKEN, server_of
from open_instruct.verifiers.verifier import Verifier
from open_instruct.whole_file import read_asked

CUT = "\n[The rest is left out.]"
HOW_TO_ANSWER = "Answer with one of these, and nothing else:"
RUBRICS = '{"rubrics": [{"description": "…", "weight": 1.0}]}, with a weight that is not 0'
_PLACES = re.compile(r"\{(input|output|label)\}")
# What would end a part of the question: special tokens of chat templates, and our tags.
_MARKS = re.compile(r"<[|｜]([^|｜<>]+)[|｜]>|<(/?(?:input|output|label|s|(?:start|end)_of_turn))\s*>", re.IGNORECASE)


@cache
def judge_prompts() -> dict[str, tuple[str, dict[str, float]]]:
    """The question of each judge, and the possible verdicts with their scores; see judge_prompts.yaml."""
    text = Path(__file__).with_name("judge_prompts.yaml").read_text(encoding="utf-8")
    table = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {name: (facts["prompt"], facts["verdicts"]) for name, facts in table.items()}


class Judge(Verifier):
    """The score of a model's verdict on a completion. Completions of a prompt are judged all at once."""

    name: ClassVar[str] = "judge"
    isolated: ClassVar[bool] = False
    judges_groups: ClassVar[bool] = True

    @property
    def needs_ground_truth(self) -> bool:
        return "{label}" in self._prompt

    def configure(self, flags: RewardSection) -> None:
        self._server = server_of(flags)
        self._most_tokens = flags.llm_judge_max_context_length - flags.llm_judge_max_tokens
        word = flags.llm_judge_prompt or "general-quality"
        name = word if self.name == Judge.name else self.name
        self._prompt, self._verdicts = judge_prompts().get(name, judge_prompts()["general-quality"])
        if name not in judge_prompts():
            self._prompt = read_asked(word, where=f"--llm_judge_prompt {word}")
            if "{output}" not in self._prompt:
                raise InputError(f"--llm_judge_prompt {word}: has no {{output}}, the place of the completion; add it")

    def begin_run(self, cache: Path) -> None:
        self._server.begin(cache)

    async def score(self, completion: str, ground_truth: Any) -> float:
        return await self.judge("", completion, ground_truth, is_truncated=False)

    async def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        label = ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth, ensure_ascii=False)
        answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
        given = {"input": prompt, "output": answer, "label": label}
        given = {name: _MARKS.sub(r"[\1\2]", text) for name, text in given.items()}
        room = CHARACTERS_A_TOKEN * self._most_tokens - len(self._prompt) - len(given["input"]) - len(given["label"])
        if len(given["output"]) > room:
            given["output"] = given["output"][: max(room, 0)] + CUT
        question = _PLACES.sub(lambda place: given[place[1]], self._prompt)
        return await self._server.score("\n".join([question, HOW_TO_ANSWER, *self._verdicts]), self._verdicts)


class Rubric(Judge):
    """The mean score of a row's criteria, each judged by itself, weighted by their weights, which may be below 0."""

    name: ClassVar[str] = "rubric"
    is_bounded: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        parse_rubrics(ground_truth)

    async def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        question, weights = parse_rubrics(ground_truth)
        ask = super().judge
        asked = [ask(question or prompt, completion, each, is_truncated=is_truncated) for each in weights]
        scores = await asyncio.gather(*asked)
        total = sum(weight * score for weight, score in zip(weights.values(), scores, strict=True))
        return total / sum(map(abs, weights.values()))


def parse_rubrics(ground_truth: Any) -> tuple[str, dict[str, float]]:
    """The question of a ground truth, "" if it has none, and the weights of its criteria.

    Example: `parse_rubrics({"rubrics": [{"description": "Short.", "weight": 2}]}) == ("", {"Short.": 2.0})`.

    Raises:
        ValueError: it has none, or one without a description, or without a number as weight; or all weights are 0.
    """
    weights: dict[str, float] = {}
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        for each in truth["rubrics"]:
            text = str(each.get("description") or each.get("rubric_item") or each["Ingredient"])
            weights[text] = weights.get(text, 0.0) + float(each.get("weight", 1.0))
        if not 0 < sum(map(abs, weights.values())) < float("inf"):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"it must be {RUBRICS}") from None
    return str(truth.get("query") or truth.get("Question") or ""), weights
