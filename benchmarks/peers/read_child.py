"""Read the bytes that a start needs, and nothing else: the physical limit of the rows beside it.

    peers/read_child.py LIST [reads-alone]

Each line of LIST is `START LENGTH PATH`. Large sequential reads go into one buffer, so that neither new
memory nor page faults slow them. This child imports no other module of the benchmark, only `os`, `sys` and
`time`: what it imports would be read from the disk too. It runs with `python -I -S`. With `reads-alone`, the
time that it reports is that of the reads, without the start of Python.
"""

import os
import sys
import time

BLOCK_BYTES = 8 << 20


def read_all(listed: str) -> int:
    """Read every range of a list; return the number of bytes.

    Raises:
        OSError: a file is missing or shorter than its range.
    """
    buffer = memoryview(bytearray(BLOCK_BYTES))
    total = 0
    for line in listed.splitlines():
        start, length, path = line.split(" ", 2)
        descriptor = os.open(path, os.O_RDONLY)
        try:
            at, end = int(start), int(start) + int(length)
            while at < end:
                count = os.preadv(descriptor, [buffer[: min(BLOCK_BYTES, end - at)]], at)
                if not count:
                    raise OSError(f"{path}: expected {end} bytes, found {at}")
                at += count
        finally:
            os.close(descriptor)
        total += int(length)
    return total


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        wanted = file.read()
    started = time.perf_counter()
    size = read_all(wanted)
    seconds = time.perf_counter() - started
    alone = f', "first_seconds": {seconds}' if "reads-alone" in sys.argv else ""
    print(f'FIRST {{"read_bytes": {size}, "read_seconds": {seconds}{alone}}}', flush=True)
