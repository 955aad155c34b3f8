"""What an episode leaves, where an environment or an agent took turns with the policy."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from open_instruct.core.spans import Span

# The role of a turn that says where the next reply goes on from: `after` is the number of a reply,
# or empty for a history of its own.
BRANCH_ROLE = "branch"
# The environment of prompts that sessions answer which were recorded before the run, and the
# version of their tokens.
RECORDED = "recorded"
BEFORE_RUN = -1

EpisodeStatus = Literal["done", "length", "max_turns", "parse_error", "timeout", "env_error"]
"""How an episode ended: its environment was done; the tokens or the turns ran out; a tool call
could not be read; the environment took too long, or failed.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeBranch:
    """Another line of an episode, whose agent rewrote its history or asked several times.

    The fields are those of a `Completion` after `prompt_token_ids`. The first `num_shared` of
    `replies` were sampled once: the episode's completion, or a branch before this one, has them.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    replies: tuple[Span, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    num_shared: int = 0
    agent: str = ""  # whose replies they are, where several agents have names
    routes: bytes = b""

    @property
    def num_shared_tokens(self) -> int:
        """Sampled tokens of the shared replies."""
        return sum(map(len, self.replies[: self.num_shared]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """A completion's turns, where an environment has answered.

    Example: a reply of tokens 0 to 8, a tool's answer of 9 tokens and a reply of 3 have `replies`
    (0, 9) and (18, 21).
    """

    status: EpisodeStatus
    replies: tuple[Span, ...]
    turns: tuple[Mapping[str, str], ...]  # role and content, from the first prompt on
    rewards: Mapping[str, float] = field(default_factory=dict)  # of the environment, by name
    prompt_token_ids: tuple[int, ...] = ()  # of the first prompt, where it is not the row's
    problem: str = ""  # why the environment failed
    # What the environment wrote between replies, without what the template puts around.
    answers: tuple[Span, ...] = ()
    branches: tuple[EpisodeBranch, ...] = ()  # beside the completion, which has the last reply
    agent: str = ""  # whose replies the completion has, as in its branches
    agent_rewards: Mapping[str, float] = field(default_factory=dict)  # by the agent's name

    @property
    def has_failed(self) -> bool:
        """Whether it ended for a reason that is not the policy's."""
        return self.status in ("timeout", "env_error")
