"""Verifiers that ask a reward model: a folder that a run of ours has exported."""

import json
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.core.errors import InputError
from open_instruct.rewards.verifier import Verifier


class ModelVerifier(Verifier):
    """Scores a completion by a model that transformers opens.

    The prompt is read as the engine had it, so the policy and this model must have one chat
    template.

    Args:
        settings: a folder, then options and a device of torch's, with commas between them.
    """

    sees_thinking: ClassVar[bool] = True
    start_timeout_s: ClassVar[float] = 900.0
    known_options: ClassVar[tuple[str, ...]]

    def __init__(self, settings: str) -> None:
        folder, *words = settings.split(",")
        self.folder = Path(folder).expanduser()
        devices = [word for word in words if word.partition(":")[0] in ("cpu", "cuda")]
        self.device = next(iter(devices), "cpu")
        self.options = {*words} - {self.device}
        try:
            self.config = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
            problem = self._find_option_problem() or self.find_folder_problem(self.config)
        # The last two of JSON that is no object.
        except (OSError, ValueError, TypeError, AttributeError) as error:
            problem = f"{folder}/config.json cannot be read: {error}"
        if problem is not None:
            raise InputError(f"--verifier {self.name}:{settings}: {problem}", kind="remote")

    def _find_option_problem(self) -> str | None:
        if self.options - {*self.known_options}:
            return (
                f"after the folder come {', '.join(self.known_options)}, and a device: cpu or "
                "cuda:0"
            )
        return None

    @abstractmethod
    def find_folder_problem(self, config: dict[str, Any]) -> str | None:
        """Why a folder with this config.json cannot judge; None if it can."""

    @property
    @abstractmethod
    def auto_class(self) -> str:
        """The class of transformers that opens the folder."""

    def load(self) -> None:
        import transformers

        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(
            self.folder, local_files_only=True
        )
        kind: Any = getattr(transformers, self.auto_class)
        model, report = kind.from_pretrained(
            self.folder, use_safetensors=True, dtype="auto", output_loading_info=True
        )
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"])[:3])
            raise InputError(
                f"{self.folder} has no tensor {missing}: export the run again", kind="bad_model"
            )
        self.model = model.eval().to(self.device)

    def tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def compute_logits(self, token_ids: Sequence[int]) -> Any:
        """The model's logits for one row of ids: float32, on the CPU."""
        import torch

        with torch.no_grad():
            return self.model(torch.tensor([token_ids], device=self.device)).logits[0].float().cpu()


class RewardModel(ModelVerifier):
    """Scores a completion by a reward model.

    With `normalize`, the mean of the held-out rewards is subtracted, and the difference divided by
    their standard deviation.
    """

    name: ClassVar[str] = "reward_model"
    is_bounded: ClassVar[bool] = False
    known_options: ClassVar[tuple[str, ...]] = ("normalize",)
    auto_class = "AutoModelForSequenceClassification"

    def find_folder_problem(self, config: dict[str, Any]) -> str | None:
        if _count_labels(config) != 1 or not _has_class(config, "ForSequenceClassification"):
            return (
                "config.json names no model with one score (ForSequenceClassification, "
                f"num_labels 1): give the hf_model of a run of open-instruct {self.name}"
            )
        if self.options and "score_std" not in config:
            return "config.json has no score_std, which a run with --eval_mixer_list writes"
        return None

    def load(self) -> None:
        super().load()
        render: Any = partial(self.tokenizer.apply_chat_template, tokenize=False)
        question = {"role": "user", "content": "?"}
        prompt = render([question], add_generation_prompt=True)
        whole = render([question, {"role": "assistant", "content": "!"}])
        # The text with which the template ends a reply: the reward is read there.
        self._end = whole.removeprefix(prompt).partition("!")[2].rstrip()

    def judge(
        self,
        prompt: str,
        completion: str,
        ground_truth: Any,
        *,
        is_truncated: bool,
    ) -> float:
        end = "" if is_truncated else self._end
        logits = self.compute_logits(self.tokenize(prompt) + self.tokenize(completion + end))
        reward = float(logits[0])
        if self.options:
            return (reward - self.config["score_mean"]) / self.config["score_std"]
        return reward


class ProcessRewardModel(ModelVerifier):
    """Scores a completion by the probability that its steps are right.

    It is that of the worst (`min`), or their `product` or `mean`. A step is what stands between two
    step separators. A completion without a step has 0.
    """

    name: ClassVar[str] = "prm"
    known_options: ClassVar[tuple[str, ...]] = ("min", "product", "mean")

    def find_folder_problem(self, config: dict[str, Any]) -> str | None:
        if len(self.options) > 1:
            return (
                f"{' and '.join(sorted(self.options))}: give one of {', '.join(self.known_options)}"
            )
        has_head = _has_class(config, "ForTokenClassification") and _count_labels(config) == 2
        if "prm_step_separator" not in config or not (has_head or config.get("prm_reward_tokens")):
            return (
                "config.json has no prm_step_separator with two classes or prm_reward_tokens: "
                f"give the hf_model of a run of open-instruct {self.name}"
            )
        return None

    @property
    def auto_class(self) -> str:
        if self.config.get("prm_reward_tokens"):
            return "AutoModelForCausalLM"
        return "AutoModelForTokenClassification"

    def judge(
        self,
        prompt: str,
        completion: str,
        ground_truth: Any,
        *,
        is_truncated: bool,
    ) -> float:
        steps = completion.split(self.config["prm_step_separator"])
        if is_truncated:
            steps.pop()  # which breaks off
        steps = [step for step in steps if step.strip()]
        if not steps:
            return 0.0
        scores = self.score_steps(prompt, steps)
        if "product" in self.options:
            return float(scores.prod())
        if "mean" in self.options:
            return float(scores.mean())
        return float(scores.min())

    def score_steps(self, prompt: str, steps: Sequence[str]) -> Any:
        """The probability that each step is right, a tensor on the CPU."""
        separator = self.config["prm_step_separator"]
        placeholder = self.config.get("prm_placeholder_token")
        if placeholder is None:
            texts = [prompt]
            for step in steps:
                texts += [step, separator]
        else:
            bos = ""
            if self.config.get("prm_add_bos"):
                bos = self.tokenizer.bos_token
            texts = write_step_lines(
                prompt, steps, separator=separator, placeholder=placeholder, bos=bos
            )
        pieces = list(map(self.tokenize, texts))
        ends = list(accumulate(map(len, pieces), initial=-1))[3::2]
        logits = self.compute_logits(list(chain.from_iterable(pieces)))[ends]
        words = self.config.get("prm_reward_tokens")
        if words:
            token_ids = [self.tokenize(word)[0] for word in words]
            return logits[:, token_ids].softmax(dim=1)[:, 0]
        return logits.softmax(dim=1)[:, 1]


MODEL_VERIFIERS = {kind.name: kind for kind in (RewardModel, ProcessRewardModel)}


def write_step_lines(
    prompt: str,
    steps: Sequence[str],
    *,
    separator: str,
    placeholder: str,
    bos: str = "",
) -> list[str]:
    """Steps as Math-Shepherd writes them, in texts that are tokenised apart.

    Each stands on its line, with the placeholder behind it.

    Args:
        bos: stands first, once, also where the prompt begins with it.

    Example: of the steps a and b, `["", "Q?a ", "ки", "\nb ", "ки"]`.
    """
    texts = [bos]
    before = prompt.removeprefix(bos)
    for step in steps:
        texts += [f"{before}{step} ", placeholder]
        before = separator
    return texts


def _count_labels(config: dict[str, Any]) -> int:
    """The outputs at a position, by their number or names; transformers' default is 2."""
    return int(config.get("num_labels") or len(config.get("id2label") or "01"))


def _has_class(config: dict[str, Any], ending: str) -> bool:
    return any(name.endswith(ending) for name in config.get("architectures") or ())
