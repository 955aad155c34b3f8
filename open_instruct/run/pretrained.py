"""Opens and checks the checkpoint that a run starts from, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PretrainedConfig

from open_instruct.checkpoints.step_folder import (
    Damaged,
    find_checkpoints,
    refuse_another_start_model,
)
from open_instruct.config.lora import LoRASection
from open_instruct.config.rollout_sections import PromptDataSection
from open_instruct.config.sections import DataSection, ModelSection, RowsSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.families import find_family
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.data.chat import ChatFormat
from open_instruct.data.tokenizer import find_tokenizer_folder, load_tokenizer
from open_instruct.models.build import build_model
from open_instruct.models.drawn_weights import draw_files
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_destination, check_exportable
from open_instruct.models.export_olmo_core import (
    TokenizerFiles,
    check_olmo_core_exportable,
    export_olmo_core,
)
from open_instruct.models.family import find_unknown_fields
from open_instruct.models.heads.value_head import replace_head
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.config_values import check_number
from open_instruct.models.hf.convolutions import recut_convolutions
from open_instruct.models.hf.head_kinds import Head
from open_instruct.models.hf.hf_config import fingerprint_model
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import check_cover, find_parameter_shapes
from open_instruct.models.lora.files import check_base, open_adapter
from open_instruct.models.lora.peft_config import CONFIG_NAME
from open_instruct.models.model_folder import (
    ModelFolder,
    find_tokenizer_name,
    open_model_folder,
)
from open_instruct.models.open_files import open_files
from open_instruct.models.start_model import StartModel
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.parallel.process import run_on_main_process
from open_instruct.parallel.status import this_process
from open_instruct.planning.plan import check_model
from open_instruct.planning.subject.read_shape import shape_from_fields
from open_instruct.run.first_look import check_sizes, check_vocabulary, fetch_folder
from open_instruct.run.generation_settings import build_export_settings
from open_instruct.run.run_directory import RunDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from open_instruct.run.opening import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained(StartModel):
    """The start model of a run, with its tokenizer, its adapter, and what is exported beside it.

    Of a model that is drawn, `source` may be the file of a config.json.
    """

    tokenizer_folder: Path
    tokenizer: PreTrainedTokenizerFast
    is_drawn: bool = False  # at random, and read from no file
    adapter: Mapping[str, torch.Tensor] | None = None
    adapter_folder: Path | None = None  # which the adapter is read from
    chat_template: str | None = None  # in place of the tokenizer's own
    # Of a model that is trained: what is exported beside it, so that readers have the same ids and
    # ends of turns.
    tokenizer_config: Mapping[str, Any] | None = None
    generation_config: Mapping[str, Any] | None = None

    def check_sizes(self, data: DataSection | PromptDataSection) -> None:
        """:raises InputError: the tokenizer or the rows are too large for the model."""
        check_sizes(
            self.tokenizer,
            data,
            tokenizer_folder=self.tokenizer_folder,
            model_folder=self.folder,
            vocab_size=self.hf_config.vocab_size,
            num_positions=getattr(self.hf_config, "max_position_embeddings", None),
        )

    def export(self, model: nn.Module, out_folder: str | Path, **settings: Any) -> int:
        """Write `model` with the settings of this checkpoint; returns its bytes. Collective.

        :param settings: the other arguments of `export_hf`.
        """
        return export_hf(
            model,
            self.names,
            source_folder=self.folder,
            tokenizer_folder=self.tokenizer_folder,
            tokenizer_config=self.tokenizer_config,
            generation_config=self.generation_config,
            chat_template=self.chat_template,
            out_folder=out_folder,
            **settings,
        )

    def export_olmo_core(self, model: nn.Module, out_folder: Path, **settings: Any) -> int:
        """Write `model` as a checkpoint of OLMo-core; returns its bytes. Collective.

        :param settings: the other arguments of `export_olmo_core`.
        """
        return export_olmo_core(
            model,
            self.names,
            source_folder=self.folder,
            out_folder=out_folder,
            tokenizer=TokenizerFiles(
                tokenizer=self.tokenizer,
                folder=self.tokenizer_folder,
                config=self.tokenizer_config,
                chat_template=self.chat_template,
            ),
            **settings,
        )

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the weights and of config.json. Collective at the first call.

        The text of config.json counts, not the object that transformers parses: a newer version has
        more defaults.
        """
        return fingerprint_model(self.source.read_fields(), self.files.fingerprint)

    def is_same_as(self, other: Pretrained) -> bool:
        """Whether both have the same weights and config.json.

        Collective; reads every byte if the shapes are equal.
        """
        return self.files.shapes == other.files.shapes and self.fingerprint == other.fingerprint

    @property
    def warnings(self) -> list[str]:
        """Warnings about the start model."""
        unknown = ", ".join(ascii(name)[:60] for name in find_unknown_fields(self.hf_config)[:10])
        olmo_core = self.source.olmo_core
        warnings = [] if olmo_core is None else [*olmo_core.notes]
        if unknown:
            file = self.source.config_file
            warnings.append(f"{file} has fields that nothing reads: {unknown}")
        if (self.folder / CONFIG_NAME).is_file():
            warnings.append(
                f"{self.folder} holds {CONFIG_NAME} beside the model: with peft installed "
                "transformers would put that adapter on the model that it names; here the model "
                "is what its own weights say"
            )
        return warnings

    def find_dtype(self, name: str) -> torch.dtype:
        """The dtype that `--export_dtype` names; 'source' is the checkpoint's."""
        if name == "source":
            return self.files.main_dtype
        dtype: torch.dtype = getattr(torch, name)
        return dtype


def open_pretrained(
    config: LearnerConfig,
    export_folder: Path,
    *,
    layout: ShardLayout | None = None,
    head: Head = "vocabulary",
    is_trained: bool = True,
) -> Pretrained:
    """Open the start model, its tokenizer and its adapter, and check names and shapes.

    Also check that the trained model can be written to `export_folder`, and that the ranks of
    `layout` can share its attention heads. A model that scores may start from one without a scoring
    head; the head is then drawn from the run's seed. The chat template is read now, since its file
    may have changed when the model is exported.

    :raises InputError: naming the file or tensor that is missing, damaged or does not fit.
    """
    this_process.begin("reading what is in the start model's folder")
    folder, tokenizer_folder = _find_folders(config.model)
    source = open_model_folder(folder)
    hf_config = source.load_config()
    shape = shape_from_fields(
        hf_config.to_dict(), name=f"the model in {folder}", where=str(source.config_file)
    )
    check_model(shape, layout, config if is_trained else None)
    tokenizer = load_tokenizer(str(tokenizer_folder))
    check_vocabulary(source, tokenizer, tokenizer_folder)
    names = TensorNames(hf_config, head=head)
    if config.model.from_scratch:
        files = _draw_files(source, hf_config, config)
    else:
        files = open_files(source, hf_config)
    if head != "vocabulary":
        files = replace_head(files, hf_config, head, seed=config.optim.seed)
    pretrained = Pretrained(
        source=source,
        tokenizer_folder=tokenizer_folder,
        hf_config=hf_config,
        files=files,
        names=names,
        tokenizer=tokenizer,
        is_drawn=config.model.from_scratch,
        chat_template=_find_other_template(tokenizer, config.data),
    )
    if is_trained:
        pretrained = _with_exported_settings(pretrained, config.data)
    pretrained.check_sizes(config.data)
    model = pretrained.build(init_device="meta")
    _check_tensors(pretrained, model)
    check_destination(folder, export_folder)
    if is_trained and config.run.export_olmo_core:
        _check_olmo_core_export(pretrained, config)
    return _with_adapter(pretrained, model, config.adapters)


def complete_start(
    start: StartModel, tokenizer: PreTrainedTokenizerFast, data: RowsSection
) -> Pretrained:
    """A start model with the tokenizer and the settings that are exported beside it."""
    pretrained = Pretrained(
        source=start.source,
        tokenizer_folder=Path(tokenizer.name_or_path),
        hf_config=start.hf_config,
        files=start.files,
        names=start.names,
        tokenizer=tokenizer,
        chat_template=_find_other_template(tokenizer, data),
    )
    return _with_exported_settings(pretrained, data)


def _find_folders(section: ModelSection) -> tuple[Path, Path]:
    """The folders of the start model and of its tokenizer, downloaded if need be."""
    folder = fetch_folder(section.config_path, revision=section.model_revision)
    return folder, find_tokenizer_beside(section, folder)


def find_tokenizer_beside(section: ModelSection, folder: Path) -> Path:
    """The folder of the tokenizer of the model in `folder`, downloaded if need be.

    :raises InputError: there is none that can be read.
    """
    name = find_tokenizer_name(section)
    if name == section.config_path:
        return folder
    revision = section.revision_of_tokenizer
    return find_tokenizer_folder(name, revision=revision, flag="--tokenizer_name_or_path")


def _draw_files(
    source: ModelFolder, hf_config: PretrainedConfig, config: LearnerConfig
) -> CheckpointFiles:
    """The weights of a model that is trained from scratch, which the run's seed draws.

    :raises InputError: its weights are drawn in another way than ours, or adapters are trained.
    """
    file = source.config_file
    if config.adapters is not None:
        raise InputError(
            "--from_scratch: adapters are trained beside weights that mean something; leave out "
            "--use_lora",
            kind="conflict",
        )
    olmo_core = source.olmo_core
    if olmo_core is not None and olmo_core.init_method != "normal":
        raise InputError(
            f"--from_scratch: {file}: init_method = {olmo_core.init_method} is not drawn here; "
            "supported: 'normal', one standard deviation for all (init_std)",
            kind="unsupported_model",
        )
    family = find_family(hf_config.model_type)
    if family.delta is not None:
        raise InputError(
            f"--from_scratch: {file}: {family.name} has layers whose first weights are not drawn "
            "here; use a model of attention alone",
            kind="unsupported_model",
        )
    shapes = find_parameter_shapes(build_model(hf_config, init_device="meta"))
    std = check_number("initializer_range", hf_config.initializer_range, str(file))
    return draw_files(file, TensorNames(hf_config), shapes, seed=config.optim.seed, std=std)


def _with_exported_settings(pretrained: Pretrained, data: RowsSection) -> Pretrained:
    """The checkpoint with the settings that are exported beside the trained model."""
    tokenizer = pretrained.tokenizer
    chat = None
    if pretrained.names.head == "vocabulary":
        chat = ChatFormat.from_flags(tokenizer, data)
    settings = build_export_settings(
        pretrained.source, pretrained.tokenizer_folder, tokenizer, chat
    )
    return replace(pretrained, **settings)


def _check_tensors(pretrained: Pretrained, model: nn.Module) -> None:
    """Check that the files have every tensor of the model in its shape, and that it can be written.

    :raises InputError: naming the tensor that is missing, damaged or does not fit.
    """
    names = pretrained.names
    shapes = find_parameter_shapes(model)
    hf_shapes = {hf_name: shapes[name] for name, hf_name in names if name in shapes}
    recut_convolutions(pretrained.files, hf_shapes)
    check_cover(names, pretrained.files, shapes)
    check_exportable(names, shapes)


def _check_olmo_core_export(pretrained: Pretrained, config: LearnerConfig) -> None:
    """:raises InputError: the trained model could not be written for OLMo-core."""
    if config.adapters is not None and config.adapters.export == "adapter":
        raise InputError(
            "--export_olmo_core: with --export adapter no whole model is written; use --export "
            "both",
            kind="conflict",
        )
    check_olmo_core_exportable(pretrained.names)
    check_destination(
        pretrained.folder, RunDirectory(path=Path(config.run.output_dir)).olmo_core_model
    )


def _with_adapter(
    pretrained: Pretrained, model: SegmentTransformer, lora: LoRASection | None
) -> Pretrained:
    """The checkpoint with the adapter that the flags name, if they name one."""
    if lora is None or lora.adapter_name_or_path is None:
        return pretrained
    folder = fetch_folder(lora.adapter_name_or_path)
    adapter = open_adapter(folder, model, pretrained.names, lora)
    return replace(pretrained, adapter=adapter, adapter_folder=folder)


def fingerprint_start_model(pretrained: Pretrained, run: Run) -> str:
    """Fingerprint of the start model, which the checkpoints of the run must have too. Collective.

    :raises InputError: the run began with another start model, its files were changed in place, or
        the adapter that it goes on from is of another one.
    """
    fingerprint = pretrained.fingerprint

    def compare() -> None:
        adapter = pretrained.adapter_folder
        if adapter is not None:
            warning = check_base(adapter, pretrained.folder, pretrained.files.fingerprint)
            if warning:
                run.console.warn(warning)
        for folder in find_checkpoints(run.directory.path):
            with suppress(Damaged):  # `resume` warns of it
                refuse_another_start_model(folder, fingerprint)

    run_on_main_process(compare)
    return fingerprint


def _find_other_template(tokenizer: PreTrainedTokenizerFast, data: RowsSection) -> str | None:
    """The chat template to export in place of the tokenizer's own; None keeps that."""
    if not (data.chat_template_name or data.add_bos or data.chat_template_kwargs):
        return None
    return ChatFormat.from_flags(tokenizer, data).template.text
