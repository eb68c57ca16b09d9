"""Record which pages of jaxlib's library a start touches, for `prejit.runtime.device.quick_start`.

    python -m scripts.record_library_pages BUNDLE ...

Run it with the Python and the jaxlib that the record is for. Each bundle must match this machine and have a
decoder. It starts in a process of its own; the record has the pages of all of them. If the kernel has the
pages around a page fault in memory, it maps them too, some 64 KiB in all. So the record is a little too
large, and its pages lie in fewer runs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from prejit.runtime.device import quick_start
from prejit.runtime.device.quick_start import jaxlib_library

LISTED = Path(quick_start.__file__).with_name("library_pages.txt")
_PRESENT = 1 << 63
"""Bit of an entry of /proc/self/pagemap: the page is in memory (Documentation/admin-guide/mm/pagemap.rst)."""
_ENTRY_BYTES = 8


def main() -> None:
    """Start the bundles and write the line of this jaxlib."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("bundles", nargs="+", type=Path, metavar="BUNDLE")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(*touched_by_start(given.bundles[0]))
        return
    library = jaxlib_library()
    if library is None:
        raise SystemExit("error: jaxlib is not installed")
    Path(library).read_bytes()  # the kernel maps around a page fault only what it has
    pages: set[int] = set()
    for bundle in given.bundles:
        command = (sys.executable, "-m", "scripts.record_library_pages", "--child", str(bundle))
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        pages |= set(map(int, done.stdout.split()))
    name = f"jaxlib {version('jaxlib')}, Python {sys.version_info.major}.{sys.version_info.minor}"
    text = line(Path(library).stat().st_size, pages, name)
    others = LISTED.read_text(encoding="ascii").splitlines() if LISTED.exists() else []
    kept = [each for each in others if each.split()[0] != text.split()[0]]
    LISTED.write_text("".join(f"{each}\n" for each in sorted([*kept, text])), encoding="ascii")
    print(f"{name}: {len(pages) * quick_start.PAGE_BYTES / 1e6:.0f} MB")


def line(size: int, pages: Iterable[int], name: str) -> str:
    """Return the line of a library: its size, the runs of pages that are touched, and its name."""
    return " ".join([str(size), *(f"{first}+{count}" for first, count in runs(pages)), "#", name])


def runs(pages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first page and the number of pages of each run of pages without a gap."""
    ordered = sorted(set(pages))
    starts = [0, *(at for at, (a, b) in enumerate(pairwise(ordered), 1) if b != a + 1)]
    for start, end in pairwise([*starts, len(ordered)]):
        if end > start:
            yield ordered[start], end - start


def touched_by_start(bundle: Path) -> list[int]:
    """Load a bundle, generate a token, and return the pages of jaxlib's library in this process's memory."""
    from prejit.runtime import load

    next(load(bundle, on_mismatch="error").stream([1, 2, 3, 4], max_new_tokens=2))
    library = jaxlib_library()
    found: list[int] = []
    with (
        open("/proc/self/maps", encoding="utf-8") as maps,
        open("/proc/self/pagemap", "rb") as map_,
    ):
        for each in maps:
            addresses, _, offset, *_, path = each.rstrip("\n").split(maxsplit=5)
            if path != library:
                continue
            start, end = (int(part, 16) // quick_start.PAGE_BYTES for part in addresses.split("-"))
            map_.seek(start * _ENTRY_BYTES)
            entries = memoryview(map_.read((end - start) * _ENTRY_BYTES)).cast("Q")
            first = int(offset, 16) // quick_start.PAGE_BYTES
            found += [first + at for at, entry in enumerate(entries) if entry & _PRESENT]
    return found


if __name__ == "__main__":
    main()
