"""A small real bundle in memory, compiled by XLA and packed as the compiler packs, and its fixtures."""

import dataclasses
import functools
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .layouts import write_files

V3_FEATURES = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma"),
    *("fxsr", "lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1"),
    *("sse4.2", "ssse3", "xsave"),
)
COMPILE_FOR_V3 = """
import sys
from pathlib import Path
from prejit.compiler.compile.worker.disassembly import NEVER_CHOSEN, declared_features
from prejit.compiler.compile.worker.xla import CompileFor, compile_portable
features = tuple(sys.argv[1].split(","))
for at in sys.argv[2:]:
    machine = CompileFor(cpu="x86-64-v3", cpu_features=features)
    compiled = compile_portable(Path(at).read_bytes(), machine)
    Path(at + ".xla").write_bytes(compiled.serialized)
    declared = set(declared_features(compiled.serialized)) - set(NEVER_CHOSEN)
    Path(at + ".features").write_text(",".join(sorted(declared)))
"""


@dataclass(frozen=True)
class Recipe:
    """A bundle in memory: every digest right, whatever it says. What forging starts from."""

    targets: tuple[Any, ...]
    name: str
    weights: Mapping[str, Any]

    def assemble(self):
        from prejit.compiler.pipeline.pack.bundle_files import assemble

        return assemble(self.name, self.targets)

    def write(self, path):
        """Writes the files as they are, without the care (and the time) of `write_layout`."""
        from prejit.runtime.base.typed_json import from_json
        from prejit.runtime.format.bundle_schema import Index
        from prejit.runtime.format.index_writing import encode_root

        index, blobs = self.assemble()
        write_files(path, index, blobs)
        (path / "index.json").write_bytes(encode_root(from_json(Index, index, ""), index, ()))
        return path

    def write_described(self, path):
        """Writes the bundle as a build does, with list of parts and provenance."""
        from prejit.compiler.pipeline.pack.bundle_descriptions import (
            attach_descriptions,
            recording_provenance,
        )
        from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS, assemble
        from prejit.compiler.pipeline.pack.bundle_writing import write_layout
        from prejit.runtime.base.files import digest_of

        index, blobs = assemble(self.name, self.targets, DESCRIPTIONS)
        write_layout(path, index, blobs)
        digest = digest_of(index)
        attach_descriptions(path, digest, functools.partial(recording_provenance, digest))
        return path

    def only(self, *targets):
        kept = tuple(target for target in self.targets if target.config.target in targets)
        return dataclasses.replace(self, targets=kept)

    def configured(self, change):
        return self._each(lambda target: dataclasses.replace(target, config=change(target.config)))

    def layered(self, change):
        return self._each(lambda target: dataclasses.replace(target, layers=change(target.layers)))

    def _each(self, change):
        return dataclasses.replace(self, targets=tuple(map(change, self.targets)))

    def with_content(self, media_type, content):
        """With other bytes in one layer, its digest set right."""
        from prejit.compiler.pipeline.pack.bundle_files import layer

        return self.layered(
            lambda layers: tuple(
                layer(media_type, content, old.title) if old.media_type == media_type else old
                for old in layers
            )
        )

    def content(self, media_type):
        found = next(x for x in self.targets[0].layers if x.media_type == media_type)
        return found.content if isinstance(found.content, bytes) else found.content.read_bytes()


@pytest.fixture(scope="session")
def make_recipe(tmp_path_factory, once):
    """Makes a recipe: `make_recipe(score_scale=1.0, name="example", buckets=(2, 8), miscompiled="")`.

    Its programs, for the targets `cpu-host` and `cpu-x86-64-v3`:

        score/b<B>   x float32[B,16] -> float32[B,4]     with weights `score:bias`, `score:kernel`
        nest         a tree of four dtypes -> a tree     without weights
        tick         -> int32[]                          without any argument
    """

    @functools.cache
    def compiled(buckets, miscompiled):
        """By one worker of pytest-xdist for all. What a recipe is named and weighs changes no program."""

        def make(at):
            (at / "programs").write_bytes(pickle.dumps(_compile(at, buckets, miscompiled)))

        sizes = "-".join(map(str, buckets))
        made = once(f"recipe {sizes} {miscompiled}".strip().replace(" ", "-"), make)
        return dict(pickle.loads((made / "programs").read_bytes()))

    @functools.cache
    def make(score_scale=1.0, name="example", buckets=(2, 8), miscompiled=""):
        at = tmp_path_factory.mktemp("recipe")
        return _pack(at, score_scale, name, compiled(buckets, miscompiled))

    return make


@pytest.fixture(scope="session")
def recipe(make_recipe):
    return make_recipe()


@pytest.fixture
def bundle_dir(recipe, tmp_path):
    """A bundle of this test's own, just written."""
    return recipe.write(tmp_path / "example")


@pytest.fixture(scope="session")
def settled_dir(recipe, tmp_path_factory):
    """A bundle that lies there long enough to get receipts. Read only: it is the whole session's."""
    from prejit.runtime.machine.kept_files import SETTLED_SECONDS

    path = recipe.write(tmp_path_factory.mktemp("settled") / "example")
    newest = max(file.stat().st_ctime for file in path.rglob("*"))
    while time.time() - newest <= SETTLED_SECONDS + 0.05:
        time.sleep(0.05)
    return path


def make_example(at):
    """The recipe of `make_recipe` for who has no fixtures; `at` is a directory for its store."""
    return _pack(at, 1.0, "example", _compile(at, (2, 8), ""))


def _compile(at, buckets, miscompiled):
    from prejit.compiler.compile.worker.disassembly import NEVER_CHOSEN, declared_features
    from prejit.compiler.compile.worker.xla import compile_portable

    lowered = _lower(buckets, miscompiled)
    for_v3 = _compile_for_v3(at, {p: portable for p, (portable, _, _) in lowered.items()})
    programs = {}
    for name, (portable, arguments, results) in lowered.items():
        host = compile_portable(portable)
        features = frozenset(declared_features(host.serialized)) - {*NEVER_CHOSEN}
        executables = {"cpu-host": (host.serialized, features), "cpu-x86-64-v3": for_v3[name]}
        arrays = {"arguments": arguments, "results": results}
        made = {"portable": portable, "executables": executables, "memory": host.memory}
        programs[name] = SimpleNamespace(**made, **arrays)
    return programs


def _pack(at, score_scale, name, programs):
    """Return the bundle of these programs; `at` is a directory for a store."""
    import numpy as np

    from prejit.compiler.pipeline.pack import bundle_files
    from prejit.compiler.store.directory_store import DirectoryStore
    from prejit.runtime.base.files import digest_of
    from prejit.runtime.format import names
    from prejit.runtime.format.bundle_schema import Config, ProgramEntry
    from prejit.runtime.machine.fingerprint import Requirement

    random = np.random.default_rng(0)
    weights = {
        "score:bias": np.arange(4, dtype=np.float32),
        "score:kernel": random.standard_normal((16, 4), np.float32) * np.float32(score_scale),
    }
    cache = DirectoryStore.open(at / "cache")
    lowered = {p: x.portable for p, x in programs.items()}
    kind = names.PORTABLE_MEDIA_TYPE
    portable, portables = packed_in_memory(cache, kind, "programs.stablehlo", lowered)
    tensors = [
        bundle_files.PackedTensor(tensor, str(value.dtype), value.shape, lambda value=value: value)
        for tensor, value in weights.items()
    ]
    with cache.blob_writer() as blob:
        bundle_files.write_weights(tensors, blob)
    stored = cache.read_blob(blob.digest)
    shared = (
        bundle_files.layer(names.LICENSE_MEDIA_TYPE, b"Apache-2.0\n", "LICENSE"),
        bundle_files.layer(names.WEIGHTS_MEDIA_TYPE, stored, "weights.safetensors"),
        portable,
    )
    packed = []
    for target in ("cpu-host", "cpu-x86-64-v3"):
        compiled = {p: x.executables[target][0] for p, x in programs.items()}
        kind = names.EXECUTABLES_MEDIA_TYPE
        executables, segments = packed_in_memory(cache, kind, "programs.xla", compiled)
        needed = frozenset[str]().union(*(x.executables[target][1] for x in programs.values()))
        needs = Requirement("cpu", os.uname().machine, tuple(sorted(needed)), version("jaxlib"))
        config = Config(
            **{"format": names.FORMAT_VERSION, "bundle": name, "target": target},
            requirement=needs,
            versions={"jax": version("jax"), "jaxlib": version("jaxlib"), "prejit": "0.1.0"},
            programs=tuple(
                ProgramEntry(
                    **{"name": program, "kind": "call", "memory": made.memory},
                    bucket={"b": int(program[7:])} if program.startswith("score/b") else {},
                    key=digest_of(f"{target} {program}".encode()),
                    arguments=tuple(map(str, made.arguments)),
                    results=tuple(map(str, made.results)),
                    executable=segments[program],
                    portable=portables[program],
                    weights="score" if program.startswith("score/") else None,
                    arguments_tree=tree_of(made.arguments),
                    results_tree=tree_of(made.results),
                )
                for program, made in programs.items()
            ),
            weight_sets={"score": tuple(weights)},
        )
        packed.append(bundle_files.PackedTarget(config, (executables, *shared)))
    return Recipe(tuple(packed), name, weights)


def framed(raw):
    """The segment of a program at the beginning of a pack, and its frame."""
    import zstandard

    from prejit.runtime.base.files import digest_of
    from prejit.runtime.format.bundle_schema import Segment

    frame = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(raw)
    return Segment(0, len(frame), digest_of(frame), len(raw), digest_of(raw)), frame


def packed_in_memory(cache, media_type, title, raws):
    """A layer with the frames of programs, by way of a store, and their segments by name."""
    from prejit.compiler.pipeline.pack import bundle_files

    frames = {}
    for name, raw in raws.items():
        frames[name], frame = framed(raw)
        cache.put_blob(frame)
    packed, segments = bundle_files.pack(media_type, title, frames, cache)
    assert isinstance(packed.content, Path)
    return bundle_files.layer(media_type, packed.content.read_bytes(), title), segments


def with_trees(program):
    """A program whose arguments and results are nested as their paths say."""
    from prejit.runtime.format.arrays import Array

    taken, given = ([*map(Array.parse, texts)] for texts in (program.arguments, program.results))
    for paths in ([array.path for array in arrays] for arrays in (taken, given)):
        inner = {path[:place] for path in paths for place in range(len(path))}
        if len({*paths}) != len(paths) or not inner.isdisjoint(paths):
            return program
    return dataclasses.replace(program, arguments_tree=tree_of(taken), results_tree=tree_of(given))


def tree_of(arrays):
    """The tree whose leaves have the paths of these arrays: dicts for names, tuples for places."""

    def nested(paths):
        if paths == [()]:
            return "*"
        parts = {}
        for key, *rest in paths:
            parts.setdefault(key, []).append(tuple(rest))
        children = {key: nested(inner) for key, inner in parts.items()}
        named = any(type(key) is str for key in parts)
        return ["dict", [*children.items()]] if named else ["tuple", [*children.values()]]

    return json.dumps(nested([array.path for array in arrays]), separators=(",", ":"))


def _score(weights, x, miscompiled):
    import jax.numpy as jnp

    kernel, bias = weights["kernel"], weights["bias"]
    match miscompiled:
        case "operands swapped":
            return bias - jnp.tanh(x @ kernel)
        case "rows swapped":
            return jnp.tanh(x[::-1] @ kernel) + bias
        case "tanh dropped":
            return x @ kernel + bias
        case "bias dropped":
            return jnp.tanh(x @ kernel) + bias * 0
        case "one term of the sum dropped":
            return jnp.tanh(x[:, 1:] @ kernel[1:]) + bias
        case "bfloat16":
            rounded = (x.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)
            return jnp.tanh(rounded) + bias
    return jnp.tanh(x @ kernel) + bias


def _lower(buckets, miscompiled):
    """Lower the programs of a recipe: by name the portable program, the arguments and the results."""
    import jax
    import jax.numpy as jnp

    from prejit.runtime.format.arrays import Array

    def score(weights, x):
        return _score(weights, x, miscompiled)

    def nest(tree):
        half, (count, flag) = tree["half"], tree["pair"]
        doubled = jnp.where(flag, half + half, half)
        return {"sums": (doubled, count + 1), "scalar": jnp.asarray(2.5, jnp.float32)}

    def tick():
        return jnp.asarray(7, jnp.int32)

    def shaped(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    found = {}
    for size in buckets:
        arrays = [Array(("x",), "float32", (size, 16))], [Array((), "float32", (size, 4))]
        portable = export(score, {"bias": shaped(4), "kernel": shaped(16, 4)}, shaped(size, 16))
        found[f"score/b{size}"] = portable, *arrays
    arguments = [
        Array(("tree", "half"), "bfloat16", (3,)),
        Array(("tree", "pair", 0), "int32", (2, 2)),
        Array(("tree", "pair", 1), "bool", ()),
    ]
    results = [
        Array(("scalar",), "float32", ()),
        Array(("sums", 0), "bfloat16", (3,)),
        Array(("sums", 1), "int32", (2, 2)),
    ]
    half, *pair = (shaped(*each.shape, dtype=each.dtype) for each in arguments)
    nested = export(nest, {"half": half, "pair": tuple(pair)})
    return found | {
        "nest": (nested, arguments, results),
        "tick": (export(tick), [], [Array((), "int32", ())]),
    }


def export(function, *arguments, custom_calls=()):
    """The portable program of a function, which may call these kernels."""
    import jax
    import jax.export

    traced = jax.jit(function, keep_unused=True)
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in custom_calls]
    exported = jax.export.export(traced, platforms=("cpu",), disabled_checks=unchecked)(*arguments)
    return bytes(exported.mlir_module_serialized)


def _compile_for_v3(at, portables):
    """In a process of its own: jaxlib 0.10 takes the level from XLA_FLAGS alone."""
    files = {}
    for place, (program, portable) in enumerate(portables.items()):
        files[program] = at / f"{place}.stablehlo"
        files[program].write_bytes(portable)
    subprocess.run(
        [sys.executable, "-c", COMPILE_FOR_V3, ",".join(V3_FEATURES), *map(str, files.values())],
        env={**os.environ, "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"},
        check=True,
    )
    return {
        program: (Path(f"{file}.xla").read_bytes(), Path(f"{file}.features").read_text().split(","))
        for program, file in files.items()
    }
