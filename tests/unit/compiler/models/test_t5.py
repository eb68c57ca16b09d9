"""T5 as an encoder-decoder: what calls do to cache and logits, names, refusals. Values: tests/parity."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from tests.extent import examples
from tests.parity.t5_cases import Case

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry, precision
from prejit.compiler.models.families import encoder_decoders
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.parameters import flat_parameters, parameters_of, with_parameters
from prejit.compiler.models.protocol import EncoderDecoderModel
from prejit.compiler.models.sharding import check_mesh
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.format.arrays import Mesh

Arrays = np.ndarray[Any, Any]

CONTEXT = 20
PLACES = 9
BLOCK = 7
CLOSE = 1e-5

TINY = {
    "model_type": "t5",
    "vocab_size": 29,
    "d_model": 12,
    "d_kv": 5,
    "d_ff": 20,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 2,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 10,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
    "tie_word_embeddings": False,
}
TIED = {**TINY, "feed_forward_proj": "relu", "tie_word_embeddings": True}


class Model:
    """A T5 of TINY with random weights in a stored dtype, and its functions compiled for any shapes."""

    def __init__(self, directory: Path, dtype: str = "float32") -> None:
        checkpoint = open_checkpoint(directory)
        module = model_registry.make_decoder(config_file.load_config(directory), dtype=dtype)
        assert isinstance(module, EncoderDecoderModel)
        narrow = precision.readers(module, checkpoint.read)
        self.module = module
        self.graph, self.state = nnx.split(module)
        self.weights = {
            name: narrow[name]() if name in narrow else checkpoint.read(name)
            for name in flat_parameters(self.state)
        }
        self._encode = jax.jit(self._encoded, static_argnums=3)
        self._call = jax.jit(self.call, static_argnames="every")

    def merged(self, weights: Any) -> Any:
        return nnx.merge(self.graph, with_parameters(self.state, weights))

    def _encoded(self, weights: Any, source: Any, length: Any, dtype: str) -> Any:
        return self.merged(weights).encode(source, length, CONTEXT, dtype)

    def call(self, weights: Any, *arguments: Any, every: bool = False) -> Any:
        return self.merged(weights)(*arguments, every=every)

    def encode(self, source: Arrays, length: Arrays, dtype: str = "float32") -> Any:
        return jax.tree.map(np.asarray, self._encode(self.weights, source, length, dtype))

    def __call__(
        self, tokens: Arrays, start: Arrays, length: Arrays, cache: Any, *, every: bool = False
    ) -> tuple[Arrays, Any]:
        logits, cache = self._call(self.weights, tokens, start, length, cache, every=every)
        return np.asarray(logits), jax.tree.map(np.asarray, cache)

    def feed(self, source: Arrays, tokens: Arrays, chunks: list[int], block: int) -> Arrays:
        """Logits [V] after one row's tokens, fed in chunks; the source is given without padding."""
        cache, start = self.encode(source[None], int32(len(source))), 0
        for size in chunks:
            padded = np.full((1, 1 if size == 1 else block), 28, np.int32)
            padded[0, :size] = tokens[start : start + size]
            logits, cache = self(padded, int32(start), int32(size), cache)
            start += size
        assert start == len(tokens)
        result: Arrays = logits[0]
        return result


def int32(*values: int) -> Arrays:
    return np.array(values, np.int32)


def random_tokens(seed: int, *shape: int) -> Arrays:
    return np.random.default_rng(seed).integers(0, 29, shape, dtype=np.int32)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("t5")
    Case("tiny", TINY, seed=3, old=False).write(directory)
    return directory


@pytest.fixture(scope="module")
def model(written: Path) -> Model:
    return Model(written)


chunked = st.lists(st.integers(1, BLOCK), min_size=1).filter(lambda sizes: sum(sizes) <= CONTEXT)


@settings(deadline=None, derandomize=True, max_examples=examples(5, 12))
@given(chunks=chunked, seed=st.integers(0, 9))
def test_any_split_into_chunks_gives_the_logits_of_one_pass(
    model: Model, chunks: list[int], seed: int
) -> None:
    tokens, source = random_tokens(seed, sum(chunks)), random_tokens(seed + 1, PLACES)
    once = model.feed(source, tokens, [len(tokens)], CONTEXT)
    assert np.abs(model.feed(source, tokens, chunks, BLOCK) - once).max() < CLOSE


three = st.lists(st.integers(1, BLOCK), min_size=3, max_size=3)


@settings(deadline=None, derandomize=True, max_examples=6)
@given(sources=three, starts=three, lengths=three, seed=st.integers(0, 9))
def test_rows_of_different_sources_and_texts_equal_the_rows_alone(
    model: Model, sources: list[int], starts: list[int], lengths: list[int], seed: int
) -> None:
    source = random_tokens(seed + 20, 3, PLACES)
    before, after = random_tokens(seed, 3, BLOCK), random_tokens(seed + 10, 3, BLOCK)
    cache = model.encode(source, int32(*sources))
    _, cache = model(before, int32(0, 0, 0), int32(*starts), cache)
    together, _ = model(after, int32(*starts), int32(*lengths), cache)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = np.concatenate([before[row, :start], after[row, :length]])
        alone = model.feed(source[row, : sources[row]], tokens, [start, length], BLOCK)
        assert np.abs(together[row] - alone).max() < CLOSE


def test_a_cache_padded_with_zeros_along_its_source_gives_the_same(model: Model) -> None:
    cache = model.encode(random_tokens(1, 2, 6), int32(6, 4))
    beyond = ((0, 0), (0, 0), (0, 5), (0, 0))
    length, layers = cache
    wider = tuple((text, tuple(np.pad(x, beyond) for x in source)) for text, source in layers)
    tokens, start = random_tokens(2, 2, BLOCK), int32(0, 0)
    narrow, _ = model(tokens, start, int32(3, 7), cache)
    wide, _ = model(tokens, start, int32(3, 7), (length, wider))
    assert np.abs(narrow - wide).max() < CLOSE


def test_logits_after_every_token_are_those_after_each_as_the_last(model: Model) -> None:
    tokens, source = random_tokens(1, 1, BLOCK), random_tokens(2, PLACES)
    cache = model.encode(source[None], int32(PLACES))
    every, _ = model(tokens, int32(0), int32(BLOCK), cache, every=True)
    assert every.shape == (1, BLOCK, 29)
    for count in range(1, BLOCK + 1):
        last = model.feed(source, tokens[0, :count], [count], BLOCK)
        assert np.abs(every[0, count - 1] - last).max() < CLOSE


def test_each_part_of_a_source_and_of_a_text_counts(model: Model) -> None:
    source, tokens = random_tokens(1, PLACES), random_tokens(2, BLOCK)
    plain = model.feed(source, tokens, [BLOCK], BLOCK)
    for place in range(PLACES):
        other = source.copy()
        other[place] = (other[place] + 1) % 29
        assert np.abs(model.feed(other, tokens, [BLOCK], BLOCK) - plain).max() > 1e-3
    assert np.abs(model.feed(source, tokens[::-1], [BLOCK], BLOCK) - plain).max() > 1e-3


@pytest.mark.parametrize("block", [1, BLOCK])
def test_exactly_the_valid_tokens_are_written_and_an_idle_row_keeps_its_cache(
    model: Model, block: int
) -> None:
    cache = model.encode(random_tokens(1, 3, PLACES), int32(9, 2, 5))
    length, layers = cache
    full = ((np.full((3, 2, CONTEXT, 5), 7, np.float32),) * 2,)
    marked = (length, tuple((full[0], source) for _, source in layers))
    starts, lengths = (4, 6, 17), (block, 0, min(block, 3))
    logits, after = model(random_tokens(2, 3, block), int32(*starts), int32(*lengths), marked)
    assert np.isfinite(logits).all()
    assert jax.tree.structure(after) == jax.tree.structure(cache)
    assert np.array_equal(after[0], length)
    for (text, source), (_, before) in zip(after[1], layers, strict=True):
        assert all(map(np.array_equal, source, before))
        for array in text:
            for row in range(3):
                changed = np.flatnonzero((array[row] != 7.0).any((0, 2)))
                assert changed.tolist() == list(range(starts[row], starts[row] + lengths[row]))


def test_what_lies_behind_a_token_in_the_cache_counts_for_nothing(model: Model) -> None:
    length, layers = model.encode(random_tokens(1, 1, PLACES), int32(4))
    full = (np.full((1, 2, CONTEXT, 5), 1e3, np.float32),) * 2
    used = (length, tuple((full, source) for _, source in layers))
    tokens = random_tokens(2, 1, BLOCK)
    clean, _ = model(tokens, int32(0), int32(5), (length, layers))
    assert np.array_equal(model(tokens, int32(0), int32(5), used)[0], clean)


def test_a_row_without_source_stays_a_number(model: Model) -> None:
    cache = jax.tree.map(np.zeros_like, model.encode(random_tokens(1, 2, PLACES), int32(3, 4)))
    logits, after = model(random_tokens(2, 2, 1), int32(0, 0), int32(1, 0), cache)
    assert all(np.isfinite(x).all() for x in (logits, *jax.tree.leaves(after)))


@pytest.mark.parametrize("batch", [1, 2])
def test_decode_and_prefill_update_a_donated_cache_in_place(model: Model, batch: int) -> None:
    slots, places = 512, 300

    def encode(weights: Any, source: Any, length: Any) -> Any:
        return model.merged(weights).encode(source, length, slots, "float32")

    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(encode, model.weights, model.module.source(batch, places), row)
    cache_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    for count in (1, 2):
        tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        lowered = jax.jit(model.call, donate_argnums=4).lower(
            model.weights, tokens, row, row, cache
        )
        compiled = lowered.compile()
        whole = rf"f32\[(\d+,)*({slots}|{places}),5\]\S* (copy|transpose)\("
        assert not re.findall(whole, compiled.as_text())
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 2


def test_keys_and_values_have_the_dtype_of_the_cache(model: Model) -> None:
    source, tokens = random_tokens(1, 1, PLACES), random_tokens(2, 1, BLOCK)
    assert model.module.source(1, PLACES) == jax.ShapeDtypeStruct(source.shape, source.dtype)
    length, layers = model.encode(source, int32(PLACES), "bfloat16")
    assert length.dtype == np.int32
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(layers)} == {"bfloat16"}
    assert len(layers) == 3
    assert layers[0][0][0].shape == (1, 2, CONTEXT, 5)
    assert layers[0][1][1].shape == (1, 2, PLACES, 5)
    rounded, after = model(tokens, int32(0), int32(BLOCK), (length, layers))
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(after[1])} == {"bfloat16"}
    exact = model.feed(source[0], tokens[0], [BLOCK], BLOCK)
    assert 0 < np.abs(rounded[0] - exact).max() < 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_matrices_in_fewer_bits_give_the_logits_of_what_they_stand_for(
    written: Path, dtype: str
) -> None:
    model, narrow = Model(written), Model(written, dtype)
    stored = {name for name, values in narrow.weights.items() if values.dtype == dtype}
    matrices = {name for name, values in model.weights.items() if values.ndim == 2}
    tables = {
        f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for stack in ("encoder", "decoder")
    }
    assert matrices - stored == tables
    source, tokens = random_tokens(1, PLACES), random_tokens(2, BLOCK)
    found = narrow.feed(source, tokens, [BLOCK], BLOCK)
    exact = model.feed(source, tokens, [BLOCK], BLOCK)
    for name, parameter in parameters_of(model.module).items():
        wide = np.asarray(narrow.weights[name], np.float32)
        scale = narrow.weights.get(f"{name}_scale", np.ones(1, np.float32))
        model.weights[name] = wide * scale if parameter.in_out else (wide.T * scale).T
    assert np.abs(found - model.feed(source, tokens, [BLOCK], BLOCK)).max() < CLOSE
    assert 0 < np.abs(found - exact).mean() < exact.std() / 4


# --- Positions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_published_models(*, causal: bool) -> None:
    """The first distance of each bucket, as torch's T5Attention._relative_position_bucket gives it."""
    before = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    if causal:
        before = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    distance = np.arange(-200, 201)
    found = encoder_decoders.buckets(distance, 32, 128, causal=causal)
    backward = [int(np.flatnonzero(found[200::-1] == bucket)[0]) for bucket in range(len(before))]
    assert backward == before
    if causal:
        assert not found[200:].any()
    else:
        assert np.array_equal(found[201:], found[199::-1] + 16)


# --- Checkpoints and refusals ----------------------------------------------------------------------


def test_the_description_holds_what_the_runtime_needs(written: Path, model: Model) -> None:
    described = model_registry.describe(config_file.load_config(written), "bfloat16")
    assert described == DecoderConfig("t5", 29, "bfloat16", 2**31 - 1)
    assert (model.module.vocab_size, model.module.max_positions) == (29, None)


@cache
def names(**change: Any) -> frozenset[str]:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps({**TINY, **change}))
        module = model_registry.make_decoder(config_file.load_config(Path(directory)))
    return frozenset(flat_parameters(nnx.state(module)))


def test_parameters_have_the_published_names() -> None:
    found = names()
    assert "encoder.block.1.layer.0.SelfAttention.q.weight" in found
    assert "decoder.block.2.layer.1.EncDecAttention.o.weight" in found
    assert "decoder.block.2.layer.2.DenseReluDense.wi_1.weight" in found
    assert "encoder.block.1.layer.1.DenseReluDense.wo.weight" in found
    assert "decoder.block.2.layer.2.DenseReluDense.wi.weight" in names(feed_forward_proj="relu")
    assert not any(name.startswith(("encoder.block.2", "decoder.block.3")) for name in found)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": True}, False),
        ({"tie_word_embeddings": None}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, False),
    ],
)
def test_a_head_of_its_own_is_there_where_config_json_says_so(
    change: dict[str, Any], own: bool
) -> None:
    assert ("lm_head.weight" in names(**change)) == own


def test_copies_of_the_embedding_must_equal_it(tmp_path: Path) -> None:
    Case("tiny", TIED, seed=3, old=True).write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copy = "encoder.embed_tokens.weight"
    assert copy in tensors
    assert open_checkpoint(tmp_path).names == tuple(sorted(names(**TIED)))
    tensors["lm_head.weight"] = tensors["shared.weight"]
    del tensors["shared.weight"]  # any one of them is enough
    save_file(tensors, tmp_path / "model.safetensors")
    read = open_checkpoint(tmp_path).read("shared.weight")
    assert np.array_equal(read, tensors[copy])
    save_file({**tensors, copy: tensors[copy] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{copy} differs from lm_head\.weight"):
        _ = open_checkpoint(tmp_path).names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"feed_forward_proj": "gated-mish"}, 'feed_forward_proj: expected "gelu" or'),
        ({"feed_forward_proj": "gated-gelu-new"}, "transformers refuses it"),
        ({"feed_forward_proj": 3}, "feed_forward_proj: expected a text, found 3"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: expected true, found false"),
        ({"relative_attention_num_buckets": 3}, "expected an integer from 4 to 65536, found 3"),
        (
            {"relative_attention_max_distance": 4},
            "relative_attention_max_distance: expected more than 4, half of "
            "relative_attention_num_buckets, found 4",
        ),
        ({"num_decoder_layers": 0}, "num_decoder_layers: expected an integer from 1 to 1000"),
        ({"num_heads": 0}, "num_heads: expected"),
        ({"d_kv": 0}, "d_kv: expected"),
        ({"num_attention_heads": -1}, "num_attention_heads: expected"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ({"layer_norm_epsilon": 0}, "layer_norm_epsilon: expected a number from 1e-30 to 1"),
    ],
)
def test_a_setting_that_is_not_built_is_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, **change}))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        model_registry.make_decoder(config_file.load_config(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.hint or "transformers refuses it" in said


def test_a_mesh_is_refused(model: Model, written: Path) -> None:
    said = r"m\.toml: mesh: expected none, because the family of .*config\.json is not split .* tensor = 2"
    with pytest.raises(ManifestError, match=said):
        check_mesh(Mesh(1, 2), model.module, "m.toml", written / "config.json")
