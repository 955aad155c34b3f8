"""How deep the lists and mappings of a YAML file may be nested."""

import yaml

from open_instruct.core.tables import LOADER

MAX_LEVELS = 64


def check_depth(text: str) -> None:
    """Look for deep nesting before a file is read: PyYAML's time for brackets grows with the square
    of their depth.

    What is no YAML passes: whoever reads it says where.

    Raises:
        RecursionError: a list or a mapping stands within more than `MAX_LEVELS` others.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=LOADER):
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_LEVELS:
                raise RecursionError(f"more than {MAX_LEVELS} levels")
    except yaml.YAMLError:
        return
