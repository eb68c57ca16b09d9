"""Small real bundles for all tests: compiled by XLA, packed by the compiler's own packing, no mocks.

Nothing is imported here that costs time: jax is imported by the fixtures that need it.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
V3_FEATURES = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma"),
    *("fxsr", "lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1"),
    *("sse4.2", "ssse3", "xsave"),
)
COMPILE_FOR_V3 = """
import sys
from pathlib import Path
from prejit.compiler.compile.disassembly import declared_features
from prejit.runtime.device.executable import CompileFor, compile_portable
features = tuple(sys.argv[1].split(","))
for at in sys.argv[2:]:
    machine = CompileFor(cpu="x86-64-v3", cpu_features=features)
    compiled = compile_portable(Path(at).read_bytes(), machine)
    Path(at + ".xla").write_bytes(compiled.serialized)
    Path(at + ".features").write_text(",".join(declared_features(compiled.serialized)))
"""


@pytest.fixture(autouse=True)
def runtime_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime cache of each test's own: what one test leaves there cannot help another."""
    cache = tmp_path / "runtime-cache"
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def environment_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where environments of targets are made, once for all tests; it is PREJIT_ENVIRONMENTS from here on.

    PREJIT_TEST_ENVIRONMENTS names a directory that outlives the session. Without it each session
    downloads jaxlib, and deletes it again.
    """
    kept = os.environ.get("PREJIT_TEST_ENVIRONMENTS")
    path = Path(kept).absolute() if kept else tmp_path_factory.mktemp("environments")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PREJIT_ENVIRONMENTS", str(path))
        yield path
    if not kept:
        shutil.rmtree(path)


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Runs code or `-m module` in a fresh process: `run_python(code, *argv, status=0, env={})`.

    status is the exit status that the process must end with; None: any.
    """

    def run(
        code: str | None,
        *argv: object,
        status: int | None = 0,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *(["-c", code] if code is not None else []), *map(str, argv)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **(env or {})},
            timeout=timeout,
            cwd=tmp_path,
            check=False,
        )
        if status is not None:
            assert done.returncode == status, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    return run


@pytest.fixture
def prejit(run_python: RunPython) -> RunPython:
    """Runs `python -m prejit.runtime ...` in a fresh process: `prejit("verify", path, status=4)`."""

    def run(*argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
        return run_python(None, "-m", "prejit.runtime", *argv, **options)

    return run


@dataclass(frozen=True)
class Recipe:
    """A bundle in memory: every digest right, whatever it says. What forging starts from.

    Attributes:
        targets: as the compiler packs them.
        name: of the bundle.
        weights: the values of the weights layer, by tensor.
    """

    targets: tuple[Any, ...]
    name: str
    weights: Mapping[str, Any]

    def assemble(self) -> tuple[bytes, dict[str, Any]]:
        from prejit.compiler.build.packaging import assemble

        return assemble(self.name, self.targets)

    def write(self, path: Path) -> Path:
        """Writes the files as they are, without the care (and the time) of `write_layout`."""
        from prejit.runtime.format.names import OCI_LAYOUT

        index, blobs = self.assemble()
        directory = path / "blobs" / "sha256"
        directory.mkdir(parents=True, exist_ok=True)
        for digest, content in blobs.items():
            (directory / digest.removeprefix("sha256:")).write_bytes(content)
        (path / "oci-layout").write_bytes(OCI_LAYOUT)
        (path / "index.json").write_bytes(index)
        return path

    def only(self, *targets: str) -> Recipe:
        """With these targets alone."""
        kept = tuple(target for target in self.targets if target.config.target in targets)
        return dataclasses.replace(self, targets=kept)

    def configured(self, change: Callable[[Any], Any]) -> Recipe:
        """With another program table for each target."""
        return dataclasses.replace(
            self,
            targets=tuple(
                dataclasses.replace(target, config=change(target.config)) for target in self.targets
            ),
        )

    def layered(self, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Recipe:
        """With other layers for each target."""
        return dataclasses.replace(
            self,
            targets=tuple(
                dataclasses.replace(target, layers=change(target.layers)) for target in self.targets
            ),
        )

    def with_content(self, media_type: str, content: bytes) -> Recipe:
        """With other bytes in one layer, its digest set right."""
        from prejit.compiler.build.packaging import layer

        return self.layered(
            lambda layers: tuple(
                layer(media_type, content, old.title) if old.media_type == media_type else old
                for old in layers
            )
        )

    def content(self, media_type: str) -> bytes:
        """The bytes of a layer of the first target."""
        found = next(x for x in self.targets[0].layers if x.media_type == media_type)
        return found.content if isinstance(found.content, bytes) else found.content.read_bytes()


@pytest.fixture(scope="session")
def make_recipe(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Makes a recipe: `make_recipe(score_scale=1.0, name="example", buckets=(2, 8))`.

    Its programs, for the targets `cpu-host` and `cpu-x86-64-v3`:

        score/b<B>   x float32[B,16] -> float32[B,4]     with weights `score:bias`, `score:kernel`
        nest         a tree of four dtypes -> a tree     without weights
        tick         -> int32[]                          without any argument
    """

    @functools.cache
    def make(
        score_scale: float = 1.0, name: str = "example", buckets: tuple[int, ...] = (2, 8)
    ) -> Recipe:
        return _make_recipe(tmp_path_factory.mktemp("recipe"), score_scale, name, buckets)

    return make


@pytest.fixture(scope="session")
def recipe(make_recipe: Callable[..., Recipe]) -> Recipe:
    """The recipe of the bundle that most tests read."""
    return make_recipe()


@pytest.fixture
def bundle_dir(recipe: Recipe, tmp_path: Path) -> Path:
    """A bundle of this test's own, just written."""
    return recipe.write(tmp_path / "example")


@pytest.fixture(scope="session")
def settled_dir(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle that lies there long enough to get receipts. Read only: it is the whole session's."""
    from prejit.runtime.store.receipts import SETTLED_SECONDS

    path = recipe.write(tmp_path_factory.mktemp("settled") / "example")
    newest = max(file.stat().st_ctime for file in path.rglob("*"))
    while time.time() - newest <= SETTLED_SECONDS + 0.05:
        time.sleep(0.05)
    return path


@pytest.fixture(scope="session")
def make_decoder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a decoder for this machine: `make_decoder("mistral", batch=(2,), prompt=(10,), context=(24,))`.

    The model is a family of decoders.py, with random weights, or a directory. PREJIT_TEST_CACHE names a
    build cache that outlives the session; without it everything is compiled.
    """
    from . import decoders

    # Weights are arguments of the programs, so models of one shape are compiled once.
    kept = os.environ.get("PREJIT_TEST_CACHE")
    cache = Path(kept).absolute() if kept else tmp_path_factory.mktemp("decoders") / "cache"

    def make(model: str | Path, **buckets: Any) -> Path:
        directory = tmp_path_factory.mktemp("decoder")
        source = Path(model)
        if isinstance(model, str):
            source = decoders.write_random(model, directory / model)
        return decoders.build(source, directory, cache, **buckets)

    return make


@pytest.fixture(scope="session")
def decoder_dir(make_decoder: Callable[..., Path]) -> Path:
    """A GPT-2 of 48 tokens: every kind of program, two buckets of each size."""
    return make_decoder("gpt2", batch=(1, 3), prompt=(3, 10), context=(24, 72))


@pytest.fixture
def no_warnings_of_fallback() -> Iterator[None]:
    """For tests that fall back on purpose and look at something else."""
    import warnings

    from prejit.runtime import FallbackWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        yield


def _make_recipe(at: Path, score_scale: float, name: str, buckets: tuple[int, ...]) -> Recipe:
    import numpy as np

    from prejit.compiler.build import packaging
    from prejit.compiler.compile.disassembly import declared_features
    from prejit.compiler.store.cache import Cache
    from prejit.runtime.base.digests import digest_of
    from prejit.runtime.device.executable import compile_portable
    from prejit.runtime.format.names import (
        EXECUTABLES_MEDIA_TYPE,
        FORMAT_VERSION,
        LICENSE_MEDIA_TYPE,
        PORTABLE_MEDIA_TYPE,
        WEIGHTS_MEDIA_TYPE,
    )
    from prejit.runtime.format.schema import Config, Program, Segment
    from prejit.runtime.machine.requirement import Requirement

    random = np.random.default_rng(0)
    weights = {
        "score:bias": np.arange(4, dtype=np.float32),
        "score:kernel": random.standard_normal((16, 4), np.float32) * np.float32(score_scale),
    }
    lowered = {f"score/b{size}": _lower_score(size) for size in buckets}
    lowered |= {"nest": _lower_nest(), "tick": _lower_tick()}
    cache = Cache.open(at / "cache")
    on_host = {program: compile_portable(portable) for program, (portable, _, _) in lowered.items()}
    targets = {
        "cpu-host": {
            p: (c.serialized, declared_features(c.serialized)) for p, c in on_host.items()
        },
        "cpu-x86-64-v3": _compile_for_v3(
            at, {p: portable for p, (portable, _, _) in lowered.items()}
        ),
    }

    def frame(raw: bytes) -> Segment:
        import zstandard

        stored = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(raw)
        return Segment(0, len(stored), cache.put_blob(stored), len(raw), digest_of(raw))

    portable, portables = packaging.pack({p: frame(x) for p, (x, _, _) in lowered.items()}, cache)
    with cache.blob_writer() as blob:
        packaging.write_weights(
            [
                packaging.Tensor(tensor, str(value.dtype), value.shape, lambda value=value: value)
                for tensor, value in weights.items()
            ],
            blob,
        )
    stored_weights = cache.read_blob(blob.digest)
    assert stored_weights is not None
    shared = (
        packaging.layer(LICENSE_MEDIA_TYPE, b"Apache-2.0\n", "LICENSE"),
        packaging.layer(WEIGHTS_MEDIA_TYPE, stored_weights, "weights.safetensors"),
        packaging.layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"),
    )
    packed = []
    for target, compiled in targets.items():
        pack, segments = packaging.pack({p: frame(x) for p, (x, _) in compiled.items()}, cache)
        config = Config(
            format=FORMAT_VERSION,
            bundle=name,
            target=target,
            requirement=Requirement(
                "cpu",
                os.uname().machine,
                tuple(sorted({f for _, features in compiled.values() for f in features})),
                _version("jaxlib"),
            ),
            versions={"jax": _version("jax"), "jaxlib": _version("jaxlib"), "prejit": "0.1.0"},
            programs=tuple(
                Program(
                    name=program,
                    kind="call",
                    bucket={"b": int(program[7:])} if program.startswith("score/b") else {},
                    key=digest_of(f"{target} {program}".encode()),
                    arguments=tuple(map(str, arguments)),
                    results=tuple(map(str, results)),
                    executable=segments[program],
                    portable=portables[program],
                    memory=on_host[program].memory,
                    weights="score" if program.startswith("score/") else None,
                )
                for program, (_, arguments, results) in lowered.items()
            ),
            weight_sets={"score": tuple(weights)},
        )
        layer = packaging.layer(EXECUTABLES_MEDIA_TYPE, pack, "programs.xla")
        packed.append(packaging.PackedTarget(config, (layer, *shared)))
    return Recipe(tuple(packed), name, weights)


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _lower_score(size: int) -> tuple[bytes, list[Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    from prejit.runtime.format.arrays import Array

    def score(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ weights["kernel"]) + weights["bias"]

    weights = {
        "bias": jax.ShapeDtypeStruct((4,), jnp.float32),
        "kernel": jax.ShapeDtypeStruct((16, 4), jnp.float32),
    }
    portable = _export(score, weights, jax.ShapeDtypeStruct((size, 16), jnp.float32))
    return portable, [Array(("x",), "float32", (size, 16))], [Array((), "float32", (size, 4))]


def _lower_nest() -> tuple[bytes, list[Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    from prejit.runtime.format.arrays import Array

    def nest(tree: dict[str, Any]) -> dict[str, Any]:
        half, (count, flag) = tree["half"], tree["pair"]
        doubled = jnp.where(flag, half + half, half)
        return {"sums": (doubled, count + 1), "scalar": jnp.asarray(2.5, jnp.float32)}

    tree = {
        "half": jax.ShapeDtypeStruct((3,), jnp.bfloat16),
        "pair": (
            jax.ShapeDtypeStruct((2, 2), jnp.int32),
            jax.ShapeDtypeStruct((), jnp.bool_),
        ),
    }
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
    return _export(nest, tree), arguments, results


def _lower_tick() -> tuple[bytes, list[Any], list[Any]]:
    import jax
    import jax.numpy as jnp

    from prejit.runtime.format.arrays import Array

    def tick() -> jax.Array:
        return jnp.asarray(7, jnp.int32)

    return _export(tick), [], [Array((), "int32", ())]


def _export(
    function: Callable[..., Any], *arguments: Any, custom_calls: tuple[str, ...] = ()
) -> bytes:
    import jax
    from jax import export

    traced = jax.jit(function, keep_unused=True)
    unchecked = [export.DisabledSafetyCheck.custom_call(name) for name in custom_calls]
    exported = export.export(traced, platforms=("cpu",), disabled_checks=unchecked)(*arguments)
    return bytes(exported.mlir_module_serialized)


def _compile_for_v3(at: Path, portables: Mapping[str, bytes]) -> dict[str, tuple[bytes, list[str]]]:
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
        program: (
            Path(f"{file}.xla").read_bytes(),
            Path(f"{file}.features").read_text().split(","),
        )
        for program, file in files.items()
    }


TOY_KERNELS = Path(__file__).parent / "toy_kernels"
"""Sources of two kernels: `scale` and `root`."""


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, bytes]:
    """The toy kernels as a library for x86-64-v2, with its content."""
    return _built_kernels("cpu-x86-64-v2", TOY_KERNELS, tmp_path_factory.mktemp("kernels"))


@pytest.fixture(scope="session")
def kernel_recipe(
    toy_library: tuple[Any, bytes], tmp_path_factory: pytest.TempPathFactory
) -> Recipe:
    """A bundle for `cpu-host` with one program: `scale`, float32[5] by 2.5, that calls a kernel."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import zstandard

    from prejit.compiler.build import packaging
    from prejit.compiler.compile.disassembly import declared_features
    from prejit.compiler.store.cache import Cache
    from prejit.runtime.base.digests import digest_of
    from prejit.runtime.device import executable
    from prejit.runtime.format.arrays import Array
    from prejit.runtime.format.kernels import kernel_target
    from prejit.runtime.format.names import (
        EXECUTABLES_MEDIA_TYPE,
        FORMAT_VERSION,
        KERNELS_MEDIA_TYPE,
        PORTABLE_MEDIA_TYPE,
    )
    from prejit.runtime.format.schema import Config, Kernels, Program, Segment
    from prejit.runtime.machine.requirement import Requirement

    library, content = toy_library
    cache = Cache.open(tmp_path_factory.mktemp("recipe") / "cache")
    name = kernel_target("scale", library.digest)

    def with_kernel(x: jax.Array) -> Any:
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, factor=np.float32(2.5))

    x = jax.ShapeDtypeStruct((5,), jnp.float32)
    executable.register_kernels(content)
    portable = _export(lambda x: x * jnp.float32(2.5), x)
    compiled = executable.compile_portable(_export(with_kernel, x, custom_calls=(name,)))

    def frame(raw: bytes) -> Segment:
        stored = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(raw)
        return Segment(0, len(stored), cache.put_blob(stored), len(raw), digest_of(raw))

    executables, placed = packaging.pack({"scale": frame(compiled.serialized)}, cache)
    portables, portable_placed = packaging.pack({"scale": frame(portable)}, cache)
    features = {*declared_features(compiled.serialized), *library.cpu_features}
    config = Config(
        format=FORMAT_VERSION,
        bundle="kernels",
        target="cpu-host",
        requirement=Requirement(
            "cpu",
            os.uname().machine,
            tuple(sorted(features)),
            _version("jaxlib"),
            glibc=library.glibc,
        ),
        versions={"jax": _version("jax"), "jaxlib": _version("jaxlib"), "prejit": "0.1.0"},
        programs=(
            Program(
                name="scale",
                kind="call",
                bucket={},
                key=digest_of(b"scale"),
                arguments=(str(Array(("x",), "float32", (5,))),),
                results=(str(Array((), "float32", (5,))),),
                executable=placed["scale"],
                portable=portable_placed["scale"],
                memory=compiled.memory,
                kernels=True,
            ),
        ),
        weight_sets={},
        kernels=Kernels(library.digest, library.level, library.compiler, library.handlers),
    )
    layers = (
        packaging.layer(EXECUTABLES_MEDIA_TYPE, executables, "programs.xla"),
        packaging.layer(KERNELS_MEDIA_TYPE, content, "kernels.so"),
        packaging.layer(PORTABLE_MEDIA_TYPE, portables, "programs.stablehlo"),
    )
    return Recipe((packaging.PackedTarget(config, layers),), "kernels", {})


@pytest.fixture(scope="session")
def with_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Forms with kernels, for this machine; XLA knows them by the names that lowering writes."""
    import jax

    from prejit.compiler.models.layers.forms import Forms
    from prejit.compiler.native.calls import KERNEL_CALLS
    from prejit.compiler.native.library import SOURCES
    from prejit.runtime.device import kernels
    from prejit.runtime.format.kernels import kernel_target

    library, content = _built_kernels("cpu-host", SOURCES, tmp_path_factory.mktemp("kernels"))
    loaded = kernels.load(content)
    for kernel, name in KERNEL_CALLS.items():
        handler = loaded.handlers[kernel_target(kernel, library.digest)]
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return Forms()


def _built_kernels(target_name: str, sources: Path, cache: Path) -> tuple[Any, bytes]:
    """A library of kernels, with its content."""
    from prejit.compiler.native.library import KernelLibrary, build_kernels
    from prejit.compiler.store.cache import Cache
    from prejit.compiler.targets.target_table import target
    from prejit.compiler.targets.toolchain import host_toolchain

    opened = Cache.open(cache)
    versions = {name: _version(name) for name in ("jax", "jaxlib")}
    toolchain = host_toolchain(target(target_name), versions)
    built = build_kernels(toolchain, opened, sources=sources)
    if not isinstance(built, KernelLibrary):
        pytest.skip(built.reason)
    content = opened.read_blob(built.digest)
    assert content is not None
    return built, content
