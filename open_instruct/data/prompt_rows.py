"""The form of a prompt row: `{"messages": [...], "ground_truth": ..., "dataset": "verifier"}`.

The last turn is the user's (an answer behind it is left out); row_forms.py has the other forms of a
prompt. `dataset` names the verifier that judges the answers; without it the verifiers of
`--verifier` do. A list of several pairs up with a list of as many ground truths, or shares one
ground truth. `weights` (or `weight`) says how much each verifier counts, 1 where it is not given.
`env_config` names the environment that answers the replies, and `tools` those of its tools that the
row has. Where there is none, `tools` may be the JSON schemas of tools that the prompt tells of.
"""

import json
import math
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from open_instruct.config.parser import nearest
from open_instruct.core.records import Check
from open_instruct.data.conversations.messages import Message
from open_instruct.data.conversations.row_forms import find_prompt
from open_instruct.data.conversations.row_keys import describe_keys
from open_instruct.data.conversations.tool_turns import read_schemas
from open_instruct.data.files.foreign_json import shortened
from open_instruct.data.files.rows import MalformedRow, kind_of
from open_instruct.rewards.verifier import Verifier

MAX_NAME = 100  # characters of a name that is compared with those that are known


class AnsweredBy(NamedTuple):
    """The environment that answers a row's replies, and the columns that it is made of."""

    name: str
    columns: dict[str, Any]


def parse_prompt_row(
    row: Mapping[str, Any],
    known_verifiers: Mapping[str, Verifier],
    *,
    judges: Sequence[str] = (),
    remapped: Mapping[str, str] = MappingProxyType({}),
    environment: str | None = None,
    known_environments: Container[str] = (),
    system_prompt: str | None = None,
) -> tuple[tuple[Message, ...], tuple[Check, ...], AnsweredBy | None]:
    """A row's conversation, which ends with the user's turn; how replies are judged; what answers
    them, if anything.

    `judges` judge a row that names no verifier; without any, a row is refused unless an environment
    answers it, see `environment_of`. `remapped` gives the verifier for a name in lower case.
    `system_prompt` is the text of the system turn in place of the row's own.

    Raises:
        MalformedRow: with the kind and the reason.
    """
    messages, names = find_prompt(row), row.get("dataset")
    if system_prompt is not None:
        has_own = messages[0]["role"] == "system"
        own, turns = (
            (messages[0], messages[1:])
            if has_own
            else (Message(role="system", content=""), messages)
        )
        messages = ({**own, "content": system_prompt}, *turns)
    answered_by = environment_of(row, default=environment, known=known_environments)
    if names is None and not judges and answered_by is not None:
        return messages, (), answered_by
    if names is None and not judges:
        raise MalformedRow(
            "missing_key",
            (
                "no 'dataset', and no --verifier NAME to judge such rows; the row has "
                f"{describe_keys(row)}"
            ),
        )
    checks = _checks(row, list(judges) if names is None else names, known_verifiers, remapped)
    return messages, checks, answered_by


def environment_of(
    row: Mapping[str, Any], *, default: str | None, known: Container[str]
) -> AnsweredBy | None:
    """The environment that answers a row's replies; None where none does.

    `env_config` has it as open-instruct's rows do: `{"env_name": "counter", "target": 5}`, a list
    of one such object, or `{"env_configs": [...], "max_steps": 8}`. What it says beside the name
    counts as columns of the row.

    Raises:
        MalformedRow: it names none or several, or one that there is not; or `tools` is no list of
            names.
    """
    config = row.get("env_config")
    tools = row.get("tools") if _has_content(row.get("tools")) else None
    more: dict[str, Any] = {}
    if isinstance(config, Mapping) and "env_configs" in config:
        more = {key: value for key, value in config.items() if key != "env_configs"}
        config = config["env_configs"]
    entries = config if isinstance(config, list) else [config]
    named = [entry for entry in entries if _has_content(entry)]
    if len(named) > 1:
        raise MalformedRow(
            "environment",
            f"'env_config' names {len(named)} environments; one answers a row's replies",
        )
    name = default
    if named:
        entry = named[0]
        if not isinstance(entry, Mapping):
            raise MalformedRow(
                "environment", f"'env_config' must be an object, not {kind_of(entry)}"
            )
        name = default if entry.get("env_name") is None else entry["env_name"]
        if name is not None and (not isinstance(name, str) or name not in known):
            raise MalformedRow(
                "environment",
                f"'env_config': there is no environment {name!r:.{MAX_NAME}}; give one of ours, "
                "or --environment",
            )
        more = {
            **more,
            **{
                key: value for key, value in entry.items() if key not in ("env_name", "is_text_env")
            },
        }
    if name is None and _has_content(more):
        raise MalformedRow(
            "environment",
            "'env_config' names no environment; give its 'env_name', or --environment",
        )
    schemas = read_schemas(tools)
    if name is None and schemas:
        return None  # what the prompt tells of
    are_names = isinstance(tools, list) and all(isinstance(tool, str) for tool in tools)
    if tools is not None and (name is None or schemas or not are_names):
        raise MalformedRow(
            "environment",
            "'tools' are the names of those tools of the row's environment that the policy may call"
            + (
                "; the row has none: name it in 'env_config' or by --environment"
                if name is None
                else ""
            ),
        )
    if name is None:
        return None
    columns = {key: value for key, value in row.items() if key not in ("env_config", "messages")}
    return AnsweredBy(
        name, columns | {key: value for key, value in more.items() if value is not None}
    )


def _has_content(value: Any) -> bool:
    if isinstance(value, Mapping | list):
        return any(map(_has_content, value.values() if isinstance(value, Mapping) else value))
    return value not in (None, "", "[]", "{}", "null")


def _checks(
    row: Mapping[str, Any], names: Any, known: Mapping[str, Verifier], remapped: Mapping[str, str]
) -> tuple[Check, ...]:
    listed = names if isinstance(names, list) else [names]
    verifiers = [_verifier(name, known, remapped) for name in listed]
    if not verifiers:
        raise MalformedRow("bad_verifier", "'dataset' names no verifier")
    truths = row.get("ground_truth")
    if truths is None and any(known[name].needs_ground_truth for name in verifiers):
        raise MalformedRow(
            "missing_key",
            f"no 'ground_truth'; the row has {describe_keys(row)}",
            missing_key="ground_truth",
        )
    if not isinstance(names, list):
        truths = [truths]  # one verifier: the list itself is its ground truth
    elif not isinstance(truths, list):
        truths = [truths] * len(verifiers)
    if len(truths) != len(verifiers):
        raise MalformedRow(
            "unpaired_ground_truth",
            f"'ground_truth' has {len(truths)} entries for the {len(verifiers)} verifiers in "
            "'dataset'; give one each, or one that is not a list for all",
        )
    checks = []
    for name, truth, weight in zip(verifiers, truths, _weights(row, len(verifiers)), strict=True):
        truth = json_value(dict(row) if known[name].reads_row else truth, "'ground_truth'")
        checks.append(Check(verifier=name, ground_truth=truth, weight=weight))
        _check_ground_truth(checks[-1], known[name])
    return tuple(checks)


def _check_ground_truth(check: Check, verifier: Verifier) -> None:
    try:
        verifier.check_ground_truth(check.ground_truth)
    except Exception as error:  # the verifier may be foreign code, which may raise anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise MalformedRow(
            "bad_ground_truth", f"'ground_truth' for {check.verifier!r}: {reason}"
        ) from error


def _verifier(name: Any, known: Mapping[str, Verifier], remapped: Mapping[str, str]) -> str:
    if not isinstance(name, str) or not name:
        raise MalformedRow(
            "bad_verifier",
            f"'dataset' must name verifiers, and has {kind_of(name)}: {shortened(name)}",
        )
    name = remapped.get(name.lower(), name)
    for spelling in (name, name.lower()):  # published rows write "MATH" beside "gsm8k"
        if spelling in known:
            return spelling
    raise MalformedRow(
        "unknown_verifier",
        "'dataset': there is no verifier "
        f"{name[:MAX_NAME]!r}{nearest(name[:MAX_NAME], known) or ';'} Known are "
        f"{', '.join(sorted(known))}; add your own by --verifier FILE.py:Class",
    )


def _weights(row: Mapping[str, Any], count: int) -> list[float]:
    key = "weights" if row.get("weights") is not None else "weight"
    value = 1.0 if row.get(key) is None else row[key]
    weights = value if isinstance(value, list) else [value] * count
    for weight in weights:
        if (
            isinstance(weight, bool)
            or not isinstance(weight, (int, float))
            or not 0 <= weight < math.inf
        ):
            raise MalformedRow(
                "bad_weight",
                f"{key!r} must be finite numbers of at least 0, not {shortened(weight)}",
            )
    if len(weights) != count:
        raise MalformedRow(
            "bad_weight", f"{key!r} has {len(weights)} entries for {count} verifiers; give one each"
        )
    return [float(weight) for weight in weights]


def json_value(value: Any, what: str) -> Any:
    """`value` itself if JSON can hold it: the cache keeps it as JSON, and other processes receive
    it.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRow(
            "bad_ground_truth", f"{what} cannot be written as JSON: {error}"
        ) from error
    return value
