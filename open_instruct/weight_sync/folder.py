"""Weights through a folder that learners and engines see: what is in it, and a receiver's copy that
follows it.

Every learner writes its messages about a version (`changes.py`), one bucket behind the other, into
a file of its own. Once all have, learner 0 puts the version's link beside them, a small JSON file,
in one move; before that there is no such version. A link builds on the version before it, or on
none: an anchor, which is whole::

    5f0c9a1e-16.0        learner 0's messages
    5f0c9a1e-16.1        learner 1's
    5f0c9a1e-16.json     {"version": 16, "builds_on": null, "messages": [[[2048, "9c1f…"], …], …]}
    5f0c9a1e-17.0        …

First stands the name of the chain. The driver tells receivers this name and the version, the folder
tells all else. A message's digest is of its bytes and of its place: chain, version, what that
builds on, rank, number. So a file or a link that was copied to another version's name, or
shortened, has other digests than it says.
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

# Hidden files are links that a killed learner left half written, or a file system's own.
OWN_FILE = re.compile(r"\.|[0-9a-f]{8}-\d+\.")
Written = list[tuple[int, str]]
"""The messages in a file: of each the number of its bytes, and its digest (`digest_message`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One version in a folder: what it builds on, None for an anchor, and what each rank has
    written for it.

    Example: in `Link(version=17, builds_on=16, messages=[[(48, "9c1f…"), (0, "2d06…")], []])`
    learner 0 has no part of the second bucket, and learner 1 has no file.
    """

    version: int
    builds_on: int | None
    messages: list[Written]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for written in self.messages for num_bytes, _ in written)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePlace:
    """Where a message belongs: the chain's name, the version, what that builds on, the rank, and
    its number there.

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
    """A receiver's copy of all weights, brought from version to version by what learners wrote."""

    def __init__(self, info: Mapping[str, Any], *, index: int) -> None:
        """Read nothing yet;

        `info` is as `FolderSender.open` gave it, `index` is of this receiver, from 0.
        """
        self.chain: str = info["chain"]
        self._name = receiver_name(index)
        self._manifest = WeightManifest(**info["manifest"])
        self._mirror = Mirror(self._manifest)
        self._version: int | None = None  # of the copy

    def stage(self, version: int) -> None:
        """Bring the copy to `version`, which `buckets` yields then.

        Raises:
            RunError: a file is missing, or has other bytes than were written, or the copy has other
                bits than were sent. It is of no version then: whatever is staged next is read from
                an anchor on.
        """
        before = self._version
        self._version = None
        try:
            for link in links_to(version, self.chain, since=before):
                self._check_messages(link)
                for rank, written in enumerate(link.messages):
                    if written:
                        self._take(rank, written, link)
        # The last four of a false link.
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
        """:raises ValueError: a rank that holds weights has another number of messages than there
        are buckets.
        """
        for rank in {*range(len(link.messages)), *self._manifest.ranks}:
            num_messages = len(link.messages[rank]) if rank < len(link.messages) else 0
            expected = len(self._manifest.buckets) if rank in self._manifest.ranks else 0
            if num_messages != expected:
                link_name = f"{Path(self.chain).name}-{link.version}.json"
                raise ValueError(
                    f"{link_name} has {num_messages} messages of rank {rank}, which has {expected}"
                )

    def _take(self, rank: int, written: Written, link: Link) -> None:
        """Take in what a rank tells, each message after a look at its digest."""
        path = Path(f"{self.chain}-{link.version}.{rank}")
        with path.open("rb") as file:
            for index, (num_bytes, digest) in enumerate(written):
                message = torch.empty(num_bytes, dtype=torch.uint8)
                num_read = file.readinto(message.numpy().data)
                place = MessagePlace(
                    chain=Path(self.chain).name,
                    version=link.version,
                    builds_on=link.builds_on,
                    rank=rank,
                    index=index,
                    num_messages=len(written),
                )
                # What a torn file lacks is left as it was in memory, which by chance may be the
                # message read before.
                if num_read != num_bytes or digest_message(message.numpy().data, place) != digest:
                    raise ValueError(
                        f"{path.name} is torn, or is another one's ({index + 1} of {len(written)})"
                    )
                if num_bytes and (name := self._mirror.change(index, rank, message)) is not None:
                    raise ValueError(
                        f"after {path.name} there are other bits of {name} than were sent"
                    )


def links_to(version: int, chain: str, *, since: int | None) -> list[Link]:
    """What to read in order to have `version`: the links after `since`, or those from the anchor if
    that is later.

    Raises:
        ValueError: a link is another version's, or builds on no earlier one.
    """
    links: list[Link] = []
    wanted: int | None = version
    while wanted is not None and wanted != since:
        path = Path(f"{chain}-{wanted}.json")
        link = Link(**json.loads(read_whole(path)))
        if link.version != wanted:
            raise ValueError(f"{path.name} is the link of version {link.version}")
        if link.builds_on is not None and link.builds_on >= link.version:
            raise ValueError(
                f"{path.name} builds on version {link.builds_on}, which is no earlier one"
            )
        links.insert(0, link)
        wanted = link.builds_on
    return links


def choose_sync_folder(asked: str | None, run_folder: Path) -> Path:
    """The folder of one run, within --weight_sync_folder if that was `asked`, which several runs
    may have in common.
    """
    own = run_folder.resolve()
    if asked is None:
        return own / "weight_sync"
    return Path(asked).resolve() / f"{own.name}-{xxhash.xxh3_64_hexdigest(str(own).encode())}"


def make_folder(folder: Path) -> Path:
    """:raises InputError: it cannot be made; or it is a link, or has other files, where a run
    removes what there is.
    """
    try:
        folder.mkdir(exist_ok=True)
        others = [each.name for each in folder.iterdir() if not OWN_FILE.match(each.name)]
    except OSError as error:
        remedy = "name a folder that is there, and that all hosts can see and write"
        raise InputError(
            f"--weight_sync_folder {folder.parent}: {error.strerror}; {remedy}",
            kind="unreadable_file",
        ) from error
    if others or folder.is_symlink():
        what = f"has {others[0]}, which is of no weight sync" if others else "is a link"
        remedy = "move it, or name another --weight_sync_folder"
        raise InputError(
            f"{folder} {what}, and a run empties that folder: {remedy}", kind="other_run"
        )
    return folder
