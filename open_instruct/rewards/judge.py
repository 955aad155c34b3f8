"""Verifiers that have a model judge: one for each prompt of ours, one for a prompt of the user's,
one for rubrics.

The model is behind a server that speaks OpenAI's form. What it has said is kept in a file.
"""

import asyncio
import hashlib
import json
import math
import os
import re
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import yaml

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_asked
from open_instruct.rewards import event_loop
from open_instruct.rewards.secret_key import JUDGE_KEY, without_key
from open_instruct.rewards.verifier import Verifier, said, without_thinking
from open_instruct.rewards.words import between_answer_tags

CUT = "\n[The rest is left out.]"
HOW_TO_ANSWER = "Answer with one of these, and nothing else:"
RUBRICS = '{"rubrics": [{"description": "…", "weight": 1.0}]}, with a weight that is not 0'
_PLACES = re.compile(r"\{(input|output|label)\}")
# What would end a part of the question: special tokens of chat templates, and our tags.
_MARKS = re.compile(
    r"<[|｜]([^|｜<>]+)[|｜]>|<(/?(?:input|output|label|s|(?:start|end)_of_turn))\s*>",
    re.IGNORECASE,
)

_TABLE = Path(__file__).with_name("judge_prompts.yaml").read_text(encoding="utf-8")
# The prompt of each judge, and the possible verdicts with their scores.
JUDGE_PROMPTS: dict[str, tuple[str, dict[str, float]]] = {
    name: (facts["prompt"], facts["verdicts"])
    for name, facts in yaml.load(
        _TABLE, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    ).items()
}

CACHE_FILE = "judge_verdicts.sqlite"
TRIAL = ("Is 7 more than 5?", {"Yes": 1.0, "No": 0.0})
MAX_SHOWN_CHARACTERS = 300
# Fewer than a token of English has, so that what is cut to a number of tokens fits.
CHARACTERS_A_TOKEN = 3
COSTS = ("requests", "prompt_tokens", "completion_tokens", "cache_hits", "seconds")
# What all judges of this process have cost so far, as metrics; empty where none was asked.
JUDGE_COSTS: dict[str, float] = {}
_SERVERS: dict[str, "JudgeServer"] = {}


class Judge(Verifier):
    """The score of a model's verdict on a completion.

    Completions of a prompt are judged all at once.
    """

    name: ClassVar[str] = "judge"
    isolated: ClassVar[bool] = False
    judges_groups: ClassVar[bool] = True

    @property
    def needs_ground_truth(self) -> bool:
        return "{label}" in self._prompt

    def configure(self, flags: RewardSection) -> None:
        self._server = server_of(flags)
        self._most_tokens = flags.llm_judge_max_context_length - flags.llm_judge_max_tokens
        word = flags.llm_judge_prompt or "general-quality"
        name = word if self.name == Judge.name else self.name
        self._prompt, self._verdicts = JUDGE_PROMPTS.get(name, JUDGE_PROMPTS["general-quality"])
        if name not in JUDGE_PROMPTS:
            self._prompt = read_asked(word, where=f"--llm_judge_prompt {word}")
            if "{output}" not in self._prompt:
                raise InputError(
                    f"--llm_judge_prompt {word}: has no {{output}}, the place of the completion; "
                    "add it",
                    kind="bad_value",
                )

    def begin_run(self, cache: Path) -> None:
        self._server.begin(cache)

    async def judge(
        self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool
    ) -> float:
        label = (
            ground_truth
            if isinstance(ground_truth, str)
            else json.dumps(ground_truth, ensure_ascii=False)
        )
        answer = between_answer_tags(completion).strip()
        given = {"input": prompt, "output": answer, "label": label}
        given = {name: _MARKS.sub(r"[\1\2]", text) for name, text in given.items()}
        room = (
            CHARACTERS_A_TOKEN * self._most_tokens
            - len(self._prompt)
            - len(given["input"])
            - len(given["label"])
        )
        if len(given["output"]) > room:
            given["output"] = given["output"][: max(room, 0)] + CUT
        question = _PLACES.sub(lambda place: given[place[1]], self._prompt)
        return await self._server.score(
            "\n".join([question, HOW_TO_ANSWER, *self._verdicts]), self._verdicts
        )


class Rubric(Judge):
    """The mean score of a row's criteria, each judged by itself, weighted by their weights, which
    may be below 0.
    """

    name: ClassVar[str] = "rubric"
    is_bounded: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        parse_rubrics(ground_truth)

    async def judge(
        self, prompt: str, completion: str, ground_truth: Any, *, is_truncated: bool
    ) -> float:
        question, weights = parse_rubrics(ground_truth)
        ask = super().judge
        asked = [
            ask(question or prompt, completion, each, is_truncated=is_truncated) for each in weights
        ]
        scores = await asyncio.gather(*asked)
        total = sum(weight * score for weight, score in zip(weights.values(), scores, strict=True))
        return total / sum(map(abs, weights.values()))


def parse_rubrics(ground_truth: Any) -> tuple[str, dict[str, float]]:
    """The question of a ground truth, "" if it has none, and the weights of its criteria.

    Example: `parse_rubrics({"rubrics": [{"description": "Short.", "weight": 2}]}) == ("",
    {"Short.": 2.0})`.

    Raises:
        ValueError: it has none, or one without a description, or without a number as weight; or all
            weights are 0.
    """
    weights: dict[str, float] = {}
    try:
        truth = json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth
        for each in truth["rubrics"]:
            text = str(each.get("description") or each.get("rubric_item") or each["Ingredient"])
            weights[text] = weights.get(text, 0.0) + float(each.get("weight", 1.0))
        if not 0 < sum(map(abs, weights.values())) < float("inf"):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"it must be {RUBRICS}") from None
    return str(truth.get("query") or truth.get("Question") or ""), weights


def server_of(flags: RewardSection) -> "JudgeServer":
    """The one server of all judges with these flags, which share its limits."""
    return _SERVERS.setdefault(json.dumps(asdict(flags)), JudgeServer(flags))


def _client_with_deadline(timeout_s: float) -> Any:
    """A client each of whose requests ends in this time, also where the answer comes byte by byte.

    The timeout that openai gives to its own client is of each byte.
    """
    import httpx
    import openai

    class Client(openai.DefaultAsyncHttpxClient):
        async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
            try:
                async with asyncio.timeout(timeout_s):
                    return await super().send(request, **options)
            except TimeoutError as error:
                raise httpx.ReadTimeout(
                    "the whole answer took too long", request=request
                ) from error

    return Client()


class JudgeServer:
    """Asks for verdicts, each once: equal questions share one, also those of other runs with the
    same cache.
    """

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
            raise InputError(
                "prompts are judged by a model, which no flag names; add --llm_judge_model",
                kind="missing_flag",
            )
        import openai

        self._client = openai.AsyncOpenAI(
            base_url=flags.llm_judge_url,
            api_key=os.environ.get(JUDGE_KEY) or "none",
            timeout=flags.llm_judge_timeout,
            max_retries=flags.llm_judge_max_retries,
            http_client=_client_with_deadline(flags.llm_judge_timeout),
        )
        JUDGE_COSTS.update({f"judge/{name}": 0.0 for name in COSTS} | JUDGE_COSTS)
        for self._forces in (True, False):
            try:
                event_loop.run(self._answer(*TRIAL))
                break
            # Or an answer of another form.
            except (openai.OpenAIError, AttributeError, TypeError, IndexError) as error:
                # It does not know the field.
                if self._forces and getattr(error, "status_code", 0) in (400, 422):
                    continue
                raise InputError(
                    f"--llm_judge_model {flags.llm_judge_model} at {self._client.base_url} cannot "
                    f"judge: {said(error)} (start a server there that has it, or give another "
                    f"--llm_judge_url, and its key as {JUDGE_KEY})",
                    kind="remote",
                ) from None
        path = cache / CACHE_FILE
        try:
            self._cache = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._cache.execute("PRAGMA journal_mode=WAL")
            self._cache.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (question BLOB PRIMARY KEY, verdict TEXT)"
            )
        except sqlite3.Error as error:
            raise InputError(
                f"--cache_dir: {path}: {error}; remove that, or give another folder",
                kind="unreadable_file",
            ) from error

    async def score(self, question: str, scores: Mapping[str, float]) -> float:
        """The score of the judge's verdict, which is one of the names in `scores`.

        Raises:
            openai.OpenAIError: it cannot be asked.
            ValueError: it gives no verdict.
        """
        flags = self._flags
        settings = (
            flags.llm_judge_model,
            flags.llm_judge_temperature,
            flags.llm_judge_max_tokens,
            list(scores),
        )
        content = json.dumps([str(self._client.base_url), question, *settings])
        key = hashlib.blake2b(content.encode(), digest_size=32).digest()
        kept = None
        with suppress(sqlite3.Error):  # one that cannot be read is asked for again
            kept = self._cache.execute(
                "SELECT verdict FROM verdicts WHERE question = ?", [key]
            ).fetchone()
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
            # So far apart that no minute has more requests, or tokens, than it may; a verdict
            # counts as its limit.
            turn_s = max(self._next_s, time.monotonic())
            num_tokens = len(question) / CHARACTERS_A_TOKEN + flags.llm_judge_max_tokens
            of_requests = 1 / (flags.llm_judge_requests_per_minute or math.inf)
            of_tokens = num_tokens / (flags.llm_judge_tokens_per_minute or math.inf)
            self._next_s = turn_s + 60 * max(of_requests, of_tokens)
            await asyncio.sleep(turn_s - time.monotonic())
            answer = await self._answer(question, scores)
        if answer is None:
            limit = f"--llm_judge_max_tokens {flags.llm_judge_max_tokens}"
            raise ValueError(f"the judge gave no verdict: its answer was cut at {limit}")
        # What was thought or explained before the verdict does not count.
        end = without_thinking(answer).replace("*", "").strip(" .\n").lower()
        verdict = next((verdict for verdict in scores if end.endswith(verdict.lower())), None)
        if verdict is None:
            raise ValueError(
                f"the judge gave no verdict, but {without_key(answer)[-MAX_SHOWN_CHARACTERS:]!r}"
            )
        with suppress(sqlite3.Error):  # a verdict that cannot be kept is asked for again, no more
            self._cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [key, verdict])
        return verdict

    async def _answer(self, question: str, scores: Mapping[str, float]) -> str | None:
        """What the judge says;

        None where that was cut, perhaps within thoughts, where any words may stand.
        """
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
        choice = reply.choices[0]
        return None if choice.finish_reason == "length" else choice.message.content or ""
