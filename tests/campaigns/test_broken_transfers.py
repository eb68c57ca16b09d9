"""A transfer that breaks leaves no wrong bundle and nothing that `gc` does not find, and then goes on."""

import base64
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import SimpleNamespace

import pytest
from tests.fake_registry import fake_registry
from tests.layouts import blob

from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import PrejitError
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.ship.machine_store import MachineStore

pytest.importorskip("oras", reason="oras comes with the extra ship")
pytest.importorskip("obstore", reason="obstore comes with the extra ship")

from . import processes, transfer_processes
from .broken_transfers import FAULTS, KILLED, STOPPED, USER, WAYS, Case, make_version
from .campaign import ROOT, check, facts, scratch_directory, setting, write_figures
from .transfer_processes import DIRECTORY, INTO_REGISTRY, INTO_STORE, TAR

EXAMPLES = setting("BROKEN_EXAMPLES", 40)
FIRST = setting("BROKEN_FIRST", 0)  # the number of the first case: its seed
pytestmark = pytest.mark.timeout(900 + EXAMPLES)
WHOLE_EXAMPLES = 5_000  # from this number on, the figures are written
AT_ONCE = setting("BROKEN_AT_ONCE", 6)
GOLDEN = ROOT / "tests" / "format" / "v1" / "call"


@pytest.mark.thorough
def test_broken_transfers_leave_nothing_wrong_and_go_on(monkeypatch):
    monkeypatch.setattr(processes, "PRELOADED", transfer_processes.PRELOADED)
    began = time.monotonic()
    with scratch_directory() as scratch, ExitStack() as stack:
        scratch.chmod(0o755)
        versions = tuple(make_version(GOLDEN, scratch / f"v{seed}", seed) for seed in (1, 2))
        mounts = can_mount(scratch / "disk")
        places = SimpleQueue()
        for number in range(AT_ONCE):
            places.put(stack.enter_context(place(number, scratch, mounts)))

        def run(case):
            at = places.get()
            try:
                return *case, run_case(Case(*case, versions, at))
            finally:
                places.put(at)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            results = list(pool.map(run, cases()))
    keep(results, time.monotonic() - began, mounts)
    check(
        [
            f"case {number}, {way}, {fault}: {'; '.join(each.bad)}"
            for number, way, fault, each in results
            if each.bad
        ]
    )


def can_mount(directory):
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        return False
    subprocess.run(["umount", str(directory)], check=True)
    return True


def cases():
    """Yield the number, the way and the fault of each case. All faults of a way come in turn."""
    turns = Counter()
    for number in range(FIRST, FIRST + EXAMPLES):
        [way] = Random(number).choices([*WAYS], [*WAYS.values()])
        yield number, way, FAULTS[way][turns[way] % len(FAULTS[way])]
        turns[way] += 1


@contextmanager
def place(number, scratch, mounts):
    """Run the servers of a worker, every second with a login, the first two with the referrers API."""
    user = USER if number % 2 else None
    with fake_registry(user=user, has_referrers=number < 2) as registry, fake_registry() as abroad:
        asked = {"www_authenticate": f'Bearer realm="http://{abroad.host}/token",service="s"'}
        abroad.fault = lambda method, path: (401, asked) if path.startswith("/deny") else None
        directory = scratch / f"worker{number}"
        directory.mkdir()
        logins = directory / "auth.json"
        auth = {"auth": base64.b64encode(USER.encode()).decode()}
        logins.write_text(json.dumps({"auths": {registry.host: auth}}))
        env = {"REGISTRY_AUTH_FILE": str(logins), "PREJIT_STORE_TOKEN": "secret", "HOME": "/"}
        found = {"registry": registry, "abroad": abroad, "scratch": directory}
        yield SimpleNamespace(**found, env=env, can_mount=mounts)


def run_case(case):
    """Break a transfer, look at what it left, let it go on, and look at what is there then."""
    bad = []
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
    moved = {"missing": missing, "fetched": fetched}
    return SimpleNamespace(bad=bad, ends=case.ends, broken=case.broken, **moved)


def is_bad(end, fault):
    """Return whether a process may not end so: without a word, or with an error that is not prejit's."""
    is_killed = end == "killed" and fault not in (KILLED, STOPPED)
    is_stopped = end == "KeyboardInterrupt" and fault != STOPPED
    return is_killed or is_stopped or end == "a hang" or end.startswith("a traceback")


def forget(case):
    """Empty the servers of a case's blobs, and return what another host got of our logins."""
    registry, abroad = case.place.registry, case.place.abroad
    tokens = [each for each in abroad.seen if each[2]]
    for held in (registry, abroad):
        for kind in (held.blobs, held.manifests):
            for key in [key for key in list(kind) if key[0].startswith(case.name)]:
                kind.pop(key, None)
        for path in [path for path in list(held.files) if case.name in path]:
            held.files.pop(path, None)
        held.seen.clear()
    return [f"another host got {login!r}: {method} {path}" for method, path, login in tokens]


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
        if name.startswith(case.name) and digest_of(content) != digest
    ]


def wrong_blobs(directory):
    """Return the blobs of a directory whose bytes are not those of their names."""
    files = (directory / "blobs" / "sha256").glob("*")
    wrong = [each for each in files if digest_of(each.read_bytes())[7:] != each.name]
    return [f"{each.name}: other bytes" for each in wrong]


def digests_of(directory):
    with Layout(directory) as layout:
        return set(reached(layout, read_root(layout)))


def wrong_bundle(directory):
    """Return what a bundle lacks; one of a store has its blobs elsewhere."""
    try:
        with Layout(directory) as layout:
            digests = reached(layout, read_root(layout))
            lacking = [each for each in digests if not Path(layout.blob_path(each)).is_file()]
    except PrejitError as error:
        return [f"a bundle: {error}"]
    return [f"a bundle lacks {each}" for each in lacking]


@contextmanager
def extracted(path):
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        with tarfile.open(path) as tar:
            tar.extractall(directory, filter="data")
        yield Path(directory)


def wrong_tar(path):
    try:
        with extracted(path) as directory:
            return wrong_blobs(directory) + wrong_bundle(directory)
    except (tarfile.TarError, OSError) as error:
        return [f"a tar: {error}"]


def unlike_source(case):
    """Return the blobs that are not as they are at the source."""
    version, target = case.wanted, case.target
    if case.way in INTO_REGISTRY:
        held = case.place.registry
        there = {
            digest: content
            for kind in (held.blobs, held.manifests)
            for (name, digest), content in kind.items()
            if name == case.name
        }
        bad = [digest for digest, content in version.blobs.items() if there.get(digest) != content]
        leads = digest_of(there.get("v1", b"")) == version.digest
        return [f"{each} is not there" for each in bad] + ["the tag leads elsewhere"] * (not leads)
    if case.way == TAR:
        with extracted(target) as directory:
            left = [f"{each.name} is left" for each in case.at.glob("*.partial")]
            return _unlike(directory, case) + left
    if case.way == DIRECTORY:
        known = {*_names_of(digests_of(target)), "index.json", "oci-layout"}
        return _unlike(target, case) + [f"{each} is left" for each in _files(target) - known]
    at = target / "bundles" / version.digest[7:] / "index.json"
    return _unlike(target, case) + ["the bundle is not there"] * (not at.exists())


def _unlike(directory, case):
    return [
        f"{digest} is not there"
        for digest, content in case.wanted.blobs.items()
        if not (path := blob(directory, digest)).exists() or path.read_bytes() != content
    ]


def _files(directory):
    found = (Path(root, name) for root, _, names in os.walk(directory) for name in names)
    return {str(each.relative_to(directory)) for each in found}


def _names_of(digests):
    return {f"blobs/sha256/{digest[7:]}" for digest in digests}


def collected(case):
    """Collect what no bundle of a store leads to, and return what is left nevertheless."""
    store = MachineStore(case.target)
    known = {"lock"}
    try:
        store.collect(1 << 60, float("inf"))
        for each in store.bundles():
            place = f"bundles/{each.digest[7:]}"
            known |= {f"{place}/index.json", f"{place}/oci-layout"}
            known |= _names_of(digests_of(store.directory(each.digest)))
    except PrejitError as error:
        return [f"{type(error).__name__}: {error}"]
    is_tag = re.compile(r"tags/(?!.*/\.).*\.json").fullmatch
    return [f"{name} is left" for name in _files(store.path) - known if not is_tag(name)]


def missing_bytes(case, at_once):
    """Return the bytes of blobs that are missing, and how many `at_once` processes may move at most."""
    version, missing, more = case.wanted, 0, 0
    if case.way == TAR:
        return (whole := sum(map(len, version.blobs.values()))), 2 * whole
    for digest, content in version.blobs.items():
        if _is_document(content):
            continue
        # Where the store has an older version, each process reads the config first: it lists the chunks.
        if case.way in INTO_STORE and b'"weight_sets"' in content:
            more += at_once * len(content)
        if case.way in INTO_REGISTRY:
            missing += 0 if (case.name, digest) in case.place.registry.blobs else len(content)
            continue
        partial = case.target / ".partial" / digest[7:]
        if blob(case.target, digest).exists():
            continue
        held = partial.read_bytes() if partial.exists() else b""
        missing += max(0, len(content) - len(held))
        if not content.startswith(held):  # wrong bytes show at the end, and all is fetched again
            more += len(content)
    return missing, missing + more


def moved_bytes(case):
    """Return how many bytes of blobs the server has sent, or taken."""
    held = case.place.registry
    if case.way in INTO_REGISTRY:
        return sum(len(each) for (name, _), each in list(held.blobs.items()) if name == case.name)
    documents = {
        digest.removeprefix("sha256:")
        for version in case.versions
        for digest, content in version.blobs.items()
        if _is_document(content)
    }
    return sum(
        count
        for path, count in list(held.sent.items())
        if f"/{case.name}/blobs/" in path and path[-64:] not in documents
    )


def _is_document(content):
    return b'"schemaVersion"' in content[:4096]


def keep(results, seconds, mounts):
    found = [each for *_, each in results]
    faults = {}
    for _, _, fault, each in results:
        faults.setdefault(fault, Counter()).update(end or "ended well" for end in each.ends)
    figures = {
        **facts("kernel"),
        "cases": len(found),
        "processes that broke": sum(len(each.ends) for each in found),
        "requests that broke": sum(each.broken for each in found),
        "cases in which none did": sum(not each.broken for each in found),
        "bad outcomes": sum(bool(each.bad) for each in found),
        "bytes missing when they went on": sum(each.missing for each in found),
        "bytes that then moved": sum(max(0, each.fetched) for each in found),
        "disks that are really full": mounts,
        "ways": Counter(way for _, way, _, _ in results),
        "faults": dict(sorted(faults.items())),
        "seconds": round(seconds),
    }
    if len(results) >= WHOLE_EXAMPLES:
        write_figures("broken_transfers", figures)
    print(json.dumps(figures, indent=1))
