"""A verifier that does what its completion says, good or bad; tests copy this file to where a user
has it.
"""

import asyncio
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from open_instruct.rewards.verifier import Verifier


def sign() -> None:
    """Leave this process's id in the working folder: a file that is there is whole."""
    unfinished = Path(f"spinning.{os.getpid()}")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename("spinning")


class Odd(Verifier):
    name = "odd"

    def score(self, completion: str, ground_truth: Any) -> float:
        print("not a verdict")
        if completion == "hang":
            while True:
                time.sleep(1)
        if completion == "spin":
            sign()
            while True:
                pass
        if completion == "multiply":
            sign()
            9**9**9**9
        if completion == "die":
            os._exit(3)
        if completion == "pid":
            return 1 / os.getpid()
        if completion == "leave a child and hang":
            if os.fork() == 0:
                sign()
            time.sleep(600)
        if completion in ("leave a child", "leave a child and die"):
            if os.fork() == 0:
                sign()
                time.sleep(600)
            if completion.endswith("die"):
                os._exit(3)
            return 1 / os.getpid()
        if completion.startswith("leave a daemon"):
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    os.closerange(0, 30)
                    sign()
                    time.sleep(600)
                os._exit(0)
            while not os.path.exists("spinning"):
                time.sleep(0.01)
            if completion.endswith("die"):
                os._exit(3)
            time.sleep(600 if completion.endswith("hang") else 0)
            return 1 / os.getpid()
        if completion == "threads":
            return 1 / int(os.environ["OMP_NUM_THREADS"])
        if completion == "twins":
            return 0.25 if os.fork() else 0.5
        if completion == "forge":
            for descriptor in range(3, 30):
                with suppress(OSError):
                    os.write(descriptor, b'{"score": 1.0}\n7\n{\n')
            return 0.25
        while completion == "flood":
            for descriptor in range(3, 30):
                with suppress(OSError):
                    os.write(descriptor, b"x" * 4096)
        if completion == "read":
            return 0.25 if sys.stdin.readline() == "" else 1.0
        if completion == "exit":
            sys.exit()
        return float(completion)


class Inline(Odd):
    name = "inline"
    isolated = False


class Waits(Verifier):
    """Sleeps as many seconds as its completion says, and gives that, in a loop whose id it
    notes.
    """

    name = "waits"
    loops: ClassVar[set[int]] = set()

    async def score(self, completion: str, ground_truth: Any) -> float:
        if completion == "exit":
            sys.exit()
        seconds = float(completion)
        self.loops.add(id(asyncio.get_running_loop()))
        await asyncio.sleep(seconds)
        return seconds if len(self.loops) == 1 else 0.0


class WaitsTogether(Waits):
    name = "waits_together"
    isolated = False
    judges_groups = True


class WaitsForAll(Waits):
    name = "waits_for_all"

    async def judge_all(self, *, completions: list[str], **_: Any) -> list[float]:
        return [await self.score(each, None) for each in completions]


class Silent(Verifier):
    name = "silent"


class NotOne:
    name = "not_one"


class Clash(Verifier):
    name = "gsm8k"

    def score(self, completion: str, ground_truth: Any) -> float:
        return 0.0


def ifeval(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]
