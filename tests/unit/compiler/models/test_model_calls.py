"""What a call of a decoder does to cache and logits, in every family. Values: tests/parity."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extent import sampled

from prejit.compiler.checking.kit import check_model
from prejit.compiler.lowering.decoder import lower_decoder
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.models import model_registry, quantizing
from prejit.compiler.models.layers.attention import NewTokens
from prejit.compiler.models.layers.kernel_calls import Forms, using
from prejit.compiler.models.parameters import flat_parameters, parametrized
from prejit.compiler.native.products import INTEGERS

from .small_models import (
    BLOCK,
    CLOSE,
    CONFIGS,
    CONTEXT,
    PLACES,
    Model,
    config,
    int32,
    made,
    model,
    random_tokens,
    sources,
)

DECODERS = ("gpt2", "gemma3_text", "gemma4_text", "phi3", "qwen3_moe", "lfm2", "qwen3_5_text")


@pytest.mark.thorough
@pytest.mark.parametrize("family", [*DECODERS, *PLACES])
def test_chunks_padding_and_other_rows_change_no_logits(family):
    """By the rules that `prejit check-model` has for everybody's models."""
    made = model(family)
    size = {"source_size": PLACES[family]} if family in PLACES else {}
    found = list(check_model(parametrized(made.module), made.weights, tolerance=CLOSE, **size))
    assert [one for one in found if not one.passed] == []
    assert {one.name for one in found} >= {"chunks", "padding", "end", "batch", "idle", "every"}


def test_many_rows_are_written_as_each_row_alone():
    random = np.random.default_rng(5)
    rows = 65
    cache = random.standard_normal((rows, 2, CONTEXT, 3), np.float32)
    new = random.standard_normal((rows, BLOCK, 2, 3), np.float32)
    start = random.integers(0, CONTEXT + 2, rows, dtype=np.int32)
    length = random.integers(0, BLOCK + 1, rows, dtype=np.int32)

    def write(start, length, cache, new):
        return NewTokens(start, length, BLOCK).write((cache, cache), new, new)[0]

    together = jax.jit(write)(start, length, cache, new)
    alone = jax.jit(write)
    for row in range(rows):
        one = slice(row, row + 1)
        assert np.array_equal(together[one], alone(start[one], length[one], cache[one], new[one]))


@pytest.mark.thorough
def test_a_source_may_be_empty():
    made = model("t5")
    nothing = jax.tree.map(np.zeros_like, made.encode(sources("t5", 2), int32(6, 4)))
    logits, after = made(random_tokens(2, 2, BLOCK), int32(0, 0), int32(1, 0), nothing)
    assert all(np.isfinite(x).all() for x in (logits, *jax.tree.leaves(after)))
    made, source = model("whisper"), sources("whisper", 1)
    whole, part = (jax.tree.leaves(made.encode(source, int32(length))) for length in (14, 1))
    assert all(map(np.array_equal, whole, part))


WIDE = {
    "t5": {"d_model": 64, "d_ff": 128, "d_kv": 32},
    "whisper": {"d_model": 96, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128},
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "dtype"),
    sampled(
        itertools.product(PLACES, ("bfloat16", "int8", "int4")), lambda case: case == ("t5", "int8")
    ),
)
def test_fewer_bits_give_the_logits_of_what_they_stand_for(family, dtype):
    read, random = config({**CONFIGS[family], **WIDE[family]}), np.random.default_rng(0)
    module = model_registry.make_decoder(read)
    values = {
        name: random.standard_normal(leaf.shape, np.float32) * np.float32(0.1)
        for name, leaf in flat_parameters(nnx.state(module)).items()
    }
    exact = Model(module, values)
    narrow = Model(model_registry.make_decoder(read, dtype=dtype), values)
    scales = {"int8": {"int8"}, "int4": {"uint32", "float16", "int8"}}.get(dtype, {dtype})
    assert {str(each.dtype) for each in narrow.weights.values()} == {"float32", *scales}
    bias = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    tables = {f"encoder.{bias}", f"decoder.{bias}"} if family == "t5" else set()
    assert all(narrow.weights[name].dtype == np.float32 for name in tables)
    rows = quantizing.widened(narrow.module, narrow.weights)
    meant = Model(module, {name: rows[name][0 : len(each)] for name, each in values.items()})
    source, tokens = sources(family, 1), random_tokens(2, BLOCK)
    found, expected, right = (each.logits(source, tokens) for each in (narrow, meant, exact))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
    assert 0 < np.abs(found - right).mean() < right.std() / 4
    for cache in ("bfloat16", "int8"):
        rounded = narrow.logits(source, tokens, cache)
        assert 0 < np.abs(rounded - found).max() < 0.1 * np.abs(found).max()


@pytest.mark.parametrize("family", [*DECODERS, *PLACES])
def test_products_round_rows_beside_int8_matrices(family):
    module = model_registry.make_decoder(config(CONFIGS[family]), dtype="int8", out_in=True)
    model, forms, length = parametrized(module), Forms(), int32(BLOCK, BLOCK)

    def logits(weights):
        bound = model.bind(weights)
        cache = (
            bound.encode(sources(family, 2), int32(2, 1), CONTEXT, "float32")
            if family in PLACES
            else bound.make_cache(2, CONTEXT, "float32")
        )
        return bound(random_tokens(2, 2, BLOCK), length * 0, length, cache)[0]

    with using(forms):
        jax.eval_shape(logits, dict(model.weights))
    assert {forms.form(each) for each in forms.met} == {INTEGERS}
    assert module.vocab_size in {each.outputs for each in forms.met}


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_stored_model_lowers_for_every_platform(dtype):
    made = model("gpt2", dtype)
    shape = model_registry.describe(config(CONFIGS["gpt2"]), "bfloat16")
    spec = ProgramSpec("decode/b2-c16", "decode", {"batch": 2, "context": 16})
    program = lower_decoder(parametrized(made.module), shape, spec)
    assert program.platforms == ("cpu", "cuda", "tpu")
    assert set(program.weights) == set(made.weights)
    caches = [array for array in program.arguments if array.path[0] == "cache"]
    assert {array.dtype for array in caches} == {"bfloat16"}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "batch"),
    [("gpt2", 1), ("phi3", 65), *((family, 2) for family in PLACES)],  # 65 are written in a loop
)
def test_decode_and_prefill_update_a_donated_cache_in_place(family, batch, tmp_path):
    change = {"max_source_positions": 150} if family == "whisper" else {}
    model = parametrized(made(tmp_path, family, **change))

    def start(weights, length):
        bound = model.bind(weights)
        if family not in PLACES:
            return bound.make_cache(batch, 512, "float32")
        source = bound.source(batch, 300)
        return bound.encode(jnp.zeros(source.shape, source.dtype), length, 512, "float32")

    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(start, model.weights, row)
    cache_bytes = sum(4 * leaf.size for leaf in jax.tree.leaves(cache))
    ends = {leaf.shape[-2:] for leaf in jax.tree.leaves(cache) if leaf.ndim > 1}
    whole = "|".join(f"{positions},{size}" for positions, size in ends)
    call = jax.jit(lambda weights, *inputs: model.bind(weights)(*inputs), donate_argnums=4)
    for count in (1, 2):
        tokens = jax.ShapeDtypeStruct((batch, count), jnp.int32)
        compiled = call.lower(model.weights, tokens, row, row, cache).compile()
        pattern = rf"f32\[(\d+,)*({whole})\]\S* (copy|transpose)\("
        assert not re.findall(pattern, compiled.as_text())
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == cache_bytes
        assert memory.temp_size_in_bytes < cache_bytes / 2
