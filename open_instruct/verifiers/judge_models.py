"""Verifiers that ask a model: a folder that a run of ours has exported, opened with transformers where they judge."""

from __future__ import annotations

import json
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.errors import InputError
from open_instruct.verifiers.verifier import Verifier


class JudgeModel(Verifier):
    """`settings` are a folder, then with commas words of the verifier's own, and a device of torch's.

    The prompt is taken as the engine was given it, so the policy and this model must have one chat template.
    """

    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    start_timeout_s: ClassVar[float] = 900.0
    auto_class: ClassVar[str]  # of transformers
    field: ClassVar[str]  # of config.json, without which a folder is not one of this kind
    words: ClassVar[dict[str, str]]  # and the field that each needs

    def __init__(self, settings: str) -> None:
        folder, *words = settings.split(",")
        self.folder, self.options = Path(folder).expanduser(), set(words)
        self.device = next((word for word in words if word.partition(":")[0] in ("cpu", "cuda")), "cpu")
        problem = None
        try:
            self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem = f"{folder}/config.json cannot be read: {error}"
        else:
            if self.options - self.words.keys() - {self.device}:
                problem = f"after the folder come {', '.join(self.words)}, and a device: cpu or cuda:0"
            elif self.field not in self.config:
                problem = f"config.json has no {self.field}: give the hf_model of a run of open-instruct {self.name}"
            elif missing := {self.words[word] for word in self.options & self.words.keys()} - self.config.keys():
                problem = f"config.json has no {missing.pop()}, which a run with --eval_mixer_list writes"
        if problem is not None:
            raise InputError(f"--verifier {self.name}:{settings}: {problem}")

    def load(self) -> None:
        import transformers

        kind: Any = getattr(transformers, self.auto_class)
        self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)
        self._model = kind.from_pretrained(self.folder, use_safetensors=True, dtype="auto").eval().to(self.device)

    def score(self, completion: str, ground_truth: Any) -> float:
        return self.judge("", completion, ground_truth, is_truncated=False)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _logits(self, token_ids: list[int]) -> Any:
        """Of a row: float32, on the CPU."""
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([token_ids], device=self.device)).logits[0].float().cpu()


class RewardModelVerifier(JudgeModel):
    """The reward of prompt and completion; with `normalize` less the held-out rewards' mean, by their deviation."""

    name: ClassVar[str] = "reward_model"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    field: ClassVar[str] = "num_labels"
    words: ClassVar[dict[str, str]] = {"normalize": "score_std"}

    def load(self) -> None:
        super().load()
        asked, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}
        prompt, whole = (
            self._tokenizer.apply_chat_template(turns, add_generation_prompt=len(turns) == 1, tokenize=False)
            for turns in ([asked], [asked, answer])
        )
        # What the template ends a reply with: the place that the reward is read at.
        self._end = whole.removeprefix(prompt).partition("!")[2].rstrip()

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        end = "" if is_truncated else self._end
        reward = float(self._logits(self._ids(prompt) + self._ids(completion + end))[0])
        if "normalize" in self.options:
            return (reward - self.config["score_mean"]) / self.config["score_std"]
        return reward


class ProcessRewardVerifier(JudgeModel):
    """Of the steps of a completion, P(right) of the worst; with `product` of all together. 0 where there is no step."""

    name: ClassVar[str] = "prm"
    is_bounded: ClassVar[bool] = True
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    field: ClassVar[str] = "prm_reward_tokens"
    words: ClassVar[dict[str, str]] = {"min": field, "product": field}

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        """A step is a line, or what lies between separators. The rest of a completion that was cut is none."""
        end, is_placeholder = self.config["prm_step_end"], self.config["prm_is_placeholder"]
        steps = completion.split("\n" if is_placeholder else end)
        if is_truncated:
            steps.pop()
        steps = [step for step in steps if step.strip()]
        if not steps:
            return 0.0
        if is_placeholder:
            # As Math-Shepherd writes them: the placeholder at the end of each line.
            texts = [f"{before}{step} {end}" for before, step in zip([prompt, *"\n" * len(steps)], steps, strict=False)]
        else:
            texts = [prompt, *(step + end for step in steps)]
        pieces = list(map(self._ids, texts))
        ends = list(accumulate(map(len, pieces), initial=-1))[-len(steps) :]
        words = [self._ids(word)[0] for word in self.config[self.field]]
        right = self._logits(list(chain.from_iterable(pieces)))[ends][:, words].softmax(dim=1)[:, 0]
        return float(right.prod() if "product" in self.options else right.min())
