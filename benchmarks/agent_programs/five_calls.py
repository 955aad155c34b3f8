"""An agent of five calls, by the standard library's client, which starts in milliseconds."""

import http.client
import json
import os
import signal
import time
from typing import Any
from urllib.parse import urlsplit

NUM_CALLS = 5
QUESTION = {"role": "user", "content": "What now?"}


def solve(messages: list[dict[str, Any]], fails: str) -> float:
    """Ask five times; by its row it hangs, or dies, before the second."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    headers = {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    }
    history = list(messages)
    for number in range(NUM_CALLS):
        if number == 1 and fails == "hangs":
            time.sleep(3600)
        if number == 1 and fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        body = json.dumps({"model": "policy", "messages": history})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        answer = json.loads(connection.getresponse().read())
        history += [answer["choices"][0]["message"], QUESTION]
    return 1.0
