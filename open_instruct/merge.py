"""`open-instruct merge`: a model with an adapter added to it, from folder to folder, tensor by tensor."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from open_instruct.config.help import asks_for_help, print_help
from open_instruct.config.lora import LoRASection
from open_instruct.config.parser import parse
from open_instruct.config.sections import flag


@dataclass(kw_only=True)
class MergeSection:
    """Folders"""

    model_name_or_path: str = flag("the model that the adapter was trained beside")
    adapter_name_or_path: str = flag("folder of the adapter, as peft and our runs write them")
    output_dir: str = flag("where the model with the adapter added goes")
    export_dtype: Literal["bfloat16", "float32", "source"] = flag("dtype of the model that is written", "source")


@dataclass(kw_only=True)
class MergeFlags:
    """Add a low-rank adapter to the model that it was trained beside, in float32, and write the result as a Hugging
    Face folder. No more than one tensor is in memory at a time.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct merge --model_name_or_path MODEL_DIR --adapter_name_or_path runs/a/adapter --output_dir merged",
    )

    merge: MergeSection


def main(words: Sequence[str]) -> int:
    """:raises InputError: a folder is missing or damaged, or the adapter is of another model."""
    if asks_for_help(words):
        print_help(MergeFlags, "open-instruct merge")
        return 0
    flags = parse(MergeFlags, words).merge

    import torch

    from open_instruct.models.build import build_model
    from open_instruct.models.export import export_hf
    from open_instruct.models.hf.checkpoint_files import CheckpointFiles
    from open_instruct.models.hf.hf_config import load_hf_config
    from open_instruct.models.hf.names import TensorNames
    from open_instruct.models.load import check_cover, parameter_shapes
    from open_instruct.models.lora.adapters import MergedWeights
    from open_instruct.models.lora.files import check_base, open_adapter, read_settings
    from open_instruct.models.shards import held
    from open_instruct.run.first_look import local_folder

    base = local_folder(flags.model_name_or_path)
    adapter_folder = local_folder(flags.adapter_name_or_path)
    lora = LoRASection(**read_settings(adapter_folder))
    hf_config = load_hf_config(str(base))
    names = TensorNames(hf_config)
    model = build_model(hf_config)
    with CheckpointFiles.open(base) as files:
        check_cover(names, files, parameter_shapes(model))
        dtype = None if flags.export_dtype == "source" else getattr(torch, flags.export_dtype)
        model.to(dtype or next(iter(files.dtypes.values())))
        adapter = open_adapter(adapter_folder, model, names, lora)
        if warning := check_base(adapter_folder, base, files):
            print(f"warning: {warning}", file=sys.stderr)
        stored = {name: held(files.read(hf_name)) for name, hf_name in names}  # views: nothing is read before its use
        report = export_hf(
            model,
            names,
            source_folder=base,
            out_folder=flags.output_dir,
            dtype=dtype,
            weights=MergedWeights(stored, adapter, scale=lora.scale),
        )
    print(f"{base} with the adapter of {adapter_folder} is in {report.folder} ({report.num_bytes / 1e6:,.1f} MB)")
    return 0
