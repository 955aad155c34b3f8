"""Steps of training on a pretended GPU, as rank 0 of a pretended world takes them: `python -m
tests.fake_cuda.cases`.

Prints a JSON object: of each case, what `run` returns, or the error that it ended in.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from tests.fake_cuda.device import WAITS, load_hooks, pretend_cuda, pretended_gpu

NUM_STEPS = 2
"""The last of them is looked at: the first, which is a short one of rows, makes the optimizer's
state.
"""
MICROBATCHES = 2
MICROBATCHES_TAKEN = NUM_STEPS - 1 + MICROBATCHES

TakeSteps = Callable[[], dict[str, int]]


@dataclass(frozen=True)
class Case:
    """`objective`: of the registry, or "grpo". `kept_of_teacher`: of a distribution, in place of a
    teacher beside. `is_idle`: this rank has nothing to learn from. `only_scores`: rows are scored,
    in place of a step. `rows`: of a microbatch; `longest`: tokens of a document.
    """

    flags: str = ""
    objective: str = "dpo"
    family: str = "olmo2"
    world: int = 8
    kept_of_teacher: int = 0
    is_idle: bool = False
    only_scores: bool = False
    rows: int = 3
    longest: int = 24

    @property
    def words(self) -> list[str]:
        """The flags of its run."""
        words = f"--model_name_or_path none --output_dir none {self.flags}"
        if self.objective == "grpo":
            words += f" --dataset_mixer_list none 1.0 --num_learners_per_node {self.world}"
            words += " --max_prompt_token_length 24 --response_length 24 --pack_length 96"
            return words.split()
        words += (
            f" --mixer_list none 1.0 --max_seq_length {self.longest} "
            f"--per_device_train_batch_size {self.rows}"
        )
        return f"{words} --gradient_accumulation_steps {MICROBATCHES}".split()

    def hf_config(self) -> Any:
        """Of a model of few layers."""
        from open_instruct.core.families import FAMILIES
        from tests.unit.small_models import hf_config

        rows_of_blocks = (
            {"hidden_size": 64, "intermediate_size": 128} if QLORA in self.flags else {}
        )
        hf = hf_config(self.family, **rows_of_blocks)
        remembers = FAMILIES[self.family].delta is not None
        hf.num_hidden_layers = 2 if self.family == "olmo3" or remembers else 1
        if hasattr(hf, "layer_types"):
            other = "linear_attention" if remembers else "sliding_attention"
            hf.layer_types = ["full_attention", other][: hf.num_hidden_layers]
        return hf

    def lengths(self, num_rows: int, num_replies: int) -> list[list[int]]:
        """Of the prompt of each row, which is 12 tokens long, and of its replies of 5 to 11."""
        return [
            [12, *(5 + (row + 2 * reply) % 7 for reply in range(num_replies))]
            for row in range(num_rows)
        ]

    def samples(self, num_ranks: int, seed: int) -> Any:
        """Completions of one step of all ranks."""
        from tests.ranks.jobs.grpo_steps import as_trees, make_samples
        from tests.unit.small_models import VOCAB_SIZE

        return as_trees(
            make_samples(1 if self.is_idle else 8 * num_ranks, seed=seed, vocab_size=VOCAB_SIZE)
        )


OFFLOAD = "--activation_checkpointing offload"
HSDP = "--fsdp_num_replicas 2 --fsdp_shard_degree 4"
MODULES = (
    "--activation_checkpointing selected_modules --activation_checkpointing_modules "
    "blocks.*.feed_forward"
)
QLORA = "--use_lora --use_qlora"
ZERO = "--backend deepspeed --deepspeed_stage"
CASES = {
    "dpo": Case(),
    "dpo_uncompiled": Case(),
    "dpo_compiled_in_parallel": Case("--compile_model --tensor_parallel_degree 2"),
    "dpo_budget": Case("--activation_memory_budget 0.5", family="qwen3"),
    "dpo_hybrid": Case(family="olmo_hybrid"),
    "dpo_hybrid_checkpointed": Case(
        "--activation_checkpointing full --prefix_sharing off", family="qwen3_5_text"
    ),
    "dpo_hybrid_context_parallel": Case("--context_parallel_degree 2", family="qwen3_5_text"),
    "dpo_hybrid_tensor_parallel": Case("--tensor_parallel_degree 2", family="olmo_hybrid"),
    "dpo_experts": Case(HSDP, family="qwen3_moe"),
    "dpo_unshared": Case("--prefix_sharing off"),
    "dpo_padded": Case("--no_packing"),
    "dpo_hsdp": Case(HSDP, family="olmo3"),
    "dpo_tensor_parallel": Case("--tensor_parallel_degree 2", family="llama"),
    "dpo_context_parallel": Case("--context_parallel_degree 2", family="qwen3"),
    "dpo_experts_split": Case(
        "--expert_parallel_degree 8 --activation_checkpointing full", family="qwen3_moe"
    ),
    "dpo_one_device": Case("--single_gpu_mode", world=1),
    "dpo_float32": Case("--param_dtype float32"),
    "dpo_float8_tensorwise": Case("--float8_linears tensorwise"),
    "dpo_float8_rowwise": Case("--float8_linears rowwise --activation_checkpointing full"),
    "dpo_checkpointed": Case("--activation_checkpointing full"),
    "dpo_checkpointed_modules": Case(MODULES),
    "dpo_reduced_last": Case(f"--gradient_reduction last {HSDP}"),
    "dpo_offloaded": Case(OFFLOAD, family="olmo3"),
    "dpo_offloaded_tensor_parallel": Case(f"{OFFLOAD} --tensor_parallel_degree 2", family="llama"),
    "dpo_offloaded_one_device": Case(f"{OFFLOAD} --single_gpu_mode", world=1),
    "dpo_skip_step": Case("--optimizer skip_step_adamw"),
    "dpo_muon": Case(f"--optimizer muon {HSDP}"),
    "dpo_8bit": Case(f"--optimizer adamw_8bit {HSDP}"),
    "dpo_on_host_tensor_parallel": Case(
        "--adam_offload --tensor_parallel_degree 2", family="llama"
    ),
    "dpo_on_host_one_device": Case("--adam_offload --single_gpu_mode", world=1),
    "dpo_weights_on_host": Case(f"--offload --ref_policy_update_freq 1 {HSDP}", family="olmo3"),
    "dpo_weights_on_host_8bit": Case(
        "--offload --optimizer adamw_8bit --tensor_parallel_degree 2", family="llama"
    ),
    "distill_weights_on_host": Case(
        "--offload --teacher_model_name_or_path none", "distill", world=1
    ),
    "experts_weights_on_host": Case("--offload --expert_parallel_degree 8", family="qwen3_moe"),
    "dpo_4bit": Case(f"{QLORA} --activation_checkpointing full {HSDP}"),
    "dpo_4bit_one_device": Case(f"{QLORA} --single_gpu_mode", world=1),
    "dpo_4bit_weights_on_host": Case(f"--offload {QLORA}", family="qwen2"),
    "dpo_ld": Case("--loss_type dpo --ld_alpha 0.5"),
    "dpo_wpo": Case("--loss_type wpo"),
    "dpo_moving_reference": Case("--ref_policy_update_freq 1"),
    "zero_1": Case(f"{ZERO} 1 {OFFLOAD}"),
    "zero_2_on_host": Case(f"{ZERO} 2 --adam_offload"),
    "zero_3_tensor_parallel": Case(
        f"{ZERO} 3 --tensor_parallel_degree 2 --ref_policy_update_freq 1", world=4
    ),
    "zero_3_adapters": Case(f"{ZERO} 3 --use_lora"),
    "reference_logprobs": Case(only_scores=True),
    "sft": Case(objective="sft"),
    "kto": Case(objective="kto"),
    "kto_apo": Case("--loss_type apo_zero_unpaired", "kto"),
    "reward_model": Case(objective="reward_model"),
    "prm": Case(objective="prm"),
    "prm_words": Case("--reward_tokens + -", "prm"),
    "distill": Case("--teacher_model_name_or_path none", "distill"),
    "distill_kept": Case(
        "--teacher_model_name_or_path none --teacher_top_k 3", "distill", kept_of_teacher=3
    ),
    "grpo": Case("--record_entropy", "grpo"),
    "grpo_idle_rank": Case("--record_entropy", "grpo", is_idle=True),
    "grpo_one_device": Case("--single_gpu_mode", "grpo", world=1),
    "grpo_mini_batches": Case(
        "--loss_fn gspo --num_mini_batches 2 --rho_correction sequence_mask", "grpo", world=2
    ),
    "grpo_reference": Case(
        "--beta 0.1 --ref_policy_update_freq 1 --loss_fn cispo", "grpo", world=2
    ),
    "grpo_critic": Case("--advantages gae --num_mini_batches 2 --beta 0.1", "grpo", world=2),
    "grpo_critic_one_device": Case("--advantages gae --single_gpu_mode", "grpo", world=1),
    "grpo_chosen_tokens": Case("--top_entropy_quantile 0.5", "grpo", world=2),
}
WHOLE_GRAPHS = {
    "dpo",
    "dpo_budget",
    "dpo_compiled_in_parallel",
    "dpo_experts",
    "dpo_weights_on_host",
    "grpo",
}
"""Cases whose backward the compiler traces too, which doubles their time."""
FORWARD_GRAPHS = {
    "dpo_4bit",
    "dpo_4bit_weights_on_host",
    "dpo_checkpointed",
    "dpo_checkpointed_modules",
    "dpo_experts_split",
    "dpo_float8_rowwise",
    "dpo_float8_tensorwise",
    "dpo_hsdp",
    "dpo_hybrid",
    "dpo_hybrid_checkpointed",
    "dpo_hybrid_context_parallel",
    "dpo_hybrid_tensor_parallel",
    "dpo_offloaded",
    "dpo_offloaded_one_device",
    "dpo_offloaded_tensor_parallel",
    "dpo_padded",
    "dpo_unshared",
    "dpo_weights_on_host_8bit",
    "experts_weights_on_host",
    "grpo_critic",
    "grpo_mini_batches",
}
"""Those whose forward pass it traces alone. Blocks of the others are like those of one of these, and
are not compiled.
"""
UNCOMPILED = "--compile_model false"


def main(names: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        load_hooks(Path(folder))
        pretend_cuda()
        leave_weights_alone()
        import torch
        import torch._functorch.config

        results: dict[str, Any] = {}
        if not names:
            results["waits noted"] = _waits_noted()
        for name in names or CASES:
            torch.compiler.set_default_backend("aot_eager" if name in WHOLE_GRAPHS else "eager")
            case = CASES[name]
            if name not in WHOLE_GRAPHS | FORWARD_GRAPHS and ZERO not in case.flags:
                case = replace(case, flags=f"{case.flags} {UNCOMPILED}")
            try:
                # OLMo-core sets the budget of a case for the rest of the process.
                with torch._functorch.config.patch(activation_memory_budget=1.0):
                    results[name] = run(case, Path(folder) / name)
            except Exception:
                results[name] = {"error": traceback.format_exc()}
    print(json.dumps(results))


def run(case: Case, folder: Path) -> dict[str, Any]:
    """What the last step made the host wait for, and what its tensors were.

    waits: by "file:line: what"; those of all rows where rows are scored. attention: shapes of the
    queries and keys, dtype and device of the first call of the kernel; None without one. on_host:
    of each input of a block that waited there, what was kept and what came back, as "class dtype
    device". parameters, gradients: all their kinds, as "class dtype device". masters: of what
    DeepSpeed steps, if that is there. fused: whether the optimizer is one kernel.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    from open_instruct.models.experts import routed
    from open_instruct.training.model.inputs_on_host import InputsOnHost

    seen: dict[str, Any] = {"attention": None}

    class LookAtAttention(TorchDispatchMode):
        """Where the kernel is called, by code that is compiled or is not."""

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
        ) -> Any:
            if (
                func.overloadpacket._qualified_op_name == "torch_attn::_varlen_attn"
                and not seen["attention"]
            ):
                query, key, *_ = args
                seen["attention"] = [
                    [*query.shape],
                    [*key.shape],
                    str(query.dtype),
                    str(query.device),
                ]
            return func(*args, **(kwargs or {}))

    seen["on_host"] = []
    unpack = InputsOnHost.unpack

    def looked_at_unpack(inputs: InputsOnHost, kept: Any) -> Any:
        tensor = unpack(inputs, kept)
        seen["on_host"].append([_kind(kept.on_host), _kind(tensor), [*kept.on_host.shape]])
        return tensor

    exchanged = routed.all_to_all_single_autograd

    def exchanged_evenly(rows: Any, received: list[int], sent: list[int], group: Any) -> Any:
        """Since how many rows go to each rank has no value here."""
        each, rest = divmod(len(rows), len(sent))
        sizes = [each + (rank < rest) for rank in range(len(sent))]
        return exchanged(rows, sizes, sizes, group)

    with (
        patch.object(InputsOnHost, "unpack", looked_at_unpack),
        patch.object(routed, "all_to_all_single_autograd", exchanged_evenly),
        opened(case, folder, LookAtAttention()) as (policy, take_steps),
    ):
        update = policy.update

        def looked_at_update() -> Any:
            gradients = [parameter.grad for parameter in policy.model.parameters()]
            seen["gradients"] = sorted(
                {_kind(gradient) for gradient in gradients if gradient is not None}
            )
            return update()

        policy.update = looked_at_update
        WAITS.taken()
        seen["waits"] = take_steps()
        seen["fused"] = bool(policy.backend.optim.defaults.get("fused"))
        own = policy.backend.masters.parts.values() if hasattr(policy.backend, "masters") else ()
        seen["masters"] = sorted(
            {_kind(held) for each in own for held in (each.weights, *each.moments.values())}
        )
        seen["parameters"] = sorted({_kind(parameter) for parameter in policy.model.parameters()})
        seen["saved"] = _saved(policy.backend)
    return seen


@contextlib.contextmanager
def opened(case: Case, folder: Path, within: Any = None) -> Iterator[tuple[Any, TakeSteps]]:
    """The policy of a case on its rank, and what takes its steps, on the pretended GPU and in the
    mode `within`.
    """
    import torch
    import torch.distributed as dist
    from olmo_core.distributed import parallel
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from open_instruct.commands.run_flags import parse_run
    from open_instruct.config.grpo import GRPOConfig
    from open_instruct.objectives.registry import load_objective
    from open_instruct.parallel.layout import find_layout
    from open_instruct.parallel.process import Process
    from open_instruct.run.console import Console
    from open_instruct.run.opening import Run
    from open_instruct.run.run_directory import RunDirectory

    is_grpo = case.objective == "grpo"
    dist.init_process_group("fake", rank=0, world_size=case.world, store=FakeStore())
    process = Process(
        rank=0,
        local_rank=0,
        device=torch.device("cuda", 0),
        gpus_per_node=(case.world,),
    )
    try:
        config: Any = parse_run(
            GRPOConfig if is_grpo else load_objective(case.objective).config_class, case.words
        )
        run = Run(
            process=process,
            layout=find_layout(config.parallel, [case.world], config.backend),
            directory=RunDirectory(path=folder),
            console=Console(speaks=False),
        )
        run.directory.create()
        with pretended_gpu(), within or contextlib.nullcontext():
            yield (_grpo if is_grpo else _offline)(case, config, run)
    finally:
        dist.destroy_process_group()
        parallel._WORLD_MESH = None


def _saved(backend: Any) -> dict[str, Any]:
    """What a checkpoint lists of weights and moments, beside what OLMo-core's own train module
    does.
    """
    from olmo_core.train.train_module import TransformerTrainModule

    from open_instruct.checkpoints.safe_checkpointer import split

    # DeepSpeed's are listed by their ranges.
    if not backend.optim.state or hasattr(backend, "masters"):
        return {}
    WAITS.taken()
    tensors, values = split(backend.state_dict_to_save())
    waits = WAITS.taken()
    expected, expected_values = split(TransformerTrainModule.state_dict_to_save(backend))
    of_others = {name for name in tensors if name.startswith(("reference", "critic"))}
    of_policy = {name: value for name, value in values.items() if not name.startswith("critic")}
    return {
        "waits": waits,
        "has_same_names": tensors.keys() - of_others == expected.keys()
        and of_policy == expected_values,
        "kinds": sorted(
            {_kind(tensor) for name, tensor in tensors.items() if not name.endswith(".step")}
        ),
    }


def _waits_noted() -> dict[str, list[str]]:
    """What is noted of what does and does not make the host wait, by the words of it."""
    import torch

    with pretended_gpu():
        there, here = torch.ones(3, device="cuda"), torch.ones(3)
        pinned, mask = here.pin_memory(), there > 0
        done: dict[str, Callable[[], object]] = {
            "item": there[0].item,
            "float": lambda: float(there[0]),
            "if": lambda: bool(mask.all()),
            "tolist": there.tolist,
            "cpu": there.cpu,
            "nonzero": mask.nonzero,
            "mask": lambda: there[mask],
            "masked_select": lambda: there.masked_select(mask),
            "bincount": lambda: torch.bincount(there.long(), minlength=2),
            "list as index": lambda: there[[0, 1]],
            "tensor": lambda: torch.tensor([1.0], device="cuda"),
            "to": lambda: here.to("cuda"),
            "not pinned": lambda: here.to("cuda", non_blocking=True),
            "into it": lambda: there.copy_(here),
            "synchronize": torch.cuda.synchronize,
            "stream": torch.cuda.current_stream().synchronize,
            "free: pinned": lambda: pinned.to("cuda", non_blocking=True),
            "free: full": lambda: torch.full((2,), 3.0, device="cuda"),
            "free: fill": lambda: there.__setitem__(mask, 0.0),
            "free: where": lambda: torch.where(mask, there, 0.0),
            "free: host": lambda: (here[here > 0], here.tolist(), here.cpu()),
        }
        noted = {}
        for words, do in done.items():
            WAITS.taken()
            do()
            noted[words] = list(WAITS.taken())
        return noted


def _kind(tensor: Any) -> str:
    return f"{type(tensor).__name__} {tensor.dtype} {tensor.device}"


def _pretrained(case: Case, head: Any = "vocabulary") -> Any:
    """A start model without files: what is loaded stays as it was made."""
    from open_instruct.models.build import build_model

    def build(*, init_device: str) -> Any:
        return build_model(case.hf_config(), init_device=init_device, head=head)

    return SimpleNamespace(
        build=build, files=None, names=SimpleNamespace(olmo_core_names=()), adapter=None
    )


def _offline(case: Case, config: Any, run: Any) -> tuple[Any, TakeSteps]:
    import numpy as np

    from open_instruct.batching.steps import BatchShape
    from open_instruct.core.records import StepBatch
    from open_instruct.objectives.registry import load_objective
    from open_instruct.run.cadence import Cadence
    from open_instruct.training.loop import Loop
    from open_instruct.training.policy import Policy
    from open_instruct.training.reference import build_reference
    from open_instruct.training.rows.sample_loader import SampleLoader
    from open_instruct.training.scoring import Scorer
    from open_instruct.training.teacher import TeacherComparison
    from tests.unit.small_models import VOCAB_SIZE

    if config.parallel.backend == "olmo_core":
        from open_instruct.training.olmo_core.fsdp2 import build_backend
    else:
        build_backend = _build_zero

    objective = load_objective(case.objective)
    form = objective.choose_rows(config)
    bound = objective.bind(config)
    # What is read from the device is 1: no policy's first loss.
    loss = replace(bound, checks_first_loss=False, word_ids=tuple(range(len(bound.words))))
    pretrained = _pretrained(case, objective.choose_head(config))
    backend = build_backend(pretrained, run=run, config=config, num_steps=NUM_STEPS)
    reference = comparison = None
    if moves := objective.reference_moves(config).get("update_freq"):
        build_model = partial(build_reference, pretrained, run=run, config=config)
        reference = backend.moving_reference(build_model, update_freq=moves)
    if teacher := objective.teacher(config):
        model = (
            None if case.kept_of_teacher else build_reference(pretrained, run=run, config=config)
        )
        head_VD = (
            None
            if model is None
            else model.lm_head.w_out.weight.full_tensor().bfloat16().to(model.device)
        )
        comparison = TeacherComparison(
            teacher=teacher,
            pretrained=pretrained,
            vocab_size=VOCAB_SIZE,
            model=model,
            head_VD=head_VD,
        )
    policy = Policy(backend, loss, reference=reference, comparison=comparison)
    num_ranks = run.layout.data_parallel_world_size
    rows = _rows(case, form, NUM_STEPS * MICROBATCHES * case.rows * num_ranks)
    reference_logps_ND = None
    if objective.needs_reference(config) and not moves:
        reference_logps_ND = np.zeros((len(rows), form.documents_per_row), np.float32)
    loader = SampleLoader(
        rows,
        [(row,) for row in range(len(rows))],
        reference_logps_ND=reference_logps_ND,
        values_class=loss.values_class,
        shape=BatchShape(
            documents_per_sample=form.documents_per_row,
            max_samples_per_microbatch=config.optim.per_device_train_batch_size,
            max_microbatches=config.optim.gradient_accumulation_steps,
            max_seq_length=config.data.max_seq_length,
            packing=config.data.packing,
            pad_to_multiple_of=run.layout.model_parallel_degree,
            prefix_sharing=objective.prefix_sharing(config) if config.data.packing else "off",
        ),
        seed=0,
        dp_group=policy.dp_process_group,
    )
    loop = Loop(
        policy,
        loader,
        run=run,
        flags=config.run,
        start_model="",
        cadence=Cadence(num_steps=NUM_STEPS + 1, save_every=NUM_STEPS + 1),
    )

    def score() -> dict[str, int]:
        scorer = Scorer(policy=policy, shape=loader.shape, run=run, config=config)
        scorer.score(rows, range(len(rows)), title="rows")
        return WAITS.taken()

    def take_steps() -> dict[str, int]:
        """From the metrics of the step before the last to the last one's: so what lies between
        steps counts too.
        """
        waits: dict[str, int] = {}
        forward_backward = policy.forward_backward

        def shortened(step: StepBatch) -> Any:
            is_last = loop.step == NUM_STEPS
            return forward_backward(
                step if is_last else replace(step, microbatches=step.microbatches[:1])
            )

        policy.forward_backward = shortened

        def on_step(step: int, row: Any) -> None:
            waits.clear()
            waits.update(WAITS.taken())
            if step == NUM_STEPS:
                raise EnoughError

        with contextlib.suppress(EnoughError):
            loop.fit(loader, on_step=on_step)
        return waits

    return policy, score if case.only_scores else take_steps


class EnoughError(Exception):
    """Ends the loop before it saves."""


def _build_zero(*arguments: Any, **more: Any) -> Any:
    """DeepSpeed with PyTorch's AdamW: its own optimizers are kernels, which nobody can pretend."""
    import torch

    from open_instruct.training.deepspeed import zero
    from open_instruct.training.deepspeed.library import deepspeed

    os.environ["LOCAL_RANK"] = "0"
    # It warns, where results are printed, of a memory that is pretended.
    deepspeed.utils.logger.setLevel("ERROR")
    coordinator = deepspeed.runtime.zero.partitioned_param_coordinator
    # Ranks compare what they did: all others have said 0.
    coordinator.assert_ints_same_as_other_ranks = lambda numbers: None
    move = torch.nn.Module.to

    def stays(module: torch.nn.Module, *where: Any, **more: Any) -> torch.nn.Module:
        """A fake tensor is on its device already, and cannot be put in the place of another."""
        is_device = any(isinstance(each, torch.device) for each in where)
        return module if is_device else move(module, *where, **more)

    with (
        patch.object(zero, "choose_adam_kind", lambda *_, **__: "AdamW"),
        patch.object(torch.nn.Module, "to", stays),
    ):
        return zero.build_backend(*arguments, **more)


def _rows(case: Case, form: Any, num_rows: int) -> Any:
    """Rows of the form that is wanted."""
    import numpy as np

    from open_instruct.data.token_dataset import TokenDataset

    num_replies = form.documents_per_row
    lengths = case.lengths(num_rows, num_replies)
    num_labels = [num_replies if form.reads_ends else sum(of_row[1:]) for of_row in lengths]
    edges = np.cumsum([0, *(length for of_row in lengths for length in of_row)])
    has_label = case.objective in ("kto", "prm")
    numbers = [[row % 2] if has_label else [] for row in range(num_rows)]
    if case.kept_of_teacher:
        numbers = [[0.0] * labels * (2 * case.kept_of_teacher + 1) for labels in num_labels]
    details = [np.array(of_row, dtype=np.float32).view(np.uint8) for of_row in numbers]
    details_edges = np.cumsum([0, *map(len, details)])
    starts = np.arange(num_rows) * (1 + num_replies)
    keys = np.zeros((num_rows, 32), dtype=np.uint8)
    keys[:, :2] = np.stack(np.divmod(np.arange(num_rows), 256), axis=1)
    return TokenDataset(
        documents_per_row=num_replies,
        reads_ends=form.reads_ends,
        # By a prime number: no two replies of a row begin alike, whose lengths are multiples of
        # others.
        token_ids_T=(3 + np.arange(edges[-1]) % 79).astype(np.int32),
        edges_E=edges.astype(np.int64),
        details_C=np.concatenate(details),
        bounds_N4=np.stack(
            [starts, starts + num_replies + 2, details_edges[:-1], details_edges[1:]], axis=1
        ),
        num_tokens=np.array([num_replies * of_row[0] + sum(of_row[1:]) for of_row in lengths]),
        num_label_tokens=np.array(num_labels),
        keys_N32=keys,
    )


def _grpo(case: Case, config: Any, run: Any) -> tuple[Any, TakeSteps]:
    from open_instruct.batching.rollouts import plan_steps_of_ranks
    from open_instruct.training import grpo

    zero = SimpleNamespace(build=_build_zero)
    if config.parallel.backend != "olmo_core":
        config = replace(config, backend_record=zero)
    with patch.object(grpo, "open_companion_model", lambda *_, **__: _pretrained(case, "score")):
        learner = grpo.GRPOLearner(_pretrained(case), run=run, config=config)
    num_ranks = run.layout.data_parallel_world_size

    def take_steps() -> dict[str, int]:
        for step in range(NUM_STEPS):
            work = plan_steps_of_ranks(
                case.samples(num_ranks, step),
                num_ranks=num_ranks,
                max_tokens_per_microbatch=config.max_tokens_per_microbatch,
                num_mini_batches=config.loss.num_mini_batches,
                prefix_sharing=config.loss.prefix_sharing,
            )
            WAITS.taken()
            learner.step(work[-1 if case.is_idle else 0])
        return WAITS.taken()

    policy: Any = learner.policy
    policy.critic = learner.critic
    return policy, take_steps


def leave_weights_alone() -> None:
    """There are no files: let what would read them do nothing."""
    from open_instruct.training import backend, grpo, reference

    backend.stream_load = reference.stream_load = _read_nothing
    grpo.fingerprint_start_model = lambda *arguments: ""


def _read_nothing(*arguments: Any) -> Any:
    from open_instruct.models.load import LoadReport

    return LoadReport(num_bytes_read=0, num_tensors=0, wall_time_s=0.0)


if __name__ == "__main__":
    main(sys.argv[1:])
