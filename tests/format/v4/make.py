"""How the golden bundle of format 4 was made, once, with jax 0.10.2. For the record: never run it again.

    kernels/    a target with native kernels that wants a glibc, and one without; two programs, of which
                one calls a kernel

All executables are of a jaxlib that never was, so that every machine falls back to the portable programs (and
the files stay small). `expected.json` holds the digest, what the programs answer, and which target serves
which machine. From the root of the repository:

    .venv/bin/python -m tests.format.v4.make
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from tests.format.v2.make import CPU, NO_JAXLIB, OLD_CPU, frame_of

from prejit.compiler.pipeline.pack.bundle_files import PackedTarget, assemble, layer
from prejit.runtime import load
from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.format.arrays import Array
from prejit.runtime.format.names import (
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    KERNELS_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
)
from prejit.runtime.format.schema import Config, Kernels, Memory, Portable, ProgramEntry
from prejit.runtime.format.writing import write_layout

HERE = Path(__file__).parent
X = (0.25, 1.0, 4.0, -1.0, 0.0)


def library(at: Path) -> bytes:
    out = at / "kernels.so"
    flags = "-nostdlib -shared -fPIC -O1 -s -Wl,--build-id=none,--hash-style=gnu"
    subprocess.run(["gcc", *flags.split(), "-o", str(out), str(HERE / "kernels.c")], check=True)
    return out.read_bytes()


def main() -> None:
    shape = jax.ShapeDtypeStruct((len(X),), jnp.float32)
    functions = {"scale": lambda x: x * jnp.float32(2.5), "negate": lambda x: -x}
    executable, executable_at = frame_of(b"an executable for a jaxlib that never was")
    portable, segments = b"", {}
    for name, function in functions.items():
        exported = export.export(jax.jit(function), platforms=("cpu",))(shape)
        frame, segment = frame_of(bytes(exported.mlir_module_serialized))
        segments[name] = dataclasses.replace(segment, offset=len(portable))
        portable += frame
    with tempfile.TemporaryDirectory() as scratch:
        kernels = library(Path(scratch))
    told = Kernels(digest_of(kernels), "x86-64-v2", "gcc 12.2.0", ("root", "scale"))
    packed = []
    for target in ("cpu-x86-64-v2", "plain"):
        calls = target == "cpu-x86-64-v2"
        programs = tuple(
            ProgramEntry(
                name=name,
                kind="call",
                bucket={},
                key=digest_of(f"{target} {name}".encode()),
                arguments=(str(Array(("x",), "float32", (len(X),))),),
                results=(str(Array((), "float32", (len(X),))),),
                executable=executable_at,
                portable=segment,
                memory=Memory(20, 20, 0, 0),
                kernels=True if calls and name == "scale" else None,
            )
            for name, segment in segments.items()
        )
        config = Config(
            format=FORMAT_VERSION,
            bundle="kernels",
            target=target,
            requirement=dataclasses.replace(CPU, glibc="2.34" if calls else None),
            versions={"jax": jax.__version__, "jaxlib": NO_JAXLIB, "prejit": "0.1.0"},
            programs=programs,
            weight_sets={},
            portable=Portable(jax.__version__, "1.14.0", "2027-05-20"),
            kernels=told if calls else None,
        )
        layers = [
            layer(EXECUTABLES_MEDIA_TYPE, executable, "programs.xla"),
            *([layer(KERNELS_MEDIA_TYPE, kernels, "kernels.so")] if calls else []),
            layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
        ]
        packed.append(PackedTarget(config, tuple(layers)))
    write_layout(HERE / "kernels", *assemble("kernels", packed))
    warnings.simplefilter("ignore")  # of fallback
    loaded = load(HERE / "kernels")
    x = np.array(X, np.float32)
    machines = {
        "new": dataclasses.replace(OLD_CPU, glibc="2.34"),
        "old": dataclasses.replace(OLD_CPU, glibc="2.31"),
        "newer": dataclasses.replace(OLD_CPU, glibc="2.100"),
        "unknown": OLD_CPU,
    }
    expected = {
        "digests": {"kernels": loaded.digest},
        "kernels": {
            "x": X,
            "scale": loaded.call("scale", x=x).tolist(),
            "negate": loaded.call("negate", x=x).tolist(),
            "machines": {name: json.loads(to_json(machine)) for name, machine in machines.items()},
            "served_by": {
                "new": "cpu-x86-64-v2",
                "old": "plain",
                "newer": "cpu-x86-64-v2",
                "unknown": "plain",
            },
        },
    }
    (HERE / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
