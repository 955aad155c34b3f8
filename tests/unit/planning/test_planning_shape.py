"""Shapes of public models and of config.json files, and the workload that flags stand for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.config.fleet_sections import CPU_KV_CACHE_MIB
from open_instruct.config.grpo import GRPOConfig
from open_instruct.objectives.dpo import DPOConfig
from open_instruct.parallel.layout import resolve_layout
from open_instruct.planning.setting import Setting
from open_instruct.planning.subject.build_workload import build_workload
from open_instruct.planning.subject.devices import find_device
from open_instruct.planning.subject.read_shape import model_shape, public_models
from open_instruct.planning.subject.workload import Scoring
from tests.refusals import refused

# Parameters as the model cards of the releases count them.
NUM_PARAMS = {
    "allenai/OLMo-2-0425-1B": 1_484_916_736,
    "allenai/OLMo-2-1124-7B": 7_298_617_344,
    "allenai/OLMo-2-1124-13B": 13_716_198_400,
    "allenai/OLMo-2-0325-32B": 32_234_279_936,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
}


@pytest.mark.parametrize(("name", "num_params"), NUM_PARAMS.items())
def test_public_models_have_the_parameters_of_their_release(name: str, num_params: int) -> None:
    assert model_shape(name).num_params == num_params


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("allenai/OLMo-2-1124-7B-Instruct", "allenai/OLMo-2-1124-7B"),
        ("OLMo-2-0425-1B-SFT", "allenai/OLMo-2-0425-1B"),
        ("allenai/Olmo-3-7B-Think-SFT", "allenai/Olmo-3-1025-7B"),
        ("olmo-3-32b-think", "allenai/Olmo-3-1125-32B"),
        ("Qwen2.5-Math-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("Qwen/Qwen3-4B-Instruct-2507", "Qwen/Qwen3-4B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("meta-llama/Meta-Llama-3-8B", "meta-llama/Llama-3-8B"),
    ],
)
def test_variants_of_a_size_are_known(name: str, public: str) -> None:
    assert model_shape(name).name == public


def test_every_public_name_finds_itself() -> None:
    assert [model_shape(name).name for name in public_models()] == list(public_models())


def test_unknown_name_gets_near_ones() -> None:
    with refused("bad_model", None, "allenai/Olmo-3-1025-7B"):
        model_shape("allenai/Olmo-3-8B")


FIELDS: dict[str, Any] = {
    "model_type": "olmo3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "sliding_window": 16,
    "torch_dtype": "bfloat16",
}


def write_config(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(FIELDS | changes))
    return file


def test_folder_and_its_config_are_the_same_model(tmp_path: Path) -> None:
    file = write_config(tmp_path)
    shape = model_shape(str(file))
    assert shape == model_shape(str(tmp_path))
    assert (shape.head_dim, shape.num_kv_heads, shape.checkpoint_bytes_per_param) == (16, 4, 2)
    assert shape.windows == (16, 16, 16, None)


DELTA: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": None,
    "sliding_window": None,
}
EXPERTS: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "sliding_window": None,
}
PARTLY = {"rope_theta": 1e4, "partial_rotary_factor": "half"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, ("unsupported_model", None, "model_type", "'gpt2'")),
        ({"hidden_size": None}, ("bad_model", None, "hidden_size")),
        ({"vocab_size": -5}, ("bad_model", None, "vocab_size", "5", "1")),
        (
            {"num_key_value_heads": 3},
            ("bad_model", None, "num_attention_heads", "4", "num_key_value_heads"),
        ),
        ({"sliding_window": 0}, ("bad_model", None, "sliding_window", "0")),
        (EXPERTS | {"mlp_only_layers": "0"}, ("bad_model", None, "mlp_only_layers", "'0'")),
        (EXPERTS | {"decoder_sparse_step": "2"}, ("bad_model", None, "decoder_sparse_step", "'2'")),
        (
            {"layer_types": ["full_attention"]},
            ("bad_model", None, "layer_types", "num_hidden_layers", "4"),
        ),
        (
            {"layer_types": ["full_attention", "linear_attention"] * 2},
            ("unsupported_model", None, "layer_types", "'linear_attention'", "3"),
        ),
        (
            DELTA | {"full_attention_interval": 2},
            ("bad_model", None, "layer_types", "num_hidden_layers", "4"),
        ),
        (
            DELTA | {"layer_types": ["full_attention"] * 4, "rope_parameters": PARTLY},
            ("bad_model", None, "partial_rotary_factor", "'half'"),
        ),
    ],
)
def test_config_that_is_no_shape_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: tuple[Any, ...]
) -> None:
    with refused(*message):
        model_shape(str(write_config(tmp_path, **changes)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, ("unreadable_file", None, "such file")),
        ("{", ("unreadable_file", None, "not JSON")),
        ("[]", ("unreadable_file", None, "JSON list")),
    ],
)
def test_config_that_cannot_be_read_is_refused(
    tmp_path: Path, text: str | None, message: tuple[Any, ...]
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with refused(*message):
        model_shape(str(tmp_path))


SHAPE = model_shape("Qwen/Qwen3-8B")
DPO = [
    "--model_name_or_path",
    "Qwen/Qwen3-8B",
    "--mixer_list",
    "pairs.jsonl",
    "1.0",
    "--output_dir",
    "out",
]
GRPO = [
    "--model_name_or_path",
    "Qwen/Qwen3-8B",
    "--dataset_mixer_list",
    "prompts.jsonl",
    "1.0",
    "--output_dir",
    "out",
]


def test_workload_of_dpo() -> None:
    flags = [
        "--max_seq_length",
        "1024",
        "--per_device_train_batch_size",
        "2",
        "--gradient_accumulation_steps",
        "4",
    ]
    workload = build_workload(parse_run(DPOConfig, [*DPO, *flags]), SHAPE, resolve_layout([8]))
    assert (workload.tokens_per_microbatch, workload.label_tokens_per_microbatch) == (4096, 4096)
    assert (workload.num_microbatches, workload.reference_pass_tokens, workload.scorings) == (
        4,
        4096,
        (),
    )
    assert workload.checkpointing_modules == () and workload.export_bytes_per_param == 2
    simpo = build_workload(
        parse_run(DPOConfig, [*DPO, "--loss_type", "simpo"]), SHAPE, resolve_layout([8])
    )
    assert simpo.reference_pass_tokens == 0
    # A reference that follows is there throughout.
    flags = ["--loss_type", "dpo", "wpo", "--weight_alignment", "--ref_policy_update_freq", "2"]
    moving = build_workload(parse_run(DPOConfig, [*DPO, *flags]), SHAPE, resolve_layout([8]))
    assert moving.scorings == (Scoring(shape=SHAPE, stands_as="reference policy", moves=True),)
    assert (moving.reference_pass_tokens, moving.num_values) == (0, 2)


def test_workload_of_grpo() -> None:
    flags = [
        "--max_prompt_token_length",
        "256",
        "--response_length",
        "768",
        "--num_unique_prompts_rollout",
        "32",
    ]
    flags += [
        "--num_samples_per_prompt_rollout",
        "8",
        "--num_mini_batches",
        "2",
        "--num_epochs",
        "3",
        "--beta",
        "0.1",
    ]
    flags += ["--vllm_num_engines", "4", "--vllm_tensor_parallel_size", "2"]
    workload = build_workload(parse_run(GRPOConfig, [*GRPO, *flags]), SHAPE, resolve_layout([8]))
    # 256 completions in two mini-batches over 8 ranks are 16 each, 4 of 1,024 tokens in a
    # microbatch of 4,096.
    assert (workload.num_microbatches, workload.num_updates) == (4, 6)
    frozen = Scoring(shape=SHAPE, num_rounds=2)
    assert workload.tokens_per_microbatch == 4096
    assert workload.scorings == (frozen, replace(frozen, stands_as="reference policy"))
    assert (workload.num_engines, workload.engine_tensor_degree, workload.sync_backend) == (
        4,
        2,
        "nccl",
    )
    assert workload.kv_cache_bytes == 0


def test_workload_of_streams() -> None:
    """A teacher of another size, conversations in microbatches of their own, and tokens chosen in
    every update.
    """
    flags = [
        "--num_mini_batches",
        "2",
        "--num_epochs",
        "3",
        "--teacher_model_name_or_path",
        "Qwen/Qwen3-4B",
    ]
    flags += ["--top_entropy_quantile", "0.2"]
    flags += ["--sft_mixer_list", "chats.jsonl", "1.0", "--sft_rows_per_step", "200"]
    workload = build_workload(parse_run(GRPOConfig, [*GRPO, *flags]), SHAPE, resolve_layout([8]))
    frozen, chosen = (
        Scoring(shape=SHAPE, num_rounds=2),
        Scoring(shape=SHAPE, num_rounds=6, num_values=2),
    )
    teacher = Scoring(shape=model_shape("Qwen/Qwen3-4B"), stands_as="teacher", num_rounds=2)
    assert workload.scorings == (frozen, teacher, chosen)
    # Of 64 completions a rank has 4 in a mini-batch, of 200 conversations 13; 8 of 512 tokens are
    # in a microbatch.
    assert workload.num_microbatches == 1 + 2
    with_critic = build_workload(
        parse_run(GRPOConfig, [*GRPO, *flags, "--advantages", "gae"]), SHAPE, resolve_layout([8])
    )
    assert (with_critic.num_microbatches, with_critic.critic_workload.num_microbatches) == (
        1 + 2,
        1,
    )
    assert workload.records_entropy and workload.num_values == 2


def test_engine_that_shares_the_learners_gpu_takes_its_part() -> None:
    """A share of the GPU, or a cache of a given size with what the engine's steps take."""

    def beside_weights(*flags: str, on_cuda: bool = True) -> int:
        config = parse_run(GRPOConfig, [*GRPO, "--single_gpu_mode", *flags])
        device = find_device("memory_gib=80")
        setting = Setting(
            config=config, shape=SHAPE, gpus_per_node=(1,), device=device, on_cuda=on_cuda
        )
        workload = setting.workload
        assert workload.sync_backend == "ipc"
        return workload.kv_cache_bytes

    assert (
        beside_weights("--vllm_gpu_memory_utilization", "0.5") == 40 * 2**30 - 2 * SHAPE.num_params
    )
    cache = ["--vllm_kv_cache_mib", "1024"]
    a_token, a_sequence = 2 * (3 * SHAPE.layers[0].d_ff + 4 * SHAPE.d_model), 8 * SHAPE.vocab_size
    assert beside_weights(*cache) == 2**30 + 16384 * a_token + 256 * a_sequence
    given = beside_weights(
        *cache, "--vllm_max_num_batched_tokens", "4096", "--vllm_max_num_seqs", "64"
    )
    assert given == 2**30 + 4096 * a_token + 64 * a_sequence
    # On a CPU an engine takes no share of the host, and its cache has a size of its own.
    cache = ["--vllm_kv_cache_mib", str(CPU_KV_CACHE_MIB)]
    assert beside_weights(on_cuda=False) == beside_weights(*cache)
