"""Stands for `python` in the commands of Ray's workers: `ask_for_fork.py SOCKET FILE ...`.

It asks the process behind the socket to fork one that runs FILE as the main program, with what this
process was given: environment, folder, standard streams and signals. See warm_workers.py.
"""

import json
import os
import signal
import socket
import sys


def main(path: str, words: list[str]) -> None:
    request = {
        "words": words,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "ignored": [
            int(number)
            for number in signal.valid_signals()
            if signal.getsignal(number) is signal.SIG_IGN
        ],
    }
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(path)
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(json.dumps(request).encode())
        server.shutdown(socket.SHUT_WR)
        assert server.recv(1), "nothing was forked"


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
