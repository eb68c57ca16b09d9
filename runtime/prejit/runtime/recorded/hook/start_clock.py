"""Count how long a process has run, and how much of that it imported, traced and lowered."""

from __future__ import annotations

import builtins
import os
import time
from typing import Any


class StartClock:
    """Counts the seconds of this process since the kernel started it."""

    def __init__(self) -> None:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
        self._started = ticks / os.sysconf("SC_CLK_TCK")
        self._tracing = 0.0
        self._spans: list[tuple[float, float]] = []

    def traced(self, seconds: float) -> None:
        """jax has traced or lowered something for so long, until now."""
        began = time.perf_counter() - seconds
        while self._spans and self._spans[-1][0] >= began:  # it was inside this one
            self._tracing -= self._spans.pop()[1]
        self._spans.append((began, seconds))
        self._tracing += seconds

    def read(self) -> dict[str, float]:
        """Return the seconds up to now, and those of them for imports, for tracing and lowering."""
        imports: Any = builtins.__import__  # of sitecustomize, unless the program has set its own
        began = getattr(imports, "began", None)
        return {
            "seconds": time.clock_gettime(time.CLOCK_BOOTTIME) - self._started,
            "imports": getattr(imports, "seconds", 0.0)
            + (0.0 if began is None else time.perf_counter() - began),
            "tracing": self._tracing,
        }
