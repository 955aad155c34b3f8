"""A learner that imports no library, so that it is there at once."""

import os
import signal
import time

from open_instruct.core.errors import InputError


class Idler:
    """Takes part in nothing."""

    def __init__(self, *, refuses: bool = False) -> None:
        if not refuses:
            return
        if os.environ["RANK"] == "0":
            raise InputError("the checkpoint lacks blocks.0.w1")
        time.sleep(600)  # for the others, as in a process group

    def freeze(self, rank: int) -> None:
        """One rank is stopped; the others are busy."""
        print("idle", flush=True)  # logs are kept of those that have said something
        if os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(600)
