"""Train GRPO: engines generate, verifiers judge, sharded learners train, weights flow back.

    python open_instruct/grpo_olmo_core_actor.py --model_name_or_path DIR \
        --dataset_mixer_list prompts.jsonl 1.0 --num_learners_per_node 2 --vllm_num_engines 1 \
        --output_dir OUT

This process is the driver: it starts (or joins) Ray, places learners and engines, and takes the
steps with them. A learner is an actor of `PolicyTrainerOLMoCoreProcess`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    # Our own folder must not come first: a file of ours would shadow a library of the same name.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from open_instruct.commands.process import check_in_place_of_run, exit_process, run_entry
from open_instruct.config.grpo import GRPOConfig, validate_grpo
from open_instruct.config.help import asks_for_check
from open_instruct.data.prompt_rows import parse_prompt_row
from open_instruct.data.prompts import PromptBuilder, build_row_settings
from open_instruct.environments.registry import known_environments
from open_instruct.rewards.registry import known_verifiers
from open_instruct.run.earlier_command import refuse_another_command
from open_instruct.run.first_look import check_first_rows, check_paths

if TYPE_CHECKING:
    from olmo_core.train.callbacks import Callback

    from open_instruct.batching.rollouts import RankStep
    from open_instruct.cluster.learner_group import LearnerProcess
    from open_instruct.core.records import BestStep


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the flags in `argv` (default: the command line) and return the exit code."""
    return run_grpo(
        GRPOConfig, PolicyTrainerOLMoCoreProcess, argv, program="grpo_olmo_core_actor.py"
    )


def run_grpo(
    config_class: type[GRPOConfig],
    learner_class: type[LearnerProcess],
    argv: Sequence[str] | None,
    *,
    program: str,
) -> int:
    """Run with the flags in `argv` and learners of `learner_class`; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if asks_for_check(words):
        return check_in_place_of_run(
            partial(check, config_class=config_class), words, program=program
        )
    return run_entry(
        config_class,
        partial(train, learner_class=learner_class),
        argv,
        program=program,
        validate=validate_grpo,
        look=preflight,
    )


def check(words: Sequence[str], *, config_class: type[GRPOConfig]) -> int:
    """Check all that a run with these words could be refused for; returns the exit code."""
    from open_instruct.commands.check import check_run
    from open_instruct.objectives.policy_gradient import GRPO

    return check_run(GRPO, words, config_class=config_class)


# Users' own code is loaded before torch, so that a misspelt name is refused at once.
def preflight(config: GRPOConfig) -> None:
    """Check what the flags name, and the first of the prompts.

    Raises:
        InputError: one of them cannot be used.
    """
    refuse_another_command(config.run, "grpo")
    verifiers = known_verifiers(config.reward)
    check_paths(config)
    environments = known_environments(config.environment)
    check = partial(
        parse_prompt_row,
        known_verifiers=verifiers,
        known_environments=environments,
        **build_row_settings(config),
    )
    check_first_rows(
        PromptBuilder,
        config.data,
        "dataset_mixer_list",
        "dataset_mixer_eval_list",
        seed=config.optim.seed,
        check=check,
    )


def train(
    config: GRPOConfig,
    *,
    learner_class: type[LearnerProcess] | None = None,
    callbacks: Mapping[str, Callback] | None = None,
) -> int:
    """Train as the driver; returns the exit code.

    Args:
        learner_class: the class of a learner.
        callbacks: OLMo-core's callbacks by name, which get the metrics of every step.
    """
    # torch, Ray and all that needs them load only once the flags are known to be good.
    from open_instruct.cluster.ray_cluster import refuse_imported_ray
    from open_instruct.rl.checked_run import open_rollout_run
    from open_instruct.rl.decide_placement import decide_placement
    from open_instruct.rl.driver import Driver, Listener
    from open_instruct.rl.fleet import start_fleet

    config = decide_placement(config)
    listeners = [Listener(name, callback) for name, callback in (callbacks or {}).items()]
    if config.fleet.ray_address is None:
        refuse_imported_ray()
    kind = learner_class or PolicyTrainerOLMoCoreProcess
    with open_rollout_run(config) as run, start_fleet(kind, run) as fleet:
        return Driver(replace(run, trackers=(*run.trackers, *listeners)), fleet).fit()


class PolicyTrainerOLMoCoreProcess:
    """A learner: one process, one device, one rank of the sharded policy, on --backend.

    Usable once constructed. Ray makes one of each rank, with torchrun's variables in its
    environment. Every method is collective: the driver calls it on all ranks at once.
    """

    def __init__(self, config: GRPOConfig, *, weight_sync_backend: str, weight_sync: str) -> None:
        """Join the other learners and load the start model.

        Args:
            config: of the run.
            weight_sync_backend: the transport that `choose_transport` returned for the places of
                learners and engines.
            weight_sync: "dense", or "delta" where only what has changed is sent.
        """
        import torch

        from open_instruct.run.opening import join_run
        from open_instruct.run.pretrained import open_pretrained
        from open_instruct.training.grpo import GRPOLearner
        from open_instruct.weight_sync.folder import choose_sync_folder
        from open_instruct.weight_sync.folder_sender import FolderSender
        from open_instruct.weight_sync.sender import WeightSender
        from open_instruct.weight_sync.transports import FOLDER

        self.config = config
        self.run = join_run(config)
        self.pretrained = open_pretrained(config, self.run.directory.hf_model)
        self.learner = GRPOLearner(self.pretrained, run=self.run, config=config)
        fleet = config.fleet
        kind: Callable[..., WeightSender] = WeightSender
        if weight_sync_backend == FOLDER:
            folder = choose_sync_folder(fleet.weight_sync_folder, self.run.directory.path)
            kind = partial(FolderSender, folder=folder, anchor_every=fleet.weight_sync_anchor_every)
        self.sender = kind(
            self.learner.policy.model,
            self.pretrained.names,
            backend=weight_sync_backend,
            dtype=getattr(torch, config.engine_dtype),
            bucket_bytes=fleet.weight_sync_bucket_mib << 20,
            timeout_s=fleet.weight_sync_timeout_s,
            adapter_alone=config.sent_adapter is not None,
            changes_alone=weight_sync == "delta",
            check_every=fleet.weight_sync_check,
        )

    def step(self, work: RankStep) -> dict[str, float]:
        """Learn from the completions of one step; returns its metrics, the same on every rank."""
        return self.learner.step(work)

    def compare_with_engine(self, work: RankStep) -> dict[str, float]:
        """How far the policy's log-probs of `work` are from the engine's; nothing is learned."""
        return self.learner.compare_with_engine(work)

    def move_to_host(self) -> None:
        """Free the device of the learner's state, for an engine; nothing if that was done."""
        self.learner.move_to_host()

    def move_to_device(self) -> None:
        """Bring the learner's state back, bit for bit; nothing if it is there."""
        self.learner.move_to_device()

    def resume(self) -> tuple[dict[str, Any] | None, list[str]]:
        """Load the newest whole checkpoint, if there is one.

        Returns the driver's state that `save_state` got for it, or None, and warnings for people.
        """
        warnings: list[str] = []
        return self.learner.resume(warn=warnings.append), warnings

    def save_state(
        self, drivers_state: dict[str, Any], *, waits: bool, best_step: int | None
    ) -> None:
        """Write a checkpoint of this step, with the state of the driver.

        It has policy, optimizer, reference and random state. The checkpoint of `best_step` is not
        removed.
        """
        self.learner.save(drivers_state, waits=waits, best_step=best_step)

    def save_model(self, best: BestStep | None) -> None:
        """Write OUT/critic and OUT/hf_model, of the `best` step or of the last."""
        from open_instruct.training.export import export_policy

        loop = self.learner.loop
        loop.close()
        if best is not None and best.step != loop.step:
            loop.load_step(best.step)
        if self.learner.critic is not None:
            self.learner.critic.export(run=self.run, export_dtype=self.config.run.export_dtype)
        export_policy(
            self.learner.policy,
            self.pretrained,
            run=self.run,
            export_dtype=self.config.run.export_dtype,
            adapters=self.config.adapters,
            trained_by="grpo",
            best=best,
            for_olmo_core=self.config.run.export_olmo_core,
        )

    def open_weight_channel(self, num_receivers: int) -> dict[str, Any]:
        """Offer a channel, and return the facts that engines need; see `WeightSender.open`."""
        return self.sender.open(num_receivers)

    def join_weight_channel(self) -> None:
        """Wait until every engine has connected."""
        self.sender.join()

    def broadcast_to_vllm(self, version: int) -> None:
        """Stream the policy from its shards to the engines."""
        self.sender.send(version)


if __name__ == "__main__":
    # Ray knows a learner's class by its module's name, which must not be `__main__` there.
    from open_instruct.grpo_olmo_core_actor import main as main_of_package

    exit_process(main_of_package())
