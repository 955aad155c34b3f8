"""Our objectives as train modules of OLMo-core's own `Trainer`, and what a script takes with them.

`docs/train_modules.md` is their page; `examples/olmo_core/` has a script for each.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from open_instruct.config.policy_sections import PolicyLossSection
from open_instruct.config.preference_sections import PreferenceLossSection
from open_instruct.config.sections import (
    ConversationSection,
    DataSection,
    RowsSection,
    SFTDataSection,
)
from open_instruct.core.errors import InputError
from open_instruct.data.preference_rows import PreferenceBuilder
from open_instruct.data.sft_rows import choose_builder
from open_instruct.data.token_dataset import TokenDataset
from open_instruct.models.hf.head_kinds import Head
from open_instruct.models.start_model import StartModel
from open_instruct.objectives import dpo, kto, policy_gradient, prm, reward_model
from open_instruct.objectives.kto_rows import MismatchedBuilder, UnpairedBuilder
from open_instruct.objectives.objective import BoundLoss
from open_instruct.objectives.sft import CrossEntropy
from open_instruct.parallel.data_parallel import build_data_parallel_config, build_parallel_configs
from open_instruct.training.backend import Metrics
from open_instruct.training.olmo_core.data_loaders import (
    RolloutDataLoader,
    SampleStep,
    StepDataLoader,
    StepLoader,
    TrainerBatch,
)
from open_instruct.training.olmo_core.objective_module import ObjectiveTrainModule
from open_instruct.training.olmo_core.offline_module import OfflineTrainModule, RowForm

__all__ = [
    "DPOTrainModule",
    "GRPOTrainModule",
    "KTOTrainModule",
    "ObjectiveTrainModule",
    "OfflineTrainModule",
    "PRMTrainModule",
    "RewardModelTrainModule",
    "RolloutDataLoader",
    "RowForm",
    "SFTTrainModule",
    "StartModel",
    "StepDataLoader",
    "StepLoader",
    "TrainerBatch",
    "build_data_parallel_config",
    "build_parallel_configs",
]


class SFTTrainModule(OfflineTrainModule):
    """Supervised tuning on conversations; every argument is `ObjectiveTrainModule`'s."""

    def __init__(self, **module: Any) -> None:
        super().__init__(loss=CrossEntropy(), **module)

    def choose_rows(self, data: DataSection) -> RowForm:
        splits_replies = isinstance(data, ConversationSection) and data.split_replies
        fills_packs = isinstance(data, SFTDataSection) and data.packing_strategy == "bfd"
        return RowForm(
            builder=choose_builder(splits_replies=splits_replies), fills_packs=fills_packs
        )

    def _record(self, metrics: Metrics) -> None:
        super()._record(metrics)
        if "loss" in metrics:
            self.record_ce_loss(metrics["loss"])  # by the name that OLMo-core's callbacks look for


class DPOTrainModule(OfflineTrainModule):
    """Preference tuning on pairs; every other argument is `ObjectiveTrainModule`'s.

    :param loss: which preference loss, and its settings.
    """

    def __init__(self, *, loss: PreferenceLossSection, **module: Any) -> None:
        refuse_changed(loss, ref_policy_update_freq=MOVES, cache_logprobs_only=ONLY_SCORES)
        super().__init__(loss=dpo.bind(loss), **module)
        self.needs_reference = dpo.needs_reference(loss)

    def choose_rows(self, data: DataSection) -> RowForm:
        return RowForm(builder=PreferenceBuilder)


class KTOTrainModule(OfflineTrainModule):
    """KTO on single replies; every other argument is `ObjectiveTrainModule`'s.

    :param loss: which loss of single replies, and its settings.
    """

    needs_reference = True

    def __init__(self, *, loss: kto.KTOLossSection, **module: Any) -> None:
        refuse_changed(loss, cache_logprobs_only=ONLY_SCORES)
        self.section = loss
        super().__init__(loss=kto.bind(loss), **module)

    def choose_rows(self, data: DataSection) -> RowForm:
        if not data.packing:
            raise InputError("packing False: KTO's rows are packed here; leave it", kind="conflict")
        if self.section.has_mismatched:
            return RowForm(builder=MismatchedBuilder)
        return RowForm(builder=UnpairedBuilder)

    def check_rows(self, dataset: TokenDataset, rows_per_step: int) -> list[str]:
        return kto.check_rows(dataset, rows_per_step, self.section)

    def complete_loss(self, loss: BoundLoss) -> BoundLoss:
        # The loss packs a row's own reply again, as ranks that split rows need it.
        return kto.bind(self.section, pad_to_multiple_of=self.model_parallel_degree)


class RewardModelTrainModule(OfflineTrainModule):
    """Rewards of replies, learned from pairs; every other argument is `ObjectiveTrainModule`'s.

    The model has the head of a score: `StartModel.open(FOLDER, head="score")`.

    :param loss: the settings of the loss.
    """

    def __init__(self, *, loss: reward_model.RewardLossSection, **module: Any) -> None:
        super().__init__(loss=reward_model.bind(loss), head="score", **module)
        self.section = loss

    def choose_rows(self, data: DataSection) -> RowForm:
        return RowForm(
            builder=reward_model.RewardBuilder, arguments={"margin": self.section.margin}
        )

    def export_fields(
        self, data: RowsSection, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
    ) -> Mapping[str, Any]:
        return reward_model.export_fields(data, tokenizer, hf_config)


class PRMTrainModule(OfflineTrainModule):
    """Rewards of steps, learned from labels; every other argument is `ObjectiveTrainModule`'s.

    The model has the head of two classes, `StartModel.open(FOLDER, head="classes")`; or its own,
    with `reward_tokens` and the tokenizer that has their ids.

    :param steps: what a step is, and how it is judged.
    """

    def __init__(
        self,
        *,
        steps: prm.StepSection,
        tokenizer: PreTrainedTokenizerFast,
        **module: Any,
    ) -> None:
        head: Head = "vocabulary" if steps.reward_tokens else "classes"
        super().__init__(loss=prm.bind(steps).with_ids(tokenizer), head=head, **module)
        self.section = steps

    def choose_rows(self, data: DataSection) -> RowForm:
        return RowForm(
            builder=prm.choose_builder(self.section),
            arguments=prm.builder_arguments(self.section, add_bos=data.add_bos),
        )

    def export_fields(
        self, data: RowsSection, tokenizer: PreTrainedTokenizerFast, hf_config: PretrainedConfig
    ) -> Mapping[str, Any]:
        return prm.export_fields(self.section, data, tokenizer, hf_config)


class GRPOTrainModule(ObjectiveTrainModule):
    """Policy gradients on sampled completions; every other argument is `ObjectiveTrainModule`'s.

    :param loss: which policy loss, and its settings.
    :param temperature: of sampling; all log-probs are taken under it.
    :param response_length: tokens that a completion may have at most; the denominator of dr_grpo.
    :param reference: the start of the reference policy, where the loss has a `beta`.
    """

    def __init__(
        self,
        *,
        loss: PolicyLossSection,
        temperature: float,
        response_length: int,
        reference: StartModel | None = None,
        **module: Any,
    ) -> None:
        refuse_changed(
            loss,
            ref_policy_update_freq=MOVES,
            teacher_model_name_or_path="a teacher is `open-instruct grpo`'s",
            num_mini_batches=ONE_UPDATE,
            num_epochs=ONE_UPDATE,
            pack_length="rank_microbatch_size is the length of a packed row",
        )
        if (loss.beta > 0) != (reference is not None):
            raise InputError(
                f"beta {loss.beta:g} and reference={reference and 'a model'}: the weight of the "
                "divergence and the model that it is measured from are given both, or neither",
                kind="conflict",
            )
        bound = policy_gradient.bind(loss, temperature=temperature, response_length=response_length)
        super().__init__(loss=bound, reference=reference, **module)
        self.section = loss

    def build_data_loader(
        self,
        sample_step: SampleStep,
        *,
        num_steps: int,
        work_dir: str | Path,
    ) -> RolloutDataLoader:
        """The loader of steps of completions; see `RolloutDataLoader` for the arguments."""
        return RolloutDataLoader(
            sample_step,
            num_steps=num_steps,
            max_tokens_per_microbatch=self.rank_microbatch_size,
            pad_to_multiple_of=self.model_parallel_degree,
            prefix_sharing=self.section.prefix_sharing,
            dp_group=self.dp_process_group,
            work_dir=work_dir,
        )


MOVES = "a reference that moves has no place in the Trainer's checkpoints; `open-instruct` has one"
ONLY_SCORES = "the Trainer trains; `open-instruct` stores scores alone"
ONE_UPDATE = "a step of OLMo-core's Trainer is one update; `open-instruct grpo` takes several"


def refuse_changed(section: Any, **remedies: str) -> None:
    """Refuse settings that nothing here reads.

    :param remedies: what to do, by the name of the setting.
    :raises InputError: one of them is not at its default.
    """
    defaults = type(section)()
    for name, remedy in remedies.items():
        value = getattr(section, name)
        if value != getattr(defaults, name):
            raise InputError(f"{name} {value}: not read here; {remedy}", kind="conflict", flag=name)
