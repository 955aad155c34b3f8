"""The seeds of requests depend only on the run's seed and a request's place in the run."""

import hashlib


def sampling_seed(*parts: int | str) -> int:
    """63 bits that are the same on every machine and in every version of Python.

    Example: `sampling_seed(run_seed, ticket, sample_index)`.
    """
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
