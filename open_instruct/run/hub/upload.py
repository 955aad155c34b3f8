"""The upload of a trained model to the Hugging Face hub, if `--push_to_hub` asks for it."""

from pathlib import Path

from open_instruct.config.run_sections import RunSection
from open_instruct.core.errors import InputError, RunError
from open_instruct.data.files.foreign_json import one_line
from open_instruct.parallel.status import this_process


def open_repository(run: RunSection) -> str:
    """Create the repository if there is none, and return its full name.

    Called before a run too, so that no run ends with a model that cannot be uploaded.

    Raises:
        InputError: nobody has logged in, the name is not valid, or the hub cannot be reached or
            refuses.
    """
    from huggingface_hub import HfApi

    refuse_without_login()
    name = _find_repository(run)
    try:
        return str(
            HfApi().create_repo(name, private=run.hub_private or None, exist_ok=True).repo_id
        )
    except Exception as error:  # the name, the network or the hub
        raise InputError(
            f"--push_to_hub: the hub gives no repository {name} ({type(error).__name__}: "
            f"{one_line(error)}); give another --hub_model_id, or leave --push_to_hub out and "
            "upload the model when it is there",
            kind="remote",
        ) from error


def refuse_without_login() -> None:
    """:raises InputError: nobody has logged in to the hub here."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise InputError(
            "--push_to_hub: nobody has logged in here: run `hf auth login`, or set HF_TOKEN",
            kind="remote",
        )


def upload(run: RunSection, folder: Path, *, step: str = "") -> str:
    """Upload the files in `folder`, and return a sentence with the model's address.

    Args:
        step: which step the model is of, where that is not the last: `step 40, the best by
            eval/loss (1.25)`.

    Raises:
        RunError: the upload failed; the message has the command that tries again. The folder is
            unchanged.
    """
    from huggingface_hub import HfApi

    this_process.begin("uploading the trained model")
    name = _find_repository(run)
    message = f"A trained model: {step}" if step else "A trained model"
    try:
        name = open_repository(run)
        commit = HfApi().upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except Exception as error:  # the network, the hub or a token that has ended
        private = " --private" if run.hub_private else ""
        raise RunError(
            f"the trained model is in {folder}, and was not uploaded ({type(error).__name__}: "
            f"{one_line(error)}). To try again: hf upload {name} {folder} .{private}"
        ) from error
    of_step = f" of {step}," if step else ""
    return f"the trained model{of_step} is at {commit.repo_url}"


def _find_repository(run: RunSection) -> str:
    return run.hub_model_id or Path(run.output_dir).resolve().name
