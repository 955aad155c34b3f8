"""The spelling of a plan's numbers, for terminal and HTML page alike."""

MIB = 2**20
GIB = 2**30


def gib(num_bytes: float, unit: int = GIB) -> str:
    """Spell an amount in GiB or in another unit: "61.2", or "0.03" with a digit that is not 0."""
    value = num_bytes / unit
    if value == 0 or value >= 0.095:
        return f"{value:,.1f}"
    return f"{value:.2f}"


def seconds(value: float) -> str:
    """Spell a time: "12.3 s", "45 ms", "0.3 ms"."""
    if value >= 10:
        return f"{value:,.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 0.01:
        return f"{value * 1e3:.0f} ms"
    return f"{value * 1e3:.1f} ms"


def billions(count: float) -> str:
    """Spell a number of parameters: "7.3B", "494M", "12K"."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return f"{count:.0f}"
