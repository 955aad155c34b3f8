"""A backend that the package does not know, as another package would bring one: one process of
plain PyTorch.

No FSDP, no DeepSpeed: a model in float32, PyTorch's AdamW, and OLMo-core's most basic train module
for checkpoints.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Literal

from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.training import LearnerConfig
from open_instruct.core.errors import InputError
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.parallel.layout import build_layout


class Plain:
    """A `BackendRecord`."""

    def default_values(self, config: LearnerConfig) -> dict[str, Any]:
        return {}

    def problems(self, config: LearnerConfig) -> Iterator[str]:
        if config.model.param_dtype != "float32":
            yield (
                f"--backend plain computes in float32, not {config.model.param_dtype}: add "
                "--param_dtype float32"
            )

    def warnings(self, config: LearnerConfig) -> Iterator[str]:
        yield from ()

    def refuse_unfit(self) -> None: ...

    def layout(self, parallel: ParallelSection, gpus_per_node: Sequence[int]) -> ShardLayout:
        if sum(gpus_per_node) != 1:
            raise InputError(
                f"--backend plain is one process, not {sum(gpus_per_node)}; use --backend olmo_core"
            )
        return build_layout(parallel, gpus_per_node)

    def sharing(self, parallel: ParallelSection, layout: ShardLayout) -> str:
        return "plain PyTorch"

    def make_planner(self, parallel: ParallelSection) -> Any:
        from open_instruct.planning.setting import BackendPlanner

        return BackendPlanner()

    def build(self, pretrained: Any, *, run: Any, config: LearnerConfig, num_steps: int) -> Any:
        import torch
        from olmo_core.train.train_module.train_module import BasicTrainModule

        from open_instruct.models.load import stream_load
        from open_instruct.training.optim.optimizers import build_scheduler, set_learning_rate
        from open_instruct.training.reference import Reference

        class PlainBackend(BasicTrainModule):
            """A `Backend`."""

            compute_dtype = torch.float32
            leaves_out_outliers = False
            rounding: ClassVar[dict[str, float]] = {}  # of matrices in 4 bits, which it has not

            @property
            def computing_model(self) -> Any:
                return self.model

            @property
            def device(self) -> torch.device:
                return run.process.device

            @property
            def train_module(self) -> Any:
                return self

            def on_attach(self) -> None:
                """Batches are planned in documents."""

            def set_mode(self, mode: Literal["train", "eval"]) -> None:
                self.model.train(mode == "train")

            def microbatch(self, index: int, num_microbatches: int) -> AbstractContextManager[None]:
                return nullcontext()

            def backward(self, loss: torch.Tensor) -> None:
                loss.backward()

            def clip(self) -> torch.Tensor:
                return torch.nn.utils.clip_grad_norm_(
                    self.model.parameters(), self.max_grad_norm or torch.inf
                )

            def set_learning_rate(self) -> Any:
                return set_learning_rate(
                    self.optim, build_scheduler(config.optim, num_steps=num_steps), self.trainer
                )

            def step(self, *, loss: float, grad_norm: float) -> dict[str, float]:
                self.optim.step()
                return {}

            def leave_out_step(self) -> None: ...

            def zero_grads(self) -> None:
                self.optim.zero_grad(set_to_none=True)

            def list_resident_tensors(self) -> Iterator[torch.Tensor]:
                yield from self.model.parameters()
                yield from self.model.buffers()
                for state in self.optim.state.values():
                    yield from state.values()

            def moving_reference(self, build_model: Callable[[], Any], **moves: Any) -> Reference:
                return Reference(model=copy.deepcopy(self.model).requires_grad_(False), **moves)

        optim, length = config.optim, config.data.max_seq_length
        model = pretrained.build(init_device="cpu")
        model.init_weights(device=run.process.device, max_seq_len=length)
        stream_load(model, pretrained.files, pretrained.names)
        betas = (optim.adam_beta1, optim.adam_beta2)
        stepped_by = torch.optim.AdamW(
            model.parameters(),
            optim.learning_rate,
            betas,
            optim.adam_epsilon,
            weight_decay=optim.weight_decay,
        )
        return PlainBackend(model, stepped_by, length, optim.max_grad_norm)


PLAIN = Plain()
