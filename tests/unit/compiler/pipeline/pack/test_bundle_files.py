"""The weights layer and packs."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from safetensors.numpy import load_file

from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedTensor, pack, write_weights
from prejit.compiler.store.directory_store import DirectoryStore
from prejit.runtime.base.files import digest_of
from prejit.runtime.errors import BuildError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import Segment
from prejit.runtime.format.checks.layers import GAP_PREFIX, check_weights
from prejit.runtime.format.names import TOKENIZER_MEDIA_TYPE

dtypes = st.sampled_from([np.float32, np.int8, np.uint16, np.bool_, np.float64])
arrays = st_numpy.arrays(dtypes, st_numpy.array_shapes(min_dims=0, max_dims=3, max_side=5))
names = st.text("abc.λ", min_size=1, max_size=6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(values=st.dictionaries(names, arrays, max_size=6))
def test_safetensors_reads_what_we_write(tmp_path, values):
    cache = DirectoryStore.open(tmp_path)
    tensors = [
        PackedTensor(name, value.dtype.name, value.shape, lambda value=value: value)
        for name, value in values.items()
    ]
    with cache.blob_writer() as blob:
        write_weights(tensors, blob)
    path = cache.blob_path(blob.digest)
    read = {n: v for n, v in load_file(path).items() if not n.startswith(GAP_PREFIX)}
    assert read.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(read[name], value)
    slices = check_weights(memoryview(path.read_bytes()), str(path))
    assert all(slices[name].start % 64 == 0 for name in values)


def test_frames_are_stored_once_and_tensors_are_what_was_announced(tmp_path):
    cache = DirectoryStore.open(tmp_path)
    wrong = PackedTensor("w", "float32", (2,), lambda: np.zeros(3, np.float32))
    with pytest.raises(BuildError, match=r"w: expected float32\[2\], found float32\[3\]"):
        with cache.blob_writer() as blob:
            write_weights([wrong], blob)
    assert not list((tmp_path / "v1" / "blobs" / "sha256").iterdir())
    frames = {
        name: Segment(0, len(content), cache.put_blob(content), 0, "")
        for name, content in (("a", b"one"), ("b", b"other"), ("c", b"one"))
    }
    layer, placed = pack("type", "programs", frames, cache)
    assert isinstance(layer.content, Path)
    content = layer.content.read_bytes()
    assert content == b"oneother"
    assert (layer.digest, layer.size) == (digest_of(content), len(content))
    again = pack("type", "programs", frames, cache)
    assert again == (layer, placed), "found in the store"
    layer.content.write_bytes(content[::-1])  # its digest would be in the bundle
    assert pack("type", "programs", frames, cache)[0] == layer
    assert layer.content.read_bytes() == content
    with pytest.raises(BuildError, match="decode: expected the compressed form"):
        pack("type", "programs", {"decode": Segment(0, 4, digest_of(b"gone"), 0, "")}, cache)
    for name, frame in placed.items():
        assert digest_of(content[frame.offset : frame.offset + frame.size]) == frames[name].digest


def test_a_bundle_that_no_reader_takes_is_not_made(recipe):
    """Or the build would succeed, and each server say that the bundle is damaged."""

    def with_wide_results(config):
        wide = (f"[] float32[{','.join('1' * 65)}]",)
        programs = (dataclasses.replace(each, results=wide) for each in config.programs)
        return dataclasses.replace(config, programs=tuple(programs))

    bundle_files.check_readable(*recipe.assemble())
    size, layer = limits.MAX_TOKENIZER_BYTES, recipe.targets[0].layers[0]
    large = dataclasses.replace(layer, media_type=TOKENIZER_MEDIA_TYPE, size=size + 1)
    for forged, said in (
        (
            recipe.configured(lambda config: dataclasses.replace(config, weight_sets={})),
            r"no reader would take .*unknown weight set 'score'",
        ),
        (recipe.configured(with_wide_results), r"no reader would take .*expected '\[path\] dtype"),
        (recipe.layered(lambda layers: (*layers, large)), f"expected at most {size} bytes"),
    ):
        with pytest.raises(BuildError, match=said):
            bundle_files.check_readable(*forged.assemble())
