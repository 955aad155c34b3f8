"""Try a chat template that comes with a model, in a process that can be ended.

Jinja's sandbox keeps a template from files and programs, and not from looping without an end.
Python can interrupt its main thread alone, and prompts are rendered beside it too. So the first
rendering of every form of conversation happens in a process of its own (`template_renderer`), which
a signal ends once it has computed for too long. It is a new process, not a fork: a fork of a
process with many threads may die at once, or wait for a lock that nobody opens.

This is no limit on memory, nor on a template that loops over the words of some later conversation
only.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from open_instruct.core.errors import InputError
from open_instruct.data.templates import template_renderer

TIMEOUT_S = 30.0
PATIENCE = 10  # times the limit that a process may live: others may use the machine meanwhile
# `-P`: neither the program's own folder nor the working folder is searched for what it imports.
RENDERER = (sys.executable, "-P", str(Path(template_renderer.__file__)))


def refuse_endless(
    text: str,
    renderings: Sequence[Mapping[str, Any]],
    *,
    template: str,
    remedy: str,
) -> None:
    """Compile a template, and render it, in a process of its own.

    Args:
        text: of the template.
        renderings: the variables of each.
        template: its name, for the error.
        remedy: what the user may do.

    Raises:
        InputError: that takes more than `TIMEOUT_S` of CPU time, or ends the process.
    """
    request = {
        "text": text,
        "renderings": renderings,
        "timeout_s": TIMEOUT_S,
    }
    end_signal = _run_renderer(json.dumps(request, default=str))
    if end_signal is None:
        return
    if end_signal is signal.SIGPROF:
        problem = f"does not end: it ran for {TIMEOUT_S:g} s on a conversation"
    else:
        problem = f"ends the process that renders it ({end_signal.name})"
    raise InputError(
        f"{template} chat template {problem}; {remedy}",
        kind="bad_model",
        flag="chat_template_name",
        remedy=remedy,
    )


@lru_cache(maxsize=32)  # training, held-out and scored rows often begin with the same forms
def _run_renderer(request: str) -> signal.Signals | None:
    """The signal that ended the process, SIGPROF after `TIMEOUT_S`; None where it ended by itself.

    What the template raises counts as an end: the caller will meet it. So does a process that has
    hardly computed in `PATIENCE` times the limit, since templates do not wait.
    """
    try:
        process = subprocess.run(
            RENDERER,
            input=request,
            capture_output=True,
            text=True,
            timeout=PATIENCE * TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if not process.stdout.startswith(template_renderer.STARTED):
        raise RuntimeError(f"{' '.join(RENDERER)} does not start:\n{process.stderr}")
    return signal.Signals(-process.returncode) if process.returncode < 0 else None
