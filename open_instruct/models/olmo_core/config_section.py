"""A section of an OLMo-core config.json, of which every field is read, passed over or refused."""

from collections.abc import Mapping
from typing import Any, NoReturn

from open_instruct.core.errors import InputError
from open_instruct.models.hf.config_values import check_size, shorten_value

CLASS_NAME = "_CLASS_"  # the class that OLMo-core would make of a section
REGISTERED_NAME = "type"


class ConfigSection:
    """The fields of one object in a config.json, and where it stands.

    OLMo-core leaves out fields that are None. Its own reader imports the class that a section
    names; here that name is only compared.

    Example::

        rope = ConfigSection({"theta": 500000, "no_global_rope": False}, "config.json: model.rope")
        rope.take("theta")                          # 500000
        rope.require("no_global_rope", False)
        rope.finish()                               # refuses what nobody asked for
    """

    def __init__(self, fields: Any, where: str) -> None:
        if not isinstance(fields, dict):
            raise InputError(
                f"{where} = {shorten_value(fields)}; an object is needed", kind="bad_model"
            )
        self.where = where
        self._fields: dict[str, Any] = {
            name: value for name, value in fields.items() if value is not None
        }
        self._asked = {CLASS_NAME, REGISTERED_NAME}

    @property
    def class_name(self) -> str | None:
        """The last part of the class's name; None where the section names none."""
        name = self._fields.get(CLASS_NAME)
        return None if name is None else str(name).rpartition(".")[2]

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a field, or the default of OLMo-core's class."""
        self._asked.add(name)
        return self._fields.get(name, default)

    def take_size(self, name: str, default: Any = None) -> int:
        """The value of a field that is a size; raises InputError if it is none."""
        return check_size(name, self.take(name, default), self.where)

    def open(self, name: str) -> "ConfigSection | None":
        """The section in a field; None where the field is left out."""
        fields = self.take(name)
        if fields is None:
            return None
        return ConfigSection(fields, f"{self.where}.{name}")

    def open_needed(self, name: str) -> "ConfigSection":
        """The section in a field; raises InputError if it is left out."""
        section = self.open(name)
        if section is None:
            raise InputError(f"{self.where} has no {name!r}", kind="bad_model")
        return section

    def require(self, name: str, *supported: Any, default: Any = None) -> None:
        """Refuse another value of a field than the supported ones.

        :param default: of OLMo-core's class, where the field is left out.
        :raises InputError: naming the field, its value and what is supported.
        """
        value = self.take(name, default)
        if any(value is each or (value == each and type(value) is not bool) for each in supported):
            return
        options = " or ".join(shorten_value(each) for each in supported if each is not None)
        self.refuse(f"{name} = {shorten_value(value)}", f"supported: {options or 'absent'}")

    def pass_over(self, *names: str) -> None:
        """Take fields that change nothing of what the model computes."""
        self._asked.update(names)

    def finish(self) -> None:
        """Refuse fields that were not asked for, unless they switch something off.

        :raises InputError: naming the first of them.
        """
        for name, value in self._fields.items():
            if name not in self._asked and value is not False:
                self.refuse(f"{name} = {shorten_value(value)}", "nothing here reads that field")

    def refuse(self, problem: str, remedy: str) -> NoReturn:
        """:raises InputError: the model computes what ours does not."""
        raise InputError(
            f"{self.where}: {problem} is not supported; {remedy}", kind="unsupported_model"
        )


def merge(fields: Mapping[str, Any], name: str) -> Any:
    """A field at the top, or else in the section `dataset` or `data_loader` of an experiment."""
    for place in (fields, fields.get("dataset"), fields.get("data_loader")):
        if isinstance(place, Mapping) and place.get(name) is not None:
            return place[name]
    return None
