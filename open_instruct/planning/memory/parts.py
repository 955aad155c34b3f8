"""The names of the parts of a GPU's memory, and the type of a moment: bytes by these names."""

from collections.abc import Mapping

# What a training process holds.
PARAMETERS = "parameters"
GRADIENTS = "gradients"
OPTIMIZER = "optimizer states"
GATHERED = "gathered weights"
REDUCED = "gradients on their way"
ACTIVATIONS = "activations"
HEAD = "head and logits"
TEMPORARIES = "temporaries"
BUFFERS = "buffers"
SCRATCH = "scratch of kernels"
ENGINE = "vLLM engine"
CUDA = "CUDA and libraries"
INTERPRETER = "interpreter and libraries"  # of a process without a GPU

# The one of two models that is at rest.
POLICY = "policy"
CRITIC = "critic"

# In the host's memory.
INPUTS = "inputs of blocks"
CHECKPOINT = "a copy to write checkpoints from"
SENT = "weights as engines have them, to find what has changed"

Moment = Mapping[str, int]
