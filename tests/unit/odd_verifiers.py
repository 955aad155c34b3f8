"""A verifier that does what its completion says, good or bad; tests copy this file to where a user has it."""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from open_instruct.verifiers.verifier import Verifier


def sign() -> None:
    """Leave this process's id in the working folder."""
    Path("spinning").write_text(str(os.getpid()))


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
        if completion == "leave a child":
            if os.fork() == 0:
                sign()
                time.sleep(600)
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
        if completion == "read":
            return 0.25 if sys.stdin.readline() == "" else 1.0
        if completion == "exit":
            sys.exit()
        return float(completion)


class Inline(Odd):
    name = "inline"
    isolated = False


class NotOne:
    name = "not_one"


class Clash(Verifier):
    name = "gsm8k"

    def score(self, completion: str, ground_truth: Any) -> float:
        return 0.0


def ifeval(completions: list[str]) -> list[float]:
    return [0.0 for _ in completions]
