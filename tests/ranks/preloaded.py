"""What the fork server imports, once a session, for all ranks of all tests."""

import gc

import numpy.ctypeslib
import numpy.ma  # noqa: F401
import torch

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)
from open_instruct.core import text
from open_instruct.data import report
from open_instruct.losses import preference  # noqa: F401
from open_instruct.objectives import distill, dpo, kto, prm, reward_model, sft  # noqa: F401
from open_instruct.parallel.wording import nodes_text
from open_instruct.planning import presentation
from open_instruct.planning.subject import units
from open_instruct.run import metrics_log, opening  # noqa: F401
from open_instruct.training import offline, scoring  # noqa: F401
from open_instruct.training.olmo_core import record  # noqa: F401
from open_instruct.training.rows import sample_loader  # noqa: F401
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

# The templates of what each run says are compiled at their first use: half a second.
text._macros(presentation.WORDS, counted=text.spell_count, nodes_text=nodes_text, units=units)
text._macros(report.REPORT)

nvtx.enable_nvtx = False  # marks for a profiler of CUDA, around each of DeepSpeed's calls
assert torch.get_num_threads() == 1, "threads do not live through a fork"

# What is imported stays; ranks that look for garbage in it would only copy its pages.
gc.freeze()
gc.enable()
