"""Damaged bundles: each ends in a RejectError that names the file. None runs, none crashes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.extent import examples
from tests.layouts import index_of, write_root

from prejit.runtime.device.device import Device
from prejit.runtime.errors import RejectError
from prejit.runtime.format import blobs
from prejit.runtime.format.blobs import check_blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import (
    LAYER_MEDIA_TYPES,
    LIBRARY_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    RECORDED_MEDIA_TYPE,
    REF_NAME,
)
from prejit.runtime.format.opening import match, read_manifest
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint


@pytest.fixture
def bundle_dir(recipe: Any, tmp_path: Path) -> Path:
    """A bundle of one target: a load verifies every file."""
    path: Path = recipe.only("cpu-host").write(tmp_path / "example")
    return path


def files_of(path: Path) -> list[Path]:
    """Every file that has one spelling: its blobs.

    index.json has many, as other tools write it: test_root.py changes each of its bytes.
    """
    return sorted((path / "blobs" / "sha256").iterdir())


@contextmanager
def changed(file: Path, content: bytes, *, hide: bool = False) -> Iterator[None]:
    """A file with other bytes, written in place; `hide` sets its times back as an attacker would."""
    before, times = file.read_bytes(), file.stat()

    def write(content: bytes) -> None:
        with open(file, "r+b") as out:
            out.write(content)
            out.truncate()
        if hide:
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    write(content)
    try:
        yield
    finally:
        write(before)


def corrupt(content: bytes, generator: random.Random) -> bytes:
    """The content with one byte flipped in one bit, or replaced."""
    at = generator.randrange(len(content))
    if generator.random() < 0.5:
        byte = content[at] ^ 1 << generator.randrange(8)
    else:
        byte = generator.choice([value for value in range(256) if value != content[at]])
    return content[:at] + bytes([byte]) + content[at + 1 :]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test fail where anything reaches XLA."""

    def reached(*_: object) -> None:
        raise AssertionError("a damaged bundle reached XLA")

    for name in ("__init__", "put", "load", "compile"):
        monkeypatch.setattr(Device, name, reached)


def names_the_file(error: RejectError, file: Path) -> bool:
    return error.path == str(file) and str(file) in str(error) and error.hint is not None


def test_damage_in_every_file_is_rejected(bundle_dir: Path, nothing_runs: None) -> None:
    files = files_of(bundle_dir)
    generator = random.Random(500)
    tried = Counter[str]()
    count = examples(175, 500)
    for number in range(count):
        file = files[number % len(files)]
        with changed(file, corrupt(file.read_bytes(), generator)):
            with pytest.raises(RejectError) as caught:
                load(bundle_dir)
        assert names_the_file(caught.value, file), caught.value
        tried[file.name] += 1
    assert len(tried) == len(files) == 7
    assert min(tried.values()) >= count // 7
    with pytest.raises(AssertionError, match="reached XLA"):  # whole again, it gets there
        load(bundle_dir)
    generator = random.Random(4)
    for file, (name, damage) in itertools.product(files_of(bundle_dir), DAMAGES.items()):
        before = file.read_bytes()
        if (damaged := damage(before, generator)) == before:
            continue
        with changed(file, damaged):
            with pytest.raises(RejectError) as caught:
                load(bundle_dir)
        assert names_the_file(caught.value, file), name


GOLDEN = Path(__file__).parents[2] / "format" / "v1"


@pytest.mark.parametrize("name", ["decoder", "kernels"])
def test_changed_bytes_in_every_layer_of_a_bundle_are_all_rejected(
    name: str, tmp_path: Path, nothing_runs: None
) -> None:
    """Tokenizer, chat templates, generation config and kernels among them, which are read long after load."""
    path = tmp_path / "bundle"
    shutil.copytree(GOLDEN / name, path)
    with Layout(path) as layout:  # a load reads one target: the others go
        write_root(path, json.loads(layout.read("index.json", 1 << 20))["manifests"][:2])
        known = reached(layout, read_root(layout))
    for file in files_of(path):
        if f"sha256:{file.name}" not in known:
            file.unlink()
    left_out = set(LAYER_MEDIA_TYPES) - {
        media_type
        for golden in ("decoder", "kernels")
        for _, media_type in files_by_role(GOLDEN / golden)
    }
    # `load` reads none of the first two, and test_libraries.py damages the third.
    assert left_out == {LICENSE_MEDIA_TYPE, RECORDED_MEDIA_TYPE, LIBRARY_MEDIA_TYPE}
    generator = random.Random(3)
    machine = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    for number in range(examples(8, 20)):
        for file in files_of(path):
            others = (DAMAGES["truncated"], DAMAGES["appended"], block_lost)
            damage = (corrupt, *others)[number % 4]
            before = file.read_bytes()
            damaged = damage(before, generator)
            if damaged == before:  # of a block that was zeros
                continue
            with changed(file, damaged):
                with pytest.raises(RejectError) as caught:
                    load(path, fingerprint=machine)
            assert names_the_file(caught.value, file)


def test_damage_is_found_behind_receipts(bundle_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the receipts of a good load, and the times set back after the change."""
    monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
    load(bundle_dir)
    assert hashed_by_load(bundle_dir) == 0, "there are no receipts: the test shows nothing"
    generator = random.Random(1)
    for file in files_of(bundle_dir) * 9:
        with changed(file, corrupt(file.read_bytes(), generator), hide=True):
            with pytest.raises(RejectError) as caught:
                load(bundle_dir)
        assert names_the_file(caught.value, file)


def hashed_by_load(path: Path) -> int:
    """How many bytes a load would hash now."""
    from prejit.runtime.machine.kept_files import Receipts

    with Layout(path) as layout:
        root = read_root(layout)
        targets = match(root, Fingerprint.current())
        manifests = [read_manifest(layout, target) for target in targets]
        return check_blobs(layout, manifests, Receipts(path)).hashed_bytes


Damage = Callable[[bytes, random.Random], bytes]


def block_lost(content: bytes, generator: random.Random) -> bytes:
    """As a disk loses a sector: the length stays."""
    at = generator.randrange(len(content))
    return (content[:at] + bytes(512) + content[at + 512 :])[: len(content)]


DAMAGES: dict[str, Damage] = {
    "truncated": lambda content, generator: content[: generator.randrange(len(content))],
    "without its end": lambda content, _: content[:-1],
    "emptied": lambda content, _: b"",
    "appended": lambda content, generator: (
        content + generator.randbytes(generator.randrange(1, 100))
    ),
    "new line": lambda content, _: content + b"\n",
    "prepended": lambda content, _: b"\0" + content,
    "zeroed": lambda content, _: bytes(len(content)),
    "shifted": lambda content, _: content[1:] + content[:1],
    "a block lost": block_lost,
}


def files_by_role(path: Path) -> dict[tuple[str, str], Path]:
    """Every blob of a bundle by target and media type."""
    import json

    blobs = path / "blobs" / "sha256"
    found = {}
    for target in index_of(path)["manifests"]:
        name = target["annotations"][REF_NAME]
        manifest = json.loads((blobs / target["digest"][7:]).read_bytes())
        for entry in (target, manifest["config"], *manifest["layers"]):
            found[name, entry["mediaType"]] = blobs / entry["digest"][7:]
    return found


def other_bytes(content: bytes) -> bytes:
    """As many bytes, all of them others: what nobody would take for the same file."""
    return bytes(255 - byte for byte in content)


@pytest.mark.parametrize("receipts", [False, True])
def test_files_replaced_after_the_check_are_not_used(
    receipts: bool, bundle_dir: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every file is exchanged between its hash and its use: the one that was hashed counts."""
    if receipts:
        monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
        load(bundle_dir)
    x = np.ones((2, 16), np.float32)
    expected = load(bundle_dir).call("score", x=x)
    begin = blobs.Blobs.begin

    def then_replace(opened: blobs.Blobs, *args: Any) -> None:
        begin(opened, *args)
        opened.verification.finish()
        for file in sorted((bundle_dir / "blobs" / "sha256").iterdir()):
            aside = file.with_name("aside")
            aside.write_bytes(other_bytes(file.read_bytes()))
            aside.replace(file)

    monkeypatch.setattr(blobs.Blobs, "begin", then_replace)
    found = load(bundle_dir)
    np.testing.assert_array_equal(found.call("score", x=x), expected)
    assert found.call("tick") == 7
