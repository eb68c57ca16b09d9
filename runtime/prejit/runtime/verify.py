"""The checks between a file and its use, numbered in the order of docs/bundle-format.md. No file access.

Every function takes bytes and says whether they may be used; none of them reads, and none of them trusts
what a later check is for. Each raises RejectError with the file at fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import zstandard

from prejit.runtime import bundle
from prejit.runtime.bundle import (
    MESH_AXES,
    Array,
    Chat,
    Config,
    Descriptor,
    Encoder,
    Index,
    Kernels,
    Manifest,
    Mesh,
    Requirement,
    Segment,
)
from prejit.runtime.elf import read_shared_library
from prejit.runtime.errors import RejectError
from prejit.runtime.signatures import (
    BUCKETS,
    DECODER_KINDS,
    ENCODER_KINDS,
    WITHOUT_WEIGHTS,
    Signatures,
    difference,
    kinds_of,
)

if TYPE_CHECKING:
    from prejit.runtime.defaults import Defaults

NEWER_FORMAT_HINT = "this bundle was written by a newer prejit: upgrade prejit on this machine"
MAX_WEIGHTS_HEADER_BYTES = 100 << 20
"""As the safetensors library caps it."""
MAX_DIMENSIONS = 64
"""As NumPy caps them."""
_LAYER_CAPS = {
    bundle.CHAT_MEDIA_TYPE: bundle.MAX_CHAT_BYTES,
    bundle.GENERATION_MEDIA_TYPE: bundle.MAX_GENERATION_BYTES,
    bundle.KERNELS_MEDIA_TYPE: bundle.MAX_KERNELS_BYTES,
}
"""Of those that are read whole."""


def check_layout_file(content: bytes, path: str) -> None:
    """1. `oci-layout` has exactly the bytes that the format gives it."""
    if content != bundle.OCI_LAYOUT:
        raise RejectError(path, f"expected {bundle.OCI_LAYOUT!r}, found {content[:64]!r}")


def check_index(content: bytes, path: str) -> Index:
    """2. `index.json` is canonical, of a format we read, undamaged, and lists targets."""
    written = _format_of(content)
    if written is not None and written not in map(str, bundle.READABLE_FORMATS):
        newer = re.fullmatch("[1-9][0-9]{0,8}", written) and int(written) > bundle.FORMAT_VERSION
        *others, last = map(str, bundle.READABLE_FORMATS)
        formats = f"{', '.join(others)} or {last}"
        raise RejectError(
            path,
            f"expected bundle format {formats}, found {written!r:.80}",
            hint=NEWER_FORMAT_HINT if newer else None,
        )
    index = bundle.from_json(Index, content, path)
    if written is None:
        raise RejectError(path, f"expected {bundle.BUNDLE_FORMAT} in the annotations, found none")
    if (index.schemaVersion, index.mediaType, index.artifactType) != (
        2,
        bundle.INDEX_MEDIA_TYPE,
        bundle.ARTIFACT_TYPE,
    ):
        raise RejectError(path, f"expected an OCI image index of {bundle.ARTIFACT_TYPE}")
    expected = bundle.index_digest(index)
    found = index.annotations.get(bundle.INDEX_DIGEST)
    if found != expected:
        raise RejectError(path, f"expected {bundle.INDEX_DIGEST} {expected}, found {found}")
    if not index.manifests:
        raise RejectError(path, "expected at least one target, found none")
    for descriptor in index.manifests:
        check_descriptor(descriptor, bundle.MANIFEST_MEDIA_TYPE, bundle.MAX_MANIFEST_BYTES, path)
    names = [(descriptor.annotations or {}).get(bundle.REF_NAME) for descriptor in index.manifests]
    if len(set(names)) != len(names):
        raise RejectError(path, "expected each target once")
    return index


def _format_of(content: bytes) -> str | None:
    """The format that an index says it is of, even where its other keys are of a later one."""
    try:
        found = json.loads(content)["annotations"][bundle.BUNDLE_FORMAT]
    except (ValueError, RecursionError, LookupError, TypeError):
        return None
    return found if isinstance(found, str) else None


def target_of(descriptor: Descriptor, path: str) -> tuple[str, Requirement]:
    """3. A target's name and requirement, from its descriptor in the index."""
    annotations = descriptor.annotations or {}
    name = annotations.get(bundle.REF_NAME)
    requirement = annotations.get(bundle.REQUIREMENT)
    if not name or requirement is None:
        raise RejectError(
            path, f"expected {bundle.REF_NAME} and {bundle.REQUIREMENT} on each target"
        )
    encoded = requirement.encode("ascii", "replace")  # what is not ASCII is not canonical either
    return name, bundle.from_json(Requirement, encoded, path)


def check_descriptor(descriptor: Descriptor, media_type: str, max_bytes: int, path: str) -> None:
    """4. A descriptor names a sha256 digest, the expected media type and a size under the cap."""
    if descriptor.mediaType != media_type:
        raise RejectError(path, f"expected media type {media_type}, found {descriptor.mediaType}")
    if not bundle.is_digest(descriptor.digest):
        raise RejectError(path, f"expected a sha256 digest, found {descriptor.digest!r:.80}")
    if not 0 <= descriptor.size <= max_bytes:
        raise RejectError(path, f"expected at most {max_bytes} bytes, found {descriptor.size}")


def check_digest(content: bytes | memoryview, digest: str, path: str) -> None:
    """5 and 8. A blob's bytes are those that its digest names."""
    found = bundle.digest_of(content)
    if found != digest:
        raise RejectError(path, f"expected {digest}, found {found}")


def check_manifest(content: bytes, path: str) -> Manifest:
    """6. A target's manifest is canonical and names layers that we know, each once, programs among them."""
    manifest = bundle.from_json(Manifest, content, path)
    if (manifest.schemaVersion, manifest.mediaType, manifest.artifactType) != (
        2,
        bundle.MANIFEST_MEDIA_TYPE,
        bundle.ARTIFACT_TYPE,
    ):
        raise RejectError(path, f"expected an OCI image manifest of {bundle.ARTIFACT_TYPE}")
    check_descriptor(manifest.config, bundle.CONFIG_MEDIA_TYPE, bundle.MAX_CONFIG_BYTES, path)
    media_types = [layer.mediaType for layer in manifest.layers]
    for layer in manifest.layers:
        if (
            layer.mediaType not in bundle.LAYER_MEDIA_TYPES
            or media_types.count(layer.mediaType) > 1
        ):
            raise RejectError(path, f"unexpected layer {layer.mediaType}")
        cap = _LAYER_CAPS.get(layer.mediaType, 1 << 50)
        check_descriptor(layer, layer.mediaType, cap, path)
    for media_type in (bundle.EXECUTABLES_MEDIA_TYPE, bundle.PORTABLE_MEDIA_TYPE):
        if media_type not in media_types:
            raise RejectError(path, f"expected a layer {media_type}, found none")
    return manifest


def check_config(
    content: bytes, written: str, target: str, requirement: Requirement, path: str
) -> Config:
    """7. A target's config is canonical and agrees with the index that led to it, and with itself.

    Args:
        content: of the config blob.
        written: the format that the index says it is of.
        target: its name, from its descriptor in the index.
        requirement: from there as well.
        path: the file, for errors.
    """
    config = bundle.from_json(Config, content, path)
    if str(config.format) != written:
        raise RejectError(path, f"expected format {written}, as the index, found {config.format}")
    if config.target != target or config.requirement != requirement:
        raise RejectError(path, f"expected target {target!r} with the requirement of the index")
    names = [program.name for program in config.programs]
    if len(set(names)) != len(names):
        raise RejectError(path, "expected each program once")
    for program in config.programs:
        if program.weights is not None and program.weights not in config.weight_sets:
            raise RejectError(path, f"{program.name}: unknown weight set {program.weights!r}")
        platforms = program.platforms
        if platforms is not None and (
            not platforms
            or len(set(platforms)) != len(platforms)
            or not set(platforms) <= set(bundle.PLATFORMS)
        ):
            known = ", ".join(bundle.PLATFORMS)
            raise RejectError(
                path,
                f"{program.name}: expected platforms of {known}, each once; found {platforms!r:.80}",
            )
    _check_mesh(config, path)
    _check_programs(config, path)
    _check_kernels(config, path)
    if config.decoder is not None:
        _check_decoder(config, path)
    if config.encoder is not None:
        _check_encoder(config, config.encoder, path)
    until = None if config.portable is None else config.portable.readable_until
    if until is not None and not _is_date(until):
        raise RejectError(path, f"readable_until: expected YYYY-MM-DD, found {until!r:.80}")
    return config


def _check_kernels(config: Config, path: str) -> None:
    """Programs that call kernels have a library, of a CPU, whose level the requirement covers."""
    kernels = config.kernels
    calling = [program for program in config.programs if program.kernels is not None]
    if not all(program.kernels for program in calling):
        raise RejectError(path, "expected 'kernels' of a program to be true or absent, found false")
    if kernels is None:
        if calling:
            raise RejectError(
                path, f"{calling[0].name}: it calls kernels, and the config names no library"
            )
        return
    if config.format < 4:
        raise RejectError(path, f"expected kernels since format 4, found them in {config.format}")
    if not calling:
        raise RejectError(path, "expected a program that calls the library's kernels, found none")
    if config.requirement.platform != "cpu":
        raise RejectError(path, f"expected kernels for cpu, found {config.requirement.platform!r}")
    if not bundle.is_digest(kernels.digest):
        raise RejectError(path, f"kernels: expected a digest, found {kernels.digest!r:.80}")
    names = kernels.handlers
    if not names or list(names) != sorted(set(names)):
        raise RejectError(path, f"kernels: expected names, each once, sorted; found {names!r:.80}")


def check_kernels_layer(config: Config, manifest: Manifest, path: str) -> None:
    """7. The library of kernels that a config names is a layer of its manifest, and no other one is.

    Args:
        config: of a target.
        manifest: of the same target.
        path: the manifest's file, for errors.
    """
    named = None if config.kernels is None else config.kernels.digest
    layers = [at for at in manifest.layers if at.mediaType == bundle.KERNELS_MEDIA_TYPE]
    found = next((at.digest for at in layers), None)
    if named != found:
        raise RejectError(
            path, f"expected kernels {named or 'none'}, as the config; found {found or 'no layer'}"
        )


def check_kernels(content: bytes, kernels: Kernels, path: str) -> None:
    """9. A library of kernels: the bytes that its digest names, which export what the config says.

    The dynamic linker runs code of a library before anybody calls it; nothing unverified may reach it.
    """
    check_digest(content, kernels.digest, path)
    try:
        exported = read_shared_library(content).exported
    except ValueError as error:
        raise RejectError(path, f"expected a shared library: {error}") from error
    expected = tuple(sorted(bundle.KERNEL_PREFIX + name for name in kernels.handlers))
    if exported != expected:
        raise RejectError(
            path, f"expected exports {', '.join(expected)}, found {', '.join(exported) or 'none'}"
        )


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text  # it takes other spellings as well
    except ValueError:
        return False


def _check_mesh(config: Config, path: str) -> None:
    mesh, needed = config.mesh, config.requirement.device_count
    size = 1 if mesh is None else mesh.size
    if size > bundle.MAX_MESH_DEVICES:
        raise RejectError(
            path, f"expected a mesh of at most {bundle.MAX_MESH_DEVICES} devices, found {size}"
        )
    # A process makes as many CPU devices as it wants: only accelerators have to be counted.
    if needed != size and not (
        needed is None and (size == 1 or config.requirement.platform == "cpu")
    ):
        raise RejectError(
            path, f"expected device_count {size}, the size of the mesh; found {needed}"
        )
    if config.weight_shardings is not None and mesh is None:
        raise RejectError(path, "expected a mesh for weight_shardings, found none")


def _check_programs(config: Config, path: str) -> None:
    """Each program is of a kind that its format knows, and has the sizes and the signature of that kind."""
    kinds, signatures = kinds_of(config.format), Signatures(config)
    seen = set[tuple[str, ...]]()
    for program in config.programs:
        name, kind, bucket = program.name, program.kind, program.bucket
        if kind not in kinds:
            raise RejectError(
                path, f"{name}: kind: expected {', '.join(kinds)}; found {kind!r:.80}"
            )
        if (cost := program.cost_microseconds) is not None and cost < 0:
            raise RejectError(path, f"{name}: cost_microseconds: expected 0 or more, found {cost}")
        if kind == "call":
            continue
        model = "decoder" if kind in DECODER_KINDS else "encoder"
        if getattr(config, model) is None:
            raise RejectError(path, f"{name}: expected {model!r} in the config, found none")
        if bucket.keys() != set(BUCKETS[kind]):
            expected, found = ", ".join(BUCKETS[kind]), ", ".join(sorted(bucket)) or "nothing"
            raise RejectError(path, f"{name}: bucket: expected {expected}; found {found:.80}")
        for size, value in bucket.items():
            if not 0 < value <= bundle.MAX_SIZE:
                raise RejectError(
                    path, f"{name}: {size}: expected 1 to {bundle.MAX_SIZE}, found {value!r:.80}"
                )
        key = (kind, *(str(bucket[size]) for size in BUCKETS[kind]))
        if key in seen:
            raise RejectError(path, f"{name}: expected one {kind} program of its bucket")
        seen.add(key)
        if program.weights is None and kind not in WITHOUT_WEIGHTS:
            raise RejectError(path, f"{name}: expected 'weights' for a {kind} program, found none")
        arguments, results = signatures.of(program)
        if program.arguments != arguments:
            differing = difference(program.arguments, arguments)
            raise RejectError(path, f"{name}: arguments{differing}")
        if program.results != results:
            raise RejectError(path, f"{name}: results{difference(program.results, results)}")


def _check_decoder(config: Config, path: str) -> None:
    """Each batch has a program of each kind for each context, and what a cache needs to grow."""
    buckets: dict[str, set[tuple[int, ...]]] = {kind: set() for kind in DECODER_KINDS}
    drafts = set[int]()
    for program in config.programs:
        if program.kind in DECODER_KINDS:
            sizes = tuple(program.bucket[name] for name in BUCKETS[program.kind])
            buckets[program.kind].add(sizes if program.kind == "copy" else sizes[:2])
        if program.kind == "prefill" and program.bucket["prompt"] > program.bucket["context"]:
            raise RejectError(path, f"{program.name}: prompt: expected at most its context")
        if program.kind == "verify":
            drafts.add(program.bucket["draft"])
    if not buckets["decode"]:
        raise RejectError(path, "expected a decode program for the decoder, found none")
    batches = sorted({batch for batch, _ in buckets["decode"]})
    contexts = sorted({context for _, context in buckets["decode"]})
    grid = {(batch, context) for batch in batches for context in contexts}
    for kind in ("decode", "prefill", "verify"):
        if kind == "verify" and not buckets[kind]:
            continue
        for batch, context in sorted(grid ^ buckets[kind]):
            wanted = "one" if (batch, context) in grid else "none without a decode program"
            raise RejectError(
                path, f"{kind} of batch {batch} and context {context}: expected {wanted}"
            )
    if len(drafts) > 1:
        raise RejectError(path, "expected one draft of all verify programs, found several")
    if config.format < 3:
        return
    copies = {(batch, context, batches[0], context) for batch, context in grid}
    copies |= {
        (batch, longer, batch, shorter)
        for batch in batches
        for shorter, longer in pairwise(contexts)
    }
    for batch, context, source_batch, source_context in sorted(copies - buckets["copy"]):
        raise RejectError(
            path,
            f"expected a program that copies caches of {source_batch} x {source_context} to "
            f"{batch} x {context}, found none",
        )


def _check_encoder(config: Config, encoder: Encoder, path: str) -> None:
    """Each bucket has three programs, called by their names; layers are alike but for their weights."""
    buckets: dict[str, set[tuple[int, int]]] = {kind: set() for kind in ENCODER_KINDS}
    for program in config.programs:
        if program.kind not in ENCODER_KINDS:
            continue
        batch, length = program.bucket["batch"], program.bucket["length"]
        expected = f"encode/b{batch}-t{length}/{program.kind}"
        if program.name != expected:
            raise RejectError(path, f"{program.name!r:.80}: expected the name {expected!r}")
        buckets[program.kind].add((batch, length))
        if program.kind == "layer" and program.weights not in encoder.layers:
            raise RejectError(path, f"{program.name}: expected a weight set of encoder.layers")
    every = set[tuple[int, int]]().union(*buckets.values())
    if not every:
        raise RejectError(path, "expected programs for the encoder, found none")
    for kind in ENCODER_KINDS:
        for batch, length in sorted(every - buckets[kind]):
            raise RejectError(path, f"expected encode/b{batch}-t{length}/{kind}, found none")
    for name in encoder.layers:
        if name not in config.weight_sets:
            raise RejectError(path, f"encoder: layers: unknown weight set {name!r:.80}")
    counts = {len(config.weight_sets[name]) for name in encoder.layers}
    if len(counts) > 1:
        raise RejectError(path, "encoder: layers: expected weight sets of as many tensors each")


def check_array(text: str, mesh: Mesh | None, path: str) -> Array:
    """7. An argument or result is spelled as the format has it, and its mesh splits it evenly.

    Of a program, when it is wanted: a table of hundreds is not parsed whole.
    """
    try:
        array = Array.parse(text)
        _check_split(array.sharding, array.shape, mesh)
    except ValueError as error:
        raise RejectError(path, str(error)) from error
    return array


def _check_split(sharding: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | None) -> None:
    sizes = {} if mesh is None else dict(zip(MESH_AXES, (mesh.data, mesh.tensor), strict=True))
    for axis, extent in zip(sharding, shape, strict=False):  # nothing split: no sharding
        if axis and (axis not in sizes or extent % sizes[axis]):
            raise ValueError(
                f"expected a mesh whose {axis!r} divides {extent}, found {sizes.get(axis, 'no mesh')}"
            )


def unpack(frame: bytes, segment: Segment, path: str) -> bytes:
    """9. A frame of a pack: digest, bounded decompression, digest. Gives the bytes that were verified."""
    check_digest(frame, segment.digest, path)
    if not 0 <= segment.raw_size <= bundle.MAX_PROGRAM_BYTES:
        raise RejectError(
            path, f"expected at most {bundle.MAX_PROGRAM_BYTES} bytes, found {segment.raw_size}"
        )
    try:
        parameters = zstandard.get_frame_parameters(frame)
        if parameters.content_size != segment.raw_size or not parameters.has_checksum:
            raise RejectError(path, "expected a zstd frame with its content size and a checksum")
        raw = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=segment.raw_size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise RejectError(path, f"expected a zstd frame: {error}") from error
    check_digest(raw, segment.raw_digest, path)
    return raw


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Where a tensor lies in the weights layer: byte offsets from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


SAFETENSORS_DTYPES = {
    # safetensors' name -> (NumPy's or ml_dtypes' name, bytes an element)
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
    "C64": ("complex64", 8),
}


def check_weights(content: memoryview, path: str) -> dict[str, TensorSlice]:
    """10. A weights layer is a safetensors file whose tensors lie inside it, aligned and apart.

    8 bytes: size of the header, little-endian | header: JSON | tensors, each at a multiple of 64
    """
    if len(content) < 8:
        raise RejectError(path, f"expected a safetensors file, found {len(content)} bytes")
    header_size = int.from_bytes(content[:8], "little")
    if not 0 < header_size <= min(MAX_WEIGHTS_HEADER_BYTES, len(content) - 8):
        raise RejectError(path, f"expected a safetensors header, found one of {header_size} bytes")
    data = 8 + header_size
    try:
        header = json.loads(bytes(content[8:data]), object_pairs_hook=_each_key_once)
        slices = {
            name: _slice(entry, data) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RejectError(path, f"expected a safetensors header: {error!r:.80}") from error
    end = data
    for name, tensor in sorted(slices.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start < end or tensor.end > len(content):
            raise RejectError(
                path, f"{name}: its bytes are not inside the file and apart from others"
            )
        gap = name.startswith(bundle.GAP_PREFIX)
        if not gap and tensor.start % bundle.WEIGHTS_ALIGNMENT_BYTES:
            raise RejectError(path, f"{name}: expected at a multiple of 64, found {tensor.start}")
        end = tensor.end
    return slices


def check_weight_sets(config: Config, shapes: Mapping[str, tuple[int, ...]], path: str) -> None:
    """10. Every tensor that the config names is in the weights layer, and the mesh splits it evenly.

    Args:
        config: the program table.
        shapes: of the tensors of the weights layer, by name.
        path: the file, for errors.
    """
    for name, members in config.weight_sets.items():
        if missing := [tensor for tensor in members if tensor not in shapes]:
            raise RejectError(path, f"weight set {name!r}: no tensor {missing[0]!r}")
    layers = () if config.encoder is None else config.encoder.layers
    for name in layers:
        for first, other in zip(
            config.weight_sets[layers[0]], config.weight_sets[name], strict=True
        ):
            if shapes[first] != shapes[other]:
                raise RejectError(
                    path, f"{other}: expected the shape of {first}, found {list(shapes[other])}"
                )
    for name, text in (config.weight_shardings or {}).items():
        if name not in shapes:
            raise RejectError(path, f"weight_shardings: no tensor {name!r}")
        try:
            sharding = bundle.parse_sharding(text, len(shapes[name]))
            _check_split(sharding, shapes[name], config.mesh)
        except ValueError as error:
            raise RejectError(path, f"weight_shardings: {name}: {error}") from error
        if not sharding:
            raise RejectError(path, f"weight_shardings: {name}: expected a mesh axis, found none")


def check_chat(content: bytes, path: str) -> Chat:
    """11. A chat layer is canonical and holds at least one template, all of it Unicode.

    Whether a template parses is seen when it is first wanted: Jinja is no part of the format.
    """
    chat = bundle.from_json(Chat, content, path)
    if not chat.templates:
        raise RejectError(path, "expected at least one chat template, found none")
    for table in (chat.templates, chat.special_tokens):
        for name, text in table.items():
            try:
                f"{name}{text}".encode()
            except UnicodeEncodeError as error:
                raise RejectError(
                    path, f"{name!r:.80}: expected Unicode: {error.reason}"
                ) from error
            if not name:
                raise RejectError(path, "expected a name for each template and token, found none")
    return chat


def check_generation(content: bytes, written: int, path: str) -> Defaults:
    """12. A decoder's generation config is JSON, and what of it is followed can be used.

    Args:
        content: of the layer.
        written: the bundle's format. Programs of 1 and 2 take neither min_p nor repetition_penalty.
        path: of the layer.
    """
    from prejit.runtime.defaults import parse  # NumPy, which no other check needs

    try:
        found = parse(content)
    except ValueError as error:
        raise RejectError(path, str(error)) from error
    return found if written > 2 else replace(found, min_p=None, repetition_penalty=None)


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


def _slice(entry: dict[str, Any], data: int) -> TensorSlice:
    (start, end), shape = entry["data_offsets"], entry["shape"]
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS:
        raise TypeError(f"shape {shape}")
    if not all(type(extent) is int and extent >= 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    dtype, item_bytes = SAFETENSORS_DTYPES[entry["dtype"]]
    # NumPy multiplies what is not 0, even where the array is empty.
    if item_bytes * math.prod(extent or 1 for extent in shape) >= 1 << 63:
        raise ValueError(f"shape {shape}")
    size = item_bytes * math.prod(shape)
    if type(start) is not int or type(end) is not int or end - start != size:
        raise ValueError(f"data_offsets {start}, {end}")
    return TensorSlice(dtype, tuple(shape), data + start, data + end)
