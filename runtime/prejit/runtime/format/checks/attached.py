"""Checks of what refers to a bundle, of an `index.json` of ours, and of files that nothing leads to.

`prejit verify` alone does them: without a policy, a load reads nothing of it. Each check raises RejectError,
which names the file at fault.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from prejit.runtime.base.typed_json import shown
from prejit.runtime.errors import RejectError
from prejit.runtime.format.bundle_schema import Descriptor, ImageManifest
from prejit.runtime.format.names import (
    ATTACHED_TYPES,
    PARTS_MEDIA_TYPE,
    SIGNATURE_MEDIA_TYPE,
    STATEMENT_MEDIA_TYPE,
)

_SAYS = {
    PARTS_MEDIA_TYPE: ("bomFormat", "CycloneDX"),
    STATEMENT_MEDIA_TYPE: ("_type", "https://in-toto.io/Statement/"),
    SIGNATURE_MEDIA_TYPE: ("mediaType", SIGNATURE_MEDIA_TYPE),
}
"""The key that names the kind of a JSON document, and the beginning of its value, by media type."""


def is_described(media_type: str) -> bool:
    """Return whether `check_content` reads the content of a media type."""
    return media_type in _SAYS


def check_content(content: bytes, media_type: str, path: str) -> None:
    """14. Check that a layer of something attached is the JSON that its media type says."""
    key, beginning = _SAYS[media_type]
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RejectError(path, f"expected JSON of {media_type}: {error}") from error
    said = found.get(key) if isinstance(found, dict) else None
    if not isinstance(said, str) or not said.startswith(beginning):
        raise RejectError(
            path, f"{key}: expected {beginning}, as {media_type} has, found {shown(said)}"
        )


def check_subject(subject: Descriptor, known: Mapping[str, Descriptor], path: str) -> None:
    """14. Check that something refers to the bundle, to a target, or to something attached, as they are."""
    found = known.get(subject.digest)
    if found is None:
        raise RejectError(
            path,
            f"expected the bundle, a target or something attached as subject, found {subject.digest}",
            hint="remove its entry from index.json and its file: it belongs to another bundle",
        )
    expected, said = ((at.mediaType, at.size) for at in (found, subject))
    if said != expected:
        raise RejectError(path, f"subject: expected {expected}, found {said}")


def check_types(manifests: Iterable[ImageManifest], attached: Collection[str], path: str) -> None:
    """15. Check that a bundle still has what its build attached to it.

    Args:
        manifests: the manifests of its targets, which say what that was.
        attached: artifact types of what is attached to the bundle.
        path: `index.json`.
    """
    named = {each for at in manifests for each in at.annotations.get(ATTACHED_TYPES, "").split(",")}
    if missing := sorted(named - {"", *attached}):
        raise RejectError(
            path,
            f"expected what the build attached, found no {' and no '.join(missing)}",
            hint="copy the bundle again with all that refers to it, or build it again",
        )


def is_ours(content: bytes) -> bool:
    """Return whether prejit wrote an `index.json`: its keys are sorted, and other tools begin otherwise."""
    try:
        found: Any = json.loads(content)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and next(iter(found), "") == "manifests"


def check_root(content: bytes, expected: bytes, path: str) -> None:
    """16. Check that an `index.json` of ours is what our writer writes about the files behind it."""
    if content == expected:
        return
    found, wanted = json.loads(content), json.loads(expected)
    if found == wanted:
        raise RejectError(
            path,
            "expected JSON with sorted keys and without spaces, found the same JSON in other bytes",
            hint="another program has written the file: copy or fetch the bundle again",
        )
    keys = sorted(key for key in wanted | found if wanted.get(key) != found.get(key))
    if "manifests" not in keys:
        raise RejectError(path, f"expected what prejit writes, found other values of {shown(keys)}")
    entries, others = wanted["manifests"], found["manifests"]
    if twice := [each for place, each in enumerate(others) if each in others[:place]]:
        raise RejectError(path, f"expected each entry once, found {shown(twice[0])} twice")
    differ = (pair for pair in zip(entries, others, strict=False) if pair[0] != pair[1])
    one, other = next(differ, (f"{len(entries)} entries", f"{len(others)}"))
    raise RejectError(path, f"expected {shown(one)}, found {shown(other)}")


def check_names(found: Iterable[str], known: Collection[str], path: str) -> None:
    """17. Check that a layout has no file that nothing leads to.

    Args:
        found: the names of its files, and of everything else in its directories.
        known: those of `index.json`, `oci-layout` and the blobs that these lead to.
        path: its directory.
    """
    for name in sorted(found):
        if name not in known:
            raise RejectError(
                f"{path}/{name}",
                "expected files of the bundle alone, found another",
                hint="nothing of the bundle leads to it: remove it. The next build or `prejit sign` removes "
                "what a killed writer left",
            )
