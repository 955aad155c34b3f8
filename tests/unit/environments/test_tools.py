"""Tools of the web against a stub that speaks their services' forms, search in a corpus, and
several tools at once.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from open_instruct.commands.run_flags import parse_run
from open_instruct.commands.tiny_model import write_tiny_model
from open_instruct.config.grpo import GRPOConfig
from open_instruct.config.rollout_sections import TOOL_SET, EnvironmentSection
from open_instruct.core.errors import InputError
from open_instruct.environments import web_tools
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.built_in import Wordle
from open_instruct.environments.environment import EnvironmentFault, Reply, Turn, begin_run
from open_instruct.environments.registry import known_environments
from open_instruct.rl.checked_run import open_rollout_run
from tests.refusals import refused
from tests.unit.environments.test_environments import (
    CALL,  # noqa: F401
    USER,
    Asked,
    ask,  # noqa: F401
    calls,
    decoded,  # noqa: F401
    tokenizer,  # noqa: F401
)

KEY = "a-key-that-nobody-may-read"
SERVICES = ("SERPER", "S2", "JINA", "CRAWL4AI")


@dataclass
class Web:
    """The services, at one address: what they were asked, and what they answer; a number is a
    status alone.
    """

    asked: list[tuple[str, str, Mapping[str, str], Any]] = field(default_factory=list)
    answers: list[Any] = field(default_factory=list)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Web]:
    stub = Web()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self.answer(None)

        def answer(self, body: Any) -> None:
            stub.asked.append((self.command, self.path, dict(self.headers), body))
            said = stub.answers.pop(0)
            self.send_response(said if isinstance(said, int) else 200)
            self.end_headers()
            self.wfile.write(
                f"no, {KEY}".encode() if isinstance(said, int) else json.dumps(said).encode()
            )

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for service in SERVICES:
        monkeypatch.setenv(f"{service}_API_KEY", KEY)
        monkeypatch.setenv(f"{service}_API_URL", f"http://127.0.0.1:{server.server_port}/{service}")
    (tmp_path / "blocked.txt").write_text("bad.org\nworse.org\n")
    monkeypatch.setenv("CRAWL4AI_BLOCKLIST_PATH", str(tmp_path / "blocked.txt"))
    monkeypatch.setattr(web_tools, "WAITS_S", (0.0, 0.0, 0.0))
    yield stub
    server.shutdown()
    server.server_close()


def played(
    replies: list[Reply], row: Mapping[str, Any] = {}, **flags: Any
) -> tuple[list[Mapping[str, Any]], list[Turn]]:
    """The tools of a run with these flags, and what they answer in one episode."""
    section = EnvironmentSection(**flags)
    factory = known_environments(section)[str(section.of_all_rows)]
    begin_run(factory)

    async def play() -> tuple[list[Mapping[str, Any]], list[Turn]]:
        environment = make_environment(factory, {"messages": [USER], **row})
        opening = await environment.start()
        turns = [await environment.step(reply) for reply in replies]
        await environment.close()
        return [tool["function"] for tool in opening.tools], turns

    return asyncio.run(play())


def answered(reply: Reply, **flags: Any) -> str:
    _, (turn,) = played([reply], **flags)
    return str(turn.messages[0]["content"])


class TestWeb:
    def test_google_is_searched(self, web: Web) -> None:
        pages = [{"title": f"T{n}", "snippet": f"S{n}", "link": f"http://{n}"} for n in range(3)]
        web.answers = [
            {"organic": [*pages, {"title": "without"}], "answerBox": {"answer": "42"}},
            {"organic": []},
        ]
        said = answered(
            calls("serper_search", query="life"),
            tools=["serper_search"],
            tool_configs=['{"num_results": 2}'],
        )
        assert said == (
            "**Direct Answer:** 42\n\n**T0**\nS0\nSource: http://0\n\n**T1**\nS1\nSource: http://1"
        )
        (method, path, headers, body), *_ = web.asked
        assert (method, path, headers["X-API-KEY"], body) == (
            "POST",
            "/SERPER",
            KEY,
            {"q": "life", "num": 2},
        )
        assert (
            answered(calls("serper_search", query="x"), environment="serper_search")
            == "Query returned no results."
        )
        assert web.asked[1][3] == {"q": "x", "num": 5}

    def test_papers_are_searched(self, web: Web) -> None:
        web.answers = [
            {"data": [{"snippet": {"text": "one"}}, {"snippet": {}}, {"snippet": {"text": "two"}}]}
        ]
        assert answered(calls("s2_search", query="a b & c"), environment="s2_search") == "one\ntwo"
        method, path, headers, _ = web.asked[0]
        assert (method, headers["x-api-key"]) == ("GET", KEY)
        assert parse_qs(urlsplit(path).query) == {"limit": ["10"], "query": ["a b & c"]}

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (
                {"code": 200, "data": {"title": "A page", "content": "Its {{ text }}"}},
                "# A page\n\nIts {{ text }}",
            ),
            ({"code": 200, "data": {"content": "Its text"}}, "Its text"),
            ({"code": 200, "data": {"title": "Empty"}}, ""),
            ({"code": 422, "message": "no such page"}, "Jina API error: no such page"),
        ],
    )
    def test_page_is_read(self, answer: Any, said: str, web: Web) -> None:
        web.answers = [answer]
        assert (
            answered(calls("jina_browse", url=" http://a.org/b c?d=e "), environment="jina_browse")
            == said
        )
        method, path, headers, _ = web.asked[0]
        assert (method, headers["Authorization"], headers["X-Return-Format"]) == (
            "GET",
            f"Bearer {KEY}",
            "markdown",
        )
        assert unquote(path) == "/JINA/http://a.org/b c?d=e"

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (
                {
                    "success": True,
                    "markdown": {"raw_markdown": "long text"},
                    "metadata": {"title": "T"},
                },
                "# T\n\nlon\n\n[Content truncated]",
            ),
            ({"success": True, "markdown": "", "html": "<p>"}, "<p>"),
            ({"success": False, "error_message": "gone"}, "Crawl4AI error: gone"),
        ],
    )
    def test_page_is_crawled(self, answer: Any, said: str, web: Web) -> None:
        web.answers = [{"results": [answer]}]
        settings = '{"max_content_length": 8, "timeout": 20, "include_html": true}'
        call = calls("crawl4ai_browse", url="http://a.org")
        assert answered(call, tools=["crawl4ai_browse"], tool_configs=[settings]) == said
        _, path, headers, body = web.asked[0]
        assert (path, headers["x-api-key"], body["urls"]) == (
            "/CRAWL4AI/crawl",
            KEY,
            ["http://a.org"],
        )
        settings = body["crawler_config"]["params"]
        assert (settings["page_timeout"], settings["cache_mode"]) == (19000, "enabled")
        assert (
            settings["exclude_domains"] == ["bad.org", "worse.org"]
            and settings["exclude_external_links"] is True
        )

    def test_fault_of_the_query_is_told_to_the_policy_and_one_of_the_service_is_none_of_its_own(
        self,
        web: Web,
        ask: Callable[..., Asked],  # noqa: F811
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        web.answers = [400]
        said = answered(calls("s2_search", query=""), environment="s2_search")
        assert said == "ValueError: HTTP 400: no, $KEY" and KEY not in said
        assert "KeyError" in answered(calls("s2_search", words="x"), environment="s2_search")
        web.answers = [503, 429, {"data": [{"snippet": {"text": "at last"}}]}]
        assert answered(calls("s2_search", query="x"), environment="s2_search") == "at last"
        web.answers = [403]
        factory = known_environments(EnvironmentSection())["s2_search"]
        begin_run(factory)
        call = '<tool_call>{"name": "s2_search", "arguments": {"query": "x"}}</tool_call><|im_end|>'
        completion, requests = ask(factory, [call], environment_timeout_s=60)
        assert (
            completion.episode is not None
            and completion.episode.status == "env_error"
            and len(requests) == 1
        )
        assert "403: no, $KEY" in completion.episode.problem
        monkeypatch.setenv("S2_API_URL", "http://127.0.0.1:9")
        with pytest.raises(EnvironmentFault, match="not reached: ClientConnectorError"):
            answered(calls("s2_search", query="x"), environment="s2_search")


CORPUS = [
    {"id": 7, "title": "Owls", "text": "Owls hunt at night, and hear well."},
    {"text": "Whales sing under water."},
    {"text": "Bats hear their own echo at night."},
]


class TestSearch:
    @pytest.fixture
    def corpus(self, tmp_path: Path) -> str:
        (tmp_path / "corpus.jsonl").write_text("\n".join(map(json.dumps, CORPUS)))
        return str(tmp_path / "corpus.jsonl")

    def test_best_passages_come_first(self, corpus: str) -> None:
        flags: dict[str, Any] = {"environment": "search", "search_corpus": corpus}
        assert answered(calls("search", query="bats that hear at night"), **flags).split(
            "\n\n"
        ) == [
            CORPUS[2]["text"],
            f"7 Owls\n{CORPUS[0]['text']}",
        ]
        assert answered(calls("search", query="zebra"), **flags) == "Nothing was found."
        assert "TypeError" in answered(calls("search", words="owls"), **flags)
        settings = json.dumps({"corpus": corpus, "num_results": 1, "max_length": 9})
        call = calls("look_up", query="owls night")
        (tool,), (turn,) = played(
            [call], tools=["search"], tool_call_names=["look_up"], tool_configs=[settings]
        )
        assert turn.messages[0]["content"] == "7 Owls\nOw…" and tool["parameters"]["required"] == [
            "query"
        ]

    def test_folder_of_texts_is_a_corpus(self, tmp_path: Path) -> None:
        (tmp_path / "more").mkdir()
        (tmp_path / "more" / "b.md").write_text("Whales sing.")
        (tmp_path / "a.txt").write_text("Owls hunt.")
        said = answered(
            calls("search", query="whales"), environment="search", search_corpus=str(tmp_path)
        )
        assert said == "more/b.md\nWhales sing."

    @pytest.mark.parametrize(
        ("content", "told"),
        [
            (None, ("missing_flag", "search_corpus")),
            ("", ("bad_value", "search_corpus")),
            # Which are left out of the index.
            ('{"text": "of the"}', ("bad_value", "search_corpus")),
            ('{"body": "x"}', ("bad_row", "search_corpus", "corpus.jsonl", "1")),
            ("x", ("bad_row", "search_corpus", "not JSON")),
        ],
    )
    def test_search_without_a_corpus_is_refused(
        self, content: str | None, told: tuple[Any, ...], tmp_path: Path
    ) -> None:
        (tmp_path / "corpus.jsonl").write_text(content or "")
        corpus = None if content is None else str(tmp_path / "corpus.jsonl")
        with refused(*told):
            played([], environment="search", search_corpus=corpus)


class Dice:
    """A tool of one's own, with a memory of its episode."""

    def reset(self) -> str:
        self.num_throws = 0
        return "Throw."

    def throw(self) -> int:
        """Throws the dice."""
        self.num_throws += 1
        return self.num_throws

    def reward(self) -> float:
        return float(self.num_throws)


def word_game(word: str) -> Wordle:
    return Wordle()


class RedDice(Dice):
    """Its tool is called as that of the others is."""


class TestToolSet:
    TOOLS = ("python", "serper_search", f"{__file__}:Dice")
    FLAGS: Mapping[str, Any] = {
        "tools": [*TOOLS],
        "tool_call_names": ["code", "search", "throw_it"],
        "tool_configs": ['{"timeout": 30}', "{}", "{}"],
    }

    def test_tools_share_an_episode_under_their_names(self, web: Web) -> None:
        web.answers = [{"organic": [{"snippet": "found"}]}]
        both = Reply(text="", calls=(*calls("search", query="x").calls, *calls("throw_it").calls))
        replies = [
            calls("code", code="x = 2; x"),
            calls("code", code="x + 1"),
            both,
            Reply(text="done"),
        ]
        tools, turns = played(replies, **self.FLAGS)
        assert [tool["name"] for tool in tools] == ["code", "search", "throw_it"]
        assert [message["content"] for turn in turns for message in turn.messages][:2] == ["2", "3"]
        assert "found" in turns[2].messages[0]["content"] and turns[2].messages[1]["content"] == "1"
        assert [turn.done for turn in turns] == [False, False, False, True] and turns[
            3
        ].rewards == {"tools": 1.0}
        tools, _ = played([], row={"tools": ["search", "unknown"]}, **self.FLAGS)
        assert [tool["name"] for tool in tools] == ["search"]
        with pytest.raises(
            ValueError,
            match=r"none of the row's tools is there: .*unknown.*; there are code, search",
        ):
            played([], row={"tools": ["unknown"]}, **self.FLAGS)

    def test_call_ends_after_its_own_time(self) -> None:
        said = answered(
            calls("python", code="while True: pass"),
            tools=["python"],
            tool_configs=['{"timeout": 0.5}'],
        )
        assert "took more than 0.5 s" in said

    @pytest.mark.parametrize(
        ("flags", "told"),
        [
            (
                {"tools": ["python"], "environment": "counter"},
                ("conflict", "environment", "--tools"),
            ),
            ({"tools": ["python", "python"]}, ("bad_value", "tools", "(python, python)")),
            (
                {"tools": ["python", "search"], "tool_call_names": ["a", "a"]},
                ("bad_value", "tools", "(a, a)"),
            ),
            ({"tools": ["python", "wordle"]}, ("bad_value", "tools", "wordle", "--environment")),
            ({"tools": ["openenv:http://h"]}, ("bad_value", "tools", "openenv:http://h")),
            ({"tools": ["pythn"]}, ("bad_value", "tools", "pythn")),
            (
                {"tools": ["python", "search"], "tool_call_names": ["code"]},
                ("bad_value", "tool_call_names", "1", "2", "--tools"),
            ),
            (
                {"tools": ["python"], "tool_configs": ["{}", "{}"]},
                ("bad_value", "tool_configs", "2", "1", "--tools"),
            ),
            (
                {"tools": ["python"], "tool_configs": ["{'a'}"]},
                ("bad_value", "tool_configs", "JSON"),
            ),
            (
                {"tools": ["python"], "tool_configs": ['{"time": 3}']},
                ("bad_value", "tool_configs", "'time'"),
            ),
            (
                {"tools": ["s2_search"], "tool_configs": ['{"n": 3}']},
                ("bad_value", "tool_configs", "n is none"),
            ),
            (
                {"tools": ["generic_mcp"], "tool_configs": ['{"transport": "sse"}']},
                ("bad_value", "tool_configs", "'sse'"),
            ),
            (
                {"tools": ["mcp:x"], "tool_configs": ['{"tools": ["x"]}']},
                ("bad_value", "tool_configs", "'tools'"),
            ),
        ],
    )
    def test_flags_that_do_not_go_together_are_refused(
        self, flags: dict[str, Any], told: tuple[Any, ...]
    ) -> None:
        with refused(*told):
            known_environments(EnvironmentSection(**flags))

    @pytest.mark.parametrize(
        ("tools", "told"),
        [
            ([f"{__file__}:word_game"], "Wordle has turns of its own: name it by --environment"),
            (
                [f"{__file__}:Dice", f"{__file__}:RedDice"],
                "RedDice has a tool of the same name as another",
            ),
        ],
    )
    def test_impossible_set_of_tools_is_refused(self, tools: list[str], told: str) -> None:
        with pytest.raises(TypeError, match=told):
            played([], row={"word": "crane"}, tools=tools)

    def test_run_is_refused_without_the_key_before_it_starts(
        self,
        web: Web,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        model = write_tiny_model(tmp_path / "model", family="olmo2")
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "Add.", "tools": ["search"]}))
        words = [
            "--model_name_or_path",
            str(model),
            "--dataset_mixer_list",
            f"{tmp_path}/rows.jsonl",
            "1.0",
        ]
        words += [
            "--output_dir",
            f"{tmp_path}/out",
            "--cache_dir",
            f"{tmp_path}/cache",
            "--no_plan_check",
        ]
        words += [
            "--code_sandbox",
            "auto",
            "--tools",
            *self.TOOLS,
            "--tool_call_names",
            "code",
            "search",
            "throw_it",
        ]
        words += ["--tool_configs", '{"timeout": 3}', "{}", "{}", "--search_corpus", "nobody-asks"]
        with open_rollout_run(parse_run(GRPOConfig, words)) as run:
            assert run.environments is not None and TOOL_SET in run.environments
            assert {prompt.environment for prompt in run.prompts} == {TOOL_SET}
        told = " ".join("".join(capfd.readouterr()).split())
        assert "these walls stand" in told, "programs of the policy will run"
        assert "--search_corpus is not read: the tool search answers none of the prompts" in told
        assert not [
            path
            for path in tmp_path.rglob("*")
            if path.is_file() and KEY.encode() in path.read_bytes()
        ]
        monkeypatch.delenv("SERPER_API_KEY")
        refused = pytest.raises(InputError, match="needs the variable SERPER_API_KEY")
        with refused, open_rollout_run(parse_run(GRPOConfig, [*words, "--overwrite_output_dir"])):
            pass
