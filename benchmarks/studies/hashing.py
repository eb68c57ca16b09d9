"""Measure what bounds a verified start: hashes of chunks, ways of reading, and both together.

    python -m venv V; V/bin/pip install numpy blake3 xxhash
    PYTHONPATH=. V/bin/python -m benchmarks.studies.hashing [--rounds 5] [--directory DIR...] [--name NAME]

Writes benchmarks/results/NAME.json and .md. Each DIR gets a file of random bytes; it must be on a real disk.
Several compare devices, for example one whose read-ahead is the kernel's default of 128 KB. The
best round counts, so that a busy machine disturbs little; the file holds every round. XXH3 is no
cryptographic hash: it stands for the speed of reading memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import xxhash

from benchmarks.harness.measure import machine, progress
from benchmarks.harness.report import Table
from benchmarks.harness.results import save
from benchmarks.harness.workspace import RESULTS, bench_directory
from benchmarks.studies import reading
from benchmarks.studies.reading import Bytes, Use

FILE_BYTES, HASHED_BYTES, TRIES = 256 << 20, 64 << 20, 25
CHUNKS = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
BLOCKS = (128 << 10, 1 << 20, 8 << 20, 32 << 20)
THREADS = (1, 2, 4)
PACKAGES = {
    "hashlib": (),
    "blake3": ("blake3",),
    "xxhash": ("xxhash",),
    "zstandard": ("zstandard",),
}
"""Modules whose import is timed, with the distributions whose files they bring."""

Figures = dict[str, dict[str, list[float]]]
"""Rates in GB/s, one for each round, by row and column."""


def blake3_of(threads: int) -> Use:
    """Return the BLAKE3 digest of a block with at most this many threads of its own."""
    return lambda block: blake3.blake3(block.data, max_threads=threads).digest()


HASHES: dict[str, Use] = {
    "SHA-256 (hashlib)": lambda block: hashlib.sha256(block.data).digest(),
    "BLAKE3": blake3_of(1),
    "BLAKE3, max_threads=AUTO": blake3_of(blake3.blake3.AUTO),
    "XXH3 128 (no security)": lambda block: xxhash.xxh3_128_digest(block.data),
}
VERIFIED = ("SHA-256 (hashlib)", "BLAKE3")
READ_AND_VERIFY = (
    "mapped, page faults",
    "mapped, MADV_POPULATE_READ",
    "mapped, readahead(2) of the next block",
    "preadv into new memory",
    "preadv into new memory of 2 MB pages",
    "preadv into new memory, O_DIRECT",
    "preadv into one buffer",
)


def size_name(size: int) -> str:
    """Return a size as `64 KB` or `4 MB`."""
    return f"{size >> 10} KB" if size < 1 << 20 else f"{size >> 20} MB"


def hash_rate(data: Bytes, chunk: int, threads: int, use: Use) -> float:
    """Return the rate in GB/s of hashing memory in chunks, with threads that claim them in order."""
    numbers = count()

    def work() -> None:
        while (start := next(numbers) * chunk) < data.nbytes:
            use(data[start : start + chunk])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    began = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return data.nbytes / (time.perf_counter() - began) / 1e9


def longest_pause(use: Use, data: Bytes) -> tuple[float, float]:
    """Return the seconds that one hash took, and the longest pause of this thread's Python code meanwhile."""
    worker = threading.Thread(target=use, args=(data,))
    began = last = time.perf_counter()
    worker.start()
    longest = 0.0
    while worker.is_alive():
        time.sleep(0.0002)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return last - began, longest


def hashing(figures: Figures, path: Path) -> None:
    """Add one round of hashing memory: mapped pages of the page cache, and a buffer that was read into."""
    with open(path, "rb") as file:
        mapped = np.frombuffer(
            mmap.mmap(file.fileno(), HASHED_BYTES, prot=mmap.PROT_READ), np.uint8
        )
    reading.touch(mapped)
    for chunk in CHUNKS:
        for name, use in HASHES.items():
            for threads in (1,) if "AUTO" in name else (1, 2):
                row = f"{name}, {threads} thread{'s' * (threads > 1)}"
                rate = max(hash_rate(mapped, chunk, threads, use) for _ in range(TRIES))
                figures.setdefault(row, {}).setdefault(size_name(chunk), []).append(rate)


def reads(figures: Figures, path: Path, cold: bool) -> None:
    """Add one round of reading a file in each way."""
    for way in reading.WAYS:
        for threads in THREADS:
            for block in BLOCKS:
                took = reading.read(path, way, block, threads, cold)
                row = f"{way}, {threads} thread{'s' * (threads > 1)}"
                cells = figures.setdefault(row, {})
                cells.setdefault(size_name(block), []).append(FILE_BYTES / took.seconds / 1e9)
                if block == 8 << 20:
                    cells.setdefault("CPU s/GB at 8 MB", []).append(
                        1e9 * took.cpu_seconds / FILE_BYTES
                    )


def both(figures: Figures, path: Path, cold: bool) -> None:
    """Add one round of reading a file and hashing each block."""
    for way in READ_AND_VERIFY:
        for name in VERIFIED:
            for threads in THREADS:
                for block in (1 << 20, 4 << 20):
                    took = reading.read(path, way, block, threads, cold, HASHES[name])
                    row = f"{way}; {name}"
                    column = f"{threads} x {size_name(block)}"
                    rates = figures.setdefault(row, {}).setdefault(column, [])
                    rates.append(FILE_BYTES / took.seconds / 1e9)


def import_seconds(module: str) -> float:
    """Return how long a fresh interpreter takes to import a module."""
    code = f"import time; t = time.perf_counter(); import {module}; print(time.perf_counter() - t)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return float(said.stdout)


def installed_bytes(distribution: str) -> int:
    """Return the size of a distribution's files."""
    files = importlib.metadata.distribution(distribution).files or ()
    return sum(
        Path(file.locate()).stat().st_size for file in files if Path(file.locate()).is_file()
    )


def best(column: str, rates: list[float]) -> float:
    """Return the greatest rate, or the least CPU time."""
    return min(rates) if column.startswith("CPU") else max(rates)


def table(title: str, figures: Figures, note: str = "") -> Table:
    """Return a table of the best round of each figure."""
    columns = list(dict.fromkeys(column for cells in figures.values() for column in cells))
    rows = [
        (row, *(f"{best(c, cells[c]):.2f}" if c in cells else "" for c in columns))
        for row, cells in figures.items()
    ]
    return Table(title, ("GB/s", *columns), rows, note)


def imports(rounds: int) -> tuple[dict[str, Any], Table]:
    """Return the time that the import of each package takes, and its size."""
    found: dict[str, Any] = {}
    for module, distributions in PACKAGES.items():
        try:
            seconds = [import_seconds(module) for _ in range(3 * rounds)]
        except subprocess.CalledProcessError:
            continue
        size = sum(map(installed_bytes, distributions))
        found[module] = {"seconds": seconds, "bytes": size}
    rows = [
        (
            name,
            f"{1e3 * min(f['seconds']):.2f}",
            f"{sorted(f['seconds'])[len(f['seconds']) // 2] * 1e3:.2f}",
            f"{f['bytes'] / 1e3:.0f}" if f["bytes"] else "with Python",
        )
        for name, f in found.items()
    ]
    return found, Table("Import", ("", "least, ms", "median, ms", "installed, kB"), rows)


def pauses(path: Path) -> tuple[dict[str, Any], Table]:
    """Return whether each hash releases the GIL."""
    with open(path, "rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 64 << 20, prot=mmap.PROT_READ), np.uint8)
    reading.touch(data)
    found = {
        name: min((longest_pause(use, data) for _ in range(5)), key=lambda p: p[1])
        for name, use in HASHES.items()
    }
    rows = [
        (name, f"{1e3 * took:.1f}", f"{1e3 * pause:.1f}") for name, (took, pause) in found.items()
    ]
    note = "One call on 64 MB in a thread. A hash that holds the GIL stops the other thread all the time."
    return found, Table("The GIL", ("", "the call, ms", "other thread stood still, ms"), rows, note)


def data_file(directory: Path) -> Path:
    """Return a file of random bytes; write it if it is missing."""
    path = directory / "hashing.bin"
    if not path.is_file() or path.stat().st_size != FILE_BYTES:
        directory.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            for _ in range(FILE_BYTES >> 25):
                file.write(os.urandom(1 << 25))
            os.fsync(file.fileno())
    return path


def read_ahead(path: Path) -> int:
    """Return how many KB the device of a file reads ahead."""
    device = path.stat().st_dev
    setting = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return int(setting.read_text())


def states() -> Iterator[tuple[str, bool]]:
    """Yield the names of the page cache's states, and whether the file is evicted before each reading."""
    yield "page cache warm", False
    yield "disk cold", True


def main() -> None:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    default = bench_directory() / "hashing"
    parser.add_argument("--directory", type=Path, nargs="+", default=[default])
    parser.add_argument("--name", default=f"{time.strftime('%Y-%m-%d')}-hashing")
    given = parser.parse_args()
    paths = [data_file(directory) for directory in given.directory]
    facts: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "rounds": given.rounds,
        "machine": machine(),
        "versions": {
            "python": sys.version.split()[0],
            **{name: importlib.metadata.version(name) for name in ("blake3", "xxhash", "numpy")},
        },
    }
    figures: dict[str, Figures] = {}
    steps: dict[str, Callable[[Figures], None]] = {
        "Hashing bytes in the page cache, mapped": partial(hashing, path=paths[0])
    }
    for path in paths:
        for state, cold in states():
            what = f"{state}, read-ahead {read_ahead(path)} KB"
            steps[f"Reading, {what}"] = partial(reads, path=path, cold=cold)
            steps[f"Reading and hashing each block, {what}"] = partial(both, path=path, cold=cold)
    for number in range(1, given.rounds + 1):
        for title, step in steps.items():
            progress(f"round {number} of {given.rounds}: {title}")
            step(figures.setdefault(title, {}))
    facts["figures"] = figures
    facts["imports"], imported = imports(given.rounds)
    facts["longest_pauses"], paused = pauses(paths[0])
    facts["load_average_after"] = os.getloadavg()[0]
    tables = [*(table(title, found) for title, found in figures.items()), paused, imported]
    on = facts["machine"]
    head = (
        f"# Hashing and reading\n\n{facts['date']}, {on['cpu']} ({on['family_model']}), {on['cores']} cores, "
        f"kernel {on['kernel']}, Python {facts['versions']['python']}, blake3 {facts['versions']['blake3']}. "
        f"Best of {given.rounds} rounds on a machine with a load of {on['load_average']:.1f} before and "
        f"{facts['load_average_after']:.1f} after; a file of {FILE_BYTES >> 20} MB. `disk cold`: its pages "
        "were evicted before each reading (posix_fadvise DONTNEED); the host of a virtual machine may still "
        "hold them. `python -m benchmarks.studies.hashing` repeats it.\n\n"
    )
    save(RESULTS, given.name, facts, head + "\n".join(each.markdown() for each in tables))


if __name__ == "__main__":
    main()
