"""What the fork server imports, once a session, for all ranks of all tests."""

import gc

import torch

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)
from open_instruct.learner import scoring  # noqa: F401
from open_instruct.learner.rows import sample_loader  # noqa: F401
from open_instruct.losses import preference  # noqa: F401
from open_instruct.objectives import distill, dpo, kto, reward_model, sft  # noqa: F401
from open_instruct.run import metrics_log, opened  # noqa: F401
from tests.ranks.jobs import (  # noqa: F401
    checkpoints,
    deepspeed_grpo,
    deepspeed_plan,
    grpo_reference,
    replayed_run,
    traffic,
    train_runs,
    weight_sync,
)

# isort: split
# What DeepSpeed and transformers import at their first use.
from deepspeed.runtime.zero.muon import muon_optimizer  # noqa: F401
from deepspeed.utils import nvtx
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.olmo2 import modeling_olmo2  # noqa: F401
from transformers.models.olmo3 import modeling_olmo3  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

nvtx.enable_nvtx = False  # marks for a profiler of CUDA, around each of DeepSpeed's calls
assert torch.get_num_threads() == 1, "threads do not live through a fork"

# What is imported stays; ranks that look for garbage in it would only copy its pages.
gc.freeze()
gc.enable()
