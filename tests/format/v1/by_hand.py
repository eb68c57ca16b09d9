"""The golden bundles that no build writes. Their tables are made here, and their executables are words.

fleet/      targets of every platform that ask for something on every axis, and programs that tell
            which platform they were compiled for
kernels/    a target with native kernels that wants a glibc, and one without; two programs, of which
            one calls a kernel
chunks/     a program with 150 KB of weights, whose layer has three chunks of 64 KB
recorded/   two recorded files of jax's compilation cache
"""

import dataclasses
import hashlib
import json
import subprocess
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import zstandard
from blake3 import blake3
from jax import export

from prejit.compiler.pipeline.pack.bundle_files import (
    PackedTarget,
    PackedTensor,
    assemble,
    check_readable,
    layer,
    write_weights,
)
from prejit.compiler.pipeline.pack.bundle_writing import write_layout
from prejit.compiler.pipeline.pack.weights_layer import VerityHash
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime import load
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.bundle_schema import (
    Chunks,
    Config,
    Kernels,
    Memory,
    Portable,
    ProgramEntry,
    RecordedProgram,
    Segment,
)
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.limits import MIN_CHUNK_BYTES
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement

HERE = Path(__file__).parent
NO_JAXLIB = "0.0.0"
NO_EXECUTABLE = b"an executable for a jaxlib that never was"
PORTABLE = Portable(jax.__version__, "1.14.0", "2026-12-14")

# The fleet: what targets need of machines, and machines that ask to be served.

CPU = Requirement(
    **{"platform": "cpu", "architecture": "x86_64", "jaxlib": NO_JAXLIB},
    **{"cpu_features": ("64bit", "cmov", "sse", "sse2", "ssse3")},
    **{"xla_flags": (), "environment": ()},
)
AVX2 = dataclasses.replace(CPU, cpu_features=("64bit", "avx2", "fma"))
GPU = dataclasses.replace(
    CPU,
    **{"platform": "cuda", "cpu_features": (), "plugin": "jax-cuda13-pjrt 0.0.0", "cuda": "13.0"},
    **{"driver": "580.65.06", "device_kind": "NVIDIA L4", "compute_capability": "8.9"},
    **{"device_count": 1, "device_memory_bytes": 20_000_000_000},
    environment=("NVIDIA_TF32_OVERRIDE=0",),
)
TPU = dataclasses.replace(
    CPU,
    **{"platform": "tpu", "cpu_features": (), "plugin": "libtpu 0.0.0", "topology": "1x1"},
    **{"device_kind": "TPU v5 lite", "device_count": 1, "device_memory_bytes": 16_000_000_000},
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
    **{"platform": "cuda", "plugin": GPU.plugin, "cuda": "13.1.80", "driver": "590.44.01"},
    **{"device_kind": "NVIDIA L40S", "compute_capability": "8.9", "device_count": 4},
    **{"device_memory_bytes": 48_000_000_000, "environment": GPU.environment},
)
V5E = dataclasses.replace(
    NEW_CPU,
    **{"platform": "tpu", "plugin": TPU.plugin, "device_kind": "TPU v5 lite", "device_count": 1},
    **{"topology": "1x1", "device_memory_bytes": 17_000_000_000, "environment": TPU.environment},
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

ORDER = ("cpu", "cuda", "tpu")
PLATFORMS = {
    # Each way to say what a portable program was lowered for.
    "where/all": ORDER,
    "where/turned": ("tpu", "cpu"),
    "where/cpu": ("cpu",),
    "where/unsaid": None,
}
PARTS = 3
ROWS = 800
X = tuple((place - 8) / 4 for place in range(16))
SCALED = (0.25, 1.0, 4.0, -1.0, 0.0)


def frame_of(raw, offset=0):
    """A program as it lies in a pack."""
    frame = zstandard.ZstdCompressor(level=10, write_checksum=True).compress(raw)
    return frame, Segment(offset, len(frame), digest_of(frame), len(raw), digest_of(raw))


def packed(raws):
    content, places = b"", {}
    for name, raw in raws.items():
        frame, places[name] = frame_of(raw, len(content))
        content += frame
    return content, places


def lowered(function, *arguments, platforms=("cpu",)):
    jax.config.update("jax_traceback_in_locations_limit", 0)
    jitted = jax.jit(function, keep_unused=True)
    return bytes(export.export(jitted, platforms=platforms)(*arguments).mlir_module_serialized)


def weights_layer(*tensors):
    with tempfile.TemporaryDirectory() as scratch:
        store = DirectoryStore.open(Path(scratch))
        with store.blob_writer() as blob:
            write_weights(tensors, blob)
        content = store.read_blob(blob.digest)
    return layer(WEIGHTS_MEDIA_TYPE, content, "weights.safetensors")


def config_of(bundle, target, needs, portable=PORTABLE, **fields):
    return Config(
        format=FORMAT_VERSION,
        bundle=bundle,
        target=target,
        requirement=needs,
        versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
        portable=portable,
        **{"programs": (), "weight_sets": {}, **fields},
    )


def program_of(name, target, takes, gives, **fields):
    """A program of one float32 array `x` that gives another."""
    return ProgramEntry(
        name=name,
        kind="call",
        bucket={},
        key=digest_of(f"{target} {name}".encode()),
        arguments=(str(Array(("x",), "float32", (takes,))),),
        results=(str(Array((), "float32", (gives,))),),
        memory=Memory(4 * takes, 4 * gives, 0, 0),
        arguments_tree='["dict",[["x","*"]]]',
        results_tree='"*"',
        settings={},
        **{"platforms": ("cpu",), **fields},
    )


def written(name, *targets):
    index, blobs = assemble(name, targets)
    check_readable(index, blobs)
    write_layout(HERE / name, index, blobs)
    return HERE / name


def where(weights, x):
    """x and the weights, and 1 on a CPU, 2 with CUDA, 3 on a TPU."""
    added = {name: lambda place=place: jnp.float32(place) for place, name in enumerate(ORDER, 1)}
    return x + weights["bias"] + jax.lax.platform_dependent(**added)


def fleet():
    """Write the fleet, and return which target serves which machine."""
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    portable, portables = packed(
        {
            name: lowered(where, {"bias": shape}, shape, platforms=platforms or ("cpu",))
            for name, platforms in PLATFORMS.items()
        }
    )
    bias = PackedTensor("where:bias", "float32", (4,), lambda: np.arange(4, dtype=np.float32))
    shared = weights_layer(bias), layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo")
    targets = []
    for target, needs in NEEDS.items():
        frame, segment = frame_of(f"an executable for {target}".encode())
        programs = tuple(
            program_of(
                *(name, target, 4, 4),
                executable=segment,
                portable=portables[name],
                weights="where",
                platforms=platforms,
            )
            for name, platforms in PLATFORMS.items()
        )
        sets = {"where": ("where:bias",)}
        table = config_of("fleet", target, needs, programs=programs, weight_sets=sets)
        targets.append(
            PackedTarget(table, (layer(EXECUTABLES_MEDIA_TYPE, frame, "programs.xla"), *shared))
        )
    with Layout(written("fleet", *targets)) as layout:
        root = read_root(layout)
        served = {
            name: next((t.name for t in match(root, machine) if t.verdict.matches), None)
            for name, machine in MACHINES.items()
        }
    machines = {name: json.loads(to_json(machine)) for name, machine in MACHINES.items()}
    return {"machines": machines, "served_by": served}


def library():
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "kernels.so"
        flags = "-nostdlib -shared -fPIC -O1 -s -Wl,--build-id=none,--hash-style=gnu"
        subprocess.run(["gcc", *flags.split(), "-o", out, HERE / "kernels.c"], check=True)
        return out.read_bytes()


def kernels():
    """Write the bundle of kernels, and return what it answers, and whom it serves."""
    shape = jax.ShapeDtypeStruct((len(SCALED),), jnp.float32)
    functions = {"scale": lambda x: x * jnp.float32(2.5), "negate": lambda x: -x}
    executable, executable_at = frame_of(NO_EXECUTABLE)
    portable, portables = packed({name: lowered(f, shape) for name, f in functions.items()})
    content = library()
    targets = []
    for target in ("cpu-x86-64-v2", "plain"):
        calls = target == "cpu-x86-64-v2"
        programs = tuple(
            program_of(
                *(name, target, len(SCALED), len(SCALED)),
                executable=executable_at,
                portable=portables[name],
                kernels=True if calls and name == "scale" else None,
            )
            for name in functions
        )
        told = Kernels(digest_of(content), "x86-64-v2", "gcc 12.2.0", ("root", "scale"))
        table = config_of(
            *("kernels", target, dataclasses.replace(CPU, glibc="2.34" if calls else None)),
            programs=programs,
            kernels=told if calls else None,
        )
        own = [layer(KERNELS_MEDIA_TYPE, content, "kernels.so")] if calls else []
        layers = (
            layer(EXECUTABLES_MEDIA_TYPE, executable, "programs.xla"),
            *own,
            layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
        )
        targets.append(PackedTarget(table, layers))
    loaded, x = load(written("kernels", *targets)), np.array(SCALED, np.float32)
    versions = {"new": "2.34", "old": "2.31", "newer": "2.100", "unknown": None}
    machines = {name: dataclasses.replace(OLD_CPU, glibc=has) for name, has in versions.items()}
    served = {"new": "cpu-x86-64-v2", "old": "plain", "newer": "cpu-x86-64-v2", "unknown": "plain"}
    return {
        "x": SCALED,
        **{name: loaded.call(name, x=x).tolist() for name in functions},
        "machines": {name: json.loads(to_json(machine)) for name, machine in machines.items()},
        "served_by": served,
    }


def values_of(part):
    """Float32 [800, 16]: multiples of 1/8 that repeat, so that git stores little and sums are exact."""
    places = np.arange(part * ROWS * len(X), (part + 1) * ROWS * len(X))
    return ((places % 61 - 30) / 8).astype(np.float32).reshape(ROWS, len(X))


def score(weights, x):
    """Float32 [3]: one sum for each tensor, so that a wrong byte in any of them changes a result."""
    return jnp.stack([jnp.sum(part, axis=0) @ x for part in weights])


def chunked(content):
    pieces = [content[at : at + MIN_CHUNK_BYTES] for at in range(0, len(content), MIN_CHUNK_BYTES)]
    verity = VerityHash()
    verity.update(content)
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    return Chunks("blake3", MIN_CHUNK_BYTES, digests, verity.digest())


def chunks():
    """Write the bundle of chunks, and return what it answers."""
    shape, part = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((len(X),), (ROWS, len(X))))
    portable, portable_at = frame_of(lowered(score, [part] * PARTS, shape))
    executable, executable_at = frame_of(NO_EXECUTABLE)
    names = tuple(f"score:part{part}" for part in range(PARTS))
    weights = weights_layer(
        *(
            PackedTensor(name, "float32", (ROWS, len(X)), lambda place=place: values_of(place))
            for place, name in enumerate(names)
        )
    )
    set_of = "program:score"
    program = program_of(
        *("score", "cpu-x86-64-v2", len(X), PARTS),
        executable=executable_at,
        portable=portable_at,
        weights=set_of,
    )
    table = config_of(
        *("chunks", "cpu-x86-64-v2", CPU),
        programs=(program,),
        weight_sets={set_of: names},
        chunks={WEIGHTS_MEDIA_TYPE: chunked(weights.content)},
    )
    layers = (
        layer(EXECUTABLES_MEDIA_TYPE, executable, "programs.xla"),
        layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
        weights,
    )
    loaded = load(written("chunks", PackedTarget(table, layers)))
    return {"x": X, "score": loaded.call("score", x=np.array(X, np.float32)).tolist()}


def recorded():
    """Write the bundle of recorded files, which answer nothing."""
    arguments = {"jit_score": ("float32[16]",), "jit_scale": None}
    content, places = packed(
        {name: f"what jax would keep of {name}".encode() for name in arguments}
    )
    programs = []
    for name, takes in arguments.items():
        key = hashlib.sha256(name.encode()).hexdigest()
        known = takes is not None
        programs.append(
            RecordedProgram(
                name=name,
                file=f"{name}-{key}-cache",
                entry=places[name],
                ingredients={"computation": key, "XLA flags": key} if known else {},
                conditions={"XLA flags": "--xla_x=1"} if known else {},
                arguments=takes,
                function="serve:score" if known else None,
            )
        )
    needs = Requirement("cpu", "x86_64", CPU.cpu_features, NO_JAXLIB)
    files = tuple(sorted(programs, key=lambda program: program.file))
    table = config_of("recorded", "cpu-x86-64-v2", needs, portable=None, recorded=files)
    written(
        "recorded",
        PackedTarget(table, (layer(RECORDED_MEDIA_TYPE, content, "programs.jax-cache"),)),
    )
    return {}


MAKERS = {"fleet": fleet, "kernels": kernels, "chunks": chunks, "recorded": recorded}
