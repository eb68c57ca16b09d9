"""Run programs in a process of their own, which they may end, and which a time limit ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from prejit.runtime.base.child_process import last_line, run_child
from prejit.runtime.base.process_facts import THREADS


def ask(
    module: str, content: bytes, timeout_seconds: float, *, threads: int = 1
) -> tuple[list[dict[str, Any]], str]:
    """Run a module with a request on its stdin, and return its answers, and how it ended.

    One thread gives sums one order on every build host. Nothing that it compiles is kept.

    Args:
        module: full name of the module. Each line of its stdout is an answer, as JSON.
        content: the request.
        timeout_seconds: time limit; the answers until then are returned.
        threads: number of threads that compute.
    """
    environment = {
        **os.environ,
        "NPROC": f"{threads}",
        "PJRT_NPROC": f"{threads}",
        THREADS: "1",
        "PREJIT_COMPILE_CACHE_BYTES": "0",
    }
    try:
        code, output, errors = run_child(
            (sys.executable, "-m", module),
            content,
            seconds=timeout_seconds,
            env=environment,
        )
    except OSError as error:
        return [], f"its process cannot be started: {error.strerror}"
    ended = "its process took too long"
    if code is not None and code != -signal.SIGPROF:  # a limit that it gave itself
        ended = f"its process ended with {code}: {last_line(errors):.300}"
    # It may have ended within its last line.
    lines = (line for line in output.splitlines(keepends=True) if line.endswith(b"\n"))
    return [json.loads(line) for line in lines], ended
