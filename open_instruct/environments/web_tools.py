"""Tools that ask a service of the web, such as a search engine; web_tools.yaml has them.

A service has its key in the environment variable NAME_API_KEY; NAME_API_URL replaces its address.
Its complaint about a query or an address is an answer to the policy. If it cannot be reached, is
busy, or refuses the key, that is a fault of the environment.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2

from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file
from open_instruct.core.tables import read_yaml_table
from open_instruct.environments.environment import EnvironmentFault, ToolServer, text_tool

SERVICES: dict[str, dict[str, Any]] = read_yaml_table(Path(__file__).with_suffix(".yaml"))
WAITS_S = (0.0, 1.0, 4.0)  # before each attempt
QUERY_STATUSES = (400, 404, 413, 414, 422, 451)
KEY_STATUSES = (401, 402, 403)
MAX_ERROR_CHARACTERS = 300  # of what a service says of an error
TEMPLATES = jinja2.Environment(keep_trailing_newline=False)


class WebTool(ToolServer):
    """One of `SERVICES`, for all episodes of a run.

    Example: `WebTool("serper_search", num_results=3)`.
    """

    def __init__(self, name: str, **settings: Any) -> None:
        self._service = SERVICES[name]
        unknown = settings.keys() - self._service["settings"].keys()
        if unknown:
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
        """Read the key and other variables of the environment.

        Raises:
            InputError: one of them is missing.
        """
        prefix = f"{self._service['variables']}_API_"
        self._names["key"] = _read_variable(f"{prefix}KEY")
        self._url = os.environ.get(f"{prefix}URL") or self._service["url"]
        if not self._url:
            self._url = _read_variable(f"{prefix}URL")
        for name, variable in self._service.get("files", {}).items():
            self._names[name] = read_user_file(_read_variable(variable), where=variable).split()

    async def call(self, name: str, /, **arguments: Any) -> str:
        names = {**self._names, self._argument: str(arguments[self._argument])}
        result = await self._request(names)
        answer = TEMPLATES.from_string(self._service["answer"]).render(names, found=result)
        return answer.strip() or self._service["nothing"]

    async def _request(self, names: Mapping[str, Any]) -> Any:
        """Ask the service, at most three times; returns the JSON of its answer.

        Raises:
            ValueError: it refuses the request.
            EnvironmentFault: it is at fault, or the key is.
        """
        import aiohttp  # comes with vLLM

        request = _fill_in(self._service["request"], names)
        url = self._url.rstrip("/") + request.pop("path", "")
        limit = aiohttp.ClientTimeout(total=names["timeout"])
        for wait_s in WAITS_S:
            await asyncio.sleep(wait_s)
            status = 0
            try:
                async with (
                    aiohttp.ClientSession(timeout=limit) as session,
                    session.request(url=url, **request) as answer,
                ):
                    status = answer.status
                    text = await answer.text()
                if status < 400:
                    return json.loads(text)
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                text = f"{type(error).__name__}: {error}"
            text = text.replace(names["key"], "$KEY")[:MAX_ERROR_CHARACTERS]
            if status in QUERY_STATUSES:
                raise ValueError(f"HTTP {status}: {text}")
            if status in KEY_STATUSES:
                break
        raise EnvironmentFault(f"{self._url}: {status or 'not reached'}: {text}")


def _fill_in(value: Any, names: Mapping[str, Any]) -> Any:
    """Fill the values of expressions in a part of a request."""
    if isinstance(value, dict):
        return {key: _fill_in(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_fill_in(each, names) for each in value]
    if isinstance(value, str) and value.startswith("="):
        return TEMPLATES.compile_expression(value[1:])(**names)
    return value


def _read_variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise InputError(
            f"a tool of the web needs the variable {name}: set it in the environment of the run",
            kind="missing_flag",
        )
    return value
