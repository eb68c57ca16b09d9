"""T5 and Whisper: what a call does to its cache, names, and refusals. Values: tests/parity."""

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
from tests.parity import t5_cases, whisper_cases

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry, precision
from prejit.compiler.models.families.encoder_decoders import buckets
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import flat_parameters, parameters_of, with_parameters
from prejit.compiler.models.protocol import EncoderDecoderModel
from prejit.compiler.models.sharding import check_mesh
from prejit.runtime.errors import CheckpointError, ManifestError
from prejit.runtime.format.arrays import Mesh

Arrays = np.ndarray[Any, Any]

CONTEXT, BLOCK, CLOSE = 20, 7, 1e-5
PLACES = {"t5": 9, "whisper": 14}
"""Of the sources of each family: tokens, or frames."""

T5 = {
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
WHISPER = {
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
    "max_source_positions": PLACES["whisper"] // 2,
    "max_target_positions": CONTEXT,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
    "decoder_start_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {"t5": T5, "whisper": WHISPER}

families = pytest.mark.parametrize("family", CONFIGS)
quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(5, 25))


def made(
    directory: Path, family: str, dtype: str = "float32", *, out_in: bool = False, **change: Any
) -> Any:
    """The module of a changed configuration, read from a file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIGS[family], **change}))
    config = config_file.load_config(directory)
    return model_registry.make_decoder(config, dtype=dtype, out_in=out_in)


class Model:
    """A small model with random weights in a stored dtype, and its calls compiled for any shapes."""

    def __init__(self, family: str, module: Any, exact: dict[str, Arrays]) -> None:
        changed = precision.readers(module, exact.__getitem__)
        self.family, self.module, self.exact = family, module, exact
        self.graph, self.state = nnx.split(module)
        names = flat_parameters(self.state)
        self.weights = {n: changed[n]() if n in changed else exact[n] for n in names}
        self._encode = jax.jit(self.encoded, static_argnums=(3, 4))
        self._call = jax.jit(self.called, static_argnames="every")

    def merged(self, weights: Any) -> Any:
        return nnx.merge(self.graph, with_parameters(self.state, weights))

    def encoded(self, weights: Any, source: Any, length: Any, slots: int, dtype: str) -> Any:
        return self.merged(weights).encode(source, length, slots, dtype)

    def called(self, weights: Any, *arguments: Any, every: bool = False) -> Any:
        return self.merged(weights)(*arguments, every=every)

    def encode(self, source: Arrays, length: Any = None, dtype: str = "float32") -> Any:
        length = int32(*[source.shape[-1]] * len(source)) if length is None else length
        found = self._encode(self.weights, source, length, CONTEXT, dtype)
        return jax.tree.map(np.asarray, found)

    def __call__(
        self, tokens: Arrays, start: Arrays, length: Arrays, cache: Any, *, every: bool = False
    ) -> tuple[Arrays, Any]:
        logits, cache = self._call(self.weights, tokens, start, length, cache, every=every)
        return np.asarray(logits), jax.tree.map(np.asarray, cache)

    def feed(self, cache: Any, tokens: Arrays, chunks: list[int], block: int = BLOCK) -> Arrays:
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

    def layers(self, cache: Any) -> Any:
        """The keys and values of text and source of each layer."""
        return cache[1] if self.family == "t5" else cache

    def with_text(self, cache: Any, value: float) -> Any:
        """A cache with a value at every place of the text."""
        layers = tuple(
            (tuple(np.full_like(array, value) for array in text), source)
            for text, source in self.layers(cache)
        )
        return (cache[0], layers) if self.family == "t5" else layers


@cache
def model(family: str, dtype: str = "float32") -> Model:
    from transformers import AutoConfig

    config = AutoConfig.for_model(**CONFIGS[family])
    random = np.random.default_rng(0)
    leaves = flat_parameters(nnx.state(model_registry.make_decoder(config)))
    exact = {
        name: random.standard_normal(leaf.shape, dtype=np.float32) * np.float32(0.3)
        for name, leaf in leaves.items()
    }
    return Model(family, model_registry.make_decoder(config, dtype=dtype), exact)


def int32(*values: int) -> Arrays:
    return np.array(values, np.int32)


def random_tokens(seed: int, *shape: int) -> Arrays:
    return np.random.default_rng(seed).integers(0, 29, shape, dtype=np.int32)


def sources(family: str, rows: int, seed: int = 0) -> Arrays:
    if family == "t5":
        return random_tokens(seed + 20, rows, PLACES[family])
    random = np.random.default_rng([seed, 7])
    return random.uniform(-1, 1.5, (rows, 5, PLACES[family])).astype(np.float32)


# --- What a call does ------------------------------------------------------------------------------


@families
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_encode_gives_an_empty_text_and_the_source(family: str, dtype: str) -> None:
    made = model(family)
    assert isinstance(made.module, EncoderDecoderModel)
    assert (made.module.vocab_size, made.module.max_positions) == (
        29,
        {"t5": None, "whisper": CONTEXT}[family],
    )
    source = sources(family, 2)
    shape = jax.ShapeDtypeStruct(source.shape, source.dtype)
    assert made.module.source(2, PLACES[family]) == shape
    cache = made.encode(source, None, dtype)
    assert family == "whisper" or cache[0].tolist() == [9, 9]
    heads, size, places, count = {"t5": (2, 5, 9, 3), "whisper": (3, 4, 7, 2)}[family]
    assert len(made.layers(cache)) == count
    for text, read in made.layers(cache):
        assert [(x.shape, str(x.dtype)) for x in text] == [((2, heads, CONTEXT, size), dtype)] * 2
        assert [(x.shape, str(x.dtype)) for x in read] == [((2, heads, places, size), dtype)] * 2
        assert not any(array.any() for array in text)
        assert all(array.any(3).all() for array in read)


@families
@quick()
@given(
    chunks=st.lists(st.integers(1, BLOCK), min_size=1).filter(lambda sizes: sum(sizes) <= CONTEXT),
    seed=st.integers(0, 9),
)
def test_any_split_into_chunks_gives_the_logits_of_one_pass(
    family: str, chunks: list[int], seed: int
) -> None:
    tokens = random_tokens(seed, sum(chunks))
    empty = model(family).encode(sources(family, 1, seed))
    once = model(family).feed(empty, tokens, [len(tokens)], CONTEXT)
    assert np.abs(model(family).feed(empty, tokens, chunks) - once).max() < CLOSE


three = st.lists(st.integers(1, BLOCK), min_size=3, max_size=3)


@families
@quick()
@given(lengths=three, starts=three, read=three, seed=st.integers(0, 9))
def test_rows_with_other_sources_and_lengths_equal_the_rows_alone(
    family: str, lengths: list[int], starts: list[int], read: list[int], seed: int
) -> None:
    before, after = random_tokens(seed, 3, BLOCK), random_tokens(seed + 10, 3, BLOCK)
    source, made = sources(family, 3, seed), model(family)
    cache = made.encode(source, int32(*read) if family == "t5" else None)
    _, cache = made(before, int32(0, 0, 0), int32(*starts), cache)
    together, _ = made(after, int32(*starts), int32(*lengths), cache)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = np.concatenate([before[row, :start], after[row, :length]])
        own = source[row : row + 1]
        # A source that is given without padding: places behind its length count for nothing.
        other = np.where(np.arange(9) < read[row], own, 28 - own) if family == "t5" else own
        empty = made.encode(other, int32(read[row]) if family == "t5" else None)
        assert np.abs(together[row] - made.feed(empty, tokens, [start, length])).max() < CLOSE


@families
@quick()
@given(
    block=st.sampled_from([1, BLOCK]),
    rows=st.lists(
        st.tuples(st.integers(0, CONTEXT + 2), st.integers(0, BLOCK)), min_size=2, max_size=2
    ),
)
def test_exactly_the_valid_tokens_within_the_cache_are_written(
    family: str, block: int, rows: list[tuple[int, int]]
) -> None:
    starts, lengths = zip(*((start, min(length, block)) for start, length in rows), strict=True)
    made = model(family)
    marked = made.with_text(made.encode(sources(family, 2)), 7.0)
    logits, cache = made(random_tokens(0, 2, block), int32(*starts), int32(*lengths), marked)
    assert np.isfinite(logits).all()
    assert jax.tree.structure(cache) == jax.tree.structure(marked)
    for (text, read), (_, before) in zip(made.layers(cache), made.layers(marked), strict=True):
        assert all(map(np.array_equal, read, before))
        for array in text:
            for row in range(2):
                changed = np.flatnonzero((array[row] != 7.0).any((0, 2)))
                end = min(starts[row] + lengths[row], CONTEXT)
                assert changed.tolist() == list(range(starts[row], end))


@families
def test_every_gives_the_logits_after_each_token_and_all_tokens_count(family: str) -> None:
    made, tokens = model(family), random_tokens(3, 1, BLOCK)
    empty = made.encode(sources(family, 1))
    each, _ = made(tokens, int32(0), int32(BLOCK - 1), empty, every=True)
    assert each.shape == (1, BLOCK, 29)
    for count in range(1, BLOCK):
        alone = made.feed(empty, tokens[0, :count], [count])
        assert np.abs(each[0, count - 1] - alone).max() < CLOSE
    turned = made.feed(empty, tokens[0, ::-1], [BLOCK])
    assert np.abs(made.feed(empty, tokens[0], [BLOCK]) - turned).max() > 1e-3


@families
def test_what_lies_behind_a_token_in_the_cache_counts_for_nothing(family: str) -> None:
    made, tokens = model(family), random_tokens(4, 9)
    empty = made.encode(sources(family, 1))
    clean = made.feed(empty, tokens, [5, 1, 3])
    assert np.array_equal(clean, made.feed(made.with_text(empty, 1e3), tokens, [5, 1, 3]))


@families
def test_each_part_of_a_source_counts(family: str) -> None:
    made, source, tokens = model(family), sources(family, 1), random_tokens(2, BLOCK)
    plain = made.feed(made.encode(source), tokens, [BLOCK])
    for place in range(PLACES[family]):
        other = source.copy()
        other[..., place] = (other[..., place] + 1) % 29
        found = made.feed(made.encode(other), tokens, [BLOCK])
        assert np.abs(found - plain).max() > (1e-3 if family == "t5" else 1e-5)


def test_a_t5s_source_may_be_padded_with_zeros_and_empty() -> None:
    made = model("t5")
    length, layers = made.encode(sources("t5", 2), int32(6, 4))
    wider = tuple(
        (text, tuple(np.pad(x, ((0, 0), (0, 0), (0, 5), (0, 0))) for x in source))
        for text, source in layers
    )
    tokens, start = random_tokens(2, 2, BLOCK), int32(0, 0)
    narrow, _ = made(tokens, start, int32(3, 7), (length, layers))
    wide, _ = made(tokens, start, int32(3, 7), (length, wider))
    assert np.abs(narrow - wide).max() < CLOSE
    nothing = jax.tree.map(np.zeros_like, (length, layers))
    logits, after = made(tokens, start, int32(1, 0), nothing)
    assert all(np.isfinite(x).all() for x in (logits, *jax.tree.leaves(after)))


def test_the_length_of_a_whispers_source_changes_nothing() -> None:
    made, source = model("whisper"), sources("whisper", 1)
    whole, part = (jax.tree.leaves(made.encode(source, int32(length))) for length in (14, 1))
    assert all(map(np.array_equal, whole, part))


@pytest.mark.parametrize(
    ("family", "kernels"), [("t5", False), ("whisper", False), ("whisper", True)]
)
def test_decode_and_prefill_update_a_donated_cache_in_place(
    family: str, kernels: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    forms: Forms | None = request.getfixturevalue("with_kernels") if kernels else None
    change = {"max_source_positions": 150} if family == "whisper" else {}
    module = made(tmp_path, family, out_in=kernels, **change)
    graph, state = nnx.split(module)
    weights = flat_parameters(state)

    def call(weights: Any, *arguments: Any) -> Any:
        with using(forms):
            return nnx.merge(graph, with_parameters(state, weights))(*arguments)

    def encode(weights: Any, source: Any, length: Any) -> Any:
        whole = nnx.merge(graph, with_parameters(state, weights))
        return whole.encode(source, length, 512, "float32")

    row = jax.ShapeDtypeStruct((2,), jnp.int32)
    cache = jax.eval_shape(encode, weights, module.source(2, 300), row)
    cache_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    ends = {leaf.shape[-2:] for leaf in jax.tree.leaves(cache) if leaf.ndim > 1}
    whole = "|".join(f"{positions},{size}" for positions, size in ends)
    for count in (1, 2):
        tokens = jax.ShapeDtypeStruct((2, count), jnp.int32)
        lowered = jax.jit(call, donate_argnums=4).lower(weights, tokens, row, row, cache)
        compiled = lowered.compile()
        pattern = rf"f32\[(\d+,)*({whole})\]\S* (copy|transpose)\("
        assert not re.findall(pattern, compiled.as_text())
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 2


@families
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_matrices_in_fewer_bits_give_the_logits_of_what_they_stand_for(
    family: str, dtype: str
) -> None:
    exact, narrow = model(family), model(family, dtype)
    stored = {name for name, values in narrow.weights.items() if values.dtype == dtype}
    matrices = {name for name, values in exact.weights.items() if values.ndim == 2}
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert matrices - stored == (
        {f"{s}.{bias}" for s in ("encoder", "decoder")} if family == "t5" else set()
    )
    widened = {}
    for name, parameter in parameters_of(exact.module).items():
        wide = np.asarray(narrow.weights[name], np.float32)
        scale = narrow.weights.get(f"{name}_scale", np.ones(1, np.float32))
        vector = wide.ndim != 2 or name not in stored
        widened[name] = wide if vector else wide * scale if parameter.in_out else (wide.T * scale).T
    meant = Model(family, exact.module, widened)
    source, tokens = sources(family, 1), random_tokens(2, BLOCK)
    found, expected, right = (
        each.feed(each.encode(source), tokens, [BLOCK]) for each in (narrow, meant, exact)
    )
    assert np.abs(found - expected).max() < CLOSE
    assert 0 < np.abs(found - right).mean() < right.std() / 4
    rounded = narrow.feed(narrow.encode(source, None, "bfloat16"), tokens, [BLOCK])
    assert 0 < np.abs(rounded - found).max() < 0.1 * np.abs(found).max()


@pytest.mark.parametrize("causal", [False, True])
def test_buckets_of_published_models(*, causal: bool) -> None:
    """The first distance of each bucket, as torch's T5Attention._relative_position_bucket gives it."""
    before = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    if causal:
        before = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    found = buckets(np.arange(-200, 201), 32, 128, causal=causal)
    backward = [int(np.flatnonzero(found[200::-1] == bucket)[0]) for bucket in range(len(before))]
    assert backward == before
    if causal:
        assert not found[200:].any()
    else:
        assert np.array_equal(found[201:], found[199::-1] + 16)


# --- Checkpoints and refusals ----------------------------------------------------------------------


def test_the_description_holds_what_the_runtime_needs(tmp_path: Path) -> None:
    for family, positions in (("t5", 2**31 - 1), ("whisper", CONTEXT)):
        made(tmp_path, family)
        described = model_registry.describe(config_file.load_config(tmp_path), "bfloat16")
        assert described == DecoderConfig(family, 29, "bfloat16", positions)


@pytest.mark.parametrize(
    ("change", "own"),
    [
        ({"tie_word_embeddings": False}, True),
        ({"tie_word_embeddings": True, "feed_forward_proj": "relu"}, False),
        ({"tie_word_embeddings": None}, False),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": True}, False),
    ],
)
def test_a_t5_has_a_head_of_its_own_where_config_json_says_so(
    change: dict[str, Any], own: bool, tmp_path: Path
) -> None:
    names = parameters_of(made(tmp_path, "t5", **change)).keys()
    assert ("lm_head.weight" in names) == own
    layer = "decoder.block.2.layer.2.DenseReluDense"
    assert (f"{layer}.wi.weight" in names) == (change.get("feed_forward_proj") == "relu")


def test_copies_of_an_embedding_must_equal_it(tmp_path: Path) -> None:
    tied = {**T5, "feed_forward_proj": "relu", "tie_word_embeddings": True}
    case = t5_cases.Case("tiny", tied, seed=3, old=True)
    for written, embedding, copy, head in (
        (case, "shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"),
        (whisper_cases.cases()[0], "model.decoder.embed_tokens.weight", *["proj_out.weight"] * 2),
    ):
        directory = tmp_path / str(written.name)
        written.write(directory)
        plain, file = open_checkpoint(directory), directory / "model.safetensors"
        values, tensors = plain.read(embedding), load_file(file)
        tensors[head] = values
        del tensors[embedding]  # any one of them is enough
        save_file({**tensors, copy: values}, file)
        found = open_checkpoint(directory)
        assert found.names == plain.names
        assert np.array_equal(found.read(embedding), values)
        save_file({**tensors, embedding: values, copy: values + 1}, file)
        with pytest.raises(CheckpointError, match=rf"{copy} differs from "):
            _ = open_checkpoint(directory).names


def test_names_without_the_prefix_and_names_of_flax_are_accepted(tmp_path: Path) -> None:
    whisper_cases.cases()[0].write(tmp_path)
    expected, file = open_checkpoint(tmp_path), tmp_path / "model.safetensors"
    values = {name: expected.read(name) for name in expected.names}
    published = load_file(file)
    for renamed in (_without_prefix, _as_flax):
        save_file(dict(renamed(*item) for item in published.items()), file)
        found = open_checkpoint(tmp_path)
        assert found.names == expected.names
        for name in found.names:
            assert np.array_equal(found.read(name), values[name]), name


def _without_prefix(name: str, values: Arrays) -> tuple[str, Arrays]:
    return name.removeprefix("model."), values


def _as_flax(name: str, values: Arrays) -> tuple[str, Arrays]:
    """As FlaxWhisperForConditionalGeneration names and arranges them: (frames, in, out), (in, out)."""
    if ".embed_" in name:
        return name.replace(".weight", ".embedding"), values
    if "norm." in name:
        return name.replace(".weight", ".scale"), values
    return name.replace(".weight", ".kernel"), np.ascontiguousarray(values.T)


@pytest.mark.parametrize("size", [12, 7, 15])
def test_another_number_of_frames_is_refused(size: int) -> None:
    module = model("whisper").module
    said = re.escape("generate.source: expected 14 frames") + f".*; found {size}\n"
    with pytest.raises(ManifestError, match=said) as caught:
        module.source(1, size)
    assert caught.value.hint
    with pytest.raises(ManifestError, match=said):
        module.encode(jnp.zeros((1, 5, size)), int32(size), CONTEXT, "float32")


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        ("t5", {"feed_forward_proj": "gated-mish"}, 'feed_forward_proj: expected "gelu" or'),
        ("t5", {"feed_forward_proj": "gated-gelu-new"}, "transformers refuses it"),
        ("t5", {"feed_forward_proj": 3}, "feed_forward_proj: expected a text, found 3"),
        ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder: expected true, found false"),
        ("t5", {"relative_attention_num_buckets": 3}, "an integer from 4 to 65536, found 3"),
        (
            "t5",
            {"relative_attention_max_distance": 4},
            "relative_attention_max_distance: expected more than 4, half of "
            "relative_attention_num_buckets, found 4",
        ),
        ("t5", {"num_decoder_layers": 0}, "num_decoder_layers: expected an integer from 1 to 1000"),
        ("t5", {"num_heads": 0}, "num_heads: expected"),
        ("t5", {"d_kv": 0}, "d_kv: expected"),
        ("t5", {"num_attention_heads": -1}, "num_attention_heads: expected"),
        ("t5", {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        ("t5", {"layer_norm_epsilon": 0}, "layer_norm_epsilon: expected a number from 1e-30 to 1"),
        ("whisper", {"activation_function": "gelu_ne"}, '"gelu_ne" (did you mean "gelu_new"?)'),
        ("whisper", {"tie_word_embeddings": False}, "tie_word_embeddings: expected true, found"),
        ("whisper", {"encoder_attention_heads": 5}, "multiple of encoder_attention_heads = 5"),
        ("whisper", {"decoder_attention_heads": 5}, "multiple of decoder_attention_heads = 5"),
        ("whisper", {"decoder_attention_heads": 0}, "decoder_attention_heads: expected an integer"),
        ("whisper", {"decoder_layers": 0}, "decoder_layers: expected an integer from 1"),
        ("whisper", {"num_hidden_layers": 0}, "num_hidden_layers: expected an integer from 1"),
        ("whisper", {"num_mel_bins": 0}, "num_mel_bins: expected"),
        ("whisper", {"max_source_positions": 0}, "max_source_positions: expected"),
        ("whisper", {"max_target_positions": "448"}, "max_target_positions: expected"),
    ],
)
def test_a_setting_that_is_not_built_is_named(
    family: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        made(tmp_path, family, **change)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.hint or "transformers refuses it" in said


@families
def test_a_mesh_is_refused(family: str) -> None:
    said = r"m\.toml: mesh: expected none, because the family of c\.json is not split .* tensor = 2"
    with pytest.raises(ManifestError, match=said):
        check_mesh(Mesh(1, 2), model(family).module, "m.toml", Path("c.json"))
