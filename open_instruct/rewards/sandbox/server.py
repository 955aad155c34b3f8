"""The warm process behind `ForkServer`, which forks a child for each client and ends it with it.

Every message on its control socket brings two sockets: one is the child's, the other closes when
the child is to be ended. It runs no word of foreign code itself, but for a module of the user's
that all children are to have imported. It ends, with all children, when its control socket or its
parent does. What a child leaves behind becomes a child of this process, in whichever session, and
is ended like one.
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
from collections.abc import Collection, Set
from contextlib import suppress
from functools import partial
from numbers import Number
from typing import Any, NoReturn

from open_instruct.core.user_code import load_named
from open_instruct.parallel import processes
from open_instruct.rewards.sandbox.usage import Allowance
from open_instruct.rewards.sandbox.walls import TABLES, Walls

PLAIN: tuple[Any, ...] = (list, tuple, set, bool, int, float, complex, str, bytes)
PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
PR_SET_CHILD_SUBREAPER = 36
# A forked child of the parent may hold the other end of the control socket, too.
PARENT_WATCH_INTERVAL_MS = 1000
COUNT_INTERVAL_MS = TABLES["counted"]["interval_ms"]


def main(control: socket.socket, *, handler: str, preloaded: str = "") -> None:
    """Serve until the client is gone.

    Args:
        control: on which clients ask for children.
        handler: the name of the function that answers requests, `module:NAME`; "" for interpreters
            behind walls.
        preloaded: a function of the user's whose module is imported first; "" for none.
    """
    parent = os.getppid()
    server = os.getpid()
    is_over = False
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    walls = None if handler else _prepare_walls()
    for name in filter(None, (handler, preloaded) if preloaded else ()):
        # What it raises, it raises again in each child, which says so.
        with suppress(BaseException):
            load_named(name, origin="ForkServer", what="function")
    may_start_others = walls is None or walls.filter is None  # no wall keeps a child from it
    allowance = Allowance.for_machine() if walls else None
    control.sendall(b"+")
    children: dict[int, int] = {}  # by the descriptor of what closes when they are to be ended
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while not is_over and os.getppid() == parent:
        counts = allowance is not None and bool(children)
        for descriptor, _ in poll.poll(COUNT_INTERVAL_MS if counts else PARENT_WATCH_INTERVAL_MS):
            if descriptor in children:
                poll.unregister(descriptor)
                os.close(descriptor)
                _end(children.pop(descriptor))
                if may_start_others:
                    _end_all_but(children.values())
                continue
            message, sockets, *_ = socket.recv_fds(control, 1, 2)
            if not message:
                is_over = True
                break
            try:
                work, life = sockets  # fewer have come where this process may open no more
                child = os.fork()
            except (ValueError, OSError):  # which ends this one program alone
                for descriptor in sockets:
                    os.close(descriptor)
                continue
            if child == 0:
                _serve_child(work, walls, server, handler)
            children[life] = child
            os.close(work)
            poll.register(life, 0)  # its end alone
        if allowance is not None and children:
            for child in allowance.find_excess(children.values()):
                os.kill(child, signal.SIGKILL)  # its client finds its socket closed
        if _reap_all_but(children.values()) and may_start_others:
            _end_all_but(children.values())  # they may hold its socket, on which its client waits
    for child in children.values():
        _end(child)
    _end_all_but(())


def _prepare_walls() -> Walls:
    # A working folder that is gone: it is empty, nothing can be made in it, and nothing of it is
    # left behind.
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    walls = Walls()
    for name in TABLES["imported"].split():
        __import__(name)
    return walls


def _end(child: int) -> None:
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    os.kill(child, signal.SIGKILL)  # not yet reaped: this is no other's id
    os.waitpid(child, 0)


def _end_all_but(exceptions: Collection[int]) -> None:
    while others := {*processes.list_children(os.getpid())} - {*exceptions}:
        _end(others.pop())


def _reap_all_but(exceptions: Collection[int]) -> bool:
    """Ask how children have ended, of which there may be ever more.

    The exceptions are not asked, so that their ids stay theirs; returns whether one has ended.
    """
    if sys.platform == "linux":
        with suppress(ChildProcessError):
            look = os.WEXITED | os.WNOHANG | os.WNOWAIT
            while process := os.waitid(os.P_ALL, 0, look):
                if process.si_pid in exceptions:
                    return True
                os.waitpid(process.si_pid, 0)
    return False


def _serve_child(
    work: int,
    walls: Walls | None,
    server: int,
    handler: str,
) -> NoReturn:
    """The life of a child: it answers one request after the other."""
    try:
        os.setsid()
        child = os.getpid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        connection = socket.socket(fileno=work)
        requests = connection.makefile()
        settings = json.loads(requests.readline())
        if walls is None:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        else:
            _take_stdin(settings["stdin"])
            os.dup2(work, 1)
            os.dup2(work if settings["stderr"] else 2, 2)
            walls.put_up(cpu_s=settings["cpu_s"])
        if os.getppid() != server:
            os._exit(0)  # it has ended before it could take this process with it
        os.closerange(3, work)
        os.closerange(work + 1, 1 << 16)
        if handler:
            handle_request = load_named(handler, origin="ForkServer", what="function")
        else:
            sys.modules[settings["name"]] = module = types.ModuleType(settings["name"])
            # All pieces of code have the same names.
            handle_request = partial(_run_code, module.__dict__)
        connection.sendall(b"+")
        for line in requests:
            request = json.loads(line)
            answer = handle_request(**request["request"])
            if os.getpid() != child:
                # Foreign code has forked, and this is its child, which has nothing to answer.
                os._exit(0)
            with suppress(Exception):  # the program may have closed it
                sys.stdout.flush()
            connection.sendall(f"\n{request['mark']}{json.dumps(answer)}\n".encode())
    finally:
        os._exit(0)


def _take_stdin(text: str) -> None:
    """Make `text` the standard input: a file that cannot be written, for all ways of reading."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="replace"))  # a row may have half a surrogate pair
        file.seek(0)
        reading = os.open(f"/dev/fd/{file.fileno()}", os.O_RDONLY)
    os.dup2(reading, 0)
    os.close(reading)


def _run_code(names: dict[str, Any], *, code: str, is_plain: bool) -> dict[str, str]:
    """Run a piece of code; the `value` is that of its last line, if that is an expression."""
    value = None
    try:
        tree = ast.parse(code)
        match tree.body:
            case [*statements, ast.Expr(value=last)]:
                exec(compile(ast.Module(statements, []), "<program>", "exec"), names)
                value = eval(compile(ast.Expression(last), "<program>", "eval"), names)
            case _:
                exec(compile(tree, "<program>", "exec"), names)
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        if is_plain:
            value = _make_plain(value)
        return {"status": "done", "value": repr(value)}
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            return {"status": "exit"}
        frames = error.__traceback__ and error.__traceback__.tb_next  # the first is ours
        lines = traceback.format_exception(type(error), error, frames)
        return {"status": "error", "problem": "".join(lines)}


def _make_plain(value: Any) -> Any:
    """`value` as a type that has literals: a Counter becomes a dict, numpy's numbers Python's."""
    if isinstance(value, dict):
        return {_make_plain(key): _make_plain(item) for key, item in value.items()}
    if isinstance(value, Set):  # also a frozenset, and the keys and items of a dict
        value = set(value)
    for kind in PLAIN:
        if not isinstance(value, kind):
            continue
        if kind in (list, tuple, set):
            return kind(map(_make_plain, value))
        if kind is str:
            return str.__str__(value)  # an Enum of texts has a `__str__` of its own
        return kind(value)
    if hasattr(value, "item"):  # a number of numpy's
        return value.item()
    if isinstance(value, Number):  # a Decimal, or a Fraction
        number = float(value)  # type: ignore[arg-type]
        if number.is_integer() and int(value) == value:  # type: ignore[call-overload]
            return int(value)  # type: ignore[call-overload]
        return number
    if hasattr(value, "__float__"):
        return float(value)
    return value
