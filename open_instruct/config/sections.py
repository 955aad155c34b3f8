"""The flags, in the groups `--help` shows them in.

Field names are flag names. Every field is made by `flag(help, default)`, or by `resumable_flag`
where a run that resumes may have another value; a field without a default must be given.
`requires` names the flag without which nothing reads a flag, or is a function of the flag's name;
`section_requirement` of a section holds for all its flags.

Types are limited to what one word of a command line (or a list of words) can say: str, int, float,
bool, Literal, `X | None`, `list[str]`, `list[int]`, `list[float]`, and `str | list[str]` for flags
that mostly have one word.
"""

from dataclasses import MISSING, dataclass, field, replace
from typing import Any, ClassVar, Literal

Switch = Literal["auto", "on", "off"]
PrefixSharing = Switch
WITH_HELD_OUT = "eval_mixer_list|eval_split"  # what is read with either
Dtype = Literal["bfloat16", "float32"]
BalanceScope = Literal["microbatch", "step"]
ExportDtype = Literal["bfloat16", "float32", "source"]
# The parameter-name patterns that each --weight_decay_on exempts from decay. Only some models have
# the last two: biases, and the rates at which layers of the gated delta rule forget.
NO_MATRICES = ("*norm.weight", "*bias", "*.A_log")
SPARED_BY_DECAY = {
    "linear": ("embeddings.*", *NO_MATRICES),
    "matrices": NO_MATRICES,
    "all": (),
}


def flag(help: str, default: Any = MISSING, **facts: Any) -> Any:
    """Make a dataclass field that is a flag.

    `facts` are fields of `Flag`. A list default is copied for every instance.
    """
    metadata = {"help": help, **facts}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def resumable_flag(help: str, default: Any = MISSING, **facts: Any) -> Any:
    return flag(help, default, resume="free", **facts)


@dataclass(kw_only=True)
class ModelSection:
    """The start model, its tokenizer, and the precision in which it computes."""

    title: ClassVar[str] = "Model"

    model_name_or_path: str = flag(
        "folder or hub name of the checkpoint to start from, Hugging Face's or OLMo-core's",
        is_path=True,
    )
    tokenizer_name_or_path: str | None = flag(
        "folder of the tokenizer; default: the model's", None, is_path=True
    )
    from_scratch: bool = flag(
        "draw the weights instead of reading them; of --model_name_or_path only the config.json "
        "and the tokenizer are taken",
        False,
    )
    config_name: str | None = flag(
        "a config.json in place of the one of --model_name_or_path, Hugging Face's or OLMo-core's",
        None,
        is_path=True,
        requires="from_scratch",
    )
    model_revision: str | None = flag(
        "branch, tag or commit of a model on the hub; default: its main branch", None
    )
    tokenizer_revision: str | None = flag(
        "branch, tag or commit of the tokenizer on the hub; default: --model_revision",
        None,
        requires="tokenizer_name_or_path",
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
    init_device: Literal["meta", "cpu"] = resumable_flag(
        ("'meta' builds the model without storage, 'cpu' with real storage before it is sharded"),
        "meta",
    )

    @property
    def config_path(self) -> str:
        """The folder or hub name of the model, or the file that describes it."""
        return self.config_name or self.model_name_or_path

    def read_from(self, name: str) -> "ModelSection":
        """The section of another model, whose weights are read, whatever becomes of the start's."""
        return replace(self, model_name_or_path=name, from_scratch=False, config_name=None)

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
    chat_template_kwargs: list[str] = flag(
        "variables of the chat template, each KEY=VALUE: 'enable_thinking=false'; the exported "
        "model's template has them as defaults",
        [],
    )
    add_bos: bool = flag("write the tokenizer's bos token before the text of the template", False)
    on_bad_row: Literal["error", "skip", "trim"] = resumable_flag(
        "stop at malformed rows, skip and count them, or skip those that stay malformed without "
        "the replies before the user's first turn",
        "error",
    )
    cache_dir: str | None = resumable_flag(
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
    eval_mixer_list: list[str] = resumable_flag(
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
    eval_steps: int = resumable_flag(
        "steps between further scores; 0: none", 0, requires=WITH_HELD_OUT, minimum=0
    )
    eval_mixer_list_splits: list[str] = resumable_flag(
        "split of each held-out data set, or one for all", ["train"], requires="eval_mixer_list"
    )
    max_seq_length: int = flag("tokens; longer replies are cut on the right", 2048, minimum=2)
    packing: bool = resumable_flag(
        "lay documents end to end in one row; --no_packing pads each to its own row", True
    )
    cache_dataset_only: bool = resumable_flag(
        "tokenise and store the rows, then stop; no GPU is needed", False
    )

    length_flags: ClassVar[str] = "--max_seq_length"

    @property
    def has_held_out_rows(self) -> bool:
        return bool(self.eval_mixer_list) or self.eval_split is not None


@dataclass(kw_only=True)
class PreferenceDataSection(DataSection):
    """Rows whose documents may share a prompt."""

    prefix_sharing: PrefixSharing = resumable_flag(
        "compute once what both documents of a row begin with, the prompt above all (kto: those "
        "of a reply and the mismatched one, in the reference pass); 'auto': where that saves at "
        "least 5% of the tokens",
        "auto",
    )


@dataclass(kw_only=True)
class ConversationSection(DataSection):
    """Rows of conversations, of which every reply is learned."""

    split_replies: bool = flag(
        "a row of each reply of a conversation, in place of one text that teaches all: for "
        "templates that write an earlier reply otherwise (Qwen 3's leaves its thoughts out)",
        False,
    )


@dataclass(kw_only=True)
class SFTDataSection(ConversationSection):
    """Rows of conversations, which may be packed before."""

    packing_strategy: Literal["step", "bfd"] = flag(
        "a batch counts conversations ('step'), or rows filled once, best fit first ('bfd')",
        "step",
        requires="packing",
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
        requires="weight_decay >0",
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
