"""A run that has taken all its steps exports its model as `open-instruct export` does, without starting a fleet."""

import torch

from open_instruct.checkpoints.step_folder import candidates, damage_of, refuse_another_start_model, step_of
from open_instruct.parallel.peers import doing
from open_instruct.rollout.checked_run import RolloutRun
from open_instruct.run import export_command


def export_finished(run: RolloutRun) -> bool:
    """Write OUT/hf_model if all steps were taken. Returns whether it was written.

    The export is left to the learners if the checkpoint is damaged, if there are adapters to merge, and in float16,
    which may be too small for a weight.

    Raises:
        InputError: the start model was changed in place.
        RunError: the disk filled up or failed; an earlier export is unharmed.
    """
    config = run.config
    checkpoints = candidates(run.directory.path)
    is_safe = run.pretrained.dtype_named(config.run.export_dtype) != torch.float16
    if not checkpoints or step_of(checkpoints[0]) < config.num_steps or config.adapters is not None or not is_safe:
        return False
    doing("exporting the trained model")
    if damage_of(checkpoints[0]):
        return False
    refuse_another_start_model(checkpoints[0], run.pretrained.fingerprint)
    run.console.say(f"all {config.num_steps:,} steps were taken: exporting the model of {checkpoints[0]}")
    return export_command.main([str(checkpoints[0]), "--output_dir", str(run.directory.hf_model)]) == 0
