"""Measure the start-up of growing bundles: from 4 to 400 programs, and from the model's weights to 5 GB.

    python -m benchmarks.studies.startup_flat BUNDLE [--runs 15] [--directory DIR]

BUNDLE holds a decoder with contexts of 128 and 256. The larger bundles are made from it in DIR: copies of its
programs for other contexts, and its weights followed by tensors that no program reads (a hole of the file,
mapped like any other page). Prints medians from exec to the first token of fresh processes that take turns.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.harness.measure import Row, interleave, progress
from prejit.runtime.base.files import digest_file, digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.bundle_schema import Config, Descriptor
from prejit.runtime.format.contents import read_contents
from prejit.runtime.format.index_bytes import encode_index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import FORMAT_VERSION, WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.root import read_root
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint

PROGRAMS = 400
WEIGHTS_BYTES = 5 << 30
PADDING_BYTES = 16 << 20
"""Bytes of each added tensor."""


def with_programs(config: Config, count: int) -> Config:
    """Return the program table with copies of its programs, in longer contexts that no request needs."""
    programs = {program.name: program for program in config.programs}
    context = longest = max(program.bucket["context"] for program in config.programs)
    models = [p for p in config.programs if p.bucket["context"] == longest]

    def change(text: str, sizes: dict[str, str]) -> str:
        return re.sub(r"\b(?:c|(?<=,))(\d+)(?=[-,]|$)", lambda m: sizes.get(m[0], m[0]), text)

    while len(programs) < count:
        before, context = context, context + 8
        for model in models:
            # Of the copy programs, one of whose sizes is shorter: that is the context before.
            shorter = {p.bucket.get("source_context", longest) for p in models} - {longest}
            sizes = {f"{longest}": f"{context}", f"c{longest}": f"c{context}"}
            for size in shorter:
                sizes |= {f"{size}": f"{before}", f"c{size}": f"c{before}"}
            bucket = {
                name: int(sizes[str(size)]) if name.endswith("context") else size
                for name, size in model.bucket.items()
            }
            arguments, results = (
                tuple(change(text, sizes) for text in texts)
                for texts in (model.arguments, model.results)
            )
            added = replace(
                model,
                name=change(model.name, sizes),
                bucket=bucket,
                arguments=arguments,
                results=results,
            )
            programs[added.name] = added
    programs_sorted = tuple(programs.values())
    return replace(config, format=FORMAT_VERSION, programs=programs_sorted)


def with_weights(source: Path, to: Path, size: int) -> None:
    """Write a weights file that appends tensors to those of another, up to a size."""
    with open(source, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        begins = file.tell()
        end = source.stat().st_size - begins
        number = 0
        while begins + end < size:
            name = f"padding.{number}"
            at = [end, end + PADDING_BYTES]
            header[name] = {"dtype": "U8", "shape": [PADDING_BYTES], "data_offsets": at}
            end, number = end + PADDING_BYTES, number + 1
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)
        with open(to, "wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(file, out)
            out.truncate(8 + len(text) + end)


def larger(source: Path, to: Path, programs: int, weights_bytes: int) -> None:
    """Copy a bundle for this machine only, with more programs, larger weights, or both."""
    with Layout(source) as layout:
        root = read_root(layout)
        target = match(root, Fingerprint.current())[0]
        manifest = read_manifest(layout, target)
        config = with_programs(read_contents(layout, target).config, programs)
    blobs: dict[str, bytes | Path] = {}

    def place(at: Descriptor, content: bytes | Path) -> Descriptor:
        if isinstance(content, Path):
            with open(content, "rb") as file:
                digest, size = digest_file(file.fileno()), content.stat().st_size
        else:
            digest, size = digest_of(content), len(content)
        blobs[digest] = content
        return replace(at, digest=digest, size=size)

    layers = []
    for layer in manifest.layers:
        path = source / "blobs" / "sha256" / layer.digest.removeprefix("sha256:")
        if layer.mediaType == WEIGHTS_MEDIA_TYPE and weights_bytes > layer.size:
            padded = to.with_suffix(".safetensors")
            with_weights(path, padded, weights_bytes)
            path = padded
        layers.append(place(layer, path))
    described = place(manifest.config, to_json(config))
    changed = replace(manifest, config=described, layers=tuple(layers))
    at = place(target.descriptor, to_json(changed))
    write_layout(to, encode_index(config.bundle, (at,)), blobs)


def main() -> None:
    """Make the bundles, run them in turn and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--directory", type=Path, default=Path("/tmp/prejit-startup-flat"))
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    wanted = {
        "as it is": (0, 0),
        f"{PROGRAMS} programs": (PROGRAMS, 0),
        f"{WEIGHTS_BYTES >> 30} GB of weights": (0, WEIGHTS_BYTES),
    }
    cache = {"PREJIT_RUNTIME_CACHE": str(given.directory / "runtime-cache")}
    rows = []
    for name, (programs, weights) in wanted.items():
        to = given.directory / f"{programs}-{weights}"
        if not (to / "index.json").exists():
            progress(f"making a bundle: {name}")
            larger(given.bundle, to, programs, weights)
        rows.append(Row(name, ("studies/startup_child.py", str(to)), cache))
    time.sleep(2.5)  # a file that has just been written gets no receipt
    samples = interleave(rows, given.runs)
    print("| bundle | exec to first token, ms: median | least |")
    print("| --- | --- | --- |")
    for name, found in samples.items():
        times = [1e3 * sample["first_seconds"] for sample in found]
        print(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
