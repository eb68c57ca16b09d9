"""Our T5 and Whisper against transformers' torch models: what those say is recorded by record.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.families.encoder_decoders import buckets

from . import t5_cases, whisper_cases
from .encoder_results import with_weights
from .record import torch_logits
from .test_parity import TOLERANCE, assert_measures

CONTEXT = 40
PADDING = 3
"""Places behind every prompt and a T5's source, with tokens that count for nothing."""

KINDS = (t5_cases, whisper_cases)
CASES = tuple(case for kind in KINDS for case in kind.cases())
REFERENCES = tuple(kind.REFERENCE for kind in KINDS)


def named(*cases):
    return pytest.mark.parametrize("case", one_in(6, cases), ids=lambda case: case.name)


def compiled(case, directory, greedy, forms):
    """The logits of sources, [ROWS, STEPS, V]: encode, prefill in one padded piece, then decode steps."""
    case.write(directory)
    out_in, is_t5 = forms is not None, case.config["model_type"] == "t5"
    checkpoint = open_checkpoint(directory, out_in=out_in)
    config = config_file.load_config(directory)
    context = CONTEXT if is_t5 else whisper_cases.PROMPT + whisper_cases.STEPS
    module = model_registry.make_decoder(config, context, out_in=out_in)
    weights, call = with_weights(module, checkpoint, forms)
    beyond = ((0, 0), (0, PADDING))
    prompts = np.pad(case.prompt, beyond, constant_values=5)
    ones = np.ones(len(prompts), np.int32)
    length = np.int32(case.prompt.shape[1]) * ones

    @jax.jit  # one program, which compiles sooner than three
    def run(weights, source, lengths, following):
        cache = call("encode", weights, source, lengths, context, "float32")
        first, cache = call("__call__", weights, prompts, 0 * ones, length, cache)

        def decode(state, tokens):
            position, cache = state
            logits, cache = call("__call__", weights, tokens[:, None], position, ones, cache)
            return (position + 1, cache), logits

        _, others = jax.lax.scan(decode, (jnp.asarray(length), cache), following)
        return jnp.concatenate([first[None], others]).swapaxes(0, 1)

    def of_sources(source, lengths=case.lengths):
        source = np.pad(source, beyond, constant_values=5) if is_t5 else source
        return np.asarray(run(weights, source, lengths, greedy.T.astype(np.int32)))

    return of_sources


@named(*CASES)
def test_logits_and_greedy_tokens_equal_those_of_torch(case, reference, tmp_path, with_kernels):
    check(case, reference, tmp_path, with_kernels)


@named(*t5_cases.cases()[:3], *whisper_cases.cases()[:3])
def test_the_portable_form_gives_the_same(case, reference, tmp_path):
    """Of Whispers a few: what a configuration changes is the same code in both forms."""
    check(case, reference, tmp_path, None)


def check(case, reference, at, forms):
    torch = reference[case.name]
    run = compiled(case, at, torch[:, :-1].argmax(2), forms)
    ours = run(case.source)
    assert ours.argmax(2).tolist() == torch.argmax(2).tolist()
    assert np.abs(ours - torch).max() <= TOLERANCE
    if case.config["model_type"] == "whisper":
        swapped = run(case.source[::-1])
        assert np.abs(swapped - torch).max(2).min() > 100 * TOLERANCE, "a decoder alone would pass"


def test_every_case_is_recorded_and_they_differ(reference):
    assert list(reference) == [case.name for case in CASES]
    assert min(kind.COUNT for kind in KINDS) >= 10
    for kind in KINDS:
        recorded = {case.name: reference[case.name] for case in kind.cases()}
        assert {len(logits) for logits in recorded.values()} == {kind.ROWS}
        assert_measures(recorded, kind.STEPS)
    kinds = {
        (case.old, t5_cases.has_own_head(case.config), "gated" in case.name)
        for case in t5_cases.cases()
    }
    assert len(kinds) >= 6


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named(*CASES)
def test_the_record_equals_what_torch_gives_here(case, reference, tmp_path):
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2


@pytest.mark.torch
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("count", "farthest"), [(32, 128), (32, 1000), (8, 20), (7, 5), (64, 256)])
def test_buckets_are_those_of_torch(count, farthest, *, causal):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-1500, 1501)
    expected = T5Attention._relative_position_bucket(
        torch.from_numpy(distance), not causal, count, farthest
    )
    assert np.array_equal(buckets(distance, count, farthest, causal=causal), expected.numpy())
