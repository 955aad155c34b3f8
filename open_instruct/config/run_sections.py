"""Flags of a run's folder and of its trackers, which every run has."""

from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.sections import ExportDtype, Switch, resumable_flag

TRACKERS = ("wandb", "trackio", "tensorboard", "mlflow", "swanlab")
# The trackers whose runs have names and projects.
WITH_NAMES = "report_to wandb trackio mlflow swanlab"


@dataclass(kw_only=True)
class RunSection:
    """The run's folder: checkpoints and the exported model."""

    title: ClassVar[str] = "Run directory"

    output_dir: str = resumable_flag(
        "where checkpoints, metrics and the exported model go", is_path=True
    )
    checkpointing_steps: int = resumable_flag(
        "steps between checkpoints; 0, or the word epoch: one after each pass over the data",
        500,
        minimum=0,
    )
    ephemeral_save_interval: int | None = resumable_flag(
        ("steps between further checkpoints, each of which is removed once there is a newer one"),
        None,
        minimum=1,
    )
    keep_last_n_checkpoints: int = resumable_flag(
        "older ones are removed; 0 or -1 keeps all", 3, minimum=0, note=" (0 keeps all)"
    )
    keep_best: str | None = resumable_flag(
        "metric, such as eval/loss, by which the best checkpoint is kept, and exported at the "
        "end: an evaluation with the best value so far writes a checkpoint; of a metric of "
        "training the steps with a checkpoint are compared",
        None,
    )
    async_checkpoints: Switch = resumable_flag(
        (
            "write checkpoints from a copy in host memory while the training goes on; 'auto': on "
            "GPUs"
        ),
        "auto",
    )
    overwrite_output_dir: bool = resumable_flag(
        "start afresh: remove the checkpoints and metrics found there", False
    )
    export_dtype: ExportDtype = resumable_flag(
        "dtype of the exported model; 'source': that of the start model", "source"
    )
    export_olmo_core: bool = resumable_flag(
        "write the exported model as a checkpoint of OLMo-core too, in OUT/olmo_core_model", False
    )
    push_to_hub: bool = resumable_flag(
        "upload the exported model to the Hugging Face hub at the end", False
    )
    hub_model_id: str | None = resumable_flag(
        "ORGANISATION/NAME on the hub; default: the output folder's name, yours",
        None,
        requires="push_to_hub",
    )
    hub_private: bool = resumable_flag(
        "make a new repository private", False, requires="push_to_hub"
    )


@dataclass(kw_only=True)
class RolloutRunSection(RunSection):
    """The folder of a run that keeps its completions too."""

    save_traces: bool | None = resumable_flag(
        (
            "keep all completions in OUT/traces, or none; default: those of the newest steps, up "
            "to 1 GiB"
        ),
        None,
    )


@dataclass(kw_only=True)
class LoggingSection:
    """Trackers and the profiler."""

    title: ClassVar[str] = "Logging"

    report_to: list[str] = resumable_flag(
        "trackers that get the metrics, beside metrics.jsonl", [], choices=TRACKERS
    )
    exp_name: str | None = resumable_flag(
        "name of the run in the tracker; default: the output folder's", None, requires=WITH_NAMES
    )
    wandb_project_name: str = resumable_flag(
        "project in the tracker; mlflow calls it an experiment",
        "open_instruct",
        requires=WITH_NAMES,
    )
    wandb_entity: str | None = resumable_flag(
        "user or team in wandb", None, requires="report_to wandb"
    )
    profile_steps: list[int] = resumable_flag(
        "first and last step to profile on rank 0, with its memory; written to OUT/profiler", []
    )
