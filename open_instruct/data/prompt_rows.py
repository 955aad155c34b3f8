"""The form of a prompt row: `{"messages": [...], "ground_truth": ..., "dataset": "verifier"}`.

The last turn is the user's (an answer behind it is left out); messages.py has the other forms of a prompt.
`dataset` names the verifier that judges the answers; without it the verifiers of `--verifier` do. A list
of several pairs up with a list of as many ground truths, or shares one ground truth. `weights` (or `weight`) says how
much each verifier counts, 1 where it is not given.
A row with a value under one of `ENVIRONMENT_KEYS` is refused, because its replies need an environment to judge them.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from open_instruct.data.files.rows import MalformedRow, kind_of
from open_instruct.data.messages import Message, keys_of, prompt_of
from open_instruct.records import Check
from open_instruct.verifiers.verifier import Verifier

# The keys of the environment in open-instruct's rows; Arrow fills missing ones with empty values.
ENVIRONMENT_KEYS = ("env_config", "tools")


def parse_prompt_row(
    row: Mapping[str, Any],
    known_verifiers: Mapping[str, Verifier],
    *,
    judges: Sequence[str] = (),
    remapped: Mapping[str, str] = MappingProxyType({}),
) -> tuple[tuple[Message, ...], tuple[Check, ...]]:
    """Check one row and return its conversation, which ends with the user's turn, and how a reply is judged.

    `judges` judge a row that names no verifier. `remapped` gives the verifier for a name in lower case.

    Raises:
        MalformedRow: with the kind and the reason.
    """
    for key in ENVIRONMENT_KEYS:
        if _has_content(row.get(key)):
            raise MalformedRow(
                "environment",
                f"{key!r} says what answers a reply, and nothing does yet: a completion is one turn, which 'dataset' "
                "judges; leave such rows out, or take the key away if they are to be judged without",
            )
    messages, names = prompt_of(row), row.get("dataset")
    if names is None and not judges:
        raise MalformedRow(
            "missing_key", f"no 'dataset', and no --verifier NAME to judge such rows; the row has {keys_of(row)}"
        )
    return messages, _checks(row, list(judges) if names is None else names, known_verifiers, remapped)


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
    if truths is None and not all(known[name].reads_row for name in verifiers):
        raise MalformedRow("missing_key", f"no 'ground_truth'; the row has {keys_of(row)}")
    if not isinstance(names, list):
        truths = [truths]  # one verifier: the list itself is its ground truth
    elif not isinstance(truths, list):
        truths = [truths] * len(verifiers)
    if len(truths) != len(verifiers):
        raise MalformedRow(
            "unpaired_ground_truth",
            f"'ground_truth' has {len(truths)} entries for the {len(verifiers)} verifiers in 'dataset'; give one "
            "each, or one that is not a list for all",
        )
    checks = []
    for name, truth, weight in zip(verifiers, truths, _weights(row, len(verifiers)), strict=True):
        truth = _json_value(dict(row) if known[name].reads_row else truth)
        checks.append(Check(verifier=name, ground_truth=truth, weight=weight))
        _check_ground_truth(checks[-1], known[name])
    return tuple(checks)


def _check_ground_truth(check: Check, verifier: Verifier) -> None:
    try:
        verifier.check_ground_truth(check.ground_truth)
    except Exception as error:  # the verifier may be foreign code, which may raise anything
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise MalformedRow("bad_ground_truth", f"'ground_truth' for {check.verifier!r}: {reason}") from error


def _verifier(name: Any, known: Mapping[str, Verifier], remapped: Mapping[str, str]) -> str:
    if not isinstance(name, str) or not name:
        raise MalformedRow("bad_verifier", f"'dataset' must name verifiers, and has {kind_of(name)}: {name!r}")
    name = remapped.get(name.lower(), name)
    for spelling in (name, name.lower()):  # published rows write "MATH" beside "gsm8k"
        if spelling in known:
            return spelling
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise MalformedRow(
        "unknown_verifier",
        f"'dataset': there is no verifier {name!r}; {meant}Known are {', '.join(sorted(known))}; add your own by "
        "--verifier FILE.py:Class",
    )


def _weights(row: Mapping[str, Any], count: int) -> list[float]:
    key = "weights" if row.get("weights") is not None else "weight"
    value = 1.0 if row.get(key) is None else row[key]
    weights = value if isinstance(value, list) else [value] * count
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
            raise MalformedRow("bad_weight", f"{key!r} must be finite numbers of at least 0, not {weight!r}")
    if len(weights) != count:
        raise MalformedRow("bad_weight", f"{key!r} has {len(weights)} entries for {count} verifiers; give one each")
    return [float(weight) for weight in weights]


def _json_value(value: Any) -> Any:
    """`value` itself if JSON can hold it: the cache keeps it as JSON, and other processes receive it."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise MalformedRow("bad_ground_truth", f"'ground_truth' cannot be written as JSON: {error}") from error
    return value
