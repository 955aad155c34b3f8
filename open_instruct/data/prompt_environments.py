"""Find the environment that answers the replies to a prompt row, and the columns it is made of."""

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

from open_instruct.data.conversations.tool_turns import read_schemas
from open_instruct.data.files.rows import MalformedRow, name_json_type

MAX_NAME = 100  # characters of a name that is compared with those that are known


class RowEnvironment(NamedTuple):
    """The environment of a row, and the columns that it is made of."""

    name: str
    columns: dict[str, Any]


def find_environment(
    row: Mapping[str, Any], *, default: str | None, environments: Container[str]
) -> RowEnvironment | None:
    """The environment that answers the replies to a row; None where none does.

    `env_config` has it as open-instruct's rows do: `{"env_name": "counter", "target": 5}`, a list
    of one such object, or `{"env_configs": [...], "max_steps": 8}`. What it says beside the name
    counts as columns of the row.

    Args:
        row: of prompts.
        default: the environment of a row that names none.
        known: the environments that there are.

    Raises:
        MalformedRow: it names none or several, or one that there is not; or `tools` is no list of
            names.
    """
    tools = row.get("tools") if _has_content(row.get("tools")) else None
    name, settings = _read_config(row.get("env_config"), default=default, environments=environments)
    if name is None and _has_content(settings):
        raise MalformedRow(
            "environment",
            "'env_config' names no environment; give its 'env_name', or --environment",
        )
    schemas = read_schemas(tools)
    if name is None and schemas:
        return None  # tools that the prompt describes, and nothing runs
    are_names = isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)
    if tools is not None and (name is None or schemas or not are_names):
        problem = (
            "'tools' are the names of those tools of the row's environment that the policy may call"
        )
        if name is None:
            problem += "; the row has none: name it in 'env_config' or by --environment"
        raise MalformedRow("environment", problem)
    if name is None:
        return None
    columns = {key: value for key, value in row.items() if key not in ("env_config", "messages")}
    columns |= {key: value for key, value in settings.items() if value is not None}
    return RowEnvironment(name, columns)


def _read_config(
    env_config: Any, *, default: str | None, environments: Container[str]
) -> tuple[str | None, dict[str, Any]]:
    """The name of the environment in a row's `env_config`, and the settings beside the name."""
    settings: dict[str, Any] = {}
    if isinstance(env_config, Mapping) and "env_configs" in env_config:
        settings = {key: value for key, value in env_config.items() if key != "env_configs"}
        env_config = env_config["env_configs"]
    entries = env_config if isinstance(env_config, list) else [env_config]
    entries = [entry for entry in entries if _has_content(entry)]
    if len(entries) > 1:
        raise MalformedRow(
            "environment",
            f"'env_config' names {len(entries)} environments; one answers a row's replies",
        )
    if not entries:
        return default, settings
    entry = entries[0]
    if not isinstance(entry, Mapping):
        raise MalformedRow(
            "environment", f"'env_config' must be an object, not {name_json_type(entry)}"
        )
    name = default if entry.get("env_name") is None else entry["env_name"]
    if name is not None and (not isinstance(name, str) or name not in environments):
        raise MalformedRow(
            "environment",
            f"'env_config': there is no environment {name!r:.{MAX_NAME}}; give one of ours, "
            "or --environment",
        )
    for key, value in entry.items():
        if key not in ("env_name", "is_text_env"):
            settings[key] = value
    return name, settings


def _has_content(value: Any) -> bool:
    """Whether a value says something, at any depth; Arrow has null for what a row lacks."""
    if isinstance(value, Mapping):
        return any(map(_has_content, value.values()))
    if isinstance(value, list):
        return any(map(_has_content, value))
    return value not in (None, "", "[]", "{}", "null")
