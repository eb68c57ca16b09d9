"""A second reader of bundles, written from docs/bundle-format.md alone. It imports nothing of prejit.

It reads all that a bundle says, asserts what the document says must be, and tells which target serves a
machine. It runs no program.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from datetime import date
from typing import Any

import safetensors
import zstandard
from blake3 import blake3

TYPE = "application/vnd.prejit."
INDEX = "application/vnd.oci.image.index.v1+json"
VERSION = r"\d+(?:\.[0-9A-Za-z]+)*(?:[.+-][0-9A-Za-z.]+)?"
TEXT = {  # axes that are text
    **{"platform": r"[a-z]+", "architecture": r"[a-z][a-z0-9_]*", "jaxlib": VERSION},
    **{"plugin": rf"[a-z0-9\-]+ {VERSION}", "cuda": VERSION, "driver": VERSION},
    **{"device_kind": r"[ -~]+", "compute_capability": r"\d+\.\d+"},
    **{"topology": r"[1-9]\d*(?:x[1-9]\d*)*", "glibc": r"\d+(?:\.\d+)+"},
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
    chat: dict[str, dict[str, str]] | None


def read(bundle):
    """The targets of a bundle in order."""
    assert json.loads((bundle / "oci-layout").read_bytes()) == {"imageLayoutVersion": "1.0.0"}
    root = json.loads((bundle / "index.json").read_bytes())
    assert root["schemaVersion"] == 2
    here = {found["digest"] for found in root["manifests"]}
    [digest] = {
        found["digest"]
        for found in root["manifests"]
        if found["mediaType"] == INDEX and found.get("artifactType") == f"{TYPE}bundle.v1"
    }
    index = parsed(bundle, next(at for at in root["manifests"] if at["digest"] == digest))
    assert index["annotations"]["dev.prejit.format"] == "1"
    assert index["annotations"]["dev.prejit.name"]
    assert (index["artifactType"], index["mediaType"]) == (f"{TYPE}bundle.v1", INDEX)
    assert 0 < len(index["manifests"]) <= 512
    listed = [at for at in index["manifests"] if at["digest"] in here] or index["manifests"]
    targets = [read_target(bundle, found) for found in listed]
    assert len({target.name for target in targets}) == len(targets)
    assert {each.config["bundle"] for each in targets} == {index["annotations"]["dev.prejit.name"]}
    return targets


def read_target(bundle, descriptor):
    name = descriptor["annotations"]["org.opencontainers.image.ref.name"]
    needs = json.loads(descriptor["annotations"]["dev.prejit.requirement"])
    check_requirement(needs)
    manifest = parsed(bundle, descriptor)
    config = parsed(bundle, manifest["config"])
    assert (config["format"], config["target"], config["requirement"]) == (1, name, needs)
    kinds = [layer["mediaType"].removeprefix(TYPE) for layer in manifest["layers"]]
    once = [kind for kind in kinds if kind != "library.v1+elf"]
    assert len(set(once)) == len(once)
    layers, libraries = {}, []
    for kind, layer in zip(kinds, manifest["layers"], strict=True):
        if kind == "library.v1+elf":
            libraries.append(blob(bundle, layer))
        else:
            layers[kind] = blob(bundle, layer)
    mesh = config.get("mesh")
    sizes = {} if mesh is None else {"data": mesh["data"], "tensor": mesh["tensor"]}
    if mesh is not None and "axes" in mesh:
        assert set(sizes.values()) == {1}
        sizes = {name: int(size) for name, size in (axis.split("=") for axis in mesh["axes"])}
        assert len(sizes) == len(mesh["axes"])
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
    check_programs(config, programs)
    check_kernels(config, layers.get("kernels.v1+elf"))
    check_libraries(config, libraries)
    check_chunks(config, layers)
    check_recorded(config, layers)
    tensors = read_weights(layers.get("weights.v1.safetensors"), config, sizes)
    chat = layers.get("chat.v1+json")
    return Target(name, needs, config, programs, tensors, None if chat is None else read_chat(chat))


def check_kernels(config, library):
    """By "Kernels". What a library exports is left to the dynamic linker."""
    calling = [said["kernels"] for said in config["programs"] if "kernels" in said]
    assert set(calling) <= {True}
    assert ("kernels" in config) == (library is not None) == bool(calling)
    if library is None:
        return
    kernels = config["kernels"]
    assert config["requirement"]["platform"] == "cpu"
    assert len(library) <= 64 << 20
    assert library.startswith(b"\x7fELF")
    assert kernels.keys() == {"digest", "level", "compiler", "handlers"}
    assert kernels["digest"] == digest_of(library)
    assert set(LEVELS[kernels["level"]]) <= set(config["requirement"]["cpu_features"])
    assert kernels["handlers"] == sorted(set(kernels["handlers"]))
    assert all(f"prejit_{name}\0".encode() in library for name in kernels["handlers"])


def check_libraries(config, libraries):
    """By "Libraries". What a library exports is left to the dynamic linker."""
    called = [said["calls"] for said in config["programs"] if "calls" in said]
    assert ("libraries" in config) == bool(libraries) == bool(called)
    if not libraries:
        return
    assert config["requirement"]["platform"] == "cpu"
    assert all(len(library) <= 256 << 20 for library in libraries)
    assert [told["digest"] for told in config["libraries"]] == sorted(map(digest_of, libraries))
    known = [name for told in config["libraries"] for name in told["handlers"]]
    assert len(set(known)) == len(known)
    for told in config["libraries"]:
        assert told.keys() == {"digest", "name", "handlers"}
        assert any(set(names) & told["handlers"].keys() for names in called)
        [library] = [each for each in libraries if digest_of(each) == told["digest"]]
        assert library.startswith(b"\x7fELF\x02\x01")
        for name, symbol in told["handlers"].items():
            assert all(re.fullmatch(r"[A-Za-z0-9_.$-]{1,256}", text) for text in (name, symbol))
            assert f"{symbol}\0".encode() in library
    assert all(names and names == sorted(set(names)) for names in called)
    assert {name for names in called for name in names} <= set(known)


def check_chunks(config, layers):
    """By "Chunks". The digest of every layer is known to be right: those of its chunks must be, too."""
    for media_type, chunks in config.get("chunks", {}).items():
        assert media_type.startswith(TYPE)
        layer, size = layers[media_type.removeprefix(TYPE)], chunks["size"]
        assert chunks.keys() == {"algorithm", "size", "digests", "verity"}
        assert chunks["algorithm"] == "blake3"
        assert 64 << 10 <= size <= 64 << 20
        pieces = [layer[start : start + size] for start in range(0, len(layer), size)]
        assert layer
        assert chunks["digests"] == [blake3(piece).hexdigest() for piece in pieces]
        assert chunks["verity"] == verity_of(layer)


def verity_of(layer):
    """By "fs-verity"."""
    level = layer
    while level is layer or len(level) > 32:
        blocks = [level[start : start + 4096] for start in range(0, len(level), 4096)]
        level = b"".join(hashlib.sha256(block.ljust(4096, b"\0")).digest() for block in blocks)
    header = bytes([1, 1, 12, 0, 0, 0, 0, 0]) + len(layer).to_bytes(8, "little")
    return digest_of((header + level).ljust(256, b"\0"))


def check_recorded(config, layers):
    """By "Recorded files". What jax makes of them is left to jax."""
    assert ("recorded" in config) == ("recorded.v1+zstd" in layers)
    if "recorded" not in config:
        assert {"executables.v1+zstd", "stablehlo.v1+zstd"} <= layers.keys()
        return
    assert layers.keys() == {"recorded.v1+zstd"}
    assert not config["programs"]
    assert not config["weight_sets"]
    assert not config.keys() & {"decoder", "encoder", "images"}
    files = [said["file"] for said in config["recorded"]]
    assert files
    assert files == sorted(set(files))
    for said in config["recorded"]:
        assert said.keys() - {"arguments", "function"} == {
            *("name", "file", "entry", "ingredients", "conditions")
        }
        assert re.fullmatch(r"[\w.-]{1,180}-[0-9a-f]{64}-cache", said["file"])
        assert all(re.fullmatch("[0-9a-f]{64}", each) for each in said["ingredients"].values())
        assert unpack(layers["recorded.v1+zstd"], said["entry"])


V3 = "64bit avx avx2 bmi bmi2 cmov crc32 cx16 cx8 f16c fma fxsr lzcnt mmx movbe popcnt sahf sse sse2 sse3"
V3 += " sse4.1 sse4.2 ssse3 xsave"
V4 = f"{V3} avx512bw avx512cd avx512dq avx512f avx512vl"
LEVELS = {"x86-64-v2": [], "x86-64-v3": V3.split(), "x86-64-v4": V4.split()}


BUCKETS = {
    "decode": {"batch", "context"},
    "prefill": {"batch", "context", "prompt"},
    "verify": {"batch", "context", "draft"},
    "copy": {"batch", "context", "source_batch", "source_context"},
    "encode": {"batch", "context", "source"},
    "embed": {"batch", "length"},
    "layer": {"batch", "length"},
    "pool": {"batch", "length"},
    "image": {"batch"},
    "image-prefill": {"batch", "context", "prompt"},
}


def check_programs(config, programs):
    """What programs of a model must be, by "Programs", "Decoder programs" and "Encoder programs"."""
    seen = set()
    for program in programs.values():
        kind, bucket = program.said["kind"], program.said["bucket"]
        assert kind in {*BUCKETS, "call"}
        assert kind == "call" or not {"settings", "state"} & program.said.keys()
        trees = {"arguments_tree", "results_tree"}
        assert trees & program.said.keys() == (trees if kind == "call" else set())
        assert program.said.get("cost_microseconds", 0) >= 0
        check_golden(program.said.get("golden"), len(program.results))
        if kind == "call":
            continue
        packed = {"sentences"} & bucket.keys() if kind in ("embed", "layer", "pool") else set()
        assert bucket.keys() == BUCKETS[kind] | packed
        assert not packed or (bucket["batch"] == 1 and not config["encoder"].get("heads"))
        assert all(0 < size < 2**31 for size in bucket.values())
        assert (kind, *sorted(bucket.items())) not in seen
        seen.add((kind, *sorted(bucket.items())))
        assert "weights" in program.said or kind in ("copy", "pool")
        found = [list(map(spelled, texts)) for texts in (program.arguments, program.results)]
        if kind == "image":
            takes, gives = image_signature(config["images"], program)
            assert program.said["name"] == f"images/b{bucket['batch']}"
        elif "length" in bucket:
            takes, gives = encoder_signature(config["encoder"], program)
            sizes = zip("bts", ("batch", "length", "sentences"), strict=True)
            name = "-".join(f"{letter}{bucket[size]}" for letter, size in sizes if size in bucket)
            assert program.said["name"] == f"encode/{name}/{kind}"
        else:
            takes, gives = decoder_signature(config["decoder"], program, config.get("images"))
        assert found == [takes, gives]
        if config.get("mesh") and "context" in bucket:
            of_cache = ("cache", "source", "target")
            for value in (*program.arguments, *program.results):
                whole = value.path[0] not in of_cache
                assert value.split == ([] if whole else ["data", "tensor", "", ""])
    if "decoder" in config:
        check_decoder([program.said for program in programs.values()])
        reads = any(program.said["kind"] == "encode" for program in programs.values())
        assert reads == ("source" in config["decoder"])
    if "images" in config:
        check_images(config, [key for key in seen if key[0] == "image"])
    if "encoder" in config:
        layers = config["encoder"]["layers"]
        assert layers
        assert len({len(config["weight_sets"][name]) for name in layers}) == 1
        shapes = {key[1:] for key in seen if key[0] in ("embed", "layer", "pool")}
        assert shapes
        assert seen >= {(kind, *shape) for kind in ("embed", "layer", "pool") for shape in shapes}


def check_images(config, programs):
    """What an encoder of images must be, by "Config" and "Encoder programs"."""
    images = config["images"]
    assert len(images["size"]) == 2
    assert len(images["resize"]) <= 2
    assert all(0 < size <= 16384 for size in (*images["size"], *images["resize"]))
    assert 0 <= images["resample"] <= 5
    if "tokens" in images:
        assert 0 <= images["token_id"] < config["decoder"]["vocab_size"]
        assert len(images["marks"]) == 3
    assert len(images.get("labels", range(images["width"]))) == images["width"]
    assert ("labels" in images) + ("encoder" in config) == (
        images.get("scores") in ("softmax", "sigmoid")
    )
    if "encoder" in config:
        assert len(config["weight_sets"]["model:match"]) in (1, 2)
    assert programs


def check_golden(golden, results):
    """The form of a golden answer, by "Golden answers"."""
    if golden is None:
        return
    assert golden.keys() == {"recipe", "seed", "source", "tolerance", "results"}
    assert golden["recipe"] >= 1
    assert 0 <= golden["seed"] < 2**32
    assert 1 <= golden["tolerance"] <= 16
    words = golden["results"].split(" ") if golden["results"] else []
    whole = r"-?\d{1,18}"
    other = rf"-?\d{{1,4}}:\d{{1,18}}(,({whole}|[npm])){{0,31}}"
    assert all(re.fullmatch(rf"-|={whole}(,{whole}){{0,31}}|{other}", word) for word in words)
    assert golden["recipe"] > 1 or len(words) == results


def spelled(argument):
    """As the document spells it: the name, `*` where it is donated, dtype and shape."""
    name = named(argument.path)
    shape = ",".join(map(str, argument.shape))
    return f"{name}{'*' if argument.donated else ''} {argument.dtype}[{shape}]"


def named(path):
    """A path as text, in which the place 0 is another than the key `0`."""
    return ".".join(key if isinstance(key, str) else f"#{key}" for key in path)


def decoder_signature(decoder, program, images):
    kind, bucket = program.said["kind"], program.said["bucket"]
    b, v = bucket["batch"], decoder["vocab_size"]
    assert "cache" in decoder
    assert decoder.get("start_token_ids") != []
    assert all(0 <= token < v for token in decoder.get("start_token_ids", ()))
    cache = cache_of(decoder, b, bucket["context"])
    donated = [f"{name}* {array}" for name, array in cache]
    kept = [f"{name} {array}" for name, array in cache]
    if kind == "copy":
        source = cache_of(decoder, bucket["source_batch"], bucket["source_context"])
        rows = f"rows int32[{b}]"
        sources = [f"{name} {array}".replace("cache", "source", 1) for name, array in source]
        targets = [each.replace("cache", "target", 1) for each in donated]
        return [*sources, rows, *targets], [each.replace("cache", "target", 1) for each in kept]
    if kind == "encode":
        assert "source" in decoder
        sizes = {"batch": b, "source": bucket["source"]}
        ((name, source_of),) = sized([decoder["source"]], sizes, "source")
        assert name == "source"
        assert "source" in decoder["source"].rpartition("~")[2].split(",")
        return [f"source {source_of}", f"length int32[{b}]"], kept
    row, history = f"int32[{b}]", f"int32[{b},{v}]"
    sampling = {
        **{"temperature": "float32", "top_k": "int32", "top_p": "float32", "min_p": "float32"},
        **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), "float32"),
    }
    samples = [f"{name} {kind_of}[{b}]" for name, kind_of in sampling.items()]
    samples += [f"seed uint32[{b},2]", f"bias float32[{b},{v}]", f"logprobs int32[{b}]"]
    first = [f"token {row}", f"position {row}"]
    count = bucket.get("prompt", bucket.get("draft", 0) + 1)
    inputs = [f"tokens int32[{b},{count}]", f"start {row}", f"length {row}"]
    top = min(20, v)
    if kind == "image-prefill":
        width, rest = divmod(images["width"], images["tokens"])
        assert rest == 0
        inputs += [f"embeddings float32[{b},{count},{width}]", f"ends int32[{b},{count}]"]
    if kind in ("prefill", "image-prefill"):
        gives = [f"token {row}", f"logprob float32[{b}]", f"top_tokens int32[{b},{top}]"]
        gives += [f"top_logprobs float32[{b},{top}]"]
        return [*inputs, *samples, f"history {history}", *donated], [*gives, *kept]
    n = program.results[2].shape[0] if kind == "decode" else count
    assert n > 0
    many = [f"tokens int32[{n},{b}]", f"logprobs float32[{n},{b}]"]
    many += [f"top_tokens int32[{n},{b},{top}]", f"top_logprobs float32[{n},{b},{top}]"]
    if kind == "decode":
        inputs, gives = [*first, f"live {row}", "steps int32[]"], [*first, *many]
    else:
        gives = [*many, f"accepted {row}"]
    return [*inputs, *samples, f"history* {history}", *donated], [
        *gives,
        f"history {history}",
        *kept,
    ]


def cache_of(decoder, batch, context):
    """The name and the array of each part of a cache."""
    found = sized(decoder["cache"], {"batch": batch, "context": context}, "cache")
    assert len(dict(found)) == len(found)
    assert 0 < len(found) <= 16_384
    return found


def sized(texts, sizes, first):
    """The name and the array that each text stands for, at these sizes."""
    found = []
    for text in texts:
        path, end = json.JSONDecoder().raw_decode(text)
        assert path[:1] == [first]
        assert len(path) <= 256
        form = re.fullmatch(r" (\w+)\[([\d,]+)\] ~([a-z,]+)", text[end:])
        assert form
        shape, axes = [int(size) for size in form[2].split(",")], form[3].split(",")
        assert len(shape) == len(axes)
        assert len(shape) <= 64
        assert axes[0] == "batch"
        assert all(axes.count(axis) <= 1 for axis in sizes)
        assert set(axes) <= {*sizes, ""}
        assert all(size == 1 for size, axis in zip(shape, axes, strict=True) if axis)
        assert 0 not in shape
        whole = [sizes.get(axis, size) for size, axis in zip(shape, axes, strict=True)]
        found.append((named(path), f"{form[1]}[{','.join(map(str, whole))}]"))
    return found


def image_signature(images, program):
    batch, (height, width) = program.said["bucket"]["batch"], images["size"]
    pixels = f"pixels uint8[{batch},{height},{width},3]"
    return [pixels], [f"embedding float32[{batch},{images['width']}]"]


def encoder_signature(encoder, program):
    kind, bucket = program.said["kind"], program.said["bucket"]
    b, t, packed = bucket["batch"], bucket["length"], bucket.get("sentences")
    sentences = packed or b
    if kind == "embed":
        (hidden,) = program.results
        takes = [f"tokens int32[{b},{t}]", *([f"length int32[{sentences}]"] if packed else [])]
        return takes, [f"hidden float32[{b},{t},{hidden.shape[2]}]"]
    width = program.arguments[1].shape[2]
    length, states = f"length int32[{sentences}]", f"float32[{b},{t},{width}]"
    if kind == "layer":
        assert program.said["weights"] in encoder["layers"]
        return [length, f"hidden* {states}"], [f"hidden {states}"]
    gives = [f"embedding float32[{sentences},{encoder['width']}]"]
    for head, result in zip(encoder.get("heads", []), program.results[1:], strict=True):
        assert head in ("multi_vector", "sparse")
        last = f",{result.shape[2]}" if head == "multi_vector" else ""
        gives.append(f"{head} float32[{b},{t}{last}]")
    return [length, f"hidden {states}"], gives


def check_decoder(programs):
    sizes = {kind: [] for kind in BUCKETS}
    for said in programs:
        if said["kind"] != "call":
            sizes[said["kind"]].append(said["bucket"])
    batches = sorted({bucket["batch"] for bucket in sizes["decode"]})
    contexts = sorted({bucket["context"] for bucket in sizes["decode"]})
    every = {(batch, context) for batch in batches for context in contexts}
    assert every
    for kind in ("decode", "prefill", "verify"):
        found = {(bucket["batch"], bucket["context"]) for bucket in sizes[kind]}
        assert found == every or (kind == "verify" and not found)
    assert all(bucket["prompt"] <= bucket["context"] for bucket in sizes["prefill"])
    assert len({bucket["draft"] for bucket in sizes["verify"]}) <= 1
    for bucket in sizes["image-prefill"]:
        assert bucket["batch"] == batches[0]
        assert bucket["prompt"] <= bucket["context"]
    sources = {bucket["source"] for bucket in sizes["encode"]}
    reading = {(b["batch"], b["context"], b["source"]) for b in sizes["encode"]}
    assert reading == {(batches[0], context, source) for context in contexts for source in sources}
    names = ("source_batch", "source_context", "batch", "context")
    copies = {tuple(bucket[name] for name in names) for bucket in sizes["copy"]}
    assert copies >= {(batches[0], context, batch, context) for batch, context in every}
    for place, context in enumerate(contexts[1:]):
        assert copies >= {(batch, contexts[place], batch, context) for batch in batches}


def read_chat(layer):
    chat = json.loads(layer)
    assert len(layer) <= 4 << 20
    assert layer == canonical(chat)
    assert chat.keys() == {"templates", "special_tokens"}
    assert chat["templates"]
    for table in chat.values():
        assert all(name and f"{name}{text}".encode() for name, text in table.items())
    return chat


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def digest_of(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def blob(bundle, descriptor):
    name = descriptor["digest"].removeprefix("sha256:")
    content = (bundle / "blobs" / "sha256" / name).read_bytes()
    assert descriptor["digest"] == digest_of(content)
    assert descriptor["size"] == len(content)
    return content


def parsed(bundle, descriptor):
    content = blob(bundle, descriptor)
    found = json.loads(content)
    assert content == canonical(found)
    return found


def check_requirement(needs):
    assert needs.keys() <= TEXT.keys() | LISTS.keys() | NUMBERS.keys()
    assert {"platform", "architecture", "cpu_features", "jaxlib"} <= needs.keys()
    for axis, form in TEXT.items():
        assert axis not in needs or re.fullmatch(form, needs[axis], re.ASCII)
    for axis, form in LISTS.items():
        assert all(re.fullmatch(form, item, re.ASCII) for item in needs.get(axis, ()))
    for axis, least in NUMBERS.items():
        assert axis not in needs or needs[axis] >= least


def parse_argument(text, mesh):
    path, end = json.JSONDecoder().raw_decode(text)
    found = re.fullmatch(
        r" (?:weak )?(\w+)\[([\d,]*)\]( donated)?(?: @([\w+,]+))?(?: ~([\w,]+))?", text[end:]
    )
    assert found
    shape = [int(size) for size in found[2].split(",") if size]
    assert found[5] is None or len(found[5].split(",")) == len(shape)
    split = parse_split(found[4], shape, mesh) if found[4] else []
    return Argument(path, found[1], shape, found[3] is not None, split)


def parse_split(text, shape, mesh):
    """Axes of the mesh, or nothing, for each dimension; together they divide what they split."""
    axes = text.split(",")
    used = [axis.split("+") if axis else [] for axis in axes]
    assert any(used)
    names = [axis for each in used for axis in each]
    assert len(set(names)) == len(names)
    for size, each in zip(shape, used, strict=True):
        assert size % math.prod(mesh[axis] for axis in each) == 0
    return axes


def unpack(pack, segment):
    frame = pack[segment["offset"] : segment["offset"] + segment["size"]]
    assert segment["digest"] == digest_of(frame)
    said = zstandard.get_frame_parameters(frame)
    assert said.content_size == segment["raw_size"]
    assert said.has_checksum
    raw = zstandard.ZstdDecompressor().decompress(frame)
    assert segment["raw_digest"] == digest_of(raw)
    return raw


def read_weights(layer, config, mesh):
    if layer is None:
        assert not any(config["weight_sets"].values())
        return {}
    size = int.from_bytes(layer[:8], "little")
    header = json.loads(layer[8 : 8 + size])
    tensors = dict(safetensors.deserialize(layer))
    for name in tensors:
        starts_at = 8 + size + header[name]["data_offsets"][0]
        assert name.startswith(".gap") or starts_at % 64 == 0
    assert {name for names in config["weight_sets"].values() for name in names} <= tensors.keys()
    for names in zip(*(config["weight_sets"][name] for name in layers_of(config)), strict=True):
        assert len({tuple(tensors[name]["shape"]) for name in names}) == 1
    for name, text in config.get("weight_shardings", {}).items():
        parse_split(text, tensors[name]["shape"], mesh)
    return tensors


def layers_of(config):
    return config.get("encoder", {}).get("layers", [])


def shards(values, split, mesh):
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


def served_by(targets, machine):
    """The target that a machine loads, by "Which target a machine loads"."""
    fitting = [target for target in targets if fits(target.needs, machine)]

    def preference(target):
        features = target.needs["cpu_features"]
        other = target.needs.get("device_kind") != machine.get("device_kind")
        return other, -max(map(bits, features), default=0), -len(features)

    return min(fitting, key=preference).name if fitting else None  # of equals min takes the first


def bits(feature):
    if feature.startswith(("avx512", "amx")):
        return 512
    return 256 if feature.startswith(("avx", "fma", "f16c")) else 128


def fits(needs, machine):
    equal = ["platform", "architecture", "jaxlib", "plugin", "compute_capability", "topology"]
    equal += ["xla_flags", "environment", *(["device_kind"] if needs["platform"] == "tpu" else [])]
    at_least = ["device_memory_bytes", *([] if needs["platform"] == "cpu" else ["device_count"])]
    return (
        all(needs[axis] == machine.get(axis) for axis in equal if axis in needs)
        and set(needs["cpu_features"]) <= set(machine["cpu_features"])
        and all(needs[axis] <= machine.get(axis, -1) for axis in at_least if axis in needs)
        and all(
            axis not in needs or (axis in machine and reaches(axis, needs[axis], machine[axis]))
            for axis in ("cuda", "driver", "glibc")
        )
    )


def reaches(axis, needed, found):
    """Whether a version is at least another, and for CUDA of its major version."""
    wanted, has = ([int(part) for part in re.findall("[0-9]+", text)] for text in (needed, found))
    has += [0] * (len(wanted) - len(has))
    return has >= wanted and (axis != "cuda" or has[0] == wanted[0])
