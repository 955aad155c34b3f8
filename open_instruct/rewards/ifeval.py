"""The verifier of constraints on how a text is written, for rows of IFEval and of RLVR-IFeval.

The ground truth is an object, or its text, in one of two forms::

    {"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 300}]}
    {"func_name": "verify_bullet_points", "N": 3}

Of the first, open-instruct's present rows have a list of one, written as Python does, with
`instruction_id` in place of `instruction_id_list`.

Arguments that are null count as missing, since published rows carry all arguments of all
constraints. The file constraints.json says which check of constraints.py each name stands for, and
how the check calls the row's arguments.
"""

import ast
import importlib.util
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.core.text import json_or_text
from open_instruct.rewards import constraints
from open_instruct.rewards.verifier import Verifier
from open_instruct.rewards.words import find_tagged_answer

# The constraints of "ifeval" and of "rlvr_ifeval" by name. Each is its `check`, by name, and
# `arguments`: the check's name for each argument of the row. Example: "keywords:existence" is
# `{"check": "has_keywords", "arguments": {"keywords": "words"}}`.
SUITES: dict[str, dict[str, dict[str, Any]]] = json.loads(
    Path(__file__).with_name("constraints.json").read_text(encoding="utf-8")
)

_IDS = ("instruction_id_list", "instruction_id")


class IFEval(Verifier):
    """The share of the row's constraints that the completion follows; 0 for an empty one."""

    name: ClassVar[str] = "ifeval"

    def check_ground_truth(self, ground_truth: Any) -> None:
        parse_constraints(ground_truth)

    def score(self, completion: str, ground_truth: Any) -> float:
        text = find_tagged_answer(completion).strip()
        rules = parse_constraints(ground_truth)
        if not text:
            return 0.0
        return sum(check(text, **arguments) for check, arguments in rules) / len(rules)


class IFEvalOld(IFEval):
    """As `IFEval`, by the name that open-instruct has for rows of RLVR-IFeval."""

    name: ClassVar[str] = "ifeval_old"


def parse_constraints(ground_truth: Any) -> list[tuple[Callable[..., bool], dict[str, Any]]]:
    """The checks that a ground truth asks for, each with its arguments.

    Raises:
        ValueError: it is of neither form, or a constraint or an argument is not known, missing or
            of the wrong kind.
    """
    ground_truth = _unwrap_object(ground_truth)
    if not isinstance(ground_truth, dict) or not ground_truth.keys() & {"func_name", *_IDS}:
        raise ValueError(
            "it must be an object or its JSON, with 'func_name' and arguments, or "
            "'instruction_id_list' and 'kwargs'"
        )
    if "func_name" in ground_truth:
        arguments = {name: value for name, value in ground_truth.items() if name != "func_name"}
        return [_parse_constraint(SUITES["rlvr_ifeval"], ground_truth["func_name"], arguments)]
    ids = next(ground_truth[key] for key in _IDS if key in ground_truth)
    kwargs: Any = ground_truth.get("kwargs")
    are_paired = isinstance(ids, list) and isinstance(kwargs, list) and len(ids) == len(kwargs)
    if not are_paired or not ids:
        raise ValueError(
            "'instruction_id_list' and 'kwargs' must be lists with one entry a constraint, and "
            "not empty"
        )
    return [
        _parse_constraint(SUITES["ifeval"], name, arguments)
        for name, arguments in zip(ids, kwargs, strict=True)
    ]


def _unwrap_object(ground_truth: Any) -> Any:
    """The object in a text, of JSON or of Python, or in a list of one; anything else as it is."""
    value = json_or_text(ground_truth)
    if isinstance(value, str):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            value = ast.literal_eval(value)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict | str):
        return _unwrap_object(value[0])
    return value


def _parse_constraint(
    rules: Mapping[str, Any], name: Any, arguments: Any
) -> tuple[Callable[..., bool], dict[str, Any]]:
    if not isinstance(name, str) or name not in rules:
        raise ValueError(f"there is no constraint {name!r}; known are {', '.join(sorted(rules))}")
    check = getattr(constraints, rules[name]["check"])
    names = rules[name]["arguments"]
    if not isinstance(arguments, dict | None):
        raise ValueError(f"the arguments of {name!r} must be an object, not {arguments!r}")
    values = {key: value for key, value in (arguments or {}).items() if value is not None}
    if values.keys() != names.keys():
        raise ValueError(
            f"the arguments of {name!r} are {_list_keys(names)}, and it has {_list_keys(values)}"
        )
    if check is constraints.is_in_language and importlib.util.find_spec("langdetect") is None:
        raise ValueError(
            f"{name!r} needs langdetect; install it (pip install langdetect), or leave such rows "
            "out"
        )
    return check, {
        names[key]: _check_argument(f"{key!r} of {name!r}", names[key], value)
        for key, value in values.items()
    }


def _list_keys(arguments: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, arguments)) or "none"


def _check_argument(where: str, kind: str, value: Any) -> Any:
    """`value` as the check takes it.

    Args:
        where: the argument and its constraint, for messages.
        kind: the check's name for the argument, by which values are valid or not.
        value: of the row.

    Raises:
        ValueError: the value is not valid.
    """
    match kind:
        case "count" | "paragraph":
            least = 1 if kind == "paragraph" else 0
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or value % 1 != 0 or value < least:
                raise ValueError(
                    f"{where} must be a whole number of at least {least}, not {value!r}"
                )
            return int(value)
        case "relation":
            if value not in constraints.RELATIONS:
                relations = ", ".join(map(repr, constraints.RELATIONS))
                raise ValueError(f"{where} must be one of {relations}, not {value!r}")
            return value
        case "words" | "options":
            if kind == "options" and isinstance(value, str):
                value = _split_options(value)
            are_words = isinstance(value, list) and all(
                isinstance(word, str) and word for word in value
            )
            if not are_words or not value:
                raise ValueError(f"{where} must be a list of texts, not {value!r}")
            return value
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be text, not {value!r}")
    if kind == "letter" and len(value.strip()) != 1:
        raise ValueError(f"{where} must be a single character, not {value!r}")
    return value.strip()


def _split_options(text: str) -> list[str]:
    """The options of RLVR-IFeval: "yes/no/maybe", "a), b), c)" or "I know or I don't know"."""
    for separator in ("/", ", ", " or "):
        if separator in text:
            return [option.strip() for option in text.split(separator)]
    return [text]
