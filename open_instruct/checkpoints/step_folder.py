"""The folder of one checkpoint, `step{N}`: its files, their digests, its publishing and removal.

It is written as `step{N}-tmp` and renamed. The last file written is `checkpoint.json`, which has
size and digest of every other. A folder that is removed or damaged gets another name first, so that
half of a checkpoint is never named `step{N}`.

    checkpoint.json       format, step, start model; size and digest of the files and of itself
    index.json            which box of which tensor is in which file; values that are no tensors
    rank{R}.safetensors   the boxes that rank R wrote
    rank{R}.json          the trainer's state on rank R
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from glob import glob
from pathlib import Path
from typing import Any

import torch
import xxhash
from olmo_core.utils import wait_for

from open_instruct.core.errors import InputError
from open_instruct.core.files import sync_folder
from open_instruct.models.box_files import WrittenFile, hash_file, write_hashed, write_tensors

FORMAT = 3
PART = "-tmp"
REMOVED = "-removed"
DAMAGED = "-damaged"
MANIFEST = "checkpoint.json"
INDEX = "index.json"
NAME = re.compile(r"step(0|[1-9]\d*)")
# Each checkpoint in OLMo-core's own format, which is pickle, has one of these.
OLMO_CORE = (".metadata", ".metadata.json", "train", "model_and_optim")

VISIBLE_WITHIN_S = 120.0  # a folder that another node made on a file system that is shared

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""The errors of reading JSON that may have any form."""

Files = Mapping[str, WrittenFile]


class Damaged(ValueError):
    """A checkpoint is not what was written; the message names the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of `checkpoint.json`.

    Example: `Manifest(step=4, num_ranks=2, start_model="9f…", files={"index.json": WrittenFile(…),
    …})`.
    """

    step: int
    num_ranks: int
    start_model: str
    files: Files


def write_own_files(
    part: Path,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    documents: Mapping[str, Any],
) -> Files:
    """Write this rank's files of a checkpoint; nothing here is collective."""
    wait_for(part.exists, f"waiting for {part}", timeout=VISIBLE_WITHIN_S)
    name = f"rank{rank}.safetensors"
    written = {
        name: write_hashed(part / name, [json.dumps(content).encode()])
        for name, content in documents.items()
    }
    return {name: write_tensors(part / name, tensors)} | written


def write_manifest(folder: Path, manifest: Manifest) -> None:
    content = {"format": FORMAT} | asdict(manifest)
    text = json.dumps({"checkpoint": content, "xxh3": hash_content(content)}, indent=1) + "\n"
    write_hashed(folder / MANIFEST, [text.encode()])
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read `checkpoint.json` and check its digest.

    Raises:
        Damaged: it is missing, or not what was written.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise Damaged(f"{path} is missing")
    try:
        document = json.loads(path.read_bytes())
        content = document["checkpoint"]
        if document["xxh3"] != hash_content(content) or content.pop("format") != FORMAT:
            raise ValueError
        files = {name: WrittenFile(**file) for name, file in content.pop("files").items()}
        if any(name != Path(name).name or name in ("", "..") for name in files):
            raise ValueError
        manifest = Manifest(files=files, **content)
    except UNREADABLE as error:
        reason = ""
        if isinstance(error, OSError):
            reason = f" ({error.strerror})"
        raise Damaged(f"{path} is not what was written{reason}") from error
    match = NAME.fullmatch(folder.name.removesuffix(PART))
    if match and int(match[1]) != manifest.step:
        raise Damaged(f"{folder} is a copy of another checkpoint, that of step {manifest.step}")
    return manifest


def find_damage(folder: Path, *, share: int = 0, num_shares: int = 1) -> list[str]:
    """Find the problems of a checkpoint: of its manifest, or else of a share of its files.

    Args:
        share: which of `num_shares` shares of the files is read.
    """
    try:
        manifest = read_manifest(folder)
    except Damaged as error:
        return [str(error)]
    files = sorted(manifest.files.items())[share::num_shares]
    damage = [find_file_damage(folder / name, written) for name, written in files]
    return [problem for problem in damage if problem is not None]


def find_file_damage(path: Path, written: WrittenFile) -> str | None:
    """The problem of a checkpoint's file; None if it is what was written."""
    try:
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != written.num_bytes or hash_file(path) != written.xxh3:
            return f"{path} is not what was written"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step"))


def find_candidates(folder: Path) -> list[Path]:
    """Find the folders that are named like checkpoints and are not empty, newest step first."""
    # Another rank may be removing one of them: glob() ignores a folder that is gone.
    files = glob("step*/*", root_dir=folder, include_hidden=True)
    folders = {folder / Path(file).parent for file in files}
    candidates = [path for path in folders if NAME.fullmatch(path.name)]
    return sorted(candidates, key=step_of, reverse=True)


def find_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest step first."""
    return [path for path in reversed(find_candidates(folder)) if (path / MANIFEST).is_file()]


def latest_step(folder: Path) -> int | None:
    """Step of the newest complete checkpoint, or None."""
    return next((step_of(path) for path in reversed(find_checkpoints(folder))), None)


def refuse_another_format(folder: Path) -> None:
    """Refuse a run folder that has checkpoints only in OLMo-core's own format.

    Raises:
        InputError: names the checkpoint.
    """
    others = [
        path
        for path in find_candidates(folder)
        if any((path / name).exists() for name in OLMO_CORE)
    ]
    if others and not find_checkpoints(folder):
        raise InputError(
            f"{others[0]} is a checkpoint of OLMo-core's own format, which a run here cannot go on "
            "from: give it as --model_name_or_path to start from its weights, and another "
            "--output_dir",
            kind="bad_checkpoint",
        )


def refuse_another_start_model(checkpoint: Path, fingerprint: str) -> None:
    """Refuse a checkpoint of a run that began with another start model.

    Raises:
        InputError: `fingerprint` is not that of the checkpoint's start model.
    """
    if read_manifest(checkpoint).start_model != fingerprint:
        raise InputError(
            f"the start model is not the one that the run of {checkpoint} began with: its weights "
            "or its config.json were changed in place. Put those back to go on, or start afresh "
            "with another --output_dir or --overwrite_output_dir",
            kind="other_run",
        )


def add_suffix(final: Path, suffix: str = PART) -> Path:
    """The folder beside a checkpoint whose name has `suffix`; by default the one to write in."""
    return final.with_name(final.name + suffix)


def begin(final: Path) -> Path:
    """Make an empty folder to write in, until it is published as `final`."""
    part = add_suffix(final)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    return part


def publish(part: Path, final: Path) -> None:
    """Give a complete folder its final name. A checkpoint that has this name is replaced."""
    old: Path | None = None
    if final.exists():
        old = set_aside(final, REMOVED)
    part.replace(final)
    sync_folder(final.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path) -> None:
    """Remove a checkpoint. It is renamed first, as half of one must not have its name."""
    shutil.rmtree(set_aside(folder, REMOVED), ignore_errors=True)


def tidy(folder: Path) -> None:
    """Remove what a killed run left half written or half removed, and publish what is complete."""
    for part in folder.glob(f"step*{PART}"):
        final = part.with_name(part.name.removesuffix(PART))
        try:
            read_manifest(part)
            part.replace(final)  # fails where one of that name is there, which then is the newer
        except (Damaged, OSError):
            shutil.rmtree(part, ignore_errors=True)
    for gone in folder.glob(f"step*{REMOVED}"):
        shutil.rmtree(gone, ignore_errors=True)


def set_aside(folder: Path, suffix: str) -> Path:
    """Give a checkpoint's folder a name with `suffix`, and return its path.

    So a damaged one can still be looked at.
    """
    aside = add_suffix(folder, suffix)
    shutil.rmtree(aside, ignore_errors=True)
    return folder.replace(aside)


def hash_content(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_128(text.encode()).hexdigest()
