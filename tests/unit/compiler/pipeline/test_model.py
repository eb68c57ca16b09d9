"""The files of a model are hashed once, and not at every build."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.decoders import write_random

from prejit.compiler.manifest.manifest import Generate, Manifest, Model
from prejit.compiler.pipeline.pack.model_layers import find_published
from prejit.compiler.pipeline.plan import plan_build
from prejit.compiler.pipeline.program_keys import weights_key
from prejit.compiler.store.directory_store import DirectoryStore


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
