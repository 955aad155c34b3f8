"""The values of a launch's settings, as the rules of a translation ask for them."""

from collections.abc import Mapping

from open_instruct.config.flags import LARGEST_INT
from open_instruct.migrate.launch import Sheet
from open_instruct.migrate.suites.tables import Product, Table


class LaunchValues:
    """Looks values up by a setting's name or its older name, and multiplies them."""

    def __init__(self, table: Table, sheet: Sheet, numbers: Mapping[str, float]) -> None:
        """`numbers` are numbers beside the settings: of GPUs that learn, and of rows."""
        self.table = table
        self.sheet = sheet
        self.numbers = dict(numbers)

    def find_name(self, name: str) -> str:
        """The name by which the launch gives a setting: an older one, where it has that."""
        older = self.table.older_names.get(name, name)
        if older in self.sheet.launch_flags:
            return older
        return name

    def meets(self, condition: str) -> bool:
        """Whether a setting has a value: `packing true` is a condition, and `num_epochs >0`."""
        name, value = condition.rsplit(" ", 1)
        if value == ">0":
            return self.read_number(name) is not None
        return " ".join(self.sheet.theirs.get(self.find_name(name), [])).lower() == value

    def read_number(self, name: str) -> float | None:
        """A number above 0: itself, one of `numbers`, or a setting; None if it is none."""
        words = self.sheet.theirs.get(self.find_name(name), [name])
        try:
            number = float(self.numbers.get(name, " ".join(words)))
        except ValueError:
            return None
        return number if 0 < number <= LARGEST_INT else None

    def multiply(self, product: Product, *, is_fraction: bool) -> str | None:
        """The value of a product such as `a * b / c`.

        None where a factor is not known, or where the value has to be whole and is not.
        """
        result = 1.0
        operator = "*"
        for part in product.product.split():
            if part in ("*", "/"):
                operator = part
                continue
            number = self.read_number(part)
            if number is None:
                return None
            result = result * number if operator == "*" else result / number
        if result.is_integer():
            return str(int(result))
        if is_fraction:
            return f"{result:g}"
        return None

    def find_source(self, product: Product) -> str:
        """The setting that a product is said to come from: a given one before a default."""
        names = [self.find_name(part) for part in product.product.split()]
        factors = [name for name in names if name in self.sheet.theirs]
        of_launch = [name for name in factors if name in self.sheet.launch_flags]
        return [*of_launch, *factors, "num_gpus"][0]
