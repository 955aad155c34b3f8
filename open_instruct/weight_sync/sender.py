"""The learners' end of a weight sync: shards go to the engines bucket by bucket.

No rank ever holds the whole model.

Learners and receivers count buckets through the life of a channel, and report their progress in a
small key-value store that rank 0 keeps. The transport decides how bytes travel (`channel.py`).

For each rank of the learners::

    sender = WeightSender(model, names, backend="shm", dtype=torch.bfloat16, bucket_bytes=…, …)
    info = sender.open(num_receivers)     # rank 0's, for an engine's `open_channel`
    sender.join()                         # while the engines open the channel
    sender.send(version)                  # while the engines receive; again for every version
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from open_instruct.cluster.addresses import find_outward_address
from open_instruct.core.errors import RunError
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.lora.adapters import (
    find_adapted_layers,
    find_merged_weights,
    scale_adapters,
)
from open_instruct.models.lora.files import find_peft_name
from open_instruct.models.shards import LocalShard, find_local_shards, reshard
from open_instruct.parallel.process import run_on_main_process
from open_instruct.training.rows.sample_loader import build_ahead
from open_instruct.weight_sync.changes import SentParts, build_change_bucket, build_change_manifest
from open_instruct.weight_sync.channel import CPU, NUM_SLOTS, FindLocal, Outgoing
from open_instruct.weight_sync.manifest import Manifest, WeightManifest
from open_instruct.weight_sync.progress import HOST_RANK, SyncProgress, learner_name, list_receivers
from open_instruct.weight_sync.transports import ON_DEVICE, TRANSPORTS


class WeightSender:
    """Sends one rank's part of the weights of `model`; not an engine's end, which is a receiver.

    All methods but `close` are collective over the learners. The process group must have been
    started. Beside its shards a rank holds at most two buckets: rank 0 where it gathers, the others
    their parts of one, and with "shm" the host has two in shared memory.
    """

    def __init__(
        self,
        model: nn.Module,
        names: TensorNames,
        *,
        backend: str,
        dtype: torch.dtype,
        bucket_bytes: int,
        timeout_s: float,
        adapter_alone: bool = False,
        changes_alone: bool = False,
        check_every: int = 1,
    ) -> None:
        """Plan; nothing is allocated before `open`.

        Args:
            model: on any mesh (FSDP, HSDP, tensor parallel), plain, or with ranges of ZeRO beside
                its parameters.
            names: the map of the model's names.
            backend: the name of the transport, as `choose_transport` returns it.
            dtype: the dtype that weights travel in, which is the engines'.
            bucket_bytes: size of a bucket; a larger tensor travels in pieces.
            timeout_s: how long a receiver may take to join, and to take one bucket.
            adapter_alone: send only the adapter's matrices, by the names of its file, with the
                second of each layer scaled; otherwise send the model with any adapter merged.
            changes_alone: send what has changed since the version before; the first version of a
                channel is whole.
            check_every: of how many such versions one has digests, by which receivers see that they
                have it to the bit; 0 for none.
        """
        reshard(model)
        self._model = model
        self._adapter_alone = adapter_alone
        self._changes_alone = changes_alone
        self._check_every = check_every
        held_by_name = find_local_shards(model, adapters_only=adapter_alone)
        if adapter_alone:
            self._names = {find_peft_name(name, names): name for name in held_by_name}
        else:
            self._names = {hf_name: name for name, hf_name in names}
        self._rank = dist.get_rank()
        self._backend = backend
        self._learners = [learner_name(rank) for rank in range(dist.get_world_size())]
        self._timeout_s = timeout_s
        self._computes = adapter_alone or bool(find_adapted_layers(model))
        shards = {hf_name: held_by_name[name] for hf_name, name in self._names.items()}
        self.manifest = WeightManifest(
            {name: each.shape for name, each in shards.items()},
            {name: each.find_boxes(HOST_RANK) for name, each in shards.items()},
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            slabs={name: each.num_slabs for name, each in shards.items()},
        )
        self._device: torch.device = cast(Any, model).device if backend in ON_DEVICE else CPU
        self._progress: SyncProgress | None = None
        self._outgoing: Outgoing | None = None
        self._sent_parts: SentParts | None = None
        self._shards: Mapping[str, LocalShard] | None = None

    def open(self, num_receivers: int) -> dict[str, Any]:
        """Offer a channel, after closing an earlier one; then call `join`.

        Args:
            num_receivers: processes that hold weights of engines: tensor parallel size x engines.

        Returns:
            The facts that a receiver needs to connect, the same on every rank: plain types, to be
                pickled.

        Raises:
            RunError: there is no room in shared memory.
        """
        self.close()
        make_outgoing, _ = TRANSPORTS[self._backend]
        if self._rank not in self.manifest.ranks and not make_outgoing.serves_all:
            make_outgoing = Outgoing
        self._sent_parts = None
        travelling: Manifest = self.manifest
        if self._changes_alone:
            self._sent_parts = SentParts(self.manifest, rank=self._rank)
            travelling = build_change_manifest(self.manifest)
        self._outgoing = make_outgoing(travelling, index=self._rank, device=self._device)
        facts = self._outgoing.offer_together()
        info: dict[str, Any] = run_on_main_process(partial(self._offer, num_receivers))
        info |= facts
        self._info = info
        self._receivers = list_receivers(info)
        if self._rank != HOST_RANK:
            self._progress = SyncProgress.join(info, member=learner_name(self._rank))
        self._outgoing.join(info)
        return info

    def join(self) -> None:
        """Wait for the receivers to open the channel.

        Raises:
            RunError: some did not within the time-out; names them.
        """
        assert self._progress is not None and self._outgoing is not None, (
            "open() comes before join()"
        )
        try:
            self._progress.report("joined")
            self._progress.wait("joined", [*self._learners, *self._receivers], to="join")
            self._outgoing.connect(self._info, self._progress)
        except BaseException:
            self._close_outgoing()
            raise
        self._position = 0

    @torch.no_grad()
    def send(self, version: int) -> None:
        """Send all weights once; returns when every receiver has taken the last bucket.

        Raises:
            RunError: a receiver did not take its part within the time-out (names it), or failed.
                The channel is of no use then: open another one.
        """
        progress = self._progress
        if progress is None or self._outgoing is None:
            raise RunError("weight sync: there is no channel, or it broke; open() and join() first")
        find_local = self._make_finder()
        first = self._position
        try:
            progress.new_round()
            progress.wait(
                f"began/{first}", self._receivers, to=f"begin to receive version {version}"
            )
            if self._rank == HOST_RANK:
                progress.report(f"go/{first}")
            with closing(self._fill_buckets(self._outgoing, find_local, version)) as contents:
                self._send_buckets(self._outgoing, contents, version)
            progress.report(f"sent/{first}")
            if self._rank == HOST_RANK:  # the others still look into the store that this rank keeps
                progress.wait(
                    f"sent/{first}", self._learners, to=f"finish sending version {version}"
                )
        except BaseException as error:
            if not isinstance(error, RunError):
                progress.fail(f"{progress.member} failed: {type(error).__name__}: {error}")
            self._close_outgoing()  # the store stays, to tell the others why
            raise
        self._position += len(self.manifest.buckets)

    def close(self) -> None:
        """Give up the channel, if there is one; members that wait on it fail with the reason."""
        self._close_outgoing()
        self._progress = None
        self._shards = None

    def _make_finder(self) -> FindLocal:
        """Make a function that returns this rank's part of a weight, as it is now."""
        reshard(self._model)
        weights = self._shards
        if weights is None:
            find_weights = scale_adapters if self._adapter_alone else find_merged_weights
            weights = find_weights(self._model)
        # Shards stay where they are, and to find them again would take milliseconds.
        self._shards = None if self._computes else weights
        return lambda hf_name: weights[self._names[hf_name]].local

    def _offer(self, num_receivers: int) -> dict[str, Any]:
        """On rank 0: keep the store, prepare the transport, and return the facts of both."""
        assert self._outgoing is not None
        # Reachable by all peers and by the driver, which may be on another host.
        address = find_outward_address()
        self._progress = SyncProgress.host(address, timeout_s=self._timeout_s)
        return {
            "backend": self._backend,
            "address": address,
            "port": self._progress.store.port,
            "num_receivers": num_receivers,
            "timeout_s": self._timeout_s,
            "manifest": self.manifest.constructor_arguments(),
            "changes_alone": self._changes_alone,
            **self._outgoing.offer(),
        }

    def _fill_buckets(
        self, outgoing: Outgoing, find_local: FindLocal, version: int
    ) -> Generator[FindLocal]:
        """Yield the content of each bucket: weights, or a message about them.

        A thread makes messages while earlier ones travel.
        """
        num_buckets = len(self.manifest.buckets)
        if self._sent_parts is None:
            yield from [find_local] * num_buckets
            return
        has_digests = self._check_every > 0 and version % self._check_every == 0
        messages = self._sent_parts.encode_messages(find_local, has_digests=has_digests)

        def make_message(index: int) -> torch.Tensor:
            """Make the next message, and report its length to the receivers."""
            message = torch.cat(next(messages))
            outgoing.manifest.buckets[index] = build_change_bucket(
                self.manifest, index, {self._rank: len(message)}
            )
            outgoing.progress.report(f"size/{self._position + index}", str(len(message)))
            return message

        with closing(build_ahead(make_message, range(num_buckets))) as messages_ahead:
            for index, message in enumerate(messages_ahead):
                yield {str(index): message}.__getitem__

    def _send_buckets(
        self, outgoing: Outgoing, contents: Iterator[FindLocal], version: int
    ) -> None:
        """Put one bucket after the other, at most `NUM_SLOTS` ahead of the receivers."""
        num_buckets = len(self.manifest.buckets)
        for index in range(num_buckets + NUM_SLOTS):
            position = self._position + index
            if index >= NUM_SLOTS:
                taken_position = position - NUM_SLOTS
                to = (
                    f"take bucket {self.manifest.describe_bucket(taken_position)} of version "
                    f"{version}"
                )
                outgoing.progress.wait(
                    f"done/{taken_position}", self._receivers, to=to, meanwhile=outgoing.check
                )
            if index < num_buckets:
                outgoing.put(position, next(contents))

    def _close_outgoing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing = None
