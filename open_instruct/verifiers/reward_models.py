"""A verifier that asks a reward model: a folder that a run of ours has exported, opened with transformers."""

import json
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.errors import InputError
from open_instruct.verifiers.verifier import Verifier


class RewardModel(Verifier):
    """The reward of prompt and completion. `settings` are a folder, then `normalize` and a device of torch's, with
    commas between them.

    With `normalize`, the mean of the held-out rewards is subtracted, and the difference divided by their standard
    deviation. The prompt is taken as the engine was given it, so the policy and this model must have one chat template.
    """

    name: ClassVar[str] = "reward_model"
    sees_thinking: ClassVar[bool] = True
    is_bounded: ClassVar[bool] = False
    start_timeout_s: ClassVar[float] = 900.0

    def __init__(self, settings: str) -> None:
        folder, *words = settings.split(",")
        self.folder = Path(folder).expanduser()
        self.device = next((word for word in words if word.partition(":")[0] in ("cpu", "cuda")), "cpu")
        self.options = {*words} - {self.device}
        try:
            self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            problem = self._problem()
        except (OSError, ValueError, TypeError) as error:  # the last of JSON that is no object
            problem = f"{folder}/config.json cannot be read: {error}"
        if problem is not None:
            raise InputError(f"--verifier {self.name}:{settings}: {problem}", kind="remote")

    def _problem(self) -> str | None:
        """A problem of the options, or of a folder with this config.json; None if there is none."""
        if self.options - {"normalize"}:
            return "after the folder come normalize, and a device: cpu or cuda:0"
        if "num_labels" not in self.config:
            return f"config.json has no num_labels: give the hf_model of a run of open-instruct {self.name}"
        if self.options and "score_std" not in self.config:
            return "config.json has no score_std, which a run with --eval_mixer_list writes"
        return None

    def load(self) -> None:
        import transformers

        self._tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(self.folder, local_files_only=True)
        kind: Any = transformers.AutoModelForSequenceClassification
        self._model = kind.from_pretrained(self.folder, use_safetensors=True, dtype="auto").eval().to(self.device)
        render: Any = partial(self._tokenizer.apply_chat_template, tokenize=False)
        question = {"role": "user", "content": "?"}
        prompt = render([question], add_generation_prompt=True)
        whole = render([question, {"role": "assistant", "content": "!"}])
        # The text with which the template ends a reply: the reward is read there.
        self._end = whole.removeprefix(prompt).partition("!")[2].rstrip()

    def judge(self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool) -> float:
        import torch

        end = "" if is_truncated else self._end
        token_ids = self._ids(prompt) + self._ids(completion + end)
        with torch.no_grad():
            logits = self._model(torch.tensor([token_ids], device=self.device)).logits[0]
        reward = float(logits[0])
        if self.options:
            return (reward - self.config["score_mean"]) / self.config["score_std"]
        return reward

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
