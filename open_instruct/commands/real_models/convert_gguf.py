"""Write a model in a GGUF file as a Hugging Face folder, and ask it one question.

A program of its own, which `commands/get_model.py` starts: transformers looks once, when it is
imported, for the package that reads GGUF, and here that package lies in a folder of the cache.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

MAX_ANSWER_TOKENS = 24


def main(request: dict[str, Any]) -> None:
    """Convert as `request` says, and print a JSON object with the answer.

    Args:
        request: `gguf`, the file; `out`, a new folder; `splits_digits`, whether its tokenizer takes
            each digit of a number alone; `question`.
    """
    import torch
    import transformers
    from safetensors.torch import save_file

    transformers.utils.logging.disable_progress_bar()
    gguf = Path(request["gguf"])
    out = Path(request["out"])
    out.mkdir()
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(gguf.parent),
        "gguf_file": gguf.name,
    }
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(**source)

    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name not in tied
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    write_config(model.config, type(model).__name__, out)
    model.generation_config.save_pretrained(out)
    write_tokenizer(tokenizer, out, splits_digits=request["splits_digits"])
    print(json.dumps({"answer": ask(out, request["question"])}))


def write_config(hf_config: "PretrainedConfig", architecture: str, out: Path) -> None:
    """config.json of the weights as they are now: in bfloat16, no longer quantised."""
    fields = hf_config.to_dict() | {"architectures": [architecture], "dtype": "bfloat16"}
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    (out / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_tokenizer(
    tokenizer: "PreTrainedTokenizerFast", out: Path, *, splits_digits: bool
) -> None:
    """tokenizer.json and what stands beside it.

    A GGUF file names the rule by which texts are split before merges, and transformers takes that
    of GPT-2 whatever the name is. Where digits stand alone, the file written here says so.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence

    backend = tokenizer.backend_tokenizer
    if splits_digits:
        by_bytes: PreTokenizer = ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), by_bytes])
    backend.save(str(out / "tokenizer.json"))
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(fields | special, indent=2) + "\n", encoding="utf-8")
    template = str(tokenizer.chat_template)
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")


def ask(folder: Path, question: str) -> str:
    """The greedy answer of the model in `folder`, as transformers opens it."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False)
    new_ids = answer[0, prompt["input_ids"].shape[1] :]
    return str(tokenizer.decode(new_ids, skip_special_tokens=True)).strip()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
