"""The fs-verity digest of a layer is the one that the kernel's own tools compute."""

import random

import pytest
from tests.format import second_reader

from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, layer
from prejit.compiler.pipeline.pack.weights_layer import CHUNK_BYTES, VerityHash, chunks_of
from prejit.compiler.store.directory_store import DirectoryStore

BLOCK = 4096
GOLDEN = {  # by `fsverity digest` of fsverity-utils 1.5: bytes 0 to 250 again and again
    0: "3d248ca542a24fc62d1c43b916eae5016878e2533c88238480b26128a1f1af95",
    1: "b803429503d95915829b29fdbc8bbad142f3abfd11b1cadf5526582e685c0551",
    BLOCK - 1: "5f4953aad672b0188023d6cd6fbce9d09508eb7dad165b6298ce0086bc1e72db",
    BLOCK: "13e9b8848ae484a36acb3f3cac0ceb2f7601e96633d15c92f9bd3dd44e492157",
    BLOCK + 1: "b0d074abef4d544404facfab6ba242f6a8ccbde90f1325cd286f3c8aa8d0f8aa",
    128 * BLOCK: "d82861203d50ae9b60948504a704f35f5118bd229aeb1a22d6dae47b1767c4c4",
    128 * BLOCK + 1: "4dc6905041c9c4ee73e13b53f63f5d289c46da359b664a965ead7f8cc4d799d4",
    129 * BLOCK * 128: "ab9ee832cec74c01fe008415f78c4b674b9b4d6f59f803b023ae9adda1c6a06e",
}


def verity_of(content, piece_bytes=8 << 20):
    hasher = VerityHash()
    for start in range(0, len(content), piece_bytes):
        hasher.update(content[start : start + piece_bytes])
    return hasher.digest()


def content_of(size):
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def test_digests_are_those_of_the_tool_whatever_pieces_come():
    for size, digits in GOLDEN.items():
        assert verity_of(content_of(size)) == f"sha256:{digits}"
        if size:  # an empty layer has no chunks
            assert second_reader.verity_of(content_of(size)) == f"sha256:{digits}"
    content = random.Random(0).randbytes(700 * BLOCK + 5)
    assert len({verity_of(content, blocks * BLOCK) for blocks in (1, 3, 128, 129, 1000)}) == 1


@pytest.mark.parametrize("size", [1 << 20, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_layer_has_one_digest_wherever_it_is(size, tmp_path):
    content = content_of(size)
    made = layer("application/x", content, "x")
    path = tmp_path / "x"
    path.write_bytes(content)
    in_file = PackedLayer(made.media_type, made.digest, made.size, path, "x")
    one, other = (DirectoryStore.open(tmp_path / name) for name in ("one", "other"))
    first, second, third = (
        chunks_of([each], store)
        for each, store in ((made, one), (in_file, other), (in_file, other))
    )
    assert first == second == third
    assert first["application/x"].verity == verity_of(content)
