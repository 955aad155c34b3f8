"""Agents as programs and functions, with an engine that answers from a list, over real HTTP."""

import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from open_instruct.config.rollout_sections import EnvironmentSection
from open_instruct.core.records import Check, Completion, Prompt
from open_instruct.data.chat import ChatFormat
from open_instruct.environments.agent_walls import find_missing_wall
from open_instruct.environments.agents import AgentProgram, read_outcome
from open_instruct.generation.requests import GenerationRequest, SamplingSettings
from open_instruct.rl.agents.episodes import AgentEpisodes
from tests.refusals import refused
from tests.unit.data.test_chat import CHATML, make_tokenizer
from tests.unit.environments.test_environments import Engines
from tests.unit.fake_rollouts import grpo_config

USER = {"role": "user", "content": "What is 2 + 3?"}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call><|im_end|>'
# A client of the standard library's, as a program that nobody wrote for us might have it.
CLIENT = """
import json, os, sys, urllib.error, urllib.request

def post(path, key=None, **body):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps({"model": "policy", **body}).encode() if body else None,
        {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]),
         "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            text = answer.read().decode()
            return text if body.get("stream") else json.loads(text)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.loads(error.read())}

def chat(messages, **body):
    return post("/chat/completions", messages=messages, **body)
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer(CHATML)


Run = tuple[Completion, Engines]


@pytest.fixture
def play(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """The completion of an agent's episode, and the engines that it has asked."""
    chat = ChatFormat.choose(tokenizer, "chatml")
    opened: list[AgentEpisodes] = []

    def play(
        where: str,
        texts: Sequence[str | None],
        *,
        checks: tuple[Check, ...] = (),
        ground_truth: str = "",
        prompt_tokens: int = 1000,
        num_episodes: int = 1,
        **flags: Any,
    ) -> Run:
        engines = Engines(tokenizer, texts)
        lengths = ["--max_prompt_token_length", str(prompt_tokens), "--response_length", "400"]
        config = grpo_config(*lengths)
        limits: dict[str, Any] = {"max_turns": 4, "environment_timeout_s": 10.0}
        config.environment = EnvironmentSection(**(limits | flags))
        pool: Any = engines
        program = AgentProgram(where, origin=f"--environment agent:{where}")
        episodes = AgentEpisodes(pool, chat, {"agent": program}, config)
        opened.append(episodes)
        (prompt_ids,) = chat.tokenize([chat.render([USER], ())[0]])
        prompt = Prompt(
            row_id=0,
            token_ids=tuple(prompt_ids),
            text="",
            checks=checks,
            environment="agent",
            row={"messages": [USER], "question": "2 + 3", "ground_truth": ground_truth},
        )
        sampling = SamplingSettings(temperature=1.0, top_p=1.0, max_tokens=400)
        request = GenerationRequest(
            request_id="41/2", prompt_token_ids=prompt.token_ids, seed=17, sampling=sampling
        )
        asked = [episodes.ask(prompt, request) for _ in range(num_episodes)]
        return [future.result(150.0) for future in asked][-1], engines

    yield play
    for episodes in opened:
        episodes.close()


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    """A function agent from the body of `solve(messages, question)`; it may use `chat`."""

    def write(body: str) -> str:
        path = tmp_path / "mine.py"
        body = textwrap.indent(textwrap.dedent(body), "    ")
        path.write_text(f"{CLIENT}\ndef solve(messages, question):\n{body}\n")
        return f"{path}:solve"

    return write


Play = Callable[..., Run]
Write = Callable[[str], str]


def decoded(tokenizer: PreTrainedTokenizerFast, completion: Completion) -> list[str]:
    return [
        tokenizer.decode(completion.token_ids[reply.start : reply.stop])
        for reply in completion.replies
    ]


class TestConversation:
    def test_function_that_calls_a_tool_learns_its_replies_alone(
        self, play: Play, write: Write, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        where = write(
            """
            tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
            message = chat(messages, tools=tools)["choices"][0]["message"]
            arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
            answer = {"role": "tool", "content": str(sum(arguments.values())),
                      "tool_call_id": message["tool_calls"][0]["id"]}
            last = chat([*messages, message, answer], tools=tools)["choices"][0]
            assert last["finish_reason"] == "stop"
            return float(last["message"]["content"] == "It is 5.")
            """
        )
        completion, engines = play(where, [CALL, "It is 5.<|im_end|>"])
        episode = completion.episode
        assert episode is not None and episode.problem == "" and episode.status == "done"
        assert episode.rewards == {"agent": 1.0} and not episode.branches
        assert decoded(tokenizer, completion) == [CALL, "It is 5.<|im_end|>"]
        first, second = completion.replies
        between = tokenizer.decode(completion.token_ids[first.stop : second.start])
        assert between == "\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
        learned = engines.requests[1].prompt_token_ids
        assert learned == episode.prompt_token_ids + completion.token_ids[: second.start]
        assert completion.text == "It is 5." and len(completion.logprobs) == sum(
            map(len, completion.replies)
        )

    def test_row_that_is_asked_as_it_stands_is_sampled_as_without_an_agent(
        self, play: Play, write: Write
    ) -> None:
        _, engines = play(write("chat(messages)\nreturn 1"), ["yes<|im_end|>"])
        (request,) = engines.requests
        assert request.request_id == "41/2" and request.seed == 17

    def test_command_gets_the_row_and_its_last_line_is_its_reward(
        self, play: Play, tmp_path: Path
    ) -> None:
        program = tmp_path / "agent.py"
        program.write_text(
            f"{CLIENT}\nrow = json.load(sys.stdin)\nassert sys.argv[1] == '2 + 3'\n"
            "chat(row['messages'])\nprint('noise')\n"
            "print(json.dumps({'rewards': {'right': 1, 'short': 0.5}}))"
        )
        command = f"{sys.executable} {program} {{question}}"
        completion, _ = play(command, ["It is 5.<|im_end|>"])
        assert completion.episode is not None and not completion.episode.problem
        assert completion.episode.rewards == {"right": 1.0, "short": 0.5}

    def test_async_function_asks_in_parallel_and_replies_do_not_depend_on_who_is_first(
        self, play: Play, tmp_path: Path
    ) -> None:
        path = tmp_path / "mine.py"
        path.write_text(
            f"{CLIENT}\nimport asyncio\n\nasync def solve(messages):\n"
            "    def ask(text):\n"
            "        return chat([{'role': 'user', 'content': text}], n=2)\n"
            "    answers = await asyncio.gather(*(asyncio.to_thread(ask, t) for t in 'ab'))\n"
            "    return float(sum(len(each['choices']) for each in answers))\n"
        )
        seeds: list[dict[tuple[int, ...], list[int]]] = []
        for _ in range(2):
            completion, engines = play(f"{path}:solve", ["yes<|im_end|>"] * 4)
            assert completion.episode is not None and completion.episode.rewards == {"agent": 4.0}
            assert len(completion.episode.branches) == 3
            by_prompt: dict[tuple[int, ...], list[int]] = {}
            for request in engines.requests:
                by_prompt.setdefault(request.prompt_token_ids, []).append(request.seed)
            seeds.append(by_prompt)
        assert seeds[0] == seeds[1]
        assert len({seed for each in seeds[0].values() for seed in each}) == 4

    def test_stream_has_the_reply_and_its_usage(self, play: Play, write: Write) -> None:
        where = write(
            """
            text = chat(messages, stream=True, stream_options={"include_usage": True})
            events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
            assert events.pop() == "[DONE]"
            pieces = [json.loads(event) for event in events]
            assert pieces[-1]["usage"]["completion_tokens"] > 0
            return float(pieces[0]["choices"][0]["delta"]["content"] == "yes")
            """
        )
        completion, _ = play(where, ["yes<|im_end|>"])
        assert completion.episode is not None and completion.episode.rewards == {"agent": 1.0}

    def test_text_prompts_go_on_from_exact_ids(
        self, play: Play, write: Write, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        where = write(
            """
            prompt = "<|im_start|>user\\nhi<|im_end|>\\n<|im_start|>assistant\\n"
            text = post("/completions", prompt=prompt, max_tokens=50)["choices"][0]["text"]
            prompt += text + "<|im_end|>\\n<|im_start|>user\\nmore"
            post("/completions", prompt=prompt, max_tokens=50, stop="!")
            return 1.0
            """
        )
        completion, engines = play(where, ["yes no<|im_end|>", "again<|im_end|>"])
        assert decoded(tokenizer, completion) == ["yes no<|im_end|>", "again<|im_end|>"]
        assert completion.episode is not None and not completion.episode.branches
        assert engines.requests[1].sampling.stop_strings == ("!",)
        whole = tokenizer.decode(engines.requests[1].prompt_token_ids)
        assert whole.endswith("yes no<|im_end|>\n<|im_start|>user\nmore")


# What is asked, and the status and the parameter of the error.
REFUSED: list[tuple[str, int, str | None]] = [
    ("messages=[USER], temperature=0.2", 400, "temperature"),
    ("messages=[USER], top_p=0.5", 400, "top_p"),
    ("messages=[USER], model='gpt-5'", 404, "model"),
    ("messages=[USER], frobnicate=1", 400, "frobnicate"),
    ("messages=[USER], response_format={'type': 'json_object'}", 400, "response_format"),
    ("messages=[USER], response_format={'type': 'xml'}", 400, "response_format"),
    ("messages=[USER], logit_bias={'7': 1}", 400, "logit_bias"),
    ("messages=[]", 400, "messages"),
    ("messages=[{'role': 'user', 'content': [{'type': 'image_url'}]}]", 400, "messages[0]"),
    ("messages=[{'role': 'user', 'content': chr(0xd800)}]", 400, None),
    ("messages=[USER], stop=chr(0xdfff)", 400, None),
    ("messages=[USER], model='policy/' + chr(0xd800)", 400, None),
    ("messages=[USER], key='sk-of-another'", 401, None),
    ("messages=[{'role': 'user', 'content': 'x y' * 50000}]", 400, "messages"),
    ("messages=[{'role': 'user', 'content': 'x' * 9000000}]", 413, None),
]


class TestRefusals:
    def test_request_for_what_there_is_not_is_an_error_of_openais_form(
        self, play: Play, write: Write
    ) -> None:
        calls = ", ".join(f"lambda: chat({body})" for body, _, _ in REFUSED)
        expected = [(status, param) for _, status, param in REFUSED]
        where = write(
            f"""
            USER = messages[0]
            for call, (status, param) in zip([{calls}], {expected!r}):
                answer = call()
                assert answer["status"] == status, answer
                assert answer["error"]["param"] == param and answer["error"]["message"], answer
            form = urllib.request.Request(
                os.environ["OPENAI_BASE_URL"] + "/chat/completions",
                json.dumps({{"model": "policy", "messages": messages}}).encode(),
                {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}},
            )
            try:
                urllib.request.urlopen(form)
            except urllib.error.HTTPError as error:
                assert error.code == 415
            for prompt in ([10**9], [2**70], [-1], [], ""):
                assert post("/completions", prompt=prompt)["status"] == 400
            chat(messages, temperature=1.0, user="me")
            return 1.0
            """
        )
        completion, engines = play(where, ["yes<|im_end|>"])
        assert completion.episode is not None and completion.episode.problem == ""
        assert completion.episode.status == "done" and len(engines.requests) == 1

    def test_sampling_of_the_agents_own_is_not_learned(self, play: Play, write: Write) -> None:
        where = write(
            """
            message = chat(messages, temperature=0.2)["choices"][0]["message"]
            chat([*messages, message, messages[0]])
            return 1.0
            """
        )
        completion, engines = play(
            where, ["yes<|im_end|>", "no<|im_end|>"], agent_sampling="follow"
        )
        assert [each.sampling.temperature for each in engines.requests] == [0.2, 1.0]
        (reply,) = completion.replies
        assert reply.start > 0 and reply.stop == len(completion.token_ids)

    def test_form_that_a_reply_is_held_to_is_not_learned(self, play: Play, write: Write) -> None:
        where = write(
            """
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            reply = chat(messages, response_format=form)["choices"][0]["message"]
            return float(json.loads(reply["content"])["a"])
            """
        )
        completion, engines = play(where, ['{"a": 3}<|im_end|>'], agent_sampling="follow")
        assert completion.episode is not None and completion.episode.rewards == {"agent": 3.0}
        assert json.loads(engines.requests[0].sampling.json_schema)["type"] == "object"
        assert completion.replies == () and completion.text

    def test_first_of_several_calls_is_given_alone_where_one_is_asked_for_and_all_are_learned(
        self, play: Play, write: Write, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        where = write(
            """
            tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
            message = chat(messages, tools=tools, parallel_tool_calls=False)["choices"][0]["message"]
            (call,) = message["tool_calls"]
            answer = {"role": "tool", "content": "5", "tool_call_id": call["id"]}
            return float(bool(chat([*messages, message, answer], tools=tools)["choices"]))
            """
        )
        calls = CALL.removesuffix("<|im_end|>") + CALL
        completion, _ = play(where, [calls, "It is 5.<|im_end|>"])
        assert completion.episode is not None and completion.episode.problem == ""
        assert decoded(tokenizer, completion) == [calls, "It is 5.<|im_end|>"]
        assert not completion.episode.branches

    def test_schema_that_is_too_large_to_be_read_between_steps_is_refused(
        self, play: Play, write: Write
    ) -> None:
        where = write(
            """
            form = {"type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["x" * 70_000]}}}
            answer = chat(messages, response_format=form)
            assert answer["status"] == 400 and answer["error"]["param"] == "response_format"
            return 1.0
            """
        )
        completion, engines = play(where, [], agent_sampling="follow")
        assert completion.episode is not None and completion.episode.problem == ""
        assert not engines.requests

    def test_turns_run_out(self, play: Play, write: Write) -> None:
        where = write("for _ in range(9):\n    chat(messages)['choices']\nreturn 1.0")
        completion, engines = play(where, [])
        assert completion.episode is not None and completion.episode.status == "max_turns"
        assert completion.is_truncated and len(engines.requests) == 4


class TestFaults:
    def test_request_that_is_broken_off_leaves_nothing_and_is_sampled_as_it_would_have_been(
        self, play: Play, write: Write
    ) -> None:
        where = write(
            """
            import http.client, time
            address = os.environ["OPENAI_BASE_URL"].split("/")[2]
            connection = http.client.HTTPConnection(address)
            body = json.dumps({"model": "policy", "messages": messages, "stream": True})
            headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
                       "Content-Type": "application/json"}
            connection.request("POST", "/v1/chat/completions", body, headers)
            time.sleep(1.0)
            connection.close()
            post("/models")
            return float(chat(messages)["choices"][0]["message"]["content"] == "yes")
            """
        )
        completion, engines = play(where, [None, "yes<|im_end|>"])
        assert completion.episode is not None and completion.episode.rewards == {"agent": 1.0}
        assert len(completion.replies) == 1 and not completion.episode.branches
        first, second = engines.requests
        assert first.seed == second.seed

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ("raise ValueError('mine')", "env_error"),
            ("sys.exit(3)", "env_error"),
            ("os._exit(0)", "env_error"),
            ("return 'much'", "env_error"),
            ("return float('nan')", "env_error"),
            ("return None", "env_error"),
            ("return 'x' * (65 << 20)", "env_error"),
            ("import time; time.sleep(60)", "timeout"),
            ("while True: chat(messages, temperature=0.3)", "timeout"),
            ("os.kill(os.getpid(), 19)", "timeout"),
        ],
    )
    def test_agent_that_fails_costs_its_own_episode(
        self, play: Play, write: Write, body: str, status: str
    ) -> None:
        where = write(f"chat(messages)\n{body}")
        # One that ends by itself has the time of a busy machine.
        timeout_s = 1.5 if status == "timeout" else 60.0
        completion, _ = play(where, ["yes<|im_end|>"], environment_timeout_s=timeout_s)
        assert completion.episode is not None and completion.episode.status == status
        assert completion.episode.problem and len(completion.replies) == 1

    @pytest.mark.parametrize(("words", "status"), [("", "length"), ("max_tokens=5", "env_error")])
    def test_agent_that_fails_on_half_a_reply_ended_as_the_policy_let_it(
        self, play: Play, write: Write, words: str, status: str
    ) -> None:
        where = write(
            f"""
            assert chat(messages, {words})["choices"][0]["finish_reason"] == "length"
            raise ValueError("a sentence without an end")
            """
        )
        completion, _ = play(where, ["no end " * 9], turn_length=6)
        assert completion.episode is not None and completion.episode.status == status
        assert completion.is_truncated and bool(completion.episode.problem) == bool(words)

    def test_fault_of_ours_is_an_error_of_openais_form(self, play: Play, write: Write) -> None:
        where = write(
            """
            answer = chat(messages)
            assert answer["status"] == 500 and answer["error"]["type"] == "server_error"
            chat(messages)["choices"]
            return 1.0
            """
        )
        broken: Any = 5  # which no engine can say
        completion, _ = play(where, [broken, "yes<|im_end|>"])
        assert completion.episode is not None and completion.episode.problem == ""

    def test_only_so_many_programs_run_at_once(
        self, play: Play, write: Write, tmp_path: Path
    ) -> None:
        where = write(
            f"""
            import time
            with open({str(tmp_path / "order")!r}, "a", buffering=1) as file:
                file.write("begins\\n")
                time.sleep(0.1)
                file.write("ends\\n")
            return 1.0
            """
        )
        play(where, [], num_episodes=3, agent_processes=1)
        assert (tmp_path / "order").read_text().split() == ["begins", "ends"] * 3

    def test_verifiers_judge_where_the_agent_does_not(self, play: Play, write: Write) -> None:
        checks = (Check(verifier="math", ground_truth="5"),)
        completion, _ = play(write("chat(messages)"), ["5<|im_end|>"], checks=checks)
        assert completion.episode is not None and completion.episode.status == "done"
        assert completion.text == "5"

    def test_processes_that_it_leaves_behind_end_with_its_episode(
        self, play: Play, write: Write, tmp_path: Path
    ) -> None:
        pid_file = tmp_path / "pid"
        where = write(
            f"""
            import subprocess
            program = "import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid()))"
            program += "; time.sleep(600)"
            subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
            while not os.path.exists({str(pid_file)!r}) or not open({str(pid_file)!r}).read():
                pass
            return 1.0
            """
        )
        play(where, [])
        pid = int(pid_file.read_text())
        deadline_s = time.monotonic() + 10
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline_s:
                os.kill(pid, 0)
                time.sleep(0.02)
            raise AssertionError("it lives on")

    @pytest.mark.parametrize(
        ("code", "problem"),
        [
            ("while True: print('x' * 10**6)", "wrote more than"),
            ("import sys; sys.exit('sorry')", "it ended with 1: sorry"),
            ("print('{' * 99999)", "gave no reward"),
        ],
    )
    def test_program_that_fails_says_why(self, play: Play, code: str, problem: str) -> None:
        completion, _ = play(f'{sys.executable} -c "{code}"', [])
        assert completion.episode is not None and completion.episode.status == "env_error"
        assert problem in completion.episode.problem and completion.token_ids == ()

    @pytest.mark.skipif(bool(find_missing_wall()), reason="walls that this machine has not")
    def test_agent_behind_walls_speaks_to_its_endpoint_and_writes_to_its_folder_alone(
        self, play: Play, write: Write, tmp_path: Path
    ) -> None:
        where = write(
            f"""
            import socket, subprocess, tempfile
            def fails(function, *words):
                try:
                    function(*words)
                except OSError:
                    return True
            outside = {str(tmp_path / "outside")!r}
            assert fails(open, outside, "w")
            assert subprocess.call(["touch", outside], stderr=subprocess.DEVNULL) != 0
            assert fails(socket.create_connection, ("127.0.0.1", 22))
            assert fails(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)
            with tempfile.NamedTemporaryFile("w", delete=False) as file:
                file.write(os.environ["HOME"])
            assert chat(messages)["choices"]
            open({str(tmp_path / "mine.py")!r}).close()
            return {{"rewards": {{file.name: 1.0}}}}
            """
        )
        completion, _ = play(where, ["yes<|im_end|>"], agent_sandbox=True)
        assert completion.episode is not None and completion.episode.problem == ""
        (written,) = completion.episode.rewards
        assert not Path(written).parent.exists()

    def test_key_opens_nothing_once_its_episode_is_over(
        self, play: Play, write: Write, tmp_path: Path
    ) -> None:
        secret = tmp_path / "key"
        where = write(
            f"""
            path = {str(secret)!r}
            if os.path.exists(path):
                assert post("/models", key=open(path).read())["status"] == 401
            open(path, "w").write(os.environ["OPENAI_API_KEY"])
            assert post("/models")["data"][0]["id"] == "policy"
            return 1.0
            """
        )
        for _ in range(2):
            completion, _ = play(where, [])
            assert completion.episode is not None and not completion.episode.problem


class TestRewards:
    @pytest.mark.parametrize(
        ("value", "rewards"),
        [
            (None, {}),
            (1, {"agent": 1}),
            ({"reward": 0.5, "answer": "4"}, {"agent": 0.5}),
            ({"rewards": {"a": 1, "b": 0}}, {"a": 1, "b": 0}),
            ({"answer": "4"}, {}),
        ],
    )
    def test_reward_is_read_in_each_form(self, value: Any, rewards: dict[str, float]) -> None:
        assert read_outcome(json.loads(json.dumps(value))).rewards == rewards

    def test_agent_that_cannot_be_run_is_refused_before_the_run(self, tmp_path: Path) -> None:
        with refused("missing_file"):
            AgentProgram("no-such-program-here x", origin="--environment agent").begin_run()
        (tmp_path / "mine.py").write_text("raise OSError('mine')")
        program = AgentProgram(f"{tmp_path / 'mine.py'}:solve", origin="--environment agent")
        with refused("own_code"):
            program.begin_run()
        program.end_run()
        with refused("bad_value"):
            AgentProgram("", origin="--environment agent:")


def test_agents_that_have_names_have_histories_and_rewards_of_their_own(
    play: Play, write: Write
) -> None:
    where = write(
        """
        for name in ("planner", "coder"):
            message = chat(messages, model=f"policy/{name}")["choices"][0]["message"]
            chat([*messages, message, messages[0]], model=f"policy/{name}")
        return {"reward": 1.0, "agents": {"planner": 0.5, "coder": 0.25}}
        """
    )
    completion, engines = play(where, ["yes<|im_end|>"] * 4)
    episode = completion.episode
    assert episode is not None and episode.problem == ""
    assert episode.agent_rewards == {"planner": 0.5, "coder": 0.25}
    assert episode.agent == "coder" and [each.agent for each in episode.branches] == ["planner"]
    assert len(completion.replies) == 2 and len(engines.requests) == 4
