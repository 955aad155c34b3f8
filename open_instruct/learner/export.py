"""How a run ends: with an exported model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from open_instruct.checkpoints.finite import check_weights
from open_instruct.checkpoints.resume import last_checkpoint
from open_instruct.config.training import LearnerConfig
from open_instruct.data.chat import choose_chat_template
from open_instruct.learner.backend import Learner
from open_instruct.models.export import export_hf
from open_instruct.models.lora.adapters import weights_of, whole_adapter
from open_instruct.models.lora.files import write_adapter
from open_instruct.parallel.peers import doing
from open_instruct.run.opened import Run
from open_instruct.run.pretrained import Pretrained


def export_policy(
    policy: Learner,
    pretrained: Pretrained,
    *,
    run: Run,
    config: LearnerConfig,
    more_config: Mapping[str, Any] | None = None,
) -> None:
    """Write OUT/hf_model in the dtype of `--export_dtype`; see `export_hf`. Every rank enters together.

    Of a policy with adapters that is the model with them added, and OUT/adapter has them by themselves.
    """
    doing("exporting the trained model")
    name, template_name = config.run.export_dtype, config.data.chat_template_name
    dtype = pretrained.dtype if name == "source" else getattr(torch, name)
    check_weights(
        policy.model, what="the trained model", last_checkpoint=last_checkpoint(run.directory.path), dtype=dtype
    )
    lora = config.adapters
    if lora is not None and lora.export != "merged":
        write_adapter(
            run.directory.adapter, whole_adapter(policy.model), pretrained.names, lora, base=str(pretrained.folder)
        )
        run.console.say(f"the adapter is in {run.directory.adapter}", style="green")
    if lora is not None and lora.export == "adapter":
        return
    report = export_hf(
        policy.model,
        pretrained.hf_config,
        pretrained.names,
        source_folder=pretrained.folder,
        tokenizer_folder=pretrained.tokenizer_folder,
        out_folder=run.directory.hf_model,
        dtype=dtype,
        # The template it was trained with is the one to use it with.
        chat_template=choose_chat_template(pretrained.tokenizer, template_name).text if template_name else None,
        more_config=more_config,
        weights=weights_of(policy.model),
    )
    run.console.say(
        f"the trained model is in {run.directory.hf_model} "
        f"({report.num_bytes / 1e6:,.1f} MB in {report.num_files} file{'s' if report.num_files > 1 else ''})",
        style="green",
    )
