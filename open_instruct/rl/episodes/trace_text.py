"""Texts of turns as traces and reports have them."""

MAX_TRACE_CHARACTERS = 20_000


def cut_middle(text: str) -> str:
    """A text for a trace, without the middle of a long one."""
    num_left_out = len(text) - MAX_TRACE_CHARACTERS
    if num_left_out <= 0:
        return text
    half = MAX_TRACE_CHARACTERS // 2
    return f"{text[:half]}\n[… {num_left_out:,} characters are left out here …]\n{text[-half:]}"
