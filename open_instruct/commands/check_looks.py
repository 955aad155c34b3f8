"""What `open-instruct check` looks at, in its order. Every look is the run's own function, and
loads no torch unless there is a checkpoint, a GPU or --with_model.
"""

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from open_instruct.commands.check_report import Report, check_all
from open_instruct.commands.preview import find_judges, hide_torch_from_transformers
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import LearnerParallelSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.config.training import LearnerConfig
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.data.eval_split import Side
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.prompts import PromptBuilder, Prompts, build_row_settings
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.data.tokenizer import find_local_folder
from open_instruct.models.hf.hf_config import config_fields
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.launch import num_to_start
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.node_sizes import node_sizes_from_environment
from open_instruct.parallel.wording import describe_layout
from open_instruct.planning.plan import check_model
from open_instruct.planning.shown import check_plan
from open_instruct.planning.subject.workload import RunConfig, shape_of_run
from open_instruct.run.earlier_command import refuse_another_command
from open_instruct.run.first_look import (
    check_first_rows,
    check_models,
    check_row_files,
    check_sizes,
    check_tokenizer,
)
from open_instruct.run.hub.upload import refuse_without_login
from open_instruct.run.run_directory import RunDirectory
from open_instruct.run.run_lock import refuse_folder_in_use

MOST_ROWS = 1000  # of each data set, that are tokenised
GPU_DRIVERS = ("/proc/driver/nvidia/version", "/dev/kfd")


def look_at_run(
    config: RunConfig, objective: Objective, report: Report, *, with_model: bool
) -> None:
    """Look at everything that the flags name; the model's weights are read `with_model` alone."""
    looks = RunLooks(config=config, objective=objective)
    look = report.look_at
    look("output folder", looks.find_folder)
    if config.logging.report_to:
        look("trackers", looks.find_trackers)
    if config.run.push_to_hub:
        look("hub", looks.find_login)
    look("layout", looks.find_layout)
    look("model", looks.find_model)
    if isinstance(config, GRPOConfig):  # users' own code, which may need torch
        look("verifiers", partial(looks.load_verifiers, config))
    if not with_model:
        hide_torch_from_transformers()
    names = config.model
    has_files = names.tokenizer_name_or_path or Path(names.model_name_or_path).expanduser().exists()
    look("tokenizer", looks.find_tokenizer, needs=[] if has_files else ["model"])
    look("rows", looks.find_rows, needs=["verifiers"])
    if config.data.has_held_out_rows:
        look("held-out rows", partial(looks.find_rows, is_held_out=True), needs=["verifiers"])
    if isinstance(config, GRPOConfig):
        from open_instruct.commands.check_rewards import RewardLooks

        needs = ["rows", "tokenizer"]

        def rewards() -> RewardLooks:
            return RewardLooks(
                config=config, prompts=Prompts(looks.dataset), chat=looks.chat, **looks.known
            )

        look("rewards", lambda: rewards().try_verifiers(), needs=needs)
        look("environments", lambda: rewards().open_environments(), needs=needs)
    look("memory", looks.find_plan, needs=["flags", "model", "layout"])
    if with_model:
        from open_instruct.commands.check_loss import take_first_loss

        needs = ["flags", "model", "tokenizer", "rows", "memory"]
        look(
            "first loss",
            lambda: take_first_loss(config, objective, rows=looks.dataset, chat=looks.chat),
            needs=needs,
        )


@dataclass(kw_only=True)
class RunLooks:
    """A run's things, each looked at by a method that says what it has found, or raises an
    InputError.

    `chat` and `rows` are there once the tokenizer, and the rows, were looked at.
    """

    config: RunConfig
    objective: Objective
    known: dict[str, Any] = field(default_factory=dict)
    chat: Any = None
    tokenizer: Any = None
    rows: TokenDataset | None = None

    @property
    def dataset(self) -> TokenDataset:
        assert self.rows is not None, "what needs rows is looked at behind them"
        return self.rows

    @property
    def layout(self) -> ShardLayout:
        return find_layout(self.config.parallel, nodes_of_run(self.config), self.config.backend)

    def find_folder(self) -> str:
        directory = RunDirectory(path=Path(self.config.run.output_dir))
        directory.refuse_unusable()
        refuse_folder_in_use(directory.path)
        refuse_another_command(self.config, self.objective.name)
        if not directory.path.exists():
            return f"{directory.path} is new"
        if not directory.has_results():
            return f"{directory.path} holds no checkpoint and no model: the run starts there"
        if self.config.run.overwrite_output_dir:
            return f"warning: {directory.path} holds a run, which --overwrite_output_dir removes"
        return self._find_checkpoint(directory)

    def _find_checkpoint(self, directory: RunDirectory) -> str:
        from open_instruct.checkpoints.step_folder import latest_step, refuse_another_format
        from open_instruct.run.console import Console
        from open_instruct.run.opened import refuse_another_run

        refuse_another_format(directory.path)
        step = latest_step(directory.path)
        if step is None:
            return (
                f"{directory.path} holds a model and no checkpoint: the run starts from the "
                "beginning"
            )
        refuse_another_run(self.config, directory, self.layout, step, Console(speaks=False))
        return f"{directory.path} holds this run: it goes on after step {step}"

    def find_trackers(self) -> str:
        check_trackers(self.config.logging.report_to, os.environ)
        return f"{', '.join(self.config.logging.report_to)}: installed, and logged in"

    def find_login(self) -> str:
        refuse_without_login()
        return "logged in; the run makes the repository when it starts"

    def find_layout(self) -> str:
        layout = self.layout
        backend = self.config.backend
        backend.refuse_unfit()
        who = "learner" if isinstance(self.config, GRPOConfig) else "process"
        found = describe_layout(layout, self.config.parallel, backend, who=who)
        return "\n".join([found, *(f"warning: {each}" for each in layout.warnings)])

    def find_model(self) -> str:
        check_models(self.config)
        name = self.config.model.model_name_or_path
        if find_local_folder(name) is None:
            return f"{name} is not here: the run downloads it from the hub"
        shape = shape_of_run(self.config, name)
        check_model(shape, None, self.config)
        return f"{shape.name}: {shape.family}, {shape.num_params:,} parameters"

    def find_tokenizer(self) -> str:
        from open_instruct.report.preview.sample import open_chat

        check_tokenizer(self.config)
        model = self.config.model
        self.tokenizer, self.chat = open_chat(self.config)
        self.chat.turn_end_token_ids()
        if (folder := find_local_folder(model.model_name_or_path)) is not None:
            fields = config_fields(folder)
            check_sizes(
                self.tokenizer,
                self.config.data,
                tokenizer_folder=Path(model.tokenizer_name_or_path or folder),
                model_folder=folder,
                vocab_size=fields.get("vocab_size"),
                num_positions=fields.get("max_position_embeddings"),
            )
        return f"{len(self.tokenizer):,} tokens; chat template: {self.chat.template.name}"

    def load_verifiers(self, config: GRPOConfig) -> str:
        from open_instruct.core.user_code import own_function
        from open_instruct.losses.advantages import ADVANTAGES
        from open_instruct.losses.policy import POLICY_LOSSES

        self.known = find_judges(config)
        own_function(config.loss.loss_fn, flag="--loss_fn", known=POLICY_LOSSES)
        own_function(
            config.rollout.advantage_normalization_type, flag="--advantages", known=ADVANTAGES
        )
        words = config.reward.verifier
        return (
            f"{', '.join(words)} judges rows that name none" if words else "each row names its own"
        )

    def find_rows(self, *, is_held_out: bool = False) -> str:
        data = self.config.data
        is_rollout = isinstance(self.config, GRPOConfig)
        flag = "dataset_mixer_list" if is_rollout else "mixer_list"
        if is_held_out and data.eval_split is None:
            flag = "dataset_mixer_eval_list" if is_rollout else "eval_mixer_list"
        check_all(partial(check_row_files, self.config, flag), partial(self._look_at_keys, flag))
        if self.chat is None:
            return "their keys are right; not tokenised, as the tokenizer will not do"
        side = (
            None
            if data.eval_split is None
            else Side(share=data.eval_split, is_held_out=is_held_out)
        )
        return "\n".join(self._build(flag, side))

    def _look_at_keys(self, flag: str) -> None:
        """The look that the run takes before it loads torch, at more rows than are tokenised
        here.
        """
        if isinstance(self.config, GRPOConfig):
            check = partial(parse_prompt_row, **self.known, **build_row_settings(self.config))
            check_first_rows(PromptBuilder, self.config, flag, check=check)
            return
        form = self.objective.choose_rows(self.config)
        if (own_check := vars(form).get("check")) is not None:
            check_first_rows(form, self.config, flag, check=own_check)

    def _build(self, flag: str, side: Side | None) -> list[str]:
        from open_instruct.report.preview.sample import build_rows, builder_of_run, open_sources

        config = self.config
        builder = builder_of_run(config, self.objective, self.chat, self.known)
        opened = open_sources(config, flag)
        arrays, report = build_rows(
            builder, opened, num_read=MOST_ROWS, seed=config.optim.seed, side=side
        )
        if report.bad and config.data.on_bad_row == "error":
            raise builder.bad_rows_error(report.num_rows)
        rows = TokenDataset(
            documents_per_row=builder.documents_per_row, reads_ends=builder.reads_ends, **arrays
        )
        self.rows = self.rows or rows  # those to train on, which come first
        return report.lines()

    def find_plan(self) -> str:
        config, nodes = self.config, nodes_of_run(self.config)
        folder = find_local_folder(config.model.model_name_or_path)
        if folder is None:
            return "not planned: the model is not here"
        has_gpu = any(Path(driver).exists() for driver in GPU_DRIVERS)
        if isinstance(config, GRPOConfig) and config.fleet.ray_address is not None and not has_gpu:
            return (
                "not planned: learners are on other machines (--ray_address), and there is no "
                "GPU here"
            )
        check_model(shape_of_run(config, str(folder)), self.layout, config)
        check = check_plan(
            config,
            nodes,
            model_folder=str(folder),
            memory_bytes=memory_of_process(sum(nodes), has_gpu=has_gpu),
            on_cuda=has_gpu,
        )
        line = check.line.removeprefix("memory: ")
        return "\n".join([line, *([f"warning: {check.warning}"] if check.warning else [])])


def nodes_of_run(config: LearnerConfig) -> tuple[int, ...]:
    """The processes that would train on each node."""
    if isinstance(config.parallel, LearnerParallelSection):
        return tuple(config.parallel.num_learners_per_node)
    asked = getattr(config.parallel, "num_processes", None)
    num_ranks = num_to_start(asked, os.environ)
    return (num_ranks,) if num_ranks else node_sizes_from_environment(os.environ) or (1,)


def memory_of_process(num_sharing: int, *, has_gpu: bool) -> int:
    """Bytes for each of the processes that share this machine, or of a GPU."""
    if not has_gpu:
        return psutil.virtual_memory().total // num_sharing
    import torch

    from open_instruct.run.opened import memory_of

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return memory_of(device, num_sharing=num_sharing)
