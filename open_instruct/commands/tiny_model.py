"""Writes small random checkpoints with a real tokenizer, for tests, demos and newcomers.

`open-instruct tiny-model DIR` writes one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from open_instruct.config.parser import parse
from open_instruct.config.sections import flag
from open_instruct.core.errors import InputError
from open_instruct.core.families import FAMILIES, FULL
from open_instruct.core.files import read_user_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerFast

DTYPES = ("float32", "bfloat16", "float16")

PAD = "<|pad|>"
BOS = "<|bos|>"
EOS = "<|eos|>"
ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")
SPECIAL_TOKENS = (PAD, BOS, EOS, *ROLE_TOKENS)
NUM_BYTES = 256
# The words that Qwen2Tokenizer cuts a text into.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


FILES = files("open_instruct.commands") / "tiny_model_files"
_LISTED = json.loads((FILES / "sizes.json").read_text("utf-8"))
# The fields of config.json that make each size: `vocab_size` is only the default, and
# `sliding_window` is for families that have one. Heads have 32 dims at least, with which vLLM's
# attention on a CPU begins.
SIZES: dict[str, dict[str, int]] = {name: size["fields"] for name, size in _LISTED.items()}


def write_tiny_model(
    out_dir: str | Path,
    *,
    family: str,
    size: str = "tiny",
    seed: int = 0,
    vocab_size: int | None = None,
    corpus: Iterable[str] | None = None,
    tie: bool = False,
    dtype: str = "float32",
) -> Path:
    """Write a random model, the same for the same arguments, and a tokenizer trained on `corpus`.

    Args:
        out_dir: a new or empty folder.
        family: which architecture.
        size: one of `SIZES`.
        seed: of the random weights.
        vocab_size: rows of the embedding; default: the size's. The tokenizer fills at most so many.
        corpus: texts to train the tokenizer on; default: a few pages of our own.
        tie: whether the embedding is the head too.
        dtype: of the stored weights.

    Returns:
        `out_dir`, which transformers, vLLM and this package can load.

    Raises:
        InputError: the folder is not empty, or an argument cannot work.
    """
    for name, value, known_values in (
        ("family", family, FAMILIES),
        ("size", size, SIZES),
        ("dtype", dtype, DTYPES),
    ):
        if value not in known_values:
            raise InputError(
                f"--{name} {value}: unknown; choose from {', '.join(known_values)}",
                kind="bad_value",
            )
    vocab_size = SIZES[size]["vocab_size"] if vocab_size is None else vocab_size
    smallest = NUM_BYTES + len(SPECIAL_TOKENS)
    if vocab_size < smallest:
        raise InputError(
            f"--vocab_size {vocab_size}: too small; {NUM_BYTES} bytes and {len(SPECIAL_TOKENS)} "
            f"special tokens need at least {smallest}",
            kind="out_of_range",
        )
    folder = _empty_folder(Path(out_dir))
    texts = built_in_corpus() if corpus is None else corpus
    tokenizer = train_tokenizer(
        texts, vocab_size=vocab_size, splits_as_qwen=FAMILIES[family].forces_tokenizer
    )
    config = tiny_config(family, SIZES[size], vocab_size=vocab_size, tie=tie)
    _write_weights(folder, config, seed=seed, dtype=dtype)
    # The template goes into tokenizer_config.json.
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    return folder


def _empty_folder(folder: Path) -> Path:
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} exists and is not an empty folder; give a new one", kind="other_run"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{folder}: cannot be made a folder to write to ({error.strerror})",
            kind="unreadable_file",
        ) from None
    return folder


def tiny_config(
    family: str,
    size: Mapping[str, int],
    *,
    vocab_size: int,
    tie: bool,
) -> PretrainedConfig:
    """The transformers config of a model of `size`, as in `SIZES`; its token ids are those of
    `train_tokenizer`.
    """
    import transformers

    fields: dict[str, Any] = {
        "max_position_embeddings": 4096,
        **size,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tie,
        "pad_token_id": SPECIAL_TOKENS.index(PAD),
        "bos_token_id": SPECIAL_TOKENS.index(BOS),
        "eos_token_id": SPECIAL_TOKENS.index(EOS),
    }
    if not FAMILIES[family].has_windows:
        fields.pop("sliding_window", None)
    num_heads = size["num_attention_heads"]
    head_dim = size["hidden_size"] // num_heads
    if FAMILIES[family].default_head_dim is not None:
        # As in the released models, all heads together are wider than the residual stream.
        fields["head_dim"] = 2 * head_dim
    if (delta := FAMILIES[family].delta) is not None:
        fields["layer_types"] = [
            *FAMILIES[family].layer_types(None, size["num_hidden_layers"] - 1),
            FULL,
        ]
        # Of three convolutions transformers writes a third of all channels each.
        key_heads = size["num_key_value_heads"] if delta == "fused" else num_heads
        fields |= {"linear_num_key_heads": key_heads, "linear_num_value_heads": num_heads}
        # With heads of 64 features vLLM's layers of Qwen 3.5 on a CPU begin.
        least = 64 if delta == "fused" else 0
        fields |= dict.fromkeys(
            ("linear_key_head_dim", "linear_value_head_dim"), max(least, head_dim)
        )
    if (expert_size := FAMILIES[family].expert_size) is not None:
        fields |= {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
        fields[expert_size] = size["intermediate_size"] // 4
    config: PretrainedConfig = getattr(transformers, FAMILIES[family].config_class)(**fields)
    return config


def _write_weights(
    folder: Path,
    config: PretrainedConfig,
    *,
    seed: int,
    dtype: str,
) -> None:
    """Write weights as save_pretrained would, without its slow and noisy import of DeepSpeed."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        # Norms start at one everywhere, biases at zero; noise makes a swap of two of them visible
        # to tests.
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter += 0.1 * torch.randn_like(parameter)
    model.to(getattr(torch, dtype))
    model.config.architectures = [type(model).__name__]
    model.config.dtype = dtype
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    # Without a head that is tied; experts matrix by matrix, as on the hub.
    stored = revert_weight_conversion(model, dict(model.named_parameters()))
    stored = {name: each.contiguous() for name, each in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def built_in_corpus() -> Iterator[str]:
    """The texts that tokenizers are trained on, always in the same order."""
    yield from (FILES / "prose.txt").read_text(encoding="utf-8").split("\n\n")
    for a in range(2, 40):
        for b in range(3, 40, 4):
            yield (
                f"{a} + {b} = {a + b}. {a} times {b} is {a * b}. What is {a + b} minus {b}? The "
                f"answer is {a}."
            )
            yield (
                f"Tom has {a} apples and buys {b} more, so he has {a} + {b} = {a + b} apples. "
                f"#### {a + b}"
            )


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, splits_as_qwen: bool = False
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer (any UTF-8 text round-trips) with chat tokens and a chat template.

    Ids 0, 1, 2 are pad, bos, eos; then come the role tokens, the 256 bytes, and the merges found in
    `texts`.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if splits_as_qwen:
        bpe.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")
        bpe.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        # Never met; the class that transformers takes for Qwen 2.5, whatever a file says, would add
        # one of its own.
        unk_token=PAD,
        additional_special_tokens=list(ROLE_TOKENS),
        clean_up_tokenization_spaces=False,
        padding_side="right",
    )
    # A turn is its role token, a line break and the text; an assistant's turn ends with the eos
    # token.
    tokenizer.chat_template = (FILES / "chat_template.jinja").read_text("utf-8")
    return tokenizer


@dataclass(kw_only=True)
class TinyModelFlags:
    """Write a small random checkpoint in Hugging Face format to DIR, a new or empty folder, with a
    byte-level BPE tokenizer and a chat template: for tests, demos and trying things out.

    Examples:
        open-instruct tiny-model tiny --family olmo2
    """

    family: str = flag("architecture", choices=FAMILIES)
    size: str = flag(
        ", ".join(f"{name} ({size['roughly']})" for name, size in _LISTED.items()),
        "tiny",
        choices=SIZES,
    )
    seed: int = flag("random seed of the weights", 0)
    vocab_size: int | None = flag("rows of the embedding; default: the size's", None)
    text: list[str] | None = flag(
        ("text files to train the tokenizer on; default: a few pages that come with the package"),
        None,
    )
    tie_word_embeddings: bool = flag("use the embedding as the head too", False)
    dtype: str = flag("dtype of the weights", "float32", choices=DTYPES)


def main(args: Sequence[str]) -> int:
    """Write the checkpoint that `args` describe, for which torch is loaded; returns the exit code.

    Raises:
        InputError: a flag is wrong, or the folder is not empty.
    """
    name, words = _split_folder(args)
    flags = parse(TinyModelFlags, words)
    settings = asdict(flags)
    texts = settings.pop("text")
    tie = settings.pop("tie_word_embeddings")
    folder = write_tiny_model(
        name, corpus=list(_read_texts(texts)) if texts else None, tie=tie, **settings
    )
    print(f"wrote a random {flags.family} model ({flags.size}) and its tokenizer to {folder}")
    return 0


def _split_folder(args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The first word, or the last one if that is no flag's value, and the words of the flags."""
    if args and not args[0].startswith("-"):
        return args[0], args[1:]
    if len(args) > 2 and not any(word.startswith("-") for word in args[-2:]):
        return args[-1], args[:-1]
    raise InputError(
        "the first word is the folder to write: open-instruct tiny-model DIR --family olmo2",
        kind="stray_word",
    )


def _read_texts(files: Sequence[str]) -> Iterator[str]:
    for file in files:
        text = read_user_file(file, where=f"--text {file}")
        if not text:
            raise InputError(f"--text {file}: the file is empty", kind="bad_row")
        yield from text.splitlines(keepends=True)
