"""The memory of a GPU: what it holds from step to step, and what comes and goes within one."""
