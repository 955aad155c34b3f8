"""The spelling of a plan's numbers, and the names of the parts of a GPU's memory, for terminal and
HTML page alike.
"""

GIB = 2**30


def gib(num_bytes: float, unit: int = GIB) -> str:
    """ "61.2", or "0.03": small amounts keep a digit that is not 0.

    In another unit, if one is given.
    """
    value = num_bytes / unit
    return f"{value:,.1f}" if value == 0 or value >= 0.095 else f"{value:.2f}"


def seconds(value: float) -> str:
    """ "12.3 s", "45 ms", "0.3 ms"."""
    if value >= 10:
        return f"{value:,.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def billions(count: float) -> str:
    """ "7.3B" parameters, "494M", "12K"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
