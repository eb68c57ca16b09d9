"""Building a bundle: lower what is not cached, compile it in workers, pack, write.

manifest -> Inputs -> lower (here, one by one) -> compile (workers, side by side) -> pack -> layout
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler import checkpoint, packaging
from prejit.compiler.cache_key import Key
from prejit.compiler.compatibility import readable_until
from prejit.compiler.compilation import Compiled, CompileJob, CompilePool, find_compiled
from prejit.compiler.packaging import Layer, PackedTarget, Tensor
from prejit.compiler.plan import Inputs, Lowered, file_digest, source_digest, versions
from prejit.compiler.progress import Progress
from prejit.compiler.toolchain import Toolchain
from prejit.runtime import bundle
from prejit.runtime.bundle import Config, Decoder, Portable, Program, Requirement
from prejit.runtime.errors import BuildError, CheckpointError, RejectError, StoreError
from prejit.runtime.fingerprint import (
    Fingerprint,
    effective_environment,
    effective_xla_flags,
)
from prejit.runtime.layout import Layout, write_layout
from prejit.runtime.loader import check_blobs, match, open_index, read_manifest
from prejit.runtime.receipt import Receipts
from prejit.runtime.target import CUDA

MODEL_WEIGHTS = "model"
"""Name of the weight set of the manifest's [model]; those of [[program]] sections have their names."""


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        path: the bundle's directory.
        digest: of the bundle.
        compiled: programs x targets that were compiled now.
        cached: those that were in the cache.
        written: whether the directory was changed.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool


def build(inputs: Inputs, output: Path, *, workers: int, progress: Progress) -> Built:
    """Builds a manifest's bundle into `output/NAME`.

    Args:
        inputs: of the manifest.
        output: directory of bundles.
        workers: compile processes side by side.
        progress: told of every step.

    Raises:
        BuildError: a program does not compile, or its worker died; finished programs stay cached.
        ManifestError, CheckpointError, StoreError, NetworkError: what it starts from cannot be read.
    """
    lowered: dict[str, Lowered] = {}
    keys: dict[tuple[str, str], Key] = {}
    compiled = 0
    toolchains = {t.name: inputs.made_toolchain(t, progress) for t in inputs.targets}
    with CompilePool(inputs.cache, workers=workers, progress=progress) as pool:
        for spec in inputs.specs:
            program = inputs.cached(spec) if spec.kind != "call" else None
            if program is None:
                with progress.phase(f"lowering {spec.name}"):
                    program = inputs.lower(spec)
            lowered[spec.name] = program
            for name, toolchain in toolchains.items():
                key = keys[spec.name, name] = inputs.compile_key(spec, toolchain, program)
                compiled += find_compiled(inputs.cache, key) is None
                digest = program.portable.raw_digest
                pool.submit(CompileJob(spec.name, toolchain, digest, program.platforms, key))
        with progress.phase("packing weights"):
            weights = _weights(inputs, lowered)
        results = pool.results()
    layers = [*_model_layers(inputs), *([weights] if weights is not None else [])]
    portable, portables = packaging.pack(
        {name: program.portable for name, program in lowered.items()}, inputs.cache
    )
    layers.append(packaging.layer(bundle.PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"))
    packed = []
    for target in inputs.targets:
        programs = {spec.name: results[spec.name, target.name] for spec in inputs.specs}
        executables, segments = packaging.pack(
            {name: program.executable for name, program in programs.items()}, inputs.cache
        )
        layer = packaging.layer(bundle.EXECUTABLES_MEDIA_TYPE, executables, "programs.xla")
        table = tuple(
            Program(
                name=spec.name,
                kind=spec.kind,
                bucket=spec.bucket,
                key=keys[spec.name, target.name].digest,
                arguments=lowered[spec.name].arguments,
                results=lowered[spec.name].results,
                executable=segments[spec.name],
                portable=portables[spec.name],
                memory=programs[spec.name].memory,
                weights=(spec.section or MODEL_WEIGHTS) if lowered[spec.name].weights else None,
                platforms=lowered[spec.name].platforms,
            )
            for spec in inputs.specs
        )
        needs = _requirement(inputs, toolchains[target.name], programs)
        config = _config(inputs, toolchains[target.name], needs, table, lowered)
        packed.append(PackedTarget(config, (layer, *layers)))
    index, blobs = packaging.assemble(inputs.manifest.bundle.name, packed)
    path = output / inputs.manifest.bundle.name
    current = is_current(path, index)
    if not current:
        with progress.phase(f"writing {path}"):
            _remove_damaged(path)
            write_layout(path, index, blobs)
    return Built(path, bundle.digest_of(index), compiled, len(keys) - compiled, not current)


def _requirement(
    inputs: Inputs, toolchain: Toolchain, programs: Mapping[str, Compiled]
) -> Requirement:
    """What a target's executables need of a machine, from what the compiler says of them.

    Raises:
        BuildError: a program needs more memory than a device of the target has.
    """
    target = toolchain.target
    accelerated = target.platform != "cpu"
    needs = {name: program.memory.need_bytes for name, program in programs.items()}
    if accelerated and target.memory_bytes is not None:
        too_large = [name for name, need in needs.items() if need > target.memory_bytes]
        if too_large:
            listed = "".join(
                f"\n  {name}: needs {needs[name] / 1e9:.2f} GB: {programs[name].memory.described()}"
                for name in too_large
            )
            raise BuildError(
                f"{inputs.manifest.path}: target {target.name}: a device has "
                f"{target.memory_bytes / 1e9:.2f} GB, and {len(too_large)} of {len(programs)} "
                f"programs need more{listed}",
                hint="make [generate] batch or context smaller, split the model over a [mesh], "
                "or build for a larger device",
            )
    return target.requirement(
        toolchain.jaxlib,
        plugin=toolchain.plugin,
        cuda=CUDA if target.platform == "cuda" else None,
        cpu_features=tuple(sorted(set[str]().union(*(p.cpu_features for p in programs.values())))),
        device_memory_bytes=max(needs.values()) if accelerated else None,
        xla_flags=effective_xla_flags(toolchain.xla_flags(os.environ)),
        environment=effective_environment(target.platform, os.environ),
    )


def _config(
    inputs: Inputs,
    toolchain: Toolchain,
    requirement: Requirement,
    programs: tuple[Program, ...],
    lowered: Mapping[str, Lowered],
) -> Config:
    """The config blob of one target."""
    jax = versions("jax")["jax"]
    stablehlo = {program.stablehlo for program in lowered.values()}
    newest = max(stablehlo, key=lambda text: tuple(map(int, text.split("."))))
    return Config(
        format=bundle.FORMAT_VERSION,
        bundle=inputs.manifest.bundle.name,
        target=toolchain.target.name,
        requirement=requirement,
        versions={**versions("prejit"), **dict(toolchain.versions)},
        programs=programs,
        weight_sets={
            spec.section or MODEL_WEIGHTS: _tensor_names(spec.section, lowered[spec.name])
            for spec in inputs.specs
            if lowered[spec.name].weights
        },
        decoder=_decoder(inputs, lowered),
        mesh=inputs.manifest.mesh,
        weight_shardings=next(
            (p.weight_shardings for p in lowered.values() if p.weight_shardings), None
        ),
        portable=Portable(jax, newest, readable_until(jax)),
    )


def _tensor_names(section: str, program: Lowered) -> tuple[str, ...]:
    """Names in the weights layer: a decoder's as published, a user function's behind its section."""
    return tuple(f"{section}:{name}" if section else name for name in program.weights)


def _decoder(inputs: Inputs, lowered: Mapping[str, Lowered]) -> Decoder | None:
    shape = next((p.decoder for p in lowered.values() if p.decoder is not None), None)
    if shape is None:
        return None
    said = {**_read_json(inputs.directory / "config.json", required=True)}
    said |= _read_json(inputs.directory / "generation_config.json")
    eos = said.get("eos_token_id")
    eos_ids = [eos] if isinstance(eos, int) else list(eos or ())
    bos = said.get("bos_token_id")
    return Decoder(
        **shape,
        eos_token_ids=tuple(sorted(eos_ids)),
        bos_token_id=bos if isinstance(bos, int) else None,
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(f"{path}: expected a file, found none") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot read JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _model_layers(inputs: Inputs) -> Iterator[Layer]:
    """Tokenizer, generation config and licence, byte for byte as they were published."""
    if inputs.manifest.model is not None:
        for file, media_type in (
            ("tokenizer.json", bundle.TOKENIZER_MEDIA_TYPE),
            ("generation_config.json", bundle.GENERATION_MEDIA_TYPE),
        ):
            if (inputs.directory / file).is_file():
                yield packaging.layer(media_type, (inputs.directory / file).read_bytes(), file)
    if inputs.manifest.bundle.license is not None:
        path = inputs.manifest.resolve(inputs.manifest.bundle.license)
        try:
            yield packaging.layer(bundle.LICENSE_MEDIA_TYPE, path.read_bytes(), "LICENSE")
        except OSError as error:
            raise StoreError(f"{path}: cannot read the licence: {error.strerror}") from error


def _weights(inputs: Inputs, lowered: Mapping[str, Lowered]) -> Layer | None:
    """The weights layer, from the cache or packed now."""
    ingredients = [("layout", "safetensors, tensors at multiples of 64 bytes")]
    model = None
    if inputs.manifest.model is not None:
        model = checkpoint.open_checkpoint(inputs.directory)
        ingredients += [
            ("dtype", inputs.manifest.model.dtype),
            ("model code", source_digest()),
            *((f"file {file.name}", file_digest(file)) for file in model.files),
        ]
    user = inputs.user_weights()
    for section, values in user.items():
        for name, value in values.items():
            digest = bundle.digest_of(value.tobytes())
            ingredients.append((f"{section}:{name}", f"{value.dtype}{list(value.shape)} {digest}"))
    if model is None and not user:
        return None
    key = Key("weights", inputs.manifest.bundle.name, tuple(ingredients))
    result = inputs.cache.lookup(key)
    if result is None:
        tensors = []
        if model is not None:
            tensors = [
                Tensor(name, str(shape.dtype), shape.shape, partial(model.read, name))
                for name, shape in inputs.parameters().items()
            ]
        tensors += [
            Tensor(f"{section}:{name}", str(value.dtype), value.shape, partial(np.asarray, value))
            for section, values in user.items()
            for name, value in values.items()
        ]
        with inputs.cache.blob_writer() as blob:
            packaging.write_weights(tensors, blob)
        result = {"digest": blob.digest, "size": blob.size}
        inputs.cache.store(key, result, blobs=[blob.digest])
    path = inputs.cache.blob_path(result["digest"])
    if path is None:
        raise BuildError("the weights are gone from the build cache", hint="build again")
    return Layer(
        bundle.WEIGHTS_MEDIA_TYPE, result["digest"], result["size"], path, "weights.safetensors"
    )


def is_current(path: Path, index: bytes) -> bool:
    """Whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            if layout.read("index.json", bundle.MAX_INDEX_BYTES) != index:
                return False
            targets = match(layout, open_index(layout)[0], Fingerprint.current())
            check_blobs(
                layout, [read_manifest(layout, target) for target in targets], Receipts(path)
            )
    except (RejectError, StoreError):
        return False
    return True


def _remove_damaged(path: Path) -> None:
    """Removes blobs that are not what their name says, so that they are written again."""
    receipts = Receipts(path)
    directory = path / "blobs" / "sha256"
    for blob in directory.iterdir() if directory.is_dir() else ():
        if not bundle.is_digest(f"sha256:{blob.name}"):
            continue  # another writer's temporary file
        if receipts.digest_of(blob) != f"sha256:{blob.name}":
            blob.unlink()
