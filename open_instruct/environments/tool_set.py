"""Tools that share an episode, each under a name of its own."""

from collections.abc import Sequence
from typing import Any

from open_instruct.environments.adapters import Tool, Toolbox, tools_of
from open_instruct.environments.environment import Factory, Source, begin_run
from open_instruct.users_code import taken


class ToolSet(Source):
    """Makes environments whose tools are those of several others.

    Args:
        parts: the factories of the others, each with the name that its one tool is called by; "" leaves it its own.
    """

    def __init__(self, parts: Sequence[tuple[str, Factory]]) -> None:
        self._parts = parts

    def begin_run(self) -> None:
        for _, factory in self._parts:
            begin_run(factory)

    def __call__(self, **row: Any) -> Toolbox:
        """:raises TypeError: one of them is more than tools, or has a tool of the same name as another."""
        objects: list[Any] = []
        tools: dict[str, Tool] = {}
        for name, factory in self._parts:
            objects.append(made := factory(**taken(factory, row)))
            own = tools_of(made)
            own = {name: next(iter(own.values()))} if name and len(own) == 1 else own
            if hasattr(made, "step") or own.keys() & tools.keys():
                why = "has turns of its own" if hasattr(made, "step") else "has a tool of the same name as another"
                raise TypeError(f"{type(made).__name__} {why}: name it by --environment, not by --tools")
            tools |= own
        return Toolbox(objects, tools, row)
