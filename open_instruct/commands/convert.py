"""`open-instruct convert`: writes a model in the other of the two forms of checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from open_instruct.config.parser import parse
from open_instruct.config.sections import ExportDtype, flag
from open_instruct.core.errors import InputError


@dataclass(kw_only=True)
class ConvertFlags:
    """Write the model in the folder FROM to the folder TO: a checkpoint of OLMo-core as a Hugging
    Face folder, a Hugging Face folder as a checkpoint that OLMo-core opens. Both ways the numbers
    stay as they are. Needs one process, and no more memory than the largest tensor.

    Examples:
        open-instruct convert checkpoints/step1000 olmo3_hf
        open-instruct convert runs/first/hf_model olmo_core/first
    """

    export_dtype: ExportDtype = flag("dtype of the model that is written", "source")
    tokenizer_name_or_path: str | None = flag(
        "folder or hub name of the tokenizer; default: the model's", None
    )


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder is missing or damaged, or the other form has no such model."""
    folders = [word for word in words[:2] if not word.startswith("-")]
    if len(folders) < 2:
        raise InputError(
            "the first two words are folders: open-instruct convert FROM TO", kind="stray_word"
        )
    flags = parse(ConvertFlags, words[2:])
    # Only now: a wrong flag is refused at once, without torch.
    from open_instruct.commands.model_conversion import convert_model
    from open_instruct.run.first_look import fetch_folder

    out = Path(folders[1]).expanduser().absolute()
    form, num_bytes = convert_model(
        fetch_folder(folders[0]),
        out,
        export_dtype=flags.export_dtype,
        tokenizer_name=flags.tokenizer_name_or_path,
    )
    print(f"{folders[0]} is in {out}, {form} ({num_bytes / 1e6:,.1f} MB)")
    return 0
