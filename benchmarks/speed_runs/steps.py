"""What one training step runs, counted on the pretended GPU of `tests/fake_cuda`, as rank 0 of a
node.

    python -m benchmarks.speed_runs.steps CASE NUM_LAYERS       # the counts as JSON

The step is a run's own, uncompiled: forward and backward passes of all microbatches over FSDP2,
clipping, the optimizer. It runs in a process of its own, since the pretended device needs hooks
that are loaded before torch.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.fake_cuda.cases import leave_weights_alone, opened
from tests.fake_cuda.device import WAITS, load_hooks, pretend_cuda
from tests.fake_cuda.memory import TracedCase

MODEL = "allenai/OLMo-2-1124-7B"
COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allreduce_",
    "allgather_into_tensor_coalesced_",
)
COPIES = (
    "split_with_sizes_copy",
    "_foreach_copy_",
    "_chunk_cat",
    "chunk_cat",
    "all_gather_copy_in",
)
ATTENTION = ("_varlen_attn", "_varlen_attn_backward")
HALVED = ("_scaled_mm",)  # products in float8, at twice the speed
# What starts no kernel, beside views.
FREE = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "detach",
    "alias",
)


@dataclass(frozen=True)
class SpeedCase(TracedCase):
    """A step as a run of these flags takes it.

    `group`: documents of a row, or completions of a prompt.
    """

    family: str = MODEL
    num_layers: int = 32
    prompt: int = 256
    accumulation: int = 1
    group: int = 2
    pack_length: int = 16384

    @cached_property
    def public_fields(self) -> dict[str, Any]:
        from open_instruct.planning.subject.read_shape import public_models

        return dict(public_models()[self.family])

    @property
    def fields(self) -> dict[str, Any]:
        return self.public_fields | {"num_hidden_layers": self.num_layers}

    @property
    def words(self) -> list[str]:
        words = f"--model_name_or_path none --output_dir none --prefix_sharing off {self.flags}"
        if self.objective == "grpo":
            words += f" --dataset_mixer_list none 1.0 --num_learners_per_node {self.world}"
            words += f" --pack_length {self.pack_length} --max_prompt_token_length {self.prompt}"
            words += (
                f" --response_length {self.longest - self.prompt} --num_unique_prompts_rollout "
                f"{self.world}"
            )
            words += f" --num_samples_per_prompt_rollout {self.group}"
            return words.split()
        words += f" --mixer_list none 1.0 --max_seq_length {self.longest}"
        words += (
            f" --per_device_train_batch_size {self.rows} --gradient_accumulation_steps "
            f"{self.accumulation}"
        )
        return words.split()

    def lengths(self, num_rows: int, num_replies: int) -> list[list[int]]:
        return [[self.prompt, *(self.longest - self.prompt,) * num_replies]] * num_rows

    def samples(self, num_ranks: int, seed: int) -> Any:
        from open_instruct.core.records import Document, RolloutSample, Span

        span = Span(start=self.prompt, stop=self.longest)
        return [
            RolloutSample(
                document=Document(
                    token_ids=(3 + index // self.group,) * self.longest, responses=(span,)
                ),
                engine_logprobs=(-11.0,) * (self.longest - self.prompt),
                advantage=(-1.0) ** index,
            )
            for index in range(self.group * num_ranks)
        ]

    def setting(self) -> Any:
        """What `open-instruct plan` makes of the flags."""
        from open_instruct.commands.plan import parse_request

        words = self.words
        words[1] = self.family
        if self.objective != "grpo":
            words += ["--gpus_per_node", str(self.world)]
        return parse_request([self.objective, *words]).setting


CASES = {
    # What the plan makes of 8 pairs a step and rank, the default, and what it would be in one
    # piece.
    "dpo, 2 pairs, 4 times": SpeedCase(rows=2, longest=2048, accumulation=4),
    "dpo, 8 pairs at once": SpeedCase("--activation_checkpointing full", rows=8, longest=2048),
    "dpo, 2 x 8,192 tokens": SpeedCase(rows=1, longest=8192, accumulation=2),
    "grpo, 4 x 8,192 tokens": SpeedCase(objective="grpo", longest=8192, group=4),
    "grpo, 8 x 512 tokens": SpeedCase(objective="grpo", longest=512, group=8, pack_length=4096),
}


class Counts:
    """Sums over operations, by "phase: kind: what"."""

    def __init__(self) -> None:
        self.sums = Counter[str]()
        self.phase = ""

    def add(self, kind: str, **what: int) -> None:
        for name, number in what.items():
            self.sums[f"{self.phase}: {kind}: {name}"] += number


def counting(counts: Counts) -> Any:
    """A mode that counts what runs on the pretended GPU."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.flop_counter import flop_registry

    def bytes_on_gpu(values: Any) -> int:
        locals_ = (
            leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            for leaf in tree_leaves(values)
        )
        leaves = (
            leaf for leaf in locals_ if isinstance(leaf, FakeTensor) and leaf.device.type == "cuda"
        )
        return sum(
            min(leaf.numel() * leaf.itemsize, leaf.untyped_storage().nbytes()) for leaf in leaves
        )

    class Count(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            kwargs = kwargs or {}
            made = func(*args, **kwargs)
            name, packet = func._opname, func._overloadpacket
            given, put_out = bytes_on_gpu((args, kwargs)), bytes_on_gpu(made)
            if name in COLLECTIVES:
                whole = args[1] if name.startswith("_reduce_scatter") else args[0]
                counts.add(f"{name.strip('_')}", calls=1, bytes=bytes_on_gpu(whole))
            elif (
                not (given or put_out)
                or func.is_view
                or name in FREE
                or name.startswith("record_stream")
            ):
                pass
            elif name in ATTENTION:
                counts.add(name.strip("_"), calls=1, bytes=given + put_out)
            elif packet in flop_registry:
                flops = flop_registry[packet](*args, **kwargs, out_val=made)
                taken = int(flops) // (2 if name in HALVED else 1)
                counts.add(
                    "product", calls=1, flops=int(flops), bf16_flops=taken, bytes=given + put_out
                )
            else:
                counts.add("copies" if name in COPIES else "memory", calls=1, bytes=given + put_out)
            return made

    return Count()


def spell_count(case: SpeedCase, folder: Path) -> dict[str, int]:
    """The sums of the second of two steps, and its waits for the device."""
    from tests.fake_cuda.cases import NUM_STEPS

    counts = Counts()
    with opened(case, folder, counting(counts)) as (policy, take):
        taken = 0

        def watched(phase: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def watched_run(*arguments: Any, **more: Any) -> Any:
                nonlocal taken
                counts.phase = phase
                result = run(*arguments, **more)
                counts.phase = "between"
                taken += phase == "update"
                if phase == "update" and taken < NUM_STEPS:
                    counts.sums.clear()
                return result

            return watched_run

        policy.microbatch_loss = watched("forward", policy.microbatch_loss)
        policy.backend.backward = watched("backward", policy.backend.backward)
        policy.update = watched("update", policy.update)
        WAITS.taken()
        waits = take()
    return {**counts.sums, "waits": sum(waits.values())}


def main(words: list[str]) -> None:
    from dataclasses import replace

    name, num_layers, *flags = words
    case = CASES[name]
    case = replace(
        case,
        num_layers=int(num_layers),
        flags=" ".join([case.flags, *flags, "--compile_model false"]),
    )
    with tempfile.TemporaryDirectory() as scratch:
        load_hooks(Path(scratch))
        pretend_cuda()
        leave_weights_alone()
        print(json.dumps(spell_count(case, Path(scratch) / "run")))


if __name__ == "__main__":
    main(sys.argv[1:])
