"""An empty server's first token over a limited link: a load by reference beside what others do.

    sudo python -m benchmarks.ship.first_token                GPT-2's shape, 1 and 10 Gbit/s with 20 ms
    sudo python -m benchmarks.ship.first_token --models llama-1b-float32 llama-1b-int8 --rounds 3
    sudo python -m benchmarks.ship.first_token --rounds 1 --gigabits 1       a trial, which is not saved

A registry (Debian's docker-registry), a web server (nginx) and a hub that redirects to it are at one end of
the link, and fresh processes with an empty store, no receipts and no caches are at the other: see
limited_link.py. The clock runs from the start of the process, or of the shell that runs two, to the first
token. All packages are installed. `curl` fetches all blobs of the bundle one after the other: it is the
download alone. `load` has the bundle on its disk and hashes it: it is the load alone.

A virtual machine gives the memory of removed files back to its host after some seconds. To write to it again
takes up to 1 s for 1.2 GB. So each process begins some seconds after the files of the one before are removed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.layouts import index_of
from tests.ports import free_port
from tests.store_servers import Server, docker_registry, nginx

from benchmarks.harness import peer_environments, workload
from benchmarks.harness.fresh_processes import (
    BENCHMARKS,
    FailedProcessError,
    Row,
    Sample,
    interleave,
    progress,
    run_once,
)
from benchmarks.harness.report import Samples, Table, Target, cell, median
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workspace import Bench, bench_directory
from benchmarks.peers.entrants import gguf_file
from benchmarks.ship import hub_server
from benchmarks.ship.limited_link import Link, limited_link, missing

MOST_RATIO = 1.1
"""Wanted of the longer one of download and load."""
ROUND_TRIP_SECONDS = 0.02
_SETTLE_SECONDS = 5
BY_REFERENCE, DOWNLOAD, LOAD = 'load("oci://...")', "curl", "load"
LLAMA_CPP = "curl a GGUF, then llama.cpp"


@dataclass(frozen=True)
class Model:
    """A model that is shipped.

    Attributes:
        source: its name in harness/models.py.
        dtype: dtype of its weights.
        gguf: kind of the GGUF file that llama.cpp gets.
        title: for tables.
    """

    source: str
    dtype: str
    gguf: str
    title: str


MODELS = {
    f"{source}-{dtype}": Model(source, dtype, gguf, f"{title}, {dtype}")
    for source, title in (("gpt2", "GPT-2"), ("llama-1b", "Llama 1B"))
    for dtype, gguf in (("float32", "f32"), ("int8", "q8_0"))
}


@dataclass(frozen=True)
class Shipped:
    """A model that the servers have.

    Attributes:
        model: the model.
        bundle: directory of its bundle.
        gguf: its GGUF file; None: llama.cpp is left out.
        has_hub: whether the hub has it: GPT-2 in float32, which peers/jax_baseline.py computes.
    """

    model: Model
    bundle: Path
    gguf: Path | None
    has_hub: bool

    @property
    def megabytes(self) -> float:
        """Size of the bundle's blobs."""
        return sum(file.stat().st_size for file in self.bundle.glob("blobs/sha256/*")) / 1e6


@dataclass(frozen=True)
class Addresses:
    """`host:port` of each server, as the client reaches it."""

    registry: str
    web: str
    hub: str


def rows_of(link: Link, at: Addresses, shipped: Shipped, scratch: Path) -> list[Row]:
    """Return the processes that take turns, each in the client's namespace."""
    name = f"{shipped.model.source}-{shipped.model.dtype}"
    place, copied = f"{at.registry}/team/store/{name}", scratch / "copied"
    child = f"{sys.executable} {BENCHMARKS / 'peers' / 'prejit_child.py'} generate"
    blobs = " ".join(
        f"-o /dev/null http://{at.registry}/v2/team/store/{name}/blobs/sha256:{each}"
        for each in _blobs(shipped.bundle)
    )
    ways = {
        BY_REFERENCE: f"exec {child} oci://{place}:v1",
        "skopeo copy, then load": "skopeo --insecure-policy copy -q --all --src-tls-verify=false "
        f"docker://{place}:v1 oci:{copied}:it && exec {child} {copied}",
        "oras copy, then load": f"oras copy --from-plain-http --to-oci-layout {place}:v1 {copied}:it "
        f"> /dev/null && exec {child} {copied}",
        DOWNLOAD: f"curl -sSf {blobs}",
        LOAD: f"exec {child} {shipped.bundle}",
    }
    if shipped.has_hub:
        snapshot = f"exec {sys.executable} {BENCHMARKS / 'peers' / 'hub_child.py'}"
        ways["hub's snapshot, then jax.jit"] = f"{snapshot} {hub_server.REPOSITORY}"
        ways["the same with transformers' tokenizer"] = (
            f"{snapshot} {hub_server.REPOSITORY} --tokenizer"
        )
    if shipped.gguf is not None:
        python = peer_environments.interpreter(bench_directory(), "llama.cpp")
        ways[LLAMA_CPP] = (
            f"curl -sSf -o {copied} http://{at.web}/{shipped.gguf.name} && "
            f"exec {python} {BENCHMARKS / 'peers' / 'llama_cpp_child.py'} generate {copied}"
        )
    env = {
        "PREJIT_BUNDLES": str(scratch / "store"),
        "PREJIT_RUNTIME_CACHE": str(scratch / "cache"),
        "PREJIT_PLAIN_HTTP": at.registry,
        "HF_ENDPOINT": f"http://{at.hub}",
        "HF_HOME": str(scratch / "copied"),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return [
        Row(way, link.in_client(("sh", "-c", command)), env)
        for way, command in ways.items()
        if shutil.which(command.split()[0]) or command.startswith("exec")
    ]


def _blobs(bundle: Path) -> list[str]:
    listed = {at["digest"][7:] for at in index_of(bundle)["manifests"]}
    names = {each.name for each in (bundle / "blobs" / "sha256").iterdir()}
    return sorted(name for name in names - listed if not _is_document(bundle, name))


def _is_document(bundle: Path, name: str) -> bool:
    with open(bundle / "blobs" / "sha256" / name, "rb") as file:
        return b'"schemaVersion"' in file.read(64 << 10)


@contextlib.contextmanager
def serving(link: Link, registry: Server, web: Server) -> Iterator[Addresses]:
    """Run the servers at their end of the link."""
    with contextlib.ExitStack() as stack:

        def run(command: tuple[str, ...]) -> None:
            process = subprocess.Popen(
                link.in_server(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)

        ports = []
        for server in (registry, web):
            run(server.command)
            found = re.search(r":(\d+)/", server.url)
            assert found is not None
            ports.append(int(found[1]))
        time.sleep(1)
        reached = [stack.enter_context(link.relayed(port)) for port in ports]
        hub, directory = free_port(), _files(web) / "hub"
        script = ("-m", hub_server.__name__, str(hub), str(directory), f"http://{reached[1]}/hub")
        run((sys.executable, *script))
        time.sleep(1)
        yield Addresses(reached[0], reached[1], stack.enter_context(link.relayed(hub)))


def _files(web: Server) -> Path:
    assert web.files is not None
    return web.files


def share_blobs(bundle: Path, registry: Server) -> None:
    """Let a registry have a bundle's own files, which then fit in the page cache: 5 GB are there once."""
    assert registry.files is not None
    for file in registry.files.rglob("data"):
        blob, temporary = bundle / "blobs" / "sha256" / file.parent.name, file.with_name("link")
        if blob.is_file():
            with contextlib.suppress(OSError):  # of another disk
                os.link(blob, temporary)
                os.replace(temporary, file)


def _run(row: Row, scratch: Path) -> Sample:
    for name in ("store", "cache", "copied"):
        shutil.rmtree(scratch / name, ignore_errors=True)
    (scratch / "copied").unlink(missing_ok=True)
    time.sleep(_SETTLE_SECONDS)
    sample = run_once(row, until="" if row.name == DOWNLOAD else "FIRST")
    return {**sample, "seconds": sample.get("first_seconds", sample["exit_seconds"])}


def prepare(bench: Bench, name: str) -> Shipped:
    """Return a model with its bundle and its peers' files; make what is missing."""
    model = MODELS[name]
    bundle = Path(bench.built(name, model.source, model.dtype, workload.FEW))
    gguf = None
    try:
        python = peer_environments.interpreter(bench.directory, "llama.cpp")
        gguf = Path(gguf_file(bench, model.source, model.gguf, python))
    except (FailedProcessError, peer_environments.EnvironmentFailedError) as error:
        progress(f"left out: llama.cpp: {error}")
    return Shipped(model, bundle, gguf, name == "gpt2-float32")


def targets_of(what: str, samples: Samples) -> list[Target]:
    """Return the targets of one model over one link."""
    seconds = {row: median(found, "seconds") for row, found in samples.items()}
    ours, bound = seconds.pop(BY_REFERENCE), max(seconds.pop(DOWNLOAD), seconds.pop(LOAD))
    found = [
        Target(
            f"{what}: first token by the longer one of download and load", ours / bound, MOST_RATIO
        )
    ]
    if seconds:
        best = min(seconds, key=lambda row: seconds[row])
        found.append(
            Target(
                f"{what}: first token by that of the next best, {best}", ours / seconds[best], 1.0
            )
        )
    return found


def main() -> None:
    """Measure all models over all links, and write the figures."""
    parser = option_parser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gigabits", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS)[:2])
    parser.add_argument(
        "--longest", type=float, default=20.0, help="leave out what takes more seconds to download"
    )
    chosen = parser.parse_args()
    if reason := missing():
        sys.exit(reason)
    use_two_cores()
    bench = Bench(bench_directory(), chosen.rounds, quick=True)
    models = [prepare(bench, name) for name in chosen.models]
    links: dict[str, Any] = {}
    facts = begin(chosen.rounds, round_trip_seconds=ROUND_TRIP_SECONDS, links=links)
    rows, targets = list[tuple[str, ...]](), list[Target]()
    with tempfile.TemporaryDirectory(prefix="first-token-") as directory:
        scratch = Path(directory)
        registry, web = docker_registry(scratch), nginx(scratch)
        if registry is None or web is None:
            sys.exit("docker-registry or nginx is not installed (Debian has them)")
        bench.model("gpt2")
        hub_server.make_repository(
            _files(web) / "hub", Path(bench.weights), bench.directory / "gpt2" / "config.json"
        )
        registry.start()
        for each in models:
            if each.gguf is not None:
                (_files(web) / each.gguf.name).symlink_to(each.gguf)
            name = f"{registry.url}/{each.model.source}-{each.model.dtype}:v1"
            push = ("-m", "prejit.runtime", "push", str(each.bundle), name)
            run_once(Row("push", (sys.executable, *push)))
            share_blobs(each.bundle, registry)
        registry.kill()
        for gigabits in chosen.gigabits:
            link_name = f"{gigabits:g} Gbit/s, {ROUND_TRIP_SECONDS * 1000:.0f} ms"
            with (
                limited_link(gigabits, ROUND_TRIP_SECONDS) as link,
                serving(link, registry, web) as at,
            ):
                for each in models:
                    what = f"{each.model.title}, {link_name}"
                    if each.megabytes * 8 / 1000 / gigabits > chosen.longest:
                        progress(f"left out: {what}")
                        continue
                    progress(what)
                    found = rows_of(link, at, each, scratch)
                    run = partial(_run, scratch=scratch)
                    samples = interleave(found, chosen.rounds, run=run)
                    links[what] = samples
                    rows += [
                        (what, way, cell(s, "seconds"), cell(s, "cpu_seconds"))
                        for way, s in samples.items()
                    ]
                    targets += targets_of(what, samples)
    sizes = "; ".join(_sizes(each) for each in models)
    note = f"{sizes}. For `curl` the time is that of the download. CPU time is that of the client."
    publish(
        facts,
        f"first-token-{'-'.join(dict.fromkeys(each.model.source for each in models))}",
        "An empty server's first token over a limited link",
        [Table("First token", ("model and link", "way", "first token s", "CPU s"), rows, note)],
        targets,
        is_trial=chosen.rounds < 3,
    )


def _sizes(each: Shipped) -> str:
    text = f"{each.model.title}: a bundle of {each.megabytes:.0f} MB"
    if each.gguf is not None:
        text += f", a GGUF file of {each.gguf.stat().st_size / 1e6:.0f} MB"
    return text


if __name__ == "__main__":
    main()
