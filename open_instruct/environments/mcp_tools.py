"""The tools of an MCP server: a program behind stdin and stdout, or a server at an address.

All episodes of a run share one session. A program takes seconds to start and milliseconds to answer
a call, so with one for each episode a machine would do little else than start them. What a server
remembers, it remembers for all episodes.
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


class _StrayLineFilter(logging.Filter):
    """Turns mcp's tracebacks into one warning; it logs one for each line that is no message."""

    def __init__(self) -> None:
        super().__init__()
        self._has_warned = False

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        record.exc_text = None
        if "parse" not in str(record.msg):
            return True
        record.levelno = logging.WARNING
        record.levelname = "WARNING"
        record.msg = (
            "an MCP server writes to stdout what is no message; such lines are passed over (log "
            "to stderr)"
        )
        is_first = not self._has_warned
        self._has_warned = True
        return is_first


logging.getLogger("mcp.client.stdio").addFilter(_StrayLineFilter())


class McpServer(ToolServer):
    """Makes environments with the tools of the server at `where`, or with the named one.

    Example: `McpServer("uvx mcp-server-time", origin="--environment")`, or
    `"http://127.0.0.1:8000/mcp"`.
    """

    def __init__(
        self,
        where: str,
        *,
        origin: str,
        tool: str | None = None,
        timeout_s: float | None = None,
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
                self.schemas = thread.submit(asyncio.run, self._list_tools()).result()
        except Exception as error:
            raise InputError(
                f"{self._origin}: no MCP server answers ({_reason(error)}): mcp: is followed by a "
                "command, or an address that begins with http, and the package mcp, which vLLM "
                "brings, must be there",
                kind="remote",
            ) from error
        if not self.schemas:
            missing = f"tool {self._tool}" if self._tool else "tools"
            raise InputError(f"{self._origin}: the MCP server has no {missing}", kind="bad_value")

    async def call(self, name: str, /, **arguments: Any) -> str:
        """Call a tool; returns its answer, or its complaint about the arguments.

        Raises:
            EnvironmentFault: the server is lost; the next call starts it again.
        """
        from mcp import MCPError
        from mcp_types import INVALID_PARAMS

        if self._keeper is None:
            self._client_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._hold_session(self._client_future))
        keeper = self._keeper
        try:
            client = await asyncio.wait_for(
                asyncio.shield(self._client_future), START_TIMEOUT_S / 2
            )
            result = await asyncio.wait_for(client.call_tool(name, arguments), self._timeout_s)
        except Exception as error:
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                return f"error: {error}"
            # A call that takes too long does not mean a lost server.
            is_late_call = isinstance(error, TimeoutError) and self._client_future.done()
            if not is_late_call:
                keeper.cancel()
                if self._keeper is keeper:
                    self._keeper = None
            raise EnvironmentFault(_reason(error)) from error
        return "\n".join(getattr(part, "text", f"[{part.type}]") for part in result.content)

    async def _hold_session(self, session: "asyncio.Future[Any]") -> None:
        """Hold a session open until this task is cancelled; one task must begin and end it."""
        try:
            async with self._make_client() as client:
                session.set_result(client)
                await asyncio.Event().wait()
        except Exception as error:
            if not session.done():
                session.set_exception(RuntimeError(_reason(error)))

    async def _list_tools(self) -> list[dict[str, Any]]:
        tools: list[Any] = []
        cursor = None
        async with asyncio.timeout(START_TIMEOUT_S), self._make_client() as client:
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    break
        if self._tool is not None:
            tools = [tool for tool in tools if tool.name == self._tool]
        return [tool_schema(tool.name, tool.description or "", tool.input_schema) for tool in tools]

    def _make_client(self) -> Any:
        from mcp import Client, StdioServerParameters, stdio_client

        if self._where.startswith(("http://", "https://")):
            return Client(self._where)
        command, *words = shlex.split(self._where) or [""]
        parameters = StdioServerParameters(command=command, args=words)
        # A server's log would appear between the lines of the run.
        return Client(stdio_client(parameters, errlog=subprocess.DEVNULL))


def generic_mcp(
    server_url: str = "",
    transport: str = "http",
    command: str = "",
    args: Sequence[str] = (),
    tool_name: str | None = None,
    timeout: float = 60.0,
) -> McpServer:
    """Make a server from the settings of open-instruct's tool of this name.

    Args:
        timeout: of one call, in seconds.
    """
    if transport not in ("http", "stdio"):
        raise ValueError(f"transport is http or stdio, not {transport!r}")
    where = server_url
    if transport == "stdio":
        where = shlex.join([command, *args])
    return McpServer(where, origin="--tools generic_mcp", tool=tool_name, timeout_s=timeout)


def _reason(error: BaseException) -> str:
    """Describe the first of the errors of which a group of tasks died."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
