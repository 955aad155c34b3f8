"""Weights from the learners' shards to the engines, bucket by bucket; no rank ever holds the whole
model.

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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from open_instruct.cluster.addresses import outward_address
from open_instruct.core.errors import RunError
from open_instruct.models.hf.names import TensorNames
from open_instruct.models.lora.adapters import layers_of, scaled_adapters, weights_of
from open_instruct.models.lora.files import file_name_of
from open_instruct.models.shards import Held, held_of, reshard
from open_instruct.parallel.process import on_main_process
from open_instruct.training.rows.sample_loader import built_ahead
from open_instruct.weight_sync.changes import SentParts, bucket_of_changes, manifest_of_changes
from open_instruct.weight_sync.channel import CPU, NUM_SLOTS, FindLocal, Outgoing
from open_instruct.weight_sync.manifest import WeightManifest
from open_instruct.weight_sync.progress import HOST_RANK, SyncProgress, learner_name, list_receivers
from open_instruct.weight_sync.transports import ON_DEVICE, TRANSPORTS


class WeightSender:
    """One rank's part in sending the weights of `model`. All methods but `close` are collective
    over the learners.

    The process group must have been started. Beside its shards a rank holds at most two buckets:
    rank 0 where it gathers, the others their parts of one, and with "shm" the host has two in
    shared memory.
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
            model: on any mesh: FSDP, HSDP, tensor parallel, or plain; or with ranges of ZeRO beside
                its parameters.
            names: the map of the model's names.
            backend: as `choose_transport` gives it.
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
        held_by_name = held_of(model, adapters_only=adapter_alone)
        pairs = (
            ((name, file_name_of(name, names)) for name in held_by_name) if adapter_alone else names
        )
        self._name_of = {hf_name: name for name, hf_name in pairs}
        self._rank = dist.get_rank()
        self._backend = backend
        self._learners = [learner_name(rank) for rank in range(dist.get_world_size())]
        self._timeout_s = timeout_s
        self._computes = adapter_alone or bool(layers_of(model))
        held = {hf_name: held_by_name[name] for hf_name, name in self._name_of.items()}
        self.manifest = WeightManifest(
            {name: each.shape for name, each in held.items()},
            {name: each.beside(HOST_RANK) for name, each in held.items()},
            dtype=dtype,
            bucket_bytes=bucket_bytes,
            slabs={name: each.num_slabs for name, each in held.items()},
        )
        self._device: torch.device = cast(Any, model).device if backend in ON_DEVICE else CPU
        self._progress: SyncProgress | None = None
        self._outgoing: Outgoing | None = None
        self._sent: SentParts | None = None
        self._held: Mapping[str, Held] | None = None

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
        outgoing, _ = TRANSPORTS[self._backend]
        kind = outgoing if self._rank in self.manifest.ranks else Outgoing
        self._sent = SentParts(self.manifest, rank=self._rank) if self._changes_alone else None
        travelling = manifest_of_changes(self.manifest) if self._changes_alone else self.manifest
        self._outgoing = kind(travelling, index=self._rank, device=self._device)
        info: dict[str, Any] = on_main_process(lambda: self._offer(num_receivers))
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
        find_local = self._parts()
        first = self._position
        try:
            progress.new_round()
            progress.wait(
                f"began/{first}", self._receivers, to=f"begin to receive version {version}"
            )
            if self._rank == HOST_RANK:
                progress.report(f"go/{first}")
            with closing(self._contents(self._outgoing, find_local, version)) as contents:
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
        self._held = None

    def _parts(self) -> FindLocal:
        """This rank's parts of the weights as they are now."""
        reshard(self._model)
        weights = self._held or (scaled_adapters if self._adapter_alone else weights_of)(
            self._model
        )
        # Shards stay where they are; to find them takes milliseconds.
        self._held = None if self._computes else weights
        return lambda hf_name: weights[self._name_of[hf_name]].local

    def _offer(self, num_receivers: int) -> dict[str, Any]:
        """On rank 0: keep the store, make what the transport needs, and describe both."""
        assert self._outgoing is not None
        # Reachable by all peers and by the driver, which may be on another host.
        address = outward_address()
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

    def _contents(
        self, outgoing: Outgoing, find_local: FindLocal, version: int
    ) -> Generator[FindLocal]:
        """What each bucket is filled with: weights, or a message about them.

        Messages are made on a thread, while earlier ones travel.
        """
        num_buckets = len(self.manifest.buckets)
        if self._sent is None:
            yield from [find_local] * num_buckets
            return
        has_digests = self._check_every > 0 and version % self._check_every == 0
        messages = self._sent.messages(find_local, has_digests=has_digests)

        def tell(index: int) -> torch.Tensor:
            """The next message, after receivers were told how long it is."""
            message = torch.cat(next(messages))
            outgoing.manifest.buckets[index] = bucket_of_changes(
                self.manifest, index, {self._rank: len(message)}
            )
            outgoing.progress.report(f"size/{self._position + index}", str(len(message)))
            return message

        with closing(built_ahead(tell, range(num_buckets))) as told:
            for index, message in enumerate(told):
                yield {str(index): message}.__getitem__

    def _send_buckets(
        self, outgoing: Outgoing, contents: Iterator[FindLocal], version: int
    ) -> None:
        """Put one bucket after the other, no further ahead of the receivers than there are
        slots.
        """
        num_buckets = len(self.manifest.buckets)
        for index in range(num_buckets + NUM_SLOTS):
            position = self._position + index
            if index >= NUM_SLOTS:
                taken = position - NUM_SLOTS
                to = f"take bucket {self.manifest.number_at(taken)} of version {version}"
                outgoing.progress.wait(
                    f"done/{taken}", self._receivers, to=to, meanwhile=outgoing.check
                )
            if index < num_buckets:
                outgoing.put(position, next(contents))

    def _close_outgoing(self) -> None:
        if self._outgoing is not None:
            self._outgoing.close()
            self._outgoing = None
