"""Golden bundles in memory that are damaged, or changed with all digests right, as an attacker does."""

import contextlib
import hashlib
import json
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import zstandard
from blake3 import blake3

from .junk import cut, deep, edited, encoded, flipped, huge_numbers, wide, zeroed
from .junk import damaged as damaged_bytes

GOLDEN = Path(__file__).parents[1] / "format" / "v1"
BUNDLES = (
    *("call", "fleet", "mesh", "decoder", "encoder", "stored", "kernels", "chunks", "reader"),
    "recorded",
)
REQUIREMENT = "dev.prejit.requirement"


@dataclass
class Draft:
    root: Any
    index: Any
    targets: list[tuple[Any, Any]]
    blobs: dict[str, bytes]
    hooks: dict[str, Callable[[bytes], bytes]] = field(default_factory=dict)

    def files(self):
        """Return the bytes of every file by its name, with all digests right."""
        files = {"oci-layout": self._hooked("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')}
        blobs = dict(self.blobs)
        named = []
        for manifest, config in self.targets:
            content = self._hooked("config", encoded(config))
            with contextlib.suppress(TypeError, KeyError):
                manifest["config"] |= described(content)
            blobs[digest_of(content)] = content
            content = self._hooked("manifest", encoded(manifest))
            blobs[digest_of(content)] = content
            named.append(described(content))
        index = deepcopy(self.index)
        with contextlib.suppress(TypeError, KeyError, AttributeError):
            for at, new in zip(index["manifests"], named, strict=False):
                at |= new
        content = self._hooked("index", encoded(index))
        blobs[digest_of(content)] = content
        root = deepcopy(self.root)
        with contextlib.suppress(TypeError, KeyError, AttributeError, IndexError):
            for at, new in zip(root["manifests"], [described(content), *named], strict=False):
                at |= new
        files["index.json"] = self._hooked("root", encoded(root))
        # A file that nothing names is an error for `prejit verify`, and no load ever looks for it.
        texts = [*files.values(), *(each for each in blobs.values() if each.startswith(b"{"))]
        named = {digest for digest in blobs if any(digest.encode() in text for text in texts)}
        return files | {f"blobs/sha256/{digest[7:]}": blobs[digest] for digest in named}

    def _hooked(self, role, content):
        return self.hooks.get(role, bytes)(content)


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def described(content):
    return {"digest": digest_of(content), "size": len(content)}


@cache
def sound(name):
    path = GOLDEN / name
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def draft_of(name):
    """Return a golden bundle to change, without what is attached to it: that refers to its digest."""
    files = dict(sound(name))
    root = json.loads(files.pop("index.json"))

    def read(at):
        return json.loads(files.pop(f"blobs/sha256/{at['digest'][7:]}"))

    index = read(root["manifests"][0])
    manifests = [read(at) for at in index["manifests"]]
    attached = [read(at) for at in root["manifests"][1 + len(manifests) :]]
    del root["manifests"][1 + len(manifests) :]
    for at in (at for each in attached for at in (each["config"], *each["layers"])):
        files.pop(f"blobs/sha256/{at['digest'][7:]}", None)  # they share an empty config
    for manifest in manifests:
        manifest["annotations"].pop("dev.prejit.attached", None)
    targets = [(manifest, read(manifest["config"])) for manifest in manifests]
    del files["oci-layout"]
    blobs = {f"sha256:{file.rpartition('/')[2]}": content for file, content in files.items()}
    return Draft(root, index, targets, blobs)


# Damage: digests stay


def damaged(name, generator):
    """Return a kind of damage, and the files of a bundle after it. No digest is set right."""
    files = dict(sound(name))
    at = generator.choice(sorted(files))
    kind = generator.choice([*_DAMAGES, "blobs swapped", "gone"])
    if kind in _DAMAGES:
        files[at] = _DAMAGES[kind](files[at], generator)
    elif kind == "gone":
        del files[at]
    else:
        other = generator.choice(sorted(files))
        files[at], files[other] = files[other], files[at]
    return kind, files


_DAMAGES = {"bit flips": flipped, "cut or longer": cut, "range written": zeroed}


# Attacks: all digests are right


@cache
def bomb(size):
    """Return a zstd frame of so many zeros, and the digest of what it decompresses to."""
    hasher = hashlib.sha256()
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj(size=size)
    frame = b""
    for _ in range(size >> 20):
        hasher.update(bytes(1 << 20))
        frame += compressor.compress(bytes(1 << 20))
    return frame + compressor.flush(), f"sha256:{hasher.hexdigest()}"


def layer_of(draft, generator):
    """Return a config, one of its target's layers, and the layer's bytes."""
    manifest, config = generator.choice(draft.targets)
    layer = generator.choice(manifest["layers"])
    return config, layer, draft.blobs[layer["digest"]]


def put(draft, config, layer, content):
    """Replace a layer's bytes in one target; all that names them is right."""
    old, new = layer["digest"], digest_of(content)
    draft.blobs[new] = content
    layer |= described(content)
    if (kernels := config.get("kernels")) is not None and kernels["digest"] == old:
        kernels["digest"] = new
    if (chunks := config.get("chunks", {}).get(layer["mediaType"])) is not None:
        size = chunks["size"]
        pieces = [content[at : at + size] for at in range(0, len(content), size)]
        chunks["digests"] = [blake3(piece).hexdigest() for piece in pieces]
        chunks.pop("verity", None)


def attacked(name, generator):
    """Return a kind of attack, and the files of a bundle after it. All digests are right."""
    draft = draft_of(name)
    kind = generator.choice([*ATTACKS])
    ATTACKS[kind](draft, generator)
    return kind, draft.files()


def _edited_json(draft, generator):
    place = generator.randrange(len(draft.targets))
    manifest, config = draft.targets[place]
    match generator.choice(["config", "config", "config", "manifest", "index", "root", "needs"]):
        case "config":
            draft.targets[place] = manifest, edited(config, generator)
        case "manifest":
            draft.targets[place] = edited(manifest, generator), config
        case "index":
            draft.index = edited(draft.index, generator)
        case "root":
            draft.hooks["root"] = lambda content: encoded(edited(json.loads(content), generator))
        case _:
            needs = edited(config["requirement"], generator)
            config["requirement"] = needs
            draft.index["manifests"][place]["annotations"][REQUIREMENT] = encoded(needs).decode()


def _hooked(make):
    def change(draft, generator):
        roles = ["config", "config", "manifest", "index", "root", "oci-layout"]
        draft.hooks[generator.choice(roles)] = make(generator)

    return change


def _layer_changed(draft, generator):
    config, layer, content = layer_of(draft, generator)
    put(draft, config, layer, damaged_bytes(content, generator))


def _layer_of_another(draft, generator):
    config, layer, _ = layer_of(draft, generator)
    other = draft_of(generator.choice(BUNDLES))
    put(draft, config, layer, layer_of(other, generator)[2])


def _layer_of_json(draft, generator):
    """In JSON layers, and in the header of weights."""
    config, layer, content = layer_of(draft, generator)
    change = generator.choice([huge_numbers, deep, wide])(generator)
    if layer["mediaType"].endswith("safetensors"):
        (size,) = struct.unpack_from("<Q", content)
        header = change(content[8 : 8 + size])
        header += b" " * (-(len(header) + 8) % 64)
        content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    else:
        content = change(content)
    put(draft, config, layer, content)


def _frame_changed(draft, generator):
    config, layer, content, segments = _frame_of(draft, generator)
    start, end = segments[0]["offset"], segments[0]["offset"] + segments[0]["size"]
    frame = damaged_bytes(content[start:end], generator)
    for each in segments:
        each |= described(frame)
    put(draft, config, layer, content[:start] + frame + content[end:])


def _bomb(draft, generator):
    config, layer, content, segments = _frame_of(draft, generator)
    size = generator.choice([1 << 20, 32 << 20, 256 << 20, 1 << 30])
    frame, raw = bomb(size)
    claimed = generator.choice([size, size, size, 1000, 2**62])
    new = {"offset": len(content), **described(frame), "raw_size": claimed, "raw_digest": raw}
    for each in segments if generator.random() < 0.3 else segments[:1]:
        each |= new
    put(draft, config, layer, content + frame)


def _frame_of(draft, generator):
    """Return a config, one of its packs, the pack's bytes, and the segments of one of its frames."""
    manifest, config = generator.choice(draft.targets)
    segments = [p[key] for p in config["programs"] for key in ("executable", "portable")]
    segments += [each["entry"] for each in config.get("recorded", [])]
    chosen = generator.choice(segments)
    layer = pack_of(manifest, config, chosen)
    same = [each for each in segments if each["digest"] == chosen["digest"] and each is not chosen]
    return config, layer, draft.blobs[layer["digest"]], [chosen, *same]


def pack_of(manifest, config, segment):
    """Return the layer that has the frame of a segment."""
    names = {"executable": "executables", "portable": "stablehlo"}
    kind = "recorded"
    for program in config["programs"]:
        for key, name in names.items():
            if program[key] is segment:
                kind = name
    return next(at for at in manifest["layers"] if f"prejit.{kind}." in at["mediaType"])


def _blobs_exchanged(draft, generator):
    """Layers of a target under each other's media types, or configs and manifests of another bundle."""
    place, how = generator.randrange(len(draft.targets)), generator.randrange(3)
    manifest, _ = draft.targets[place]
    if how == 0:
        one, other = generator.choice(manifest["layers"]), generator.choice(manifest["layers"])
        for key in ("digest", "size"):
            one[key], other[key] = other[key], one[key]
        return
    another = draft_of(generator.choice(BUNDLES))
    theirs = generator.choice(another.targets)
    if how == 1:
        draft.targets[place] = manifest, theirs[1]
    else:
        draft.targets[place] = theirs
        draft.blobs |= another.blobs


ATTACKS = {
    "edited": _edited_json,
    "huge numbers": _hooked(huge_numbers),
    "deep nesting": _hooked(deep),
    "many values": _hooked(wide),
    "layer changed": _layer_changed,
    "layer of another": _layer_of_another,
    "JSON of a layer": _layer_of_json,
    "frame changed": _frame_changed,
    "bomb": _bomb,
    "blobs exchanged": _blobs_exchanged,
}
