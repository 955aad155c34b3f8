"""The receiving end of a weight sync, and the methods that vLLM's workers get for it.

It imports nothing of the learners' side, and vLLM only once there is a worker.
"""

import mmap
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch

from open_instruct.core.errors import RunError
from open_instruct.models.shards import join_slabs
from open_instruct.weight_sync.changes import Mirror, build_change_bucket, build_change_manifest
from open_instruct.weight_sync.channel import CPU, wait_for_device
from open_instruct.weight_sync.engine_memory import EngineMemory
from open_instruct.weight_sync.folder import FolderWeights
from open_instruct.weight_sync.manifest import Manifest, WeightManifest
from open_instruct.weight_sync.progress import (
    SyncProgress,
    learner_name,
    list_receivers,
    receiver_name,
)
from open_instruct.weight_sync.tied_heads import pack_tied_heads, require_tied_heads
from open_instruct.weight_sync.transports import FOLDER, ON_DEVICE, TRANSPORTS

# Added to a receiver's time-out, so that the learners' time-out, which names the missing receiver,
# comes first.
EXTRA_PATIENCE_S = 5.0

PRIVATE_MEMORY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS

ADAPTER_ID = 1

Weights = Iterator[tuple[str, torch.Tensor]]


class ReusedMemory:
    """Memory for arriving tensors, reused once no tensor refers to it.

    On a CPU, new pages cost more than the copy into them.
    """

    def __init__(self, most_bytes: int, device: torch.device) -> None:
        self._most_bytes = most_bytes
        self._device = device
        self._memories: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """A tensor of at most `most_bytes` bytes, whose memory no other tensor refers to."""
        if self._device.type != "cpu":
            # Torch's own allocator reuses memory there.
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        for index in range(len(self._memories)):
            # Two references are the list's and the call's; tensors on this memory hold a third.
            if sys.getrefcount(self._memories[index]) == 2:
                return torch.frombuffer(self._memories[index], dtype=torch.uint8, count=num_bytes)
        self._memories.append(mmap.mmap(-1, self._most_bytes, flags=PRIVATE_MEMORY))
        return torch.frombuffer(self._memories[-1], dtype=torch.uint8, count=num_bytes)


class IncomingWeights:
    """One receiver's end of a channel."""

    def __init__(self, info: Mapping[str, Any], *, index: int, device: torch.device) -> None:
        """Join; returns when all receivers and learners have.

        Args:
            info: as `WeightSender.open` gave it.
            index: of this receiver, from 0.
            device: where the weights should arrive. With "shm" and "gloo" they come on the CPU.

        Raises:
            RunError: some did not come within the time-out; names them.
        """
        _, make_incoming = TRANSPORTS[info["backend"]]
        self._manifest = WeightManifest(**info["manifest"])
        self._device = device if info["backend"] in ON_DEVICE else CPU
        self._position = 0
        self._mirror: Mirror | None = None
        travelling: Manifest = self._manifest
        if info["changes_alone"]:
            self._mirror = Mirror(self._manifest)
            travelling = build_change_manifest(self._manifest)
        self._memory = ReusedMemory(travelling.most_bytes_of_wholes, self._device)
        # By the positions of their first pieces.
        self._wholes: dict[int, dict[str, torch.Tensor]] = {}
        self._progress = SyncProgress.join(
            info, member=receiver_name(index), patience_s=EXTRA_PATIENCE_S
        )
        self._incoming = make_incoming(travelling, index=index, device=self._device)
        self._incoming.join(info)
        self._progress.report("joined")
        writers = [learner_name(rank) for rank in self._manifest.ranks]
        self._progress.wait("joined", [*writers, *list_receivers(info)], to="join")
        self._incoming.connect(info, self._progress)

    def buckets(self) -> Iterator[Weights]:
        """Yield one version, bucket by bucket, as names with tensors that own their memory.

        The caller takes all tensors of a bucket before the next bucket.

        Raises:
            RunError: a learner did not bring its part within the time-out (names it), or somebody
                failed.
        """
        if self._mirror is not None:
            yield self._mirror.weights()
            return
        self._progress.new_round()
        self._progress.report(f"began/{self._position}")
        for position, bucket in enumerate(self._manifest.buckets, start=self._position):
            self._incoming.take(position, self._find_wholes)
            wait_for_device(self._device)
            self._progress.report(f"done/{position}")
            if bucket.piece == bucket.num_pieces - 1:
                yield self._hand_over(self._wholes.pop(position - bucket.piece))
        self._position += len(self._manifest.buckets)

    def stage(self, version: int) -> None:
        """Bring the mirror to `version`, the next one; for channels that carry changes alone.

        `buckets` yields that version from then on.

        Raises:
            RunError: as in `buckets`, or the bits that came are not those that were sent.
        """
        assert self._mirror is not None
        first = self._position
        self._progress.new_round()
        self._progress.report(f"began/{first}")
        travelling = self._incoming.manifest.buckets
        self._read_sizes(0)
        for index, bucket in enumerate(travelling):
            # The next bucket travels while this one is put in place.
            if index + 1 < len(travelling):
                self._read_sizes(index + 1)
            self._incoming.take(first + index, self._find_wholes)
            wait_for_device(self._device)
            messages = self._wholes.pop(first + index)[str(index)]
            for rank in bucket.parts:
                start, stop = bucket.span(rank)
                name = self._mirror.apply_message(index, rank, messages[start:stop].cpu())
                if name is not None:
                    raise self._progress.fail(
                        f"{self._progress.member} has other bits of {name} than were sent as "
                        f"version {version}"
                    )
            del messages  # the next bucket but one takes its memory
            self._progress.report(f"done/{first + index}")
        self._position += len(travelling)

    def _read_sizes(self, index: int) -> None:
        """Read from the store how long the messages about a bucket are."""
        ranks = self._manifest.buckets[index].parts
        to = f"find what has changed of bucket {self._manifest.describe_bucket(index)}"
        words = self._progress.read_reports(
            f"size/{self._position + index}", [learner_name(rank) for rank in ranks], to=to
        )
        sizes = {rank: int(word) for rank, word in zip(ranks, words, strict=True)}
        self._incoming.manifest.buckets[index] = build_change_bucket(self._manifest, index, sizes)

    def _find_wholes(self, position: int) -> dict[str, torch.Tensor]:
        """The tensors of the bucket at a position; they have memory until their last piece came."""
        bucket = self._incoming.manifest.find_bucket(position)
        first = position - bucket.piece
        if first not in self._wholes:
            self._wholes[first] = bucket.wholes(self._memory.take(bucket.num_bytes_of_wholes))
        return self._wholes[first]

    def _hand_over(self, wholes: dict[str, torch.Tensor]) -> Weights:
        """Yield each tensor and drop it here, so that its memory is free for the next bucket."""
        for name in list(wholes):
            yield name, join_slabs(wholes.pop(name), self._manifest.slabs.get(name, 1))

    def fail(self, error: BaseException) -> None:
        """Tell everybody that this receiver has failed, and leave the channel."""
        if not isinstance(error, RunError):
            self._progress.fail(f"{self._progress.member} failed: {type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """Release memory and connections, even if other references to this object remain."""
        self._incoming.close()


WeightSource = IncomingWeights | FolderWeights


def open_incoming(
    info: Mapping[str, Any],
    *,
    index: int,
    device: torch.device,
    previous: WeightSource | None,
) -> WeightSource:
    """Open a receiver's end of what the learners offer, and close the `previous` one.

    Raises:
        RunError: as `IncomingWeights` does.
    """
    if isinstance(previous, FolderWeights) and previous.chain == info.get("chain"):
        return previous  # it has less to read than a new one
    if previous is not None:
        previous.close()
    if info["backend"] == FOLDER:
        return FolderWeights(info, index=index)
    return IncomingWeights(info, index=index, device=device)


class WeightReceiver(EngineMemory):
    """Methods that vLLM adds to its worker class (`worker_extension_cls`); `self` is the worker.

    `Engine` calls them between two steps: `open_channel` once, then `start_update`,
    `receive_weights` and `finish_update` for every version. An update that fails halfway leaves
    weights that are of no use; after another `open_channel` the next update is complete again.
    """

    def open_channel(self: Any, info: dict[str, Any]) -> None:
        """Join the learners' channel; `info["receiver_index"]` is the index of the engine."""
        workers_per_engine = self.vllm_config.parallel_config.world_size
        index = info["receiver_index"] * workers_per_engine + self.rank
        if not getattr(self, "is_update_begun", False):  # else its layers are still taken apart
            require_tied_heads(
                self.model_runner.get_model(),
                hf_config=self.vllm_config.model_config.hf_text_config,
            )
        previous = getattr(self, "incoming_weights", None)
        self.incoming_weights = open_incoming(
            info, index=index, device=self.device, previous=previous
        )

    def start_staging(self: Any, version: int) -> None:
        """Begin to receive what has changed on another thread; steps may go on meanwhile."""
        self.staging: Future[None] = Future()
        # The thread gets values, not the worker: if it finds out late that its channel broke, it
        # must not touch the channel that came after.
        arguments = (version, self.incoming_weights, self.staging, self.device)
        threading.Thread(
            target=_stage,
            args=arguments,
            name="weights",
            daemon=True,
        ).start()

    def has_staged(self: Any) -> bool:
        """Whether everything has arrived; raises the error if receiving failed."""
        return self.staging.done() and self.staging.result() is None

    def start_update(self: Any) -> None:
        """Prepare every layer to be loaded anew."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if getattr(self, "is_update_begun", False):
            # Its layers are taken apart; this puts them together, whether or not all weights came.
            self.finish_update()
        model = self.model_runner.get_model()
        for layer in model.modules() if self.device.type == "cpu" else ():
            # vLLM 0.32 lays experts out for its CPU kernel only when it makes that, not when they
            # are loaded anew.
            method: Any = getattr(layer, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                method.moe_kernel = None
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
        self.is_update_begun = True

    def receive_weights(self: Any) -> None:
        """Take one version; returns when it is complete."""
        try:
            self.take_weights(self.incoming_weights.buckets())
        except Exception as error:
            self.incoming_weights.fail(error)
            raise

    def take_weights(self: Any, buckets: Iterator[Weights]) -> None:
        """Load them into the model."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            for weights in buckets:
                self.model_runner.get_model().load_weights(weights)

    def finish_update(self: Any) -> None:
        """Make the layers ready to compute."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            if self.device.type == "cpu":
                pack_tied_heads(model)
        self.is_update_begun = False


class AdapterReceiver(WeightReceiver):
    """Receives the weights of one adapter, which every request names, and not those of a model.

    The model never changes, and an update that failed before it was put in place leaves the
    previous adapter.
    """

    def adapted_layers(self: Any) -> list[str]:
        """Name the layers that can have an adapter, such as `model.layers.3.self_attn.q_proj`.

        The names are Hugging Face's.
        """
        manager = self.model_runner.lora_manager._adapter_manager
        names: list[str] = []
        for layer in manager.modules:
            names += manager.packed_modules.get(layer, [layer])
        return names

    def hold_no_adapter(self: Any) -> None:
        """Compute without an adapter: under its id, hold the one that vLLM makes to warm up."""
        manager = self.model_runner.lora_manager._adapter_manager
        self.put_in_place(manager.create_dummy_lora(ADAPTER_ID, rank=1, embedding_modules={}))

    def hold_adapter(self: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Compute with these matrices from now on, by the names of an adapter's file.

        Raises:
            RunError: the engine lacks a layer of the adapter; names it.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        rank = next(whole.shape[0] for name, whole in tensors.items() if ".lora_A." in name)
        renames = getattr(self.get_model(), "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            tensors,
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),  # B has its factor already
            device=str(self.device),
            dtype=self.vllm_config.lora_config.lora_dtype,
            weights_mapper=renames and renames.get_rename_mapper(),
        )
        unknown = sorted(adapter.loras.keys() - set(self.adapted_layers()))
        if unknown:
            raise RunError(
                f"an engine can hold no adapter for {unknown[0]}: use --lora_sync merged"
            )
        self.put_in_place(adapter)

    def put_in_place(self: Any, adapter: Any) -> None:
        """Copy the new adapter over the previous one."""
        manager = self.model_runner.lora_manager._adapter_manager
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def start_update(self: Any) -> None:
        """Do nothing: the adapter is replaced once the next one has arrived completely."""

    def take_weights(self: Any, buckets: Iterator[Weights]) -> None:
        """Compute with the matrices once all have come."""
        matrices: dict[str, torch.Tensor] = {}
        for weights in buckets:
            matrices.update(weights)
        self.hold_adapter(matrices)

    def finish_update(self: Any) -> None:
        """Do nothing: no layer was taken apart."""


def _stage(
    version: int,
    incoming: WeightSource,
    staging: Future[None],
    device: torch.device,
) -> None:
    """Stage a version and set the outcome of `staging`; runs on a thread of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)  # a new thread would use the first GPU
    try:
        incoming.stage(version)
        staging.set_result(None)
    except Exception as error:
        staging.set_exception(error)
        incoming.fail(error)
