"""A second reader of bundles, written from docs/bundle-format.md alone. It imports nothing of prejit.

It reads all that a bundle says, formats 1 and 2, asserts what the document says must be, and tells which
target serves a machine. It runs no program.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import safetensors
import zstandard

TYPE = "application/vnd.prejit."
VERSION = r"\d+(?:\.[0-9A-Za-z]+)*(?:[.+-][0-9A-Za-z.]+)?"
TEXT = {  # axes that are text: format 1 has the first four, as it has `cpu_features`
    "platform": r"[a-z]+",
    "architecture": r"[a-z][a-z0-9_]*",
    "jaxlib": VERSION,
    "plugin": rf"[a-z0-9\-]+ {VERSION}",
    "cuda": VERSION,
    "driver": VERSION,
    "device_kind": r"[ -~]+",
    "compute_capability": r"\d+\.\d+",
    "topology": r"[1-9]\d*(?:x[1-9]\d*)*",
}
LISTS = {
    "cpu_features": r"[a-z0-9.\-]+",
    "xla_flags": r"--\S+",
    "environment": r"[A-Z][A-Z0-9_]*=.*",
}
NUMBERS = {"device_count": 1, "device_memory_bytes": 0}  # with the least of each


@dataclass(frozen=True)
class Argument:
    path: list[str | int]
    dtype: str
    shape: list[int]
    donated: bool
    split: list[str]


@dataclass(frozen=True)
class Program:
    said: dict[str, Any]
    arguments: list[Argument]
    results: list[Argument]
    executable: bytes
    portable: bytes


@dataclass(frozen=True)
class Target:
    name: str
    needs: dict[str, Any]
    config: dict[str, Any]
    programs: dict[str, Program]
    tensors: dict[str, dict[str, Any]]
    """By name, as safetensors tells of them."""


def read(bundle: Path) -> tuple[int, list[Target]]:
    """The format of a bundle, and its targets in order."""
    assert (bundle / "oci-layout").read_bytes() == b'{"imageLayoutVersion":"1.0.0"}'
    content = (bundle / "index.json").read_bytes()
    index = json.loads(content)
    assert content == canonical(index)
    written = {"1": 1, "2": 2}[index["annotations"]["dev.prejit.format"]]
    told = index["annotations"].pop("dev.prejit.index-digest")
    assert told == digest_of(canonical(index))
    assert index["artifactType"] == f"{TYPE}bundle.v1"
    targets = [read_target(bundle, found, written) for found in index["manifests"]]
    assert len({target.name for target in targets}) == len(targets) > 0
    return written, targets


def read_target(bundle: Path, descriptor: dict[str, Any], written: int) -> Target:
    name = descriptor["annotations"]["org.opencontainers.image.ref.name"]
    needs = json.loads(descriptor["annotations"]["dev.prejit.requirement"])
    check_requirement(needs)
    manifest = parsed(bundle, descriptor)
    config = parsed(bundle, manifest["config"])
    assert (config["format"], config["target"], config["requirement"]) == (written, name, needs)
    kinds = [layer["mediaType"].removeprefix(TYPE) for layer in manifest["layers"]]
    assert len(set(kinds)) == len(kinds)
    layers = {
        kind: blob(bundle, layer) for kind, layer in zip(kinds, manifest["layers"], strict=True)
    }
    mesh = config.get("mesh")
    sizes = {} if mesh is None else {"data": mesh["data"], "tensor": mesh["tensor"]}
    devices = math.prod(sizes.values())
    assert all(size >= 1 for size in sizes.values())
    assert devices <= 4096
    if "device_count" in needs or (devices > 1 and needs["platform"] != "cpu"):
        assert needs["device_count"] == devices
    if "readable_until" in config.get("portable", {}):
        date.fromisoformat(config["portable"]["readable_until"])
    programs = {}
    for said in config["programs"]:
        platforms = said.get("platforms", ["cpu"])
        assert platforms
        assert len(set(platforms)) == len(platforms)
        assert set(platforms) <= {"cpu", "cuda", "tpu"}
        assert said.get("weights") in (None, *config["weight_sets"])
        programs[said["name"]] = Program(
            said,
            [parse_argument(text, sizes) for text in said["arguments"]],
            [parse_argument(text, sizes) for text in said["results"]],
            unpack(layers["executables.v1+zstd"], said["executable"]),
            unpack(layers["stablehlo.v1+zstd"], said["portable"]),
        )
    assert len(programs) == len(config["programs"])
    tensors = read_weights(layers.get("weights.v1.safetensors"), config, sizes)
    return Target(name, needs, config, programs, tensors)


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def blob(bundle: Path, descriptor: dict[str, Any]) -> bytes:
    name = descriptor["digest"].removeprefix("sha256:")
    content = (bundle / "blobs" / "sha256" / name).read_bytes()
    assert descriptor["digest"] == digest_of(content)
    assert descriptor["size"] == len(content)
    return content


def parsed(bundle: Path, descriptor: dict[str, Any]) -> dict[str, Any]:
    content = blob(bundle, descriptor)
    found: dict[str, Any] = json.loads(content)
    assert content == canonical(found)
    return found


def check_requirement(needs: dict[str, Any]) -> None:
    assert needs.keys() <= TEXT.keys() | LISTS.keys() | NUMBERS.keys()
    assert {"platform", "architecture", "cpu_features", "jaxlib"} <= needs.keys()
    for axis, form in TEXT.items():
        assert axis not in needs or re.fullmatch(form, needs[axis], re.ASCII)
    for axis, form in LISTS.items():
        assert all(re.fullmatch(form, item, re.ASCII) for item in needs.get(axis, ()))
    for axis, least in NUMBERS.items():
        assert axis not in needs or needs[axis] >= least


def parse_argument(text: str, mesh: dict[str, int]) -> Argument:
    path, end = json.JSONDecoder().raw_decode(text)
    found = re.fullmatch(r" (\w+)\[([\d,]*)\]( donated)?(?: @([a-z,]+))?", text[end:])
    assert found
    shape = [int(size) for size in found[2].split(",") if size]
    split = parse_split(found[4], shape, mesh) if found[4] else []
    return Argument(path, found[1], shape, found[3] is not None, split)


def parse_split(text: str, shape: list[int], mesh: dict[str, int]) -> list[str]:
    """One axis of the mesh, or nothing, for each dimension; it divides what it splits."""
    axes = text.split(",")
    assert len(axes) == len(shape)
    used = [axis for axis in axes if axis]
    assert used
    assert len(set(used)) == len(used)
    assert all(size % mesh[axis] == 0 for axis, size in zip(axes, shape, strict=True) if axis)
    return axes


def unpack(pack: bytes, segment: dict[str, Any]) -> bytes:
    frame = pack[segment["offset"] : segment["offset"] + segment["size"]]
    assert segment["digest"] == digest_of(frame)
    said = zstandard.get_frame_parameters(frame)
    assert said.content_size == segment["raw_size"]
    assert said.has_checksum
    raw = zstandard.ZstdDecompressor().decompress(frame)
    assert segment["raw_digest"] == digest_of(raw)
    return raw


def read_weights(
    layer: bytes | None, config: dict[str, Any], mesh: dict[str, int]
) -> dict[str, dict[str, Any]]:
    if layer is None:
        assert not any(config["weight_sets"].values())
        return {}
    size = int.from_bytes(layer[:8], "little")
    header = json.loads(layer[8 : 8 + size])
    tensors: dict[str, dict[str, Any]] = dict(safetensors.deserialize(layer))
    for name in tensors:
        starts_at = 8 + size + header[name]["data_offsets"][0]
        assert name.startswith(".gap") or starts_at % 64 == 0
    assert {name for names in config["weight_sets"].values() for name in names} <= tensors.keys()
    for name, text in config.get("weight_shardings", {}).items():
        parse_split(text, tensors[name]["shape"], mesh)
    return tensors


def shards(values: Any, split: list[str], mesh: dict[str, int]) -> list[Any]:
    """What each device of a mesh holds of an array, in the order of the devices."""
    found = []
    for device in range(math.prod(mesh.values())):
        place = {"data": device // mesh["tensor"], "tensor": device % mesh["tensor"]}
        cut = values
        for dimension, axis in enumerate(split):
            if axis:
                size = values.shape[dimension] // mesh[axis]
                start = place[axis] * size
                cut = cut.take(range(start, start + size), dimension)
        found.append(cut)
    return found


def served_by(targets: list[Target], machine: dict[str, Any]) -> str | None:
    """The target that a machine loads, by "Which target a machine loads"."""
    fitting = [target for target in targets if fits(target.needs, machine)]

    def preference(target: Target) -> tuple[bool, int, int]:
        features = target.needs["cpu_features"]
        other = target.needs.get("device_kind") != machine.get("device_kind")
        return other, -max(map(bits, features), default=0), -len(features)

    return min(fitting, key=preference).name if fitting else None  # of equals min takes the first


def bits(feature: str) -> int:
    if feature.startswith(("avx512", "amx")):
        return 512
    return 256 if feature.startswith(("avx", "fma", "f16c")) else 128


def fits(needs: dict[str, Any], machine: dict[str, Any]) -> bool:
    equal = ["platform", "architecture", "jaxlib", "plugin", "compute_capability", "topology"]
    equal += ["xla_flags", "environment", *(["device_kind"] if needs["platform"] == "tpu" else [])]
    at_least = ["device_memory_bytes", *([] if needs["platform"] == "cpu" else ["device_count"])]
    return (
        all(needs[axis] == machine.get(axis) for axis in equal if axis in needs)
        and set(needs["cpu_features"]) <= set(machine["cpu_features"])
        and all(needs[axis] <= machine.get(axis, -1) for axis in at_least if axis in needs)
        and all(
            axis not in needs or (axis in machine and reaches(axis, needs[axis], machine[axis]))
            for axis in ("cuda", "driver")
        )
    )


def reaches(axis: str, needed: str, found: str) -> bool:
    """Whether a version is at least another, and for CUDA of its major version."""
    wanted, has = ([int(part) for part in re.findall("[0-9]+", text)] for text in (needed, found))
    has += [0] * (len(wanted) - len(has))
    return has >= wanted and (axis != "cuda" or has[0] == wanted[0])
