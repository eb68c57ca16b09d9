"""The list of parts of a bundle (SBOM), as CycloneDX 1.6: the packages that compiled it, and its files.

A scanner such as grype finds the known vulnerabilities of the listed packages by their `pkg:pypi` names.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from prejit.runtime.format.bundle_schema import Config, ImageManifest
from prejit.runtime.format.names import TITLE

_NOT_ON_PYPI = ("stablehlo",)
"""Names in a config's versions that are no packages."""


def parts_list(digest: str, contents: Sequence[tuple[ImageManifest, Config]]) -> bytes:
    """Return the list of parts of a bundle.

    Args:
        digest: the bundle's digest.
        contents: the manifest and the config of each target.
    """
    config = contents[0][1]
    packages = sorted(
        {
            (name, number)
            for _, each in contents
            for name, number in each.versions.items()
            if name not in _NOT_ON_PYPI
        }
    )
    libraries = [_package(name, number) for name, number in packages]
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


def _package(name: str, number: str) -> dict[str, Any]:
    reference = f"pkg:pypi/{name.lower().replace('_', '-')}@{number}"
    return {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": number,
        "purl": reference,
    }


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
