"""Tools that ask a service of the web, such as a search engine; web_tools.yaml has them.

A service has its key in the variable NAME_API_KEY of the environment, and NAME_API_URL names
another address than its own. What it has against a query or an address is its answer to the policy;
that it cannot be reached, is busy, or refuses the key, is a fault of the environment.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import yaml

from open_instruct.core.errors import InputError
from open_instruct.core.files import read_asked
from open_instruct.environments.environment import EnvironmentFault, ToolServer, text_tool

SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)
WAITS_S = (0.0, 1.0, 4.0)  # before each attempt
OF_THE_QUERY = (400, 404, 413, 414, 422, 451)
OF_THE_KEY = (401, 402, 403)
MAX_TOLD = 300  # characters of what a service says of an error
TEMPLATES = jinja2.Environment(keep_trailing_newline=False)


class WebTool(ToolServer):
    """One of `SERVICES`, for all episodes of a run.

    Example: `WebTool("serper_search", num_results=3)`.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        self._service = SERVICES[name]
        if unknown := settings.keys() - self._service["settings"].keys():
            raise TypeError(
                f"its settings are {', '.join(self._service['settings'])}, and {min(unknown)} is "
                "none"
            )
        self._names = {
            **self._service["settings"],
            **settings,
            "quote": lambda url: quote(url.strip(), safe=":/"),
        }
        self._argument, meaning = self._service["argument"]
        self.schemas = [text_tool(name, self._service["description"], self._argument, meaning)]

    def begin_run(self) -> None:
        """:raises InputError: the key, or another variable of the environment that it needs, is
        missing.
        """
        prefix = f"{self._service['variables']}_API_"
        self._names["key"] = _variable(f"{prefix}KEY")
        self._url = (
            os.environ.get(f"{prefix}URL") or self._service["url"] or _variable(f"{prefix}URL")
        )
        for name, variable in self._service.get("files", {}).items():
            self._names[name] = read_asked(_variable(variable), where=variable).split()

    async def call(self, name: str, /, **arguments: Any) -> str:
        names = {**self._names, self._argument: str(arguments[self._argument])}
        answer = TEMPLATES.from_string(self._service["answer"]).render(
            names, found=await self._asked(names)
        )
        return answer.strip() or self._service["nothing"]

    async def _asked(self, names: Mapping[str, Any]) -> Any:
        """The JSON that the service answers; it is asked three times at most.

        Raises:
            ValueError: it has something against the request.
            EnvironmentFault: it is at fault, or the key is.
        """
        import aiohttp  # comes with vLLM

        asked = _filled(self._service["request"], names)
        url = self._url.rstrip("/") + asked.pop("path", "")
        limit = aiohttp.ClientTimeout(total=names["timeout"])
        for wait_s in WAITS_S:
            await asyncio.sleep(wait_s)
            status = 0
            try:
                async with (
                    aiohttp.ClientSession(timeout=limit) as session,
                    session.request(url=url, **asked) as answer,
                ):
                    status, told = answer.status, await answer.text()
                if status < 400:
                    return json.loads(told)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                told = f"{type(error).__name__}: {error}"
            told = told.replace(names["key"], "$KEY")[:MAX_TOLD]
            if status in OF_THE_QUERY:
                raise ValueError(f"HTTP {status}: {told}")
            if status in OF_THE_KEY:
                break
        raise EnvironmentFault(f"{self._url}: {status or 'not reached'}: {told}")


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    """A part of a request, with the values of its expressions."""
    if isinstance(value, dict):
        return {key: _filled(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_filled(each, names) for each in value]
    is_expression = isinstance(value, str) and value.startswith("=")
    return TEMPLATES.compile_expression(value[1:])(**names) if is_expression else value


def _variable(name: str) -> str:
    if not (value := os.environ.get(name)):
        raise InputError(
            (f"a tool of the web needs the variable {name}: set it in the environment of the run"),
            kind="missing_flag",
        )
    return value
