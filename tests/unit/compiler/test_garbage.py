"""`prejit gc`: what is used stays, whoever uses it and whenever; what nobody used goes."""

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
from tests.unit.compiler.store.test_directory_store import python as started

from prejit.compiler.garbage import collect
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import ZIG, DirectoryStore
from prejit.compiler.targets import environments
from prejit.runtime.cli.commands import run

OLD, NEW = Key("compile", "old", (("n", "1"),)), Key("compile", "new", (("n", "2"),))


@pytest.fixture(autouse=True)
def environments_root(tmp_path, monkeypatch):
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path / "runtime"))
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(tmp_path / "environments"))
    monkeypatch.setenv("PREJIT_CACHE", str(tmp_path / "none"))
    return tmp_path / "environments" / "v1"


@pytest.fixture
def root(tmp_path):
    """A cache that nobody has open, with a result and its two contents, all written just now."""
    cache = DirectoryStore.open(tmp_path / "cache")
    store(cache, OLD, b"shared", b"old")
    return cache.root


def store(cache, key, *contents):
    cache.put(key, {"key": key.name}, blobs=[cache.put_blob(content) for content in contents])


def age(directory, days):
    for path in directory.rglob("*"):
        if not path.is_symlink():
            then = path.stat().st_mtime - days * 86_400
            os.utime(path, (then, then))


def files(root):
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def gone(collection):
    return dict(Counter(found.kind for found in collection.found if found.reason))


@contextmanager
def python(code, *arguments):
    """A process that has printed "ready"; it ends with the block."""
    with started(code, *arguments) as process:
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_what_is_used_every_day_stays_and_what_was_not_goes(root):
    age(root, 0.02)
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*.json")}
    assert DirectoryStore.open(root).get(OLD) is not None
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*.json")}
    assert after == before, "a lookup writes nothing while the last is recent"
    for _ in range(3):
        age(root, 20)
        assert DirectoryStore.open(root).get(OLD) is not None
        assert gone(collect(root, days=30)) == {}
    assert DirectoryStore.open(root).last_keys("compile", "old") == (OLD,)
    age(root, 31)
    cache = DirectoryStore.open(root)
    store(cache, NEW, b"shared", b"new")
    for path in (root / "v1" / "blobs").rglob("*"):
        os.utime(path, (0, 0))  # contents that a result names go by the result
    del cache
    assert gone(collect(root, days=30)) == {"results": 1, "contents": 1, "reasons": 1}
    cache = DirectoryStore.open(root)
    assert cache.get(OLD) is None
    assert cache.get(NEW, verify=True) == {"key": "new"}
    assert gone(collect(root, days=30)) == {}


def test_what_zig_keeps_goes_whole_when_no_build_has_the_cache_open(root):
    for name in ("global/o/1.o", "local/h/2.txt"):
        (root / ZIG / name).parent.mkdir(parents=True)
        (root / ZIG / name).write_bytes(b"12345")
    assert "compiler files" not in gone(collect(root, days=30))
    age(root / ZIG, 40)
    builder = DirectoryStore.open(root)
    assert "compiler files" not in gone(collect(root, days=30))
    assert (root / ZIG / "global/o/1.o").exists()
    del builder
    [found] = [each for each in collect(root, days=30).found if each.kind == "compiler files"]
    assert (found.size, found.reason) == (10, "not used")
    assert not (root / ZIG).exists()


def test_a_dry_run_tells_the_same_and_removes_nothing(root, environments_root, monkeypatch):
    monkeypatch.setenv("PREJIT_CACHE", str(root))
    age(root, 31)
    (environments_root / "half").mkdir(parents=True)
    (root / "v1" / "temp" / "leftover").touch()
    before = files(root)
    planned = collect(days=30, dry_run=True)
    assert files(root) == before
    assert (environments_root / "half").is_dir()
    (path,) = (root / "v1" / "actions").rglob("*.json")
    path.write_bytes(path.read_bytes()[:-1])  # a damaged result goes, too
    assert gone(planned) == gone(collect(days=30))
    assert gone(planned) == {
        **{"results": 1, "contents": 2, "reasons": 1},
        **{"environments": 1, "temporary files": 1},
    }
    assert files(root) == {"v1/in-use", "v1/names"}
    assert files(environments_root) == set()


def test_a_running_build_keeps_what_it_writes_and_what_was_used_in_the_last_day(root):
    age(root, 3)
    code = """
from prejit.compiler.store.build_cache_key import Key
cache = DirectoryStore.open(Path(sys.argv[1]))
assert cache.get(Key("compile", "old", (("n", "1"),))) is not None
cache.put_blob(b"not stored yet")
with cache.blob_writer() as blob:
    blob.write(b"half" * 10000)
    print("ready", flush=True)
    sys.stdin.read()
"""
    with python(code, root):
        beside = collect(root, days=0)
        assert beside.builds_running
        assert gone(beside) == {}
    after = collect(root, days=0)
    assert not after.builds_running
    assert gone(after) == {"results": 1, "contents": 3, "reasons": 1, "temporary files": 1}
    assert not list((root / "v1" / "temp").iterdir())


def test_files_in_use_stay_and_nobody_opens_a_collected_cache(root, tmp_path):
    code = 'print("ready", flush=True)\nDirectoryStore.open(Path(sys.argv[1]))\n'
    with DirectoryStore(root).alone() as alone:
        assert alone
        with python(code, root) as process:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.5)
    path, other = tmp_path / "file", tmp_path / "new"
    cache = DirectoryStore.open(root)

    def replaced(seen):
        other.touch()
        os.utime(other, ns=(seen.st_mtime_ns, seen.st_mtime_ns))
        os.replace(other, path)

    # What happens between the look and the deletion, and whether the file goes.
    for change, goes in (
        (lambda seen: os.utime(path), False),
        (replaced, False),
        (lambda seen: path.unlink(), True),
    ):
        path.touch()
        seen = path.stat()
        time.sleep(0.01)
        change(seen)
        assert cache.remove_unchanged(path, seen) == goes
        assert path.exists() != goes
    path.touch()
    with cache._files.changing_names(shared=True):  # a build renames a file
        remover = threading.Thread(target=cache.remove_unchanged, args=(path, path.stat()))
        remover.start()
        remover.join(0.2)
        assert path.exists()
    remover.join()
    assert not path.exists()


def environment(root, name, *, python=sys.executable):
    path = root / name
    (path / "bin").mkdir(parents=True)
    (path / "bin" / "python").symlink_to(python)
    (path / "big").write_bytes(b"x" * 1000)
    marker = {"requirements": ["jax==0.12.0.1", "numpy>=2"], "versions": {"jax": "0.12.0.1"}}
    (path / environments.MARKER).write_text(json.dumps(marker))
    environments.lock_path(path).touch()
    return path


def test_unused_and_half_environments_go(environments_root):
    used, unused, half, running = (
        environment(environments_root, name) for name in ("used", "unused", "half", "running")
    )
    environment(environments_root, "broken", python="/gone")
    (half / environments.MARKER).unlink()
    age(unused, 31)
    age(running, 31)
    environments.lock_path(environments_root / "left").touch()
    with environments.lock_path(running).open() as worker:
        fcntl.flock(worker, fcntl.LOCK_SH)  # as `worker_command` does
        collection = collect(days=30)
    reasons = {found.reason for found in collection.found if found.kind == "environments"}
    assert gone(collection) == {"environments": 3, "locks": 1}
    assert [found.size for found in collection.found if found.kind == "locks"] == [0]
    assert reasons == {None, "not used", "half made", "broken"}
    left = {path.name for path in environments_root.iterdir()}
    assert left == {"used", "used.lock", "running", "running.lock"}
    [removed] = [found for found in collection.found if found.reason == "not used"]
    assert (removed.name, removed.size > 1000) == ("jax==0.12.0.1", True)
    assert gone(collect(days=30)) == {"environments": 1}, "it runs no more"
    (used / environments.MARKER).unlink()
    with environments.locked(used):  # it is being made
        assert gone(collect(days=0)) == {}
    assert gone(collect(days=0)) == {"environments": 1}
    assert not used.exists()


def test_what_was_made_from_gguf_files_goes_when_no_build_has_used_it(root, tmp_path):
    model = tmp_path / "m.gguf"
    model.write_bytes(b"weights")
    at = tmp_path / "runtime" / "gguf" / "v1"
    for name in ("used", "unused"):
        (at / name).mkdir(parents=True)
        (at / name / "config.json").write_text("{}")
        (at / name / "m.gguf").symlink_to(model)
    age(at, 31)
    os.utime(at / "used")  # as `model_directory` does
    assert gone(collect(root, days=30)) == {}, "outside of the cache that was named"
    assert gone(collect(days=30, dry_run=True)) == {"GGUF directories": 1}
    [removed] = [found for found in collect(days=30).found if found.reason]
    assert (removed.name, removed.size) == (str(at / "unused"), 2)
    assert [path.name for path in at.iterdir()] == ["used"]
    assert model.read_bytes() == b"weights"


def test_gc_of_a_named_cache_touches_nothing_outside(root, environments_root, monkeypatch, said):
    outside = environment(environments_root, "old")
    environments.lock_path(environments_root / "left").touch()
    age(environments_root, 40)
    before = files(environments_root)
    age(root, 31)
    report = json.loads(said("gc", "--cache", root, "--dry-run", "--json"))
    assert report["dry_run"] is True
    assert 1000 > report["freed_bytes"] == sum(found["size"] for found in report["removed"]) > 0
    assert "freed 0 B" in said("gc", "--cache", root, "--days", "32")
    assert said("gc", "--cache", root).splitlines()[-1] == f"freed {report['freed_bytes']} B"
    assert run(["gc", "--cache", str(root / "none")]) == 0
    assert not (root / "none").exists()
    assert files(environments_root) == before
    monkeypatch.setenv("PREJIT_ENVIRONMENTS", str(root / "environments"))
    inside = environment(environments.root(), "old")
    age(environments.root(), 40)
    assert run(["gc", "--cache", str(root)]) == 0
    assert (inside.exists(), outside.exists()) == (False, True)
