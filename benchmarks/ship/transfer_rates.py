"""Pull and push a bundle over loopback beside curl, and let sixteen processes load one reference.

    python -m benchmarks.ship.transfer_rates                    about 5 minutes on two cores, in /dev/shm
    python -m benchmarks.ship.transfer_rates --directory /srv   the same on a disk
    python -m benchmarks.ship.transfer_rates --bytes 1e8 --rounds 1    a trial, which is not saved

The bundle is valid and has one layer of random weights. The servers are those of tests/store_servers.py that
this machine has: docker-registry and nginx. Rows are fresh processes that take turns. curl moves the weights
alone and hashes nothing; `sha256sum` beside it is what a script would add. The rate of prejit counts all that
it does: hashing, the store, fsync. Its start as a process is in `whole process`.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from tests.layouts import copy_with_layers
from tests.store_servers import Server, docker_registry, nginx

from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    Row,
    Sample,
    interleave,
    progress,
    run_once,
)
from benchmarks.harness.report import Samples, Table, Target, cell, ratio_within_rounds
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE

GOLDEN = BENCHMARKS.parent / "tests" / "format" / "v1" / "call"
PROCESSES = 16
LEAST_SHARE = 0.8
"""Wanted of curl's rate."""
_COMMAND = "import sys; sys.modules['jax'] = None; from prejit.runtime.__main__ import main; sys.exit(main())"


@dataclass(frozen=True)
class Bundle:
    """The bundle that moves: its directory, and the digest and the size of its weights."""

    path: Path
    weights: str
    size: int


def make_bundle(path: Path, size: int) -> Bundle:
    """Make the bundle."""
    content = np.random.default_rng(0).bytes(size)
    copy_with_layers(GOLDEN, path, {WEIGHTS_MEDIA_TYPE: content})
    return Bundle(path, digest_of(content), size)


def prejit(name: str, store: Path, *words: object) -> Row:
    """Return a command of prejit in a fresh process that cannot import jax."""
    command = (sys.executable, "-c", _COMMAND, *map(str, words), "--json")
    env = {"PREJIT_BUNDLES": str(store), "PREJIT_RUNTIME_CACHE": str(store.with_name("cache"))}
    return Row(name, command, env)


@dataclass(frozen=True)
class Place:
    """A server, and what its rows move.

    Attributes:
        server: it runs.
        at: the reference of the bundle, which is there.
        blob: the URL of its weights.
        push: a reference to push to, with `{n}` where each push has another number.
        put: a shell's command by which curl sends the weights, with `{n}` as above.
    """

    server: Server
    at: str
    blob: str
    push: str
    put: str


def registry_place(server: Server, bundle: Bundle, weights: Path) -> Place:
    """Return the place of a registry."""
    api = server.url.replace("oci://", "http://").replace("/team/", "/v2/team/")
    upload = (
        f"at=$(curl -sSf -X POST -D - -o /dev/null {api}{{n}}/blobs/uploads/ | tr -d '\\r' | "
        "sed -n 's/^[Ll]ocation: //p'); curl -sSf -o /dev/null -T "
        f'{weights} "$at&digest={bundle.weights}"'
    )
    blob = f"{api}/large/blobs/{bundle.weights}"
    return Place(server, f"{server.url}/large:v1", blob, f"{server.url}{{n}}:v1", upload)


def web_place(server: Server, bundle: Bundle, weights: Path) -> Place:
    """Return the place of a web server."""
    blob = f"{server.url}/large/blobs/sha256/{bundle.weights[7:]}"
    put = f"curl -sSf -o /dev/null -T {weights} {server.url}/pushed{{n}}/weights"
    return Place(server, f"{server.url}/large", blob, f"{server.url}/pushed{{n}}", put)


def rows_of(place: Place, bundle: Bundle, store: Path) -> list[Row]:
    """Return the processes that take turns."""
    out = store.with_name("curl-out")
    get = f"curl -sSf -o {out} {place.blob}"
    return [
        Row("curl -o", ("sh", "-c", get)),
        Row("curl -o, then sha256sum", ("sh", "-c", f"{get} && sha256sum {out} > /dev/null")),
        prejit("prejit pull", store, "pull", place.at),
        Row("curl -T", ("sh", "-c", place.put)),
        prejit("prejit push", store, "push", bundle.path, place.push),
    ]


def measure(place: Place, bundle: Bundle, scratch: Path, rounds: int) -> tuple[Samples, int]:
    """Return the samples of all rows, and how often sixteen processes at once asked for the weights."""
    store, numbers = scratch / "store", count()

    def clean() -> None:
        for each in (store, scratch / "cache"):
            shutil.rmtree(each, ignore_errors=True)
        (scratch / "curl-out").unlink(missing_ok=True)
        for each in (scratch / "www" / "store").glob("pushed*"):
            shutil.rmtree(each)

    def run(row: Row) -> Sample:
        clean()
        number = str(next(numbers))
        command = tuple(word.replace("{n}", number) for word in row.command)
        sample = run_once(replace(row, command=command))
        said = sample["output"]
        seconds = json.loads(said)["seconds"] if said.startswith("{") else sample["exit_seconds"]
        gigabytes = bundle.size / 1e9
        return {
            **sample,
            "moving_seconds": seconds,
            "rate": bundle.size / 1e6 / seconds,
            "cpu_per_gb": sample["cpu_seconds"] / gigabytes,
        }

    run_once(prejit("push", store, "push", bundle.path, place.at))
    samples = interleave(rows_of(place, bundle, store), rounds, run=run)
    clean()
    before = fetches(place.server, bundle)
    rows = [prejit(f"process {each}", store, "pull", place.at) for each in range(PROCESSES)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(run_once, rows))
    clean()
    return samples, fetches(place.server, bundle) - before


def fetches(server: Server, bundle: Bundle) -> int:
    """Return how often a server was asked for the weights."""
    assert server.log is not None
    return len(re.findall(rf'"GET \S*{bundle.weights[7:]} HTTP', server.log.read_text()))


def main() -> None:
    """Measure all servers, and write the figures."""
    parser = option_parser()
    parser.add_argument("--bytes", type=float, default=1e9, help="size of the weights")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--directory", default="/dev/shm", help="where all files are")
    chosen = parser.parse_args()
    use_two_cores()
    figures: dict[str, Any] = {}
    facts = begin(chosen.rounds, bytes=chosen.bytes, directory=chosen.directory, servers=figures)
    rows, targets = list[tuple[str, ...]](), list[Target]()
    with tempfile.TemporaryDirectory(dir=chosen.directory, prefix="transfer-rates-") as directory:
        scratch = Path(directory)
        bundle = make_bundle(scratch / "bundle", int(chosen.bytes))
        weights = bundle.path / "blobs" / "sha256" / bundle.weights[7:]
        for kind, place_of in ((docker_registry, registry_place), (nginx, web_place)):
            server = kind(scratch)
            if server is None:
                progress(f"left out: {kind.__name__} is not installed")
                continue
            server.start()
            try:
                samples, fetched = measure(
                    place_of(server, bundle, weights), bundle, scratch, chosen.rounds
                )
            finally:
                server.kill()
            name = server.name.partition(",")[0]
            figures[name] = {"rows": samples, "fetches by 16 processes": fetched}
            rows += [
                (
                    *(name, row, cell(found, "rate", 0), cell(found, "cpu_per_gb")),
                    cell(found, "exit_seconds"),
                )
                for row, found in samples.items()
            ]
            for ours, other in (("prejit pull", "curl -o"), ("prejit push", "curl -T")):
                share = ratio_within_rounds(samples, ours, other, "rate")
                what = f"{name}: rate of `{ours}` by that of `{other}`"
                targets.append(Target(what, share, LEAST_SHARE, at_least=True))
            what = f"{name}: fetches of the weights by {PROCESSES} processes at once"
            targets.append(Target(what, fetched, 1))
    head = ("server", "row", "MB/s", "CPU s a GB", "whole process s")
    note = (
        "Medians of fresh processes that took turns. A rate of prejit counts hashing, the store "
        "and fsync, and not the start of the process."
    )
    where = "memory" if chosen.directory == "/dev/shm" else "disk"
    publish(
        facts,
        f"transfer-rates-{where}",
        f"Transfers over loopback, files in {where}",
        [Table("Rates", head, rows, note)],
        targets,
        is_trial=chosen.bytes < 1e9,
    )


if __name__ == "__main__":
    main()
