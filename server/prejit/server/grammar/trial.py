"""A process that compiles the grammars of strangers first: it may hang, fill its memory or crash.

llguidance can do each of these in a call that nothing interrupts: a `multipleOf` of eight digits takes
minutes, references in a row overflow the stack. What compiles here compiles in the server, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any, final

from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammar_compiling import compiled, tokenizer_of
from prejit.server.grammar.grammar_sources import GrammarSource

MAX_SECONDS = 2.0
"""Maximum CPU time of a compilation. A schema of 4,000 properties takes 1.3 seconds."""
MAX_BYTES = 1 << 30
"""Maximum memory that a compilation may add to its process."""
_WAIT_SECONDS = 60.0
"""Maximum time of a compilation on a machine that has no CPU for it."""
_NICE = 5
"""The process gets a third of a thread's share of a busy CPU, so that tokens do not wait for a grammar."""
_BROKEN = 70
"""Exit status of a process that cannot read what it is sent (EX_SOFTWARE of sysexits(3))."""
_THREAD_STACK_BYTES = 2 << 20
"""The stack of a thread where the limit of stacks is none (pthread_create(3))."""


@final
class Trial:
    """The process, which begins with the first grammar and begins again after one that ended it.

    Attributes:
        table: the bytes of each token; None: it is no text.
    """

    def __init__(self, table: Sequence[bytes | None]) -> None:
        """Keep the vocabulary."""
        self.table = table
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def compile(self, source: GrammarSource) -> int:
        """Compile a grammar and return its memory in bytes. One at a time; the others wait.

        Raises:
            UsageError: it does not compile, takes too long or too much memory, or `stop` was called.
        """
        with self._lock:
            process = self._process
            if process is None or process.child.poll() is not None:
                self._process = process = _Process(self.table)
            answer = process.ask(source)
            if answer is None:
                self._process = None
                raise UsageError(
                    f"{source.expected}, found one that {process.end()}",
                    hint="send a smaller or simpler one",
                )
        if "error" in answer:
            raise UsageError(answer["error"], hint=answer["hint"])
        return int(answer["bytes"])

    def stop(self) -> None:
        """End the process. What it compiles now raises UsageError in its thread."""
        process, self._process = (
            self._process,
            None,
        )  # the next grammar does not meet one that is dying
        if process is not None:
            process.child.kill()


class _Process:
    """The process and the connection to it."""

    def __init__(self, table: Sequence[bytes | None]) -> None:
        ours, theirs = socketpair()
        with theirs:
            self.child = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is for the server. In a session, `nice` does nothing (sched(7))
            )
        self._connection = Connection(ours.detach())
        weakref.finalize(self, _end, self.child, self._connection)
        with contextlib.suppress(OSError):  # `ask` finds that it has ended
            self._connection.send_bytes(pickle.dumps(table))

    def ask(self, source: GrammarSource) -> dict[str, Any] | None:
        """Return the answer; None: the process ended or took too long."""
        try:
            self._connection.send_bytes(pickle.dumps(source))
            if self._connection.poll(_WAIT_SECONDS):
                answer: dict[str, Any] = json.loads(self._connection.recv_bytes())
                return answer
        except (OSError, EOFError):
            pass
        return None

    def end(self) -> str:
        """End the process and return what it did, for an error.

        Raises:
            RuntimeError: it could not begin: prejit is broken, not the grammar.
        """
        try:
            status = self.child.wait(1)  # after the end of its connection, which comes first
        except subprocess.TimeoutExpired:
            status = -signal.SIGPROF
        _end(self.child, self._connection)
        if status == _BROKEN:
            raise RuntimeError("the process that compiles grammars does not work")
        if status == -signal.SIGPROF:
            return f"takes more than {MAX_SECONDS:g} seconds to compile"
        return "needs too much memory or is nested too deeply"


def _end(child: subprocess.Popen[bytes], connection: Connection) -> None:
    connection.close()
    child.kill()
    child.wait()


# ---------------------------------------------------------------------- in the process


def main() -> None:
    """Answer with sizes and errors until the server is gone."""
    os.nice(_NICE)
    connection = Connection(int(sys.argv[1]))
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of what the threads of the server have: what fits here fits there.
    threading.stack_size((_THREAD_STACK_BYTES if stack == resource.RLIM_INFINITY else stack) // 2)
    thread = threading.Thread(target=_serve, args=(connection,))
    thread.start()
    thread.join()


def _received(connection: Connection) -> Any:
    try:
        return pickle.loads(connection.recv_bytes())  # noqa: S301 (the server sends it)
    except (EOFError, OSError):  # the server is gone
        os._exit(0)
    except Exception:  # the files of prejit changed since the server began
        os._exit(_BROKEN)


def _serve(connection: Connection) -> None:
    tokenizer = tokenizer_of(_received(connection))
    _set_limits()
    with contextlib.suppress(OSError):
        while True:
            source: GrammarSource = _received(connection)
            signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)  # SIGPROF ends the process
            answer: dict[str, Any]
            try:
                before = _heap_bytes()
                kept = compiled(tokenizer, source)
                size = _heap_bytes() - before
                answer = {"bytes": size if size > 0 else kept.size_bytes}
                del kept
            except UsageError as error:
                answer = {"error": str(error), "hint": error.hint}
            signal.setitimer(signal.ITIMER_PROF, 0)
            connection.send_bytes(json.dumps(answer).encode())


def _set_limits() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = used + MAX_BYTES
    resource.setrlimit(
        resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
    )
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class _Heap(ctypes.Structure):
    """`struct mallinfo2` of glibc (mallinfo(3))."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks")),
        ("keepcost", ctypes.c_size_t),
    )


def _heap_bytes() -> int:
    """Return the memory that this process has allocated; 0 where the C library does not say."""
    try:
        call = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    call.restype = _Heap
    found = call()
    return int(found.uordblks + found.hblkhd)


if __name__ == "__main__":
    main()
