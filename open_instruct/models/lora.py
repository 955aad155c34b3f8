"""Low-rank adapters beside the matrices of the blocks (LoRA, Hu et al. 2021, arXiv:2106.09685, section 4.1).

`adapt` adds them before the model is sharded. An adapter is two more parameters of a linear layer, and moves and is
sharded with it. Adapters are float32 and trained; everything else is frozen, except the matrix of a score. Readers and
writers of checkpoints (`held_of`) see the model without adapters.

On disk an adapter is as peft writes it: adapter_config.json and adapter_model.safetensors, of float32. A matrix is
there under `base_model.model.` + the Hugging Face name of its layer + `.lora_A.weight` or `.lora_B.weight`.

Legend of the shape suffixes: O output features of a layer, I input features, R rank.
"""

import hashlib
import json
import math
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from olmo_core.nn.transformer import Transformer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from open_instruct.config.flags import spelled
from open_instruct.config.lora import ALL_LINEAR, MODULES_OF_TARGETS, LoRASection
from open_instruct.data.files.foreign_json import read_object
from open_instruct.errors import InputError, RunError
from open_instruct.models.experts.routed import RoutedFeedForward
from open_instruct.models.export_files import (
    CARD_NAME,
    CHAT_TEMPLATE_NAME,
    disk_errors,
    partial_folder_of,
    prepare_folder,
    put_in_place,
    write_texts,
)
from open_instruct.models.hf.checkpoint_files import CheckpointFiles, read_header
from open_instruct.models.hf.names import ADAPTER, HF_SCORE, LM_HEAD, Head, TensorNames, clean_name, is_of_adapter
from open_instruct.models.load import cover_problem
from open_instruct.models.shards import Held, held, held_of, local_part, reshard, whole_of
from open_instruct.parallel.process import on_main_process

A, B = ADAPTER
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
BASE_FINGERPRINT = "base_fingerprint"  # in the header of the weights, which other readers pass over
PREFIX = "base_model.model."

# Options of peft that are not supported here, with the values that turn them off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(
        ("use_dora", "fan_in_fan_out", "lora_bias", "use_qalora", "trainable_token_indices"), (False, None)
    ),
    **{name: (None, {}, []) for name in ("rank_pattern", "alpha_pattern", "layers_to_transform", "layer_replication")},
    "exclude_modules": (None, []),
}


class AdaptedLinear(nn.Linear):
    """A linear layer that adds `scale * B A x` to its output; it takes over the parameters of another layer."""

    lora_A: nn.Parameter  # (R, I)
    lora_B: nn.Parameter  # (O, R)

    def __init__(self, stands_for: nn.Linear, lora: LoRASection) -> None:
        super().__init__(stands_for.in_features, stands_for.out_features, bias=False, device="meta")
        self.weight, self.bias = stands_for.weight, stands_for.bias
        self.rank, self.scale, self.is_off = lora.lora_r, lora.scale, False
        self._dropped_share = lora.lora_dropout
        self.register_adapter()

    def register_adapter(self, tp_mesh: DeviceMesh | None = None) -> None:
        """Add the adapter without values; tensor parallelism cuts its half that meets the matrix's cut side."""
        device = self.weight.device
        a_RI = torch.empty(self.rank, self.in_features, device=device)
        b_OR = torch.empty(self.out_features, self.rank, device=device)
        if tp_mesh is not None:
            assert isinstance(self.weight, DTensor)
            cuts_out = self.weight.placements[0].is_shard(0)
            a_RI = distribute_tensor(a_RI, tp_mesh, [Replicate() if cuts_out else Shard(1)])
            b_OR = distribute_tensor(b_OR, tp_mesh, [Shard(0) if cuts_out else Replicate()])
        self.lora_A, self.lora_B = nn.Parameter(a_RI), nn.Parameter(b_OR)
        # OLMo-core looks for dropout modules, and only then replays random numbers when a block is recomputed.
        self.dropout = nn.Dropout(self._dropped_share)

    def remove_adapter(self) -> None:
        del self.lora_A, self.lora_B, self.dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.is_off:
            return y
        # ZeRO prefetches weights only for modules that are called.
        low = F.linear(self.dropout(x) if self._dropped_share else x, self.lora_A.to(x.dtype))
        return y + F.linear(low, self.lora_B.to(x.dtype)) * self.scale


def adapt(model: Transformer, lora: LoRASection, *, dtype: torch.dtype) -> None:
    """Add adapters to `model` before it is sharded; its own parameters are frozen and cast to `dtype`."""
    wanted = {MODULES_OF_TARGETS[target] for target in lora.targets}
    for block in model.blocks.values():
        for name in sorted(wanted):
            if isinstance(block.feed_forward, RoutedFeedForward) and name.startswith("feed_forward."):
                if ALL_LINEAR not in lora.lora_target_modules:
                    raise InputError(
                        "--lora_target_modules: experts have no adapters, as they lie in stacks; leave out gate_proj, "
                        "up_proj and down_proj, or name all-linear"
                    )
                continue
            adapted = AdaptedLinear(block.get_submodule(name), lora)  # type: ignore[arg-type]
            block.set_submodule(name, adapted)
    for name, parameter in model.named_parameters():
        is_new = is_of_adapter(name) or _is_score(model, name)
        parameter.requires_grad_(is_new)
        if not is_new:
            parameter.data = parameter.data.to(dtype)


def _is_score(model: Transformer, name: str) -> bool:
    """Whether a parameter is the head of a score, which is new and therefore trained whole."""
    return clean_name(name) == LM_HEAD and model.lm_head.w_out.out_features == 1


def layers_of(model: nn.Module) -> dict[str, AdaptedLinear]:
    """The layers that have adapters, by OLMo-core's names: `blocks.3.attention.w_q`."""
    return {clean_name(name): module for name, module in model.named_modules() if isinstance(module, AdaptedLinear)}


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """A context in which `model` computes without its adapters."""
    layers = layers_of(model).values()
    for layer in layers:
        layer.is_off = True
    try:
        yield
    finally:
        for layer in layers:
            layer.is_off = False


@torch.no_grad()
def fill_adapter(model: nn.Module, lora: LoRASection, *, seed: int, start: Mapping[str, torch.Tensor] | None) -> None:
    """Give this rank's parts their first values: of `start` by names in OLMo-core's way, or drawn, with B zero.

    Each matrix is drawn whole, from a seed of its name, so that it is the same on any number of ranks.
    """
    layers = layers_of(model)
    for full_name, parameter in model.named_parameters():
        name = clean_name(full_name)
        ours = held(parameter)
        if start is not None and parameter.requires_grad:
            ours.local.copy_(ours.values(start[name]))
        elif name.endswith(A):
            layer = name.removesuffix(f".{A}")
            ours.local.copy_(ours.values(_drawn(layers[layer], layer, lora, seed)))
        elif name.endswith(B):
            ours.local.zero_()


def _drawn(layer: AdaptedLinear, name: str, lora: LoRASection, seed: int) -> torch.Tensor:
    """First values by one of peft's two ways: uniform within 1 / sqrt(I), or normal with standard deviation 1 / R."""
    digest = hashlib.sha256(f"{name} {seed}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big", signed=True))
    a_RI = torch.empty(layer.rank, layer.in_features)
    if lora.lora_init == "gaussian":
        return a_RI.normal_(std=1 / layer.rank, generator=generator)
    bound = 1 / math.sqrt(layer.in_features)
    return a_RI.uniform_(-bound, bound, generator=generator)


@torch.no_grad()
def whole_adapter(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every trained matrix, whole, by OLMo-core's names. Collective: every rank iterates to the end."""
    reshard(model)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield clean_name(name), whole_of(parameter)


@torch.no_grad()
def scaled_adapters(model: nn.Module) -> dict[str, Held]:
    """This rank's parts of the adapters' matrices, A and `scale` x B, by OLMo-core's names."""
    scales = {f"{name}.{B}": layer.scale for name, layer in layers_of(model).items()}
    held = held_of(model, adapters_only=True).items()
    return {name: replace(each, local=each.local * scales.get(name, 1)) for name, each in held}


@torch.no_grad()
def weights_of(model: nn.Module) -> Mapping[str, Held]:
    """The weights for a checkpoint of `model`: those of `held_of` with any adapters added. Collective."""
    layers = layers_of(model)
    if not layers:
        return held_of(model)
    reshard(model)
    halves: dict[str, torch.Tensor] = {}
    scale = next(iter(layers.values())).scale
    for name, layer in layers.items():
        halves[f"{name}.{A}"] = whole_of(layer.lora_A)
        # A rank holds the same rows of B as of the matrix.
        is_cut = isinstance(layer.lora_B, DTensor)
        halves[f"{name}.{B}"] = local_part(layer.lora_B) if is_cut else whole_of(layer.lora_B)
    return MergedWeights(held_of(model), halves, scale=scale)


class MergedWeights(UserDict[str, Held]):
    """`plain` with adapters added, in float32; each matrix is made when it is asked for.

    :param halves: of adapters, by OLMo-core's names: the first whole; the second whole, or the rows held of the matrix.
    """

    def __init__(self, plain: Mapping[str, Held], halves: Mapping[str, torch.Tensor], *, scale: float) -> None:
        super().__init__(plain)
        self._halves, self._scale = halves, scale

    @torch.no_grad()
    def __getitem__(self, name: str) -> Held:
        plain = self.data[name]
        layer = name.removesuffix(".weight")
        if f"{layer}.{A}" not in self._halves:
            return plain
        a_RI, b_OR = (self._halves[f"{layer}.{half}"].to(plain.local.device, torch.float32) for half in ADAPTER)
        if len(plain.box) == 1:
            return self._run(plain, a_RI, b_OR)
        merged = plain.local.float().addmm(b_OR, a_RI[:, plain.box[1]], alpha=self._scale)
        return replace(plain, local=merged)

    def _run(self, plain: Held, a_RI: torch.Tensor, b_OR: torch.Tensor) -> Held:
        """The product for the rows that a run of values touches; the run may begin and end within a row."""
        assert plain.num_slabs == 1
        (values,) = plain.box
        width = a_RI.shape[1]
        first = values.start // width
        last = -(-values.stop // width)
        own = slice(values.start - first * width, values.stop - first * width)
        rows = plain.local.new_zeros((last - first) * width, dtype=torch.float32)
        rows[own] = plain.local.float()
        merged = rows.view(-1, width).addmm(b_OR[first:last], a_RI, alpha=self._scale)
        return replace(plain, local=merged.flatten()[own])


def file_name_of(name: str, names: TensorNames) -> str:
    """The name in an adapter's file, of a name such as `blocks.3.attention.w_q.lora_A`."""
    if name == LM_HEAD:
        return f"{PREFIX}{names.hf_name(name)}"
    layer, _, leaf = name.rpartition(".")
    return f"{PREFIX}{names.hf_name(f'{layer}.weight').removesuffix('weight')}{leaf}.weight"


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of `LoRASection` that define an adapter, read from peft's file.

    :raises InputError: the file is missing or damaged, or has an option that is not supported here.
    """
    fields = read_object(folder / CONFIG_NAME) if (folder / CONFIG_NAME).is_file() else None
    if fields is None:
        raise InputError(f"--adapter_name_or_path {folder}: there is no {CONFIG_NAME} in it; give an adapter's folder")
    for field, values in NEUTRAL.items():
        if fields.get(field, values[0]) not in values:
            raise InputError(
                f"{folder / CONFIG_NAME}: {field} = {fields[field]!r} is not supported; it must be {values[0]!r}"
            )
    targets = fields.get("target_modules")
    if isinstance(targets, str):
        targets = [targets]
    if not isinstance(targets, list) or not set(targets) <= {*MODULES_OF_TARGETS, ALL_LINEAR}:
        raise InputError(
            f"{folder / CONFIG_NAME}: target_modules = {targets!r}; supported are {', '.join(MODULES_OF_TARGETS)}"
        )
    try:
        return {
            "lora_r": int(fields["r"]),
            "lora_alpha": float(fields["lora_alpha"]),
            "use_rslora": bool(fields.get("use_rslora", False)),
            "lora_target_modules": list(LoRASection(lora_target_modules=targets).targets),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(f"{folder / CONFIG_NAME}: r and lora_alpha must be numbers ({error})") from None


def open_adapter(folder: Path, model: Transformer, names: TensorNames, lora: LoRASection) -> dict[str, torch.Tensor]:
    """Views of the file's matrices by OLMo-core's names; nothing is read before it is copied from them.

    :param model: on meta; it gets adapters, which define the matrices to find.
    :raises InputError: the adapter is missing or damaged, is of another model, or does not fit the flags.
    """
    own = vars(lora) | {"lora_target_modules": list(lora.targets)}
    differing = [f"--{name} {spelled(value)}" for name, value in read_settings(folder).items() if own[name] != value]
    if differing:
        raise InputError(f"--adapter_name_or_path {folder} was made with other flags: give {' '.join(differing)}")
    adapt(model, lora, dtype=torch.float32)
    shapes = {clean_name(name): tuple(each.shape) for name, each in model.named_parameters() if each.requires_grad}
    path = folder / WEIGHTS_NAME
    files = CheckpointFiles(folder, read_header(path))
    wanted = {file_name_of(name, names): name for name in shapes}
    if problem := cover_problem(files, {file_name: shapes[name] for file_name, name in wanted.items()}):
        raise InputError(f"{path} {problem}. It is of other --lora_target_modules, or of another model")
    return {name: files.read(file_name) for file_name, name in wanted.items()}


def check_base(folder: Path, base: Path, fingerprint: str) -> str | None:
    """Check that the adapter in `folder` belongs to `base`, whose weights have this fingerprint; a warning if unknown.

    :raises InputError: the adapter was trained on other weights.
    """
    named = str(read_object(folder / CONFIG_NAME).get("base_model_name_or_path"))
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as adapter:
        known = (adapter.metadata() or {}).get(BASE_FINGERPRINT)
    if known is None and Path(named).expanduser().resolve() != base.resolve():
        return f"{folder} says that it was made beside {named}: whether {base} has those weights cannot be told"
    if known not in (None, fingerprint):
        raise InputError(f"{folder} was made beside {named}, and {base} has other weights; give that model")
    return None


def write_adapter(
    folder: Path,
    adapter: Iterable[tuple[str, torch.Tensor]],
    names: TensorNames,
    lora: LoRASection,
    *,
    base: str,
    fingerprint: str,
    chat_template: str | None = None,
    card: Callable[[], str | None] = lambda: None,
) -> None:
    """Write `adapter`, whole matrices by OLMo-core's names, in place of an earlier one. Collective; rank 0 writes.

    :param base: the name of the base model, for readers.
    :param fingerprint: of the weights of `base`, checked when a run goes on from the adapter.
    :param chat_template: of training, where it is not the base's own.
    :param card: gives the text of README.md; only rank 0 calls it.
    :raises RunError: the disk filled up or failed; an earlier one is unharmed.
    """
    tensors = {}
    for name, whole in adapter:
        if dist.get_rank() == 0:
            tensors[file_name_of(name, names)] = whole.to("cpu", torch.float32).contiguous()

    def write() -> None:
        with disk_errors(folder, RunError):
            prepare_folder(folder, sum(tensor.nbytes for tensor in tensors.values()))
            beside = partial_folder_of(folder)
            save_file(tensors, beside / WEIGHTS_NAME, metadata={"format": "pt", BASE_FINGERPRINT: fingerprint})
            config = _config(lora, base=base, head=names.head)
            (beside / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            write_texts(beside, {CHAT_TEMPLATE_NAME: chat_template, CARD_NAME: card()})
        put_in_place(folder)

    on_main_process(write)


def _config(lora: LoRASection, *, base: str, head: Head) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if head == "score" else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_r,
        "lora_alpha": lora.lora_alpha,
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.use_rslora,
        "target_modules": list(lora.targets),
        "modules_to_save": [HF_SCORE.removesuffix(".weight")] if head == "score" else None,
        "bias": "none",
        "inference_mode": True,
    }
