"""Post-training (DPO, GRPO) of open language models on OLMo-core, sharded as HSDP."""

import logging
import os

__version__ = "0.1.0"

# OLMo-core, once imported, makes a folder in /tmp for each process, for what Triton compiles, and
# leaves it there. Ranks have one of their own by parallel/triton_cache.py.
os.environ.setdefault("OLMO_DISABLE_PER_RANK_TRITON_CACHE", "1")

# transformers imports torchao in every process where it is installed, --float8_linears or not. What
# PyTorch then says of two of its classes, and torchao of kernels for other machines, is no warning
# to anybody.
logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
logging.getLogger("torchao").setLevel(logging.ERROR)

# OLMo-core and vLLM import what compiles extensions. On a machine with CUDA's compiler and no GPU,
# PyTorch then says at the head of every run that it finds no CUDA runtime. A run itself says on
# which device it is.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
