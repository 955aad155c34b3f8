"""A model that judges, behind a server that speaks OpenAI's form, and a file of the verdicts that it has given."""

import asyncio
import hashlib
import json
import math
import os
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from open_instruct.config.rollout_sections import RewardSection
from open_instruct.errors import InputError
from open_instruct.verifiers import event_loop
from open_instruct.verifiers.verifier import JUDGE_KEY, said, without_thinking

CACHE_FILE = "judge_verdicts.sqlite"
TRIAL = ("Is 7 more than 5?", {"Yes": 1.0, "No": 0.0})
MAX_SHOWN_CHARACTERS = 300
# Fewer than a token of English has, so that what is cut to a number of tokens fits.
CHARACTERS_A_TOKEN = 3
COSTS = ("requests", "prompt_tokens", "completion_tokens", "cache_hits", "seconds")
# What all judges of this process have cost so far, as metrics; empty where none was asked.
JUDGE_COSTS: dict[str, float] = {}
_SERVERS: dict[str, "JudgeServer"] = {}


def server_of(flags: RewardSection) -> "JudgeServer":
    """The one server of all judges with these flags, which share its limits."""
    return _SERVERS.setdefault(json.dumps(asdict(flags)), JudgeServer(flags))


class JudgeServer:
    """Asks for verdicts, each once: equal questions share one, also those of other runs with the same cache."""

    def __init__(self, flags: RewardSection) -> None:
        self._flags = flags
        self._slots = asyncio.Semaphore(flags.llm_judge_concurrency)
        self._asking: dict[bytes, asyncio.Task[str]] = {}
        self._cache: Any = None
        self._forces = True  # vLLM, for one, can be held to the verdicts
        self._next_s = 0.0

    def begin(self, cache: Path) -> None:
        """Ask a first question, and open the cache in a folder; once.

        Raises:
            InputError: the judge does not answer, or the cache cannot be opened.
        """
        if self._cache is not None:
            return
        flags = self._flags
        if flags.llm_judge_model is None:
            raise InputError("prompts are judged by a model, which no flag names; add --llm_judge_model")
        import openai

        limits: dict[str, Any] = {"timeout": flags.llm_judge_timeout, "max_retries": flags.llm_judge_max_retries}
        key = os.environ.get(JUDGE_KEY) or "none"
        self._client = openai.AsyncOpenAI(base_url=flags.llm_judge_url, api_key=key, **limits)
        JUDGE_COSTS.update({f"judge/{name}": 0.0 for name in COSTS} | JUDGE_COSTS)
        for self._forces in (True, False):
            try:
                event_loop.run(self._answer(*TRIAL))
                break
            except (openai.OpenAIError, AttributeError, TypeError, IndexError) as error:  # or an answer of another form
                if self._forces and getattr(error, "status_code", 0) in (400, 422):  # it does not know the field
                    continue
                raise InputError(
                    f"--llm_judge_model {flags.llm_judge_model} at {self._client.base_url} cannot judge: {said(error)} "
                    f"(start a server there that has it, or give another --llm_judge_url, and its key as {JUDGE_KEY})"
                ) from None
        path = cache / CACHE_FILE
        try:
            self._cache = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._cache.execute("PRAGMA journal_mode=WAL")
            self._cache.execute("CREATE TABLE IF NOT EXISTS verdicts (question BLOB PRIMARY KEY, verdict TEXT)")
        except sqlite3.Error as error:
            raise InputError(f"--cache_dir: {path}: {error}; remove that, or give another folder") from error

    async def score(self, question: str, scores: Mapping[str, float]) -> float:
        """The score of the judge's verdict, which is one of the names in `scores`.

        Raises:
            openai.OpenAIError: it cannot be asked.
            ValueError: it gives no verdict.
        """
        flags = self._flags
        settings = (flags.llm_judge_model, flags.llm_judge_temperature, flags.llm_judge_max_tokens, list(scores))
        content = json.dumps([str(self._client.base_url), question, *settings])
        key = hashlib.blake2b(content.encode(), digest_size=32).digest()
        kept = None
        with suppress(sqlite3.Error):  # one that cannot be read is asked for again
            kept = self._cache.execute("SELECT verdict FROM verdicts WHERE question = ?", [key]).fetchone()
        JUDGE_COSTS["judge/cache_hits"] += kept is not None or key in self._asking
        if kept is not None:
            return scores[kept[0]]
        if key not in self._asking:
            self._asking[key] = asyncio.create_task(self._ask(key, question, scores))
            self._asking[key].add_done_callback(lambda _: self._asking.pop(key))
        return scores[await self._asking[key]]

    async def _ask(self, key: bytes, question: str, scores: Mapping[str, float]) -> str:
        flags = self._flags
        async with self._slots:
            # So far apart that no minute has more requests, or tokens, than it may; a verdict counts as its limit.
            turn_s = max(self._next_s, time.monotonic())
            num_tokens = len(question) / CHARACTERS_A_TOKEN + flags.llm_judge_max_tokens
            of_requests = 1 / (flags.llm_judge_requests_per_minute or math.inf)
            of_tokens = num_tokens / (flags.llm_judge_tokens_per_minute or math.inf)
            self._next_s = turn_s + 60 * max(of_requests, of_tokens)
            await asyncio.sleep(turn_s - time.monotonic())
            answer = await self._answer(question, scores)
        # What was thought or explained before the verdict does not count.
        end = without_thinking(answer).replace("*", "").strip(" .\n").lower()
        verdict = next((verdict for verdict in scores if end.endswith(verdict.lower())), None)
        if verdict is None:
            raise ValueError(f"the judge gave no verdict, but {answer[-MAX_SHOWN_CHARACTERS:]!r}")
        with suppress(sqlite3.Error):  # a verdict that cannot be kept is asked for again, no more
            self._cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [key, verdict])
        return verdict

    async def _answer(self, question: str, scores: Mapping[str, float]) -> str:
        began_s = time.monotonic()
        JUDGE_COSTS["judge/requests"] += 1
        reply = await self._client.chat.completions.create(
            model=self._flags.llm_judge_model,
            messages=[{"role": "user", "content": question}],
            temperature=self._flags.llm_judge_temperature,
            max_completion_tokens=self._flags.llm_judge_max_tokens,
            extra_body={"structured_outputs": {"choice": list(scores)}} if self._forces else None,
        )
        JUDGE_COSTS["judge/seconds"] += time.monotonic() - began_s
        for kind in ("prompt_tokens", "completion_tokens"):  # some servers do not count them
            JUDGE_COSTS[f"judge/{kind}"] += getattr(reply.usage, kind, 0) or 0
        return reply.choices[0].message.content or ""
