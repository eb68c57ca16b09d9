"""The files of a bundle on disk, for tests that read or forge them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent / "format" / "v1"  # bundles of the first version of the format
INDEX = "application/vnd.oci.image.index.v1+json"


def blob(path: Path, digest: str) -> Path:
    return path / "blobs" / "sha256" / digest.removeprefix("sha256:")


def entries_of(path: Path) -> Any:
    """The entries of `index.json`: the bundle, its targets, and what is attached."""
    return json.loads((path / "index.json").read_bytes())["manifests"]


def index_file(path: Path) -> Path:
    return blob(path, next(at["digest"] for at in entries_of(path) if at["mediaType"] == INDEX))


def index_of(path: Path) -> Any:
    return json.loads(index_file(path).read_bytes())


def subject_of(path: Path) -> Any:
    """The descriptor by which something is attached to a bundle."""
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.root import read_root

    with Layout(path) as layout:
        subject = read_root(layout).subject
    assert subject is not None
    return subject


def attached_to(path: Path, kind: str | None = None) -> list[tuple[Any, Path]]:
    """The attachments of a bundle with their files; with a kind, only those of the whole bundle."""
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.referrers import referrers
    from prejit.runtime.format.root import read_root

    with Layout(path) as layout:
        root = read_root(layout)
        found = referrers(layout, root, *([root.digest] if kind else []))
        return [
            (each, blob(path, each.layers[0].digest))
            for each in found
            if kind in (None, each.artifact_type)
        ]


def contents_of(path: Path) -> dict[str, Any]:
    """Return the contents of each target by its name, in the order in which this machine tries them."""
    from prejit.runtime.format.layout import Layout
    from prejit.runtime.format.opening import match, read_contents
    from prejit.runtime.format.root import read_root
    from prejit.runtime.machine.fingerprint import Fingerprint

    with Layout(path) as layout:
        targets = match(read_root(layout), Fingerprint.current())
        return {target.name: read_contents(layout, target) for target in targets}


def blobs_of(path: Path) -> dict[str, Path]:
    """Every blob of a bundle but its index, by digest: what `write_layout` takes beside the index."""
    files = (path / "blobs" / "sha256").iterdir()
    return {f"sha256:{file.name}": file for file in files if file != index_file(path)}


def write_files(path: Path, index: bytes, blobs: Mapping[str, bytes | Path]) -> Path:
    """Write a bundle without care, and without `write_layout`, which would refuse a forged index."""
    (path / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    for digest, content in blobs.items():
        raw = content if isinstance(content, bytes) else content.read_bytes()
        blob(path, digest).write_bytes(raw)
    (path / "oci-layout").write_bytes(b'{"imageLayoutVersion":"1.0.0"}')
    write_index(path, index)
    return path


def write_index(path: Path, index: bytes) -> Path:
    """Put another index in place, whatever it says. Return its file."""
    from prejit.runtime.base.files import digest_of

    digest = digest_of(index)
    blob(path, digest).write_bytes(index)
    entry = {"digest": digest, "mediaType": INDEX, "size": len(index)}
    entry["artifactType"] = "application/vnd.prejit.bundle.v1"
    write_root(path, [entry])
    return blob(path, digest)


def write_root(path: Path, entries: list[Any]) -> None:
    """Write an `index.json` with these entries, as a tool other than prejit writes it."""
    root = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    (path / "index.json").write_text(json.dumps(root))


def change_root(path: Path, change: Callable[[Any], object]) -> None:
    """Change what `index.json` says, and keep its form."""
    root = json.loads((path / "index.json").read_bytes())
    change(root)
    (path / "index.json").write_bytes(json.dumps(root, separators=(",", ":")).encode())


def copy_with_layers(golden: Path, path: Path, contents: Mapping[str, bytes]) -> Path:
    """Write a bundle of the last target of another, whose layers of some media types have these bytes."""
    from prejit.runtime.base.files import digest_of

    index, held, kept = index_of(golden), blobs_of(golden), dict[str, bytes | Path]()
    [*_, at] = index["manifests"]
    manifest = json.loads(held[at["digest"]].read_bytes())
    for each in (manifest["config"], *manifest["layers"]):
        content = contents.get(each["mediaType"])
        if content is not None:
            each |= {"digest": digest_of(content), "size": len(content)}
        kept[each["digest"]] = held[each["digest"]] if content is None else content
    content = _canonical(manifest)
    at |= {"digest": digest_of(content), "size": len(content)}
    index["manifests"] = [at]
    return write_files(path, _canonical(index), {**kept, at["digest"]: content})


def _canonical(plain: object) -> bytes:
    return json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()
