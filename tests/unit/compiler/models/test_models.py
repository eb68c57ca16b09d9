"""The decoder families: what a call does to cache and logits, names, and refusals. Values: tests/parity."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
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
from tests.campaigns.junk import mutated, to_json
from tests.extent import examples
from tests.parity.cases import cases
from tests.parity.encoder_cases import cases as encoder_cases
from tests.parity.t5_cases import cases as t5_cases
from tests.parity.whisper_cases import cases as whisper_cases

from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers import rope
from prejit.compiler.models.layers.attention import NewTokens, attention
from prejit.compiler.models.layers.layer_config import DecoderConfig
from prejit.compiler.models.parameters import flat_parameters, parameters_of, with_parameters
from prejit.runtime.errors import CheckpointError

Arrays = np.ndarray[Any, Any]

CONTEXT = 20
BLOCK = 7
CLOSE = 1e-5

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 29,
    "n_positions": CONTEXT,
    "n_embd": 12,
    "n_head": 3,
    "n_layer": 2,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 5}
GEMMA3 = {
    **LLAMA,
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 6,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "final_logit_softcapping": 20.0,
}
PHI3 = {**LLAMA, "model_type": "phi3", "hidden_size": 24, "sliding_window": 9, "pad_token_id": 0}
BERT = {
    **{name: LLAMA[name] for name in ("vocab_size", "hidden_size", "intermediate_size")},
    **{name: LLAMA[name] for name in ("num_hidden_layers", "num_attention_heads")},
    "model_type": "roberta",
    "max_position_embeddings": CONTEXT,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
CONFIGS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "mistral": MISTRAL,
    "gemma3_text": GEMMA3,
    "phi3": PHI3,
    "roberta": BERT,
}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 10}

LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [3.0, 5.0, 7.0],
    "original_max_position_embeddings": 10,
}

_LONGEST = "1" + "0" * 5000

# One module is all of them: these have learned positions, windows by layer, and fused matrices.
families = pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "phi3"])
quick = partial(settings, deadline=None, derandomize=True, max_examples=examples(8, 25))


class Model:
    """A family at its test size with random weights, and its call compiled for any shapes."""

    def __init__(self, config: Any) -> None:
        self.shape = model_registry.describe(config)
        self.decoder = model_registry.make_decoder(config)
        self.graph, self.state = nnx.split(self.decoder)
        random = np.random.default_rng(0)
        self.weights = {
            name: random.standard_normal(leaf.shape, dtype=np.float32) * np.float32(0.3)
            for name, leaf in flat_parameters(self.state).items()
        }
        self._call = jax.jit(self.call)

    def call(self, weights: Any, *arguments: Any) -> Any:
        return nnx.merge(self.graph, with_parameters(self.state, weights))(*arguments)

    def __call__(
        self, tokens: Arrays, start: Arrays, length: Arrays, cache: Any
    ) -> tuple[Arrays, Any]:
        logits, cache = self._call(self.weights, tokens, start, length, cache)
        return np.asarray(logits), jax.tree.map(np.asarray, cache)

    def cache(self, batch: int, fill: float = 0.0) -> Any:
        empty = self.decoder.make_cache(batch, CONTEXT, "float32")
        return jax.tree.map(lambda array: np.full(array.shape, fill, np.float32), empty)

    def feed(self, tokens: Arrays, chunks: list[int], block: int, fill: float = 0.0) -> Arrays:
        """Logits [V] after one row's tokens, fed in chunks."""
        cache, start = self.cache(1, fill), 0
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


@cache
def model(family: str) -> Model:
    return Model(config(CONFIGS[family]))


def config(values: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**values)


# --- What a call does ------------------------------------------------------------------------------


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
    once = model(family).feed(tokens, [len(tokens)], CONTEXT)
    assert np.abs(model(family).feed(tokens, chunks, BLOCK) - once).max() < CLOSE


@families
@quick()
@given(
    lengths=st.lists(st.integers(1, BLOCK), min_size=3, max_size=3),
    starts=st.lists(st.integers(0, BLOCK), min_size=3, max_size=3),
    seed=st.integers(0, 9),
)
def test_rows_of_different_lengths_equal_the_rows_alone(
    family: str, lengths: list[int], starts: list[int], seed: int
) -> None:
    before, after = random_tokens(seed, 3, BLOCK), random_tokens(seed + 10, 3, BLOCK)
    _, cache = model(family)(before, int32(0, 0, 0), int32(*starts), model(family).cache(3))
    together, _ = model(family)(after, int32(*starts), int32(*lengths), cache)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        tokens = np.concatenate([before[row, :start], after[row, :length]])
        chunks = [start, length] if start else [length]
        alone = model(family).feed(tokens, chunks, BLOCK)
        assert np.abs(together[row] - alone).max() < CLOSE


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
    marked = model(family).cache(2, fill=7.0)
    tokens = random_tokens(0, 2, block)
    _, cache = model(family)(tokens, int32(*starts), int32(*lengths), marked)
    for array in jax.tree.leaves(cache):
        for row in range(2):
            changed = np.flatnonzero((array[row] != 7.0).any((0, 2)))
            end = min(starts[row] + lengths[row], CONTEXT)
            assert changed.tolist() == list(range(starts[row], end))


@families
def test_a_block_that_would_run_past_the_end_is_not_shifted(family: str) -> None:
    tokens = random_tokens(3, CONTEXT)
    once = model(family).feed(tokens, [CONTEXT], CONTEXT)
    # 5 x 4 tokens: the last block starts at 16 and is 7 wide, so its padding lies beyond 20
    assert np.abs(model(family).feed(tokens, [4] * 5, BLOCK) - once).max() < CLOSE


@families
def test_what_lies_behind_a_token_in_the_cache_counts_for_nothing(family: str) -> None:
    tokens = random_tokens(4, 9)
    clean = model(family).feed(tokens, [5, 1, 3], BLOCK)
    used = model(family).feed(tokens, [5, 1, 3], BLOCK, fill=1e3)
    assert np.array_equal(clean, used)


@families
@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=pytest.mark.thorough), 65])
def test_decode_and_prefill_update_a_donated_cache_in_place(family: str, batch: int) -> None:
    small = model(family)
    slots = 512

    def decode(weights: Any, token: Any, position: Any, cache: Any) -> Any:
        return small.call(weights, token[:, None], position, jnp.ones_like(position), cache)

    row = jax.ShapeDtypeStruct((batch,), jnp.int32)
    cache = jax.eval_shape(lambda: small.decoder.make_cache(batch, slots, "float32"))
    layer = cache[0][0]
    tokens = jax.ShapeDtypeStruct((batch, 2), jnp.int32)
    for function, arguments in (
        (decode, (small.weights, row, row, cache)),
        (small.call, (small.weights, tokens, row, row, cache)),
    ):
        lowered = jax.jit(function, donate_argnums=len(arguments) - 1).lower(*arguments)
        compiled = lowered.compile()  # buffers are assigned before
        whole = rf"f32\[(\d+,)*{slots},{layer.shape[3]}\]\S* (copy|transpose)\("
        assert not re.findall(whole, compiled.as_text())
        memory, cache_bytes = compiled.memory_analysis(), 4 * layer.size * 2 * len(cache)
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


# --- Parameters ------------------------------------------------------------------------------------


def test_parameters_have_the_published_names_and_are_shapes_alone() -> None:
    gpt2 = flat_parameters(model("gpt2").state)
    llama = flat_parameters(model("llama").state)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in gpt2.values())
    assert gpt2["transformer.h.1.attn.c_proj.weight"].shape == (12, 12)
    assert gpt2["transformer.ln_f.bias"].shape == (12,)
    assert llama["model.layers.1.self_attn.k_proj.weight"].shape == (12, 12)
    assert llama["model.embed_tokens.weight"].shape == (29, 12)
    assert list(gpt2) == sorted(gpt2)


@families
def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(family: str) -> None:
    untied = model_registry.make_decoder(config({**CONFIGS[family], "tie_word_embeddings": False}))
    assert "lm_head.weight" not in model(family).weights
    assert "lm_head.weight" in flat_parameters(nnx.state(untied))


def test_a_matrix_is_stored_as_its_parameter_says() -> None:
    """(in, out) where inputs are few and outputs more, but not very many; else (out, in)."""
    parameters = parameters_of(
        model_registry.make_decoder(
            config({**GPT2, "vocab_size": 5000, "tie_word_embeddings": False})
        )
    )
    stored = {
        name.removeprefix("transformer.h.0."): (parameter.shape, parameter.in_out)
        for name, parameter in parameters.items()
    }
    assert stored["attn.c_attn.weight"] == ((12, 36), True)
    assert stored["attn.c_attn.bias"] == ((36,), False)
    assert stored["attn.c_proj.weight"] == ((12, 12), False)
    assert stored["mlp.c_fc.weight"] == ((12, 48), True)
    assert stored["mlp.c_proj.weight"] == ((12, 48), False)
    assert stored["lm_head.weight"] == stored["transformer.wte.weight"] == ((5000, 12), False)


def test_parameters_of_any_module_are_replaced_by_name() -> None:
    class Own(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.Linear(2, 3, rngs=nnx.Rngs(0)) for _ in range(11)])

    graph, state = nnx.split(Own())
    flat = flat_parameters(state)
    assert list(flat)[:3] == ["layers.0.bias", "layers.0.kernel", "layers.1.bias"]
    marked = {name: np.full(leaf.shape, place) for place, (name, leaf) in enumerate(flat.items())}
    module = nnx.merge(graph, with_parameters(state, marked))
    place = list(flat).index("layers.10.kernel")
    assert (module.layers[10].kernel[...] == place).all()


def test_padding_beyond_the_end_of_a_cache_has_a_window_and_stays_a_number() -> None:
    """Its own would be empty, and what comes of it no number."""
    query, layer = jnp.ones((1, 3, 2, 4)), (jnp.ones((1, 1, 8, 4)),) * 2
    positions = jnp.array([[7, 8, 30]])
    assert jnp.isfinite(attention(query, layer, positions, 0.5, window=2)).all()


@pytest.mark.parametrize(("context", "factors"), [(10, "short"), (11, "long"), (None, "long")])
def test_the_longest_context_of_a_bundle_chooses_longropes_factors(
    context: int | None, factors: str
) -> None:
    long = config({**LLAMA, "rope_scaling": LONGROPE})
    expected = rope.frequencies(config(LLAMA), 6).frequencies / np.array(
        LONGROPE[f"{factors}_factor"]
    )
    found = model_registry.make_decoder(long, context).model.layers[0].heads.rotary
    assert np.allclose(found.frequencies, expected, rtol=1e-6)


def test_the_text_model_of_one_that_reads_images_is_taken(tmp_path: Path) -> None:
    both = {"model_type": "gemma3", "text_config": GEMMA3, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps(both))
    loaded = config_file.load_config(tmp_path)
    assert model_registry.describe(loaded) == model("gemma3_text").shape
    names = parameters_of(model_registry.make_decoder(loaded)).keys()
    assert {"lm_head.weight"} == names - model("gemma3_text").weights
    refused = {**both, "text_config": {**GEMMA3, "use_bidirectional_attention": True}}
    (tmp_path / "config.json").write_text(json.dumps(refused))
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "config.json"))):
        model_registry.describe(config_file.load_config(tmp_path))


# --- What is told of a model, and refused ----------------------------------------------------------


def test_the_description_holds_what_the_runtime_needs() -> None:
    assert model_registry.describe(config(LLAMA)) == DecoderConfig(
        family="llama",
        vocab_size=29,
        cache_dtype="float32",
        max_positions=CONTEXT,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "expected a file, found none"),
        ("{", "cannot read"),
        ("[]", "model_type: expected one of"),
        ('{"model_type": []}', "model_type: expected one of"),
        ('{"model_type": "lama"}', 'found "lama" (did you mean "llama"?)'),
        ('{"model_type": "mixtral"}', 'found "mixtral" (did you mean "mistral"?)'),
        ('{"model_type": "gpt2", "n_head": "x"}', "n_head"),
        ('{"model_type": "gemma3", "text_config": 3}', "text_config: expected an object, found 3"),
        (f'{{"model_type": {"[" * 3000}{"]" * 3000}}}', "nested too deeply"),
        (f'{{"model_type": {"[" * 90}{"]" * 90}}}', "nested too deeply"),
        (f'{{"model_type": "gpt2", "n_head": {_LONGEST}}}', "cannot read"),
        (
            '{"model_type": "gpt2", "n_head": NaN}',
            "cannot read JSON: expected JSON, which has no NaN",
        ),
        ('{"model_type": "gpt2", "n_head": 1e999}', "n_head: expected"),
        ('{"model_type": "\\ud800"}', "ud800"),
        ('{"model_type": "gpt2", "_name_or_path": [1], "num_labels": 4, "n_head": 0}', "n_head"),
        ('{"model_type": "gpt2", "quantization_config": {"bits": 4}}', "quantization_config"),
        (
            '{"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 2.0}}',
            "low_freq_factor",
        ),
    ],
)
def test_a_config_that_cannot_be_used_is_refused(
    text: str | None, said: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        config_file.load_config(tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)


def made(family: str, directory: Path) -> Any:
    """The module that config.json of a family describes."""
    if family in model_registry.ENCODERS:
        return model_registry.make_encoder(config_file.load_encoder(directory))
    return model_registry.make_decoder(config_file.load_config(directory))


_UNUSABLE: list[tuple[str, dict[str, Any], str]] = [
    ("gpt2", {"activation_function": "gelu_ne"}, 'found "gelu_ne" (did you mean "gelu_new"?)'),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention: expected false, found true"),
    ("gpt2", {"n_head": 5}, "n_embd: expected a multiple of n_head = 5, found 12"),
    ("llama", {"hidden_act": "mish"}, "hidden_act: expected"),
    (
        "llama",
        {"num_key_value_heads": 3},
        "num_attention_heads: expected a multiple of num_key_value_heads = 3, found 4",
    ),
    ("llama", {"head_dim": 3}, "head_dim: expected an even number, found 3"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "lama3", "factor": 2.0}},
        'found "lama3" (did you mean "llama3"?)',
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window: expected null or at least 1, found 0"),
    (
        "gemma3_text",
        {"sliding_window": None},
        "sliding_window: expected a number, as layer_types",
    ),
    (
        "gemma3_text",
        {"layer_types": ["full_attention", "chunked_attention"]},
        'layer_types: expected "full_attention" or "sliding_attention", found "chunked_attention"',
    ),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected null"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("phi3", {"partial_rotary_factor": 0.5}, "expected an even number, found 3"),
    (
        "llama",
        {"rope_scaling": {**LONGROPE, "long_factor": [2.0]}},
        "expected 3 factors, one for each pair",
    ),
    (
        "llama",
        {"rope_scaling": {**YARN, "partial_rotary_factor": 0.5}},
        "rope_parameters.partial_rotary_factor: expected null or 1.0, found 0.5",
    ),
    ("gpt2", {"n_head": 0}, "n_head: expected an integer from 1 to 16384, found 0"),
    ("gpt2", {"num_attention_heads": 0}, "num_attention_heads: expected"),
    ("gpt2", {"n_layer": 0}, "n_layer: expected an integer from 1 to 1000, found 0"),
    ("gpt2", {"n_layer": 1001}, "n_layer: expected"),
    ("gpt2", {"n_layer": True}, "n_layer: expected"),
    ("gpt2", {"n_embd": "12"}, 'n_embd: expected an integer from 1 to 1048576, found "12"'),
    ("gpt2", {"n_inner": 0}, "n_inner: expected"),
    ("gpt2", {"vocab_size": 2**40}, "vocab_size: expected"),
    ("gpt2", {"n_positions": 10**30}, "n_positions: expected"),
    ("gpt2", {"layer_norm_epsilon": 0}, "layer_norm_epsilon: expected a number from 1e-30 to 1"),
    ("gpt2", {"activation_function": ["gelu"]}, "activation_function: expected a text"),
    ("gpt2", {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
    ("gpt2", {"scale_attn_weights": 1}, "scale_attn_weights: expected true or false"),
    ("llama", {"num_hidden_layers": 100_000}, "num_hidden_layers: expected an integer from 1 to"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads: expected"),
    ("llama", {"num_key_value_heads": 0}, "num_key_value_heads: expected"),
    ("llama", {"head_dim": 0}, "head_dim: expected"),
    ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
    ("llama", {"rms_norm_eps": 1e-300}, "rms_norm_eps: expected"),
    ("llama", {"rms_norm_eps": None}, "rms_norm_eps"),
    (
        "llama",
        {"rope_theta": 0},
        "rope_theta: expected a number from 1e-06 to 1e+12",
    ),
    ("llama", {"rope_theta": "1e4"}, "rope_theta"),
    ("llama", {"rope_theta": {"a": 1}}, "rope_theta"),
    ("llama", {"rope_scaling": [1]}, "rope_scaling: expected an object"),
    ("llama", {"rope_scaling": {"rope_type": 3}}, "rope_type"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
        "factor: expected a number",
    ),
    ("llama", {"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
    ("llama", {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": YARN, "rope_theta": 1.0}, "that give finite frequencies"),
    ("llama", {"rope_scaling": {**YARN, "factor": -2.0}}, "factor: expected"),
    ("llama", {"rope_scaling": {**YARN, "beta_fast": []}}, "beta_fast"),
    ("llama", {"rope_scaling": {**YARN, "attention_factor": 0.0}}, "attention_factor"),
    (
        "llama",
        {"rope_scaling": {**YARN, "original_max_position_embeddings": 0}},
        "original_max_position_embeddings: expected",
    ),
    (
        "llama",
        {"rope_scaling": {**LONGROPE, "short_factor": [1.0, 0.0, 1.0]}},
        "short_factor: expected a list, each a number",
    ),
    ("llama", {"rope_scaling": {**LONGROPE, "long_factor": "1"}}, "long_factor"),
    ("llama", {"rope_scaling": {**LONGROPE, "long_factor": [1.0, "2", None]}}, "long_factor"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected"),
    ("gemma3_text", {"final_logit_softcapping": 0.0}, "final_logit_softcapping: expected"),
    ("gemma3_text", {"final_logit_softcapping": 1e-300}, "final_logit_softcapping: expected"),
    ("gemma3_text", {"layer_types": ["full_attention"]}, "layer_types"),
    ("gemma3_text", {"layer_types": [1, 2]}, "layer_types: expected a list, each a text"),
    ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "config.json"),
    ("mistral", {"sliding_window": 1.5}, "sliding_window: expected"),
    ("phi3", {"partial_rotary_factor": 0.0}, "partial_rotary_factor"),
    ("phi3", {"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    (
        "roberta",
        {"num_attention_heads": 5},
        "hidden_size: expected a multiple of num_attention_heads = 5, found 12",
    ),
    ("roberta", {"num_attention_heads": 0}, "num_attention_heads: expected"),
    ("roberta", {"num_hidden_layers": 10**9}, "num_hidden_layers: expected"),
    (
        "roberta",
        {"pad_token_id": 19},
        "max_position_embeddings: expected more than pad_token_id + 1 = 20",
    ),
    ("roberta", {"pad_token_id": -1}, "pad_token_id: expected"),
    ("roberta", {"pad_token_id": None}, "pad_token_id: expected"),
    ("roberta", {"type_vocab_size": 0}, "type_vocab_size: expected"),
    ("roberta", {"layer_norm_eps": 0.0}, "layer_norm_eps: expected"),
    ("roberta", {"hidden_act": None}, "hidden_act"),
]


@pytest.mark.parametrize(
    ("family", "change", "said"),
    _UNUSABLE,
    ids=[f"{family}-{next(iter(change.items()))}"[:60] for family, change, _ in _UNUSABLE],
)
def test_a_setting_that_is_not_built_or_makes_a_model_unusable_is_named(
    family: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[family], **change}))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        made(family, tmp_path)
    assert str(tmp_path / "config.json") in str(caught.value)
    assert caught.value.hint or "transformers refuses it" in str(caught.value)


_DECODERS = {
    case.config["model_type"]: case.config for case in (*cases(), *t5_cases(), *whisper_cases())
}
_ENCODERS = {case.config["model_type"]: case.config for case in encoder_cases()}
_MORE = (
    *("head_dim", "rope_scaling", "rope_theta", "sliding_window", "layer_types", "dtype"),
    *("num_labels", "id2label", "torch_dtype", "partial_rotary_factor", "text_config"),
    *("dense_act_fn", "is_gated_act", "scale_decoder_outputs", "is_encoder_decoder"),
)


# Not drawn from st.data(), which prints what is drawn: lists of 2,000 levels.
@settings(deadline=None, derandomize=True, max_examples=examples(50, 150))
@given(
    drawn=st.sampled_from([*_DECODERS.items(), *_ENCODERS.items()]).flatmap(
        lambda kind: st.tuples(st.just(kind[0]), mutated(kind[1], _MORE))
    )
)
def test_any_config_is_refused_with_an_error_of_ours_or_makes_a_module(
    drawn: tuple[str, dict[str, Any]],
) -> None:
    family, config = drawn
    with tempfile.TemporaryDirectory() as name, contextlib.suppress(CheckpointError):
        directory = Path(name)
        (directory / "config.json").write_text(to_json(config))
        made(family, directory)


def test_a_model_is_described_without_torch_or_any_array(tmp_path: Path) -> None:
    large = {**LLAMA, "hidden_size": 2**16, "intermediate_size": 2**18, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps(large))
    parameters = flat_parameters(
        nnx.state(model_registry.make_decoder(config_file.load_config(tmp_path)))
    )
    assert parameters["model.layers.2.mlp.up_proj.weight"].shape == (2**18, 2**16)
