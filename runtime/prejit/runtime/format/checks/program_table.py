"""Checks of a config: programs, decoder, encoder, mesh and weight sets fit each other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from datetime import date

from prejit.runtime.base.files import is_digest
from prejit.runtime.base.typed_json import from_json
from prejit.runtime.errors import rejecting
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array, Mesh
from prejit.runtime.format.bundle_schema import Config, ImageManifest, Segment
from prejit.runtime.format.checks.program_interfaces import (
    BUCKETS,
    DECODER_KINDS,
    ENCODER_KINDS,
    WITHOUT_WEIGHTS,
    Signatures,
    cache_arrays,
    difference,
    source_array,
)
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    KERNEL_LEVELS,
    KERNELS_MEDIA_TYPE,
    LIBRARY_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
)
from prejit.runtime.machine.fingerprint import PLATFORMS, Requirement

CHUNK_ALGORITHM = "blake3"
"""The hash function of chunks. On one core of a Zen 5 it takes 7.1 GB/s, SHA-256 with its instructions 1.9
(docs/decisions/0041-chunks.md)."""

USER_FIELDS = (
    *("arguments_tree", "results_tree", "static", "mask", "pad", "symbolic", "open_sizes", "calls"),
    *("settings", "state"),
)
"""Fields of a program that only those of kind `call` may have."""

_HEX_DIGEST = re.compile("[0-9a-f]{64}")


@rejecting
def check_config(content: bytes, target: str, requirement: Requirement, path: str) -> Config:
    """7. Return the config of a target, which must be canonical and agree with itself and with the index.

    The index has the target's name and requirement.
    """
    config = from_json(Config, content, path)
    if config.format != FORMAT_VERSION:
        raise ValueError(f"expected format {FORMAT_VERSION}, as the index, found {config.format}")
    if config.target != target or config.requirement != requirement:
        raise ValueError(f"expected target {target!r} with the requirement of the index")
    names = [program.name for program in config.programs]
    if len(set(names)) != len(names):
        raise ValueError("expected each program once")
    calls = False  # a handler of the user's libraries
    for program in config.programs:
        if program.weights is not None and program.weights not in config.weight_sets:
            raise ValueError(f"{program.name}: unknown weight set {program.weights!r:.80}")
        platforms = program.platforms
        if platforms is not None and (
            not platforms
            or len(set(platforms)) != len(platforms)
            or not set(platforms) <= set(PLATFORMS)
        ):
            known = ", ".join(PLATFORMS)
            raise ValueError(
                f"{program.name}: expected platforms of {known}, each once; found {platforms!r:.80}"
            )
        calls = calls or program.calls is not None
    if (config.mesh, config.weight_shardings, config.requirement.device_count) != (None,) * 3:
        from prejit.runtime.format.checks.seldom_parts import check_mesh

        check_mesh(config)
    models: tuple[Config, ...] = (config,)
    if config.draft is not None:
        from prejit.runtime.format.checks.seldom_parts import parted  # few have any

        models = parted(config)
    for each in models:
        _check_cache(each)
        _check_programs(each)
        if each.decoder is not None:
            _check_decoder(each)
    _check_kernels(config)
    _check_chunks(config)
    model = config.encoder or config.images
    if model or config.libraries is not None or config.recorded is not None or calls:
        from prejit.runtime.format.checks import seldom_parts

        seldom_parts.check_seldom_parts(config, path)
    until = None if config.portable is None else config.portable.readable_until
    if until is not None and not _is_date(until):
        raise ValueError(f"readable_until: expected YYYY-MM-DD, found {until!r:.80}")
    return config


def _check_kernels(config: Config) -> None:
    """Check that programs which call kernels have a library, for a CPU level that the requirement covers."""
    kernels = config.kernels
    calling = [program for program in config.programs if program.kernels is not None]
    if not all(program.kernels for program in calling):
        raise ValueError("expected 'kernels' of a program to be true or absent, found false")
    if kernels is None:
        if calling:
            raise ValueError(
                f"{calling[0].name}: it calls kernels, and the config names no library"
            )
        return
    if not calling:
        raise ValueError("expected a program that calls the library's kernels, found none")
    if config.requirement.platform != "cpu":
        raise ValueError(f"expected kernels for cpu, found {config.requirement.platform!r:.80}")
    if not is_digest(kernels.digest):
        raise ValueError(f"kernels: expected a digest, found {kernels.digest!r:.80}")
    if (features := KERNEL_LEVELS.get(kernels.level)) is None:
        levels = ", ".join(KERNEL_LEVELS)
        raise ValueError(f"kernels: level: expected one of {levels}; found {kernels.level!r:.80}")
    # The library uses them without asking the CPU: what lacks one would end in SIGILL.
    if missing := sorted(set(features) - set(config.requirement.cpu_features)):
        raise ValueError(
            f"kernels: expected all extensions of {kernels.level} in the requirement, found none of "
            f"{', '.join(missing)}"
        )
    names = kernels.handlers
    if not names or list(names) != sorted(set(names)):
        raise ValueError(f"kernels: expected names, each once, sorted; found {names!r:.80}")


@rejecting
def check_kernels_layer(config: Config, manifest: ImageManifest, path: str) -> None:
    """7. Check that the kernel library of a config is the only kernel layer of its manifest."""
    named = None if config.kernels is None else config.kernels.digest
    layers = [at for at in manifest.layers if at.mediaType == KERNELS_MEDIA_TYPE]
    found = next((at.digest for at in layers), None)
    if named != found:
        raise ValueError(
            f"expected kernels {named or 'none'}, as the config; found {found or 'no layer'}"
        )


@rejecting
def check_chunks_layers(config: Config, manifest: ImageManifest, path: str) -> None:
    """7. Check that chunks are of layers of the manifest, and cover each of these layers."""
    # A media type of several layers would not say which one the chunks are of.
    layers = (at for at in manifest.layers if at.mediaType != LIBRARY_MEDIA_TYPE)
    sizes = {at.mediaType: at.size for at in layers}
    for media_type, chunks in (config.chunks or {}).items():
        if (size := sizes.get(media_type)) is None:
            raise ValueError(f"chunks: expected media types of layers, found {media_type!r:.80}")
        expected = -(-size // chunks.size)
        if len(chunks.digests) != expected:
            raise ValueError(
                f"chunks of {media_type}: expected {expected} for {size} bytes in chunks of "
                f"{chunks.size}, found {len(chunks.digests)}"
            )


def _check_chunks(config: Config) -> None:
    for media_type, chunks in (config.chunks or {}).items():
        where = f"chunks of {media_type!r:.80}"
        if chunks.algorithm != CHUNK_ALGORITHM:
            raise ValueError(f"{where}: expected {CHUNK_ALGORITHM}, found {chunks.algorithm!r:.80}")
        if not limits.MIN_CHUNK_BYTES <= chunks.size <= limits.MAX_CHUNK_BYTES:
            raise ValueError(
                f"{where}: expected a size of {limits.MIN_CHUNK_BYTES} to {limits.MAX_CHUNK_BYTES} "
                f"bytes, found {chunks.size}"
            )
        # Without a digest nothing would verify that a layer is empty.
        if not chunks.digests or not all(map(_HEX_DIGEST.fullmatch, chunks.digests)):
            raise ValueError(f"{where}: expected digests of 64 hexadecimal digits, at least one")
        if not is_digest(chunks.verity):
            raise ValueError(
                f"{where}: expected verity of sha256: and 64 hexadecimal digits, "
                f"found {chunks.verity!r:.80}"
            )


def segments_of(config: Config) -> dict[str, list[Segment]]:
    """Return the frames of each pack of a target, by the pack's media type. Programs may share a frame."""
    programs = config.programs
    return {
        EXECUTABLES_MEDIA_TYPE: [program.executable for program in programs],
        PORTABLE_MEDIA_TYPE: [
            *(program.portable for program in programs),
            *(program.symbolic for program in programs if program.symbolic is not None),
        ],
        RECORDED_MEDIA_TYPE: [program.entry for program in config.recorded or ()],
    }


@rejecting
def check_packs(config: Config, manifest: ImageManifest, path: str) -> None:
    """7. Check that frames lie in their packs, and that a pack does not decompress to too many bytes."""
    for media_type, segments in segments_of(config).items():
        if not segments:
            continue
        size = manifest.layer(media_type).size
        raw_bytes = 0
        for segment in set(segments):
            start, end = segment.offset, segment.offset + segment.size
            if not 0 <= start <= end <= size:
                raise ValueError(
                    f"{media_type}: expected frames in {size} bytes, found {start} to {end}"
                )
            if not 0 <= segment.raw_size <= limits.MAX_PROGRAM_BYTES:
                raise ValueError(
                    f"{media_type}: raw_size: expected 0 to {limits.MAX_PROGRAM_BYTES}, "
                    f"found {segment.raw_size}"
                )
            raw_bytes += segment.raw_size
        most = limits.FREE_UNPACKED_BYTES + limits.MAX_UNPACKED_RATIO * size
        if raw_bytes > most:
            raise ValueError(
                f"{media_type}: expected programs of at most {most} bytes in {size}, found {raw_bytes}"
            )


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text  # it takes other spellings as well
    except ValueError:
        return False


def _check_cache(config: Config) -> None:
    """Check the cache of a decoder, what it reads and with which tokens it starts."""
    decoder = config.decoder
    if decoder is None:
        return
    if decoder.start_token_ids is not None:
        from prejit.runtime.format.checks.seldom_parts import check_start_tokens

        check_start_tokens(decoder, decoder.start_token_ids)
    try:
        source_array(decoder)
        arrays = cache_arrays(decoder)
        if config.mesh is not None and any(len(array.shape) != 4 for array in arrays):
            raise ValueError("cache: expected arrays of four axes on a mesh")
    except ValueError as error:
        raise ValueError(f"decoder: {error}") from error


def _check_programs(config: Config) -> None:
    """Check that each program has a known kind, with the sizes and the signature of that kind."""
    kinds, signatures = (*BUCKETS, "call"), Signatures(config)
    seen = set[tuple[str, ...]]()
    for program in config.programs:
        name, kind, bucket = program.name, program.kind, program.bucket
        if kind not in kinds:
            raise ValueError(f"{name}: kind: expected {', '.join(kinds)}; found {kind!r:.80}")
        if (cost := program.cost_microseconds) is not None and cost < 0:
            raise ValueError(f"{name}: cost_microseconds: expected 0 or more, found {cost}")
        if kind == "call":
            if (program.symbolic is None) != (program.open_sizes is None):
                raise ValueError(f"{name}: expected 'symbolic' and 'open_sizes' together")
            continue
        if of_user := [field for field in USER_FIELDS if getattr(program, field) is not None]:
            raise ValueError(f"{name}: expected {of_user[0]!r} of 'call' alone")
        other = "images" if kind.startswith("image") else "encoder"
        model = "decoder" if kind in DECODER_KINDS else other
        if getattr(config, model) is None:
            raise ValueError(f"{name}: expected {model!r} in the config, found none")
        if kind == "encode" and config.decoder is not None and config.decoder.source is None:
            raise ValueError(f"{name}: expected 'source' in the decoder, found none")
        sizes = BUCKETS[kind]
        if "sentences" in bucket and kind in ENCODER_KINDS:
            sizes += ("sentences",)
        if bucket.keys() != {*sizes}:
            expected, found = ", ".join(sizes), ", ".join(sorted(bucket)) or "nothing"
            raise ValueError(f"{name}: bucket: expected {expected}; found {found:.80}")
        for size, value in bucket.items():
            most = limits.MAX_BATCH if size in ("batch", "source_batch") else limits.MAX_SIZE
            if not 0 < value <= most:
                raise ValueError(f"{name}: {size}: expected 1 to {most}, found {value!r:.80}")
        if (key := (kind, *(str(bucket[size]) for size in sizes))) in seen:
            raise ValueError(f"{name}: expected one {kind} program of its bucket")
        seen.add(key)
        if program.weights is None and kind not in WITHOUT_WEIGHTS:
            raise ValueError(f"{name}: expected 'weights' for a {kind} program, found none")
        arguments, results = signatures.of(program)
        if program.arguments != arguments:
            raise ValueError(f"{name}: arguments{difference(program.arguments, arguments)}")
        if program.results != results:
            raise ValueError(f"{name}: results{difference(program.results, results)}")


def _check_decoder(config: Config) -> None:
    """Check that each batch has every kind of program for each context, and the copies to grow a cache."""
    buckets: dict[str, set[tuple[int, ...]]] = {kind: set() for kind in DECODER_KINDS}
    drafts = set[int]()
    for program in config.programs:
        if program.kind in DECODER_KINDS:
            sizes = tuple(program.bucket[name] for name in BUCKETS[program.kind])
            whole = program.kind in ("copy", "encode")
            buckets[program.kind].add(sizes if whole else sizes[:2])
        if program.kind == "prefill" and program.bucket["prompt"] > program.bucket["context"]:
            raise ValueError(f"{program.name}: prompt: expected at most its context")
        if program.kind == "verify":
            drafts.add(program.bucket["draft"])
    if not buckets["decode"]:
        raise ValueError("expected a decode program for the decoder, found none")
    batches = sorted({batch for batch, _ in buckets["decode"]})
    contexts = sorted({context for _, context in buckets["decode"]})
    # No more than there are programs: a forged table could have a grid that fits into no memory.
    for place, (batch, context) in enumerate(itertools.product(batches, contexts)):
        if place > len(buckets["decode"]) or (batch, context) not in buckets["decode"]:
            raise ValueError(f"decode of batch {batch} and context {context}: expected one")
    grid = buckets["decode"]
    for kind in ("prefill", "verify"):
        if kind == "verify" and not buckets[kind]:
            continue
        for batch, context in sorted(grid ^ buckets[kind]):
            wanted = "one" if (batch, context) in grid else "none without a decode program"
            raise ValueError(f"{kind} of batch {batch} and context {context}: expected {wanted}")
    if config.decoder is not None and (config.decoder.source is not None or buckets["encode"]):
        from prejit.runtime.format.checks.seldom_parts import check_sources

        check_sources(config.decoder, buckets["encode"], batches[0], contexts)
    if config.decoder is not None and config.decoder.adapters is not None:
        from prejit.runtime.format.checks.adapter_stacks import check_adapted

        check_adapted(config)
    if len(drafts) > 1:
        raise ValueError("expected one draft of all verify programs, found several")
    copies = {(batch, context, batches[0], context) for batch, context in grid}
    copies |= {
        (batch, longer, batch, shorter)
        for batch in batches
        for shorter, longer in itertools.pairwise(contexts)
    }
    for batch, context, source_batch, source_context in sorted(copies - buckets["copy"]):
        raise ValueError(
            f"expected a program that copies caches of {source_batch} x {source_context} to "
            f"{batch} x {context}, found none"
        )


@rejecting
def check_array(text: str, mesh: Mesh | None, path: str) -> Array:
    """7. Return an argument or result, which must have the format's spelling and split evenly over the mesh.

    A program's arrays are parsed when the program is first used: a table may have hundreds of programs.
    """
    array = Array.parse(text)
    if array.sharding:
        from prejit.runtime.format.checks.seldom_parts import check_split

        check_split(array.sharding, array.shape, mesh)
    return array


@rejecting
def check_weight_sets(config: Config, shapes: Mapping[str, tuple[int, ...]], path: str) -> None:
    """10. Check that the weights layer has every tensor of the config, and that the mesh splits each evenly.

    `shapes` has the shapes of the tensors in the weights layer, by name.
    """
    for name, members in config.weight_sets.items():
        if missing := [tensor for tensor in members if tensor not in shapes]:
            raise ValueError(f"weight set {name!r:.80}: no tensor {missing[0]!r:.80}")
    if config.encoder is not None:
        from prejit.runtime.format.checks.seldom_parts import check_layer_shapes

        check_layer_shapes(config, config.encoder.layers, shapes)
    if config.weight_shardings:
        from prejit.runtime.format.checks.seldom_parts import check_weight_shardings

        check_weight_shardings(config, shapes)
