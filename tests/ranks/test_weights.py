"""Weights in and out of shards: every rank has its own bytes, and import -> export is the
identity.
"""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoModelForCausalLM

from open_instruct.core.boxes import box_shape
from open_instruct.core.errors import InputError
from open_instruct.models.build import build_model
from open_instruct.models.export import export_hf
from open_instruct.models.export_checks import check_destination, check_exportable
from open_instruct.models.export_files import find_partial_folder, prepare_folder
from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.models.hf.hf_config import INDEX_NAME, SINGLE_NAME, load_hf_config
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.load import find_parameter_shapes
from open_instruct.models.shards import shard_box
from tests.ranks.shallow import write_shallow_model
from tests.unit.models.test_checkpoint_files import write_indexed

JOB = "tests.ranks.jobs.weights"
UNSHARDED = None
FSDP_4 = {"replicas": 1, "shards": 4, "tensor": 1, "checkpointing": False}
HSDP_2X2 = {"replicas": 2, "shards": 2, "tensor": 1, "checkpointing": True}
REPLICAS_4 = {"replicas": 4, "shards": 1, "tensor": 1, "checkpointing": False}
FSDP_2_TP_2 = {"replicas": 1, "shards": 2, "tensor": 2, "checkpointing": False}
REPLICAS_2_TP_2 = {"replicas": 2, "shards": 1, "tensor": 2, "checkpointing": False}
RANGES = "ranges"
FSDP_2 = {"replicas": 1, "shards": 2, "tensor": 1, "checkpointing": False}
TP_2 = {"replicas": 1, "shards": 1, "tensor": 2, "checkpointing": False}
EXPERTS = {"splits_experts": True}

ODD_VOCABULARY = 263  # shards of 66, 66, 66 and 65 rows


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Families, tied and not, three dtypes on disk, one file and several, even and uneven
    vocabularies.
    """
    root = tmp_path_factory.mktemp("checkpoints")
    kinds: dict[str, dict[str, Any]] = {
        "olmo2_fp32": {"family": "olmo2"},
        "olmo2_odd_bf16": {"family": "olmo2", "vocab_size": ODD_VOCABULARY, "dtype": "bfloat16"},
        "olmo3_tied_fp16": {"family": "olmo3", "tie": True, "dtype": "float16"},
        "qwen2_fp32": {"family": "qwen2"},
        "qwen3_tied_bf16": {"family": "qwen3", "tie": True, "dtype": "bfloat16"},
        "llama_fp32": {"family": "llama", "tie": False},
        "qwen3_moe_bf16": {"family": "qwen3_moe", "dtype": "bfloat16"},
        "packed_fp32": {"family": "qwen3_moe", "tie": True},
    }
    folders = {name: write_shallow_model(root / name, **kind) for name, kind in kinds.items()}
    for name in ("olmo2_odd_bf16", "qwen3_tied_bf16"):
        write_indexed(folders[name], load_file(folders[name] / SINGLE_NAME))
        (folders[name] / SINGLE_NAME).unlink()
    # As transformers 5 has experts in memory.
    packed = AutoModelForCausalLM.from_pretrained(folders["packed_fp32"])
    save_file(
        dict(packed.named_parameters()),
        folders["packed_fp32"] / SINGLE_NAME,
        metadata={"format": "pt"},
    )
    # An old habit: a tied model that stores its head once more.
    tensors = load_file(folders["olmo3_tied_fp16"] / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folders["olmo3_tied_fp16"] / SINGLE_NAME, metadata={"format": "pt"})
    return folders


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = CheckpointFiles.open(folder)
    return {name: files.read(name).clone() for name in files}


@torch.no_grad()
def check_export(
    out: Path, source: Path, dtype: torch.dtype, logits: list[list[float]] | None
) -> None:
    """The export holds the source's numbers and opens in transformers, where it computes what we
    computed.
    """
    from transformers import AutoTokenizer

    assert (out / "README.md").read_text() == "# A card"
    ours, theirs = stored_tensors(out), stored_tensors(source)
    if json.loads((source / "config.json").read_text())["tie_word_embeddings"]:
        theirs.pop("lm_head.weight", None)
    assert set(ours) == set(theirs)
    for name in ours:
        assert ours[name].dtype == dtype
        assert torch.equal(ours[name], theirs[name].to(dtype)), name
    opened, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert opened.dtype == dtype
    assert (
        AutoTokenizer.from_pretrained(out)("a b").input_ids
        == AutoTokenizer.from_pretrained(source)("a b").input_ids
    )
    if logits is not None:
        expected = opened.float()((torch.arange(len(logits)) % 7 + 2).unsqueeze(0)).logits[0]
        torch.testing.assert_close(torch.tensor(logits), expected, atol=1e-5, rtol=1e-5)


EXTENDED = pytest.mark.extended
STORED = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

IMPORTS: dict[int, list[tuple[str, Any]]] = {
    1: [
        ("olmo2_odd_bf16", UNSHARDED),
        ("qwen3_tied_bf16", UNSHARDED),
        ("olmo3_tied_fp16", UNSHARDED),
        ("packed_fp32", UNSHARDED),
    ],
    2: [
        ("olmo2_odd_bf16", FSDP_2),
        ("olmo3_tied_fp16", FSDP_2),
        ("olmo2_fp32", TP_2),
        ("qwen2_fp32", RANGES),
        ("qwen3_tied_bf16", TP_2),
        ("olmo3_tied_fp16", RANGES),
        ("qwen3_moe_bf16", FSDP_2),
        ("qwen3_moe_bf16", FSDP_2 | EXPERTS),
        ("packed_fp32", RANGES),
    ],
    4: [
        ("olmo2_odd_bf16", FSDP_4),
        ("qwen3_tied_bf16", FSDP_4),
        ("llama_fp32", HSDP_2X2),
        ("olmo3_tied_fp16", HSDP_2X2),
        ("olmo2_odd_bf16", REPLICAS_4),
        ("qwen2_fp32", FSDP_2_TP_2),
        ("qwen3_tied_bf16", FSDP_2_TP_2),
        ("llama_fp32", REPLICAS_2_TP_2),
        ("olmo2_odd_bf16", RANGES),
        ("packed_fp32", HSDP_2X2),
        ("packed_fp32", HSDP_2X2 | EXPERTS),
        ("qwen3_moe_bf16", RANGES),
    ],
}


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(each, marks=EXTENDED if each < 4 else ()) for each in IMPORTS]
)
def test_import_then_export_is_the_identity(run_ranks, checkpoints, tmp_path, num_ranks):
    cases = [
        {
            "folder": str(checkpoints[name]),
            "out": str(tmp_path / str(number)),
            "layout": layout,
            "export_dtype": str(STORED[name.split("_")[-1]]).removeprefix("torch."),
        }
        for number, (name, layout) in enumerate(IMPORTS[num_ranks])
    ]
    of_ranks = run_ranks(num_ranks, f"{JOB}:import_and_export", cases=cases)
    for number, (name, layout) in enumerate(IMPORTS[num_ranks]):
        results = [of_rank[number] for of_rank in of_ranks]
        dtype = STORED[name.split("_")[-1]]
        assert [result["differing"] for result in results] == [[]] * num_ranks, name
        assert (tmp_path / str(number) / INDEX_NAME).is_file(), "the export should have been split"
        check_export(tmp_path / str(number), checkpoints[name], dtype, results[0]["logits"])
        # Exactly the bytes of its own shards: not one byte of another rank's.
        assert all(
            result["num_bytes_read"] == result["num_local_params"] * dtype.itemsize
            for result in results
        )
        if layout == FSDP_2_TP_2:
            assert results[0]["strided"], "FSDP over tensor parallel should cut one dim twice"
        alone = CheckpointFiles.open(checkpoints[name]).fingerprint
        assert {result["fingerprint"] for result in results} == {alone}


@EXTENDED
def test_dtypes_and_chunks_do_not_matter(run_ranks, checkpoints, tmp_path):
    folder, computing_in_bf16 = checkpoints["olmo2_fp32"], {**FSDP_2, "compute_dtype": "bfloat16"}
    cases = [
        {"layout": FSDP_2, "dtype": "bfloat16", "chunk_bytes": 1, "export_dtype": "bfloat16"},
        {"layout": computing_in_bf16, "chunk_bytes": 10**9, "export_dtype": "float32"},
    ]
    cases = [
        case | {"folder": str(folder), "out": str(tmp_path / str(number))}
        for number, case in enumerate(cases)
    ]
    results = run_ranks(2, f"{JOB}:import_and_export", cases=cases)
    assert [case["differing"] for of_rank in results for case in of_rank] == [[]] * 4
    check_export(tmp_path / "0", folder, torch.bfloat16, None)
    # Master weights, not the bf16 ones computed with.
    check_export(tmp_path / "1", folder, torch.float32, None)


@EXTENDED
def test_damaged_data_is_one_error_on_all_ranks(run_ranks, checkpoints, tmp_path):
    nan, head = tmp_path / "nan", tmp_path / "head"
    for folder in (nan, head):
        write_shallow_model(folder, family="llama", tie=folder is head)
    tensors = load_file(nan / SINGLE_NAME)
    # On the last rank's shard only.
    tensors["model.layers.1.mlp.up_proj.weight"][-1, 3] = float("nan")
    save_file(tensors, nan / SINGLE_NAME, metadata={"format": "pt"})
    tensors = load_file(head / SINGLE_NAME)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, head / SINGLE_NAME, metadata={"format": "pt"})
    first, second = run_ranks(
        2, f"{JOB}:damaged", nan_folder=str(nan), head_folder=str(head), layout=FSDP_2
    )
    assert first == second
    assert "model.layers.1.mlp.up_proj.weight" in first[0] and "NaN" in first[0]
    assert "lm_head.weight" in first[1] and "tie_word_embeddings" in first[1]


@EXTENDED
def test_failed_export_leaves_the_earlier_one(run_ranks, checkpoints, tmp_path):
    folder, out = checkpoints["llama_fp32"], tmp_path / "runs" / "hf_model"
    arguments = {"folder": str(folder), "out": str(out), "layout": FSDP_2, "break_disk_on": 1}
    first, second = run_ranks(2, f"{JOB}:export_twice", **arguments)
    assert first == second and first[0] == "exported"
    assert "model-00002-of" in first[1] and "File too large" in first[1]
    check_export(out, folder, torch.float32, None)
    assert [path.name for path in out.parent.iterdir()] == ["hf_model"], (
        "nothing half-written should stay"
    )


def test_export_never_replaces_what_is_no_export(checkpoints, tmp_path):
    source, out = checkpoints["llama_fp32"], tmp_path / "out"
    check_destination(source, out)
    out.mkdir()
    check_destination(source, out)
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="something other than an earlier export"):
        check_destination(source, out)
    (out / "config.json").write_text("{}")
    check_destination(source, out)
    for folder, words in ((source, "training starts from"), (source / "config.json", "is a file")):
        with pytest.raises(InputError, match=words):
            check_destination(source, folder)


def test_export_that_would_not_load_is_refused(checkpoints):
    hf_config = load_hf_config(str(checkpoints["qwen3_tied_bf16"]))
    names, shapes = TensorNames(hf_config), find_parameter_shapes(build_model(hf_config))
    check_exportable(names, shapes)
    for changed, word in (
        (
            {**shapes, "blocks.1.attention.w_q.weight": (1, 2)},
            "model.layers.1.self_attn.q_proj.weight",
        ),
        ({**shapes, "blocks.1.attention.w_q.bias": (2,)}, "blocks.1.attention.w_q.bias"),
        (
            {name: shape for name, shape in shapes.items() if name != "embeddings.weight"},
            "model.embed_tokens.weight",
        ),
    ):
        with pytest.raises(InputError, match=word):
            check_exportable(names, changed)


def test_interrupted_swap_is_undone_by_the_next_export(tmp_path):
    out = tmp_path / "hf_model"
    for name in (".hf_model.previous", ".hf_model.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / ".hf_model.previous" / "config.json").write_text("{}")
    prepare_folder(out, num_bytes=1)
    assert (out / "config.json").read_text() == "{}"
    assert list(find_partial_folder(out).iterdir()) == []


def test_chosen_chat_template_is_the_one_that_tokenizers_find(checkpoints, tmp_path):
    from transformers import AutoTokenizer

    folder = checkpoints["llama_fp32"]
    hf_config = load_hf_config(str(folder))
    model, names = build_model(hf_config), TensorNames(hf_config)
    model.init_weights(device=torch.device("cpu"))
    template = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"
    export_hf(
        model,
        names,
        source_folder=folder,
        out_folder=tmp_path / "out",
        dtype=torch.float32,
        chat_template=template,
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"
    )
    assert (tmp_path / "out" / SINGLE_NAME).is_file()
    assert not (tmp_path / "out" / INDEX_NAME).exists()


def test_boxes_agree_with_torch_where_cuts_are_even():
    placements = [Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2)]
    for first, second in itertools.product(placements, placements):
        if isinstance(second, _StridedShard) or (
            isinstance(first, _StridedShard) and second != Shard(0)
        ):
            continue
        for place in itertools.product(range(2), range(2)):
            shape, offset = _compute_local_shape_and_global_offset(
                (8, 12), (2, 2), list(place), [first, second]
            )
            box = shard_box((8, 12), (2, 2), place, [first, second])
            assert (box_shape(box), tuple(part.start for part in box)) == (shape, offset)


@pytest.mark.parametrize("num_rows", [1, 3, 7, 10, 13])
def test_boxes_of_uneven_cuts_tile_the_tensor(num_rows):
    """Tensor parallelism cuts first, FSDP what is left: as torch.chunk does, one after the
    other.
    """
    rows = torch.arange(num_rows)
    for tensor_rank, fsdp_rank in itertools.product(range(2), range(4)):
        halves = [*rows.chunk(2), rows[:0], rows[:0]]
        quarters = [*halves[tensor_rank].chunk(4), *[rows[:0]] * 4]
        box = shard_box(
            (num_rows,),
            (4, 2),
            (fsdp_rank, tensor_rank),
            [_StridedShard(0, split_factor=2), Shard(0)],
        )
        assert torch.equal(rows[box], quarters[fsdp_rank])
