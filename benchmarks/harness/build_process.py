"""A build in a process of its own, as a machine of its own does it, that can be killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_COMPILED = re.compile(r"^compiled (.+?)(?: on \S+)? in ([\d.]+) s", re.MULTILINE)
_TRAFFIC = re.compile(r"(\d+) results read \(([\d.]+) MB\), (\d+) written \(([\d.]+) MB\)")
_ABOUT_STORES = re.compile("this build goes on|not used|does not answer|^error|hint:")


@dataclass(frozen=True)
class Built:
    """How a process of a build went.

    Attributes:
        seconds: by the clock.
        status: its exit status; negative: it was killed.
        compiled: the programs that it compiled, each with its target, in order.
        compile_seconds: sum of their times.
        peak_mb: peak resident memory of the driver, without its workers.
        bundles: their digests, by name; empty: the process failed.
        packed: names of those that it wrote.
        traffic: results that it read from a store, their MB, results that it wrote, their MB.
        said: what it said about a store, and its error.
    """

    seconds: float
    status: int
    compiled: tuple[str, ...]
    compile_seconds: float
    peak_mb: float
    bundles: dict[str, str]
    packed: tuple[str, ...]
    traffic: tuple[float, ...]
    said: tuple[str, ...]

    @property
    def killed(self) -> bool:
        """True if the process was killed."""
        return self.status == -signal.SIGKILL


class BuildProcess:
    """A running `prejit build`, whose caches are those of a machine that is a directory."""

    def __init__(
        self,
        manifests: Sequence[Path],
        machine: Path,
        *options: str | Path,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            manifests: what to build.
            machine: directory of its caches and bundles, which may be there from a build before.
            *options: more options of the command.
            env: environment variables besides those of this process.
        """
        command = [sys.executable, "-m", "prejit.runtime", "build", *map(str, manifests), "--json"]
        command += ["--cache", str(machine / "cache"), "-o", str(machine / "out")]
        machine.mkdir(parents=True, exist_ok=True)
        self._output, self.log = machine / "output", machine / "errors"
        self._started = time.perf_counter()
        with self._output.open("w") as output, self.log.open("w") as errors:
            self._process = subprocess.Popen(
                [*command, *map(str, options)],
                stdout=output,
                stderr=errors,
                start_new_session=True,
                env={**os.environ, **(env or {})},
            )
        self._peak_mb = 0.0
        self._watch = threading.Thread(target=self._poll)
        self._watch.start()

    def compiled(self) -> int:
        """Return how many programs it has compiled until now."""
        return len(_COMPILED.findall(self.log.read_text()))

    def ended(self) -> bool:
        """Return whether it has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kill it with its workers, unless it has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def finish(self) -> Built:
        """Wait for its end."""
        status = self._process.wait()
        seconds = time.perf_counter() - self._started
        self._watch.join()
        errors = self.log.read_text()
        bundles = [] if status else json.loads(self._output.read_text())
        compiled = _COMPILED.findall(errors)
        traffic = _TRAFFIC.search(errors)
        return Built(
            seconds,
            status,
            tuple(name for name, _ in compiled),
            sum(float(each) for _, each in compiled),
            self._peak_mb,
            {Path(each["path"]).name: each["digest"] for each in bundles},
            tuple(Path(each["path"]).name for each in bundles if each["packed_here"]),
            tuple(map(float, traffic.groups())) if traffic else (0.0,) * 4,
            tuple(line for line in errors.splitlines() if _ABOUT_STORES.search(line)),
        )

    def _poll(self) -> None:
        """Keep the high-water mark of the process until it ends."""
        status = Path(f"/proc/{self._process.pid}/status")
        while self._process.poll() is None:
            with suppress(OSError):
                found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
                self._peak_mb = int(found[1]) / 1000 if found else self._peak_mb
            time.sleep(0.1)
