"""The resolved flags of a run: written to `config.yaml`, read back, and compared on resuming."""

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from open_instruct import __version__
from open_instruct.config.flags import list_flags, list_sections, section_title, spell_value
from open_instruct.config.parser import COMMAND
from open_instruct.core.errors import InputError
from open_instruct.core.files import replace_text
from open_instruct.core.text import spell_count

REPORTED_PACKAGES = (
    "torch",
    "ai2-olmo-core",
    "transformers",
    "safetensors",
    "datasets",
    "tokenizers",
    "deepspeed",
)


def as_flat_dict(config: object) -> dict[str, Any]:
    """Every flag and its value, in the order of the sections."""
    return {
        name: getattr(getattr(config, flag.section), name)
        for name, flag in list_flags(type(config)).items()
    }


def write_config(
    config: object,
    path: str | Path,
    extra: Mapping[str, Any] | None = None,
    *,
    command: str = "",
) -> None:
    """Write `config.yaml`: `extra` as comments, the `command`, then every flag by section.

    The file can be given back to the parser as FILE.yaml. It is replaced in one move, so that a
    crash leaves the old one or the new one.
    """
    made_with = yaml.safe_dump(dict(extra), sort_keys=False, width=1000) if extra else ""
    lines = [f"# {line}" for line in made_with.splitlines()]
    lines += ["", yaml.safe_dump({COMMAND: command}).rstrip()] if command else []
    for section, section_class in list_sections(type(config)).items():
        title = section_title(section_class, section)
        # Escaped, because YAML reads some of the Unicode that it would write (line separators) as
        # spaces.
        text = yaml.safe_dump(
            vars(getattr(config, section)), sort_keys=False, allow_unicode=False, width=1000
        )
        lines += ["", f"# {title}", text.rstrip()]
    replace_text(Path(path), "\n".join(lines).lstrip("\n") + "\n")


def collect_provenance() -> dict[str, Any]:
    """Versions and git state, for `write_config`'s `extra`.

    Imports none of the packages it names.
    """
    versions = {"python": platform.python_version(), "open_instruct": __version__}
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"versions": versions, "git": _git_state(Path(__file__).resolve().parents[2])}


def _git_state(repository: Path) -> str:
    """The commit and whether files differ from it, or `not a git checkout`."""
    if not (repository / ".git").exists():
        return "not a git checkout"
    # `describe --dirty` refreshes the index: a run that is killed meanwhile leaves a lock that no
    # later git gets past.
    command = [
        "git",
        "--no-optional-locks",
        "-C",
        str(repository),
        "status",
        "--porcelain=v2",
        "--branch",
        "-uno",
    ]
    try:
        status = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    commit = status.split()[2].replace("(initial)", "unknown")  # "# branch.oid COMMIT"
    has_changes = any(line[0] != "#" for line in status.splitlines())
    return f"{commit} with uncommitted changes" if has_changes else commit


def resume_conflicts(
    saved: Mapping[str, Any],
    config: object,
    *,
    worlds: tuple[int, int] = (1, 1),
    ended_after: int | None = None,
) -> list[str]:
    """The flags of `config` that would make a resumed run another run than the one that was saved.

    `saved` is `as_flat_dict` of the saved config, and `worlds` are the data-parallel ranks then and
    now. Compared are the model, the rows, the loss and the optimisation. Of the batch only the
    number of rows in one global batch counts (microbatch x accumulation x data-parallel ranks), so
    that a run may move to another number of GPUs. The length (`num_epochs`, `max_train_steps`)
    counts too, because the schedule stretches with it, unless the learning rate is constant and
    without warm-up, or the run had ended, after step `ended_after`, and is to be longer;
    `num_epochs` alone does not count where `max_train_steps` overrules it. A flag that `saved` does
    not know is passed over.
    """
    now = as_flat_dict(config)
    flags = list_flags(type(config))
    conflicts = [
        f"--{name} was {spell_value(saved[name])}, is {spell_value(now[name])}"
        for name in now
        if flags[name].resume == "same"
        and name in saved
        and _comparable(saved[name]) != _comparable(now[name])
    ]
    lengths = describe_changed_lengths(saved, config)
    conflicts += [
        conflict
        for name, conflict in lengths.items()
        if not _is_longer(saved[name], now[name], ended_after)
    ]
    batch_flags = {name for name, flag in flags.items() if flag.resume == "batch"}
    if batch_flags and saved.keys() >= batch_flags:
        conflicts += _batch_conflict(saved, now, *worlds)
    return conflicts


def describe_changed_lengths(saved: Mapping[str, Any], config: object) -> dict[str, str]:
    """A sentence for each changed flag of the length, where that sets the learning rate."""
    now = as_flat_dict(config)
    flags = list_flags(type(config))
    if _is_flat(saved) and _is_flat(now):
        return {}
    is_overruled = (
        saved.get("max_train_steps") is not None and now.get("max_train_steps") is not None
    )
    return {
        name: f"--{name} was {spell_value(saved[name])}, is {spell_value(now[name])}"
        for name in now
        if flags[name].resume == "length" and name in saved and saved[name] != now[name]
        if not (is_overruled and name == "num_epochs")
    }


def _is_longer(before: int | None, after: int | None, ended_after: int | None) -> bool:
    """Whether a run that had ended is to be longer; after whole epochs, as many steps count."""
    if ended_after is None or after is None:
        return False
    if before is None:
        return after >= ended_after
    return after > before


def refuse_conflicts(saved: Mapping[str, Any], config: object, **run: Any) -> None:
    """Raise an InputError that lists `resume_conflicts` and the remedies, if there are any.

    `run` are its arguments.
    """
    if conflicts := resume_conflicts(saved, config, **run):
        lines = "\n".join(f"  {conflict}" for conflict in conflicts)
        folder = as_flat_dict(config)["output_dir"]
        raise InputError(
            f"--output_dir {folder} holds a run with other settings, which this command would not "
            f"continue:\n{lines}\nGive the old values to resume it, another --output_dir to "
            "start a second run, or --overwrite_output_dir to remove it and start afresh.",
            kind="other_run",
        )


def _is_flat(values: Mapping[str, Any]) -> bool:
    """Whether the learning rate is the same at every step, however many there are."""
    return values.get("lr_scheduler_type") == "constant" and values.get("warmup_ratio") == 0


def _batch_conflict(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    saved_world: int,
    world: int,
) -> Iterator[str]:
    before, was = _global_batch(saved, saved_world)
    after, becomes = _global_batch(now, world)
    if before != after:
        accumulation, remainder = divmod(before, now["per_device_train_batch_size"] * world)
        way_out = ""
        if accumulation and not remainder:
            way_out = f"; --gradient_accumulation_steps {accumulation} keeps it"
        yield f"the global batch was {was}, is {becomes}{way_out}"


def _global_batch(values: Mapping[str, Any], world: int) -> tuple[int, str]:
    """The number of rows in a global batch, and the same in words."""
    per_device = values["per_device_train_batch_size"]
    accumulation = values["gradient_accumulation_steps"]
    num_rows = per_device * accumulation * world
    ranks = spell_count(world, "data-parallel rank")
    return num_rows, f"{spell_count(num_rows, 'row')} ({per_device} x {accumulation} x {ranks})"


def _comparable(value: Any) -> Any:
    """`models/base/` and `models/base` are the same folder."""
    if isinstance(value, list):
        return [_comparable(item) for item in value]
    return os.path.normpath(value) if isinstance(value, str) and value else value
