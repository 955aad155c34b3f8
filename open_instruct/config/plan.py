"""What `open-instruct plan` is asked for: the flags of a run, and the machines it would run on."""

from dataclasses import dataclass
from typing import ClassVar

from open_instruct.config.sections import flag


@dataclass(kw_only=True)
class PlanFlags:
    """Say what a run would need before it is started: the layout, where each GPU's memory goes in every phase, what
    travels within a node and across, a lower bound of a step's time, and which flags would make it fit or make it
    faster. Takes the run's own flags or YAML file (`open-instruct dpo --help`, and sft, grpo); those of its data and
    its folder need not be given. --model_name_or_path is a folder, a config.json alone, or the name of a public model
    of a family that can be trained, whose shape is built in. Nothing is started or downloaded.
    """

    examples: ClassVar[tuple[str, ...]] = (
        "open-instruct plan dpo --model_name_or_path allenai/OLMo-2-1124-7B --num_nodes 2 --gpus_per_node 8",
        "open-instruct plan dpo configs/dpo/olmo2_32b_32gpu_tp.yaml --gpus_per_node 4x8 --gpu h200 --html plan.html",
        "open-instruct plan grpo configs/grpo/olmo3_7b_2x8_plus_8_engines.yaml --json",
    )

    num_nodes: int | None = flag("nodes of --gpus_per_node GPUs each; default: as many as that lists", None, minimum=1)
    gpus_per_node: list[str] = flag(
        "GPUs that train on each node: one number with --num_nodes, else one for each node; 4x8 is four nodes of 8; "
        "for GRPO default: --num_learners_per_node; with that flag all GPUs of each node, those of engines too",
        [],
    )
    gpu: str = flag("a100, h100, h200, b200, or memory_gib=N for any other, with the speeds of an H100", "h100")
    mfu: float = flag("assumed share of the GPU's peak FLOP/s (model FLOPs utilisation)", 0.4, above=0, maximum=1)
    shared_prompt_tokens: int = flag(
        "count prompts of so many tokens as computed once for a pair or group, as --prefix_sharing does", 0
    )
    in_node_gb_s: float | None = flag("GB/s that a GPU sends within its node; default: the GPU's", None, above=0)
    cross_node_gb_s: float | None = flag("GB/s that a GPU sends to other nodes; default: the GPU's", None, above=0)
    json: bool = flag("print the whole plan as JSON", False)
    html: str | None = flag("also write the plan as a page to this file", None)


# Flags that a run cannot do without and a plan does not read.
ASSUMED = {"mixer_list": ["rows.jsonl", "1.0"], "dataset_mixer_list": ["rows.jsonl", "1.0"], "output_dir": "planned"}
