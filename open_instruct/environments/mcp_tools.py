"""The tools of an MCP server: a program that is spoken to over its stdin and stdout, or one at an
address.

All episodes of a run share one session. A program takes seconds to start and milliseconds to answer
a call, so one for each episode would keep a machine busy with starting them; what a server
remembers, it remembers for all of them.
"""

import asyncio
import logging
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.environments.environment import EnvironmentFault, ToolServer, tool_schema

START_TIMEOUT_S = 60.0


class _StrayLines(logging.Filter):
    """Makes one warning of the tracebacks of mcp, which logs one for each line of a server that is
    no message.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = record.exc_text = None
        if "parse" not in str(record.msg):
            return True
        record.levelno, record.levelname = logging.WARNING, "WARNING"
        record.msg = (
            "an MCP server writes to stdout what is no message; such lines are passed over (log "
            "to stderr)"
        )
        is_first = not self._has_warned
        self._has_warned = True
        return is_first


logging.getLogger("mcp.client.stdio").addFilter(_StrayLines())


class McpServer(ToolServer):
    """Makes the environments of episodes, whose tools are those of the server at `where`, or the
    one that is named.

    Example: `McpServer("uvx mcp-server-time", origin="--environment")`, or
    `"http://127.0.0.1:8000/mcp"`.
    """

    def __init__(
        self, where: str, *, origin: str, tool: str | None = None, timeout_s: float | None = None
    ) -> None:
        self._where = where
        self._origin = origin
        self._tool = tool
        self._timeout_s = timeout_s
        self._keeper: asyncio.Task[None] | None = None

    def begin_run(self) -> None:
        """List its tools.

        Raises:
            InputError: no server answers there, or it has none.
        """
        try:
            with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running loop
                self.schemas = thread.submit(asyncio.run, self._listed()).result()
        except Exception as error:
            raise InputError(
                f"{self._origin}: no MCP server answers ({_reason(error)}): mcp: is followed by a "
                "command, or an address that begins with http, and the package mcp, which vLLM "
                "brings, must be there",
                kind="remote",
            ) from error
        if not self.schemas:
            raise InputError(
                f"{self._origin}: the MCP server has no "
                f"{f'tool {self._tool}' if self._tool else 'tools'}",
                kind="bad_value",
            )

    async def call(self, name: str, /, **arguments: Any) -> str:
        """What a tool answers, or has to say against its arguments.

        Raises:
            EnvironmentFault: the server is lost; the next call starts it anew.
        """
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        if self._keeper is None:
            self._opened: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._opened))
        keeper = self._keeper
        try:
            client = await asyncio.wait_for(asyncio.shield(self._opened), START_TIMEOUT_S / 2)
            result = await asyncio.wait_for(client.call_tool(name, arguments), self._timeout_s)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return f"error: {error}"
            # One call that is late is no lost server.
            if not (isinstance(error, TimeoutError) and self._opened.done()):
                keeper.cancel()
                self._keeper = None if self._keeper is keeper else self._keeper
            raise EnvironmentFault(_reason(error)) from error
        return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)

    async def _keep(self, opened: "asyncio.Future[Any]") -> None:
        """Hold a session in a task of its own, which must begin and end it, until it is
        cancelled.
        """
        try:
            async with self._client() as client:
                opened.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(RuntimeError(_reason(error)))

    async def _listed(self) -> list[dict[str, Any]]:
        found, cursor = [], None
        async with asyncio.timeout(START_TIMEOUT_S), self._client() as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                found += page.tools
                if not (cursor := page.next_cursor):
                    break
        wanted = (each for each in found if self._tool in (None, each.name))
        return [
            tool_schema(each.name, each.description or "", each.input_schema) for each in wanted
        ]

    def _client(self) -> Any:
        from mcp import Client, StdioServerParameters, stdio_client

        if self._where.startswith(("http://", "https://")):
            return Client(self._where)
        command, *words = shlex.split(self._where) or [""]
        # What a server logs would stand between the lines of the run.
        return Client(
            stdio_client(
                StdioServerParameters(command=command, args=words), errlog=subprocess.DEVNULL
            )
        )


def generic_mcp(
    server_url: str = "",
    transport: str = "http",
    command: str = "",
    args: Sequence[str] = (),
    tool_name: str | None = None,
    timeout: float = 60.0,
) -> McpServer:
    """A server by the settings that open-instruct's tool of this name has;

    `timeout` is of one call, in seconds.
    """
    if transport not in ("http", "stdio"):
        raise ValueError(f"transport is http or stdio, not {transport!r}")
    where = server_url if transport == "http" else shlex.join([command, *args])
    return McpServer(where, origin="--tools generic_mcp", tool=tool_name, timeout_s=timeout)


def _reason(error: BaseException) -> str:
    """The first of the errors that a group of tasks has died of."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
