"""Whether the trackers of `--report_to` can be reached, checked without importing them."""

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path

from open_instruct.core.errors import InputError

WANDB_URL = "https://api.wandb.ai"
WANDB_WITHOUT_LOGIN = ("offline", "disabled", "dryrun")
SWANLAB_WITHOUT_LOGIN = ("local", "offline", "disabled")


def check_trackers(report_to: Sequence[str], environ: Mapping[str, str]) -> None:
    """Refuse trackers that are not installed, or where nobody has logged in.

    Raises:
        InputError: with the command that mends it.
    """
    for tracker in dict.fromkeys(report_to):
        spec = importlib.util.find_spec(tracker)
        # Without an origin: the folder ./wandb of earlier runs.
        if spec is None or spec.origin is None:
            raise InputError(
                f"--report_to {tracker} needs the {tracker} package: pip install "
                f"'open-instruct[{tracker}]', or leave it out: metrics.jsonl is always written",
                kind="missing_package",
            )
    if "wandb" in report_to and not _wandb_may_log_in(environ):
        raise InputError(
            "--report_to wandb: nobody has logged in here: run `wandb login`, or set "
            "WANDB_API_KEY (on every node that may hold rank 0), or WANDB_MODE=offline to keep "
            "the numbers on this machine",
            kind="remote",
        )
    if "swanlab" in report_to and not _swanlab_may_log_in(environ):
        raise InputError(
            "--report_to swanlab: nobody has logged in here: run `swanlab login`, or set "
            "SWANLAB_API_KEY (on every node that may hold rank 0), or SWANLAB_MODE=offline to "
            "keep the numbers on this machine",
            kind="remote",
        )


def _swanlab_may_log_in(environ: Mapping[str, str]) -> bool:
    """Whether SwanLab uploads nothing, or finds a key where it looks for one."""
    if environ.get("SWANLAB_MODE", "").lower() in SWANLAB_WITHOUT_LOGIN or environ.get(
        "SWANLAB_API_KEY"
    ):
        return True
    log_folder = environ.get("SWANLAB_ROOT") or environ.get("SWANLAB_SAVE_DIR") or "~/.swanlab"
    return any(
        (Path(folder).expanduser() / ".netrc").is_file() for folder in (".swanlab", log_folder)
    )


def _wandb_may_log_in(environ: Mapping[str, str]) -> bool:
    """False only where wandb would certainly ask for a key; in unclear cases wandb decides."""
    if environ.get("WANDB_MODE") in WANDB_WITHOUT_LOGIN:
        return True
    if environ.get("WANDB_API_KEY") or environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    # A settings file can hold a key, a mode or another server.
    folders = (
        environ.get("WANDB_CONFIG_DIR") or "~/.config/wandb",
        f"{environ.get('WANDB_DIR') or '.'}/wandb",
    )
    if any((Path(each).expanduser() / "settings").is_file() for each in folders):
        return True
    from requests.utils import get_netrc_auth  # as wandb reads it

    return get_netrc_auth(environ.get("WANDB_BASE_URL") or WANDB_URL) is not None
