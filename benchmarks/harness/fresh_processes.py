"""Run fresh processes, time them, and summarize the samples. Standard library only."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import workload

Sample = dict[str, Any]
"""One process: seconds since exec of what it told (`first_seconds`, ...) and of its exit, what it said of
itself, `cpu_seconds` and `rss_bytes`."""

LIMIT_SECONDS = 1800
BENCHMARKS = Path(__file__).resolve().parents[1]
"""The directory of all benchmarks. Scripts of child processes are named relative to it."""


@dataclass(frozen=True)
class Row:
    """A process that is measured, with its name in tables.

    Attributes:
        name: name in tables.
        command: command line. If it begins with a script, this interpreter runs it.
        environment: environment variables of the process.
        dtype: dtype of its weights. Rows of one dtype are compared.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    dtype: str = "float32"


class FailedProcessError(SystemExit):
    """A process failed. This ends the benchmark unless a caller catches and reports it."""


@dataclass(frozen=True)
class Spread:
    """Median, least and greatest of some samples."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without variables that would change a row unnoticed.

    PYTHONPATH lets child scripts import `benchmarks` from this checkout, whatever interpreter runs them.
    With PYTHONDONTWRITEBYTECODE an editable install would be compiled from source at every start, unlike one
    that pip made.
    """
    unwanted = ("JAX_", "XLA_", "PREJIT_", "OMP_", "OPENBLAS_", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    paths = [str(BENCHMARKS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **more}


def command_line(row: Row, python: str = sys.executable) -> tuple[str, ...]:
    """Return the command of a row; if it begins with a script, with the interpreter that runs it."""
    script, *arguments = row.command
    if not script.endswith(".py"):
        return row.command
    return (python, str(BENCHMARKS / script), *arguments)


def run_once(
    row: Row, poll_memory: bool = False, until: str = "", at_stop: Callable[[], Sample] = dict
) -> Sample:
    """Run a fresh process and time it. The clock starts just before the process.

    Args:
        row: process to run.
        poll_memory: read its anonymous memory every 2 ms. This disturbs its times a little.
        until: event of workload.EVENTS after which the process is killed; empty: it runs to its end.
        at_stop: function that is called at this event, and whose figures go into the sample.

    Raises:
        FailedProcessError: the process failed.
    """
    command = command_line(row)
    sample: Sample = {}
    stopped = False
    with tempfile.TemporaryFile("w+") as errors:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment(row.environment),
        )
        assert process.stdout is not None
        watchdog = threading.Timer(LIMIT_SECONDS, process.kill)
        watchdog.daemon = True
        watchdog.start()
        if poll_memory:
            peak = _peak_anonymous_bytes(process.pid)
        output = []
        with process.stdout as lines:
            for line in lines:
                now = time.perf_counter() - started
                output.append(line)
                word, _, facts = line.partition(" ")
                if word.strip() in workload.EVENTS:
                    sample[f"{word.strip().lower()}_seconds"] = now
                    sample |= json.loads(facts or "{}")
                if until and word.strip() == until:
                    stopped = True
                    sample |= at_stop()
                    # Popen.kill would reap one that ended by itself.
                    os.kill(process.pid, signal.SIGKILL)
                    break
        if poll_memory:
            sample["peak_anonymous_bytes"] = peak()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        watchdog.cancel()
        sample["exit_seconds"] = time.perf_counter() - started
        sample["cpu_seconds"] = usage.ru_utime + usage.ru_stime
        sample["rss_bytes"] = usage.ru_maxrss << 10
        sample["output"] = "" if "last_seconds" in sample else "".join(output)
        if process.returncode and not stopped:
            errors.seek(0)
            said = errors.read()[-4000:].rstrip()
            print(said, file=sys.stderr)
            reason = said.rpartition("\n")[2] or " ".join(command)
            raise FailedProcessError(f"{row.name}: exit status {process.returncode}: {reason}")
    return sample


def _peak_anonymous_bytes(pid: int) -> Any:
    """Watch a process in a thread; return a function that waits for its end and returns the peak."""
    peak = 0

    def watch() -> None:
        nonlocal peak
        while True:
            try:
                with open(f"/proc/{pid}/status", encoding="ascii") as file:
                    line = next((line for line in file if line.startswith("RssAnon:")), None)
            except (OSError, ValueError):
                return
            if line is None:  # it has exited
                return
            peak = max(peak, int(line.split()[1]) << 10)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()

    def result() -> int:
        thread.join()
        return peak

    return result


def interleave(
    rows: Sequence[Row],
    runs: int,
    probe: Row | None = None,
    failures: dict[str, str] | None = None,
    run: Callable[[Row], Sample] = run_once,
) -> dict[str, list[Sample]]:
    """Run every row in turn, round after round, so that all see the same machine.

    The first round is thrown away: it fills the page cache and JAX's persistent cache. Each round begins with
    another row.

    Args:
        rows: processes that take turns.
        runs: number of rounds that count.
        probe: process that runs before each other one and adds `probe_bytes_per_second` to its sample.
        failures: receives the reason by name for each row that fails. Such a row is left out from then on.
        run: function that runs a row once.

    Returns:
        The samples by row, equally many of each, without the rows that failed.

    Raises:
        FailedProcessError: a row failed and there is no `failures`.
    """
    samples: dict[str, list[Sample]] = {row.name: [] for row in rows}
    took: dict[str, float] = {}
    turns = [
        (number, row)
        for number in range(runs + 1)
        for row in (*rows[number % len(rows) :], *rows[: number % len(rows)])
    ]
    for place, (number, row) in enumerate(turns, 1):
        if row.name not in samples:
            continue
        started = time.perf_counter()
        try:
            probed = run_once(probe)["bytes_per_second"] if probe and number else None
            sample = run(row)
        except FailedProcessError as error:
            if failures is None:
                raise
            failures[row.name] = str(error).removeprefix(f"{row.name}: ")
            del samples[row.name]
            progress(f"left out: {error}")
            continue
        took[row.name] = time.perf_counter() - started
        if number:
            samples[row.name].append(sample)
        if probed:
            sample["probe_bytes_per_second"] = probed
        what = f"round {number}/{runs}" if number else "warm-up  "
        left = left_seconds(took, [row.name for _, row in turns[place:] if row.name in samples])
        progress(f"{what}  {row.name}: {sample['exit_seconds']:.1f} s, {clock(left)} left here")
    return samples


def left_seconds(took: Mapping[str, float], names: Sequence[str]) -> float:
    """Return an estimate of how long some processes will take.

    Args:
        took: seconds that the last process of each row took; at least one row has run.
        names: row of each remaining process. A row that has not run yet counts as the mean of the others.
    """
    mean = statistics.mean(took.values())
    return sum(took.get(name, mean) for name in names)


def clock(seconds: float) -> str:
    """Return seconds as minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def spread(samples: Sequence[Sample], key: str) -> Spread:
    """Return the spread of one figure of some samples."""
    return Spread.of([sample[key] for sample in samples])


def progress(text: str) -> None:
    """Print one line of progress with the time."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    """Return what identifies this machine, and its load."""
    cpu: dict[str, str] = {}
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            cpu.setdefault(name.strip(), value.strip())
    with open("/proc/meminfo", encoding="ascii") as file:
        memory = int(file.readline().split()[1]) << 10
    flags = cpu.get("flags", "").split()
    return {
        "cpu": cpu.get("model name", os.uname().machine),
        "family_model": f"{cpu.get('cpu family', '?')}/{cpu.get('model', '?')}",
        "cores": len(os.sched_getaffinity(0)),
        "avx512": "avx512f" in flags,
        "memory_bytes": memory,
        "kernel": os.uname().release,
        "load_average": os.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, of jax and NumPy, and the revision of this checkout."""
    from importlib.metadata import version

    found = {name: version(name) for name in ("jax", "jaxlib", "numpy", "prejit")}
    git = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty", "--abbrev=12"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {"python": sys.version.split()[0], **found, "revision": revision or "none"}
