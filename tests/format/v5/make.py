"""How the golden bundles of format 5 were made, with jax 0.10.2. For the record.

    chunks/     a program with 150 KB of weights, whose layer has three chunks of 64 KB
    recorded/   two recorded files of jax's compilation cache, which are a few words

The executable is of a jaxlib that never was, so that every machine falls back to the portable program (and
the files stay small). `expected.json` holds the digests and what the program answers.

Format 5 is not released yet: a change of the format before its release may make these bundles again.
After the release they are never made again. From the root of the repository:

    .venv/bin/python -m tests.format.v5.make
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from blake3 import blake3
from jax import export
from tests.format.v2.make import CPU, NO_JAXLIB, frame_of

from prejit.compiler.pipeline.pack.bundle_files import (
    PackedTarget,
    PackedTensor,
    assemble,
    check_readable,
    layer,
    write_weights,
)
from prejit.compiler.store.directory import DirectoryStore
from prejit.runtime import load
from prejit.runtime.base.digests import digest_of
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.layout import write_layout
from prejit.runtime.format.limits import MIN_CHUNK_BYTES
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.schema import (
    Chunks,
    Config,
    Memory,
    Portable,
    ProgramEntry,
    RecordedProgram,
)
from prejit.runtime.machine.requirement import Requirement

HERE = Path(__file__).parent
PARTS = 3
ROWS = 800
X = tuple((place - 8) / 4 for place in range(16))


def values_of(part: int) -> np.ndarray:
    """Float32 [800, 16]: multiples of 1/8 that repeat, so that git stores little and sums are exact."""
    places = np.arange(part * ROWS * len(X), (part + 1) * ROWS * len(X))
    return ((places % 61 - 30) / 8).astype(np.float32).reshape(ROWS, len(X))


def score(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Float32 [3]: one sum for each tensor, so that a wrong byte in any of them changes a result."""
    return jnp.stack([jnp.sum(part, axis=0) @ x for part in weights])


def weights_file() -> bytes:
    tensors = [
        PackedTensor(f"score:part{part}", "float32", (ROWS, len(X)), lambda p=part: values_of(p))
        for part in range(PARTS)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        store = DirectoryStore.open(Path(scratch))
        with store.blob_writer() as blob:
            write_weights(tensors, blob)
        content = store.read_blob(blob.digest)
    assert content is not None
    return content


def chunked(content: bytes) -> Chunks:
    pieces = [content[at : at + MIN_CHUNK_BYTES] for at in range(0, len(content), MIN_CHUNK_BYTES)]
    digests = tuple(blake3(piece).hexdigest() for piece in pieces)
    return Chunks("blake3", MIN_CHUNK_BYTES, digests)


def recorded() -> str:
    """Write the bundle of recorded files, and return its digest."""
    programs, content = [], b""
    for name, arguments in (("jit_score", ("float32[16]",)), ("jit_scale", None)):
        frame, segment = frame_of(f"what jax would keep of {name}".encode())
        key = hashlib.sha256(name.encode()).hexdigest()
        programs.append(
            RecordedProgram(
                name=name,
                file=f"{name}-{key}-cache",
                entry=dataclasses.replace(segment, offset=len(content)),
                ingredients={} if arguments is None else {"computation": key, "XLA flags": key},
                conditions={} if arguments is None else {"XLA flags": "--xla_x=1"},
                arguments=arguments,
                function=None if arguments is None else "serve:score",
            )
        )
        content += frame
    config = Config(
        format=5,
        bundle="recorded",
        target="cpu-x86-64-v2",
        requirement=Requirement("cpu", "x86_64", CPU.cpu_features, NO_JAXLIB),
        versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
        programs=(),
        weight_sets={},
        recorded=tuple(sorted(programs, key=lambda program: program.file)),
    )
    layers = (layer(RECORDED_MEDIA_TYPE, content, "programs.jax-cache"),)
    shutil.rmtree(HERE / "recorded", ignore_errors=True)
    index, blobs = assemble("recorded", [PackedTarget(config, layers)])
    check_readable(index, blobs)
    write_layout(HERE / "recorded", index, blobs)
    return digest_of(index)


def main() -> None:
    jax.config.update("jax_traceback_in_locations_limit", 0)
    shape = jax.ShapeDtypeStruct((len(X),), jnp.float32)
    part = jax.ShapeDtypeStruct((ROWS, len(X)), jnp.float32)
    exported = export.export(jax.jit(score), platforms=("cpu",))([part] * PARTS, shape)
    portable, portable_at = frame_of(bytes(exported.mlir_module_serialized))
    executable, executable_at = frame_of(b"an executable for a jaxlib that never was")
    weights = weights_file()
    program = ProgramEntry(
        name="score",
        kind="call",
        bucket={},
        key=digest_of(b"score"),
        arguments=(str(Array(("x",), "float32", (len(X),))),),
        results=(str(Array((), "float32", (PARTS,))),),
        executable=executable_at,
        portable=portable_at,
        memory=Memory(PARTS * ROWS * len(X) * 4 + len(X) * 4, PARTS * 4, 0, 0),
        weights="program:score",
    )
    config = Config(
        format=5,
        bundle="chunks",
        target="cpu-x86-64-v2",
        requirement=CPU,
        versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
        programs=(program,),
        weight_sets={"program:score": tuple(f"score:part{part}" for part in range(PARTS))},
        portable=Portable(jax.__version__, "1.14.0", "2027-05-20"),
        chunks={WEIGHTS_MEDIA_TYPE: chunked(weights)},
    )
    layers = (
        layer(EXECUTABLES_MEDIA_TYPE, executable, "programs.xla"),
        layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
        layer(WEIGHTS_MEDIA_TYPE, weights, "weights.safetensors"),
    )
    shutil.rmtree(HERE / "chunks", ignore_errors=True)
    write_layout(HERE / "chunks", *assemble("chunks", [PackedTarget(config, layers)]))
    warnings.simplefilter("ignore")  # of fallback
    loaded = load(HERE / "chunks")
    found = loaded.call("score", x=np.array(X, np.float32)).tolist()
    digests = {"chunks": loaded.digest, "recorded": recorded()}
    expected = {"digests": digests, "chunks": {"x": X, "score": found}}
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
