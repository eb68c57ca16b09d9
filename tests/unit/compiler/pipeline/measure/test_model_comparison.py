"""A perplexity is measured as the model reads texts: with the token that begins them."""

import jax
import numpy as np
import pytest
from tests import decoders
from tests.extent import cases

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.parameters import parametrized
from prejit.compiler.pipeline.measure import model_comparison
from prejit.runtime.errors import CheckpointError

from ...checkpoint.test_configured_tokenizer_check import begun_with, crafted, word_level

WORDS = {"a": 0, "b": 1, "<s>": 2, "[UNK]": 3}


def write_tokenizer(directory, **parts):
    text, tokenizer = directory / "text.txt", directory / "tokenizer.json"
    text.write_text("a b b a")
    words = {"type": "Whitespace"}
    tokenizer.write_bytes(crafted(word_level(vocab=WORDS), pre_tokenizer=words, **parts))
    return text, tokenizer


def test_texts_begin_and_are_cut_as_by_the_tokenizer_which_may_fail(tmp_path):
    for parts, begin in (({}, []), ({"post_processor": begun_with("<s>", 2)}, [2])):
        ids, found = model_comparison.read_text(*write_tokenizer(tmp_path, **parts))
        assert ids.tolist() == [0, 1, 1, 0]
        assert found.tolist() == begin
    text, tokenizer = write_tokenizer(tmp_path, post_processor=begun_with("<s>", 2))
    text.write_text("a b\n\nb a b a b\n")
    tokens, length = model_comparison.read_sentences(text, tokenizer, 4)
    assert tokens.tolist() == [[2, 0, 1, 0], [2, 1, 0, 1]]
    assert length.tolist() == [3, 4]
    tokenizer.write_text(tokenizer.read_text().replace(', "[UNK]": 3', ""))
    text.write_text("a c")
    for said in (r"tokenizer.json: the evaluation text: .*\[UNK\]", "expected a tokenizer.json: "):
        with pytest.raises(CheckpointError, match=said):
            model_comparison.read_text(text, tokenizer)
        tokenizer.write_text("{")


@pytest.mark.thorough
@pytest.mark.parametrize(("begin", "count"), cases([([5, 6], 150)], others=[([], 150), ([5], 1)]))
def test_a_perplexity_counts_each_token_after_what_begins_the_text(tmp_path, begin, count):
    source = decoders.write_random("gpt2", tmp_path / "gpt2")
    checkpoint, config = open_checkpoint(source), config_file.load_config(source)
    values = {name: checkpoint.read(name) for name in checkpoint.names}
    made = parametrized(model_registry.make_decoder(config))
    model = model_comparison.ComparedModel(made, values)
    size = decoders.LARGEST_CONTEXT

    @jax.jit
    def call(weights, tokens, length):
        bound = model.model.bind(weights)
        cache = bound.make_cache(1, size, "float32")
        return bound(tokens, np.zeros(1, np.int32), length, cache, every=True)[0][0]

    text = np.random.default_rng(0).integers(0, decoders.VOCABULARY, count).astype(np.int32)
    losses = []
    for first in range(0, count, size - len(begin)):
        window = np.array([*begin, *text[first : first + size - len(begin)]], np.int32)
        tokens = np.pad(window, (0, size - window.size))[None]
        logits = np.asarray(call(model.weights, tokens, np.array([window.size], np.int32)))
        chances = logits[: window.size].astype(np.float64)
        chances -= np.log(np.exp(chances).sum(-1, keepdims=True))
        known = max(1, len(begin))
        losses += [-chances[at - 1, window[at]] for at in range(known, len(window))]
    sizes = (decoders.VOCABULARY, size)
    named = ("text", text, np.array(begin, np.int32))
    found = model_comparison.of_decoder("float32", model, model, sizes, named, 0)
    assert found.tokens == len(losses)
    perplexity = np.exp(np.mean(losses)) * 1e6
    assert found.perplexity_millionths == pytest.approx(perplexity, rel=1e-4)
