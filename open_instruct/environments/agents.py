"""Agents: programs of a user's own that ask the policy by OpenAI's API, one run for each episode.

An agent is no environment: it does not answer the policy's replies, it asks for them. Its episode
owns the endpoint that it speaks to (rl/agents/).
"""

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from open_instruct.core.errors import InputError, RunError
from open_instruct.environments.agent_worker import MAX_OUTPUT_BYTES, run_agent
from open_instruct.environments.environment import EnvironmentFault, Source
from open_instruct.rewards.sandbox.sandbox import Child, ForkServer

# `FILE.py:function`, or `module:function`; anything else is a command.
FUNCTION = re.compile(r"[\w./~-]+:[A-Za-z_]\w*")
PLACEHOLDER = re.compile(r"\{(\w+)\}")
# An agent may think for as long as its episode lets it, which closes it.
NO_LIMIT_S = 1e6
MAX_SENT_BYTES = 2 * MAX_OUTPUT_BYTES  # by its process
TRIAL_TIMEOUT_S = 120.0  # in which its file must be imported
REWARD = "agent"  # the name of a reward that has none
# Of other endpoints, and of the cluster that the run has started.
HIDDEN_VARIABLES = ("OPENAI_", "RAY_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """What an agent must know of the endpoint of its episode.

    Example: `Endpoint(base_url="http://127.0.0.1:8123/v1", key="sk-session-…", model="policy")`.
    """

    base_url: str
    key: str
    model: str

    def as_variables(self) -> dict[str, str]:
        """The variables that clients of OpenAI's read, in every way that they are spelled."""
        proxy_free = ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1,localhost"]))
        return {
            "OPENAI_API_KEY": self.key,
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_MODEL": self.model,
            "OPENAI_DEFAULT_MODEL": self.model,
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "NO_PROXY": proxy_free,
            "no_proxy": proxy_free,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOutcome:
    """The rewards by which an agent has judged its episode; none where it left that to verifiers.

    Example: `AgentOutcome(rewards={"agent": 1.0})`.
    """

    rewards: Mapping[str, Any] = field(default_factory=dict)
    agent_rewards: Mapping[str, Any] = field(default_factory=dict)  # of agents that have names


class AgentProgram(Source):
    """Runs a user's agent on the rows of a run.

    Example: `AgentProgram("solve.py:solve", origin="--environment agent:solve.py:solve")`;
    `python solve.py {question}` is a command, with a column of the row as a word.
    """

    def __init__(self, where: str, *, origin: str) -> None:
        self._origin = origin
        self._word = where if FUNCTION.fullmatch(where) else ""
        try:
            self._command = [] if self._word else shlex.split(where)
        except ValueError as error:
            raise InputError(f"{origin}: {error}", kind="bad_value") from error
        if not self._word and not self._command:
            raise InputError(
                f"{origin} names no agent: agent:COMMAND, or agent:FILE.py:function",
                kind="bad_value",
            )
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(HIDDEN_VARIABLES)
        }
        # An empty entry would mean the working folder, from which nothing else is to be imported.
        paths = filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))
        self._server = ForkServer(
            handler=run_agent,
            environment={**variables, "PYTHONPATH": os.pathsep.join(paths)},
            preloaded=self._word,
        )

    def begin_run(self) -> None:
        """Check that there is such a program or function.

        Raises:
            InputError: there is none.
        """
        if self._command:
            if shutil.which(self._command[0]) is None:
                raise InputError(
                    f"{self._origin}: there is no program {self._command[0]!r}",
                    kind="missing_file",
                )
            return
        endpoint = Endpoint(base_url="http://127.0.0.1:9/v1", key="none", model="none")
        trial = self({}, endpoint, is_trial=True)
        try:
            trial.run(timeout_s=TRIAL_TIMEOUT_S)
        except EnvironmentFault as error:
            raise InputError(
                f"{self._origin} cannot be loaded: {error}", kind="own_code"
            ) from error
        finally:
            trial.close()

    def __call__(
        self,
        row: Mapping[str, Any],
        endpoint: Endpoint,
        *,
        is_trial: bool = False,
        is_walled: bool = False,
    ) -> "RunningAgent":
        """Start a process for one episode; `run` waits for it.

        With `is_walled` it speaks to its endpoint alone, and writes to a folder of its own alone,
        which ends with it.

        Raises:
            RunError: no process could be forked.
        """
        request: dict[str, Any] = {
            "word": self._word,
            "command": _fill_in(self._command, row),
            "row": row,
            "variables": endpoint.as_variables(),
            "is_trial": is_trial,
        }
        folder = None
        if is_walled:
            folder = TemporaryDirectory(prefix="agent-", ignore_cleanup_errors=True)
            request["folder"] = folder.name
        return RunningAgent(Child(self._server), request, folder)

    def end_run(self) -> None:
        """End all processes."""
        self._server.close()


class RunningAgent:
    """An agent at work on a row, in a process that `close` ends with all that it has started."""

    def __init__(
        self,
        child: Child,
        request: Mapping[str, Any],
        folder: "TemporaryDirectory[str] | None" = None,
    ) -> None:
        self._child = child
        self._request = request
        self._folder = folder

    def run(self, *, timeout_s: float = NO_LIMIT_S) -> AgentOutcome:
        """Wait for the agent's end.

        Raises:
            EnvironmentFault: it raised, ended with a failure, or was ended.
            ValueError: what it says of its rewards cannot be read.
        """
        try:
            # A function may write to its socket, too.
            result = self._child.ask(self._request, timeout_s=timeout_s, max_bytes=MAX_SENT_BYTES)
        except RunError as error:
            raise EnvironmentFault(str(error)) from error
        if result.status == "done":
            return read_outcome(json.loads(result.value))
        raise EnvironmentFault(result.problem.strip() or "the agent's process was ended")

    def close(self) -> None:
        self._child.close()
        if self._folder is not None:
            self._folder.cleanup()


def read_outcome(value: Any) -> AgentOutcome:
    """The rewards in what an agent has returned, or in the last line that it printed.

    A number, `{"reward": 1.0}`, or `{"rewards": {"tests": 1.0, "style": 0.2}}`, and beside them
    `{"agents": {"planner": 1.0}}`. Anything else says nothing of rewards.

    Raises:
        ValueError: there are rewards by name that have none.
    """
    if value is None:
        return AgentOutcome()
    if isinstance(value, int | float):
        return AgentOutcome(rewards={REWARD: value})
    if isinstance(value, dict):
        rewards = dict(_read_mapping(value, "rewards"))
        if "reward" in value:
            rewards[REWARD] = value["reward"]
        return AgentOutcome(rewards=rewards, agent_rewards=_read_mapping(value, "agents"))
    return AgentOutcome()  # its answer, say


def _read_mapping(value: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    rewards = value.get(key, {})
    if not isinstance(rewards, dict):
        raise ValueError(f"{key!r} are no rewards by name: a {type(rewards).__name__}")
    return rewards


def _fill_in(command: Sequence[str], row: Mapping[str, Any]) -> list[str]:
    """The command with columns of the row in the place of their names; `{row}` is all of it."""
    texts = {name: _as_word(value) for name, value in row.items()} | {"row": json.dumps(row)}

    def replace(match: re.Match[str]) -> str:
        return texts.get(match[1], match[0])

    return [PLACEHOLDER.sub(replace, word) for word in command]


def _as_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
