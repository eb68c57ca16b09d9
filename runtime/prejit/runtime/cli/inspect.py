"""`prejit inspect` and `prejit verify`: read a bundle without running it."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from dataclasses import asdict
from typing import TYPE_CHECKING

from prejit.runtime.base.tables import size, table
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.cli.output import print_json, print_text
from prejit.runtime.cli.tables import accuracy_table, forms_table
from prejit.runtime.format.blobs import check_blobs, read_whole
from prejit.runtime.format.checks.config import check_arrays, check_weight_sets
from prejit.runtime.format.checks.layers import check_chat, unpack
from prejit.runtime.format.checks.oci import check_digest
from prejit.runtime.format.checks.safetensors import check_weights
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import Contents, Target, match, read_contents, read_kernels
from prejit.runtime.format.schema import Config, Index, Segment
from prejit.runtime.generation.defaults import check_generation
from prejit.runtime.machine.fingerprint import Fingerprint

if TYPE_CHECKING:
    from prejit.runtime.generation.defaults import Defaults


def inspect(options: Namespace) -> int:
    """Print what a bundle holds: versions, layers, and the programs of each target."""

    def read(
        layout: Layout, index: Index, digest: str
    ) -> tuple[str, tuple[Target, ...], list[Contents], Defaults | None]:
        targets = match(layout, index, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        return digest, targets, contents, _defaults(layout, contents[0])

    digest, targets, contents, defaults = read_whole(options.bundle, read)
    if options.json:
        described = [
            {
                "config": json.loads(to_json(c.config)),
                "layers": [asdict(x) for x in c.manifest.layers],
            }
            for c in contents
        ]
        described_defaults = None if defaults is None else asdict(defaults)
        print_json({"digest": digest, "targets": described, "defaults": described_defaults})
        return 0
    _print_bundle(digest, contents[0].config, defaults)
    layers = {layer.digest: layer for c in contents for layer in c.manifest.layers}
    sizes = [(_layer_name(x.mediaType), size(x.size)) for x in layers.values()]
    print_text(table(["layer", "size"], sizes))
    for target, content in zip(targets, contents, strict=True):
        _print_target(target, content)
    return 0


def _print_bundle(digest: str, config: Config, defaults: Defaults | None) -> None:
    """Print what all targets of a bundle share."""
    print_text(f"{config.bundle}  {digest}")
    print_text(table(["built with", "version"], sorted(config.versions.items())))
    if (portable := config.portable) is not None:
        until = f", readable until {portable.readable_until}" if portable.readable_until else ""
        print_text(f"portable programs: jax {portable.jax}, StableHLO {portable.stablehlo}{until}")
    if defaults is not None:
        values = (f"{name} {value}" for name, value in defaults.options().items())
        print_text(f"generates by default with: {', '.join(values) or 'the most likely tokens'}")
    if config.accuracy is not None:
        print_text(accuracy_table(config.accuracy))


def _print_target(target: Target, content: Contents) -> None:
    """Print whether a target fits this machine, its kernels and its programs."""
    fits = "fits this machine" if target.verdict.matches else target.verdict.reason()
    print_text(f"\n{target.name}: {fits}")
    if (kernels := content.config.kernels) is not None:
        held = content.manifest.layer(KERNELS_MEDIA_TYPE).size
        names = ", ".join(kernels.handlers)
        print_text(f"kernels {kernels.level}, {kernels.compiler}, {size(held)}: {names}")
    rows = []
    for program in content.config.programs:
        held_bytes = (program.executable.size, program.portable.size, program.memory.temp_bytes)
        rows.append((program.name, program.kind, *map(size, held_bytes)))
    heads = ["program", "kind", "executable", "StableHLO", "temporary memory"]
    print_text(table(heads, rows))
    if content.config.forms:
        print_text(forms_table(content.config.forms))


def _defaults(layout: Layout, content: Contents) -> Defaults | None:
    """Return the generation defaults of a decoder; None: the bundle holds no decoder.

    Raises:
        RejectError: the generation config is damaged.
    """
    manifest = content.manifest
    if content.config.decoder is None:
        return None
    if not manifest.has_layer(GENERATION_MEDIA_TYPE):
        # The import loads NumPy, which `verify` of other bundles does not need.
        from prejit.runtime.generation.defaults import Defaults

        return Defaults()
    at = manifest.layer(GENERATION_MEDIA_TYPE)
    read, path = layout.read_blob(at.digest, at.size), layout.blob_path(at.digest)
    check_digest(read, at.digest, path)
    return check_generation(read, content.config.format, path)


def verify(options: Namespace) -> int:
    """Check every byte: the digests of all blobs, every frame of every pack, each line of each table."""
    started = time.perf_counter()
    digest, targets, programs, hashed = read_whole(options.bundle, _verify)
    seconds = time.perf_counter() - started
    if options.json:
        found = {"digest": digest, "targets": targets, "programs": programs, "bytes": hashed}
        print_json({**found, "seconds": round(seconds, 3)})
        return 0
    print_text(
        f"{options.bundle}: ok: {targets} targets, {programs} programs, {size(hashed)} hashed "
        f"in {seconds:.1f} s\n{digest}"
    )
    return 0


def _verify(layout: Layout, index: Index, digest: str) -> tuple[str, int, int, int]:
    """Check a bundle. Return its digest and the numbers of targets, programs and hashed bytes."""
    targets = match(layout, index, Fingerprint.current())
    contents = [read_contents(layout, target) for target in targets]
    blobs = check_blobs(layout, [content.manifest for content in contents], receipts=None)
    unpacked = set[tuple[str, Segment]]()
    for content in contents:
        manifest, config = content.manifest, content.config
        layers = {
            at.mediaType: (layout.map_blob(at.digest, at.size), layout.blob_path(at.digest))
            for at in manifest.layers
        }
        for media_type in (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE):
            pack, pack_path = layers[media_type]
            for program in config.programs:
                executables = media_type == EXECUTABLES_MEDIA_TYPE
                segment = program.executable if executables else program.portable
                if (pack_path, segment) not in unpacked:  # targets share portable programs
                    frame = pack[segment.offset : segment.offset + segment.size]
                    unpack(frame, segment, pack_path)
                    unpacked.add((pack_path, segment))
        for program in config.programs:
            at = f"{layout.blob_path(manifest.config.digest)}: {program.name}"
            for texts in (program.arguments, program.results):
                check_arrays(texts, program.kind, config.mesh, at)
        read_kernels(layout, config, manifest)
        shapes: dict[str, tuple[int, ...]] = {}
        at_fault = layout.blob_path(manifest.config.digest)
        if WEIGHTS_MEDIA_TYPE in layers:
            weights, at_fault = layers[WEIGHTS_MEDIA_TYPE]
            tensors = check_weights(memoryview(weights), at_fault)
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_weight_sets(config, shapes, at_fault)
        if CHAT_MEDIA_TYPE in layers:
            templates, chat_path = layers[CHAT_MEDIA_TYPE]
            check_chat(bytes(templates), chat_path)
        _defaults(layout, content)
    programs = sum(len(content.config.programs) for content in contents)
    return digest, len(targets), programs, blobs.hashed_bytes


def _layer_name(media_type: str) -> str:
    return media_type.removeprefix("application/vnd.prejit.")
