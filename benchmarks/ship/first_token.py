"""An empty server's first token over a limited link: a load by reference beside a copy and a load.

    sudo python -m benchmarks.ship.first_token                GPT-2's shape, 1 and 10 Gbit/s with 20 ms
    sudo python -m benchmarks.ship.first_token --rounds 1 --gigabits 1       a trial, which is not saved

A registry (Debian's docker-registry) is at one end of the link, and fresh processes with an empty store and
no receipts are at the other: see limited_link.py. The clock runs from the start of the process, or of the
shell that runs two, to the first token. `curl` fetches all blobs of the bundle one after the other: the
download alone. `load` has the bundle on its disk: the load alone, which hashes it.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.layouts import index_of
from tests.store_servers import Server, docker_registry

from benchmarks.harness import workload
from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    Row,
    Sample,
    interleave,
    progress,
    run_once,
)
from benchmarks.harness.report import Table, Target, cell, median
from benchmarks.harness.results import begin, judged, option_parser, publish, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory
from benchmarks.ship.limited_link import Link, limited_link, missing

MOST_RATIO = 1.1
"""Wanted of the longer one of download and load."""
ROUND_TRIP_SECONDS = 0.02
BY_REFERENCE, DOWNLOAD, LOAD = 'load("oci://...")', "curl", "load"


def rows_of(link: Link, at: str, bundle: Path, scratch: Path) -> list[Row]:
    """Return the processes that take turns, each in the client's namespace."""
    copied = scratch / "copied"
    child = f"{sys.executable} {BENCHMARKS / 'peers' / 'prejit_child.py'} generate"
    blobs = " ".join(f"-o /dev/null http://{at}/blobs/sha256:{name}" for name in _blobs(bundle))
    tls = "--src-tls-verify=false"
    ways = {
        BY_REFERENCE: f"exec {child} oci://{at.replace('/v2/', '/')}:v1",
        "skopeo copy, then load": f"skopeo --insecure-policy copy -q --all {tls} "
        f"docker://{at.replace('/v2/', '/')}:v1 oci:{copied}:gpt2 && exec {child} {copied}",
        "oras copy, then load": f"oras copy --from-plain-http --to-oci-layout {at.replace('/v2/', '/')}:v1 "
        f"{copied}:gpt2 > /dev/null && exec {child} {copied}",
        DOWNLOAD: f"curl -sSf {blobs}",
        LOAD: f"exec {child} {bundle}",
    }
    env = {
        "PREJIT_BUNDLES": str(scratch / "store"),
        "PREJIT_RUNTIME_CACHE": str(scratch / "cache"),
        "PREJIT_PLAIN_HTTP": at.partition("/")[0],
    }
    return [
        Row(name, link.in_client(("sh", "-c", command)), env)
        for name, command in ways.items()
        if shutil.which(command.split()[0]) or command.startswith("exec")
    ]


def _blobs(bundle: Path) -> list[str]:
    listed = {at["digest"][7:] for at in index_of(bundle)["manifests"]}
    names = {each.name for each in (bundle / "blobs" / "sha256").iterdir()}
    return sorted(name for name in names - listed if not _is_document(bundle, name))


def _is_document(bundle: Path, name: str) -> bool:
    with open(bundle / "blobs" / "sha256" / name, "rb") as file:
        return b'"schemaVersion"' in file.read(64 << 10)


def measure(
    server: Server, bundle: Path, scratch: Path, gigabits: float, rounds: int
) -> dict[str, list[Sample]]:
    """Return the samples of all rows over one link."""
    with limited_link(gigabits, ROUND_TRIP_SECONDS) as link:
        inside = replace(server, command=link.in_server(server.command))
        process = subprocess.Popen(
            inside.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            time.sleep(1)
            found = re.search(r":(\d+)/", server.url)
            assert found is not None
            with link.relayed(int(found[1])) as at:
                rows = rows_of(link, f"{at}/v2/team/store/gpt2", bundle, scratch)
                return interleave(rows, rounds, run=lambda row: _run(row, scratch))
        finally:
            process.kill()
            process.wait()


def _run(row: Row, scratch: Path) -> Sample:
    for name in ("store", "cache", "copied"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    sample = run_once(row)
    return {**sample, "seconds": sample.get("first_seconds", sample["exit_seconds"])}


def main() -> None:
    """Measure all links, and write the figures."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 10.0])
    chosen = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    use_two_cores()
    bench = Bench(bench_directory(), chosen.rounds, quick=True)
    bundle = Path(bench.built("gpt2", "gpt2", "float32", workload.FEW))
    size = sum(each.stat().st_size for each in (bundle / "blobs" / "sha256").iterdir())
    links: dict[str, Any] = {}
    facts = begin(chosen.rounds, bytes=size, round_trip_seconds=ROUND_TRIP_SECONDS, links=links)
    rows, targets = list[tuple[str, ...]](), list[Target]()
    with tempfile.TemporaryDirectory(prefix="first-token-") as directory:
        scratch = Path(directory)
        server = docker_registry(scratch)
        if server is None:
            sys.exit("docker-registry is not installed (Debian has it)")
        server.start()
        push = ("-m", "prejit.runtime", "push", str(bundle), f"{server.url}/gpt2:v1")
        run_once(Row("push", (sys.executable, *push)))
        server.kill()
        for gigabits in chosen.gigabits:
            progress(f"{gigabits:g} Gbit/s")
            samples = measure(server, bundle, scratch, gigabits, chosen.rounds)
            name = f"{gigabits:g} Gbit/s, {ROUND_TRIP_SECONDS * 1000:.0f} ms"
            links[name] = samples
            rows += [
                (name, row, cell(found, "seconds"), cell(found, "cpu_seconds"))
                for row, found in samples.items()
            ]
            ours, bound = (
                median(samples[BY_REFERENCE], "seconds"),
                max(median(samples[each], "seconds") for each in (DOWNLOAD, LOAD)),
            )
            what = f"{name}: first token by the longer one of download and load"
            targets.append(Target(what, ours / bound, MOST_RATIO))
    facts["targets"] = judged(targets)
    head = ("link", "way", "first token s", "CPU s")
    note = f"The bundle has {size / 1e6:.0f} MB. For `curl` the time is that of the download."
    tables = [
        Table("First token", head, rows, note),
        Table("Targets", ("what", "found", "wanted", ""), [each.row() for each in targets]),
    ]
    if chosen.rounds < 3:
        print("\n".join(table.markdown() for table in tables))
        return
    publish(facts, "first-token", "An empty server's first token over a limited link", tables)


if __name__ == "__main__":
    main()
