"""What `open-instruct check` checks, in its order, by functions of the run itself.

No check loads torch unless there is a checkpoint, a GPU or --with_model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from open_instruct.commands.checks.reading_rows import find_judges, hide_torch_from_transformers
from open_instruct.commands.checks.report import Report, check_all
from open_instruct.config.fleet_sections import LearnerParallelSection
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.sharding_sections import ParallelSection
from open_instruct.config.tracker_access import check_trackers
from open_instruct.core.shard_layout import ShardLayout
from open_instruct.data.eval_split import Side
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.prompts import PromptBuilder, Prompts, build_row_settings
from open_instruct.data.token_dataset import TokenDataset, make_token_dataset
from open_instruct.data.tokenizer import find_local_folder
from open_instruct.models.model_folder import (
    find_tokenizer_name,
    read_model_fields,
)
from open_instruct.objectives.objective import Objective
from open_instruct.parallel.launch import count_ranks_to_start
from open_instruct.parallel.layout import find_layout
from open_instruct.parallel.node_sizes import node_sizes_from_environment
from open_instruct.parallel.wording import describe_layout
from open_instruct.planning.plan import check_model
from open_instruct.planning.start_check import check_plan
from open_instruct.planning.subject.build_workload import RunConfig, build_shape
from open_instruct.planning.subject.devices import has_gpu_here
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

if TYPE_CHECKING:
    from open_instruct.commands.checks.rewards import RewardChecks

MOST_ROWS = 1000  # of each data set, that are tokenised


def check_parts(
    config: RunConfig,
    objective: Objective,
    report: Report,
    *,
    with_model: bool,
) -> None:
    """Check everything that the flags name; weights are read `with_model` alone."""
    run = RunChecks(config=config, objective=objective)
    report.check("output folder", run.check_folder)
    if config.logging.report_to:
        report.check("trackers", run.check_tracker_access)
    if config.run.push_to_hub:
        report.check("hub", run.check_login)
    report.check("layout", run.check_layout)
    report.check("model", run.check_start_model)
    if isinstance(config, GRPOConfig):  # users' own code, which may need torch
        report.check("verifiers", partial(run.load_verifiers, config))
    if not with_model:
        hide_torch_from_transformers()
    needs = [] if has_tokenizer(config) else ["model"]
    report.check("tokenizer", run.check_chat_format, needs=needs)
    report.check("rows", run.check_rows, needs=["verifiers"])
    if config.data.has_held_out_rows:
        check_held_out_rows = partial(run.check_rows, is_held_out=True)
        report.check("held-out rows", check_held_out_rows, needs=["verifiers"])
    if isinstance(config, GRPOConfig):
        needs = ["rows", "tokenizer"]
        report.check("rewards", lambda: run.open_rewards(config).try_verifiers(), needs=needs)
        report.check(
            "environments", lambda: run.open_rewards(config).open_environments(), needs=needs
        )
    report.check("memory", run.check_memory, needs=["flags", "model", "layout"])
    if with_model:
        needs = ["flags", "model", "tokenizer", "rows", "memory"]
        report.check("first loss", run.take_first_loss, needs=needs)


def has_tokenizer(config: RunConfig) -> bool:
    """Whether a flag names the tokenizer, or its files are on this machine beside the model's."""
    if config.model.tokenizer_name_or_path:
        return True
    return Path(config.model.model_name_or_path).expanduser().exists()


@dataclass(kw_only=True)
class RunChecks:
    """The checks of a run: each method returns what it found, or raises an InputError.

    `chat` and `rows` are there once the tokenizer, and the rows, were checked.
    """

    config: RunConfig
    objective: Objective
    judges: dict[str, Any] = field(default_factory=dict)
    chat: Any = None
    tokenizer: Any = None
    rows: TokenDataset | None = None

    @property
    def dataset(self) -> TokenDataset:
        assert self.rows is not None, "what needs rows is checked after them"
        return self.rows

    @property
    def layout(self) -> ShardLayout:
        parallel = self.config.parallel
        return find_layout(parallel, find_node_sizes(parallel), self.config.backend)

    def check_folder(self) -> str:
        directory = RunDirectory(path=Path(self.config.run.output_dir))
        directory.refuse_unusable()
        refuse_folder_in_use(directory.path)
        refuse_another_command(self.config.run, self.objective.name)
        if not directory.path.exists():
            return f"{directory.path} is new"
        if not directory.has_results():
            return f"{directory.path} holds no checkpoint and no model: the run starts there"
        if self.config.run.overwrite_output_dir:
            return f"warning: {directory.path} holds a run, which --overwrite_output_dir removes"
        return self._check_checkpoint(directory)

    def _check_checkpoint(self, directory: RunDirectory) -> str:
        from open_instruct.checkpoints.step_folder import latest_step, refuse_another_format
        from open_instruct.run.console import Console
        from open_instruct.run.opening import refuse_another_run

        refuse_another_format(directory.path)
        step = latest_step(directory.path)
        if step is None:
            return (
                f"{directory.path} holds a model and no checkpoint: the run starts from the "
                "beginning"
            )
        refuse_another_run(self.config, directory, self.layout, step, Console(speaks=False))
        return f"{directory.path} holds this run: it goes on after step {step}"

    def check_tracker_access(self) -> str:
        check_trackers(self.config.logging.report_to, os.environ)
        return f"{', '.join(self.config.logging.report_to)}: installed, and logged in"

    def check_login(self) -> str:
        refuse_without_login()
        return "logged in; the run makes the repository when it starts"

    def check_layout(self) -> str:
        layout = self.layout
        backend = self.config.backend
        backend.refuse_unfit()
        who = "learner" if isinstance(self.config, GRPOConfig) else "process"
        description = describe_layout(layout, self.config.parallel, backend, who=who)
        return "\n".join([description, *(f"warning: {each}" for each in layout.warnings)])

    def check_start_model(self) -> str:
        check_models(self.config)
        name = self.config.model.config_path
        if find_local_folder(name) is None:
            return f"{name} is not here: the run downloads it from the hub"
        shape = build_shape(self.config, name)
        check_model(shape, None, self.config)
        return f"{shape.name}: {shape.family}, {shape.num_params:,} parameters"

    def check_chat_format(self) -> str:
        from open_instruct.report.preview.sample import open_chat

        model = self.config.model
        check_tokenizer(model, self.config.data)
        self.tokenizer, self.chat = open_chat(model, self.config.data)
        self.chat.turn_end_token_ids()
        folder = find_local_folder(model.config_path)
        if folder is not None:
            fields = read_model_fields(folder)
            check_sizes(
                self.tokenizer,
                self.config.data,
                tokenizer_folder=Path(find_tokenizer_name(model)),
                model_folder=folder,
                vocab_size=fields.get("vocab_size"),
                num_positions=fields.get("max_position_embeddings"),
            )
        return f"{len(self.tokenizer):,} tokens; chat template: {self.chat.template.name}"

    def load_verifiers(self, config: GRPOConfig) -> str:
        from open_instruct.core.user_code import load_own_function
        from open_instruct.losses.advantages import ADVANTAGES
        from open_instruct.losses.policy import POLICY_LOSSES

        self.judges = find_judges(config)
        load_own_function(config.loss.loss_fn, flag="--loss_fn", built_in=POLICY_LOSSES)
        advantages = config.rollout.advantage_normalization_type
        load_own_function(advantages, flag="--advantages", built_in=ADVANTAGES)
        if not config.reward.verifier:
            return "each row names its own"
        return f"{', '.join(config.reward.verifier)} judges rows that name none"

    def open_rewards(self, config: GRPOConfig) -> RewardChecks:
        from open_instruct.commands.checks.rewards import RewardChecks

        prompts = Prompts(self.dataset)
        return RewardChecks(
            config=config,
            prompts=prompts,
            chat=self.chat,
            **self.judges,
        )

    def check_rows(self, *, is_held_out: bool = False) -> str:
        share = self.config.data.eval_split
        is_rollout = isinstance(self.config, GRPOConfig)
        flag = "dataset_mixer_list" if is_rollout else "mixer_list"
        if is_held_out and share is None:
            flag = "dataset_mixer_eval_list" if is_rollout else "eval_mixer_list"
        check_all(partial(check_row_files, self.config, flag), partial(self._check_keys, flag))
        if self.chat is None:
            return "their keys are right; not tokenised, as the tokenizer will not do"
        side = None
        if share is not None:
            side = Side(share=share, is_held_out=is_held_out)
        return "\n".join(self._build_rows(flag, side))

    def _check_keys(self, flag: str) -> None:
        """Check keys as the run does before it loads torch, of more rows than are tokenised."""
        seed = self.config.optim.seed
        if isinstance(self.config, GRPOConfig):
            check = partial(parse_prompt_row, **self.judges, **build_row_settings(self.config))
            check_first_rows(PromptBuilder, self.config.data, flag, seed=seed, check=check)
            return
        form = self.objective.choose_rows(self.config)
        check_row = vars(form).get("check")
        if check_row is not None:
            check_first_rows(form, self.config.data, flag, seed=seed, check=check_row)

    def _build_rows(self, flag: str, side: Side | None) -> list[str]:
        from open_instruct.report.preview.sample import build_rows, make_row_builder, open_sources

        config = self.config
        builder = make_row_builder(config, self.objective, self.chat, self.judges)
        sources = open_sources(config.data, flag)
        arrays, report = build_rows(
            builder, sources, num_read=MOST_ROWS, seed=config.optim.seed, side=side
        )
        if report.bad and config.data.on_bad_row == "error":
            raise builder.bad_rows_error(report.num_rows)
        rows = make_token_dataset(builder, arrays, [source for _, source in sources])
        self.rows = self.rows or rows  # those to train on, which come first
        return report.lines()

    def check_memory(self) -> str:
        config = self.config
        nodes = find_node_sizes(config.parallel)
        folder = find_local_folder(config.model.config_path)
        if folder is None:
            return "not planned: the model is not here"
        has_gpu = has_gpu_here()
        is_elsewhere = isinstance(config, GRPOConfig) and config.fleet.ray_address is not None
        if is_elsewhere and not has_gpu:
            return (
                "not planned: learners are on other machines (--ray_address), and there is no "
                "GPU here"
            )
        check_model(build_shape(config, str(folder)), self.layout, config)
        plan_check = check_plan(
            config,
            nodes,
            model_folder=str(folder),
            memory_bytes=find_process_memory(sum(nodes), has_gpu=has_gpu),
            on_cuda=has_gpu,
        )
        line = plan_check.line.removeprefix("memory: ")
        if plan_check.warning:
            line += f"\nwarning: {plan_check.warning}"
        return line

    def take_first_loss(self) -> str:
        from open_instruct.commands.checks.first_loss import take_first_loss

        return take_first_loss(self.config, self.objective, rows=self.dataset, chat=self.chat)


def find_node_sizes(parallel: ParallelSection) -> tuple[int, ...]:
    """The processes that would train on each node."""
    if isinstance(parallel, LearnerParallelSection):
        return tuple(parallel.num_learners_per_node)
    num_ranks = count_ranks_to_start(getattr(parallel, "num_processes", None), os.environ)
    if num_ranks:
        return (num_ranks,)
    return node_sizes_from_environment(os.environ) or (1,)


def find_process_memory(num_sharing: int, *, has_gpu: bool) -> int:
    """Bytes for each of the processes that share this machine, or of a GPU."""
    if not has_gpu:
        return psutil.virtual_memory().total // num_sharing
    import torch

    from open_instruct.run.opening import find_memory_bytes

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    return find_memory_bytes(device, num_sharing=num_sharing)
