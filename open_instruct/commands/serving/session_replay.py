"""`open-instruct serve RUN --replay FILE`: recorded sessions once more, request by request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from open_instruct.commands.serving.served_sessions import SessionMaker, open_model, refuse_adapter
from open_instruct.commands.talking.models import TalkingModel
from open_instruct.config.parser import parse
from open_instruct.config.sections import Dtype, flag
from open_instruct.core.errors import EXIT_FAILURE, InputError
from open_instruct.rl.agents.api_requests import MODEL, RunSampling
from open_instruct.rl.agents.endpoint import AgentEndpoint
from open_instruct.rl.agents.replayed_sessions import replay_session
from open_instruct.rl.agents.saved_requests import ENDING, SavedSession, read_sessions


@dataclass(kw_only=True)
class SessionReplayFlags:
    """Send the requests of recorded sessions to a model again, and compare the ids of its replies.

    Examples:
        open-instruct serve runs/first --replay sessions.requests.jsonl
    """

    replay: str = flag(
        f"requests that `serve --record` has written (*{ENDING}); ends with 1 where ids differ",
        is_path=True,
    )
    param_dtype: Dtype | None = flag(
        "dtype of the computation; default: that with which they were recorded", None
    )


def replay_sessions(model: TalkingModel, words: Sequence[str]) -> int:
    """Replay every session of a file, and print what differs first in each; returns the exit code.

    Raises:
        InputError: a flag, the file or the model cannot be used.
    """
    flags = parse(SessionReplayFlags, words)
    refuse_adapter(model, "replay")
    saved_sessions = list(read_sessions(Path(flags.replay)))
    if not saved_sessions:
        raise InputError(f"{flags.replay} has no sessions", kind="bad_value", flag="replay")
    with open_model(
        model,
        max_seq_length=max(each.settings.max_seq_length for each in saved_sessions),
        param_dtype=flags.param_dtype or find_dtype(saved_sessions),
    ) as served:
        num_different = asyncio.run(replay_all(served.sessions, saved_sessions, model.name))
    print(f"{len(saved_sessions) - num_different} of {len(saved_sessions)} sessions are equal")
    return EXIT_FAILURE if served.failures or num_different else 0


def find_dtype(saved_sessions: Sequence[SavedSession]) -> Dtype:
    """The dtype with which all sessions were recorded.

    Raises:
        InputError: there are several.
    """
    dtypes = sorted({each.settings.param_dtype for each in saved_sessions})
    if len(dtypes) > 1:
        raise InputError(
            f"--replay: the sessions were recorded in {' and '.join(dtypes)}; choose one by "
            "--param_dtype",
            kind="conflict",
            flag="param_dtype",
        )
    return dtypes[0]


async def replay_all(
    sessions: SessionMaker, saved_sessions: Sequence[SavedSession], name: str
) -> int:
    """Replay sessions one after another; returns how many differ.

    Args:
        sessions: makes those that answer.
        saved_sessions: the recorded ones.
        name: of the model.
    """
    endpoint = AgentEndpoint()
    await endpoint.start()
    num_different = 0
    for saved in saved_sessions:
        settings = saved.settings
        session = sessions.make_session(settings, seed=saved.seed, name=f"session/{saved.session}")
        sampling = RunSampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            follows=True,
            model_names=(MODEL, settings.model, name),
        )
        key = endpoint.open_session(session, sampling)
        difference = await replay_session(endpoint, session, key, saved)
        endpoint.close_session(key)
        num_different += bool(difference)
        what = difference or f"{len(saved.requests)} requests, all equal"
        print(f"session {saved.session}: {what}", flush=True)
    await endpoint.stop()
    return num_different
