"""The record of a bundle about its own build: the manifest, the sources, the versions, the conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prejit.compiler.pipeline.pack.bundle_descriptions import (
    BASE,
    BUILD_TYPE,
    KERNEL_SOURCE,
    RECORDING_TYPE,
)
from prejit.compiler.pipeline.pack.user_sources import SourceContent
from prejit.runtime.errors import BuildError, UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import STATEMENT_MEDIA_TYPE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.trust.reasons import RefusedError
from prejit.runtime.trust.signed_statements import (
    MAX_ENVELOPE_BYTES,
    PROVENANCE_PREDICATE,
    read_statement,
)


@dataclass(frozen=True)
class Recorded:
    """A bundle, and what its provenance says.

    Attributes:
        path: directory of the bundle.
        digest: digest of the bundle.
        targets: its targets by name, in the order of its index.
        manifest: name of its manifest's file.
        manifest_digest: digest of the manifest's file.
        sources: the files that it was made from.
        tracing: what decided StableHLO and weights.
        compiling: what decided the executables of each target.
        kernels: what decided the kernels of each target that has some.
    """

    path: Path
    digest: str
    targets: Mapping[str, Contents]
    manifest: str
    manifest_digest: str
    sources: tuple[SourceContent, ...]
    tracing: Mapping[str, str]
    compiling: Mapping[str, Mapping[str, str]]
    kernels: Mapping[str, Mapping[str, str]]


def read_recorded(path: Path) -> Recorded:
    """Read what a bundle records about its build.

    Raises:
        UsageError: it was recorded from a run, or its manifest was made in Python: there is nothing to build.
        BuildError: it has no provenance, or one that says too little.
        RejectError, StoreError: the bundle is damaged, or cannot be read.
    """

    def read(layout: Layout, root: Root) -> tuple[str, list[Contents], list[str], list[bytes]]:
        targets = match(root, Fingerprint.current())
        contents = [read_contents(layout, target) for target in targets]
        statements = []
        for each in referrers(layout, root, root.digest):
            if each.artifact_type != STATEMENT_MEDIA_TYPE or len(each.layers) != 1:
                continue
            [at] = each.layers
            if at.size <= MAX_ENVELOPE_BYTES:
                statements.append(layout.read_blob(at))
        return root.digest, contents, [target.name for target in targets], statements

    digest, contents, names, statements = read_whole(path, read)
    definition = _definition(path, digest, statements)
    kind = definition.get("buildType")
    if kind == RECORDING_TYPE:
        raise UsageError(
            f"{path}: expected a bundle that `prejit build` made, found one that `prejit record` made",
            hint="run the command again under `prejit record`: what it computes is in no manifest",
        )
    if kind != BUILD_TYPE:
        raise BuildError(
            f"{path}: provenance: expected the build type {BUILD_TYPE}, found {kind!r}"
        )
    try:
        return _recorded(path, digest, dict(zip(names, contents, strict=True)), definition)
    except (KeyError, TypeError, AttributeError) as error:
        raise BuildError(
            f"{path}: provenance: expected the fields of {BUILD_TYPE}, found others: {error!r}"
        ) from error


def _definition(path: Path, digest: str, statements: list[bytes]) -> Mapping[str, Any]:
    for content in statements:
        try:
            statement = read_statement(content, PROVENANCE_PREDICATE)
        except RefusedError:
            continue
        if statement.about(digest) is not None:
            found = statement.predicate.get("buildDefinition")
            return found if isinstance(found, dict) else {}
    raise BuildError(
        f"{path}: expected the provenance of its build, found none",
        hint="every build attaches one: build the bundle again, or copy it with what is attached to it",
    )


def _recorded(
    path: Path, digest: str, targets: Mapping[str, Contents], definition: Mapping[str, Any]
) -> Recorded:
    manifest = definition["externalParameters"].get("manifest")
    if manifest is None:
        raise UsageError(
            f"{path}: expected a bundle of a manifest file, found one that a Python program built",
            hint="run the program again with another output, and compare the two with `prejit diff`",
        )
    sources = tuple(
        SourceContent(each["annotations"][BASE], each["name"], f"sha256:{each['digest']['sha256']}")
        for each in definition["resolvedDependencies"]
        if BASE in each.get("annotations", {})
    )
    internal = definition["internalParameters"]
    return Recorded(
        path,
        digest,
        targets,
        str(manifest["name"]),
        f"sha256:{manifest['digest']['sha256']}",
        sources,
        _texts(internal["tracing"]),
        {name: _texts(internal["compiling"][name]) for name in targets},
        _kernels(internal["kernels"], _texts(internal["kernel sources"])),
    )


def _kernels(
    kernels: Mapping[str, Mapping[str, Any]], sources: Mapping[str, str]
) -> dict[str, Mapping[str, str]]:
    """Return what decided the kernels of each target, their sources among it."""
    named = {f"{KERNEL_SOURCE}{name}": digest for name, digest in sources.items()}
    return {target: {**_texts(found), **named} for target, found in kernels.items()}


def _texts(found: Mapping[str, Any]) -> dict[str, str]:
    """Return a mapping of texts; what is no text is shown as JSON."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value)
        for name, value in found.items()
    }
