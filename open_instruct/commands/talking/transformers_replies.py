"""Replies of a conversation by transformers, as they come.

Legend: B = 1 sequence, T tokens of the prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from open_instruct.commands.talking.models import TalkingModel
from open_instruct.core.errors import InputError
from open_instruct.generation.replies import Sampling
from open_instruct.run.transformers_model import open_model

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TransformersEngine:
    """A model that transformers opens, on the GPU or, where there is none, the CPU."""

    def __init__(
        self, model: TalkingModel, tokenizer: PreTrainedTokenizerFast, *, dtype: str | None
    ) -> None:
        try:
            loaded_model = open_model(model.folder, "AutoModelForCausalLM", dtype)
        except InputError:
            raise
        except (OSError, ValueError, KeyError, ImportError) as error:
            raise InputError(
                f"transformers cannot open {model.folder}: {error}", kind="bad_model"
            ) from error
        if model.adapter is not None:
            loaded_model = _with_adapter(loaded_model, model.adapter)
        self._model = loaded_model.eval()
        self._tokenizer = tokenizer
        self._stopped = threading.Event()
        self.was_cut = False

    def stream(self, prompt_token_ids: Sequence[int], sampling: Sampling) -> Iterator[str]:
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        self._stopped.clear()
        streamer = TextIteratorStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)
        outcome: list[Any] = []

        def generate() -> None:
            try:
                options = _generation_options(sampling, self._tokenizer)
                if sampling.seed is not None:
                    torch.manual_seed(sampling.seed)
                prompt_BT = torch.tensor([list(prompt_token_ids)], device=self._model.device)
                outcome.append(
                    self._model.generate(
                        input_ids=prompt_BT,
                        attention_mask=torch.ones_like(prompt_BT),
                        streamer=streamer,
                        stopping_criteria=StoppingCriteriaList(
                            [lambda *_, **__: self._stopped.is_set()]
                        ),
                        **options,
                    )
                )
            except BaseException as error:
                outcome.append(error)
                streamer.end()

        thread = threading.Thread(target=generate, name="reply", daemon=True)
        thread.start()
        yield from streamer
        thread.join()
        if isinstance(outcome[0], BaseException):
            raise outcome[0]
        reply_ids = outcome[0][0, len(prompt_token_ids) :].tolist()
        self.was_cut = (
            len(reply_ids) >= sampling.max_new_tokens
            and reply_ids[-1] not in sampling.end_token_ids
        )

    def stop(self) -> None:
        self._stopped.set()


def _with_adapter(base_model: Any, adapter: Path) -> Any:
    try:
        from peft import PeftModel
    except ImportError:
        raise InputError(
            f"{adapter} is an adapter, and peft, which opens it, is not installed: `pip install "
            "peft`, or make a model of it by `open-instruct merge`",
            kind="missing_package",
        ) from None
    return PeftModel.from_pretrained(base_model, adapter)


def _generation_options(sampling: Sampling, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Arguments of transformers' `generate`."""
    pad = tokenizer.pad_token_id
    options: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "eos_token_id": list(sampling.end_token_ids),
        "pad_token_id": pad if pad is not None else sampling.end_token_ids[0],
    }
    if sampling.temperature == 0:
        return options | {
            "do_sample": False,
            "temperature": None,
            "top_p": None,
            "top_k": None,
        }
    if sampling.temperature is not None:
        options |= {"do_sample": True, "temperature": sampling.temperature}
    if sampling.top_p is not None:
        options |= {"do_sample": True, "top_p": sampling.top_p}
    return options
