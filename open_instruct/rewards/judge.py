"""Verifiers that ask a model on a server to judge, by a prompt of ours or the user's, or rubrics.

The server speaks OpenAI's form. Verdicts are cached in a file.
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

from open_instruct.config.policy_sections import RewardSection
from open_instruct.core.errors import InputError
from open_instruct.core.files import read_user_file
from open_instruct.core.tables import read_yaml_table
from open_instruct.rewards import event_loop
from open_instruct.rewards.secret_key import JUDGE_KEY, hide_key
from open_instruct.rewards.verifier import Verifier, describe_error, remove_thinking
from open_instruct.rewards.words import find_tagged_answer

CUT = "\n[The rest is left out.]"
HOW_TO_ANSWER = "Answer with one of these, and nothing else:"
RUBRICS = '{"rubrics": [{"description": "…", "weight": 1.0}]}, with a weight that is not 0'
_PLACES = re.compile(r"\{(input|output|label)\}")
# What would end a part of the question: special tokens of chat templates, and our tags.
_MARKS = re.compile(
    r"<[|｜]([^|｜<>]+)[|｜]>|<(/?(?:input|output|label|s|(?:start|end)_of_turn))\s*>",
    re.IGNORECASE,
)

# The prompt of each judge, and the possible verdicts with their scores.
JUDGE_PROMPTS: dict[str, tuple[str, dict[str, float]]] = {
    name: (facts["prompt"], facts["verdicts"])
    for name, facts in read_yaml_table(Path(__file__).with_name("judge_prompts.yaml")).items()
}

CACHE_FILE = "judge_verdicts.sqlite"
TRIAL = ("Is 7 more than 5?", {"Yes": 1.0, "No": 0.0})
MAX_SHOWN_CHARACTERS = 300
# Fewer than a token of English has, so that what is cut to a number of tokens fits.
CHARACTERS_PER_TOKEN = 3
COSTS = ("requests", "prompt_tokens", "completion_tokens", "cache_hits", "seconds")
# What all judges of this process have cost so far, as metrics; empty if none was asked.
JUDGE_COSTS: dict[str, float] = {}
_SERVERS: dict[str, "JudgeServer"] = {}


class Judge(Verifier):
    """Scores a completion by a model's verdict.

    Completions of a prompt are judged all at once.
    """

    name: ClassVar[str] = "judge"
    isolated: ClassVar[bool] = False
    judges_groups: ClassVar[bool] = True

    @property
    def needs_ground_truth(self) -> bool:
        return "{label}" in self._prompt

    def configure(self, flags: RewardSection) -> None:
        self._server = share_server(flags)
        self._max_tokens = flags.llm_judge_max_context_length - flags.llm_judge_max_tokens
        word = flags.llm_judge_prompt or "general-quality"
        name = self.name
        if name == Judge.name:
            name = word
        self._prompt, self._verdicts = JUDGE_PROMPTS.get(name, JUDGE_PROMPTS["general-quality"])
        if name not in JUDGE_PROMPTS:
            self._prompt = read_user_file(word, where=f"--llm_judge_prompt {word}")
            if "{output}" not in self._prompt:
                raise InputError(
                    f"--llm_judge_prompt {word}: has no {{output}}, the place of the completion; "
                    "add it",
                    kind="bad_value",
                )

    def begin_run(self, cache: Path) -> None:
        self._server.begin(cache)

    async def judge(
        self,
        prompt: str,
        completion: str,
        ground_truth: Any,
        *,
        is_truncated: bool,
    ) -> float:
        label = ground_truth
        if not isinstance(ground_truth, str):
            label = json.dumps(ground_truth, ensure_ascii=False)
        answer = find_tagged_answer(completion).strip()
        texts = {
            "input": prompt,
            "output": answer,
            "label": label,
        }
        texts = {name: _MARKS.sub(r"[\1\2]", text) for name, text in texts.items()}
        room = CHARACTERS_PER_TOKEN * self._max_tokens
        room -= len(self._prompt) + len(texts["input"]) + len(texts["label"])
        if len(texts["output"]) > room:
            texts["output"] = texts["output"][: max(room, 0)] + CUT
        question = _PLACES.sub(lambda place: texts[place[1]], self._prompt)
        lines = [question, HOW_TO_ANSWER, *self._verdicts]
        return await self._server.score("\n".join(lines), self._verdicts)


class Rubric(Judge):
    """Scores a completion by the weighted mean over a row's criteria, each judged by itself.

    Weights may be below 0.
    """

    name: ClassVar[str] = "rubric"
    is_bounded: ClassVar[bool] = False

    def check_ground_truth(self, ground_truth: Any) -> None:
        parse_rubrics(ground_truth)

    async def judge(
        self,
        prompt: str,
        completion: str,
        ground_truth: Any,
        *,
        is_truncated: bool,
    ) -> float:
        question, weights = parse_rubrics(ground_truth)
        judge = super().judge
        judgements = [
            judge(question or prompt, completion, criterion, is_truncated=is_truncated)
            for criterion in weights
        ]
        scores = await asyncio.gather(*judgements)
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
        truth = ground_truth
        if isinstance(truth, str):
            truth = json.loads(truth)
        for each in truth["rubrics"]:
            text = str(each.get("description") or each.get("rubric_item") or each["Ingredient"])
            weights[text] = weights.get(text, 0.0) + float(each.get("weight", 1.0))
        if not 0 < sum(map(abs, weights.values())) < float("inf"):
            raise ValueError
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"it must be {RUBRICS}") from None
    return str(truth.get("query") or truth.get("Question") or ""), weights


def share_server(flags: RewardSection) -> "JudgeServer":
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
    """Asks a model for verdicts, each once.

    Equal questions share a verdict, also those of other runs with the same cache.
    """

    def __init__(self, flags: RewardSection) -> None:
        self._flags = flags
        self._slots = asyncio.Semaphore(flags.llm_judge_concurrency)
        self._open_questions: dict[bytes, asyncio.Task[str]] = {}
        self._cache: Any = None
        self._forces_verdict = True  # vLLM, for one, can be made to write one
        self._next_turn_s = 0.0

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
        self._try_server()
        self._cache = _open_cache(cache / CACHE_FILE)

    def _try_server(self) -> None:
        """Ask a first question, which shows whether the server can force a verdict."""
        import openai

        for self._forces_verdict in (True, False):
            try:
                event_loop.run_coroutine(self._request_answer(*TRIAL))
                return
            # Or an answer of another form.
            except (openai.OpenAIError, AttributeError, TypeError, IndexError) as error:
                # It does not know the field.
                if self._forces_verdict and getattr(error, "status_code", 0) in (400, 422):
                    continue
                raise InputError(
                    f"--llm_judge_model {self._flags.llm_judge_model} at {self._client.base_url} "
                    f"cannot judge: {describe_error(error)} (start a server there that has it, or "
                    f"give another --llm_judge_url, and its key as {JUDGE_KEY})",
                    kind="remote",
                ) from None

    async def score(self, question: str, scores: Mapping[str, float]) -> float:
        """The score of the judge's verdict, which is one of the names in `scores`.

        Raises:
            openai.OpenAIError: it cannot be asked.
            ValueError: it gives no verdict.
        """
        flags = self._flags
        content = json.dumps(
            [
                str(self._client.base_url),
                question,
                flags.llm_judge_model,
                flags.llm_judge_temperature,
                flags.llm_judge_max_tokens,
                list(scores),
            ]
        )
        key = hashlib.blake2b(content.encode(), digest_size=32).digest()
        row = None
        with suppress(sqlite3.Error):  # one that cannot be read is asked for again
            query = "SELECT verdict FROM verdicts WHERE question = ?"
            row = self._cache.execute(query, [key]).fetchone()
        JUDGE_COSTS["judge/cache_hits"] += row is not None or key in self._open_questions
        if row is not None:
            return scores[row[0]]
        if key not in self._open_questions:
            task = asyncio.create_task(self._ask(key, question, scores))
            self._open_questions[key] = task
            task.add_done_callback(lambda _: self._open_questions.pop(key))
        return scores[await self._open_questions[key]]

    async def _ask(self, key: bytes, question: str, scores: Mapping[str, float]) -> str:
        flags = self._flags
        async with self._slots:
            await self._wait_for_turn(len(question))
            answer = await self._request_answer(question, scores)
        if answer is None:
            limit = f"--llm_judge_max_tokens {flags.llm_judge_max_tokens}"
            raise ValueError(f"the judge gave no verdict: its answer was cut at {limit}")
        # What was thought or explained before the verdict does not count.
        end = remove_thinking(answer).replace("*", "").strip(" .\n").lower()
        verdict = next((verdict for verdict in scores if end.endswith(verdict.lower())), None)
        if verdict is None:
            raise ValueError(
                f"the judge gave no verdict, but {hide_key(answer)[-MAX_SHOWN_CHARACTERS:]!r}"
            )
        with suppress(sqlite3.Error):  # a verdict that cannot be written is asked for again
            self._cache.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", [key, verdict])
        return verdict

    async def _wait_for_turn(self, num_characters: int) -> None:
        """Wait until no minute has more requests or tokens than it may, with this question too.

        A verdict counts as the limit of its tokens.
        """
        flags = self._flags
        turn_s = max(self._next_turn_s, time.monotonic())
        num_tokens = num_characters / CHARACTERS_PER_TOKEN + flags.llm_judge_max_tokens
        minutes_by_requests = 1 / (flags.llm_judge_requests_per_minute or math.inf)
        minutes_by_tokens = num_tokens / (flags.llm_judge_tokens_per_minute or math.inf)
        self._next_turn_s = turn_s + 60 * max(minutes_by_requests, minutes_by_tokens)
        await asyncio.sleep(turn_s - time.monotonic())

    async def _request_answer(self, question: str, scores: Mapping[str, float]) -> str | None:
        """What the judge says; None if that was cut, perhaps within thoughts."""
        began_s = time.monotonic()
        JUDGE_COSTS["judge/requests"] += 1
        extra_body = None
        if self._forces_verdict:
            extra_body = {"structured_outputs": {"choice": list(scores)}}
        reply = await self._client.chat.completions.create(
            model=self._flags.llm_judge_model,
            messages=[{"role": "user", "content": question}],
            temperature=self._flags.llm_judge_temperature,
            max_completion_tokens=self._flags.llm_judge_max_tokens,
            extra_body=extra_body,
        )
        JUDGE_COSTS["judge/seconds"] += time.monotonic() - began_s
        for kind in ("prompt_tokens", "completion_tokens"):  # some servers do not count them
            JUDGE_COSTS[f"judge/{kind}"] += getattr(reply.usage, kind, 0) or 0
        choice = reply.choices[0]
        if choice.finish_reason == "length":
            return None
        return choice.message.content or ""


def _open_cache(path: Path) -> sqlite3.Connection:
    try:
        cache = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        cache.execute("PRAGMA journal_mode=WAL")
        cache.execute(
            "CREATE TABLE IF NOT EXISTS verdicts (question BLOB PRIMARY KEY, verdict TEXT)"
        )
    except sqlite3.Error as error:
        raise InputError(
            f"--cache_dir: {path}: {error}; remove that, or give another folder",
            kind="unreadable_file",
        ) from error
    return cache
