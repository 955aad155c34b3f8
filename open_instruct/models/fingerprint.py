"""A fingerprint of the weights in a checkpoint, from their bytes alone."""

import hashlib
import json
from pathlib import Path

import xxhash
from olmo_core.distributed.utils import get_rank, get_world_size

from open_instruct.models.hf.checkpoint_files import CheckpointFiles
from open_instruct.parallel.process import gathered

CHUNK_BYTES = 64 * 2**20
# Fields of config.json about the file's history, which do not change the forward pass.
NOT_COMPUTED_WITH = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures", "use_cache")


def weights_fingerprint(files: CheckpointFiles) -> str:
    """32 hexadecimal digits that change if any byte of the safetensors files does. Collective.

    The files are cut into chunks whose digests the ranks share out among themselves, so every byte is
    read once whatever the number of ranks, and the result is the same for any number. The folder and the
    names of the files do not matter.

    :param files: the opened checkpoint; all ranks see the same files.
    """
    # Chunks in the order of the files' names; no chunk crosses two files.
    chunks = [(path, start) for path in files.paths for start in range(0, path.stat().st_size, CHUNK_BYTES)]
    own = {number: _digest(*chunks[number]) for number in range(get_rank(), len(chunks), get_world_size())}
    digests = {number: digest for rank_digests in gathered(own) for number, digest in rank_digests.items()}
    return xxhash.xxh3_128(b"".join(digests[number] for number in range(len(chunks)))).hexdigest()


def with_config(weights: str, config: dict[str, object]) -> str:
    """A fingerprint of weights and config: the same tensors with another window are another model."""
    computed_with = {name: value for name, value in config.items() if name not in NOT_COMPUTED_WITH}
    return hashlib.sha256((weights + json.dumps(computed_with, sort_keys=True, default=str)).encode()).hexdigest()


def _digest(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return xxhash.xxh3_128_digest(file.read(CHUNK_BYTES))
