"""A process that compiles the grammars of strangers first: it may hang, fill its memory or crash.

llguidance can do each of these in a call that nothing interrupts: a `multipleOf` of eight digits takes
minutes, references in a row overflow the stack. What compiles here compiles in the server, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, TypeVar, final

from prejit.runtime.base.child_process import Child, take_stdout, write_answer
from prejit.runtime.errors import UsageError
from prejit.server.grammar.grammar_compiling import compiled, tokenizer_of
from prejit.server.grammar.grammar_sources import GrammarSource, SchemaPart

_T = TypeVar("_T")

MAX_SECONDS = 2.0
"""Maximum CPU time of a compilation. A schema of 4,000 properties takes 1.3 seconds."""
MAX_BYTES = 1 << 30
"""Maximum memory that a compilation may add to its process."""
_WAIT_SECONDS = 60.0
"""Maximum time of a compilation on a machine that has no CPU for it."""
NICE = 10
"""Who compiles gets a tenth of a thread's share of a busy CPU, so that tokens do not wait for a grammar."""
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
            if process is None or not process.child.alive:
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
        # The next grammar does not meet one that is dying.
        process, self._process = self._process, None
        if process is not None:
            process.child.kill()


class _Process:
    """The process and the connection to it."""

    def __init__(self, table: Sequence[bytes | None]) -> None:
        command = [sys.executable, "-P", "-m", __name__]
        self.child = Child(command, errors="dropped", own_session=False)  # for `nice`
        weakref.finalize(self, self.child.release)
        self.child.send([None if each is None else each.decode("latin-1") for each in table])

    def ask(self, source: GrammarSource) -> dict[str, Any] | None:
        """Return the answer; None: the process ended or took too long."""
        parts = [source.text, source.expected, source.schemas, source.is_gbnf]
        answer: dict[str, Any] | None = self.child.ask(parts, _WAIT_SECONDS)
        return answer

    def end(self) -> str:
        """End the process and return what it did, for an error."""
        status = self.child.exit_code()
        self.child.release()
        if status == _BROKEN:
            raise RuntimeError("the process that compiles grammars does not work")
        if status == -signal.SIGPROF or self.child.late:
            return f"takes more than {MAX_SECONDS:g} seconds to compile"
        return "needs too much memory or is nested too deeply"


# ---------------------------------------------------------------------- in the process


def main() -> None:
    """Answer with sizes and errors until the server is gone."""
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICE)
    answers = take_stdout()
    stack, _ = resource.getrlimit(resource.RLIMIT_STACK)
    # Half of what the threads of the server have: what fits here fits there.
    threading.stack_size((_THREAD_STACK_BYTES if stack == resource.RLIM_INFINITY else stack) // 2)
    thread = threading.Thread(target=_serve, args=(answers,))
    thread.start()
    thread.join()


def _received(read: Callable[[Any], _T]) -> _T:
    if not (line := sys.stdin.buffer.readline()):  # the server is gone
        os._exit(0)
    try:
        return read(json.loads(line))
    except Exception:  # the files of prejit changed since the server began
        os._exit(_BROKEN)


def _table(tokens: list[str | None]) -> list[bytes | None]:
    return [None if each is None else each.encode("latin-1") for each in tokens]


def _source(parts: list[Any]) -> GrammarSource:
    text, expected, schemas, is_gbnf = parts
    return GrammarSource(text, expected, tuple(SchemaPart(*each) for each in schemas), is_gbnf)


def _serve(answers: BinaryIO) -> None:
    tokenizer = tokenizer_of(_received(_table))
    _set_limits()
    with contextlib.suppress(OSError):
        while True:
            source = _received(_source)
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
            write_answer(answers, answer)


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
