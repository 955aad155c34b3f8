"""The environment of prompts that recorded sessions answer: nothing is asked, and nothing runs."""

from open_instruct.environments.environment import Source


class RecordedSessions(Source):
    """Stands for the sessions of a row's `env_config`, which `rl/recorded.py` reads."""

    def begin_run(self) -> None:
        """Do nothing, as nothing is needed."""

    def __call__(self) -> None:
        raise AssertionError("an episode that was recorded asks no environment")
