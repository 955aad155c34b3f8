"""A model that talks by transformers' `generate`, on the GPU or, where there is none, the CPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from olmo_core.nn.transformer import Transformer
from transformers import AutoModelForCausalLM, GenerationConfig, TextStreamer
from transformers.utils import logging as transformers_logging

from open_instruct.chat.folder import TalkingFolder
from open_instruct.config.lora import LoRASection
from open_instruct.data.chat import ChatFormat
from open_instruct.engines.requests import Dtype, SamplingSettings
from open_instruct.errors import InputError
from open_instruct.learner.scoring_model import DTYPES
from open_instruct.models.build import build_model
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, parameter_shapes
from open_instruct.models.lora.adapters import MergedWeights
from open_instruct.models.lora.files import open_adapter, read_settings
from open_instruct.models.shards import held


class Written(TextStreamer):
    """Whole words, to whoever wants them in place of stdout."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        del stream_end
        self._write(text)


class TransformersSpeaker:
    """A model that goes on with a text; `max_tokens` are those of prompt and reply together.

    Raises:
        InputError: the model or the adapter is damaged, or they do not belong together.
    """

    def __init__(
        self, folder: TalkingFolder, chat: ChatFormat, *, sampling: SamplingSettings, dtype: Dtype | None
    ) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        hf_config = load_hf_config(str(folder.model))
        names = TensorNames(hf_config)
        built = build_model(hf_config, init_device="meta")
        with CheckpointFiles.open(folder.model) as files:  # transformers would draw missing weights at random
            check_cover(names, files, parameter_shapes(built))
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        opener: Any = AutoModelForCausalLM
        self._model = opener.from_pretrained(
            folder.model,
            config=hf_config,
            dtype=getattr(torch, dtype or DTYPES[device.type]),
            # Named, or transformers would fetch a kernel that the config may name.
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        if folder.adapter is not None:
            add_adapter(self._model, folder.adapter, names, built)
        self._model.to(device).eval()
        # The whole config: values of a generation_config.json would otherwise count where nothing else is given.
        drawn = {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        ends = list(chat.turn_end_token_ids())
        self._model.generation_config = GenerationConfig(
            eos_token_id=ends or None,
            pad_token_id=(ends or [0])[0],
            **(drawn if sampling.temperature > 0 else {"do_sample": False}),
        )
        self._tokenizer = chat.tokenizer
        self._longest_reply = sampling.max_tokens
        self.max_tokens: int = hf_config.max_position_embeddings

    def say(self, token_ids: Sequence[int], write: Callable[[str], None]) -> None:
        """Go on after `token_ids`, and `write` the text piece by piece."""
        ids_BT = torch.tensor([token_ids], device=self._model.device)
        room = min(self._longest_reply, self.max_tokens - len(token_ids))
        self._model.generate(
            ids_BT,
            attention_mask=torch.ones_like(ids_BT),
            streamer=Written(self._tokenizer, write),
            max_new_tokens=room,
        )


@torch.no_grad()
def add_adapter(model: Any, folder: Path, names: TensorNames, built: Transformer) -> None:
    """Merge the adapter in `folder` into the matrices of `model`, in float32.

    Args:
        built: the same model, on meta, as OLMo-core has it; it gets the adapters.

    Raises:
        InputError: it is damaged, or of another model.
    """
    try:
        lora = LoRASection(**read_settings(folder))
        plain = {name: held(model.get_parameter(hf_name)) for name, hf_name in names}
        for name, merged in MergedWeights(plain, open_adapter(folder, built, names, lora), scale=lora.scale).items():
            plain[name].local.copy_(merged.local)
    except Exception as error:  # of safetensors, of a name that is not there, of shapes
        raise InputError(f"{folder} cannot be added to its model: {type(error).__name__}: {error}") from None
