"""Measure how long `prejit fleet --page` takes in a fresh process.

    python -m benchmarks.studies.fleet BUNDLE

It makes a synthetic fleet of CPUs, GPUs and TPUs in a temporary directory, and prints the median.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prejit.runtime.base.typed_json import to_json
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.targets import catalogue, chips

JAXLIBS = ("0.10.2", "0.11.0", "0.11.2", "0.12.0", "0.12.0.1")
LEVELS = {name: catalogue()[f"cpu-x86-64-{name}"].cpu_features or () for name in ("v2", "v3", "v4")}
CPUS = {
    # name: extensions beside those of a level, as Linux shows them on such a machine
    "Intel Xeon E5-2680 v4": (*LEVELS["v3"], "adx", "aes", "pclmul", "rdrnd", "rdseed"),
    "Intel Xeon X5650": (*LEVELS["v2"], "aes", "pclmul"),
    "Intel Xeon Platinum 8370C": (*LEVELS["v4"], "aes", "avx512vnni", "gfni", "sha", "vaes"),
    "Intel Xeon Platinum 8481C": (
        *(*LEVELS["v4"], "aes", "amx-bf16", "amx-int8", "amx-tile", "avx512bf16", "avx512fp16"),
        *("avx512vnni", "avxvnni", "gfni", "sha", "vaes"),
    ),
    "AMD EPYC 7763": (*LEVELS["v3"], "adx", "aes", "clzero", "sha", "sse4a", "vaes"),
    "AMD EPYC 9654": (*LEVELS["v4"], "aes", "avx512bf16", "clzero", "gfni", "sha", "vaes"),
    "QEMU Virtual CPU": tuple(name for name in LEVELS["v2"] if name not in ("popcnt", "sse4.2")),
}
DRIVERS = ("535.230.02", "550.163.01", "580.65.06", "580.95.05", "590.44.01")


def fleet(count: int, seed: int = 0) -> dict[str, Fingerprint]:
    """Return machines by name: mostly CPUs, some GPUs, few TPUs."""
    pick = random.Random(seed)
    machines = {}
    for number in range(count):
        kind = pick.choices(("web", "arm", "gpu", "tpu"), (60, 5, 30, 5))[0]
        machines[f"{kind}/{kind}-{number:04}"] = _machine(kind, pick)
    return machines


def _machine(kind: str, pick: random.Random) -> Fingerprint:
    name, features = pick.choice(list(CPUS.items()))
    jaxlib = pick.choices(JAXLIBS, (5, 5, 10, 20, 60))[0]
    cores = pick.choice((2, 8, 32, 96, 192))
    host = Fingerprint("cpu", "x86_64", tuple(sorted(features)), jaxlib, name, cores, cores << 32)
    if kind == "web":
        flags = ("--xla_cpu_enable_fast_math=true",) if pick.random() < 0.02 else ()
        return replace(host, xla_flags=flags)
    if kind == "arm":
        return replace(host, architecture="aarch64", cpu_features=(), cpu_model="Neoverse-N1")
    targets = [t for t in catalogue().values() if t.platform == {"gpu": "cuda"}.get(kind, kind)]
    target = pick.choice(targets)
    if kind == "tpu":
        return replace(
            host,
            platform="tpu",
            plugin=f"libtpu {pick.choice(('0.0.42', '0.0.50', '0.0.51'))}",
            device_kind=target.device_kind,
            device_count=chips(target.topology or "1"),
            topology=target.topology,
            device_memory_bytes=target.memory_bytes,
        )
    modern = pick.random() < 0.8
    return replace(
        host,
        platform="cuda",
        plugin=f"jax-cuda{13 if modern else 12}-pjrt {jaxlib}",
        cuda="13.0.96" if modern else "12.9.79",
        driver=pick.choice(DRIVERS[2:] if modern else DRIVERS[:3]),
        device_kind=target.device_kind,
        compute_capability=target.compute_capability,
        device_count=pick.choice((1, 1, 4, 8)),
        device_memory_bytes=(target.memory_bytes or 0) + pick.choice((0, 1 << 20)),
        environment=("NVIDIA_TF32_OVERRIDE=0",) if pick.random() < 0.03 else (),
    )


def write(machines: dict[str, Fingerprint], directory: Path) -> None:
    """Save every machine as `prejit fingerprint` does."""
    for name, machine in machines.items():
        path = directory / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json(machine) + b"\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Print the median of five runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", metavar="BUNDLE", help="directory of a bundle")
    parser.add_argument("--machines", type=int, default=1000, help="of the fleet (default 1000)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as scratch:
        write(fleet(options.machines), Path(scratch, "fleet"))
        command = [sys.executable, "-m", "prejit.runtime", "fleet", options.bundle]
        command += [f"{scratch}/fleet", "--page", f"{scratch}/fleet.html"]
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
        size = Path(scratch, "fleet.html").stat().st_size
    print(
        f"{options.machines} machines: {statistics.median(seconds):.2f} s "
        f"(of 5: {min(seconds):.2f} to {max(seconds):.2f}), page {size / 1e6:.2f} MB"
    )


if __name__ == "__main__":
    main()
