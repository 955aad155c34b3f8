"""Verifiers that ask a model: a folder that a run of ours has exported, opened with transformers where they judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.errors import InputError
from open_instruct.verifiers.verifier import Verifier


class JudgeModel(Verifier):
    """`settings` are a folder, then words with commas between them: those of the verifier, and a device of torch's.

    The prompt is taken as the engine was given it, so the policy and this model must have one chat template.
    """

    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    words: ClassVar[tuple[str, ...]]
    auto_class: ClassVar[str]  # of transformers
    field: ClassVar[str]  # of config.json, without which a folder is not one of this kind

    def __init__(self, settings: str) -> None:
        folder, *words = settings.split(",")
        self.folder = Path(folder).expanduser()
        self.options = set(words) & set(self.words)
        devices = [word for word in words if word not in self.words]
        self.device = devices[0] if devices else "cpu"
        try:
            self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(
                f"--verifier {self.name}:{settings}: {folder}/config.json cannot be read: {error}"
            ) from None
        is_device = self.device.partition(":")[0] in ("cpu", "cuda")
        if len(devices) > 1 or not is_device:
            raise InputError(
                f"--verifier {self.name}:{settings}: after the folder come {', '.join(self.words)}, and a device: "
                "cpu or cuda:0"
            )
        if self.field not in self.config:
            raise InputError(
                f"--verifier {self.name}:{settings}: config.json has no {self.field}: give the hf_model of a run of "
                f"open-instruct {self.name}"
            )

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
    words: ClassVar[tuple[str, ...]] = ("normalize",)
    auto_class: ClassVar[str] = "AutoModelForSequenceClassification"
    field: ClassVar[str] = "num_labels"

    def __init__(self, settings: str) -> None:
        super().__init__(settings)
        if self.options and "score_std" not in self.config:
            raise InputError(
                f"--verifier {self.name}:{settings}: config.json has no score_std, which a run with --eval_mixer_list "
                "writes; leave 'normalize' out"
            )

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
        if self.options:
            return (reward - self.config["score_mean"]) / self.config["score_std"]
        return reward


class ProcessRewardVerifier(JudgeModel):
    """Of the steps of a completion, P(right) of the worst; with `product` of all together. 0 where there is no step."""

    name: ClassVar[str] = "prm"
    is_bounded: ClassVar[bool] = True
    words: ClassVar[tuple[str, ...]] = ("min", "product")
    auto_class: ClassVar[str] = "AutoModelForCausalLM"
    field: ClassVar[str] = "prm_reward_tokens"

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
        ids: list[int] = []
        ends = []
        for text in texts:
            ids += self._ids(text)
            ends.append(len(ids) - 1)
        words = [self._ids(word)[0] for word in self.config["prm_reward_tokens"]]
        right = self._logits(ids)[ends[-len(steps) :]][:, words].softmax(dim=1)[:, 0]
        return float(right.prod() if "product" in self.options else right.min())
