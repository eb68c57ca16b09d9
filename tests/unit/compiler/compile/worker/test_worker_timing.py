"""What programs are measured with in a worker process."""

from __future__ import annotations

import os
from pathlib import Path

from prejit.compiler.compile.worker.worker_timing import last_cache_bytes


def test_last_caches_are_counted_once_each(tmp_path: Path) -> None:
    """A large one is larger than any constant, and a processor may have several."""
    own = min(os.sched_getaffinity(0))
    caches = {"index0": ("1", "32K", f"{own}"), "index3": ("3", "480M", f"{own}-63")}
    for name, (level, size, shared) in caches.items():
        directory = tmp_path / f"cpu{own}" / "cache" / name
        directory.mkdir(parents=True)
        (directory / "level").write_text(f"{level}\n")
        (directory / "size").write_text(f"{size}\n")
        (directory / "shared_cpu_list").write_text(f"{shared}\n")
    assert last_cache_bytes(tmp_path) == 480 << 20
    assert last_cache_bytes(tmp_path / "nothing") == 0
