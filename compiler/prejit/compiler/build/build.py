"""Building a bundle: lower what is not cached, compile it in workers, pack, write.

manifest -> Inputs -> lower (here, one by one) -> compile (workers, side by side) -> pack -> layout
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from prejit.compiler.build import costs, packaging
from prejit.compiler.build.compatibility import readable_until
from prejit.compiler.build.measuring import measure_products, measuring_alone, runs_here
from prejit.compiler.build.packaging import Layer, PackedTarget, Tensor
from prejit.compiler.build.plan import Inputs, Lowered, file_digest, versions
from prejit.compiler.checkpoint import tokenizer_check
from prejit.compiler.checkpoint.chat_files import read_chat
from prejit.compiler.compile.executor import collect
from prejit.compiler.compile.jobs import Compiled, CompileJob
from prejit.compiler.compile.pool import WorkerPool
from prejit.compiler.compile.worker_process import JOB_SECONDS
from prejit.compiler.manifest.specs import ENCODER_KINDS, ProgramSpec
from prejit.compiler.native.form_table import merge_into, own_path, read_own
from prejit.compiler.native.library import KernelLibrary, NoKernels
from prejit.compiler.progress import Progress
from prejit.compiler.store.code import ACCURACY, WEIGHTS, code_digest
from prejit.compiler.store.key import Key
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.base.digests import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError, CheckpointError, RejectError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout, write_layout
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    EXECUTABLES_MEDIA_TYPE,
    FORMAT_VERSION,
    GENERATION_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    PORTABLE_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
    WEIGHTS_MEDIA_TYPE,
)
from prejit.runtime.format.opening import match, open_index, read_manifest
from prejit.runtime.format.schema import (
    Accuracy,
    Config,
    Decoder,
    Encoder,
    Portable,
    ProductForm,
    Program,
)
from prejit.runtime.generation import defaults
from prejit.runtime.machine.environment import effective_environment, effective_xla_flags
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.requirement import Requirement
from prejit.runtime.machine.target import CUDA, Target
from prejit.runtime.store.receipts import Receipts

_FORM_SECONDS = 0.4
"""Of compiling and measuring one form of a product, on two cores."""

MODEL_WEIGHTS = "model"
"""Name of the weight set of the manifest's [model]; an encoder's begin with it and a colon."""
PROGRAM_WEIGHTS = "program"
"""Weight sets of [[program]] sections begin with it and a colon: a section may be called `model`."""


@dataclass(frozen=True)
class Built:
    """What a build did.

    Attributes:
        path: the bundle's directory.
        digest: of the bundle.
        compiled: programs x targets that were compiled now.
        cached: those that were in the cache.
        written: whether the directory was changed.
        accuracy: what the dtypes of weights and cache cost; None: all are float32.
    """

    path: Path
    digest: str
    compiled: int
    cached: int
    written: bool
    accuracy: Accuracy | None = None


def build(
    inputs: Inputs,
    output: Path,
    *,
    workers: int,
    progress: Progress,
    measure: bool | None = None,
    timeout_seconds: float = JOB_SECONDS,
) -> Built:
    """Builds a manifest's bundle into `output/NAME`.

    Args:
        inputs: of the manifest.
        output: directory of bundles.
        workers: compile processes side by side.
        progress: told of every step.
        measure: whether forms of products are measured: those that this machine has not measured itself,
            or none; None: large ones of which no table says anything.
        timeout_seconds: how long one job of a worker may take: one compile, or measuring one product.

    Raises:
        BuildError: a program does not compile, or its worker died or took too long; finished programs
            stay cached.
        ManifestError, CheckpointError, StoreError, NetworkError: what it starts from cannot be read.
    """
    lowered: dict[str, Lowered] = {}
    keys: dict[tuple[str, str], Key] = {}
    libraries: dict[tuple[str, str], KernelLibrary | None] = {}
    # What is wrong with them, before hours of compiling.
    model_layers = tuple(_model_layers(inputs, progress))
    inputs.check()
    toolchains = {t.name: inputs.made_toolchain(t, progress) for t in inputs.targets}
    told = (each for each in inputs.kernels(progress).values() if isinstance(each, NoKernels))
    for reason in dict.fromkeys(each.reason for each in told if each.worth_telling):
        progress.note(reason)
    if measure is not False:
        _measure_forms(inputs, toolchains, progress, workers, timeout_seconds, fresh=bool(measure))
    futures: dict[tuple[str, str], Future[Compiled]] = {}
    with WorkerPool(
        inputs.cache, workers=workers, progress=progress, timeout_seconds=timeout_seconds
    ) as pool:
        for spec in inputs.specs:
            program = lowered[spec.name] = _lowered(inputs, spec, progress)
            for name, toolchain in toolchains.items():
                source = inputs.source(spec, toolchain.target, program)
                libraries[spec.name, name] = source.kernels
                key = keys[spec.name, name] = inputs.compile_key(toolchain, spec, source)
                job = CompileJob(spec.name, toolchain, source, key)
                futures[spec.name, name] = pool.submit(job)
        with progress.phase("packing weights"):
            weights = _weights(inputs, lowered)
        results = collect(futures)
    measured = Key("measure", "accuracy", (("weights", weights.digest if weights else "none"),))
    with progress.phase("measuring accuracy"), inputs.cache.making(measured):
        accuracy = _accuracy(inputs, weights)
    spent = _costs(
        inputs,
        toolchains,
        keys,
        results,
        lowered,
        libraries,
        weights,
        progress,
        timeout_seconds,
    )
    layers = [*model_layers, *([weights] if weights is not None else [])]
    portable, portables = packaging.pack(
        {name: program.portable for name, program in lowered.items()}, inputs.cache
    )
    layers.append(packaging.layer(PORTABLE_MEDIA_TYPE, portable, "programs.stablehlo"))
    packed = []
    for target in inputs.targets:
        programs = {spec.name: results[spec.name, target.name] for spec in inputs.specs}
        executables, segments = packaging.pack(
            {name: program.executable for name, program in programs.items()}, inputs.cache
        )
        layer = packaging.layer(EXECUTABLES_MEDIA_TYPE, executables, "programs.xla")
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
                weights=next(iter(_weight_sets(spec.section, lowered[spec.name])), None),
                platforms=lowered[spec.name].platforms,
                cost_microseconds=spent.get((spec.name, target.name)),
                kernels=True if libraries[spec.name, target.name] is not None else None,
            )
            for spec in inputs.specs
        )
        library = next(filter(None, (libraries[name, target.name] for name in programs)), None)
        needs = _requirement(inputs, toolchains[target.name], programs, library)
        config = _config(inputs, toolchains[target.name], needs, table, lowered)
        config = replace(config, accuracy=accuracy)
        own = [layer]
        if library is not None:
            config = replace(config, kernels=library.described())
            own.append(packaging.kernels_layer(library, inputs.cache))
        packed.append(PackedTarget(config, (*own, *layers)))
    index, blobs = packaging.assemble(inputs.manifest.bundle.name, packed)
    packaging.check_readable(index, blobs)
    path = output / inputs.manifest.bundle.name
    current = is_current(path, index)
    if not current:
        with progress.phase(f"writing {path}"):
            write_layout(path, index, blobs, digest_of=Receipts(path).digest_of)
    digest = digest_of(index)
    return Built(path, digest, pool.compiled, len(keys) - pool.compiled, not current, accuracy)


def _lowered(inputs: Inputs, spec: ProgramSpec, progress: Progress) -> Lowered:
    """A portable program: from the cache, or lowered by one of the builds that want it."""
    if spec.kind == "call":  # traced each time: its function can read anything
        with progress.phase(f"lowering {spec.name}"):
            return inputs.lower(spec)
    program = inputs.cached(spec)
    if program is None:
        with (
            progress.phase(f"lowering {spec.name}"),
            inputs.cache.making(inputs.lower_key(spec)),
        ):
            program = inputs.cached(spec) or inputs.lower(spec)
    return program


def _measure_forms(
    inputs: Inputs,
    toolchains: Mapping[str, Toolchain],
    progress: Progress,
    workers: int,
    timeout_seconds: float,
    *,
    fresh: bool,
) -> None:
    """Measures the products of which no table says anything, and keeps what comes out in the build cache.

    Before programs are compiled: the machine is as quiet as it gets, and they want to know.
    """
    for name, library in inputs.kernels().items():
        if not isinstance(library, KernelLibrary) or not runs_here(toolchains[name], library):
            continue
        with progress.phase("looking for products"):
            products = inputs.products()
        conditions = inputs.conditions(toolchains[name].target, library)
        if not inputs.known_forms.missing(products, conditions, fresh=fresh):
            continue
        with measuring_alone(inputs.cache, progress):
            inputs.learn(
                read_own(own_path(inputs.cache.root))
            )  # what another build measured meanwhile
            missing = inputs.known_forms.missing(products, conditions, fresh=fresh)
            if not missing:
                continue
            seconds = _FORM_SECONDS * sum(len(product.forms) for product in missing)
            progress.note(
                f"measuring the forms of {len(missing)} products for {name}, about {seconds:.0f} s"
            )
            try:
                measured = measure_products(
                    missing,
                    toolchains[name],
                    library,
                    inputs.cache,
                    progress,
                    workers=workers,
                    timeout_seconds=timeout_seconds,
                )
            except BuildError as error:  # it decides about speed only
                progress.note(f"forms are not measured, recorded ones are taken: {error}")
                continue
            inputs.learn(merge_into(own_path(inputs.cache.root), measured))


def _forms(inputs: Inputs, target: Target) -> tuple[ProductForm, ...] | None:
    """The forms of the products in a target's programs, and why they were chosen."""
    library = inputs.kernels().get(target.name)
    if not isinstance(library, KernelLibrary):
        return None
    found = []
    for product in inputs.products():
        choice = inputs.choice(product, target, library)
        measured = choice.measured
        if measured is None:
            found.append(ProductForm(str(product), choice.form, {}))
            continue
        found.append(
            ProductForm(
                str(product),
                choice.form,
                dict(measured.nanoseconds),
                f"{measured.conditions.level} on {measured.conditions}",
                measured.date,
                None if measured.product == product else str(measured.product),
            )
        )
    return tuple(found) or None


def _requirement(
    inputs: Inputs,
    toolchain: Toolchain,
    programs: Mapping[str, Compiled],
    library: KernelLibrary | None,
) -> Requirement:
    """What a target's executables need of a machine, from what the compiler says of them.

    Args:
        inputs: of the build.
        toolchain: of the target.
        programs: compiled for it.
        library: the kernels that they call; None: they call none.

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
    features = set[str]().union(*(program.cpu_features for program in programs.values()))
    needed = target.requirement(
        toolchain.jaxlib,
        plugin=toolchain.plugin,
        cuda=CUDA if target.platform == "cuda" else None,
        cpu_features=tuple(sorted(features | set(library.cpu_features if library else ()))),
        device_memory_bytes=max(needs.values()) if accelerated else None,
        xla_flags=effective_xla_flags(toolchain.xla_flags(os.environ)),
        environment=effective_environment(target.platform, os.environ),
    )
    return replace(needed, glibc=None if library is None else library.needed_glibc)


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
        format=FORMAT_VERSION,
        bundle=inputs.manifest.bundle.name,
        target=toolchain.target.name,
        requirement=requirement,
        versions={**versions("prejit"), **dict(toolchain.versions)},
        programs=programs,
        weight_sets={
            name: tensors
            for spec in inputs.specs
            for name, tensors in _weight_sets(spec.section, lowered[spec.name]).items()
        },
        decoder=_decoder(inputs, lowered),
        encoder=_encoder(lowered),
        mesh=inputs.manifest.mesh,
        weight_shardings=next(
            (p.weight_shardings for p in lowered.values() if p.weight_shardings), None
        ),
        portable=Portable(jax, newest, readable_until(jax)),
        forms=_forms(inputs, toolchain.target),
    )


def _tensor_names(section: str, program: Lowered) -> tuple[str, ...]:
    """Names in the weights layer: a decoder's as published, a user function's behind its section."""
    return tuple(f"{section}:{name}" if section else name for name in program.weights)


def _weight_sets(section: str, program: Lowered) -> dict[str, tuple[str, ...]]:
    """The sets of tensors that a program is run with, by name; none where it has no weights."""
    if not program.weights:
        return {}
    if program.weight_sets:
        return {f"{MODEL_WEIGHTS}:{name}": names for name, names in program.weight_sets.items()}
    name = f"{PROGRAM_WEIGHTS}:{section}" if section else MODEL_WEIGHTS
    return {name: _tensor_names(section, program)}


def _encoder(lowered: Mapping[str, Lowered]) -> Encoder | None:
    shape = next((p.encoder for p in lowered.values() if p.encoder is not None), None)
    if shape is None:
        return None
    layers = next(
        sets
        for name, p in lowered.items()
        if len(sets := _weight_sets("", p)) and name.endswith("/layer")
    )
    return Encoder(**shape, layers=tuple(layers))


def _costs(
    inputs: Inputs,
    toolchains: Mapping[str, Toolchain],
    keys: Mapping[tuple[str, str], Key],
    results: Mapping[tuple[str, str], Compiled],
    lowered: Mapping[str, Lowered],
    libraries: Mapping[tuple[str, str], KernelLibrary | None],
    weights: Layer | None,
    progress: Progress,
    timeout_seconds: float,
) -> dict[tuple[str, str], int]:
    """Microseconds of one run of an encoder's programs, by program and target.

    Measured where this machine can run them; else as of a target that it can run, or estimated.
    """
    specs = [spec for spec in inputs.specs if spec.kind in ENCODER_KINDS]
    if not specs or weights is None or not isinstance(weights.content, Path):
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, toolchain in toolchains.items():
        programs = {spec.name: results[spec.name, name] for spec in specs}
        library = next(filter(None, (libraries[spec.name, name] for spec in specs)), None)
        needs = _requirement(inputs, toolchain, programs, library)
        own = {spec.name: keys[spec.name, name] for spec in specs}
        kernels = None if library is None else library.digest
        with progress.phase(f"measuring programs of {name}"):
            found[name] = costs.measured(
                toolchain,
                needs,
                specs,
                own,
                programs,
                lowered,
                weights.content,
                inputs.cache,
                kernels,
                progress,
                timeout_seconds,
            )
    any_measured = next(filter(None, found.values()), {})
    estimated = {spec.name: lowered[spec.name].estimated_microseconds for spec in specs}
    return {
        (program, name): cost
        for name, own in found.items()
        for program, cost in (own or any_measured or estimated).items()
    }


def _decoder(inputs: Inputs, lowered: Mapping[str, Lowered]) -> Decoder | None:
    shape = next((p.decoder for p in lowered.values() if p.decoder is not None), None)
    if shape is None:
        return None
    eos, bos = _special_ids(inputs.directory, shape["vocab_size"])
    return Decoder(**shape, eos_token_ids=eos, bos_token_id=bos)


def _special_ids(directory: Path, vocab_size: int) -> tuple[tuple[int, ...], int | None]:
    """The ids that end a text, and the one that begins it, as far as the model has such tokens.

    Raises:
        CheckpointError: a file cannot be read, or an id is no integer.
    """
    found: dict[str, list[int]] = {"eos_token_id": [], "bos_token_id": []}
    for file in ("config.json", "generation_config.json"):  # the second goes before the first
        said = _read_json(directory / file, required=file == "config.json")
        for name in found.keys() & said.keys():
            value = said[name]
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
                raise CheckpointError(
                    f"{directory / file}: {name}: expected a token id or a list of them, found "
                    f"{value!r:.80}"
                )
            found[name] = sorted({each for each in ids if 0 <= each < vocab_size})
    return tuple(found["eos_token_id"]), next(iter(found["bos_token_id"]), None)


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(f"{path}: expected a file, found none") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot read JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object")
    return value


def _model_layers(inputs: Inputs, progress: Progress) -> Iterator[Layer]:
    """Tokenizer, generation config and licence, byte for byte as they were published; chat templates.

    Raises:
        CheckpointError: one of them would fail where the bundle runs.
        StoreError: a file cannot be read.
    """
    if inputs.manifest.model is not None:
        directory = inputs.transformer_directory
        if inputs.manifest.encode is None:
            _special_ids(directory, limits.MAX_SIZE)
        for file, media_type in (
            ("tokenizer.json", TOKENIZER_MEDIA_TYPE),
            ("generation_config.json", GENERATION_MEDIA_TYPE),
        ):
            if (path := directory / file).is_file():
                try:
                    content = path.read_bytes()
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from error
                if file == "tokenizer.json":
                    _check_tokenizer(inputs, path, content, progress)
                elif inputs.manifest.encode is None:
                    _check_generation(path, content)
                yield packaging.layer(media_type, content, file)
        chat = read_chat(directory)
        if chat is not None and (directory / "tokenizer.json").is_file():
            yield packaging.layer(CHAT_MEDIA_TYPE, to_json(chat), "chat.json")
    if inputs.manifest.bundle.license is not None:
        path = inputs.manifest.resolve(inputs.manifest.bundle.license)
        try:
            yield packaging.layer(LICENSE_MEDIA_TYPE, path.read_bytes(), "LICENSE")
        except OSError as error:
            raise StoreError(f"{path}: cannot read the licence: {error.strerror}") from error


def _check_generation(path: Path, content: bytes) -> None:
    if len(content) > limits.MAX_GENERATION_BYTES:
        raise CheckpointError(
            f"{path}: expected at most {limits.MAX_GENERATION_BYTES} bytes, found {len(content)}"
        )
    try:
        defaults.parse(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}", hint="mend the value, or take the key out to have prejit's default"
        ) from error


def _check_tokenizer(inputs: Inputs, path: Path, content: bytes, progress: Progress) -> None:
    """Checks a tokenizer, but for one that passed before."""
    key = Key(
        "tokenizer",
        inputs.manifest.bundle.name,
        (
            ("file", digest_of(content)),
            # The vocabulary is in it: reading it takes transformers, which a build without news spares.
            ("config", file_digest(path.with_name("config.json"))),
            ("our code", code_digest("prejit.compiler.checkpoint.tokenizer_check")),
            *versions("tokenizers", "transformers").items(),
        ),
    )
    if inputs.cache.get(key) is not None:
        return
    from prejit.compiler.models import registry

    shape = (
        inputs.shape
        if inputs.manifest.encode is None
        else registry.describe_encoder(inputs.encoder)
    )
    with progress.phase("checking tokenizer.json"):
        tokenizer_check.check_tokenizer(path, content, shape.vocab_size)
    inputs.cache.put(key, {"passed": True})


def _weights(inputs: Inputs, lowered: Mapping[str, Lowered]) -> Layer | None:
    """The weights layer, from the cache or packed now."""
    ingredients = [("our code", code_digest(*WEIGHTS))]
    model = None
    if inputs.manifest.model is not None:
        model = inputs.checkpoint()
        ingredients += [
            ("dtype", inputs.manifest.model.dtype),
            ("matrices", inputs.matrices),
            *(
                (f"file {file.relative_to(inputs.directory)}", file_digest(file))
                for file in model.files
            ),
        ]
    user = inputs.user_weights()
    for section, values in user.items():
        for name, value in values.items():
            digest = digest_of(value.tobytes())
            ingredients.append((f"{section}:{name}", f"{value.dtype}{list(value.shape)} {digest}"))
    if model is None and not user:
        return None
    key = Key("weights", inputs.manifest.bundle.name, tuple(ingredients))
    with inputs.cache.making(key):
        result = inputs.cache.get(key)
        if result is None:
            tensors: list[Tensor] = []
            if model is not None:
                tensors = inputs.tensors(model.read)
            tensors += [
                Tensor(
                    f"{section}:{name}", str(value.dtype), value.shape, partial(np.asarray, value)
                )
                for section, values in user.items()
                for name, value in values.items()
            ]
            with inputs.cache.blob_writer() as blob:
                packaging.write_weights(tensors, blob)
            result = {"digest": blob.digest, "size": blob.size}
            inputs.cache.put(key, result, blobs=[blob.digest])
    path = inputs.cache.blob_path(result["digest"])
    if path is None:
        raise BuildError("the weights are gone from the build cache", hint="build again")
    return Layer(WEIGHTS_MEDIA_TYPE, result["digest"], result["size"], path, "weights.safetensors")


def _accuracy(inputs: Inputs, weights: Layer | None) -> Accuracy | None:
    """What the dtypes of weights and cache cost, from the cache or measured now.

    Returns:
        None where all is float32, or there is no model.
    """
    model = inputs.manifest.model
    if weights is None or model is None or {model.dtype, inputs.cache_dtype} == {"float32"}:
        return None
    published = inputs.checkpoint()
    file = None if model.evaluation is None else inputs.manifest.resolve(model.evaluation)
    tokenizer_file = inputs.transformer_directory / "tokenizer.json"
    ingredients = [
        ("dtype", model.dtype),
        ("cache_dtype", inputs.cache_dtype),
        ("text", "none" if file is None else f"{file.name} {file_digest(file)}"),
        ("tokenizer", file_digest(tokenizer_file) if file and tokenizer_file.is_file() else "none"),
        ("matrices", inputs.matrices),
        ("our code", code_digest(*ACCURACY)),
        ("jax configuration", inputs.jax_configuration),
        *(
            (f"file {each.relative_to(inputs.directory)}", file_digest(each))
            for each in published.files
        ),
        *versions("jax", "jaxlib", "flax", "transformers").items(),
    ]
    key = Key("accuracy", inputs.manifest.bundle.name, tuple(ingredients))
    if (known := inputs.cache.get(key)) is not None:
        return Accuracy(**known)
    from prejit.compiler.build import accuracy
    from prejit.compiler.models import registry

    values = {name: published.read(name) for name in published.names}
    assert isinstance(weights.content, Path)
    packed = accuracy.mapped(weights.content)
    if inputs.manifest.encode is None:
        exact = accuracy.Model(
            registry.make_decoder(inputs.config, out_in=inputs.out_in),
            values,
            registry.describe(inputs.config),
        )
        stored = accuracy.Model(inputs.model, packed, inputs.shape)
        text = None if file is None else (file.name, *accuracy.read_text(file, tokenizer_file))
        bos = getattr(inputs.config, "bos_token_id", None)
        bos = bos if isinstance(bos, int) and 0 <= bos < inputs.shape.vocab_size else 0
        found = accuracy.of_decoder(model.dtype, exact, stored, text, bos)
    else:
        exact = accuracy.Model(registry.make_encoder(inputs.encoder, out_in=inputs.out_in), values)
        stored = accuracy.Model(inputs.model, packed)
        shape = registry.describe_encoder(inputs.encoder)
        sentences = (
            accuracy.random_sentences(shape.vocab_size, shape.max_tokens)
            if file is None
            else accuracy.read_sentences(file, tokenizer_file, shape.max_tokens)
        )
        name = accuracy.RANDOM if file is None else file.name
        found = accuracy.of_encoder(model.dtype, exact, stored, name, *sentences)
    inputs.cache.put(key, asdict(found))
    return found


def is_current(path: Path, index: bytes) -> bool:
    """Whether a directory holds exactly this bundle, undamaged."""
    try:
        with Layout(path) as layout:
            if layout.read("index.json", limits.MAX_INDEX_BYTES) != index:
                return False
            targets = match(layout, open_index(layout)[0], Fingerprint.current())
            check_blobs(
                layout, [read_manifest(layout, target) for target in targets], Receipts(path)
            )
    except (RejectError, StoreError):
        return False
    return True
