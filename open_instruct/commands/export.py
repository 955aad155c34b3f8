"""`open-instruct export`: writes a Hugging Face model from a checkpoint, without the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from open_instruct.config.lora import LoRASection
from open_instruct.config.parser import parse
from open_instruct.config.sections import ExportDtype, flag
from open_instruct.core.errors import InputError
from open_instruct.run.card import write_card
from open_instruct.run.run_directory import RunDirectory
from open_instruct.run.saved_settings import read_settings

if TYPE_CHECKING:
    from olmo_core.nn.transformer import Transformer

    from open_instruct.models.shards import LocalShard
    from open_instruct.run.pretrained import Pretrained


@dataclass(kw_only=True)
class ExportFlags:
    """Write the weights in a checkpoint of RUN, the --output_dir of a run, as a Hugging Face
    folder; adapters are added to the model. RUN/stepN is that with --step N. Needs one process,
    whatever the run had, and no more memory than the largest tensor.

    Examples:
        open-instruct export runs/first --step 200 --output_dir step200
    """

    output_dir: str = flag(
        "where the model goes: a new folder, or an earlier export, which is replaced"
    )
    step: int | None = flag("step of the checkpoint; default: the newest", None, minimum=0)
    export_dtype: ExportDtype | None = flag(
        "dtype of the model that is written; default: the run's", None
    )


def main(words: Sequence[str]) -> int:
    """:raises InputError: the run, the checkpoint or the model that it began with is not there."""
    if not words or words[0].startswith("-"):
        raise InputError(
            "the first word is the folder of a run: open-instruct export RUN --output_dir DIR",
            kind="stray_word",
        )
    run = Path(words[0])
    flags = parse(ExportFlags, words[1:])
    step_name = "" if flags.step is None else f"step{flags.step}"
    if not step_name and run.match("step[0-9]*") and not RunDirectory(path=run).config.exists():
        step_name = run.name
        run = run.parent
    saved_settings = read_settings(run)
    saved_settings.print_notes()
    config = saved_settings.config
    objective = saved_settings.objective

    from open_instruct.checkpoints.step_folder import step_of
    from open_instruct.models.lora.adapters import MergedWeights, add_adapters
    from open_instruct.models.nf4 import describe_rounding, find_rounding
    from open_instruct.run.pretrained import open_pretrained

    folder = find_checkpoint(run, step_name)
    pretrained = open_pretrained(
        replace(config, lora=LoRASection()),  # the adapter that training began with is not needed
        Path(flags.output_dir),
        head=objective.choose_head(config),
    )
    dtype = pretrained.find_dtype(flags.export_dtype or config.run.export_dtype)
    model = pretrained.build(init_device="meta")
    if config.adapters is not None:
        add_adapters(model, config.adapters, dtype=pretrained.find_dtype(config.model.param_dtype))
    weights = _trained_weights(folder, model, pretrained, config.adapters)
    directory = RunDirectory(path=run)
    card = partial(write_card, directory, trained_by=objective.name, until=step_of(folder))
    num_bytes = pretrained.export(
        model.to(dtype),
        flags.output_dir,
        weights=weights,
        dtype=dtype,
        card=card,
        more_config=objective.export_fields(config, pretrained.tokenizer, pretrained.hf_config),
    )
    print(f"{folder} is in {Path(flags.output_dir).absolute()} ({num_bytes / 1e6:,.1f} MB)")
    if isinstance(weights, MergedWeights) and weights.meter.squares:
        changes = find_rounding([weights.meter.sums()])
        names = pretrained.names
        print(describe_rounding({names.hf_name(name): each for name, each in changes.items()}))
    return 0


def _trained_weights(
    folder: Path,
    model: Transformer,
    pretrained: Pretrained,
    lora: LoRASection | None,
) -> Mapping[str, LocalShard]:
    """The weights in a checkpoint; with adapters, the start model's with these added."""
    from open_instruct.checkpoints.saved_weights import SavedWeights
    from open_instruct.checkpoints.step_folder import refuse_another_start_model
    from open_instruct.models.hf.head_kinds import LM_HEAD, LM_HEAD_BIAS
    from open_instruct.models.hf.names import clean_name
    from open_instruct.models.lora.adapters import MergedWeights
    from open_instruct.models.open_files import FileWeights
    from open_instruct.models.shards import find_local_shards

    trained = {
        clean_name(name): tuple(each.shape)
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    saved = SavedWeights(folder, trained)
    if lora is None:
        return saved
    refuse_another_start_model(folder, pretrained.fingerprint)
    heads = {name: saved[name] for name in (LM_HEAD, LM_HEAD_BIAS) if name in saved}
    plain = FileWeights(pretrained.files, pretrained.names, others=heads)
    halves = {name: each.local for name, each in saved.items()}
    scales = {
        name: each.scales.dtype
        for name, each in find_local_shards(model).items()
        if each.scales is not None
    }
    return MergedWeights(plain, halves, scale=lora.scale, in_4_bits=scales)


def find_checkpoint(run: Path, name: str) -> Path:
    """The folder of the checkpoint with that name, or of the newest if it is empty.

    :raises InputError: there is none, or it is damaged.
    """
    from open_instruct.checkpoints.step_folder import find_checkpoints, find_damage

    folders = {path.name: path for path in find_checkpoints(run)}
    if not folders:
        raise InputError(f"{run} has no checkpoint", kind="missing_file")
    folder = folders.get(name or next(reversed(folders)))
    if folder is None:
        raise InputError(f"{run} has {', '.join(folders)}, and not {name}", kind="missing_file")
    damage = find_damage(folder)
    if damage:
        raise InputError(
            f"the checkpoint {folder} is damaged: {damage[0]}; take another step of the run",
            kind="bad_checkpoint",
        )
    return folder
