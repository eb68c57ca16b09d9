"""Attach the descriptions of a bundle that it has not yet: a list of parts (SBOM), and the provenance.

They refer to the bundle and are outside of its index, so its digest does not depend on them. Both follow from
the bundle and, for a build, from what it was made from and by, without times and names of hosts: equal builds
attach equal bytes.

The list of parts is CycloneDX 1.6: the packages that compiled the bundle, and its files. A scanner such as
grype finds the known vulnerabilities of the packages by their `pkg:pypi` names.

The provenance is an in-toto statement with SLSA's predicate v1: from what the bundle was built. It is not
signed here: `prejit sign` signs it together with the bundle. `prejit rebuild` reads it, builds again and
compares.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prejit.compiler.base.statement_writing import encode_statement
from prejit.compiler.native.kernel_library import kernel_conditions
from prejit.compiler.pipeline.executable_jobs import CompiledTarget
from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS
from prejit.compiler.pipeline.pack.bundle_writing import Part, attach, is_whole
from prejit.compiler.pipeline.pack.user_sources import Base, SourceContent, manifest_sources
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.published_files import Published
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.store.lowering_settings import jax_configuration
from prejit.compiler.store.prejit_code import LOWERING, WEIGHTS, code_digest
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Config, Descriptor, ImageManifest, Index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE, REF_NAME, STATEMENT_MEDIA_TYPE, TITLE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE, SignedSubject, Statement

PREDICATE_ANNOTATION = "in-toto.io/predicate-type"
"""The annotation that names the predicate of an attached statement, as other tools write it."""
_NOT_ON_PYPI = ("stablehlo",)
"""Names in a config's versions that are no packages."""


def attach_descriptions(
    path: Path, digest: str, provenance_of: Callable[[Index, Sequence[Config]], bytes]
) -> None:
    """Attach the list of parts and the provenance of a bundle, if it has none that is whole.

    Nothing happens if another build has replaced the bundle meanwhile. `provenance_of` returns the statement
    of its provenance, from its index and the configs of its targets.
    """

    def read(layout: Layout, root: Root) -> tuple[Root, list[Contents], set[str]]:
        if root.digest != digest:
            return root, [], set()
        targets = sorted(match(root, Fingerprint.current()), key=lambda target: target.name)
        contents = [read_contents(layout, target) for target in targets]
        ours = [
            each
            for each in referrers(layout, root, digest)
            if each.artifact_type in DESCRIPTIONS and is_whole(layout, each)
        ]
        return root, contents, {each.artifact_type for each in ours}

    root, contents, there = read_whole(path, read)
    if root.digest != digest or root.subject is None:
        return
    with contextlib.suppress(UsageError):  # another build has replaced it just now
        if PARTS_MEDIA_TYPE not in there:
            parts = parts_list(digest, [(each.manifest, each.config) for each in contents])
            _attach(path, root.subject, PARTS_MEDIA_TYPE, parts, {})
        if STATEMENT_MEDIA_TYPE not in there:
            configs = [each.config for each in contents]
            statement = provenance_of(root.bundle, configs)
            noted = {PREDICATE_ANNOTATION: PROVENANCE_PREDICATE}
            _attach(path, root.subject, STATEMENT_MEDIA_TYPE, statement, noted)


def _attach(
    path: Path, subject: Descriptor, kind: str, content: bytes, noted: dict[str, str]
) -> None:
    layers: Sequence[Part] = [Part(kind, content, noted or None)]
    attach(path, subject, kind, layers, noted)


def parts_list(digest: str, contents: Sequence[tuple[ImageManifest, Config]]) -> bytes:
    """Return the list of parts of a bundle, from the manifest and the config of each target."""
    config = contents[0][1]
    packages = sorted(
        {
            (name, number)
            for _, each in contents
            for name, number in each.versions.items()
            if name not in _NOT_ON_PYPI
        }
    )
    libraries = [
        {
            "type": "library",
            "bom-ref": (reference := package_url(name, number)),
            "name": name,
            "version": number,
            "purl": reference,
        }
        for name, number in packages
    ]
    files = {layer.digest: layer for manifest, _ in contents for layer in manifest.layers}
    components = [
        *libraries,
        *(
            _file(each.digest, (each.annotations or {}).get(TITLE, each.mediaType), each.mediaType)
            for each in sorted(files.values(), key=lambda each: each.digest)
        ),
    ]
    found = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": "prejit", "version": version("prejit")}
                ]
            },
            "component": _bundle(config, digest),
        },
        "components": components,
        "dependencies": [{"ref": digest, "dependsOn": [each["bom-ref"] for each in components]}],
    }
    return json.dumps(found, sort_keys=True, separators=(",", ":")).encode("ascii")


def _bundle(config: Config, digest: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "machine-learning-model",
        "bom-ref": digest,
        "name": config.bundle,
        "hashes": [_hash(digest)],
    }
    shape = config.decoder or config.encoder
    if shape is not None:
        found["modelCard"] = {"modelParameters": {"modelArchitecture": shape.family}}
    return found


def package_url(name: str, number: str) -> str:
    """Return the name of a package of PyPI by which scanners know it."""
    return f"pkg:pypi/{name.lower().replace('_', '-')}@{number}"


def _file(digest: str, title: str, media_type: str) -> dict[str, Any]:
    return {
        "type": "file",
        "bom-ref": digest,
        "name": title,
        "mime-type": media_type,
        "hashes": [_hash(digest)],
    }


def _hash(digest: str) -> dict[str, str]:
    return {"alg": "SHA-256", "content": digest.removeprefix("sha256:")}


BUILD_TYPE = "urn:prejit:build:v1"
"""SLSA's build type: `prejit build` of a manifest."""
RECORDING_TYPE = "urn:prejit:recording:v1"
"""SLSA's build type: `prejit record` of a command, or of several, one after the other."""
BUILDER = "urn:prejit:builder"
"""SLSA's builder. Who ran it is who signs the provenance."""

BASE = "dev.prejit.relative-to"
"""The annotation of a file: it is named relative to the directory of `manifest`, `model` or `draft`."""
KERNEL_SOURCE = "source "
"""The names of ingredients of a library of kernels that hold digests of its sources begin with this."""
_OF_PROGRAMS = ("stablehlo", "platforms", "kernels")
"""The ingredients of keys that belong to one program. A library of kernels is a part of the bundle."""
_MAX_MANIFEST_BYTES = 64 << 10
"""A longer manifest is named by its digest alone."""


def build_provenance(
    plan: Plan,
    targets: Sequence[CompiledTarget],
    published: Published | None,
    store: Store,
    digest: str,
    index: Index,
    configs: Sequence[Config],
) -> bytes:
    """Return the statement of the provenance of a bundle that `prejit build` made.

    `published` has the files of the checkpoint; `digest`, `index` and `configs` are those of the bundle and
    its targets.
    """
    internal = {
        # The key of each program: the digest of everything that its executable was made from.
        "keys": {c.target: {each.name: each.key for each in c.programs} for c in configs},
        "tracing": _tracing(),
        "compiling": {each.tools.name: _compiling(each) for each in targets},
        **_kernels(targets, store),
    }
    sources = _sources(plan, published)
    return _provenance(digest, index, configs, BUILD_TYPE, _parameters(plan), internal, sources)


def recording_provenance(digest: str, index: Index, configs: Sequence[Config]) -> bytes:
    """Return the statement of the provenance of a bundle that `prejit record` made.

    It lists the functions that can be imported. The commands are left out: they hold paths of a machine, and
    often secrets. The keys of the programs are in the configs.
    """
    functions = {each.function for config in configs for each in config.recorded or ()} - {None}
    parameters = {
        "functions": sorted(map(str, functions)),
        "targets": [config.target for config in configs],
    }
    return _provenance(digest, index, configs, RECORDING_TYPE, parameters, {}, [])


def _provenance(
    digest: str,
    index: Index,
    configs: Sequence[Config],
    build_type: str,
    parameters: dict[str, Any],
    internal: dict[str, Any],
    sources: Sequence[dict[str, Any]],
) -> bytes:
    """Return a statement about a bundle and its targets.

    `build_type` says how the parameters, which the user chose, are to be read. `internal` is what else
    decided the result.
    """
    subjects = [SignedSubject(digest, configs[0].bundle)]
    subjects += [
        SignedSubject(at.digest, (at.annotations or {}).get(REF_NAME, "")) for at in index.manifests
    ]
    predicate = {
        "buildDefinition": {
            "buildType": build_type,
            "externalParameters": parameters,
            "internalParameters": internal,
            "resolvedDependencies": [*_packages(configs), *sources],
        },
        "runDetails": {"builder": {"id": BUILDER, "version": versions("prejit")}},
    }
    return encode_statement(Statement(PROVENANCE_PREDICATE, tuple(subjects), predicate))


def _parameters(plan: Plan) -> dict[str, Any]:
    """Return what the user asked for: the manifest, and the targets that were chosen."""
    found: dict[str, Any] = {"targets": [target.name for target in plan.targets]}
    path = plan.manifest.path
    if path is None:  # made in Python
        return found
    content = _content(path)
    digits = digest_of(content).removeprefix("sha256:")
    described: dict[str, Any] = {"name": path.name, "digest": {"sha256": digits}}
    if len(content) <= _MAX_MANIFEST_BYTES:
        described["content"] = base64.b64encode(content).decode("ascii")
    return {**found, "manifest": described}


def _packages(configs: Sequence[Config]) -> list[dict[str, Any]]:
    found = sorted({pair for config in configs for pair in config.versions.items()})
    return [{"uri": package_url(name, number)} for name, number in found]


def _tracing() -> dict[str, str]:
    """Return what decides StableHLO and weights, beside the sources."""
    return {
        "code that lowers": code_digest(*LOWERING),
        "code that packs weights": code_digest(*WEIGHTS),
        "jax configuration": jax_configuration(os.environ),
        **versions("jax", "jaxlib", "flax", "transformers"),
    }


def _compiling(target: CompiledTarget) -> Mapping[str, str]:
    """Return what decides the executables of a target, beside their programs: what all their keys share."""
    keys = [dict(each.job.key.ingredients) for each in target.executables]
    return {
        name: value
        for name, value in keys[0].items()
        if name not in _OF_PROGRAMS and all(key.get(name) == value for key in keys)
    }


def _kernels(targets: Sequence[CompiledTarget], store: Store) -> dict[str, dict[str, Any]]:
    """Return what decided the kernels of each target that has some; the sources are those of all targets."""
    found: dict[str, dict[str, str]] = {}
    sources: dict[str, str] = {}
    for each in targets:
        if each.library is None:
            continue
        conditions = kernel_conditions(each.library, each.tools.toolchain, store)
        # It names directories of the machine.
        environment = conditions.pop("environment", "")
        if environment:
            conditions["environment"] = digest_of(environment.encode("utf-8", "surrogateescape"))
        names = [name for name in conditions if name.startswith(KERNEL_SOURCE)]
        sources |= {name.removeprefix(KERNEL_SOURCE): conditions.pop(name) for name in names}
        found[each.tools.name] = conditions
    return {"kernels": found, "kernel sources": sources}


def _sources(plan: Plan, published: Published | None) -> list[dict[str, Any]]:
    files = manifest_sources(plan.manifest)
    uris: dict[str, dict[str, str]] = {}
    models: tuple[tuple[Base, Plan | None, Published | None], ...] = (
        ("model", plan, published),
        ("draft", plan.of_draft, None if published is None else published.draft),
    )
    for base, of, weights in models:
        if of is None or of.model is None:
            continue
        source = None if of.manifest.model is None else of.manifest.model.source
        uris[base] = {"uri": source} if source is not None and source.startswith("hf:") else {}
        known = dict((*of.model.configuration, *(() if weights is None else weights.of_model)))
        files += tuple(SourceContent(base, name, known[name]) for name in sorted(known))
    return [
        {
            **uris.get(each.base, {}),
            "name": each.name,
            "digest": {"sha256": each.digest.removeprefix("sha256:")},
            "annotations": {BASE: each.base},
        }
        for each in files
    ]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it was read before, and is gone since
        return b""
