"""open_instruct/dpo.py, with operations that give the same numbers every time wherever PyTorch has
such.
"""

import warnings

import torch

from open_instruct.commands.process import exit_process
from open_instruct.objectives.dpo import DPO
from open_instruct.train import run_objective

if __name__ == "__main__":
    warnings.filterwarnings("ignore", message=".*deterministic.*")  # what has none goes on
    torch.use_deterministic_algorithms(True, warn_only=True)
    exit_process(run_objective(DPO))
