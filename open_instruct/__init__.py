"""Post-training (DPO, GRPO) of open language models on OLMo-core, sharded as HSDP."""

import importlib.util
import os
import tempfile

__version__ = "0.1.0"

# OLMo-core, once imported, makes a folder in /tmp for each process, for what Triton compiles, and leaves it there.
if importlib.util.find_spec("triton") is None:
    os.environ.setdefault("OLMO_DISABLE_PER_RANK_TRITON_CACHE", "1")
else:
    os.environ.setdefault("OLMO_TRITON_CACHE_BASE", os.path.join(tempfile.gettempdir(), f"olmo-triton-{os.getuid()}"))
