"""The warm process of a sandbox: it forks a child for each program, behind walls, and ends it with its client.

`Sandbox` starts it. Every message on its control socket brings two sockets: one is the child's, the other closes when
the child is to be ended. It never runs a word of a program itself, and ends when its control socket does.
"""

import ast
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from contextlib import suppress
from typing import Any, NoReturn

from open_instruct.parallel import processes
from open_instruct.sandbox.walls import Walls

# Imported once, by the warm process, and not by every child.
USUAL = (
    "bisect collections copy dataclasses datetime decimal fractions functools heapq itertools math operator random re"
)
PLAIN: tuple[Any, ...] = (list, tuple, set, bool, int, float, complex, str, bytes)
PR_SET_CHILD_SUBREAPER = 36  # <linux/prctl.h>


def main(control: socket.socket) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what a child leaves behind becomes ours
    # A working folder that is gone: it is empty, nothing can be made in it, and nothing of it is left behind.
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    walls, server = Walls(), os.getpid()
    for name in USUAL.split():
        __import__(name)
    control.sendall(b"+")
    children: dict[int, int] = {}  # by the descriptor of what closes when they are to be ended
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                _end(children.pop(descriptor))
                while walls.filter is None and (left := {*processes.children(os.getpid())} - {*children.values()}):
                    _end(left.pop())  # what programs have started, where no wall kept them from it
                continue
            message, sockets, *_ = socket.recv_fds(control, 1, 2)
            if not message:
                for child in children.values():
                    _end(child)
                return
            try:
                work, life = sockets  # fewer have come where this process may open no more
                child = os.fork()
            except (ValueError, OSError):  # which ends this one program alone
                for descriptor in sockets:
                    os.close(descriptor)
                continue
            if child == 0:
                _live(work, walls, server)
            children[life] = child
            os.close(work)
            poll.register(life, 0)  # its end alone


def _end(child: int) -> None:
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)  # not yet reaped: this is no other's id
    os.waitpid(child, 0)


def _live(work: int, walls: Walls, server: int) -> NoReturn:
    """The life of a child: it runs one piece of code after the other, all with the same names."""
    try:
        os.setsid()
        connection = socket.socket(fileno=work)
        requests = connection.makefile()
        settings = json.loads(requests.readline())
        with tempfile.TemporaryFile() as stdin:  # a file, so that all ways of reading it work
            stdin.write(settings["stdin"].encode())
            stdin.seek(0)
            os.dup2(stdin.fileno(), 0)
        os.dup2(work, 1)
        os.dup2(work if settings["stderr"] else 2, 2)
        walls.put_up(cpu_s=settings["cpu_s"])
        if os.getppid() != server:
            os._exit(0)  # it has ended before it could take this process with it
        os.closerange(3, work)
        os.closerange(work + 1, 1 << 16)
        sys.modules[settings["name"]] = module = types.ModuleType(settings["name"])
        connection.sendall(b"+")
        for line in requests:
            request = json.loads(line)
            answer = _ran(request["code"], module.__dict__, is_plain=request["is_plain"])
            with suppress(Exception):  # the program may have closed it
                sys.stdout.flush()
            connection.sendall(f"\n{request['mark']}{json.dumps(answer)}\n".encode())
    finally:
        os._exit(0)


def _ran(code: str, names: dict[str, Any], *, is_plain: bool) -> dict[str, str]:
    """What came of a piece of code; its `value` is that of its last line, if that is an expression."""
    value = None
    try:
        tree = ast.parse(code)
        last = tree.body[-1] if tree.body else None
        if not isinstance(last, ast.Expr):
            exec(compile(tree, "<program>", "exec"), names)
        else:
            exec(compile(ast.Module(tree.body[:-1], []), "<program>", "exec"), names)
            value = eval(compile(ast.Expression(last.value), "<program>", "eval"), names)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        return {"status": "done", "value": repr(_plain(value) if is_plain else value)}
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return {"status": "exit"}
        behind = error.__traceback__ and error.__traceback__.tb_next  # the first frame is ours
        return {"status": "error", "problem": "".join(traceback.format_exception(type(error), error, behind))}


def _plain(value: Any) -> Any:
    """`value` as a type that has literals, where it is of a subclass, or a number of numpy's: a Counter is a dict."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    value = set(value) if isinstance(value, frozenset) else value
    for kind in PLAIN:
        if isinstance(value, kind):
            # An Enum of texts has a `__str__` of its own.
            plain = str.__str__ if kind is str else kind
            return plain(map(_plain, value)) if kind in (list, tuple, set) else plain(value)
    return value.item() if hasattr(value, "item") else float(value) if hasattr(value, "__float__") else value
