"""Environments and the episodes in them, with an engine that answers from a list."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.errors import InputError
from open_instruct.core.records import Completion, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.environments import built_in
from open_instruct.environments.adapters import make_environment
from open_instruct.environments.built_in import Calculator, Counter, GuessNumber, Python, Wordle
from open_instruct.environments.environment import Opening, Reply, ToolAnswer, ToolCall, Turn
from open_instruct.environments.registry import find_factory
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rewards.sandbox import sandbox as sandbox_module
from open_instruct.rewards.sandbox.sandbox import START, Sandbox
from open_instruct.rl.episodes.conversations import Conversations
from tests.refusals import refused
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.fake_rollouts import grpo_config

USER = {"role": "user", "content": "What is 2 + 3?"}
CALL = '<tool_call>{"name": "calculate", "arguments": {"expression": "2 + 3"}}</tool_call>'


def played(
    environment: Any, row: Mapping[str, Any], replies: Sequence[Reply]
) -> tuple[Opening, list[Turn]]:
    """What an environment says to some replies."""

    async def play() -> tuple[Opening, list[Turn]]:
        made = make_environment(lambda: environment, {"messages": [USER], **row})
        opening = await made.start()
        turns = [await made.step(reply) for reply in replies]
        await made.close()
        return opening, turns

    return asyncio.run(play())


def calls(name: str, **arguments: Any) -> Reply:
    return Reply(text="", calls=(ToolCall(name=name, arguments=arguments),))


class TestBuiltIn:
    @pytest.mark.parametrize(
        ("expression", "value"),
        [
            ("2 + 3", "5"),
            ("(3+4)*12", "84"),
            ("7/2", "3.5"),
            ("-2 * -3", "6"),
            ("7 // 2 % 2", "1"),
            ("1e3", "1000"),
        ],
    )
    def test_calculator_computes(self, expression: str, value: str) -> None:
        assert Calculator().calculate(expression) == value

    @pytest.mark.parametrize(
        "expression",
        ["2 ** 9", "print(1)", "1e30 * 2", "9" * 300, "True + 1", "x", "1/0", "(" * 99],
    )
    def test_calculator_computes_nothing_else(self, expression: str) -> None:
        opening, (turn,) = played(Calculator(), {}, [calls("calculate", expression=expression)])
        assert opening.messages is None and opening.tools[0]["function"]["name"] == "calculate"
        assert "Error" in turn.messages[0]["content"] and not turn.done

    def test_python_keeps_its_names_until_a_call_is_late(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(built_in, "PYTHON_TIMEOUT_S", 20.0)
        python = Python()
        programs = [
            "x = 2; print('two')",
            "x * 3",
            "1 / 0",
            "print('y' * 9999)",
            "import os; os._exit(0)",
            "x",
        ]
        row = {"tools": ["python"]}
        opening, turns = played(
            python, row, [calls("python", code=program) for program in programs]
        )
        assert opening.tools[0]["function"]["parameters"]["required"] == ["code"]
        said = [turn.messages[0]["content"] for turn in turns]
        assert said[:2] == ["two\n", "6"]
        assert said[2].endswith("line 1, in <module>\nZeroDivisionError: division by zero\n")
        assert len(said[3]) < 4010 and "y\n…\ny" in said[3]
        assert said[4] == (
            "\nThe interpreter died, or printed too much. It is started anew: its names are gone."
        )
        assert said[5].endswith("NameError: name 'x' is not defined\n")
        # Closed, it leaves no process behind, and a call that comes late finds none.
        assert (
            python._interpreter is not None
            and python._interpreter.run("1", timeout_s=5).status == "died"
        )
        assert "The interpreter died" in python.python("1")
        monkeypatch.setattr(built_in, "PYTHON_TIMEOUT_S", 0.5)
        _, turns = played(Python(), {}, [calls("python", code="while True: pass")])
        assert "The interpreter took more than" in turns[0].messages[0]["content"]

    def test_counter_is_brought_to_its_target(self) -> None:
        up = calls("increment")
        opening, turns = played(
            Counter(), {"target": 2}, [up, up, calls("decrement"), up, calls("submit")]
        )
        assert opening.messages is not None and "Reach 2" in opening.messages[-1]["content"]
        assert [turn.rewards["counter"] for turn in turns] == [-0.1] * 4 + [1.0]
        assert [turn.done for turn in turns] == [False] * 4 + [True]
        _, (turn,) = played(Counter(), {"target": 2}, [calls("submit")])
        assert turn.rewards == {"counter": -0.5}
        often = Reply(text="", calls=calls("increment").calls + calls("submit").calls * 9)
        _, (turn,) = played(Counter(), {"target": 1}, [often])
        assert turn.done and turn.rewards == {"counter": pytest.approx(0.9)}, "it is won once"

    def test_number_is_guessed(self) -> None:
        guesses = [calls("guess", number=number) for number in (1, 90, "50")]
        _, turns = played(GuessNumber(), {"number": 50}, guesses)
        assert [
            "low" in turns[0].messages[0]["content"],
            "high" in turns[1].messages[0]["content"],
        ] == [True, True]
        assert turns[0].rewards["guessnumber"] == pytest.approx(1 - 49 / 99)
        assert turns[2].done and turns[2].rewards == {"guessnumber": 1.0}

    def test_word_is_guessed(self) -> None:
        said = [Reply(text=f"<guess>{word}</guess>") for word in ("crate", "eerie", "crane")]
        _, turns = played(Wordle(), {"word": "crane"}, said)
        assert "G G G X G" in turns[0].messages[0]["content"]
        assert "X X Y X G" in turns[1].messages[0]["content"]
        assert [turn.rewards["wordle"] for turn in turns] == pytest.approx(
            [1.0, 0.5, 1.0 + 1 / 3 + 0.2]
        )
        _, turns = played(
            Wordle(), {"word": "crane"}, [Reply(text="crane"), Reply(text="<guess>cranes</guess>")]
        )
        assert [turn.done for turn in turns] == [False, True] and turns[1].rewards == {
            "wordle": pytest.approx(0.1)
        }


class Shop:
    """A class of tools as people write them."""

    def reset(self, stock: int) -> str:
        self._stock = stock
        return f"There are {stock}."

    async def buy(self, count: int) -> dict[str, int]:
        """Buys some.

        Args:
            count: how many
        """
        self._stock -= count
        return {"left": self._stock}

    def leave(self) -> ToolAnswer:
        """Leaves the shop."""
        return ToolAnswer(content="bye", reward=0.5, done=True)

    def reward(self) -> float:
        return float(self._stock)

    def close(self) -> None:
        self.is_closed = True


class TestAdapters:
    def test_public_methods_are_tools(self) -> None:
        shop = Shop()
        opening, turns = played(
            shop, {"stock": 3}, [calls("buy", count=2), calls("buy", number=1), Reply(text="done")]
        )
        assert [tool["function"]["name"] for tool in opening.tools] == ["buy", "leave"]
        assert opening.messages == [{"role": "user", "content": "What is 2 + 3?\n\nThere are 3."}]
        assert turns[0].messages == [{"role": "tool", "content": '{"left": 1}'}]
        assert "TypeError" in turns[1].messages[0]["content"]
        assert turns[2].done and turns[2].rewards == {"shop": 1.0} and shop.is_closed
        opening, (turn,) = played(Shop(), {"stock": 3, "tools": ["leave"]}, [calls("leave")])
        assert [tool["function"]["name"] for tool in opening.tools] == ["leave"]
        assert turn.done and turn.rewards == {"shop": 0.5}

    @pytest.mark.parametrize(
        ("begins_with", "shown"),
        [(("go", {"seed": 1}), "go"), (("go", "on"), None), (("go",), None), (("go", {}, 1), None)],
    )
    def test_reset_gives_one_text(self, begins_with: tuple[Any, ...], shown: str | None) -> None:
        """With a dict beside it, as gymnasium's; of another tuple a part would be shown, and the
        rest lost.
        """

        class Starts(Shop):
            def reset(self) -> Any:  # type: ignore[override]
                return begins_with

        if shown is None:
            with pytest.raises(TypeError, match="`reset` returned a tuple: let it return one text"):
                played(Starts(), {}, [])
            return
        opening, _ = played(Starts(), {}, [])
        assert opening.messages == [{"role": "user", "content": f"What is 2 + 3?\n\n{shown}"}]

    def test_tool_names_its_arguments_as_it_likes(self) -> None:
        class Plots:
            def plot(self, function: str) -> str:
                """Plots a function.

                Args:
                    function: of x
                """
                return f"{function} is plotted"

        _, (turn,) = played(Plots(), {}, [calls("plot", function="x + 1")])
        assert turn.messages == [{"role": "tool", "content": "x + 1 is plotted"}]

    def test_environment_of_no_known_kind_is_refused(self) -> None:
        with pytest.raises(TypeError, match="is no environment"):
            make_environment(object, {"messages": [USER]})

    def test_factories_are_named(self, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "def shop(stock=2):\n    return Shop()\n\nclass Shop:\n    def buy(self): ...\n"
        )
        assert callable(
            find_factory(f"{tmp_path / 'mine.py'}:shop", origin="--environment mine.py:shop")
        )
        with refused("bad_value", "environment"):
            find_factory("countr", origin="--environment countr")
        with refused("own_code", "environment"):
            find_factory(f"{tmp_path / 'mine.py'}:nothing", origin="--environment mine.py:nothing")

    @pytest.mark.parametrize(
        ("method", "says"),
        [
            ("def buy(self): ...", "tool buy cannot be described to the policy: .*no docstring"),
            (
                "def buy(self, much):\n        'Buys.'",
                "tool buy .*Argument much is missing a type hint",
            ),
            ("def buy(self) -> None:\n        'Buys.'", None),
            ("@staticmethod\n    def buy() -> None:\n        'Buys.'", None),
        ],
    )
    def test_tools_that_cannot_be_described_are_refused_at_once(
        self, tmp_path: Path, method: str, says: str | None
    ) -> None:
        (tmp_path / "mine.py").write_text(f"class Shop:\n    {method}\n")
        with pytest.raises(InputError, match=says) if says else nullcontext():
            find_factory(f"{tmp_path / 'mine.py'}:Shop", origin="--environment mine.py:Shop")


PAGE = Path(__file__).resolve().parents[3] / "docs" / "environments.md"


def blocks_of_the_page() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_environments_of_the_page_work() -> None:
    """What the page says of one's own tool, game and environment, run from the page."""
    page: dict[str, Any] = {}
    for block in blocks_of_the_page():
        if block.startswith("# rows.py"):  # test_taskset.py has it
            continue
        exec(
            compile(block.replace("from __future__ import annotations", ""), str(PAGE), "exec"),
            page,
        )
    opening, turns = played(
        page["Dictionary"](), {}, [calls("look_up", word="ruhig"), Reply(text="calm")]
    )
    assert opening.tools[0]["function"]["parameters"]["required"] == ["word"]
    assert turns[0].messages == [{"role": "tool", "content": "calm"}] and turns[1].done
    opening, turns = played(page["Echo"](), {"wanted": "no"}, [Reply(text="yes"), Reply(text="no")])
    assert opening.messages is not None and opening.messages[-1]["content"].endswith("Say no.")
    assert [(turn.done, turn.rewards) for turn in turns] == [
        (False, {"echo": 0.0}),
        (True, {"echo": 1.0}),
    ]
    own = make_environment(page["Own"], {"messages": [USER]})
    opening, (turn,) = played(own, {}, [Reply(text="")])
    assert opening.messages == [
        {"role": "system", "content": "Be brief."},
        USER,
    ] and turn.rewards == {"brevity": 1.0}


class Engines:
    """In place of the pool: answers each request by the next of some texts, and keeps the
    requests.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str | None]) -> None:
        self._tokenizer = tokenizer
        self._texts = list(texts)
        self.requests: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest, home: object = None) -> Future[Completion]:
        self.requests.append(request)
        future: Future[Completion] = Future()
        text = self._texts.pop(0) if self._texts else "<|im_end|>"
        if text is None:  # an engine that never answers
            return future
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"][
            : request.sampling.max_tokens
        ]
        ends = bool(ids) and ids[-1] == self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        numbers = range(len(ids))
        future.set_result(
            Completion(
                token_ids=tuple(ids),
                logprobs=tuple(-float(number) for number in numbers),
                versions=tuple(7 for _ in numbers),
                text=text.removesuffix("<|im_end|>"),
                finish_reason="stop" if ends else "length",
                seed=request.seed,
            )
        )
        return future


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


Asked = tuple[Completion, list[GenerationRequest]]


@pytest.fixture
def ask(tokenizer: PreTrainedTokenizerFast) -> Iterator[Callable[..., Asked]]:
    """The completion of one episode, and what the engines were asked."""
    chat = ChatFormat.choose(tokenizer, "chatml")
    opened: list[Conversations] = []

    def ask(
        factory: Callable[..., Any],
        texts: Sequence[str | None],
        *,
        max_tokens: int = 400,
        watch: Mapping[str, Any] | None = None,
        **limits: Any,
    ) -> Asked:
        engines = Engines(tokenizer, texts)
        config = grpo_config("--max_prompt_token_length", "2000")
        config.environment = EnvironmentSection(
            **({"max_turns": 4, "environment_timeout_s": 0.5} | limits)
        )
        pool: Any = engines
        conversations = Conversations(
            pool,
            chat,
            {"it": factory},
            config,
            **(watch or {}),
        )
        opened.append(conversations)
        (prompt_ids,) = chat.tokenize([chat.render([USER], ())[0]])
        prompt = Prompt(
            row_id=0,
            token_ids=tuple(prompt_ids),
            text="",
            checks=(),
            environment="it",
            row={"messages": [USER], "target": 2, "word": "crane"},
        )
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=max_tokens)
        request = GenerationRequest(
            request_id="41/2", prompt_token_ids=prompt.token_ids, seed=17, sampling=sampling
        )
        return conversations.ask(prompt, request).result(20.0), engines.requests

    yield ask
    for conversations in opened:
        conversations.close()


def decoded(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


class TestEpisodes:
    def test_episode_learns_sampled_tokens_only(
        self, ask: Callable[..., Asked], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        completion, requests = ask(Calculator, [f"{CALL}<|im_end|>", "It is 5.<|im_end|>"])
        assert completion.episode is not None and completion.episode.status == "done"
        first, second = completion.replies
        ids = completion.token_ids
        assert decoded(tokenizer, ids[first.start : first.stop]) == f"{CALL}<|im_end|>"
        assert decoded(tokenizer, ids[second.start : second.stop]) == "It is 5.<|im_end|>"
        between = decoded(tokenizer, ids[first.stop : second.start])
        assert between == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
        assert completion.text == "It is 5." and completion.finish_reason == "stop"
        assert len(completion.logprobs) == len(completion.versions) == len(first) + len(second)
        assert [turn["role"] for turn in completion.episode.turns] == [
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        # The second request is the first one's prompt with all that followed, under an id and a
        # seed of its own.
        assert requests[0].request_id == "41/2" and requests[0].seed == 17
        assert requests[1].request_id == "41/2/1" and requests[1].seed != 17
        opening = completion.episode.prompt_token_ids
        assert requests[0].prompt_token_ids == opening and "calculate" in decoded(
            tokenizer, opening
        )
        assert requests[1].prompt_token_ids == opening + ids[: second.start]
        assert requests[1].sampling.max_tokens == 400 - second.start

    @pytest.mark.parametrize(
        ("texts", "limits", "status"),
        [
            ([f"{CALL}<|im_end|>"] * 9, {}, "max_turns"),
            ([f"{CALL}<|im_end|>"] * 9, {"max_tokens": 120}, "length"),
            (["no end"], {"max_tokens": 4}, "length"),
            ([f"{CALL[:-9]}<|im_end|>"], {}, "parse_error"),
        ],
    )
    def test_every_end_has_a_name(
        self,
        ask: Callable[..., Asked],
        texts: Sequence[str],
        limits: Mapping[str, Any],
        status: str,
    ) -> None:
        completion, requests = ask(Calculator, texts, **limits)
        assert completion.episode is not None and completion.episode.status == status
        assert completion.is_truncated == (status in ("length", "max_turns"))
        assert len(completion.token_ids) <= limits.get("max_tokens", 400)
        # A bridge to nowhere is not kept.
        assert completion.replies[-1].stop == len(completion.token_ids)
        assert len(requests) == len(completion.replies) <= 4

    def test_reply_that_is_cut_is_still_answered(self, ask: Callable[..., Asked]) -> None:
        completion, requests = ask(
            Wordle, ["<guess>cra", "ne</guess><|im_end|>"], turn_length=5, max_turns=2
        )
        assert [request.sampling.max_tokens for request in requests] == [5, 5]
        # Two moves that are none.
        assert completion.episode is not None and completion.episode.status == "done"

    @pytest.mark.parametrize(
        ("text", "status"), [("It is five, I believe", "done"), (CALL, "parse_error")]
    )
    def test_an_episode_whose_last_reply_is_cut_counts_as_cut(
        self, ask: Callable[..., Asked], text: str, status: str
    ) -> None:
        completion, _ = ask(Calculator, [text], turn_length=16)
        assert completion.episode is not None and completion.episode.status == status
        assert completion.is_truncated

    def test_calls_within_thoughts_that_never_close_are_not_run(
        self, ask: Callable[..., Asked]
    ) -> None:
        completion, requests = ask(Calculator, [f"<think>I call {CALL}<|im_end|>"])
        assert (
            completion.episode is not None
            and completion.episode.status == "done"
            and len(requests) == 1
        )

    def test_environments_that_hang_or_fail_cost_their_episode_alone(
        self, ask: Callable[..., Asked]
    ) -> None:
        closed: list[str] = []

        class Hangs:
            def __init__(self, **row: Any) -> None:
                pass

            def reset(self) -> str:
                return "go"

            def step(self, text: str) -> Any:
                time.sleep(3600)

            def close(self) -> None:
                closed.append("hangs")

        class Fails(Hangs):
            def step(self, text: str) -> Any:
                raise OSError("the world is gone")

        completion, _ = ask(Hangs, ["x<|im_end|>"])
        assert completion.episode is not None and completion.episode.status == "timeout"
        assert (
            completion.episode.has_failed
            and "0.5 s" in completion.episode.problem
            and len(completion.logprobs) > 0
        )
        completion, _ = ask(Fails, ["x<|im_end|>"])
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert "the world is gone" in completion.episode.problem
        assert closed == ["hangs", "hangs"]

        def exits() -> Any:
            raise SystemExit(3)

        completion, _ = ask(exits, [])
        assert (
            completion.episode is not None
            and completion.token_ids == ()
            and "SystemExit" in completion.episode.problem
        )

        class Exits:
            async def start(self) -> Opening:
                return Opening()

            async def step(self, reply: Reply) -> Turn:
                raise SystemExit(3)

            async def close(self) -> None:
                raise SystemExit(3)

        completion, _ = ask(Exits, ["x<|im_end|>"])
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert completion.episode.problem.endswith("SystemExit: 3")

    def test_fault_of_the_sandbox_is_no_answer_to_the_policy(
        self, ask: Callable[..., Asked], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        no_walls = (
            "from open_instruct.rewards.sandbox.server import Walls\nWalls.put_up = None\nmain("
        )
        monkeypatch.setattr(sandbox_module, "START", START.replace("main(", no_walls))
        call = '<tool_call>{"name": "python", "arguments": {"code": "1"}}</tool_call><|im_end|>'
        with closing(Sandbox()) as sandbox:
            monkeypatch.setattr(built_in, "SANDBOX", sandbox)
            completion, requests = ask(Python, [call], environment_timeout_s=60)
        assert (
            completion.episode is not None
            and completion.episode.status == "env_error"
            and len(requests) == 1
        )
        assert "EnvironmentFault: the sandbox ran no program" in completion.episode.problem

    def test_environment_of_an_abandoned_episode_is_closed(
        self, ask: Callable[..., Asked], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        closed = threading.Event()

        class Waits(Counter):
            def close(self) -> None:
                closed.set()

        chat = ChatFormat.choose(tokenizer, "chatml")
        engines: Any = Engines(tokenizer, [None])
        conversations = Conversations(engines, chat, {"it": Waits}, grpo_config())
        prompt = Prompt(
            row_id=0, token_ids=(1,), text="", checks=(), environment="it", row={"messages": [USER]}
        )
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=9)
        future = conversations.ask(
            prompt,
            GenerationRequest(request_id="0/0", prompt_token_ids=(1,), seed=1, sampling=sampling),
        )
        time.sleep(0.2)
        future.cancel()
        assert closed.wait(10.0)
        conversations.close()
