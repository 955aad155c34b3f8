"""The memory of a training step by two accounts: what `open-instruct plan` says, and what the step
really holds.

    python -m tests.fake_cuda.memory                # all cases, about a minute
    python -m tests.fake_cuda.memory dpo grpo       # some of them

Steps of models of 7B and 8B, cut to a few layers, run as rank 0 of 8 on the pretended GPU of
`device.py`, by the code that a run uses. Tensors there have a size and no values, so that every
storage on "cuda" can be counted while it lives. What kernels need within themselves, and what
CUDA's allocator loses between tensors, is in neither account.
"""

import contextlib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.fake_cuda.cases import (
    HSDP,
    MICROBATCHES,
    MODULES,
    OFFLOAD,
    ZERO,
    Case,
    leave_weights_alone,
    opened,
)
from tests.fake_cuda.device import load_hooks, pretend_cuda

GIB = 2**30
NUM_LAYERS = 4
PROMPT = 512
BLOCK_BYTES = 512
"""CUDA's allocator hands out no less."""
PHASES = ("critic", "forward", "backward", "optimizer step")  # the first where there is one
MOVED = "moved"
"""Of GRPO: the state that is on the device between steps, and leaves it for an engine's turn."""
NO_TENSORS = ("scratch of kernels", "CUDA and libraries")
"""What a plan counts besides tensors, and no trace shows."""
OLMO, QWEN, LLAMA = "allenai/Olmo-3-1025-7B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B"
EXPERTS = "Qwen/Qwen3-30B-A3B"


@dataclass(frozen=True)
class TracedCase(Case):
    """A case of a public model. `shared`: its documents have one prompt, which is computed once;
    GRPO's have in any case a prompt of their group.
    """

    family: str = OLMO
    rows: int = 1
    longest: int = 8192
    shared: bool = False

    COMPILING = "--compile_model false"

    @property
    def fields(self) -> dict[str, Any]:
        from open_instruct.planning.subject.read_shape import public_models

        return public_models()[self.family] | {"num_hidden_layers": NUM_LAYERS}

    @property
    def words(self) -> list[str]:
        words = f"--model_name_or_path none --output_dir none {self.flags}"
        if "deepspeed" not in words:  # which compiles nothing
            words += f" {self.COMPILING}"
        sharing = f" --prefix_sharing {'on' if self.shared else 'off'}"
        if self.objective == "grpo":
            words += (
                f" --dataset_mixer_list none 1.0 --num_learners_per_node {self.world} "
                "--pack_length 16384"
            )
            words += (
                f" --max_prompt_token_length {PROMPT} --response_length {self.longest - PROMPT}"
            )
            words += (
                f" --num_unique_prompts_rollout {self.world} --num_samples_per_prompt_rollout 4"
            )
            return f"{words}{sharing}".split()
        words += (
            f" --mixer_list none 1.0 --max_seq_length {self.longest} "
            f"--per_device_train_batch_size {self.rows}"
        )
        words += f" --gradient_accumulation_steps {MICROBATCHES}"
        return f"{words}{sharing if self.objective in ('dpo', 'reward_model') else ''}".split()

    def hf_config(self) -> Any:
        import transformers

        from open_instruct.core.families import FAMILIES

        fields = {
            name: value
            for name, value in self.fields.items()
            if name not in ("model_type", "dtype")
        }
        config_class = FAMILIES[self.fields["model_type"]].config_class
        return getattr(transformers, config_class)(**fields, pad_token_id=0)

    def lengths(self, num_rows: int, num_replies: int) -> list[list[int]]:
        """All documents are as long as they may be."""
        return [[PROMPT, *(self.longest - PROMPT,) * num_replies]] * num_rows

    def samples(self, num_ranks: int, seed: int) -> Any:
        from open_instruct.core.records import Document, RolloutSample, Span

        num_generated = self.longest - PROMPT
        return [
            RolloutSample(
                document=Document(
                    # Completions of a group are alike in nothing but their prompt.
                    token_ids=(3 + index // 4,) * PROMPT + (3 + index,) * num_generated,
                    responses=(Span(start=PROMPT, stop=self.longest),),
                ),
                engine_logprobs=(-11.0,) * num_generated,
                advantage=(-1.0) ** index,
            )
            for index in range(4 * num_ranks)
        ]

    def planned(self, folder: Path) -> dict[str, int]:
        """Bytes of each phase, by the plan of the same flags."""
        from open_instruct.commands.plan import parse_request
        from open_instruct.planning.memory import block
        from open_instruct.planning.placements import find_placement
        from open_instruct.planning.plan import make_plan

        config = folder / "config.json"
        config.write_text(json.dumps(self.fields))
        words = [
            str(config) if before == "--model_name_or_path" else word
            for before, word in _after(self.words)
        ]
        if self.objective != "grpo":
            words += ["--gpus_per_node", str(self.world)]
        if self.shared:
            words += ["--shared_prompt_tokens", str(PROMPT)]
        # Without what attention's kernel needs, the worst moment of a backward pass may be another
        # one.
        with patch.object(block, "attention_scratch", lambda **_: 0):
            plan = make_plan(parse_request([self.objective, *words]).setting)
        found = {
            phase.name: sum(size for part, size in phase.parts if part not in NO_TENSORS)
            for phase in plan.phases
            if phase.name in PHASES
        }
        if self.objective == "grpo":
            found[MOVED] = find_placement(plan).moved_bytes
        return found


def _after(words: Sequence[str]) -> list[tuple[str, str]]:
    """Every word with the one before it."""
    return list(zip(["", *words[:-1]], words, strict=True))


MORE_OF_GRPO = "--beta 0.1 --record_entropy"
CASES = {
    "dpo": TracedCase(),
    "dpo, blocks recomputed": TracedCase("--activation_checkpointing full"),
    "dpo, float8 products": TracedCase(
        "--float8_linears tensorwise --activation_checkpointing full"
    ),
    "dpo, float8 products by row": TracedCase(
        "--float8_linears rowwise --activation_checkpointing full"
    ),
    "dpo, modules recomputed": TracedCase(MODULES),
    "dpo, inputs on the host": TracedCase(OFFLOAD),
    "dpo, shared prompts": TracedCase(shared=True),
    "dpo, tensor parallel": TracedCase("--tensor_parallel_degree 2", family=LLAMA),
    "dpo, context parallel": TracedCase("--context_parallel_degree 2", family=QWEN),
    "dpo, replicas": TracedCase(HSDP),
    "dpo, replicas, reduced last": TracedCase(f"--gradient_reduction last {HSDP}"),
    "dpo, adapters": TracedCase("--use_lora"),
    "dpo, adapters beside 4 bits": TracedCase(
        "--use_lora --use_qlora --activation_checkpointing full"
    ),
    "dpo, muon": TracedCase(f"--optimizer muon {HSDP}"),
    "dpo, 8-bit adamw": TracedCase(f"--optimizer adamw_8bit {HSDP}"),
    "dpo, moments on the host": TracedCase("--adam_offload"),
    "dpo, 8-bit moments on the host": TracedCase("--adam_offload --optimizer adamw_8bit"),
    "dpo, weights on the host": TracedCase("--offload"),
    "dpo, 4 bits on the host": TracedCase(
        "--offload --use_lora --use_qlora --activation_checkpointing full"
    ),
    "dpo, experts": TracedCase("--activation_checkpointing none", family=EXPERTS, longest=4096),
    "dpo, zero 2": TracedCase(f"{ZERO} 2 --activation_checkpointing full"),
    "dpo, zero 3": TracedCase(f"{ZERO} 3 --activation_checkpointing full"),
    # Its blocks keep gathered weights alive.
    "dpo, zero 3, nothing recomputed": TracedCase(
        f"{ZERO} 3 --activation_checkpointing none", family=LLAMA
    ),
    # Its matrix of the head is larger than a bucket.
    "dpo, zero 2, large vocabulary": TracedCase(
        f"{ZERO} 2 --activation_checkpointing full", family=QWEN
    ),
    "dpo, zero 3, large vocabulary": TracedCase(
        f"{ZERO} 3 --activation_checkpointing full", family=QWEN
    ),
    # So long that the prompt, whose tokens a plan takes for labels, makes no chunk of the head more
    # or less.
    "kto": TracedCase("--activation_checkpointing full", "kto", longest=8542),
    "reward_model": TracedCase("--activation_checkpointing full", "reward_model"),
    # Without logits the peak is within the blocks, where the bucket is emptied.
    "reward_model, zero 2": TracedCase(f"{ZERO} 2 --activation_checkpointing full", "reward_model"),
    "grpo": TracedCase("--activation_checkpointing full", "grpo"),
    "grpo, reference, entropy": TracedCase(
        f"--activation_checkpointing full {MORE_OF_GRPO}", "grpo"
    ),
    "grpo, critic": TracedCase("--activation_checkpointing full --advantages gae", "grpo"),
    "grpo, critic, zero 2": TracedCase(
        f"{ZERO} 2 --activation_checkpointing full --advantages gae", "grpo"
    ),
    "grpo, critic, zero 3": TracedCase(
        f"{ZERO} 3 --activation_checkpointing full --advantages gae", "grpo"
    ),
    "grpo, critic, zero 1": TracedCase(
        f"{ZERO} 1 --activation_checkpointing full --advantages gae", "grpo"
    ),
    "grpo, shared prompts": TracedCase("--activation_checkpointing full", "grpo", shared=True),
}


class Alive:
    """The bytes of all storages on the pretended GPU that are alive, and the most that there were
    in each phase.
    """

    def __init__(self) -> None:
        self.phase = "building"
        self.most: dict[str, int] = {}
        self._now = 0
        self._storages: dict[int, tuple[Any, int]] = {}

    def begin(self, phase: str) -> None:
        self._forget_the_dead()
        self.phase = phase
        self._look()

    def saw(self, storage: Any) -> None:
        """Count a storage that is new, or has another size than before."""
        from torch.multiprocessing.reductions import StorageWeakRef

        # A weak reference keeps the address from being given to another.
        key, num_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        reference, before = self._storages.get(key) or (StorageWeakRef(storage), 0)
        self._storages[key] = reference, num_bytes
        self._now += num_bytes - before
        self._look()

    def _look(self) -> None:
        if self._now > self.most.get(self.phase, 0):
            self._forget_the_dead()
            self.most[self.phase] = max(self.most.get(self.phase, 0), self._now)

    def _forget_the_dead(self) -> None:
        dead = [key for key, (reference, _) in self._storages.items() if reference.expired()]
        self._now -= sum(self._storages.pop(key)[1] for key in dead)


def leaves_of(made: Any) -> Iterator[Any]:
    """What an operator of PyTorch has made: one thing, or lists of them; pytree takes a tenth of
    the time for it.
    """
    if isinstance(made, list | tuple):
        for each in made:
            yield from leaves_of(each)
    else:
        yield made


@contextlib.contextmanager
def watching(alive: Alive) -> Iterator[Any]:
    """The mode that counts what is made within it; it goes into the mode of the pretended GPU."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            made = func(*args, **(kwargs or {}))
            if func is torch.ops._dtensor.shard_dim_alltoall.default:
                # Of a fake one the result is a part of what all ranks together have.
                made = made.clone()
            for leaf in leaves_of(made):
                tensor = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
                if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                    alive.saw(tensor.untyped_storage())
            return made

    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: Any, num_bytes: int) -> Any:
        """FSDP empties and fills the storages of its weights so."""
        resized = resize(storage, num_bytes)
        if storage._cdata in alive._storages:
            alive.saw(storage)
        return resized

    with patch.object(torch.UntypedStorage, "resize_", watched_resize):
        yield Watch()


def traced(case: Case, folder: Path) -> dict[str, int]:
    """The most bytes alive in each phase of the last step."""
    import torch

    from open_instruct.training.state_mover import StateMover

    alive = Alive()
    moved: dict[str, int] = {}
    with watching(alive) as watch, opened(case, folder, watch) as (policy, take):
        taken = 0

        def watched(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
            def watched_run(*arguments: Any, **more: Any) -> Any:
                nonlocal taken
                alive.begin(f"{name} {taken}")
                result = run(*arguments, **more)
                taken += name == "optimizer step"
                alive.begin("between")
                return result

            return watched_run

        policy.microbatch_loss = watched("forward", policy.microbatch_loss)
        policy.backend.backward = watched("backward", policy.backend.backward)
        policy.update = watched("optimizer step", policy.update)
        if (critic := getattr(policy, "critic", None)) is not None:
            critic.add_advantages = watched("critic", critic.add_advantages)
            critic.learn = watched("critic", critic.learn)
        take()
        if case.objective == "grpo":
            mover = StateMover(partial(list_state, policy), torch.device("cuda", 0))
            moved[MOVED] = mover.move_to_host().num_bytes
    most = {phase: alive.most.get(f"{phase} {taken - 1}") for phase in PHASES}
    return {phase: num_bytes for phase, num_bytes in most.items() if num_bytes is not None} | moved


def list_state(policy: Any) -> Iterator[Any]:
    """All tensors of a GRPO learner that stay from step to step."""
    yield from policy.list_resident_tensors()
    if policy.critic is not None:
        yield from policy.critic.policy.list_resident_tensors()


def compared(names: Sequence[str]) -> dict[str, Any]:
    """Of each case its bytes by phase, `planned` and `traced`; or the `error` that it ended in."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        load_hooks(folder)
        pretend_cuda()
        leave_weights_alone()
        for name in names or CASES:
            case = CASES[name]
            try:
                results[name] = {
                    "planned": case.planned(folder),
                    "traced": traced(case, folder / name),
                }
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    return results


def table(results: dict[str, Any]) -> str:
    """GiB by plan and by trace, of each phase, and by how much the plan of the peak is off."""
    lines = [
        f"{'plan / trace, GiB':28}" + "".join(f"{phase:>22}" for phase in PHASES) + f"{'peak':>9}"
    ]
    for name, found in results.items():
        if "error" in found:
            lines.append(f"{name:28}{found['error'].splitlines()[-1]}")
            continue
        planned, held = found["planned"], found["traced"]
        cells = [
            f"{planned[phase] / GIB:>7.2f} {held[phase] / GIB:>6.2f} "
            f"{planned[phase] / held[phase] - 1:>+7.1%}"
            if phase in planned
            else " " * 22
            for phase in PHASES
        ]
        off = max(planned.values()) / max(held.values()) - 1
        lines.append(f"{name:28}{''.join(cells)}{off:>+9.1%}")
    return "\n".join(lines)


def main(words: Sequence[str]) -> None:
    results = compared([word for word in words if word != "--json"])
    print(json.dumps(results) if "--json" in words else table(results))


if __name__ == "__main__":
    main(sys.argv[1:])
