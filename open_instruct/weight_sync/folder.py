"""Weights go through a folder: what is in it, and how a receiver's copy follows it.

Every learner writes its messages about a version (`changes.py`), one bucket behind the other, into
a file of its own. Once all have, learner 0 adds the version's link, a small JSON file, in one move;
before that the version does not exist. A link builds on the version before it. A link that builds
on none is an anchor, and its messages hold the whole weights::

    5f0c9a1e-16.0        learner 0's messages
    5f0c9a1e-16.1        learner 1's
    5f0c9a1e-16.json     {"version": 16, "builds_on": null, "messages": [[[2048, "9c1f…"], …], …]}
    5f0c9a1e-17.0        …

A file's name begins with that of the chain. The driver tells receivers this name and the version;
all else they read from the folder. A message's digest is of its bytes and of its place: chain,
version, what that builds on, rank, number. So a file or a link that was shortened, or copied to
another version's name, does not have the digests that the link gives.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from open_instruct.core.errors import InputError, RunError
from open_instruct.core.files import read_whole
from open_instruct.weight_sync.changes import Mirror
from open_instruct.weight_sync.manifest import WeightManifest
from open_instruct.weight_sync.progress import receiver_name

# Hidden files are links that a killed learner left half written, or the file system's.
SYNC_FILE = re.compile(r"\.|[0-9a-f]{8}-\d+\.")
WrittenMessages = list[tuple[int, str]]
"""The messages in a file: the number of bytes and the digest (`digest_message`) of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version in a folder: what it builds on (None for an anchor), and each rank's messages.

    Example: in `Link(version=17, builds_on=16, messages=[[(48, "9c1f…"), (0, "2d06…")], []])`
    learner 0 has no part of the second bucket, and learner 1 has no file.
    """

    version: int
    builds_on: int | None
    messages: list[WrittenMessages]

    @property
    def num_bytes(self) -> int:
        num_bytes = 0
        for rank_messages in self.messages:
            num_bytes += sum(size for size, _ in rank_messages)
        return num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlace:
    """Where a message belongs: to which chain, version and rank, and as which of its messages.

    Example: `MessagePlace(chain="5f0c9a1e", version=17, builds_on=16, rank=0, index=2,
    num_messages=9)` is the third of learner 0's nine messages about version 17.
    """

    chain: str
    version: int
    builds_on: int | None
    rank: int
    index: int
    num_messages: int


def digest_message(message: memoryview, place: MessagePlace) -> str:
    """XXH3 of the message's place and bytes, in hexadecimal digits."""
    digest = xxhash.xxh3_64(repr(place).encode())
    digest.update(message)
    return digest.hexdigest()


class FolderWeights:
    """A receiver's copy of all weights, which follows the versions that learners write."""

    def __init__(self, info: Mapping[str, Any], *, index: int) -> None:
        """Make an empty copy; nothing is read yet.

        Args:
            info: as `FolderSender.open` returned it.
            index: of this receiver, from 0.
        """
        self.chain: str = info["chain"]
        self._name = receiver_name(index)
        self._manifest = WeightManifest(**info["manifest"])
        self._mirror = Mirror(self._manifest)
        self._version: int | None = None  # of the copy

    def stage(self, version: int) -> None:
        """Bring the copy to `version`; `buckets` yields it from then on.

        Raises:
            RunError: a file is missing, its bytes are not those that were written, or the copy's
                bits are not those that were sent. Then the copy has no version, and the next call
                reads from an anchor on.
        """
        before = self._version
        self._version = None
        try:
            for link in find_links(version, self.chain, known_version=before):
                self._check_messages(link)
                for rank, rank_messages in enumerate(link.messages):
                    if rank_messages:
                        self._apply_file(rank, rank_messages, link)
        # A false link raises the last four.
        except (OSError, LookupError, RuntimeError, TypeError, ValueError) as error:
            where = f"version {version} in {Path(self.chain).parent}, which all hosts need to see"
            raise RunError(
                f"weight sync: {self._name} could not read {where}: {error}; all is written anew"
            ) from error
        self._version = version

    def buckets(self) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """All weights, by name, in one go."""
        yield self._mirror.weights()

    def fail(self, error: BaseException) -> None:
        """Do nothing: the driver gets the error, and no sender waits for this receiver."""

    def close(self) -> None:
        """Nothing is open between two versions."""

    def _check_messages(self, link: Link) -> None:
        """Check that a link has a message for each bucket, of each rank that sends.

        Raises:
            ValueError: names the first rank of which it has another number.
        """
        for rank in {*range(len(link.messages)), *self._manifest.ranks}:
            num_messages = 0
            if rank < len(link.messages):
                num_messages = len(link.messages[rank])
            expected = 0
            if rank in self._manifest.ranks:
                expected = len(self._manifest.buckets)
            if num_messages != expected:
                link_name = f"{Path(self.chain).name}-{link.version}.json"
                raise ValueError(
                    f"{link_name} has {num_messages} messages of rank {rank}, which has {expected}"
                )

    def _apply_file(self, rank: int, rank_messages: WrittenMessages, link: Link) -> None:
        """Put a rank's messages in place, after the digest of each is checked."""
        path = Path(f"{self.chain}-{link.version}.{rank}")
        with path.open("rb") as file:
            for index, (num_bytes, digest) in enumerate(rank_messages):
                message = torch.empty(num_bytes, dtype=torch.uint8)
                num_read = file.readinto(message.numpy().data)
                place = MessagePlace(
                    chain=Path(self.chain).name,
                    version=link.version,
                    builds_on=link.builds_on,
                    rank=rank,
                    index=index,
                    num_messages=len(rank_messages),
                )
                # Behind the end of a torn file memory may by chance hold the message read before.
                if num_read != num_bytes or digest_message(message.numpy().data, place) != digest:
                    raise ValueError(
                        f"{path.name} is torn, or is another one's ({index + 1} of "
                        f"{len(rank_messages)})"
                    )
                if num_bytes == 0:
                    continue
                name = self._mirror.apply_message(index, rank, message)
                if name is not None:
                    raise ValueError(
                        f"after {path.name} there are other bits of {name} than were sent"
                    )


def find_links(version: int, chain: str, *, known_version: int | None) -> list[Link]:
    """Find the links that lead to `version`: those after `known_version`, or from an anchor on.

    Raises:
        ValueError: a link is another version's, or builds on no earlier one.
    """
    links: list[Link] = []
    wanted_version: int | None = version
    while wanted_version is not None and wanted_version != known_version:
        path = Path(f"{chain}-{wanted_version}.json")
        link = Link(**json.loads(read_whole(path)))
        if link.version != wanted_version:
            raise ValueError(f"{path.name} is the link of version {link.version}")
        if link.builds_on is not None and link.builds_on >= link.version:
            raise ValueError(
                f"{path.name} builds on version {link.builds_on}, which is no earlier one"
            )
        links.insert(0, link)
        wanted_version = link.builds_on
    return links


def choose_sync_folder(flag: str | None, run_folder: Path) -> Path:
    """Choose the folder for the weights of one run.

    Args:
        flag: the value of --weight_sync_folder, in which several runs may each have a folder.
    """
    run_folder = run_folder.resolve()
    if flag is None:
        return run_folder / "weight_sync"
    digest = xxhash.xxh3_64_hexdigest(str(run_folder).encode())
    return Path(flag).resolve() / f"{run_folder.name}-{digest}"


def make_folder(folder: Path) -> Path:
    """Make the folder, in which a run removes all files; returns it.

    Raises:
        InputError: it cannot be made, it is a link, or it has files of something else.
    """
    try:
        folder.mkdir(exist_ok=True)
        others = [each.name for each in folder.iterdir() if not SYNC_FILE.match(each.name)]
    except OSError as error:
        remedy = "name a folder that is there, and that all hosts can see and write"
        raise InputError(
            f"--weight_sync_folder {folder.parent}: {error.strerror}; {remedy}",
            kind="unreadable_file",
        ) from error
    if others or folder.is_symlink():
        problem = "is a link"
        if others:
            problem = f"has {others[0]}, which is of no weight sync"
        remedy = "move it, or name another --weight_sync_folder"
        raise InputError(
            f"{folder} {problem}, and a run empties that folder: {remedy}", kind="other_run"
        )
    return folder
