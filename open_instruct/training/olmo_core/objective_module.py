"""OLMo-core's train module with an objective's loss, for OLMo-core's own `Trainer`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_local_rank, get_world_size
from olmo_core.nn.transformer import Transformer
from olmo_core.train.train_module.transformer import TransformerTrainModuleConfig
from olmo_core.train.train_module.transformer.common import parallelize_model
from torch.distributed.checkpoint.state_dict import StateDictOptions
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from open_instruct.checkpoints.resume import check_weights
from open_instruct.config.sections import RowsSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import StepBatch
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.models.heads.value_head import ValueHead
from open_instruct.models.hf.head_kinds import HEAD_SIZES, Head
from open_instruct.models.start_model import StartModel
from open_instruct.models.transformer import SegmentTransformer
from open_instruct.objectives.objective import BoundLoss
from open_instruct.parallel.data_parallel import build_data_parallel_config, build_parallel_configs
from open_instruct.parallel.layout import resolve_layout
from open_instruct.parallel.process import find_gpus_per_node
from open_instruct.parallel.triton_cache import set_triton_cache
from open_instruct.run.pretrained import complete_start
from open_instruct.training.backend import Metrics
from open_instruct.training.olmo_core.fsdp2 import FSDP2Backend
from open_instruct.training.policy import Policy
from open_instruct.training.reference import Reference

PARALLEL_ARGUMENTS = ("dp_config", "tp_config", "cp_config")
# Arguments of OLMo-core's module that nothing here would read: their default, and a remedy.
UNREAD_ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "autocast_precision": (None, "the dtype of the computation is `param_dtype`"),
    "ep_config": (None, "`open-instruct` splits experts, with --expert_parallel_degree"),
    "eval_only": (False, "such a module is of OLMo-core's own, TransformerTrainModule"),
    "label_ignore_index": (-100, "what is learned of a document are its spans"),
    "pp_config": (None, "shard over more ranks, or split matrices or rows"),
    "z_loss_multiplier": (None, "no objective has that term; leave it out"),
}


class ObjectiveTrainModule(FSDP2Backend):
    """A train module whose batch is `{"step": StepBatch}`: this rank's part of an update.

    Args:
        loss: the objective's, bound to its settings.
        model: a `StartModel` builds it; this class shards it, and `StartModel.load_into` fills it.
        head: the kind of head that the objective reads; None: any.
        layout: which ranks share a copy of the model; default: HSDP, with a replica on each node.
            Or give OLMo-core's own `dp_config`, `tp_config` and `cp_config`.
        param_dtype: "bfloat16" or "float32", in which the layout's ranks compute; the shards, and
            the reduction of gradients, are float32.
        reference: the start of a frozen model, of a loss with a penalty for leaving it.
        olmo_core: the other arguments of OLMo-core's `TransformerTrainModule`.

    Raises:
        InputError: an argument has a value that nothing here reads, or two contradict each other.
    """

    def __init__(
        self,
        *,
        loss: BoundLoss,
        model: Transformer,
        head: Head | None = None,
        layout: ShardLayout | None = None,
        param_dtype: str = "bfloat16",
        reference: StartModel | None = None,
        **olmo_core: Any,
    ) -> None:
        check_model(model, head)
        olmo_core = refuse_unread(olmo_core)
        olmo_core |= choose_parallelism(layout, param_dtype, olmo_core)
        if olmo_core.get("max_grad_norm") is None:
            olmo_core["max_grad_norm"] = math.inf  # which clips nothing, and still measures
        super().__init__(model=model, **olmo_core)
        set_triton_cache(get_local_rank())
        frozen: Reference | None = None
        if reference is not None:
            frozen = Reference(model=self._build_frozen(reference))
        self.policy = Policy(self, self.complete_loss(loss), reference=frozen)

    def complete_loss(self, loss: BoundLoss) -> BoundLoss:
        """The loss with what only the sharded model tells; by default it is complete."""
        return loss

    @classmethod
    def from_config(
        cls,
        config: TransformerTrainModuleConfig,
        model: Transformer,
        *,
        device: torch.device | None = None,
        **own: Any,
    ) -> Self:
        """Build the module of OLMo-core's config, which a script has for its own train module.

        :param own: the arguments that OLMo-core's module does not have, such as `loss`.
        :raises InputError: the config has a setting that nothing here reads.
        """
        settings = config.as_dict(exclude_none=True, recurse=False)
        for name in ("state_dict_save_opts", "state_dict_load_opts"):
            if name in settings:
                settings[name] = StateDictOptions(**settings[name])
        return cls(model=model, device=device, **settings, **own)

    @property
    def model_parallel_degree(self) -> int:
        """Ranks that split matrices or rows; packed rows are padded to a multiple of it."""
        return get_world_size() // get_world_size(self.dp_process_group)

    def pre_train(self) -> None:
        """OLMo-core checks here that batches divide evenly in tokens.

        Ours are planned in documents.
        """

    def global_num_flops_in_batch(self, batch: dict[str, Any]) -> int | None:
        return None

    def train_batch(self, batch: dict[str, Any], dry_run: bool = False) -> None:
        """Compute and clip the gradient of the global batch, and record its metrics. Collective.

        :raises InputError: the batch has no `StepBatch`, or is that of a dry run.
        """
        step = batch.get("step")
        if not isinstance(step, StepBatch):
            raise InputError(
                f"a batch of {type(self).__name__} is {{'step': StepBatch}}, and this one has "
                f"{', '.join(batch) or 'nothing'}: take the loader of `build_data_loader`, or "
                "have your own make the records of open_instruct/core/records.py",
                kind="own_code",
            )
        if dry_run:
            raise InputError(
                f"{type(self).__name__} has no dry run: have the loader's `get_mock_batch` raise "
                "NotImplementedError, and the Trainer begins without one",
                kind="own_code",
            )
        self._record(self.policy.forward_backward(step))

    def optim_step(self) -> None:
        self._record(self.policy.update())

    def export(
        self,
        start: StartModel,
        out_folder: str | Path,
        *,
        data: RowsSection,
        tokenizer: PreTrainedTokenizerFast,
        dtype: torch.dtype | None = None,
    ) -> int:
        """Write the model as a Hugging Face folder; returns the bytes of its tensors. Collective.

        Args:
            start: what it started from, whose config.json is kept.
            data: says how conversations are rendered, which the folder says too.
            tokenizer: whose files go beside the model.
            dtype: of the tensors; default: the start model's.

        Raises:
            InputError: the folder cannot be written, or transformers could not open it.
            RunError: a weight is not finite, or the disk is full.
        """
        fields = self.export_fields(data, tokenizer, start.hf_config)
        dtype = dtype or start.files.main_dtype
        check_weights(self.model, what="the trained model", folder=Path(out_folder), dtype=dtype)
        pretrained = complete_start(start, tokenizer, data)
        return pretrained.export(self.model, out_folder, dtype=dtype, more_config=fields)

    def export_fields(
        self, data: RowsSection, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
    ) -> Mapping[str, Any]:
        """The fields that the exported config.json adds to the start model's."""
        return {}

    def _record(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self.trainer.record_metric(name, value)

    def _build_frozen(self, start: StartModel) -> Transformer:
        """Build a model without gradients, sharded as the policy is, and fill it. Collective."""
        frozen = parallelize_model(
            start.build(),
            world_mesh=self.world_mesh,
            device=self.device,
            max_sequence_length=self.max_sequence_length,
            rank_microbatch_size=self.rank_microbatch_size,
            dp_config=self.dp_config,
            tp_config=self._tp_config,
            cp_config=self._cp_config,
        )
        start.load_into(frozen)
        return frozen.requires_grad_(False).eval()


def check_model(model: Transformer, head: Head | None) -> None:
    """:raises InputError: it is OLMo-core's own, which takes no segments, or has another head."""
    if not isinstance(model, SegmentTransformer):
        raise InputError(
            f"the model is OLMo-core's own {type(model).__name__}, which cannot tell the documents "
            "of a packed row apart as these objectives need: save it as a step of OLMo-core's "
            "Trainer, and give `StartModel.open(FOLDER).build()`",
            kind="own_code",
        )
    if head is not None and head != find_head(model):
        raise InputError(
            f"the model has the head '{find_head(model)}', and this module reads '{head}': open it "
            f"by StartModel.open(FOLDER, head='{head}')",
            kind="own_code",
        )


def find_head(model: Transformer) -> Head:
    """The kind of a model's head."""
    if not isinstance(model.lm_head, ValueHead):
        return "vocabulary"
    return "score" if len(model.lm_head.w_out.weight) == HEAD_SIZES["score"] else "classes"


def refuse_unread(olmo_core: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of OLMo-core's module without those that nothing here reads.

    :raises InputError: one of these is not at its default.
    """
    for name, (default, remedy) in UNREAD_ARGUMENTS.items():
        value = olmo_core.get(name, default)
        if value != default:
            raise InputError(f"{name}={value!r} changes nothing here: {remedy}", kind="conflict")
    return {name: value for name, value in olmo_core.items() if name not in UNREAD_ARGUMENTS}


def choose_parallelism(
    layout: ShardLayout | None, param_dtype: str, olmo_core: Mapping[str, Any]
) -> dict[str, Any]:
    """OLMo-core's parallel configs of a layout; nothing where they are given. Collective.

    :raises InputError: both are given, or the given ones would train each rank by itself.
    """
    given = [name for name in PARALLEL_ARGUMENTS if olmo_core.get(name) is not None]
    if layout is not None and given:
        raise InputError(
            f"layout and {', '.join(given)} say the same twice: give the layout alone, which has "
            "all degrees",
            kind="conflict",
        )
    if given or "parallelism" in olmo_core:
        check_data_parallel(olmo_core.get("dp_config"))
        return {}
    if layout is None:
        if "dp_config" in olmo_core or not dist.is_initialized():
            refuse_unsynchronized()
            return {}
        return {"dp_config": build_data_parallel_config(choose_layout(), param_dtype=param_dtype)}
    if layout.expert_parallel_degree > 1:
        _, remedy = UNREAD_ARGUMENTS["ep_config"]
        raise InputError(f"the layout splits experts: {remedy}", kind="conflict")
    configs = build_parallel_configs(layout, param_dtype=param_dtype)
    return {f"{kind}_config": config for kind, config in configs.items()}


def choose_layout() -> ShardLayout:
    """A replica on each node, sharded over its ranks. Collective."""
    return resolve_layout(find_gpus_per_node())


def check_data_parallel(dp_config: Any) -> None:
    """:raises InputError: OLMo-core's config asks for DDP."""
    if dp_config is not None and dp_config.name == DataParallelType.ddp:
        raise InputError(
            "dp_config is of DDP: models here are sharded by FSDP2; give hsdp with "
            "shard_degree=1, which keeps a whole copy on each rank too",
            kind="conflict",
        )


def refuse_unsynchronized() -> None:
    """:raises InputError: there are several ranks, whose gradients nothing would add up."""
    if get_world_size() > 1:
        raise InputError(
            f"dp_config=None on {get_world_size()} ranks: each would train by itself; leave it "
            "out for HSDP, or give a layout",
            kind="layout",
        )
