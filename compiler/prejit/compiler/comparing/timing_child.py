"""A process that loads a bundle and measures its programs, a round for each line of stdin.

    python -m prejit.compiler.comparing.timing_child BUNDLE

Each line of stdout is JSON: first true, when all programs have run once, or {"error": text}; then for each
round {name: [seconds, ...]}. It runs in environments that have the server's dependencies only.
"""

from __future__ import annotations

import sys
import time

from prejit.compiler.bench.probes import probes_of
from prejit.runtime.base.child_process import take_stdout, write_answer
from prejit.runtime.errors import PrejitError
from prejit.runtime.loader import load

_GROUPS = ("prefill", "decode", "verify", "growth", "encode", "call")
"""The rows of `prejit bench` that are one run of a program, or of an encoder's three."""
_PROBE_SECONDS = 0.02
"""How long each program is measured in a round; once in any case."""


def main(path: str) -> None:
    """Measure the programs of a bundle until stdin ends."""
    answers = take_stdout()
    try:
        bundle = load(path, on_mismatch="error")
        probes = [
            probe
            for probe in probes_of(bundle)
            if probe.heads[0].group in _GROUPS and probe.heads[0].unit == "s"
        ]
        for probe in probes:
            probe.run()
    except PrejitError as error:
        write_answer(answers, {"error": str(error)})
        return
    write_answer(answers, True)
    for _ in sys.stdin:
        found: dict[str, list[float]] = {}
        for probe in probes:
            end = time.perf_counter() + _PROBE_SECONDS
            samples = found.setdefault(probe.heads[0].name, [])
            while not samples or time.perf_counter() < end:
                samples += probe.run()[0]
        write_answer(answers, found)


if __name__ == "__main__":
    main(sys.argv[1])
