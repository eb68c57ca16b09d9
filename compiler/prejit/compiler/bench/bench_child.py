"""A fresh process of `prejit bench`: load a bundle, use it once, print times and memory as JSON.

    python -m prejit.compiler.bench.bench_child '{"path": BUNDLE, ...}'

It imports only what a server imports, so the time from exec is that of a server.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

from prejit.runtime import Fingerprint, load
from prejit.runtime.base.process_facts import seconds_since_exec
from prejit.runtime.base.process_memory import peak_memory_bytes
from prejit.runtime.errors import PrejitError


def use_once(
    path: str,
    on_mismatch: Literal["jit", "error"],
    fingerprint: str | None,
    program: str | None,
    prompt: list[int],
    new_tokens: int,
) -> dict[str, Any]:
    """Load a bundle and use it once.

    Returns:
        `first_seconds` since exec, `load_seconds`, `peak_bytes`, `private_bytes`, `device_bytes` (None on
        a CPU).
    """
    bundle = load(
        path,
        on_mismatch=on_mismatch,
        fingerprint=Fingerprint.read(fingerprint) if fingerprint else None,
    )
    first = 0.0
    if program is not None:
        named = next(one for one in bundle.config.programs if one.name == program)
        bundle.runner_with_zeros(named)()
        first = seconds_since_exec()
    elif bundle.config.encoder is not None and bundle.config.encoder.scores is not None:
        bundle.score("a", "a")
        first = seconds_since_exec()
    elif bundle.config.encoder is not None:
        # CLIP needs its end.
        bundle.encode([[*prompt[:-1], bundle.config.encoder.vocab_size - 1]])
        first = seconds_since_exec()
    else:
        # The publisher's defaults may turn sampling on. These options make all models do the same work.
        for _ in bundle.stream(
            prompt,
            max_new_tokens=new_tokens,
            stop_token_ids=(),
            temperature=0,
            repetition_penalty=1,
        ):
            first = first or seconds_since_exec()
    return {
        "first_seconds": first,
        "load_seconds": bundle.load_seconds,
        "peak_bytes": peak_memory_bytes(),
        "private_bytes": _private_memory_bytes(),
        "device_bytes": bundle.device_memory_bytes(),
    }


def _private_memory_bytes() -> int:
    """Return the resident memory that no other process shares."""
    with open("/proc/self/smaps_rollup", encoding="ascii", errors="replace") as file:
        return sum(int(line.split()[1]) << 10 for line in file if line.startswith("Private_"))


if __name__ == "__main__":
    try:
        print(json.dumps(use_once(**json.loads(sys.argv[1]))))
    except PrejitError as error:
        print(error.describe(), file=sys.stderr)
        sys.exit(error.exit_code)
