"""Run programs in a process of their own, which they may end, and which a time limit ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

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
    output, ended = b"", _TOO_LONG
    try:
        done = subprocess.run(
            (sys.executable, "-m", module),
            input=content,
            capture_output=True,
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
        output = done.stdout
        if done.returncode != -signal.SIGPROF:  # a limit that it gave itself
            last = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
            ended = f"its process ended with {done.returncode}: {last:.300}"
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    except OSError as error:
        ended = f"its process cannot be started: {error.strerror}"
    # It may have ended within its last line.
    lines = (line for line in output.splitlines(keepends=True) if line.endswith(b"\n"))
    return [json.loads(line) for line in lines], ended


_TOO_LONG = "its process took too long"
