"""Golden answers: what the process gets that asks programs for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.recipes import Recipe

from prejit.compiler.pipeline.measure import golden_answers
from prejit.compiler.pipeline.measure.golden_child import _mapped
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTarget
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE


def in_a_file(layer: Any, directory: Path) -> PackedLayer:
    path = directory / layer.digest.removeprefix("sha256:")
    path.write_bytes(layer.content)
    return PackedLayer(layer.media_type, layer.digest, layer.size, path, layer.title)


def test_the_build_names_packs_by_their_files(recipe: Recipe, tmp_path: Path) -> None:
    """Or the memory of a build would grow with its programs: twice the size of all executables."""
    target = recipe.targets[0]
    packs = (EXECUTABLES_MEDIA_TYPE, PORTABLE_MEDIA_TYPE)
    layers = tuple(
        in_a_file(each, tmp_path) if each.media_type in packs else each for each in target.layers
    )
    executables, portable, *others = golden_answers._layers(PackedTarget(target.config, layers))
    for media_type, given in zip(packs, (executables, portable), strict=True):
        assert isinstance(given, str)
        assert bytes(_mapped(given)) == recipe.content(media_type)
    assert all(isinstance(each, bytes) for each in others)
