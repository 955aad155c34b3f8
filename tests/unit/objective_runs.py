"""What the tests of objectives share: their flags, rows in a file, and a train module on the
CPU.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.sections import OptimSection
from open_instruct.data.chat import ChatFormat
from open_instruct.data.mixer import parse_mixer_list
from open_instruct.data.report import DataReport
from open_instruct.data.row_builder import RowBuilder
from open_instruct.data.token_dataset import TokenDataset, load_token_dataset
from open_instruct.objectives.objective import BoundLoss, Objective
from open_instruct.olmo_core_train_modules import ObjectiveTrainModule
from open_instruct.training.optim.optimizers import build_optimizer_config
from tests.unit.training.test_finite import CPU, Recorder


def config_of(objective: Objective, *words: str) -> Any:
    """Its flags: those that must be given, and `words`."""
    needed = [
        "--model_name_or_path",
        "m",
        "--mixer_list",
        "rows.jsonl",
        "1.0",
        "--output_dir",
        "out",
    ]
    return parse_run(objective.config_class, [*needed, *words])


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load_rows(
    builder: type[RowBuilder],
    mixer_list: Iterable[str | Path],
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    chat_template_name: str | None = None,
    **changes: Any,
) -> tuple[TokenDataset, DataReport]:
    arguments: dict[str, Any] = {
        "max_seq_length": 128,
        "on_bad_row": "error",
        "seed": 0,
        "cache_dir": folder / "cache",
    }
    entries = parse_mixer_list(list(map(str, mixer_list)))
    chat = ChatFormat.choose(tokenizer, chat_template_name)
    return load_token_dataset(builder, entries=entries, chat=chat, **(arguments | changes))


def train_module(
    loss: BoundLoss, model: Any, folder: Path, *, max_seq_length: int = 32
) -> tuple[ObjectiveTrainModule, Recorder]:
    """A train module that clips nothing, and what it records."""
    module = ObjectiveTrainModule(
        loss=loss,
        model=model,
        optim=build_optimizer_config(OptimSection(), device=CPU, names=()),
        rank_microbatch_size=max_seq_length,
        max_sequence_length=max_seq_length,
        max_grad_norm=1e9,
        device=CPU,
    )
    module._trainer = recorder = Recorder(folder)  # type: ignore[assignment]
    module.zero_grads()
    return module, recorder


def all_gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
