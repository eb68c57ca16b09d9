"""Count the bytes that a next version moves, beside rsync and an image, and what split weights would give.

    python -m benchmarks.studies.ship_deltas           GPT-2's shape, 500 MB; minutes
    python -m benchmarks.studies.ship_deltas --small stories260k    a published model in Hugging Face's layout

Each version is built, pushed to docker-registry, and pulled by a machine that has the version before. rsync
copies the directory, also with the option by which it looks for files under other names. An image that copies
the directory of a bundle by one line of a Dockerfile moves that whole layer.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from tests.store_servers import docker_registry

from benchmarks.harness.fresh_processes import environment, progress
from benchmarks.harness.matrix import write_functions
from benchmarks.harness.models import decoder_manifest, make
from benchmarks.harness.report import MB, Table
from benchmarks.harness.results import begin, option_parser, publish, use_two_cores
from benchmarks.harness.workload import Sizes
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.bundle_schema import Descriptor
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.ship.machine_store import MachineStore
from prejit.runtime.ship.pulling import Wanted, pull
from prejit.runtime.ship.reference import parse_reference
from prejit.runtime.ship.shipping import ship

CHANGED_LAYERS = 10
PROGRAMS = 40
_LAYER = re.compile(r"(?:^|\.)(?:h|layers)\.(\d+)\.")
TARGETS = ("cpu-x86-64-v3", "cpu-x86-64-v2")


def build(manifest: Path, directory: Path) -> Path:
    """Build a manifest into a directory of its own; all share one cache."""
    progress(f"prejit build, {directory.name}")
    command = [sys.executable, "-m", "prejit.runtime", "build", str(manifest), "-o", str(directory)]
    command += ["--cache", str(directory.parent / "cache"), "--no-measure"]
    subprocess.run(command, env=environment({}), check=True, stdout=subprocess.DEVNULL)
    return next(path for path in directory.iterdir() if path.is_dir())


def decoder(where: Path, source: Path, context: int, targets: int = 1) -> Path:
    """Write the manifest of a decoder, and return it."""
    sizes: Sizes = {"batch": (1,), "prompt": (64,), "context": (context,)}
    text = decoder_manifest("demo", str(source), "float32", sizes).replace("cpu-host", TARGETS[0])
    text += "".join(f'\n[[target]]\nname = "{name}"\n' for name in TARGETS[1:targets])
    where.mkdir()
    (where / "demo.toml").write_text(text)
    return where / "demo.toml"


def fine_tuned(source: Path, out: Path) -> int:
    """Copy a model and change all matrices of its first layers; return the number of layers."""
    shutil.copytree(source, out)
    file = out / "model.safetensors"
    with open(file, "r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        layers = {int(found[1]) for name in header if (found := _LAYER.search(name))}
        changed = set(sorted(layers)[: min(CHANGED_LAYERS, len(layers) - 1)])
        for name, entry in header.items():
            found = _LAYER.search(name)
            if found and int(found[1]) in changed:
                start, end = (8 + size + place for place in entry["data_offsets"])
                opened.seek(start)
                values = np.frombuffer(opened.read(end - start), np.float32)
                opened.seek(start)
                opened.write((values * np.float32(1.01)).tobytes())
    return len(changed)


def functions(where: Path, *, is_changed: bool) -> Path:
    """Write a manifest of many programs, and return it; one function is another one."""
    manifest = write_functions(where, PROGRAMS, targets=TARGETS[:1])
    if is_changed:
        module = where / "matrix_model.py"
        lines = module.read_text().splitlines()
        place = next(i for i, line in enumerate(lines) if line.strip().startswith("return "))
        lines[place] = f"{lines[place]} * 2.0"
        module.write_text("\n".join(lines) + "\n")
    return manifest


def rsynced(before: Path, after: Path, *options: str) -> int:
    """Return the bytes that rsync sends and receives to make a copy of one directory the other."""
    with tempfile.TemporaryDirectory(dir=before.parent) as name:
        copy = f"{name}/copy"
        shutil.copytree(before, copy)
        command = ["rsync", "-a", "--delete-after", "--no-whole-file", "--stats", *options]
        done = subprocess.run(
            [*command, f"{after}/", f"{copy}/"], check=True, capture_output=True, text=True
        )
    found = re.findall(r"Total bytes (?:sent|received): ([\d,]+)", done.stdout)
    return sum(int(each.replace(",", "")) for each in found)


def total(directory: Path) -> int:
    """Return the bytes of all files of a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())


def parts(bundle: Path) -> tuple[dict[str, int], dict[str, int], int]:
    """Return the sizes of layers of weights by content, of their chunks, and the size of the blob."""
    with Layout(bundle) as layout:
        contents = read_contents(layout, match(read_root(layout), Fingerprint.current())[0])
        at = contents.manifest.layer(WEIGHTS_MEDIA_TYPE)
        file = Path(layout.blob_path(at.digest))
    groups = defaultdict[str, list[bytes]](list)
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as content:
        size = int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8 : 8 + size]).items():
            found = _LAYER.search(name)
            start, end = (8 + size + place for place in entry["data_offsets"])
            groups[found[1] if found else "rest"].append(content[start:end])
    layers = {
        hashlib.sha256(b"".join(some)).hexdigest(): sum(map(len, some)) for some in groups.values()
    }
    chunks = dict[str, int]()
    if (listed := (contents.config.chunks or {}).get(WEIGHTS_MEDIA_TYPE)) is not None:
        for place, digest in enumerate(listed.digests):
            chunks[digest] = min(listed.size, at.size - place * listed.size)
    return layers, chunks, at.size


def lacking(before: Mapping[str, int], after: Mapping[str, int]) -> int:
    """Return the bytes of what is new."""
    return sum(size for digest, size in after.items() if digest not in before)


def median_us(call: Callable[[], object]) -> float:
    """Return how long a call takes, in microseconds."""
    found = []
    for _ in range(50):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1e6


def opened(directory: Path, count: int) -> float:
    """Return the microseconds in which so many files are opened, looked at and mapped."""
    files = [directory / f"{count}-{number}" for number in range(count)]
    for file in files:
        file.write_bytes(bytes(1 << 16))

    def open_all() -> None:
        for file in files:
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
            mmap.mmap(descriptor, os.fstat(descriptor).st_size, prot=mmap.PROT_READ).close()
            os.close(descriptor)

    return median_us(open_all)


def main() -> None:
    """Measure, and write the page."""
    parser = option_parser()
    parser.add_argument("--small", type=Path, metavar="MODEL")
    small = parser.parse_args().small
    use_two_cores()
    facts = begin(1)
    machine = Fingerprint.current()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if small is None:
            make(directory, "gpt2")
        source = directory / "gpt2" if small is None else small.absolute()
        count = fine_tuned(source, directory / "tuned")
        longer = (128, 256)
        first = build(decoder(directory / "m1", source, longer[0]), directory / "first")
        cases = {
            "the same weights, all programs new": (
                first,
                build(decoder(directory / "m2", source, longer[1]), directory / "second"),
            ),
            "one more target": (
                first,
                build(decoder(directory / "m3", source, longer[0], 2), directory / "targets"),
            ),
            f"{count} layers of the weights changed": (
                first,
                build(
                    decoder(directory / "m4", directory / "tuned", longer[0]), directory / "tune"
                ),
            ),
            f"one function changed of {PROGRAMS // 4 * 4} programs": (
                build(functions(directory / "m5", is_changed=False), directory / "functions"),
                build(functions(directory / "m6", is_changed=True), directory / "changed"),
            ),
        }
        server = docker_registry(directory)
        if server is None:
            raise SystemExit("docker-registry is not installed (Debian has it)")
        server.start()
        try:
            rows = []
            for number, (what, (before, after)) in enumerate(cases.items()):
                progress(what)
                at = [parse_reference(f"{server.url}{number}:v{side}") for side in (1, 2)]
                store = MachineStore(directory / f"store{number}")
                ship(parse_reference(str(before)), at[0])
                pull(at[0], store, Wanted(machine))
                pushed = ship(parse_reference(str(after)), at[1]).moved_bytes
                pulled = pull(at[1], store, Wanted(machine)).moved
                plain, fuzzy = rsynced(before, after), rsynced(before, after, "--fuzzy")
                counts = (pushed, pulled.moved_bytes if pulled else 0, plain, fuzzy, total(after))
                rows.append((what, *(f"{each / MB:,.3f}" for each in counts)))
        finally:
            server.kill()
        (was, was_chunks, size), (now, now_chunks, _) = map(
            parts, cases[f"{count} layers of the weights changed"]
        )
        described = len(to_json(Descriptor(WEIGHTS_MEDIA_TYPE, f"sha256:{'0' * 64}", size)))
        split = [
            ("one blob", "1", f"{size / MB:,.1f}", f"{opened(directory, 1):.0f}", "0"),
            (
                "a blob a layer",
                f"{len(now)}",
                f"{lacking(was, now) / MB:,.1f}",
                f"{opened(directory, len(now)):.0f}",
                f"{(len(now) - 1) * described}",
            ),
            (
                "one blob, equal chunks from the version before: what `pull` does",
                "1",
                f"{lacking(was_chunks, now_chunks) / MB:,.1f}",
                f"{opened(directory, 1):.0f}",
                "0",
            ),
        ]
    tables = [
        Table(
            "Bytes that a next version moves, MB",
            ("what is new", "push", "pull", "rsync", "rsync --fuzzy", "an image's layer"),
            rows,
            f"{first.name}: {size / MB:,.1f} MB of weights.",
        ),
        Table(
            f"Weights with {count} changed layers",
            ("weights as", "files", "MB that move", "open and map, us", "more bytes of a manifest"),
            split,
            "Counted by the content of each layer's tensors, and by the digests of chunks in the config.",
        ),
    ]
    publish(
        facts,
        f"ship-deltas{'' if small is None else '-small'}",
        "What a next version moves",
        tables,
    )


if __name__ == "__main__":
    main()
