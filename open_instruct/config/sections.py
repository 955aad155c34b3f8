"""The flags, in the groups `--help` shows them in.

Field names are flag names. Every field is made by `flag(help, default)`, or by `free_flag` where a
run that resumes may have another value; a field without a default must be given. `read_with` names
the flag without which nothing reads a flag, or is a function of the flag's name; `all_read_with` of
a section holds for all its flags. Types are limited to what one command line word (or a list of
words) can say: str, int, float, bool, Literal, `X | None`, `list[str]`, `list[int]`, `list[float]`,
and `str | list[str]` for flags that mostly have one word.
"""

from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal

from open_instruct.losses.preference import F_DIVERGENCES, PREFERENCE_LOSSES

Switch = Literal["auto", "on", "off"]
PrefixSharing = Switch
WITH_HELD_OUT = "eval_mixer_list|eval_split"  # what is read with either
Dtype = Literal["bfloat16", "float32"]
BalanceScope = Literal["microbatch", "step"]
ExportDtype = Literal["bfloat16", "float32", "source"]
# The parameter-name patterns that each --weight_decay_on exempts from decay. Only some models have
# the last two: biases, and the rates at which layers of the gated delta rule forget.
NO_MATRICES = ("*norm.weight", "*bias", "*.A_log")
SPARED_BY_DECAY = {"linear": ("embeddings.*", *NO_MATRICES), "matrices": NO_MATRICES, "all": ()}

# What --activation_checkpointing selected_modules recomputes by default.
NORMS_AND_SUBLAYERS = [
    *("blocks.*.attention_norm", "blocks.*.attention", "blocks.*.attention_residual_stream"),
    *(
        "blocks.*.feed_forward_norm",
        "blocks.*.feed_forward",
        "blocks.*.feed_forward_residual_stream",
    ),
]


def flag(help: str, default: Any = MISSING, **facts: Any) -> Any:
    """A dataclass field that is a flag;

    `facts` are fields of `Flag`. A list default is copied for every instance.
    """
    metadata = {"help": help, **facts}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def free_flag(help: str, default: Any = MISSING, **facts: Any) -> Any:
    return flag(help, default, resume="free", **facts)


@dataclass(kw_only=True)
class ModelSection:
    """The start model, its tokenizer, and the precision in which it computes."""

    title: ClassVar[str] = "Model"

    model_name_or_path: str = flag(
        "folder or hub name of the Hugging Face checkpoint to start from", is_path=True
    )
    tokenizer_name_or_path: str | None = flag(
        "folder of the tokenizer; default: the model's", None, is_path=True
    )
    model_revision: str | None = flag(
        "branch, tag or commit of a model on the hub; default: its main branch", None
    )
    tokenizer_revision: str | None = flag(
        "branch, tag or commit of the tokenizer on the hub; default: --model_revision",
        None,
        read_with="tokenizer_name_or_path",
    )
    param_dtype: Dtype = flag(
        "dtype of gathered shards and of the computation; master weights stay float32", "bfloat16"
    )
    float8_linears: Literal["off", "tensorwise", "rowwise"] = flag(
        (
            "multiply the matrices of blocks in float8 (by torchao), with a scale for each "
            "tensor, or for each row"
        ),
        "off",
    )
    router_balance: BalanceScope = flag(
        "where config.json asks for a balance loss of experts: its shares are of each "
        "'microbatch', as in transformers, or of the whole 'step', which no cut of a batch changes",
        "microbatch",
    )
    init_device: Literal["meta", "cpu"] = free_flag(
        ("'meta' builds the model without storage, 'cpu' with real storage before it is sharded"),
        "meta",
    )

    @property
    def revision_of_tokenizer(self) -> str | None:
        return self.tokenizer_revision or self.model_revision


@dataclass(kw_only=True)
class RowsSection:
    """How the rows of any data set are read."""

    title: ClassVar[str] = "Rows"

    columns: list[str] = flag(
        "names of columns in place of ours, each FIELD=COLUMN: 'messages=conversations'", []
    )
    chat_template_name: str | None = flag(
        "a built-in template, or a Jinja file; default: the tokenizer's own", None, is_path=True
    )
    add_bos: bool = flag("write the tokenizer's bos token before the text of the template", False)
    on_bad_row: Literal["error", "skip"] = free_flag(
        "stop at the first malformed row, or skip and count it", "error"
    )
    cache_dir: str | None = free_flag(
        "folder of tokenised rows and of frozen scores; default: $OPEN_INSTRUCT_CACHE or "
        "~/.cache/open_instruct",
        None,
        is_path=True,
    )


@dataclass(kw_only=True)
class DataSection(RowsSection):
    """Rows to train on, and rows that are held out, of an offline run."""

    title: ClassVar[str] = "Data"

    mixer_list: list[str] = flag(
        "alternating names and amounts: 'rows.jsonl 1.0 other.parquet 500'; an amount with a dot "
        "is a fraction of the rows (above 1.0 repeats rows), one without is a count",
        is_path=True,
    )
    mixer_list_splits: list[str] = flag("split of each data set, or one for all", ["train"])
    eval_mixer_list: list[str] = free_flag(
        "held-out rows, in the same form; scored before and after training",
        [],
        is_path=True,
        replaces="eval_split",
    )
    eval_split: float | None = flag(
        "share of the rows of --mixer_list that is held out, by what is in each",
        None,
        above=0,
        below=1,
        replaces="eval_mixer_list eval_mixer_list_splits",
    )
    eval_steps: int = free_flag(
        "steps between further scores; 0: none", 0, read_with=WITH_HELD_OUT, minimum=0
    )
    eval_mixer_list_splits: list[str] = free_flag(
        "split of each held-out data set, or one for all", ["train"], read_with="eval_mixer_list"
    )
    max_seq_length: int = flag("tokens; longer replies are cut on the right", 2048, minimum=2)
    packing: bool = free_flag(
        "lay documents end to end in one row; --no_packing pads each to its own row", True
    )
    cache_dataset_only: bool = free_flag(
        "tokenise and store the rows, then stop; no GPU is needed", False
    )

    length_flags: ClassVar[str] = "--max_seq_length"

    @property
    def has_held_out_rows(self) -> bool:
        return bool(self.eval_mixer_list) or self.eval_split is not None


@dataclass(kw_only=True)
class PreferenceDataSection(DataSection):
    """Rows whose documents may share a prompt."""

    prefix_sharing: PrefixSharing = free_flag(
        "compute once what both documents of a row begin with, the prompt above all (kto: those "
        "of a reply and the mismatched one, in the reference pass); 'auto': where that saves at "
        "least 5% of the tokens",
        "auto",
    )


@dataclass(kw_only=True)
class SFTDataSection(DataSection):
    """Rows of conversations."""

    packing_strategy: Literal["step", "bfd"] = flag(
        "a batch counts conversations ('step'), or rows filled once, best fit first ('bfd')",
        "step",
        read_with="packing",
    )


def loss_types_reading(flag: str) -> str:
    """What a flag is read with that only some preference losses read."""
    return (
        "loss_type "
        f"{' '.join(name for name, loss in PREFERENCE_LOSSES.items() if flag in loss.reads)}"
    )


@dataclass(kw_only=True)
class PreferenceLossSection:
    """The preference loss, and the numbers that it takes."""

    title: ClassVar[str] = "Loss"

    loss_type: str | list[str] = flag(
        "the preference loss, or several to add up", "dpo_norm", choices=PREFERENCE_LOSSES
    )
    loss_weights: list[float] = flag("one for each of several --loss_type; default: 1 each", [])
    beta: float = flag(
        "strength of the pull towards the reference policy (scale of the reward); default: the "
        "loss's own, "
        + "".join(
            f"{loss.beta} for {name}, "
            for name, loss in PREFERENCE_LOSSES.items()
            if loss.beta != 0.1
        )
        + "0.1 for the others",
        None,
        above=0,
    )
    label_smoothing: float = flag(
        "probability that a label is flipped",
        0.0,
        read_with=loss_types_reading,
        minimum=0,
        below=0.5,
        note=" (at 0.5 the label says nothing)",
    )
    gamma_beta_ratio: float = flag(
        "target margin divided by beta", 0.3, read_with=loss_types_reading, minimum=0
    )
    cpo_alpha: float = flag(
        "weight of the chosen reply's mean -log p", 1.0, read_with=loss_types_reading, minimum=0
    )
    discopop_tau: float = flag(
        "temperature of the sigmoid that mixes the logistic and the exponential loss",
        0.05,
        read_with=loss_types_reading,
        above=0,
        maximum=1,
    )
    weight_alignment: bool = flag(
        "divide each token's probability by its expected value under the policy (WPO)",
        False,
        read_with=loss_types_reading,
    )
    ld_alpha: float | None = flag(
        "weight of a reply's tokens beyond the length of the shorter reply (LD-DPO)",
        None,
        minimum=0,
        maximum=1,
    )
    f_divergence_type: str = flag(
        "divergence from the reference that is penalised", "reverse_kl", choices=F_DIVERGENCES
    )
    f_alpha_divergence_coef: float = flag(
        "alpha of the divergence",
        0.5,
        read_with="f_divergence_type alpha_divergence",
        above=0,
        below=1,
    )
    alpha: float = flag(
        "share of the policy in the updated reference",
        0.6,
        read_with="ref_policy_update_freq",
        above=0,
        maximum=1,
    )
    ref_policy_update_freq: int | None = flag(
        "steps between updates of the reference policy; default: it stays frozen", None, minimum=1
    )
    cache_logprobs_only: bool = free_flag(
        "compute and store the reference log-probs, then stop", False
    )

    def __post_init__(self) -> None:
        # Filled in here, so that config.yaml and the comparison on resuming have the number.
        if self.beta is None:
            self.beta = PREFERENCE_LOSSES[self.leading].beta

    @property
    def names(self) -> list[str]:
        return [self.loss_type] if isinstance(self.loss_type, str) else self.loss_type

    @property
    def leading(self) -> str:
        """The loss that sets beta and rewards: the first that has a reference, else the first."""
        return next(
            (name for name in self.names if PREFERENCE_LOSSES[name].needs_reference), self.names[0]
        )


@dataclass(kw_only=True)
class OptimizerSection:
    """The optimizer and its schedule."""

    title: ClassVar[str] = "Optimisation"

    learning_rate: float = flag("peak learning rate", 5e-7, above=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = flag(
        "shape after warm-up", "linear"
    )
    warmup_ratio: float = flag("fraction of the steps that warm up", 0.03, minimum=0, maximum=1)
    optimizer: Literal["adamw", "adamw_8bit", "skip_step_adamw", "muon"] = flag(
        "'adamw_8bit' keeps moments in 8 bits, 'skip_step_adamw' leaves out steps whose loss or "
        "norm is an outlier",
        "adamw",
    )
    weight_decay: float = flag("decoupled weight decay", 0.0, minimum=0)
    weight_decay_on: Literal["linear", "matrices", "all"] = flag(
        "parameters that decay: 'linear' layers, all 'matrices' with the embeddings, or 'all'",
        "linear",
        read_with="weight_decay >0",
    )
    adam_beta1: float = flag("AdamW's first moment decay", 0.9, minimum=0, below=1)
    adam_beta2: float = flag("AdamW's second moment decay", 0.999, minimum=0, below=1)
    adam_epsilon: float = flag(
        "number that AdamW adds to the root of the second moment", 1e-8, above=0
    )
    max_grad_norm: float = flag(
        "clip the global gradient norm to this; 0: no clipping",
        1.0,
        minimum=0,
        note=" (0 leaves gradients alone)",
    )
    seed: int = flag("random seed, of the data order too", 42, minimum=0)

    @property
    def not_decayed(self) -> tuple[str, ...]:
        """Name patterns of the parameters that weight decay spares; none where nothing decays."""
        return SPARED_BY_DECAY[self.weight_decay_on] if self.weight_decay else ()


@dataclass(kw_only=True)
class OptimSection(OptimizerSection):
    """The optimizer, the batch, and the length of an offline run."""

    per_device_train_batch_size: int = flag(
        "rows of full length that fit in one microbatch of one device", 8, minimum=1, resume="batch"
    )
    gradient_accumulation_steps: int = flag(
        "microbatches per device and step, at most", 1, minimum=1, resume="batch"
    )
    num_epochs: int = flag("passes over the data", 1, minimum=1, resume="length")
    max_train_steps: int | None = flag(
        "exact number of steps, in place of --num_epochs", None, minimum=1, resume="length"
    )


@dataclass(kw_only=True)
class SFTOptimSection(OptimSection):
    """As of any offline run, with the learning rate of SFT."""

    learning_rate: float = flag("peak learning rate", 2e-5, above=0)


@dataclass(kw_only=True)
class DegreesSection:
    """How many GPUs share a copy of the model, and how."""

    title: ClassVar[str] = "Sharding"

    fsdp_shard_degree: int | None = free_flag(
        "GPUs that share a copy of the model; default: a node's", None, minimum=1
    )
    fsdp_num_replicas: int | None = free_flag(
        "copies of the model; default: the number of nodes", None, minimum=1
    )
    tensor_parallel_degree: int = free_flag("GPUs that split every matrix", 1, minimum=1)
    context_parallel_degree: int = free_flag(
        "GPUs that split every packed row (also: --sequence_parallel_size)", 1, minimum=1
    )
    expert_parallel_degree: int = free_flag(
        (
            "GPUs that split the experts of each layer, to which tokens are sent: 1, or the "
            "shard degree"
        ),
        1,
        minimum=1,
    )

    @property
    def splitting(self) -> dict[str, int]:
        """The degrees that are above 1, by flag."""
        degrees = {each.name: getattr(self, each.name) or 1 for each in fields(DegreesSection)}
        return {name: degree for name, degree in degrees.items() if degree > 1}


@dataclass(kw_only=True)
class ParallelSection(DegreesSection):
    """How the weights are sharded, and by which backend."""

    more_ranks: ClassVar[str] = ""  # how to start {0} ranks, for messages

    single_gpu_mode: bool = flag(
        (
            "one device, no sharding: float32 master weights, and a copy in --param_dtype to "
            "compute with"
        ),
        False,
    )
    gradient_reduction: Literal["every", "last"] = free_flag(
        (
            "reduce gradients over a shard group after 'every' microbatch, or whole float32 ones "
            "after the 'last'"
        ),
        "every",
    )
    fsdp_prefetch_factor: int = free_flag(
        "blocks that the forward pass gathers ahead of the one at work", 0, minimum=0
    )
    dist_timeout_s: int = free_flag(
        "seconds a rank waits for the others before it gives up", 1800, minimum=1
    )
    backend: str = flag(
        "how weights are sharded: olmo_core (FSDP2), or deepspeed (ZeRO over all ranks)",
        "olmo_core",
    )
    deepspeed_stage: int = free_flag(
        "ZeRO shards: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too; default: 2",
        None,
        minimum=0,
        maximum=3,
    )
    deepspeed_zpg: int = free_flag(
        "stage 3: ranks that share a second copy of the weights; default: 1, or a node's in GRPO "
        "on several nodes",
        None,
        minimum=1,
    )
    adam_offload: bool = free_flag(
        (
            "the host holds the optimizer's states; on DeepSpeed, from stage 1, its CPU takes "
            "the step too"
        ),
        False,
    )
    offload: bool = free_flag(
        (
            "the host holds shards of weights and gradients too, and its CPU takes the step; on "
            "DeepSpeed, stage 3"
        ),
        False,
    )


@dataclass(kw_only=True)
class RanksSection(ParallelSection):
    """Sharding of an offline run, which starts its own ranks."""

    more_ranks: ClassVar[str] = (
        "--num_processes {0} starts them, and so does torchrun --nproc_per_node {0}"
    )

    num_processes: str | None = free_flag(
        "processes to start on this machine, one for each GPU; 'auto': as many as GPUs; default: "
        "one, or torchrun's",
        None,
    )


@dataclass(kw_only=True)
class MemorySection:
    """What is recomputed or compiled to fit and to be fast."""

    title: ClassVar[str] = "Memory and compilation"

    activation_checkpointing: Literal["auto", "none", "full", "selected_modules", "offload"] = (
        free_flag(
            "recompute 'full' blocks or chosen modules; 'offload': blocks, whose inputs wait in "
            "host memory; 'auto': on GPUs the least with which the plan fits, with room, of the "
            "same batch in smaller microbatches too; with --backend deepspeed 'full'; else 'none'",
            "auto",
        )
    )
    activation_checkpointing_modules: list[str] = free_flag(
        "names of the modules; a * stands for anything but a dot",
        NORMS_AND_SUBLAYERS,
        read_with="activation_checkpointing selected_modules",
    )
    activation_memory_budget: float = free_flag(
        "below 1.0: the share of activations to keep, chosen by the compiler",
        1.0,
        above=0,
        maximum=1,
    )
    compile_model: bool | None = free_flag(
        "torch.compile each block; default: on CUDA, where a compiler works and no row, matrix or "
        "expert is split. On a CPU it takes a minute or two at the start, and steps are some 1.1 "
        "times as fast",
        None,
    )
    plan_check: bool = free_flag(
        (
            "refuse to start where weights, gradients and optimizer states alone are more than a "
            "device's memory"
        ),
        True,
    )
