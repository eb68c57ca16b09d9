"""Measure the cost of fs-verity digests: the call at a start, and computing them in a build.

    python -m benchmarks.studies.verity [--turns 5]

The builds have new weights of 500 MB each time and a program that is in the store, so that nothing compiles
while the digest is computed: the worst case. Least times are printed, because others disturb a short one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from blake3 import blake3

from prejit.compiler import Manifest, Program, build
from prejit.compiler.pipeline.pack import chunks
from prejit.compiler.pipeline.pack.verity_files import VerityHash
from prejit.runtime.base.files import measure

PIECE_BYTES, WEIGHT_BYTES, TENSORS = 8 << 20, 500_000_000, 100
ROWS = WEIGHT_BYTES // TENSORS // 32


class NoHash:
    """Stands for `VerityHash` in the builds without the digest."""

    def update(self, piece: bytes) -> None:
        """Do nothing."""

    def digest(self) -> str:
        """Return the digest of nothing."""
        return f"sha256:{'0' * 64}"


def score(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Return float32 [8]: a product with each tensor."""
    return sum((x @ tensor for tensor in params.values()), start=x[:8] * 0)


def built(scratch: Path, seed: int) -> float:
    """Return the seconds that a build with weights of this seed takes."""
    random = np.random.default_rng(seed)
    params = {f"part{k}": random.standard_normal((ROWS, 8), np.float32) for k in range(TENSORS)}
    program = Program("score", fn=score, args={"x": f"float32[{ROWS}]"}, params=params)
    manifest = Manifest("verity", programs=[program], targets=["cpu-host"])
    started = time.perf_counter()
    build(manifest, scratch / "out", quiet=True)
    return time.perf_counter() - started


def least(run: Callable[[], object], times: int) -> float:
    """Return the least seconds of several runs."""
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="builds of each kind (default 5)")
    options = parser.parse_args(argv)
    data = np.random.default_rng(0).bytes(PIECE_BYTES)
    with tempfile.TemporaryDirectory() as directory, open(__file__, "rb") as file:
        scratch = Path(directory)
        call = least(lambda: [measure(file.fileno()) for _ in range(1000)], 20) / 1000
        print(f"measuring a file: {call * 1e6:.1f} us")
        for name, use in (
            ("fs-verity", lambda: VerityHash().update(data)),
            ("SHA-256", lambda: hashlib.sha256(data)),
            ("BLAKE3", lambda: blake3(data)),
        ):
            print(f"{name} of 500 MB: {least(use, 50) * WEIGHT_BYTES / PIECE_BYTES:.2f} s")
        os.environ["PREJIT_CACHE"] = str(scratch / "cache")
        os.environ["PREJIT_RUNTIME_CACHE"] = str(scratch / "runtime")
        print(f"build that compiles: {built(scratch, 0):.2f} s")
        kinds = {"with": VerityHash, "without": NoHash}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for turn in range(options.turns):
            for place, (kind, hasher) in enumerate(kinds.items()):
                setattr(chunks, "VerityHash", hasher)  # noqa: B010 (mypy: a module's class)
                seconds[kind].append(built(scratch, 1 + 2 * turn + place))
        for kind, found in seconds.items():
            middle = statistics.median(found)
            print(f"build {kind} the digest: {min(found):.2f} s at least, {middle:.2f} s median")


if __name__ == "__main__":
    main()
