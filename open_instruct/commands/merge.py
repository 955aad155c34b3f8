"""`open-instruct merge`: adds an adapter to its model and writes the result as a folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from open_instruct.config.parser import parse
from open_instruct.config.sections import ExportDtype, flag


@dataclass(kw_only=True)
class MergeFlags:
    """Add a low-rank adapter, as our runs and peft write them, to the model that it was trained
    beside, in float32, and write the result as a Hugging Face folder. The run is not needed. Needs
    one process, and no more memory than the largest tensor.

    Examples:
        open-instruct merge --model_name_or_path MODEL_DIR --adapter_name_or_path runs/a/adapter
            --output_dir merged
    """

    model_name_or_path: str = flag(
        "folder or hub name of the model that the adapter was trained beside"
    )
    adapter_name_or_path: str = flag("folder or hub name of the adapter")
    output_dir: str = flag(
        "where the model goes: a new folder, or an earlier export, which is replaced"
    )
    export_dtype: ExportDtype = flag("dtype of the model that is written", "source")


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder is missing or damaged, or the adapter is of another model."""
    flags = parse(MergeFlags, words)
    # Only now: a wrong flag is refused at once, without torch.
    from open_instruct.commands.adapter_merge import merge_adapter
    from open_instruct.run.first_look import fetch_folder

    base = fetch_folder(flags.model_name_or_path)
    adapter = fetch_folder(flags.adapter_name_or_path)
    out = Path(flags.output_dir).absolute()
    num_bytes = merge_adapter(base, adapter, out, export_dtype=flags.export_dtype)
    print(f"{base} with the adapter of {adapter} is in {out} ({num_bytes / 1e6:,.1f} MB)")
    return 0
