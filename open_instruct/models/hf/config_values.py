"""Checks single values of a config.json against what is known of its fields."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.core.tables import read_yaml_table

MAX_SIZE = 2**24  # larger than any model, as are those of `SIZES`
MAX_NUMBER = 1e12  # the largest parameter of RoPE for which float32 still resolves the frequencies
PART_TURNED = "partial_rotary_factor"

# What is known of fields.
FIELDS: dict[str, Any] = read_yaml_table(Path(__file__).with_name("config_fields.yaml"))
SIZES: dict[str, int] = FIELDS["sizes"]


def check_size(
    name: str,
    value: Any,
    where: str,
    largest: int = MAX_SIZE,
) -> int:
    """`value`; raises InputError unless it is a whole number from 1 to `largest`."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise InputError(
            f"{where}: {name} = {shorten_value(value)}; "
            f"it must be a whole number from 1 to {largest}",
            kind="bad_model",
        )
    return value


def check_number(
    name: str,
    value: Any,
    where: str = "config.json",
    *,
    above: float = 0,
) -> Any:
    """`value`; raises InputError unless RoPE, or a norm, can be computed with it."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not above < value <= MAX_NUMBER:
        raise InputError(
            f"{where}: {name} = {value!r}; a number above {above:g}, at most {MAX_NUMBER:g}, is "
            "needed",
            kind="bad_model",
        )
    return value


def check_multiple(where: str, **sizes: int) -> None:
    """Raises InputError unless the first of two sizes is a multiple of the second."""
    (whole, number), (part, divisor) = sizes.items()
    if number % divisor:
        raise InputError(
            f"{where}: {whole} = {number} is not a multiple of {part} = {divisor}", kind="bad_model"
        )


def read_size(
    fields: Mapping[str, Any],
    where: str,
    name: str,
    default: Any = None,
) -> int:
    """The size `name` that the fields of a config.json give; raises InputError if it is none."""
    value = fields.get(name)
    if value is None:
        value = default
    return check_size(name, value, where, SIZES.get(name, MAX_SIZE))


def shorten_value(value: Any) -> str:
    """Show a value of any length in a few printable letters."""
    text = ascii(value)
    if len(text) <= 60:
        return text
    return f"{text[:57]}..."
