"""The form of a prompt row: `{"messages": [...], "ground_truth": ..., "dataset": "verifier"}`.

The last turn is the user's (an answer behind it is left out); row_forms.py has the other forms of a
prompt. `dataset` names the verifier that judges the answers; without it the verifiers of
`--verifier` do. A list of several pairs up with a list of as many ground truths, or shares one
ground truth; of one verifier a list may also be the ground truth itself, such as several right
answers. `weights` (or `weight`) says how much each verifier counts, 1 where it is missing.
`env_config` names the environment that answers the replies, and `tools` those of its tools that the
row has. Where there is none, `tools` may be the JSON schemas of tools that the prompt describes.
"""

import json
import math
from collections.abc import Container, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from open_instruct.config.name_hints import suggest_nearest
from open_instruct.core.episodes import RECORDED
from open_instruct.core.records import Check
from open_instruct.data.conversations.messages import Message
from open_instruct.data.conversations.row_forms import find_prompt
from open_instruct.data.conversations.row_keys import describe_keys
from open_instruct.data.files.foreign_json import shorten_value
from open_instruct.data.files.rows import MalformedRow, name_json_type
from open_instruct.data.prompt_environments import MAX_NAME, RowEnvironment, find_environment
from open_instruct.rewards.verifier import Verifier


def parse_prompt_row(
    row: Mapping[str, Any],
    known_verifiers: Mapping[str, Verifier],
    *,
    judges: Sequence[str] = (),
    remapped: Mapping[str, str] = MappingProxyType({}),
    environment: str | None = None,
    known_environments: Container[str] = (),
    system_prompt: str | None = None,
) -> tuple[tuple[Message, ...], tuple[Check, ...], RowEnvironment | None]:
    """A row's conversation up to the user's turn, its checks, and its environment, if any.

    Args:
        row: the columns.
        known_verifiers: by name.
        judges: verifiers of a row that names none, but for recorded sessions; without any, such a
            row is refused unless an environment answers it.
        remapped: the verifier for a name in lower case.
        environment: of a row that names none.
        known_environments: the names that rows may have.
        system_prompt: the text of the system turn, in place of the row's.

    Raises:
        MalformedRow: with the kind and the reason.
    """
    messages = find_prompt(row)
    names = row.get("dataset")
    if system_prompt is not None:
        messages = _replace_system_prompt(messages, system_prompt)
    row_environment = find_environment(row, default=environment, environments=known_environments)
    if row_environment is not None and row_environment.name == RECORDED:
        judges = ()  # its rewards were given
    if names is None and not judges:
        if row_environment is not None:
            return messages, (), row_environment
        raise MalformedRow(
            "missing_key",
            "no 'dataset', and no --verifier NAME to judge such rows; the row has "
            f"{describe_keys(row)}",
        )
    if names is None:
        names = list(judges)
    checks = _parse_checks(row, names, known_verifiers, remapped)
    return messages, checks, row_environment


def _replace_system_prompt(messages: tuple[Message, ...], text: str) -> tuple[Message, ...]:
    first = messages[0]
    if first["role"] == "system":
        return ({**first, "content": text}, *messages[1:])
    return (Message(role="system", content=text), *messages)


def _parse_checks(
    row: Mapping[str, Any],
    names: Any,
    known_verifiers: Mapping[str, Verifier],
    remapped: Mapping[str, str],
) -> tuple[Check, ...]:
    name_list = names if isinstance(names, list) else [names]
    verifiers = [_find_verifier(name, known_verifiers, remapped) for name in name_list]
    if not verifiers:
        raise MalformedRow("bad_verifier", "'dataset' names no verifier")
    truths = row.get("ground_truth")
    if truths is None and any(known_verifiers[name].needs_ground_truth for name in verifiers):
        raise MalformedRow(
            "missing_key",
            f"no 'ground_truth'; the row has {describe_keys(row)}",
            missing_key="ground_truth",
        )
    if not isinstance(names, list):
        truths = [truths]
    else:
        truths = _pair_ground_truths(truths, [known_verifiers[name] for name in verifiers])
    weights = _parse_weights(row, len(verifiers))
    checks = []
    for name, truth, weight in zip(verifiers, truths, weights, strict=True):
        value = dict(row) if known_verifiers[name].reads_row else truth
        truth = check_json_value(value, "'ground_truth'")
        check = Check(verifier=name, ground_truth=truth, weight=weight)
        _check_ground_truth(check, known_verifiers[name])
        checks.append(check)
    return tuple(checks)


def _pair_ground_truths(truths: Any, verifiers: Sequence[Verifier]) -> list[Any]:
    """The ground truth of each verifier in a list.

    A list that is not an entry for the one verifier is that verifier's ground truth as a whole.

    Raises:
        MalformedRow: there are more entries or fewer than verifiers.
    """
    if not isinstance(truths, list):
        return [truths] * len(verifiers)
    if len(verifiers) == 1 and not (len(truths) == 1 and _is_usable(truths[0], verifiers[0])):
        return [truths]
    if len(truths) != len(verifiers):
        raise MalformedRow(
            "unpaired_ground_truth",
            f"'ground_truth' has {len(truths)} entries for the {len(verifiers)} verifiers in "
            "'dataset'; give one each, or one that is not a list for all",
        )
    return truths


def _is_usable(truth: Any, verifier: Verifier) -> bool:
    try:
        verifier.check_ground_truth(truth)
    except Exception:  # the verifier may be foreign code; what it says is reported later
        return False
    return True


def _check_ground_truth(check: Check, verifier: Verifier) -> None:
    try:
        verifier.check_ground_truth(check.ground_truth)
    except Exception as error:  # the verifier may be foreign code, which may raise anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise MalformedRow(
            "bad_ground_truth", f"'ground_truth' for {check.verifier!r}: {reason}"
        ) from error


def _find_verifier(
    name: Any, known_verifiers: Mapping[str, Verifier], remapped: Mapping[str, str]
) -> str:
    if not isinstance(name, str) or not name:
        raise MalformedRow(
            "bad_verifier",
            f"'dataset' must name verifiers, and has {name_json_type(name)}: {shorten_value(name)}",
        )
    name = remapped.get(name.lower(), name)
    for spelling in (name, name.lower()):  # published rows write "MATH" beside "gsm8k"
        if spelling in known_verifiers:
            return spelling
    short_name = name[:MAX_NAME]
    hint = suggest_nearest(short_name, known_verifiers) or ";"
    raise MalformedRow(
        "unknown_verifier",
        f"'dataset': there is no verifier {short_name!r}{hint} Known are "
        f"{', '.join(sorted(known_verifiers))}; add your own by --verifier FILE.py:Class",
    )


def _parse_weights(row: Mapping[str, Any], count: int) -> list[float]:
    key = "weights" if row.get("weights") is not None else "weight"
    value = 1.0 if row.get(key) is None else row[key]
    weights = value if isinstance(value, list) else [value] * count
    for weight in weights:
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 0 <= weight < math.inf:
            raise MalformedRow(
                "bad_weight",
                f"{key!r} must be finite numbers of at least 0, not {shorten_value(weight)}",
            )
    if len(weights) != count:
        raise MalformedRow(
            "bad_weight", f"{key!r} has {len(weights)} entries for {count} verifiers; give one each"
        )
    return [float(weight) for weight in weights]


def check_json_value(value: Any, name: str) -> Any:
    """`value` itself if JSON can hold it.

    The cache stores it as JSON, and other processes receive it so.

    Raises:
        MalformedRow: it cannot; `name` is what the reason calls the value.
    """
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRow(
            "bad_ground_truth", f"{name} cannot be written as JSON: {error}"
        ) from error
    return value
