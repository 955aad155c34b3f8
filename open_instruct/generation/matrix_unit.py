"""The matrix unit of an x86 processor (AMX), which Linux gives to a process that asks for it.

vLLM 0.32's attention in bfloat16 does not ask. Unless something else has by then, such as a product
of oneDNN that is large enough, the process is ended by SIGILL.
"""

from typing import Any

import torch


def allow_matrix_unit(worker: Any) -> None:
    """Ask for it in the process of a vLLM worker, if its processor has one."""
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
