"""What a call of a decoder does to cache and logits, in every family. Values: tests/parity."""

from __future__ import annotations

import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extent import examples, sampled

from prejit.compiler.models.families.encoder_decoders import buckets
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.product_forms import Forms, using
from prejit.compiler.models.parameters import flat_parameters, parameters_of, with_parameters

from .small_models import (
    BLOCK,
    CLOSE,
    CONTEXT,
    PLACES,
    Model,
    int32,
    made,
    model,
    random_tokens,
    sources,
)

# One module is all decoders: these have learned positions, windows by layer, and fused matrices.
DECODERS = ("gpt2", "gemma3_text", "phi3")
families = pytest.mark.parametrize("family", [*DECODERS, *PLACES])
with_sources = pytest.mark.parametrize("family", PLACES)
quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(5, 25))
three = st.lists(st.integers(1, BLOCK), min_size=3, max_size=3)


@families
@quick()
@given(
    chunks=st.lists(st.integers(1, BLOCK), min_size=1).filter(lambda sizes: sum(sizes) <= CONTEXT),
    seed=st.integers(0, 9),
)
def test_any_chunks_give_the_logits_of_one_pass(family: str, chunks: list[int], seed: int) -> None:
    made, tokens = model(family), random_tokens(seed, sum(chunks))
    empty = made.empty(1, seed)
    once = made.feed(empty, tokens, [len(tokens)], CONTEXT)
    assert np.abs(made.feed(empty, tokens, chunks) - once).max() < CLOSE


@families
@quick()
@given(
    lengths=three,
    starts=st.lists(st.integers(0, BLOCK), min_size=3, max_size=3),
    read=three,
    seed=st.integers(0, 9),
)
def test_rows_of_other_lengths_and_sources_equal_the_rows_alone(
    family: str, lengths: list[int], starts: list[int], read: list[int], seed: int
) -> None:
    before, after = random_tokens(seed, 3, BLOCK), random_tokens(seed + 10, 3, BLOCK)
    made, is_t5 = model(family), family == "t5"
    source = sources(family, 3, seed) if family in PLACES else None

    def start(rows: slice) -> Any:
        if source is None:
            return made.empty(len(lengths[rows]))
        return made.encode(source[rows], int32(*read[rows]) if is_t5 else None)

    _, cache = made(before, int32(0, 0, 0), int32(*starts), start(slice(3)))
    together, _ = made(after, int32(*starts), int32(*lengths), cache)
    if source is not None and is_t5:  # places behind a length count for nothing
        source = np.where(np.arange(9) < np.array(read)[:, None], source, 28 - source)
    for row, (begin, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = np.concatenate([before[row, :begin], after[row, :length]])
        alone = made.feed(start(slice(row, row + 1)), tokens, [begin, length])
        assert np.abs(together[row] - alone).max() < CLOSE


@families
@quick()
@given(
    block=st.sampled_from([1, BLOCK]),
    rows=st.lists(
        st.tuples(st.integers(0, CONTEXT + 2), st.integers(0, BLOCK)), min_size=2, max_size=2
    ),
)
def test_only_valid_tokens_are_written(
    family: str, block: int, rows: list[tuple[int, int]]
) -> None:
    starts, lengths = zip(*((start, min(length, block)) for start, length in rows), strict=True)
    made = model(family)
    marked = made.with_text(made.empty(2), 7.0)
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
def test_padding_beyond_the_end_and_what_lies_behind_a_token_count_for_nothing(family: str) -> None:
    made, tokens = model(family), random_tokens(3, CONTEXT)
    empty = made.empty(1)
    once = made.feed(empty, tokens, [CONTEXT], CONTEXT)
    # 5 x 4 tokens: the last block starts at 16 and is 7 wide, so its padding lies beyond 20.
    assert np.abs(made.feed(empty, tokens, [4] * 5) - once).max() < CLOSE
    clean = made.feed(empty, tokens[:9], [5, 1, 3])
    assert np.array_equal(clean, made.feed(made.with_text(empty, 1e3), tokens[:9], [5, 1, 3]))


@pytest.mark.parametrize(
    ("family", "batch", "kernels"),
    [
        ("gpt2", 1, False),
        ("phi3", 65, False),  # many rows are written in a loop
        *((family, 2, False) for family in PLACES),
        ("whisper", 2, True),
    ],
)
def test_decode_and_prefill_update_a_donated_cache_in_place(
    family: str, batch: int, kernels: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    forms: Forms | None = request.getfixturevalue("with_kernels") if kernels else None
    change = {"max_source_positions": 150} if family == "whisper" else {}
    module = made(tmp_path, family, out_in=kernels, **change)
    graph, state = nnx.split(module)
    weights = flat_parameters(state)

    def merged(weights: Any) -> Any:
        return nnx.merge(graph, with_parameters(state, weights))

    def call(weights: Any, *arguments: Any) -> Any:
        with using(forms):
            return merged(weights)(*arguments)

    def start(weights: Any, length: Any, *source: Any) -> Any:
        if not source:
            return merged(weights).make_cache(batch, 512, "float32")
        return merged(weights).encode(*source, length, 512, "float32")

    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    source = (module.source(batch, 300),) if family in PLACES else ()
    cache = jax.eval_shape(start, weights, row, *source)
    cache_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    ends = {leaf.shape[-2:] for leaf in jax.tree.leaves(cache) if leaf.ndim > 1}
    whole = "|".join(f"{positions},{size}" for positions, size in ends)
    for count in (1, 2):
        tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        lowered = jax.jit(call, donate_argnums=4).lower(weights, tokens, row, row, cache)
        compiled = lowered.compile()  # buffers are assigned before
        pattern = rf"f32\[(\d+,)*({whole})\]\S* (copy|transpose)\("
        assert not re.findall(pattern, compiled.as_text())
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 2


def test_many_rows_are_written_as_each_row_alone() -> None:
    random = np.random.default_rng(5)
    rows = 65
    cache = random.standard_normal((rows, 2, CONTEXT, 3), np.float32)
    new = random.standard_normal((rows, BLOCK, 2, 3), np.float32)
    start = random.integers(0, CONTEXT + 2, rows, dtype=np.int32)
    length = random.integers(0, BLOCK + 1, rows, dtype=np.int32)

    def write(start: Any, length: Any, cache: Any, new: Any) -> Any:
        return NewTokens(start, length, BLOCK).write((cache, cache), new, new)[0]

    together = jax.jit(write)(start, length, cache, new)
    alone = jax.jit(write)
    for row in range(rows):
        one = slice(row, row + 1)
        assert np.array_equal(together[one], alone(start[one], length[one], cache[one], new[one]))


# --- Encoder-decoders ------------------------------------------------------------------------------


@with_sources
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
    ("family", "dtype"),
    sampled(
        itertools.product(PLACES, ("bfloat16", "int8")),
        lambda case: case in (("t5", "int8"), ("whisper", "bfloat16")),
    ),
)
def test_fewer_bits_give_the_logits_of_what_they_stand_for(family: str, dtype: str) -> None:
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
