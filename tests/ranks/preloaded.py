"""What the fork server imports, once a session, for all ranks of all tests."""

from __future__ import annotations

import gc

import torch

import open_instruct  # noqa: F401  (before OLMo-core, which it keeps from writing into /tmp)
from tests.ranks.jobs import checkpoints, grpo_reference, replayed_run, traffic, train_runs, weight_sync  # noqa: F401

assert torch.get_num_threads() == 1, "threads do not live through a fork"

# What is imported stays; ranks that look for garbage in it would only copy its pages.
gc.collect()
gc.freeze()
