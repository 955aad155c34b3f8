"""A session that has ended becomes one completion: its last line, and beside it its branches."""

from collections.abc import Mapping, Sequence, Set
from itertools import chain
from types import MappingProxyType

from open_instruct.core.episodes import BRANCH_ROLE
from open_instruct.core.records import (
    Completion,
    Episode,
    EpisodeBranch,
    EpisodeStatus,
    Span,
)
from open_instruct.rl.agents.session_tree import SampledReply, SessionTree
from open_instruct.rl.episodes.trace_text import cut_middle

# An episode of such a status counts as cut, as does one whose last reply was cut.
CUT_STATUSES = ("length", "max_turns")


def build_completion(
    tree: SessionTree,
    *,
    seed: int,
    status: EpisodeStatus,
    rewards: Mapping[str, float],
    agent_rewards: Mapping[str, float] = MappingProxyType({}),
    problem: str = "",
) -> Completion:
    """The whole session as one completion, which ends with the reply that was added last."""
    is_cut = status in CUT_STATUSES
    main = EpisodeBranch(prompt_token_ids=(), token_ids=(), replies=(), logprobs=(), versions=())
    text = ""
    branches: list[EpisodeBranch] = []
    if tree.replies:
        last = tree.replies[-1]
        is_cut = is_cut or last.completion.is_truncated
        text = last.completion.text
        main, *branches = _list_branches([last, *(each for each in tree.leaves() if each != last)])
    return Completion(
        token_ids=main.token_ids,
        logprobs=main.logprobs,
        versions=main.versions,
        text=text,
        finish_reason="length" if is_cut else "stop",
        seed=seed,
        routes=main.routes,
        episode=Episode(
            status=status,
            replies=main.replies,
            turns=tuple(_describe_turns(tree.replies)),
            rewards=rewards,
            prompt_token_ids=main.prompt_token_ids,
            problem=problem,
            branches=tuple(branches),
            agent=main.agent,
            agent_rewards=dict(agent_rewards),
        ),
    )


def _list_branches(leaves: Sequence[SampledReply]) -> list[EpisodeBranch]:
    """The branches that end in these replies, without those of which nothing is learned."""
    known: set[int] = set()
    branches: list[EpisodeBranch] = []
    for leaf in leaves:
        path = leaf.path()
        branch = make_branch(path, known)
        if branch.num_shared < len(branch.replies) or not branches:
            branches.append(branch)
        known |= {node.number for node in path}
    return branches


def make_branch(path: Sequence[SampledReply], known: Set[int]) -> EpisodeBranch:
    """The branch of a path.

    Args:
        path: its replies, from the first on.
        known: the numbers of replies that other branches have.
    """
    prompt_token_ids = path[0].prompt_token_ids
    learned = [node for node in path if node.is_learned]
    spans: list[Span] = []
    routes = b""
    for node in path:
        # A reply has the routes of all tokens so far; each keeps those it was sampled with.
        routes += node.completion.routes[len(routes) :]
    for node in learned:
        start = len(node.prompt_token_ids) - len(prompt_token_ids)
        spans.append(Span(start=start, stop=start + len(node.completion.token_ids)))
    return EpisodeBranch(
        prompt_token_ids=prompt_token_ids,
        token_ids=path[-1].token_ids[len(prompt_token_ids) :],
        replies=tuple(spans),
        logprobs=tuple(chain.from_iterable(node.completion.logprobs for node in learned)),
        versions=tuple(chain.from_iterable(node.completion.versions for node in learned)),
        num_shared=sum(node.number in known for node in learned),
        agent=path[-1].agent,
        routes=routes,
    )


def _describe_turns(replies: Sequence[SampledReply]) -> list[Mapping[str, str]]:
    """All turns for people to read, reply by reply, and where each goes on from."""
    turns: list[Mapping[str, str]] = []
    for node in replies:
        parent = -1 if node.parent is None else node.parent.number
        if node.number > 0 and parent != node.number - 1:
            begins = "a history of its own" if node.parent is None else f"goes on from {parent + 1}"
            who = f" of {node.agent}" if node.agent else ""
            turns.append(
                {
                    "role": BRANCH_ROLE,
                    "content": f"reply {node.number + 1}{who}: {begins}",
                    "after": "" if node.parent is None else str(parent + 1),
                }
            )
        turns += node.new_turns
        turns.append({"role": "assistant", "content": node.completion.text})
    return [{**turn, "content": cut_middle(turn["content"])} for turn in turns]
