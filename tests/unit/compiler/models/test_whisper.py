"""Whisper: what a call does to its cache, names, and refusals. Values: tests/parity/test_whisper.py."""

from __future__ import annotations

import json
import re
from functools import cache, partial
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
from tests.parity.whisper_cases import cases

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry, precision
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import flat_parameters, with_parameters
from prejit.compiler.models.protocol import EncoderDecoderModel
from prejit.compiler.models.sharding import check_mesh
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.format.arrays import Mesh

Arrays = np.ndarray[Any, Any]

CONTEXT = 20
BLOCK = 7
FRAMES = 14
CLOSE = 1e-5

CONFIG = {
    "model_type": "whisper",
    "vocab_size": 29,
    "num_mel_bins": 5,
    "d_model": 12,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20,
    "decoder_layers": 2,
    "decoder_attention_heads": 3,
    "decoder_ffn_dim": 16,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": CONTEXT,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "decoder_start_token_id": 1,
}

quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(10, 25))


class Model:
    """A small Whisper with random weights, in a stored dtype; its calls compiled for any shapes."""

    def __init__(self, dtype: str = "float32", cache_dtype: str = "float32") -> None:
        exact = _exact()
        module = model_registry.make_decoder(config(), dtype=dtype)
        changed = precision.readers(module, exact.__getitem__)
        self.graph, self.state = nnx.split(module)
        self.weights = {
            name: changed[name]() if name in changed else exact[name]
            for name in flat_parameters(self.state)
        }
        self.cache_dtype = cache_dtype
        self._encode = jax.jit(self.traced_encode)
        self._call = jax.jit(self.traced, static_argnames="every")

    def traced_encode(self, weights: Any, source: Any, length: Any) -> Any:
        return self._module(weights).encode(source, length, CONTEXT, self.cache_dtype)

    def traced(self, weights: Any, *arguments: Any, every: bool = False) -> Any:
        return self._module(weights)(*arguments, every=every)

    def _module(self, weights: Any) -> Any:
        return nnx.merge(self.graph, with_parameters(self.state, weights))

    def encode(self, source: Arrays, length: int = FRAMES) -> Any:
        lengths = np.full(len(source), length, np.int32)
        return jax.tree.map(np.asarray, self._encode(self.weights, source, lengths))

    def __call__(
        self, tokens: Arrays, start: Arrays, length: Arrays, cache: Any, *, every: bool = False
    ) -> tuple[Arrays, Any]:
        logits, cache = self._call(self.weights, tokens, start, length, cache, every=every)
        return np.asarray(logits), jax.tree.map(np.asarray, cache)

    def feed(self, cache: Any, tokens: Arrays, chunks: list[int], block: int) -> Arrays:
        """Logits [V] after one row's tokens, fed in chunks."""
        start = 0
        for size in chunks:
            padded = np.full((1, 1 if size == 1 else block), 28, np.int32)
            padded[0, :size] = tokens[start : start + size]
            logits, cache = self(padded, int32(start), int32(size), cache)
            start += size
        assert start == len(tokens)
        result: Arrays = logits[0]
        return result


@cache
def model(dtype: str = "float32", cache_dtype: str = "float32") -> Model:
    return Model(dtype, cache_dtype)


def config(**changes: Any) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**{**CONFIG, **changes})


@cache
def _exact() -> dict[str, Arrays]:
    random = np.random.default_rng(0)
    leaves = flat_parameters(nnx.state(model_registry.make_decoder(config())))
    return {
        name: random.standard_normal(leaf.shape, dtype=np.float32) * np.float32(0.3)
        for name, leaf in leaves.items()
    }


def sources(rows: int, seed: int = 0) -> Arrays:
    random = np.random.default_rng([seed, 7])
    return random.uniform(-1, 1.5, (rows, CONFIG["num_mel_bins"], FRAMES)).astype(np.float32)


def int32(*values: int) -> Arrays:
    return np.array(values, np.int32)


def random_tokens(seed: int, *shape: int) -> Arrays:
    return np.random.default_rng(seed).integers(0, 29, shape, dtype=np.int32)


def text_caches(cache: Any) -> list[Arrays]:
    return [array for text, _ in cache for array in text]


def source_caches(cache: Any) -> list[Arrays]:
    return [array for _, source in cache for array in source]


# --- What a call does ------------------------------------------------------------------------------


def test_the_module_is_an_encoder_decoder() -> None:
    module = model_registry.make_decoder(config())
    assert isinstance(module, EncoderDecoderModel)
    assert (module.vocab_size, module.max_positions) == (29, CONTEXT)
    assert module.source(3, FRAMES) == jax.ShapeDtypeStruct((3, 5, FRAMES), jnp.float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encode_gives_an_empty_text_and_the_source(dtype: str) -> None:
    cache = model(cache_dtype=dtype).encode(sources(2))
    assert len(cache) == CONFIG["decoder_layers"]
    for array in text_caches(cache):
        assert (array.shape, str(array.dtype)) == ((2, 3, CONTEXT, 4), dtype)
        assert not array.any()
    for array in source_caches(cache):
        assert (array.shape, str(array.dtype)) == ((2, 3, FRAMES // 2, 4), dtype)
        assert array.any(3).all()


@quick()
@given(
    chunks=st.lists(st.integers(1, BLOCK), min_size=1).filter(lambda sizes: sum(sizes) <= CONTEXT),
    seed=st.integers(0, 9),
)
def test_any_split_into_chunks_gives_the_logits_of_one_pass(chunks: list[int], seed: int) -> None:
    tokens, empty = random_tokens(seed, sum(chunks)), model().encode(sources(1, seed))
    once = model().feed(empty, tokens, [len(tokens)], CONTEXT)
    assert np.abs(model().feed(empty, tokens, chunks, BLOCK) - once).max() < CLOSE


@quick()
@given(
    lengths=st.lists(st.integers(1, BLOCK), min_size=3, max_size=3),
    starts=st.lists(st.integers(0, BLOCK), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_rows_with_other_sources_and_lengths_equal_the_rows_alone(
    lengths: list[int], starts: list[int], seed: int
) -> None:
    before, after = random_tokens(seed, 3, BLOCK), random_tokens(seed + 10, 3, BLOCK)
    cache = model().encode(sources(3, seed))
    _, cache = model()(before, int32(0, 0, 0), int32(*starts), cache)
    together, _ = model()(after, int32(*starts), int32(*lengths), cache)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = np.concatenate([before[row, :start], after[row, :length]])
        empty = model().encode(sources(3, seed)[row : row + 1])
        alone = model().feed(empty, tokens, [start, length] if start else [length], BLOCK)
        assert np.abs(together[row] - alone).max() < CLOSE


@quick()
@given(
    block=st.sampled_from([1, BLOCK]),
    rows=st.lists(
        st.tuples(st.integers(0, CONTEXT + 2), st.integers(0, BLOCK)), min_size=2, max_size=2
    ),
)
def test_exactly_the_valid_tokens_within_the_cache_are_written(
    block: int, rows: list[tuple[int, int]]
) -> None:
    starts, lengths = zip(*((start, min(length, block)) for start, length in rows), strict=True)
    encoded = model().encode(sources(2))
    marked = tuple((tuple(np.full_like(a, 7.0) for a in text), source) for text, source in encoded)
    _, cache = model()(random_tokens(0, 2, block), int32(*starts), int32(*lengths), marked)
    for array in text_caches(cache):
        for row in range(2):
            changed = np.flatnonzero((array[row] != 7.0).any((0, 2)))
            end = min(starts[row] + lengths[row], CONTEXT)
            assert changed.tolist() == list(range(starts[row], end))
    for before, after in zip(source_caches(encoded), source_caches(cache), strict=True):
        assert np.array_equal(before, after)


def test_every_gives_the_logits_after_each_token() -> None:
    tokens, empty = random_tokens(3, 1, BLOCK), model().encode(sources(1))
    each, _ = model()(tokens, int32(0), int32(BLOCK - 1), empty, every=True)
    assert each.shape == (1, BLOCK, 29)
    for count in range(1, BLOCK):
        alone = model().feed(empty, tokens[0, :count], [count], BLOCK)
        assert np.abs(each[0, count - 1] - alone).max() < CLOSE


def test_what_lies_behind_a_token_in_the_cache_counts_for_nothing() -> None:
    tokens, empty = random_tokens(4, 9), model().encode(sources(1))
    used = tuple((tuple(np.full_like(a, 1e3) for a in text), source) for text, source in empty)
    clean = model().feed(empty, tokens, [5, 1, 3], BLOCK)
    assert np.array_equal(clean, model().feed(used, tokens, [5, 1, 3], BLOCK))


def test_the_length_of_a_source_changes_nothing_and_its_last_frame_does() -> None:
    source, changed = sources(1), sources(1)
    changed[..., -1] += 1
    whole, part, other = (
        source_caches(model().encode(array, length))
        for array, length in ((source, FRAMES), (source, 1), (changed, FRAMES))
    )
    assert all(map(np.array_equal, whole, part))
    assert not any(map(np.array_equal, whole, other))


@pytest.mark.parametrize("kernels", [False, True])
def test_a_decode_step_updates_a_donated_cache_in_place(
    kernels: bool, request: pytest.FixtureRequest
) -> None:
    forms: Forms | None = request.getfixturevalue("with_kernels") if kernels else None
    module = model_registry.make_decoder(config(max_source_positions=512), out_in=kernels)
    graph, state = nnx.split(module)
    weights = flat_parameters(state)

    def decode(weights: Any, tokens: Any, start: Any, length: Any, cache: Any) -> Any:
        with using(forms):
            return nnx.merge(graph, with_parameters(state, weights))(tokens, start, length, cache)

    def encode(weights: Any, source: Any, length: Any) -> Any:
        made = nnx.merge(graph, with_parameters(state, weights))
        return made.encode(source, length, 512, "float32")

    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(encode, weights, module.source(2, 1024), row)
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    compiled = jax.jit(decode, donate_argnums=4).lower(weights, tokens, row, row, cache).compile()
    memory = compiled.memory_analysis()
    cache_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4


# --- Stored dtypes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "off"), [("bfloat16", 0.02), ("int8", 0.04)])
def test_narrow_weights_and_caches_give_nearly_the_same_logits(dtype: str, off: float) -> None:
    tokens, logits = random_tokens(5, 12), []
    for made in (model(), model(dtype, "bfloat16")):
        logits.append(made.feed(made.encode(sources(1)), tokens, [7, 1, 4], BLOCK))
    exact, narrow = logits
    assert not np.array_equal(exact, narrow)
    assert np.abs(exact - narrow).max() < off * np.abs(exact).max()


def test_matrices_are_stored_in_int8_and_convolutions_in_float32() -> None:
    found = flat_parameters(nnx.state(model_registry.make_decoder(config(), dtype="int8")))
    assert found["model.encoder.conv2.weight"].shape == (12, 12, 3)
    for name, leaf in found.items():
        matrix = name.endswith(".weight") and len(leaf.shape) == 2
        assert leaf.dtype == (jnp.int8 if matrix else jnp.float32), name


# --- Checkpoints -------------------------------------------------------------------------------------


def changed_checkpoint(directory: Path, **tensors: Arrays) -> Path:
    """A checkpoint of a case, with other tensors beside its own."""
    cases()[0].write(directory)
    file = directory / "model.safetensors"
    save_file({**load_file(file), **tensors}, file)
    return directory


def test_a_head_equal_to_the_embedding_is_accepted_and_another_one_refused(tmp_path: Path) -> None:
    plain = open_checkpoint(changed_checkpoint(tmp_path / "plain"))
    embedding = plain.read("model.decoder.embed_tokens.weight")
    equal = changed_checkpoint(tmp_path / "equal", **{"proj_out.weight": embedding})
    assert open_checkpoint(equal).names == plain.names
    other = changed_checkpoint(tmp_path / "other", **{"proj_out.weight": embedding + 1})
    with pytest.raises(CheckpointError, match=r"proj_out.weight differs from model.decoder"):
        _ = open_checkpoint(other).names


def test_names_without_the_prefix_and_names_of_flax_are_accepted(tmp_path: Path) -> None:
    expected = open_checkpoint(changed_checkpoint(tmp_path / "torch"))
    for place, renamed in enumerate((_without_prefix, _as_flax)):
        directory = changed_checkpoint(tmp_path / str(place))
        file = directory / "model.safetensors"
        save_file(dict(renamed(*item) for item in load_file(file).items()), file)
        found = open_checkpoint(directory)
        assert found.names == expected.names
        for name in found.names:
            assert np.array_equal(found.read(name), expected.read(name)), name


def _without_prefix(name: str, values: Arrays) -> tuple[str, Arrays]:
    return name.removeprefix("model."), values


def _as_flax(name: str, values: Arrays) -> tuple[str, Arrays]:
    """As FlaxWhisperForConditionalGeneration names and arranges them: (frames, in, out), (in, out)."""
    if ".embed_" in name:
        return name.replace(".weight", ".embedding"), values
    if "norm." in name:
        return name.replace(".weight", ".scale"), values
    return name.replace(".weight", ".kernel"), np.ascontiguousarray(values.T)


# --- What is told of a model, and refused ----------------------------------------------------------


def test_the_description_is_the_decoders() -> None:
    assert model_registry.describe(config(), "bfloat16") == DecoderConfig(
        family="whisper",
        vocab_size=29,
        cache_dtype="bfloat16",
        max_positions=CONTEXT,
    )


@pytest.mark.parametrize("size", [FRAMES - 2, FRAMES // 2, FRAMES + 1])
def test_another_number_of_frames_is_refused(size: int) -> None:
    module = model_registry.make_decoder(config())
    said = re.escape(f"generate.source: expected {FRAMES} frames") + f".*; found {size}\n"
    with pytest.raises(ManifestError, match=said) as caught:
        module.source(1, size)
    assert caught.value.hint
    with pytest.raises(ManifestError, match=said):
        module.encode(jnp.zeros((1, 5, size)), int32(size), CONTEXT, "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"activation_function": "gelu_ne"}, 'found "gelu_ne" (did you mean "gelu_new"?)'),
        ({"tie_word_embeddings": False}, "tie_word_embeddings: expected true, found false"),
        (
            {"encoder_attention_heads": 5},
            "d_model: expected a multiple of encoder_attention_heads = 5, found 12",
        ),
        (
            {"decoder_attention_heads": 5},
            "d_model: expected a multiple of decoder_attention_heads = 5, found 12",
        ),
        ({"decoder_attention_heads": 0}, "decoder_attention_heads: expected an integer from 1"),
        ({"decoder_layers": 0}, "decoder_layers: expected an integer from 1"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1"),
        ({"num_mel_bins": 0}, "num_mel_bins: expected"),
        ({"max_source_positions": 0}, "max_source_positions: expected"),
        ({"max_target_positions": "448"}, "max_target_positions: expected"),
    ],
)
def test_a_setting_that_is_not_built_is_named(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **change}))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        model_registry.make_decoder(config_file.load_config(tmp_path))
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.hint


def test_a_mesh_is_refused() -> None:
    said = r"m\.toml: mesh: expected none, because the family of c\.json is not split .* data = 2"
    with pytest.raises(ManifestError, match=said):
        check_mesh(Mesh(2, 1), model_registry.make_decoder(config()), "m.toml", Path("c.json"))
