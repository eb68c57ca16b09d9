"""Measure what a trust policy adds to a start, in fresh processes that take turns.

    python -m benchmarks.studies.trust BUNDLE [--runs 20]

BUNDLE holds a decoder. A copy of it is signed with a new key. Each process generates one token of it: without
a policy, with one, and with one that has `first_load = "child"`, at the first load of the machine and at
later ones. Prints medians of wall and CPU time of whole processes, their child processes included.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prejit.compiler.signing.bundle_signing import sign
from prejit.compiler.signing.private_key import read_private_key


def run(bundle: Path, policy: Path | None) -> tuple[float, float]:
    """Return the wall and CPU seconds of a process that generates one token."""
    command = [sys.executable, "-m", "prejit.runtime", "generate", str(bundle)]
    command += ["--prompt-ids", "1,2,3", "--max-new-tokens", "1", "--on-mismatch", "error"]
    command += [] if policy is None else ["--trust", str(policy)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit status {process.returncode}: {' '.join(command)}")
    return seconds, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Sign a copy and let processes with and without a policy take turns."""
    reader = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    reader.add_argument("bundle", type=Path)
    reader.add_argument("--runs", type=int, default=20)
    options = reader.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        bundle = shutil.copytree(options.bundle, Path(directory, "bundle"))
        pem, policy = Path(directory, "key.pem"), Path(directory, "trust.toml")
        subprocess.run(
            ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(pem)],
            check=True,
        )
        key = read_private_key(pem)
        sign(bundle, key)
        text = f'[keys.a]\npem = """\n{key.public.pem}"""\n[[rules]]\nnames = ["*"]\nkeys = ["a"]\n'
        policy.write_text(text)
        in_child = Path(directory, "child.toml")
        in_child.write_text(f'{text}first_load = "child"\n')
        cache = Path(directory, "cache")
        os.environ["PREJIT_RUNTIME_CACHE"] = str(cache)
        time.sleep(2.5)  # so that the files get receipts
        ways: dict[str, Path | None] = {
            "no policy": None,
            "policy": policy,
            "first load": in_child,
            "later load": in_child,
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for way in ways.values():
            run(bundle, way)  # warms the caches
        for _ in range(options.runs):
            for name, way in ways.items():
                if name == "first load":
                    shutil.rmtree(cache / "first-loads")
                found[name].append(run(bundle, way))
    print(f"{options.bundle}: {options.runs} runs each, medians")
    for name, times in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{name:<10} wall {wall:.3f} s, CPU {cpu:.3f} s")


if __name__ == "__main__":
    main()
