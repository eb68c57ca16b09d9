"""The checks between a file and its use, numbered in the order of docs/bundle-format.md. No file access.

Every function takes bytes and says whether they may be used; none of them reads, and none of them trusts
what a later check is for. Each raises RejectError with the file at fault.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

import zstandard

from prejit.runtime import bundle
from prejit.runtime.bundle import (
    MESH_AXES,
    Array,
    Config,
    Descriptor,
    Index,
    Manifest,
    Mesh,
    Requirement,
    Segment,
)
from prejit.runtime.errors import RejectError

NEWER_FORMAT_HINT = "this bundle was written by a newer prejit: upgrade prejit on this machine"
MAX_WEIGHTS_HEADER_BYTES = 100 << 20
"""As the safetensors library caps it."""
MAX_DIMENSIONS = 64
"""As NumPy caps them."""


def check_layout_file(content: bytes, path: str) -> None:
    """1. `oci-layout` has exactly the bytes that the format gives it."""
    if content != bundle.OCI_LAYOUT:
        raise RejectError(path, f"expected {bundle.OCI_LAYOUT!r}, found {content[:64]!r}")


def check_index(content: bytes, path: str) -> Index:
    """2. `index.json` is canonical, of a format we read, undamaged, and lists targets."""
    written = _format_of(content)
    if written is not None and written not in map(str, bundle.READABLE_FORMATS):
        newer = re.fullmatch("[1-9][0-9]{0,8}", written) and int(written) > bundle.FORMAT_VERSION
        formats = " or ".join(map(str, bundle.READABLE_FORMATS))
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
        check_descriptor(layer, layer.mediaType, 1 << 50, path)
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
    until = None if config.portable is None else config.portable.readable_until
    if until is not None and not _is_date(until):
        raise RejectError(path, f"readable_until: expected YYYY-MM-DD, found {until!r:.80}")
    return config


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
