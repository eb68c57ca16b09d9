"""The build cache: kills, damage, full disks and races never make it give a wrong answer."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.directory_store import DirectoryStore, default_root
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import StoreError

KEY = Key("compile", "demo/decode", (("jaxlib", "0.10.2"), ("portable", "x")))


@pytest.fixture
def cache(tmp_path):
    return DirectoryStore.open(tmp_path / "cache")


def test_a_sealed_text_is_of_its_store_alone(cache, tmp_path):
    sealed = cache.seal("password")
    assert sealed == DirectoryStore.open(cache.root).seal("password") != cache.seal("passwort")
    assert "password" not in sealed
    assert sealed != DirectoryStore.open(tmp_path / "another").seal("password")
    [secret] = cache.root.glob("v1/secret-*")
    assert secret.stat().st_mode & 0o777 == 0o600
    secret.write_bytes(b"cut")
    assert DirectoryStore.open(cache.root).seal("password") != sealed
    assert secret.stat().st_size == 32
    store = DirectoryStore(tmp_path / "absent")
    assert store.seal("a") == store.seal("a") != DirectoryStore(tmp_path / "absent").seal("a")
    assert not (tmp_path / "absent").exists()


def temp_files(cache):
    return list((cache.root / "v1" / "temp").iterdir())


def python(code, *arguments):
    """A process that runs code that has imported DirectoryStore."""
    setup = (
        "import sys\nfrom pathlib import Path\n"
        "from prejit.compiler.store.directory_store import DirectoryStore\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", setup + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_what_was_stored_is_found_and_another_content_is_a_miss(cache):
    content = os.urandom(5000)
    digest = cache.put_blob(content)
    assert digest == digest_of(content)
    with cache.blob_writer() as blob:
        blob.write(content[:10])
        blob.write(memoryview(content)[10:])
    assert (blob.digest, blob.size) == (digest, 5000)
    path = cache.blob_path(digest)
    assert path.read_bytes() == content == cache.read_blob(digest)
    cache.put(KEY, {"executable": digest, "sizes": [1, 2]}, blobs=[digest])
    assert cache.get(KEY, verify=True) == {"executable": digest, "sizes": [1, 2]}
    assert temp_files(cache) == []
    for size in (0, 4999, 5001):
        path.write_bytes((content * 2)[:size])
        assert cache.get(KEY) is None
    path.write_bytes(content[::-1])
    assert cache.get(KEY) is not None
    cache.put_blob(content)  # replaces the damaged one
    assert cache.get(KEY, verify=True) is not None
    path.write_bytes(content[::-1])
    assert cache.get(KEY, verify=True) is None
    assert cache.get(KEY) is None, "it is gone"


def test_a_miss_remembers_the_last_key_of_a_name(cache):
    newer, lower = (Key(kind, KEY.name, (("jaxlib", "1"),)) for kind in ("compile", "lower"))
    assert not cache.last_keys("compile", KEY.name)
    cache.put(KEY, {})
    assert [cache.get(each) for each in (newer, lower)] == [None, None]
    cache.put(newer, {})
    cache.put(lower, {})
    assert cache.last_keys("compile", KEY.name) == (newer,)
    assert not cache.last_keys("compile", "../../other")
    assert cache.read_blob(digest_of(b"")) is None
    assert cache.blob_path(digest_of(b"")) is None


def test_every_damaged_byte_of_an_action_is_a_miss_and_heals(cache):
    cache.put(KEY, {"memory": 12345})
    (path,) = (cache.root / "v1" / "actions").rglob("*.json")
    whole = path.read_bytes()
    changed = [whole[:at] + bytes([byte ^ 4]) + whole[at + 1 :] for at, byte in enumerate(whole)]
    for damaged in (*changed, b"", whole[:-1], whole + b" ", b"\0" * len(whole)):
        path.write_bytes(damaged)
        assert cache.get(KEY) is None
        assert not path.exists()
    cache.put(KEY, {"memory": 12345})
    assert cache.get(KEY) == {"memory": 12345}


def test_a_result_without_its_blob_is_not_stored(cache):
    with pytest.raises(ZeroDivisionError), cache.blob_writer() as blob:  # noqa: PT012
        blob.write(b"half")
        raise ZeroDivisionError
    assert temp_files(cache) == []
    assert cache.blob_path(digest_of(b"half")) is None
    with pytest.raises(StoreError, match="expected blob sha256:"):
        cache.put(KEY, {}, blobs=[digest_of(b"half")])
    assert cache.get(KEY) is None


def test_the_default_root_must_be_usable(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("PREJIT_CACHE", raising=False)
    for name, value, expected in (
        ("XDG_CACHE_HOME", "", "/home/me/.cache/prejit/build"),
        ("XDG_CACHE_HOME", "relative", "/home/me/.cache/prejit/build"),
        ("XDG_CACHE_HOME", "/xdg", "/xdg/prejit/build"),
        ("PREJIT_CACHE", "/mine", "/mine"),
    ):
        monkeypatch.setenv(name, value)
        assert default_root() == Path(expected)
    (tmp_path / "file").touch()
    for root in ("file", "file/below"):
        with pytest.raises(StoreError, match="cannot write the build cache") as caught:
            DirectoryStore.open(tmp_path / root)
        assert "PREJIT_CACHE" in caught.value.hint


def test_what_a_killed_writer_left(cache):
    code = """
with DirectoryStore(Path(sys.argv[1])).blob_writer() as blob:
    blob.write(b"half" * 10000)
    print("writing", flush=True)
    sys.stdin.read()
"""
    with python(code, cache.root) as writer:
        assert writer.stdout.readline() == "writing\n"
        DirectoryStore.open(cache.root)
        assert len(temp_files(cache)) == 1  # the writer lives: its file is left alone
        writer.kill()
    assert len(temp_files(cache)) == 1
    DirectoryStore.open(cache.root)
    assert temp_files(cache) == []
    assert cache.read_blob(digest_of(b"half" * 10000)) is None


def test_a_full_disk_is_reported_and_leaves_no_temp_files(tmp_path):
    # The limit on a file's size fails where a full disk does: in write, flush or close.
    code = """
import resource
from prejit.runtime.errors import StoreError
cache = DirectoryStore.open(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
for content in (b"x" * 1_000_000, b"y" * 100_001):
    try:
        cache.put_blob(content)
    except StoreError as error:
        print(error.describe())
cache.put_blob(b"z" * 100_000)
print(len(list((cache.root / "v1" / "temp").iterdir())))
"""
    output, errors = python(code, tmp_path / "cache").communicate()
    assert (errors, output.splitlines()[-1]) == ("", "0")
    for said in (
        f"error[store]: {tmp_path / 'cache'}/v1/",
        "cannot write the build cache: File too large",
        "hint: free some space",
    ):
        assert output.count(said) == 2


def test_a_healed_blob_stays(cache, monkeypatch):
    digest = cache.put_blob(b"content")
    path = cache.blob_path(digest)
    path.write_bytes(b"c0ntent")
    same, healer = os.path.samestat, threading.Thread(target=cache.put_blob, args=[b"content"])

    def same_before_a_replacement(one, other):
        found = same(one, other)
        if healer.ident is None:
            healer.start()
            healer.join(0.5)  # it has to wait for the deletion
        return found

    monkeypatch.setattr(os.path, "samestat", same_before_a_replacement)
    assert cache.read_blob(digest) is None
    healer.join()
    assert cache.read_blob(digest) == b"content"
