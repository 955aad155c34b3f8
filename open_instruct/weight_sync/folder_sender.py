"""The learners' end of a weight sync through a folder; no engine needs to be there."""

import json
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from open_instruct.checkpoints.safe_checkpointer import together
from open_instruct.core.errors import RunError
from open_instruct.core.files import replace_text
from open_instruct.parallel.process import gather_objects, run_on_main_process
from open_instruct.weight_sync.changes import Message, SentParts
from open_instruct.weight_sync.folder import Link, MessagePlace, WrittenMessages, digest_message
from open_instruct.weight_sync.progress import HOST_RANK
from open_instruct.weight_sync.sender import WeightSender


def _draw_chain_name(folder: Path) -> str:
    """The path that the files of a new chain begin with."""
    return str(folder / os.urandom(4).hex())


class FolderSender(WeightSender):
    """Writes one rank's part of the weights of `model` into a folder, version by version.

    Without `changes_alone` every version is an anchor. With it an anchor begins a chain of
    `anchor_every` versions, or of fewer: once the versions behind it have as many bytes as the
    anchor, a new anchor is less to read for an engine that comes late.

    Args:
        folder: where to write.
        anchor_every: of how many versions one is whole. The other arguments are those of a
            `WeightSender`.
    """

    def __init__(
        self,
        *arguments: Any,
        folder: Path,
        anchor_every: int = 16,
        **others: Any,
    ) -> None:
        super().__init__(*arguments, **others)
        self._folder = folder
        self._anchor_every = anchor_every

    def open(self, num_receivers: int) -> dict[str, Any]:
        """Begin a chain and remove all others; returns the facts that any receiver needs."""
        self._links: list[Link] = []  # of the chain, while another version may build on it
        self._chain: str = run_on_main_process(partial(_draw_chain_name, self._folder))
        together(partial(self._remove_all_but, ""), kind=self._failure)
        facts = {
            "backend": self._backend,
            "chain": self._chain,
            "manifest": self.manifest.constructor_arguments(),
        }
        return facts | {"changes_alone": True}  # receivers stage what they read from a folder

    def join(self) -> None:
        """Return at once: no receiver has to come."""

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Write a version, unless it is there; returns once it can be read.

        Raises:
            RunError: a rank could not write; names it with the reason. The next version is an
                anchor then.
        """
        if self._links and self._links[-1].version == version:
            return  # for an engine that came later
        links = [] if self._is_anchor_due() else self._links
        self._links = []  # nothing builds on a version that was not completed
        if not links:
            self._sent_parts = SentParts(self.manifest, rank=self._rank)
        assert self._sent_parts is not None
        has_digests = self._check_every > 0 and version % self._check_every == 0
        # All are encoded before one is written: encoding may be collective, and a full disk would
        # stop one rank alone.
        messages = list(
            self._sent_parts.encode_messages(self._make_finder(), has_digests=has_digests)
        )
        builds_on = links[-1].version if links else None
        write = partial(self._write, version, builds_on, messages)
        rank_messages = gather_objects(together(write, kind=self._failure))
        link = Link(version=version, builds_on=builds_on, messages=rank_messages)
        together(partial(self._add_link, link), kind=self._failure)
        self._links = [*links, link]
        if not self._changes_alone:
            self._sent_parts = None

    def _is_anchor_due(self) -> bool:
        if not self._links or not self._changes_alone or len(self._links) == self._anchor_every:
            return True
        return sum(link.num_bytes for link in self._links[1:]) >= self.manifest.num_bytes

    def _write(
        self, version: int, builds_on: int | None, messages: list[Message]
    ) -> WrittenMessages:
        """Write this rank's messages; nobody reads them before there is a link."""
        places: WrittenMessages = []
        if self._rank not in self.manifest.ranks:
            return places
        with Path(f"{self._chain}-{version}.{self._rank}").open("wb") as file:
            for index, message in enumerate(messages):
                place = MessagePlace(
                    chain=Path(self._chain).name,
                    version=version,
                    builds_on=builds_on,
                    rank=self._rank,
                    index=index,
                    num_messages=len(messages),
                )
                flat = torch.cat(message).numpy().data
                file.write(flat)
                places.append((len(flat), digest_message(flat, place)))
        return places

    def _add_link(self, link: Link) -> None:
        """Write a version's link, so that it can be read; an anchor replaces earlier versions."""
        if self._rank == HOST_RANK:
            name = f"{self._chain}-{link.version}"
            text = json.dumps(asdict(link))
            replace_text(Path(f"{name}.json"), text, durable=False)  # no later run reads it
            if link.builds_on is None:
                self._remove_all_but(name)

    def _remove_all_but(self, name: str) -> None:
        """Remove the files of all other versions, which no engine reads any more."""
        if self._rank != HOST_RANK:
            return
        for path in self._folder.iterdir():
            if path.stem != Path(name).name:
                path.unlink()

    def _failure(self, why: str) -> RunError:
        room = (
            f"{3 * self.manifest.num_bytes / 2**30:.1f} GiB, three times the weights, in a "
            "folder that all hosts see"
        )
        remedy = f"it takes up to {room}: make room, or name another --weight_sync_folder"
        return RunError(f"weight sync: {self._folder} cannot be written: {why}; {remedy}")
