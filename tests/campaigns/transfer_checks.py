"""Checks after a broken transfer, and after the one that completes it: see broken_transfers.py."""

import hashlib
import os
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.layouts import blob

from prejit.runtime.errors import PrejitError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.machine_store import MachineStore

from .broken_transfers import KILLED, STOPPED
from .transfer_processes import DIRECTORY, INTO_REGISTRY, INTO_STORE, TAR

FOREVER = float("inf")


@dataclass(frozen=True)
class Result:
    """What a case did."""

    bad: tuple[str, ...]
    ends: tuple[str, ...]
    broken: int
    missing: int
    fetched: int


def run_case(case):
    """Break a transfer, look at what it left, let it go on, and look at what is there then."""
    bad = list[str]()
    case.prepare()
    try:
        with case.disk():
            case.break_it()
            bad += [f"an attempt: {end}" for end in case.ends if is_bad(end, case.fault)]
            bad += [f"after the break: {each}" for each in wrong(case)]
            if case.way in INTO_STORE and case.rng.random() < 0.2:
                bad += [f"gc after the break: {each}" for each in collected(case)]
            count = case.rng.choice((1, 1, 1, 1, 1, 1, 1, 2))
            missing, most = missing_bytes(case, count)
            before = moved_bytes(case)
            ends = case.attempt(count)
            fetched = moved_bytes(case) - before
            bad += [f"the last attempt: {end}" for end in ends if end]
            if fetched > most:
                bad.append(f"the last attempt moved {fetched} bytes, {missing} were missing")
            bad += [f"at the end: {each}" for each in (*wrong(case), *unlike_source(case))]
            if case.way in INTO_STORE:
                bad += [f"gc at the end: {each}" for each in collected(case)]
    finally:
        shutil.rmtree(case.at, ignore_errors=True)
        bad += forget(case)
    return Result(tuple(bad), tuple(case.ends), case.broken, missing, fetched)


def is_bad(end, fault):
    """Return whether a process may not end so: without a word, or with an error that is not prejit's."""
    is_killed = end == "killed" and fault not in (KILLED, STOPPED)
    is_stopped = end == "KeyboardInterrupt" and fault != STOPPED
    return is_killed or is_stopped or end == "a hang" or end.startswith("a traceback")


def forget(case):
    """Empty the servers of a case's blobs, and yield what another host got of our logins."""
    for held in (case.place.registry, case.place.abroad):
        for kind in (held.blobs, held.manifests):
            for key in [key for key in list(kind) if key[0].startswith(case.name)]:
                kind.pop(key, None)
        for path in [path for path in list(held.files) if case.name in path]:
            held.files.pop(path, None)
    tokens = [each for each in case.place.abroad.seen if each[2]]
    case.place.abroad.seen.clear()
    case.place.registry.seen.clear()
    for method, path, authorization in tokens:
        yield f"another host got {authorization!r}: {method} {path}"


# ---------------------------------------------------------------------- what is there


def wrong(case):
    """Return blobs with other bytes than their names say, and bundles that lack blobs."""
    if case.way in INTO_STORE:
        found = wrong_blobs(case.target)
        for directory in sorted((case.target / "bundles").glob("*")):
            if (directory / "index.json").exists():
                found += wrong_bundle(directory)
        return found
    if case.way == DIRECTORY:
        is_there = (case.target / "index.json").exists()
        return wrong_blobs(case.target) + (wrong_bundle(case.target) if is_there else [])
    if case.way == TAR:
        return wrong_tar(case.target) if case.target.exists() else []
    held = case.place.registry
    return [
        f"{digest} has other bytes"
        for (name, digest), content in list(held.blobs.items())
        if name.startswith(case.name) and _digest(content) != digest
    ]


def wrong_blobs(directory):
    """Return the blobs of a directory whose bytes are not those of their names."""
    files = (directory / "blobs" / "sha256").glob("*")
    return [
        f"{each.name}: other bytes" for each in files if _digest(each.read_bytes())[7:] != each.name
    ]


def wrong_bundle(directory):
    """Return what a bundle lacks."""
    try:
        with Layout(directory) as layout:
            there = [
                (layout.blob_path(digest), digest) for digest in reached(layout, read_root(layout))
            ]
    except PrejitError as error:
        return [f"a bundle: {error}"]
    return [f"a bundle lacks {digest}" for path, digest in there if not Path(path).is_file()]


def wrong_tar(path):
    """Return what is wrong with the bundle of a tar."""
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        try:
            with tarfile.open(path) as tar:
                tar.extractall(directory, filter="data")
        except (tarfile.TarError, OSError) as error:
            return [f"a tar: {error}"]
        return wrong_blobs(Path(directory)) + wrong_bundle(Path(directory))


def unlike_source(case):
    """Return the blobs that are not as they are at the source."""
    version = case.wanted
    if case.way in INTO_REGISTRY:
        held = case.place.registry
        there = {digest: held.blobs.get((case.name, digest)) for digest in version.blobs}
        there |= {
            digest: content
            for (name, digest), content in held.manifests.items()
            if name == case.name
        }
        bad = [digest for digest, content in version.blobs.items() if there[digest] != content]
        tagged = held.manifests.get((case.name, "v1"), b"")
        return [*(f"{digest} is not there" for digest in bad)] + (
            [] if _digest(tagged) == version.digest else ["the tag leads elsewhere"]
        )
    if case.way == TAR:
        extra = [each.name for each in case.at.glob("*.partial")]
        with (
            tempfile.TemporaryDirectory(dir=case.at) as directory,
            tarfile.open(case.target) as tar,
        ):
            tar.extractall(directory, filter="data")
            return _unlike(Path(directory), case) + [f"{name} is left" for name in extra]
    if case.way == DIRECTORY:
        return _unlike(case.target, case) + [f"{each} is left" for each in left_in(case.target)]
    at = case.target / "bundles" / version.digest[7:] / "index.json"
    return _unlike(case.target, case) + ([] if at.exists() else ["the bundle is not there"])


def _unlike(directory, case):
    return [
        f"{digest} is not there"
        for digest, content in case.wanted.blobs.items()
        if not (path := blob(directory, digest)).exists() or path.read_bytes() != content
    ]


def left_in(directory):
    """Return the files of a layout to which its bundle does not lead."""
    with Layout(directory) as layout:
        known = {digest[7:] for digest in reached(layout, read_root(layout))}
    known |= {"index.json", "oci-layout"}
    found = [Path(root, name) for root, _, names in os.walk(directory) for name in names]
    return [str(each.relative_to(directory)) for each in found if each.name not in known]


def collected(case):
    """Collect what no bundle of a store leads to, and return what is left nevertheless."""
    store = MachineStore(case.target)
    try:
        store.collect(1 << 60, FOREVER)
        known = {"lock"}
        for each in store.bundles():
            place = f"bundles/{each.digest[7:]}"
            known |= {f"{place}/index.json", f"{place}/oci-layout"}
            with Layout(store.directory(each.digest)) as layout:
                known |= {
                    f"blobs/sha256/{digest[7:]}" for digest in reached(layout, read_root(layout))
                }
    except PrejitError as error:
        return [f"{type(error).__name__}: {error}"]
    found = [Path(root, name) for root, _, names in os.walk(store.path) for name in names]
    names = [str(each.relative_to(store.path)) for each in found]
    return [
        f"{name} is left"
        for name in names
        if name not in known
        and not (name.startswith("tags/") and name.endswith(".json") and "/." not in name)
    ]


# ---------------------------------------------------------------------- bytes


def missing_bytes(case, processes):
    """Return the bytes of blobs that are missing, and how many processes may move at most."""
    version, missing, more = case.wanted, 0, 0
    documents = {
        digest for digest, content in version.blobs.items() if b'"schemaVersion"' in content[:4096]
    }
    if case.way == TAR:
        return (whole := sum(map(len, version.blobs.values()))), 2 * whole
    for digest in set(version.blobs) - documents:
        content = version.blobs[digest]
        if case.way in INTO_STORE and b'"weight_sets"' in content:
            more += processes * len(content)
        if case.way in INTO_REGISTRY:
            missing += 0 if (case.name, digest) in case.place.registry.blobs else len(content)
            continue
        partial = case.target / ".partial" / digest[7:]
        if blob(case.target, digest).exists():
            continue
        held = partial.read_bytes() if partial.exists() else b""
        if content.startswith(held):
            missing += len(content) - len(held)
        else:
            missing, more = missing + max(0, len(content) - len(held)), more + len(content)
    return missing, missing + more


def moved_bytes(case):
    """Return how many bytes of blobs the server has sent, or taken."""
    held = case.place.registry
    if case.way in INTO_REGISTRY:
        return sum(
            len(content)
            for (name, digest), content in list(held.blobs.items())
            if name == case.name
        )
    return sum(
        count
        for path, count in list(held.sent.items())
        if f"/{case.name}/blobs/" in path and not _is_document(path, case)
    )


def _is_document(path, case):
    digest = f"sha256:{path.rpartition('/')[2].removeprefix('sha256:')}"
    return any(b'"schemaVersion"' in each.blobs.get(digest, b"")[:4096] for each in case.versions)


def _digest(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"
