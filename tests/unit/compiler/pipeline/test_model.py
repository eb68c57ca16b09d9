"""The files of a model are hashed once, and not at every build."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.decoders import write_random

from prejit.compiler.manifest.manifest import Generate, Manifest, Model
from prejit.compiler.pipeline.model import file_digests
from prejit.compiler.pipeline.pack.model_layers import find_published
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.program_keys import weights_key
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.machine import kept_files as receipts


def test_files_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("config.json", "model-1.safetensors", "model-2.safetensors")
    for name in names:
        (tmp_path / name).write_bytes(name.encode())
    hashed = []
    digest_file = receipts.digest_file

    def counting(descriptor: int) -> str:
        hashed.append(descriptor)
        return digest_file(descriptor)

    monkeypatch.setattr(receipts, "SETTLED_SECONDS", -1.0)
    monkeypatch.setattr(receipts, "digest_file", counting)
    expected = tuple((name, digest_of(name.encode())) for name in names)
    for _ in range(3):
        # A build asks for the configuration, and later for the weights.
        assert file_digests(tmp_path, [tmp_path / names[0]]) == expected[:1]
        assert file_digests(tmp_path, [tmp_path / name for name in names[1:]]) == expected[1:]
    assert len(hashed) == len(names)
    (tmp_path / names[1]).write_bytes(b"changed")
    assert file_digests(tmp_path, [tmp_path / names[1]]) == ((names[1], digest_of(b"changed")),)


def test_weights_of_another_manifest_name_and_path_are_not_converted_again(tmp_path: Path) -> None:
    store = DirectoryStore.open(tmp_path / "store")
    first = write_random("gpt2", tmp_path / "first" / "gpt2")
    second = shutil.copytree(first, tmp_path / "second" / "renamed")
    digests = []
    for name, source in (("one", first), ("two", second)):
        manifest = Manifest(
            name,
            model=Model(str(source)),
            generate=Generate(batch=(1,), prompt=(8,), context=(16,)),
            targets=["cpu-host"],
        )
        plan = plan_build(manifest, store, directory=source)
        published = find_published(plan)
        digests.append(weights_key(manifest, plan.model, published.files, {}).digest)
    assert digests[0] == digests[1]
