"""Damaged bundles: each ends in a RejectError that names the file. None runs, none crashes."""

import dataclasses
import json
import random
import shutil
from contextlib import contextmanager

import numpy as np
import pytest
from tests.extent import examples
from tests.layouts import GOLDEN, write_root

from prejit.runtime.device.device import Device
from prejit.runtime.errors import RejectError
from prejit.runtime.format import blobs
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.referrers import reached
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint


@pytest.fixture
def bundle_dir(recipe, tmp_path):
    return recipe.only("cpu-host").write(tmp_path / "example")


def files_of(path):
    """Every file that has one spelling. index.json has many: test_root.py changes each of its bytes."""
    return sorted((path / "blobs" / "sha256").iterdir())


@contextmanager
def changed(file, content):
    before = file.read_bytes()
    file.write_bytes(content)
    try:
        yield
    finally:
        file.write_bytes(before)


def corrupt(content, generator):
    at = generator.randrange(len(content))
    if generator.random() < 0.5:
        byte = content[at] ^ 1 << generator.randrange(8)
    else:
        byte = generator.choice([value for value in range(256) if value != content[at]])
    return content[:at] + bytes([byte]) + content[at + 1 :]


@pytest.fixture
def nothing_runs(monkeypatch):

    def reached(*_):
        raise AssertionError("a damaged bundle reached XLA")

    for name in ("__init__", "put", "load", "compile"):
        monkeypatch.setattr(Device, name, reached)


@pytest.mark.parametrize("name", ["decoder", "kernels", "call"])
def test_changes_in_every_file_are_rejected(name, tmp_path, nothing_runs):
    """Tokenizer, chat templates, generation config and kernels among them, which are read long after load."""
    path = shutil.copytree(GOLDEN / name, tmp_path / "bundle")
    with Layout(path) as layout:  # a load reads one target: the others go
        write_root(path, json.loads(layout.read("index.json", 1 << 20))["manifests"][:2])
        known = reached(layout, read_root(layout))
    for file in files_of(path):
        if f"sha256:{file.name}" not in known:
            file.unlink()

    generator = random.Random(3)
    machine = dataclasses.replace(Fingerprint.current(), jaxlib="0.0.1")
    for number in range(examples(8, 20)):
        for file in files_of(path):
            damage = DAMAGES[number % len(DAMAGES)]
            before = file.read_bytes()
            damaged = damage(before, generator)
            if damaged == before:  # of a block that was zeros
                continue
            with changed(file, damaged):
                with pytest.raises(RejectError) as caught:
                    load(path, fingerprint=machine)
            assert caught.value.path == str(file)
            assert str(file) in str(caught.value)
            assert caught.value.hint is not None


def block_lost(content, generator):
    at = generator.randrange(len(content))
    return (content[:at] + bytes(512) + content[at + 512 :])[: len(content)]


DAMAGES = (
    corrupt,
    lambda content, generator: content[: generator.randrange(len(content))],
    lambda content, generator: content + generator.randbytes(60),
    block_lost,
)


@pytest.mark.parametrize("receipts", [False, True])
def test_files_replaced_after_the_check_are_not_used(receipts, bundle_dir, recipe, monkeypatch):
    """Every file is exchanged between its hash and its use: the one that was hashed counts."""
    if receipts:
        monkeypatch.setattr("prejit.runtime.machine.kept_files.SETTLED_SECONDS", -1.0)
        load(bundle_dir)
    x = np.ones((2, 16), np.float32)
    expected = load(bundle_dir).call("score", x=x)
    begin = blobs.Blobs.begin

    def then_replace(opened, *args):
        begin(opened, *args)
        opened.verification.finish()
        for file in sorted((bundle_dir / "blobs" / "sha256").iterdir()):
            aside = file.with_name("aside")
            aside.write_bytes(bytes(255 - byte for byte in file.read_bytes()))
            aside.replace(file)

    monkeypatch.setattr(blobs.Blobs, "begin", then_replace)
    found = load(bundle_dir)
    np.testing.assert_array_equal(found.call("score", x=x), expected)
    assert found.call("tick") == 7
