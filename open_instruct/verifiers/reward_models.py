"""Verifiers that ask a reward model: a folder that a run of ours has exported, opened with transformers."""

from __future__ import annotations

import json
from collections.abc import Set
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.errors import InputError
from open_instruct.verifiers.verifier import Verifier


class RewardModel(Verifier):
    """A verifier by a model. `settings` are a folder, then options and a device of torch's, with commas between them.

    The prompt is taken as the engine was given it, so the policy and this model must have one chat template.
    """

    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    start_timeout_s: ClassVar[float] = 900.0
    auto_class: ClassVar[str]
    """The class of transformers that opens the folder."""
    field: ClassVar[str]
    """The field of config.json by which a folder of this kind is known."""
    fields_of_options: ClassVar[dict[str, str]]
    """The options, each with the field of config.json that it needs."""

    def __init__(self, settings: str) -> None:
        folder, *words = settings.split(",")
        self.folder = Path(folder).expanduser()
        self.options = set(words)
        self.device = next((word for word in words if word.partition(":")[0] in ("cpu", "cuda")), "cpu")
        try:
            self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            problem: str | None = f"{folder}/config.json cannot be read: {error}"
        else:
            problem = self._problem(self.config.keys())
        if problem is not None:
            raise InputError(f"--verifier {self.name}:{settings}: {problem}")

    def _problem(self, fields: Set[str]) -> str | None:
        """A problem of the options, or of a folder whose config.json has these fields; None if there is none."""
        options = self.options - {self.device}
        if options - self.fields_of_options.keys():
            return f"after the folder come {', '.join(self.fields_of_options)}, and a device: cpu or cuda:0"
        if self.field not in fields:
            return f"config.json has no {self.field}: give the hf_model of a run of open-instruct {self.name}"
        for option in options:
            if self.fields_of_options[option] not in fields:
                return f"config.json has no {self.fields_of_options[option]}, which a run with --eval_mixer_list writes"
        return None

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
        """The model's logits for one row of ids: float32, on the CPU."""
        import torch

        with torch.no_grad():
            return self._model(torch.tensor([token_ids], device=self.device)).logits[0].float().cpu()


class OutcomeRewardModel(RewardModel):
    """The reward of prompt and completion. With `normalize`, the mean of the held-out rewards is subtracted, and the
    difference divided by their standard deviation.
    """

    name: ClassVar[str] = "reward_model"
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    field: ClassVar[str] = "num_labels"
    fields_of_options: ClassVar[dict[str, str]] = {"normalize": "score_std"}

    def load(self) -> None:
        super().load()
        render: Any = partial(self._tokenizer.apply_chat_template, tokenize=False)
        question = {"role": "user", "content": "?"}
        prompt = render([question], add_generation_prompt=True)
        whole = render([question, {"role": "assistant", "content": "!"}])
        # The text with which the template ends a reply: the reward is read there.
        self._end = whole.removeprefix(prompt).partition("!")[2].rstrip()

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        end = "" if is_truncated else self._end
        reward = float(self._logits(self._ids(prompt) + self._ids(completion + end))[0])
        if "normalize" in self.options:
            return (reward - self.config["score_mean"]) / self.config["score_std"]
        return reward


class ProcessRewardModel(RewardModel):
    """The lowest probability of being right among the steps of a completion, or with `product` the product of all.

    A completion without a step has 0.
    """

    name: ClassVar[str] = "prm"
    is_bounded: ClassVar[bool] = True
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    field: ClassVar[str] = "prm_reward_tokens"
    fields_of_options: ClassVar[dict[str, str]] = {"min": field, "product": field}

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        """A step is a line, or the text between separators. The last piece of a completion that was cut is no step."""
        end = self.config["prm_step_end"]
        is_placeholder = self.config["prm_is_placeholder"]
        steps = completion.split("\n" if is_placeholder else end)
        if is_truncated:
            steps.pop()
        steps = [step for step in steps if step.strip()]
        if not steps:
            return 0.0
        if is_placeholder:
            # As Math-Shepherd writes them: the placeholder at the end of each line.
            first, *others = [f"{step} {end}" for step in steps]
            texts = [prompt + first, *("\n" + step for step in others)]
        else:
            texts = [prompt, *(step + end for step in steps)]
        pieces = list(map(self._ids, texts))
        ends = list(accumulate(map(len, pieces), initial=-1))[-len(steps) :]
        words = [self._ids(word)[0] for word in self.config[self.field]]
        right = self._logits(list(chain.from_iterable(pieces)))[ends][:, words].softmax(dim=1)[:, 0]
        return float(right.prod() if "product" in self.options else right.min())
