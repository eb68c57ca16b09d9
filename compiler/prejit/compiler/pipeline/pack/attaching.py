"""Attach the descriptions of a bundle that it has not yet: a list of parts (SBOM), and the provenance.

They refer to the bundle and are outside of its index, so its digest does not depend on them. Both follow from
the bundle and, for a build, from what it was made from and by, without times and names of hosts: equal builds
attach equal bytes.

The list of parts is CycloneDX 1.6: the packages that compiled the bundle, and its files. A scanner such as
grype finds the known vulnerabilities of the packages by their `pkg:pypi` names.
"""

from __future__ import annotations

import contextlib
import json
import uuid
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from prejit.compiler.pipeline.pack.bundle_files import DESCRIPTIONS
from prejit.compiler.pipeline.pack.bundle_writing import Part, attach, is_whole
from prejit.runtime.errors import UsageError
from prejit.runtime.format.blobs import read_whole
from prejit.runtime.format.bundle_schema import Config, Descriptor, ImageManifest, Index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import PARTS_MEDIA_TYPE, STATEMENT_MEDIA_TYPE, TITLE
from prejit.runtime.format.opening import Contents, match, read_contents
from prejit.runtime.format.referrers import referrers
from prejit.runtime.format.root import Root
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.trust.signed_statements import PROVENANCE_PREDICATE

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
