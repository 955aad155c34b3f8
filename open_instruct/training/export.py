"""The export of a trained model, with which a run ends."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from open_instruct.checkpoints.resume import check_weights
from open_instruct.config.lora import LoRASection
from open_instruct.core.records import BestStep
from open_instruct.models.lora.adapters import find_merged_weights, gather_adapter
from open_instruct.models.lora.files import write_adapter
from open_instruct.models.nf4 import describe_rounding
from open_instruct.parallel.status import this_process
from open_instruct.run.card import write_card
from open_instruct.run.opening import Run
from open_instruct.run.pretrained import Pretrained
from open_instruct.training.policy import Policy


def export_policy(
    policy: Policy,
    pretrained: Pretrained,
    *,
    run: Run,
    export_dtype: str,
    adapters: LoRASection | None,
    trained_by: str,
    best: BestStep | None = None,
    more_config: Mapping[str, Any] | None = None,
    for_olmo_core: bool = False,
) -> None:
    """Write OUT/hf_model in the dtype of `--export_dtype`; see `Pretrained.export`. Collective.

    With `for_olmo_core`, OUT/olmo_core_model is the same model in OLMo-core's form.

    The weights are those of the `best` step, if there is one, and otherwise those of the last.

    For a policy with adapters, OUT/hf_model is the model with the adapters merged, and OUT/adapter
    has them alone.
    """
    this_process.begin("exporting the trained model")
    dtype = pretrained.find_dtype(export_dtype)
    check_weights(policy.model, what="the trained model", folder=run.directory.path, dtype=dtype)
    what = ""
    last_step: int | None = None
    if best is not None:
        what = f" of {best},"
        last_step = best.step
    card = partial(write_card, run.directory, trained_by=trained_by, until=last_step)
    if adapters is not None and adapters.export != "merged":
        write_adapter(
            run.directory.adapter,
            gather_adapter(policy.model),
            pretrained.names,
            adapters,
            base=str(pretrained.folder),
            fingerprint=pretrained.files.fingerprint,
            chat_template=pretrained.chat_template,
            more_config=more_config,
            card=partial(card, is_adapter=True),
        )
        run.console.say(f"the adapter{what} is in {run.directory.adapter}", style="green")
    if adapters is not None and adapters.export == "adapter":
        return
    num_bytes = pretrained.export(
        policy.model,
        run.directory.hf_model,
        weights=find_merged_weights(policy.model),
        dtype=dtype,
        card=card,
        more_config=more_config,
    )
    found = f"{run.directory.hf_model} ({num_bytes / 1e6:,.1f} MB)"
    run.console.say(f"the trained model{what} is in {found}", style="green")
    if for_olmo_core:
        _export_for_olmo_core(policy, pretrained, run, dtype)
    if policy.backend.rounding:
        run.console.say(describe_rounding(policy.backend.rounding))


def _export_for_olmo_core(
    policy: Policy, pretrained: Pretrained, run: Run, dtype: torch.dtype
) -> None:
    folder = run.directory.olmo_core_model
    weights = find_merged_weights(policy.model)
    pretrained.export_olmo_core(policy.model, folder, weights=weights, dtype=dtype)
    run.console.say(f"and for OLMo-core in {folder}", style="green")
