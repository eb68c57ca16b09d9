"""Hostile bundles: each is rejected with an error of prejit's, or is right; soon, in little memory.

    PREJIT_FUZZ_EXAMPLES=100000 .venv/bin/python -m tests.campaigns.fuzz     all of them, and fuzz.json
    .venv/bin/python -m tests.campaigns.fuzz NUMBER                          one again, with its traceback

Each example has a seed of its own. It changes a golden bundle and asks `prejit verify`, in this process. Some
kinds leave the digests as they are, as a bad disk does. The others set all of them right again, as an
attacker does. Of bundles with one target it also asks a load and all that may follow one: what one of the two
accepts the other must accept. Nothing reaches XLA or the dynamic linker.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import platform
import random
import re
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import zstandard
from blake3 import blake3

from prejit.runtime.errors import PrejitError, RejectError

GOLDEN = Path(__file__).parents[1] / "format" / "v1"
RESULTS = Path(__file__).with_name("fuzz.json")
BUNDLES = (
    *("call", "fleet", "mesh", "decoder", "encoder", "stored", "kernels", "chunks", "reader"),
    "recorded",
)
LOADED = ("decoder", "encoder", "chunks", "reader")
"""Bundles of one target without kernels: a load reads all that `prejit verify` reads."""
MOST_SECONDS = 0.2
MOST_BYTES = 64 << 20
"""The CPU time and the memory that an example may take beyond those of the sound bundle."""
SECONDS_PER_BYTE = 5e-8
"""The CPU time that it may take for each byte that it has beyond the sound bundle: JSON takes as long."""
REQUIREMENT = "dev.prejit.requirement"

HUGE: tuple[str, ...] = (
    *(
        "9" * 5000,
        "1" + "0" * 400,
        "-1",
        "-0",
        "1e400",
        "1e5",
        "1.0",
        "0x10",
        "00",
        "NaN",
        "Infinity",
    ),
    *(str(2**63), str(2**63 - 1), str(2**64), str(2**31), str(2**53 + 1), "true", "null", "[]"),
)
"""What stands in place of an integer."""
NASTY: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 2**31 - 1, 2**31, 2**63 - 1, 10**400, 1.5, "", " ", "0", "1" * 5000),
    *("x" * 9000, "\0", "\x1b[31m", "\u202e", "\ud800", [], {}, [[]], [0], [""], {"a": {"b": []}}),
    *("cpu", "float32", '["x"] foo[1]', '["x"] int8[' + "9" * 5000 + "]", "[" * 900, "../../x"),
    *('["a"] float32[-1]', "sha256:" + "0" * 64, "1" + ".1" * 8000, "1." * 8000, "x86-64-v9"),
)
"""What stands in place of any value."""


@dataclass
class Draft:
    """A bundle in memory, to be changed.

    Attributes:
        root: `index.json`.
        index: the bundle's index.
        targets: manifest and config of each target.
        blobs: layers by digest.
        hooks: change the bytes of a file when it is written, before its digest is computed: by role.
    """

    root: Any
    index: Any
    targets: list[tuple[Any, Any]]
    blobs: dict[str, bytes]
    hooks: dict[str, Callable[[bytes], bytes]]

    def files(self) -> dict[str, bytes]:
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

    def _hooked(self, role: str, content: bytes) -> bytes:
        return self.hooks.get(role, bytes)(content)


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def described(content: bytes) -> dict[str, Any]:
    return {"digest": digest_of(content), "size": len(content)}


def encoded(plain: Any) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()


@cache
def sound(name: str) -> dict[str, bytes]:
    """Return the files of a golden bundle."""
    path = GOLDEN / name
    return {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def draft_of(name: str) -> Draft:
    """Return a golden bundle to change, without what is attached to it: that refers to its digest."""
    files = dict(sound(name))
    root = json.loads(files.pop("index.json"))

    def read(at: Any) -> Any:
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
    return Draft(root, index, targets, blobs, {})


# Damage: digests stay


def flipped(content: bytes, generator: random.Random) -> bytes:
    """Return bytes with one to three bits flipped, half of the time in the first 200."""
    changed = bytearray(content)
    for _ in range(generator.randrange(1, 4)):
        if changed:
            size = min(200, len(changed)) if generator.random() < 0.5 else len(changed)
            changed[generator.randrange(size)] ^= 1 << generator.randrange(8)
    return bytes(changed)


def cut(content: bytes, generator: random.Random) -> bytes:
    """Return bytes without their end, or with more."""
    if generator.random() < 0.3:
        return content + generator.randbytes(generator.randrange(1, 100))
    return content[: generator.randrange(len(content) + 1)]


def zeroed(content: bytes, generator: random.Random) -> bytes:
    """Return bytes with a range of zeros or of noise."""
    start = generator.randrange(len(content) + 1)
    size = min(generator.randrange(1, 600), len(content) - start)
    middle = bytes(size) if generator.random() < 0.5 else generator.randbytes(size)
    return content[:start] + middle + content[start + size :]


def damaged(name: str, generator: random.Random) -> tuple[str, dict[str, bytes]]:
    """Return a kind of damage, and the files of a bundle after it. No digest is set right."""
    files = dict(sound(name))
    at = generator.choice(sorted(files))
    kind = generator.choice(
        ["bit flips", "cut or longer", "range written", "blobs swapped", "gone"]
    )
    match kind:
        case "bit flips":
            files[at] = flipped(files[at], generator)
        case "cut or longer":
            files[at] = cut(files[at], generator)
        case "range written":
            files[at] = zeroed(files[at], generator)
        case "blobs swapped":
            other = generator.choice(sorted(files))
            files[at], files[other] = files[other], files[at]
        case _:
            del files[at]
    return kind, files


# Attacks: all digests are right


def nested(depth: int) -> Any:
    """Return lists in lists."""
    found: Any = []
    for _ in range(depth):
        found = [found]
    return found


def edited(plain: Any, generator: random.Random) -> Any:
    """Return a JSON value with one to three of its parts changed, taken away, doubled or exchanged."""
    plain = deepcopy(plain)
    for _ in range(generator.randrange(1, 4)):
        holder = plain
        while isinstance(holder, dict | list) and holder:
            key = generator.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
            if isinstance(holder[key], dict | list) and holder[key] and generator.random() < 0.85:
                holder = holder[key]
                continue
            _edit(holder, key, generator)
            break
    return plain


def _edit(holder: Any, key: Any, generator: random.Random) -> None:
    match generator.randrange(6):
        case 0:
            del holder[key]
        case 1:
            other = generator.choice(
                list(holder) if isinstance(holder, dict) else range(len(holder))
            )
            holder[key], holder[other] = holder[other], holder[key]
        case 2 if isinstance(holder, list):
            holder += [deepcopy(holder[key]) for _ in range(generator.randrange(1, 4))]
        case 2:
            holder[generator.choice(["zzz", "", "digest", "mesh", "\ud800"])] = deepcopy(
                holder[key]
            )
        case 3 if type(holder[key]) is int:
            holder[key] += generator.choice([-1, 1, 2**31, -(2**40)])
        case 3 if isinstance(holder[key], str):
            holder[key] = flipped(holder[key].encode(errors="replace"), generator).decode("latin1")
        case _:
            holder[key] = deepcopy(generator.choice(NASTY))


def huge_numbers(generator: random.Random) -> Callable[[bytes], bytes]:
    """Return what puts a huge or strange number in place of an integer of some JSON."""

    def change(content: bytes) -> bytes:
        places = list(re.finditer(rb"(?<=[:,\[])-?\d+(?=[,\]}])", content))
        if not places:
            return content
        at = generator.choice(places)
        return content[: at.start()] + generator.choice(HUGE).encode() + content[at.end() :]

    return change


def deep(generator: random.Random) -> Callable[[bytes], bytes]:
    """Return what puts deep JSON in place of some JSON, or of one of its values."""
    depth = generator.choice([200, 990, 5000, 100_000])
    open_, close = generator.choice([(b"[", b"]"), (b'{"a":', b"}")])
    inner = open_ * depth + (b"0" if close == b"}" else b"") + close * generator.choice([0, depth])

    def change(content: bytes) -> bytes:
        places = list(re.finditer(rb'(?<=":)("[^"\\]*"|\d+)(?=[,}])', content))
        if not places or generator.random() < 0.3:
            return inner
        at = generator.choice(places)
        return content[: at.start()] + inner + content[at.end() :]

    return change


def wide(generator: random.Random) -> Callable[[bytes], bytes]:
    """Return what puts very many small values in place of some JSON."""
    piece = generator.choice([b"[]", b"{}", b'{"":0}', b"0", b'""', b'"\\u1234"', b"1.5", b"null"])
    size = generator.choice([64 << 10, 1 << 20, 4 << 20])

    def change(_: bytes) -> bytes:
        return b'{"manifests":[' + b",".join([piece] * (size // (len(piece) + 1))) + b"]}"

    return change


@cache
def bomb(size: int) -> tuple[bytes, str]:
    """Return a zstd frame of so many zeros, and the digest of what it decompresses to."""
    hasher = hashlib.sha256()
    compressor = zstandard.ZstdCompressor(level=1, write_checksum=True).compressobj(size=size)
    frame = b""
    for _ in range(size >> 20):
        hasher.update(bytes(1 << 20))
        frame += compressor.compress(bytes(1 << 20))
    return frame + compressor.flush(), f"sha256:{hasher.hexdigest()}"


def layer_of(draft: Draft, generator: random.Random) -> tuple[Any, Any, Any, bytes]:
    """Return a manifest, its config, one of its layers, and the layer's bytes."""
    manifest, config = generator.choice(draft.targets)
    layer = generator.choice(manifest["layers"])
    return manifest, config, layer, draft.blobs[layer["digest"]]


def put(draft: Draft, config: Any, layer: Any, content: bytes) -> None:
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


def frames_of(config: Any) -> list[Any]:
    """Return the segments of a config."""
    frames = [p[key] for p in config["programs"] for key in ("executable", "portable")]
    return [*frames, *(each["entry"] for each in config.get("recorded", []))]


def attacked(name: str, generator: random.Random) -> tuple[str, dict[str, bytes]]:
    """Return a kind of attack, and the files of a bundle after it. All digests are right."""
    draft = draft_of(name)
    kind = generator.choice([*_ATTACKS])
    _ATTACKS[kind](draft, generator)
    return kind, draft.files()


def _edited_json(draft: Draft, generator: random.Random) -> None:
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


def _hooked(make: Callable[[random.Random], Callable[[bytes], bytes]]) -> Any:
    def change(draft: Draft, generator: random.Random) -> None:
        roles = ["config", "config", "manifest", "index", "root", "oci-layout"]
        draft.hooks[generator.choice(roles)] = make(generator)

    return change


def _layer_changed(draft: Draft, generator: random.Random) -> None:
    _, config, layer, content = layer_of(draft, generator)
    change = generator.choice([flipped, cut, zeroed])
    put(draft, config, layer, change(content, generator))


def _layer_of_another(draft: Draft, generator: random.Random) -> None:
    _, config, layer, _ = layer_of(draft, generator)
    other = draft_of(generator.choice(BUNDLES))
    put(draft, config, layer, layer_of(other, generator)[3])


def _layer_of_json(draft: Draft, generator: random.Random) -> None:
    """In JSON layers, and in the header of weights."""
    _, config, layer, content = layer_of(draft, generator)
    change = generator.choice([huge_numbers, deep, wide])(generator)
    if layer["mediaType"].endswith("safetensors"):
        (size,) = struct.unpack_from("<Q", content)
        header = change(content[8 : 8 + size])
        header += b" " * (-(len(header) + 8) % 64)
        content = len(header).to_bytes(8, "little") + header + content[8 + size :]
    else:
        content = change(content)
    put(draft, config, layer, content)


def _frame_changed(draft: Draft, generator: random.Random) -> None:
    manifest, config = generator.choice(draft.targets)
    segment = generator.choice(frames_of(config))
    layer = _pack_of(manifest, config, segment)
    content = draft.blobs[layer["digest"]]
    start, end = segment["offset"], segment["offset"] + segment["size"]
    frame = generator.choice([flipped, cut, zeroed])(content[start:end], generator)
    for each in frames_of(config):
        if each["digest"] == segment["digest"] and each is not segment:
            each |= {"digest": digest_of(frame), "size": len(frame)}
    segment |= {"digest": digest_of(frame), "size": len(frame)}
    put(draft, config, layer, content[:start] + frame + content[end:])


def _bomb(draft: Draft, generator: random.Random) -> None:
    manifest, config = generator.choice(draft.targets)
    size = generator.choice([1 << 20, 32 << 20, 256 << 20, 1 << 30])
    frame, raw = bomb(size)
    segments = frames_of(config)
    segment = generator.choice(segments)
    layer = _pack_of(manifest, config, segment)
    content = draft.blobs[layer["digest"]]
    claimed = generator.choice([size, size, size, 1000, 2**62])
    new = {
        "offset": len(content),
        "size": len(frame),
        "digest": digest_of(frame),
        "raw_size": claimed,
        "raw_digest": raw,
    }
    for each in segments if generator.random() < 0.3 else [segment]:
        if each["digest"] == segment["digest"] or each is segment:
            each |= new
    put(draft, config, layer, content + frame)


def _pack_of(manifest: Any, config: Any, segment: Any) -> Any:
    names = {"executable": "executables", "portable": "stablehlo"}
    kind = "recorded"
    for program in config["programs"]:
        for key, name in names.items():
            if program[key] is segment:
                kind = name
    return next(at for at in manifest["layers"] if f"prejit.{kind}." in at["mediaType"])


def _blobs_exchanged(draft: Draft, generator: random.Random) -> None:
    """Layers of a target under each other's media types, or configs and manifests of another bundle."""
    match generator.randrange(3):
        case 0:
            manifest, _ = generator.choice(draft.targets)
            one, other = generator.choice(manifest["layers"]), generator.choice(manifest["layers"])
            for key in ("digest", "size"):
                one[key], other[key] = other[key], one[key]
        case 1:
            other_draft = draft_of(generator.choice(BUNDLES))
            place = generator.randrange(len(draft.targets))
            manifest, _ = draft.targets[place]
            draft.targets[place] = manifest, generator.choice(other_draft.targets)[1]
        case _:
            other_draft = draft_of(generator.choice(BUNDLES))
            place = generator.randrange(len(draft.targets))
            draft.targets[place] = generator.choice(other_draft.targets)
            draft.blobs |= other_draft.blobs


_ATTACKS: dict[str, Callable[[Draft, random.Random], None]] = {
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


# What becomes of them


class NoDevice:
    """Stands in place of a device: a campaign runs nothing."""

    in_cluster = False

    def __init__(self, *_: object) -> None:
        pass


def read_as_loads_do(path: Path) -> None:
    """Load a bundle, and read all that programs, text and generation may read later. Runs nothing."""
    from prejit.runtime import load
    from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE

    with warnings.catch_warnings(), mock.patch("prejit.runtime.loaded_bundle.Device", NoDevice):
        warnings.simplefilter("ignore")
        loaded = load(path)
    parts = loaded._open
    try:
        parts.verification.finish()
        programs, layers = parts.programs, parts.layers
        for name, program in programs.table.items():
            layers[EXECUTABLES_MEDIA_TYPE].unpack(program.executable)
            layers[PORTABLE_MEDIA_TYPE].unpack(program.portable)
            if program.symbolic is not None:
                layers[PORTABLE_MEDIA_TYPE].unpack(program.symbolic)
            programs.arguments(name)
            programs.results(name)
            programs.static(name)
            if program.kind == "call":
                programs.arguments_tree(name)
                programs.results_tree(name)
        if parts.text.has_chat_template:
            _ = parts.text.chat
        if loaded.config.decoder is not None:
            _ = loaded.defaults
    finally:
        parts.verification.stop(RuntimeError("the example is over"))


@dataclass
class Tried:
    """An example and its outcome.

    Attributes:
        number: the example.
        bundle, kind: the golden bundle and what was done to it.
        outcome: `rejected` or `accepted`.
        problem: what is bad; empty: nothing.
        seconds, more_bytes: CPU time and memory beyond those of the sound bundle.
    """

    number: int
    bundle: str
    kind: str
    outcome: str
    problem: str
    seconds: float
    more_bytes: int


class BundleFiles:
    """Writes one bundle after the other into the same directories: what differs from the one before."""

    def __init__(self) -> None:
        self._written: dict[Path, dict[str, bytes]] = {}

    def write(self, path: Path, files: dict[str, bytes]) -> Path:
        """Make a directory hold these files, and return its path."""
        written = self._written.setdefault(path, {})
        (path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
        for file in written.keys() - files.keys():
            (path / file).unlink()
        for file, content in files.items():
            if written.get(file) != content:
                (path / file).write_bytes(content)
        self._written[path] = dict(files)
        return path


class Fuzzer:
    """Tries examples in a directory in memory. Use it in a `with` statement."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        root = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._at = Path(self._stack.enter_context(tempfile.TemporaryDirectory(dir=root)))
        runtime_cache = {"PREJIT_RUNTIME_CACHE": str(self._at / "cache")}
        self._stack.enter_context(mock.patch.dict(os.environ, runtime_cache))
        self._bundles = BundleFiles()
        self._usual: dict[str, tuple[float, int]] = {}

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def attempt(self, number: int, *, show: bool = False) -> Tried:
        """Try one example; show: print the traceback of an error."""
        generator = random.Random(number)
        name = generator.choice(BUNDLES)
        make = damaged if generator.random() < 0.4 else attacked
        kind, files = make(name, generator)
        usual_seconds, usual_bytes = self._usual_of(name)
        path = self._bundles.write(self._at / name, files)
        error, seconds, more = self._verified(path)
        more_content = sum(map(len, files.values())) - sum(map(len, sound(name).values()))
        allowed = MOST_SECONDS + SECONDS_PER_BYTE * max(0, more_content)
        for _ in range(3):  # other processes may have had the CPU's caches
            if seconds - usual_seconds > allowed:
                error, seconds, more = self._verified(path)
        if show and error is not None:
            traceback.print_exception(error)
        seconds, more = seconds - usual_seconds, more - usual_bytes
        problem = ""
        if error is not None and not isinstance(error, RejectError):
            problem = f"expected a RejectError, found {error!r:.300}"
        elif error is not None and _is_unfit(str(error)):
            problem = f"an error that no terminal should show: {str(error)!r:.300}"
        elif seconds > allowed:
            problem = f"{seconds:.2f} s more than the sound bundle"
        elif more > MOST_BYTES:
            problem = f"{more >> 20} MB more than the sound bundle"
        elif name in LOADED:
            problem = _differs(path, error, show)
        outcome = "accepted" if error is None else "rejected"
        return Tried(number, name, kind, outcome, problem, seconds, more)

    def _usual_of(self, name: str) -> tuple[float, int]:
        if name not in self._usual:
            path = self._bundles.write(self._at / name, sound(name))
            tries = [self._verified(path) for _ in range(4)]
            assert all(error is None for error, _, _ in tries), (name, tries)
            self._usual[name] = max(t[1] for t in tries[1:]), max(t[2] for t in tries[1:])
        return self._usual[name]

    def _verified(self, path: Path) -> tuple[Exception | None, float, int]:
        from prejit.runtime.format.audit import audit
        from prejit.runtime.generation.options import check_generation

        Path("/proc/self/clear_refs").write_text("5")
        before, started = memory_of("VmRSS"), time.process_time()
        try:
            audit(path, check_generation)
            error = None
        except Exception as raised:
            error = raised
        seconds = time.process_time() - started
        return error, seconds, memory_of("VmHWM") - before


def memory_of(name: str) -> int:
    """Return a line of /proc/self/status in bytes."""
    status = Path("/proc/self/status").read_text()
    found = re.search(rf"^{name}:\s+(\d+) kB", status, re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def _is_unfit(message: str) -> bool:
    return len(message) > 4000 or bool(
        re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", message)
    )


def _differs(path: Path, error: Exception | None, show: bool) -> str:
    """Return how a load differs from `prejit verify`; empty: it does not."""
    try:
        read_as_loads_do(path)
        of_load = None
    except PrejitError as raised:
        of_load = raised
    except Exception as raised:
        if show:
            traceback.print_exception(raised)
        return f"a load raised {raised!r:.300}"
    if (error is None) != (of_load is None):
        return f"verify: {error!r:.300}; load: {of_load!r:.300}"
    return ""


def figures_of(
    count: int,
    started: float,
    outcomes: Counter[tuple[str, str]],
    problems: Sequence[Any],
    most: tuple[float, int],
    **more: Any,
) -> dict[str, Any]:
    """Return the figures of a campaign, as its file has them; `most` in seconds and bytes."""
    by_kind: dict[str, dict[str, int]] = {}
    for (kind, outcome), number in sorted(outcomes.items()):
        by_kind.setdefault(kind, {})[outcome] = number
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "examples": count,
        "minutes": round((time.monotonic() - started) / 60, 1),
        "bad": [dataclasses.asdict(each) for each in problems[:20]],
        "bad_count": len(problems),
        **more,
        "most_seconds_beyond_a_sound_bundle": round(most[0], 3),
        "most_megabytes_beyond_a_sound_bundle": round(most[1] / 2**20, 1),
        "outcomes": by_kind,
    }


def main(arguments: Sequence[str]) -> int:
    """Try one example and show it, or as many as the environment says and write the figures."""
    with Fuzzer() as fuzzer:
        if arguments:
            for number in arguments:
                print(fuzzer.attempt(int(number), show=True))
            return 0
        count = int(os.environ.get("PREJIT_FUZZ_EXAMPLES", "100000"))
        outcomes, problems = Counter[tuple[str, str]](), list[Tried]()
        slowest, largest, started = 0.0, 0, time.monotonic()
        for number in range(count):
            tried = fuzzer.attempt(number)
            outcomes[tried.kind, tried.outcome] += 1
            slowest, largest = max(slowest, tried.seconds), max(largest, tried.more_bytes)
            if tried.problem:
                problems.append(tried)
                print(f"{number} {tried.bundle} {tried.kind}: {tried.problem}", flush=True)
            if number % 100 == 99:
                gc.collect()  # bundles that were refused have files open until then
            if number % 5000 == 4999:
                print(f"{number + 1} examples, {len(problems)} bad", flush=True)
    figures = figures_of(count, started, outcomes, problems, (slowest, largest))
    RESULTS.write_text(json.dumps(figures, indent=1) + "\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
