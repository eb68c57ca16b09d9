"""Libraries of native kernels, each built once a run, and a small bundle that calls one."""

import dataclasses
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from .recipes import Recipe, export, framed, packed_in_memory

TOY_KERNELS = Path(__file__).parent / "toy_kernels"  # sources of two kernels: `scale` and `root`


@pytest.fixture(scope="session")
def toy_library(build_cache):
    """The toy kernels as a library for x86-64-v2, with its content."""
    return built_kernels("cpu-x86-64-v2", TOY_KERNELS, build_cache)


@pytest.fixture(scope="session")
def kernel_recipe(toy_library, tmp_path_factory):
    """A bundle for `cpu-host` with one program: `scale`, float32[5] by 2.5, that calls a kernel."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from prejit.compiler.compile.worker.disassembly import NEVER_CHOSEN, declared_features
    from prejit.compiler.compile.worker.xla import compile_portable
    from prejit.compiler.pipeline.pack import bundle_files
    from prejit.compiler.store.directory_store import DirectoryStore
    from prejit.runtime.base.files import digest_of
    from prejit.runtime.device import kernels
    from prejit.runtime.format import names
    from prejit.runtime.format.arrays import Array
    from prejit.runtime.format.bundle_schema import Config, Kernels, ProgramEntry
    from prejit.runtime.machine.fingerprint import Requirement

    library, content = toy_library
    cache = DirectoryStore.open(tmp_path_factory.mktemp("recipe") / "cache")
    name = names.kernel_target("scale", library.digest)

    def with_kernel(x):
        call = jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(x.shape, x.dtype))
        return call(x, factor=np.float32(2.5))

    x = jax.ShapeDtypeStruct((5,), jnp.float32)
    kernels.register(kernels.load(content))
    portable = export(lambda x: x * jnp.float32(2.5), x)
    compiled = compile_portable(export(with_kernel, x, custom_calls=(name,)))

    executables, segments = packed_in_memory(
        cache, names.EXECUTABLES_MEDIA_TYPE, "programs.xla", {"scale": compiled.serialized}
    )
    portables, portable_segments = packed_in_memory(
        cache, names.PORTABLE_MEDIA_TYPE, "programs.stablehlo", {"scale": portable}
    )
    features = {*declared_features(compiled.serialized), *library.cpu_features} - {*NEVER_CHOSEN}
    needs = Requirement(
        "cpu", os.uname().machine, tuple(sorted(features)), version("jaxlib"), glibc=library.glibc
    )
    config = Config(
        **{"format": names.FORMAT_VERSION, "bundle": "kernels", "target": "cpu-host"},
        requirement=needs,
        versions={"jax": version("jax"), "jaxlib": version("jaxlib"), "prejit": "0.1.0"},
        programs=(
            ProgramEntry(
                **{"name": "scale", "kind": "call", "bucket": {}, "key": digest_of(b"scale")},
                arguments=(str(Array(("x",), "float32", (5,))),),
                results=(str(Array((), "float32", (5,))),),
                executable=segments["scale"],
                portable=portable_segments["scale"],
                memory=compiled.memory,
                kernels=True,
                arguments_tree='["dict",[["x","*"]]]',
                results_tree='"*"',
            ),
        ),
        weight_sets={},
        kernels=Kernels(library.digest, library.level, library.compiler, library.handlers),
    )
    layers = (
        executables,
        bundle_files.layer(names.KERNELS_MEDIA_TYPE, content, "kernels.so"),
        portables,
    )
    return Recipe((bundle_files.PackedTarget(config, layers),), "kernels", {})


@pytest.fixture(scope="session")
def with_kernels(build_cache):
    return registered_forms(build_cache)


def registered_forms(cache):
    """Forms with kernels, for this machine; XLA knows them by the names that lowering writes."""
    import jax

    from prejit.compiler.models.layers.kernel_calls import Forms
    from prejit.compiler.native.kernel_library import SOURCES
    from prejit.compiler.native.products import KERNEL_CALLS
    from prejit.runtime.device import kernels
    from prejit.runtime.format.names import kernel_target

    library, content = built_kernels("cpu-host", SOURCES, cache)
    handlers = kernels.load(content)
    for kernel, name in KERNEL_CALLS.items():
        handler = handlers[kernel_target(kernel, library.digest)]
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return Forms()


def built_kernels(target_name, sources, cache):
    """A library of kernels out of a build cache, which makes it once, with its content."""
    from prejit.compiler.native.kernel_library import KernelLibrary, build_kernels
    from prejit.compiler.store.directory_store import DirectoryStore
    from prejit.compiler.targets.target_table import target
    from prejit.compiler.targets.toolchain import host_toolchain

    opened = DirectoryStore.open(cache)
    versions = {name: version(name) for name in ("jax", "jaxlib")}
    built = build_kernels(host_toolchain(target(target_name), versions), opened, sources=sources)
    if not isinstance(built, KernelLibrary):
        pytest.skip(built.reason)
    return built, opened.read_blob(built.digest)


def with_library(recipe, content):
    """A bundle with other kernels, and its executable bound to them."""
    import zstandard

    from prejit.runtime.base.files import digest_of
    from prejit.runtime.format import names

    before = recipe.targets[0].config.kernels
    digest = digest_of(content)
    raw = zstandard.ZstdDecompressor().decompress(recipe.content(names.EXECUTABLES_MEDIA_TYPE))
    old, new = (names.kernel_target("scale", d).encode() for d in (before.digest, digest))
    assert old in raw
    segment, frame = framed(raw.replace(old, new))

    def change(config):
        programs = (dataclasses.replace(config.programs[0], executable=segment),)
        kernels = dataclasses.replace(before, digest=digest)
        return dataclasses.replace(config, kernels=kernels, programs=programs)

    changed = recipe.configured(change).with_content(names.KERNELS_MEDIA_TYPE, content)
    return changed.with_content(names.EXECUTABLES_MEDIA_TYPE, frame)
