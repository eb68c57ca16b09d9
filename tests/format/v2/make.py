"""How the golden bundles of format 2 were made, once, with jax 0.10.2. For the record: never run it again.

    call/       two targets of two versions of jax, two programs of the user's own, with weights and a licence
    decoder/    a GPT-2 of 500 parameters with a tokenizer
    mesh/       the same, split over two devices
    fleet/      targets of every platform that ask for something on every axis, and programs that tell
                which platform they were compiled for

All executables but call's are of a jaxlib that never was, so that every machine falls back to the
portable programs (and the files stay small). `expected.json` holds the digests, what the programs answer,
and which target of the fleet serves which machine. From the root of the repository, with 0.12.0.1's
environment in $PREJIT_ENVIRONMENTS:

    .venv/bin/python tests/format/v2/make.py
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import zstandard
from jax import export

from prejit.compiler.pipeline.pack.bundle_files import (
    PackedTarget,
    PackedTensor,
    assemble,
    layer,
    pack,
    write_weights,
)
from prejit.compiler.store.directory import DirectoryStore
from prejit.runtime import load
from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format import limits
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    TITLE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import read_root
from prejit.runtime.format.schema import Config, Memory, Portable, ProgramEntry, Segment
from prejit.runtime.format.writing import write_layout
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.requirement import Requirement

HERE = Path(__file__).parent
CALL = """
[bundle]
name = "call"
license = "LICENSE"
[[program]]
name = "score"
function = "golden_functions:score"
params = "score.safetensors"
args = { x = "float32[{b}, 16]" }
buckets = { b = [2] }
[[program]]
name = "nest"
function = "golden_functions:nest"
args = { tree = { half = "bfloat16[3]", pair = ["int32[2, 2]", "bool[]"] } }
[[target]]
name = "cpu-x86-64-v2"
[[target]]
name = "cpu-x86-64-v3"
jax = "0.12.0.1"
"""
DECODER = """
[bundle]
name = "decoder"
[model]
source = "model"
[generate]
batch = [1]
prompt = [4]
context = [16]
[[target]]
name = "cpu-x86-64-v2"
"""
MESH = """
[bundle]
name = "mesh"
[model]
source = "model"
[generate]
batch = [2]
prompt = [4]
context = [16]
[mesh]
tensor = 2
[[target]]
name = "cpu-x86-64-v2"
"""
NO_JAXLIB = "0.0.0"

# The fleet: what targets need of machines, and machines that ask to be served.

CPU = Requirement(
    platform="cpu",
    architecture="x86_64",
    cpu_features=("64bit", "cmov", "sse", "sse2", "ssse3"),
    jaxlib=NO_JAXLIB,
    xla_flags=(),
    environment=(),
)
AVX2 = dataclasses.replace(CPU, cpu_features=("64bit", "avx2", "fma"))
GPU = dataclasses.replace(
    CPU,
    platform="cuda",
    cpu_features=(),
    plugin="jax-cuda13-pjrt 0.0.0",
    cuda="13.0",
    driver="580.65.06",
    device_kind="NVIDIA L4",
    compute_capability="8.9",
    device_count=1,
    device_memory_bytes=20_000_000_000,
    environment=("NVIDIA_TF32_OVERRIDE=0",),
)
TPU = dataclasses.replace(
    CPU,
    platform="tpu",
    cpu_features=(),
    plugin="libtpu 0.0.0",
    device_kind="TPU v5 lite",
    device_count=1,
    topology="1x1",
    device_memory_bytes=16_000_000_000,
    environment=("LIBTPU_INIT_ARGS=--xla_tpu_enable_latency_hiding_scheduler=true",),
)
NEEDS = {
    "cpu-x86-64-v2": CPU,
    "cpu-x86-64-v3": AVX2,  # fewer extensions, wider ones
    "cpu-fast-math": dataclasses.replace(AVX2, xla_flags=("--xla_cpu_enable_fast_math=true",)),
    "cuda-l4": GPU,
    "cuda-l40s": dataclasses.replace(GPU, device_kind="NVIDIA L40S"),
    "tpu-v5e": TPU,
}

OLD_CPU = Fingerprint("cpu", "x86_64", CPU.cpu_features, NO_JAXLIB, "", 2, 1 << 33)
NEW_CPU = dataclasses.replace(OLD_CPU, cpu_features=(*CPU.cpu_features, "avx2", "fma"))
FAST_MATH = dataclasses.replace(NEW_CPU, xla_flags=("--xla_cpu_enable_fast_math=true",))
L40S = dataclasses.replace(
    NEW_CPU,
    platform="cuda",
    plugin=GPU.plugin,
    cuda="13.1.80",
    driver="590.44.01",
    device_kind="NVIDIA L40S",
    compute_capability="8.9",
    device_count=4,
    device_memory_bytes=48_000_000_000,
    environment=("NVIDIA_TF32_OVERRIDE=0",),
)
V5E = dataclasses.replace(
    NEW_CPU,
    platform="tpu",
    plugin=TPU.plugin,
    device_kind="TPU v5 lite",
    device_count=1,
    topology="1x1",
    device_memory_bytes=17_000_000_000,
    environment=("LIBTPU_INIT_ARGS=--xla_tpu_enable_latency_hiding_scheduler=true",),
)
MACHINES = {
    "old cpu": OLD_CPU,
    "new cpu": NEW_CPU,
    "new cpu, fast math": FAST_MATH,
    "new cpu, other jaxlib": dataclasses.replace(NEW_CPU, jaxlib="0.0.1"),
    "arm cpu": dataclasses.replace(NEW_CPU, architecture="aarch64"),
    "l40s": L40S,
    "another board of its capability": dataclasses.replace(L40S, device_kind="NVIDIA RTX 6000 Ada"),
    "h100": dataclasses.replace(L40S, device_kind="NVIDIA H100", compute_capability="9.0"),
    "l40s, other plugin": dataclasses.replace(L40S, plugin="jax-cuda12-pjrt 0.0.0"),
    "l40s, cuda 13": dataclasses.replace(L40S, cuda="13"),
    "l40s, cuda 14": dataclasses.replace(L40S, cuda="14.0"),
    "l40s, old driver": dataclasses.replace(L40S, driver="580.9"),
    "l40s, no environment": dataclasses.replace(L40S, environment=()),
    "l40s, a small part of it": dataclasses.replace(L40S, device_memory_bytes=10_000_000_000),
    "v5e": V5E,
    "v5e, four chips": dataclasses.replace(V5E, topology="2x2", device_count=4),
    "v6e": dataclasses.replace(V5E, device_kind="TPU v6 lite"),
}


def first_format() -> ModuleType:
    """v1/make.py: its functions and its model are those of this format too."""
    spec = importlib.util.spec_from_file_location("make_v1", HERE.parent / "v1" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def frame_of(raw: bytes) -> tuple[bytes, Segment]:
    """A program as it lies in a pack, at its start."""
    frame = zstandard.ZstdCompressor(level=10, write_checksum=True).compress(raw)
    digests = digest_of(frame), digest_of(raw)
    return frame, Segment(0, len(frame), digests[0], len(raw), digests[1])


def without_executables(path: Path) -> tuple[bytes, dict[str, Any]]:
    """The files of a bundle whose executables are a few words, for a jaxlib that never was.

    They call no kernels, so the bundle has none either.
    """
    frame, segment = frame_of(b"an executable for a jaxlib that never was")
    with Layout(path) as layout:
        root = read_root(layout)
        [target] = match(root, Fingerprint.current())
        contents = read_contents(layout, target)
        layers = [
            layer(
                kept.mediaType,
                frame
                if kept.mediaType == EXECUTABLES_MEDIA_TYPE
                else layout.read_blob(kept.digest, kept.size),
                (kept.annotations or {})[TITLE],
            )
            for kept in contents.manifest.layers
            if kept.mediaType != KERNELS_MEDIA_TYPE
        ]
    config = contents.config
    config = dataclasses.replace(
        config,
        requirement=dataclasses.replace(config.requirement, jaxlib=NO_JAXLIB, glibc=None),
        programs=tuple(
            dataclasses.replace(p, executable=segment, kernels=None) for p in config.programs
        ),
        kernels=None,
        forms=None,
    )
    return assemble(config.bundle, [PackedTarget(config, tuple(layers))])


def where(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """x and the weights, and 1 on a CPU, 2 with CUDA, 3 on a TPU."""
    added = {name: lambda place=place: jnp.float32(place) for place, name in enumerate(ORDER, 1)}
    return x + weights["bias"] + jax.lax.platform_dependent(**added)


ORDER = ("cpu", "cuda", "tpu")
PLATFORMS: dict[str, tuple[str, ...] | None] = {
    # Each way to say what a portable program was lowered for.
    "where/all": ORDER,
    "where/turned": ("tpu", "cpu"),
    "where/cpu": ("cpu",),
    "where/unsaid": None,
}


def fleet(at: Path) -> tuple[bytes, dict[str, Any]]:
    """Written by hand: no executable is compiled, each is a few words."""
    cache = DirectoryStore.open(at / "cache")
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    jax.config.update("jax_traceback_in_locations_limit", 0)
    portables = {}
    for name, platforms in PLATFORMS.items():
        lower: Callable[..., Any] = export.export(
            jax.jit(where, keep_unused=True), platforms=platforms or ("cpu",)
        )
        frame, segment = frame_of(lower({"bias": shape}, shape).mlir_module_serialized)
        cache.put_blob(frame)
        portables[name] = segment
    portable, portables = pack(portables, cache)
    bias = PackedTensor("where:bias", "float32", (4,), lambda: np.arange(4, dtype=np.float32))
    with cache.blob_writer() as blob:
        write_weights([bias], blob)
    weights = cache.read_blob(blob.digest)
    assert weights is not None
    shared = (
        layer(WEIGHTS_MEDIA_TYPE, weights, "weights.safetensors"),
        layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
    )
    packed = []
    for target, needs in NEEDS.items():
        frame, segment = frame_of(f"an executable for {target}".encode())
        programs = tuple(
            ProgramEntry(
                name=name,
                kind="call",
                bucket={},
                key=digest_of(f"{target} {name}".encode()),
                arguments=(str(Array(("x",), "float32", (4,))),),
                results=(str(Array((), "float32", (4,))),),
                executable=segment,
                portable=portables[name],
                memory=Memory(32, 16, 0, 0),
                weights="where",
                platforms=platforms,
            )
            for name, platforms in PLATFORMS.items()
        )
        config = Config(
            format=2,
            bundle="fleet",
            target=target,
            requirement=needs,
            versions={"jax": NO_JAXLIB, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
            programs=programs,
            weight_sets={"where": ("where:bias",)},
            portable=Portable("0.10.2", "1.15.0", "2026-12-14"),
        )
        executables = layer(EXECUTABLES_MEDIA_TYPE, frame, "programs.xla")
        packed.append(PackedTarget(config, (executables, *shared)))
    return assemble("fleet", packed)


def served_by(machine: Fingerprint) -> str | None:
    """The target of the fleet that a machine loads."""
    with Layout(HERE / "fleet") as layout:
        root = read_root(layout)
        targets = match(root, machine)
    return next((target.name for target in targets if target.verdict.matches), None)


def main() -> None:
    first = first_format()
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        first.write_inputs(at)
        for name, manifest in (("call", CALL), ("decoder", DECODER), ("mesh", MESH)):
            (at / f"{name}.toml").write_text(manifest)
            command = [sys.executable, "-m", "prejit.runtime", "build", str(at / f"{name}.toml")]
            environment = {**os.environ, "PREJIT_CACHE": str(at / "cache")}
            subprocess.run([*command, "-o", str(at)], env=environment, check=True)
        with Layout(at / "call") as layout:
            index = layout.read("index.json", limits.MAX_INDEX_BYTES)
        blobs = {f"sha256:{f.name}": f for f in (at / "call" / "blobs" / "sha256").iterdir()}
        write_layout(HERE / "call", index, blobs)
        write_layout(HERE / "decoder", *without_executables(at / "decoder"))
        write_layout(HERE / "mesh", *without_executables(at / "mesh"))
        write_layout(HERE / "fleet", *fleet(at))
    warnings.simplefilter("ignore")  # of fallback
    loaded = {name: load(HERE / name) for name in ("call", "decoder", "fleet", "mesh")}
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    prompts = ["a golden", "two devices"]
    one = [loaded["decoder"].generate(prompt, max_new_tokens=8) for prompt in prompts]
    two = loaded["mesh"].generate_batch(prompts, max_new_tokens=8)
    assert [result.token_ids for result in one] == [result.token_ids for result in two]
    expected = {
        "digests": {name: opened.digest for name, opened in loaded.items()},
        "score": loaded["call"].call("score", x=x).tolist(),
        "prompts": prompts,
        "token_ids": [result.token_ids for result in one],
        "texts": [result.text for result in one],
        "machines": {name: json.loads(to_json(m)) for name, m in MACHINES.items()},
        "served_by": {name: served_by(machine) for name, machine in MACHINES.items()},
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
