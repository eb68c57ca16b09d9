"""Our models against transformers' torch models: what those say is recorded by record.py."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.extent import sampled

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.models import config_file, model_registry
from prejit.compiler.models.layers.kernel_calls import using
from prejit.compiler.models.parameters import with_parameters

from .cases import PROMPT, REFERENCE, STEPS, Case, cases
from .record import TIE, nearest_tokens, torch_logits
from .sibling_cases import cases as siblings

REFERENCES = (REFERENCE,)
TOLERANCE = 1e-4
CONTEXT = 96
ENCODER_DECODERS = {"t5", "whisper"}
"""Families whose cases have sources: test_encoder_decoder_parity.py has them."""


class Model:
    """A checkpoint, ready to run one row in a context."""

    def __init__(self, directory, context, forms=None, adapters=()):
        out_in = forms is not None
        checkpoint = open_checkpoint(directory, out_in=out_in, adapters=adapters)
        config = config_file.load_config(directory)
        self.graph, self.state = nnx.split(
            model_registry.make_decoder(config, context, out_in=out_in)
        )
        self.forms = forms
        self.weights = {name: checkpoint.read(name) for name in checkpoint.names}
        self.context = context

    def _run(self, weights, *arguments):
        with using(self.forms):
            return nnx.merge(self.graph, with_parameters(self.state, weights))(*arguments)

    @property
    def _empty_cache(self):
        return nnx.merge(self.graph, self.state).make_cache(1, self.context, "float32")

    def follow(self, prompt, greedy):
        """Float32 [1 + len(greedy), V]: prefill in one padded piece, then decode steps."""
        padded = np.zeros((1, PROMPT + 3), np.int32)
        padded[0, : len(prompt)] = prompt
        one = np.ones(1, np.int32)

        @jax.jit  # one program of both, which compiles sooner than two
        def run(weights, prompt_tokens, length, next_tokens):
            first, cache = self._run(weights, prompt_tokens, one - 1, length, self._empty_cache)

            def decode(state, token):
                position, cache = state
                logits, cache = self._run(weights, token[None, None], position, one, cache)
                return (position + 1, cache), logits[0]

            _, others = jax.lax.scan(decode, (length, cache), next_tokens)
            return jnp.concatenate([first, others])

        length = np.array([len(prompt)], np.int32)
        return np.asarray(run(self.weights, padded, length, greedy.astype(np.int32)))


def assert_equal(ours, torch):
    """The same greedy token after every step, so the same text; the same logits."""
    assert ours.argmax(1).tolist() == torch.argmax(1).tolist()
    assert np.abs(ours - torch).max() <= TOLERANCE


def assert_measures(recorded, steps):
    """Logits of other models would differ, and no token hangs on rounding."""
    for name, logits in recorded.items():
        assert logits.shape[-2] == steps
        assert logits.std(-2).min() > 10 * TOLERANCE, f"{name}: a constant would pass"
        assert nearest_tokens(logits) >= TIE, f"{name}: rounding decides a token"


def named(chosen, *, sample=None):
    """Parametrize with cases. `make test` runs those of the sample, or all."""
    given = sampled(chosen, lambda case: sample is None or case in sample)
    return pytest.mark.parametrize("case", given, ids=lambda case: case.name)


def number(case):
    """The place of a case in its family."""
    return int(case.name.split("-")[1])


def branches(settings, *where):
    """Return what in a configuration decides which code runs: flags, kinds, and which numbers are there."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from branches(value, *where, key)
        elif isinstance(value, bool | str) or value is None:
            yield (*where, key, value)
        else:
            yield (*where, key)


def branches_of(case):
    """Return the branches of a case; those of activations and rotations are the same for all families."""
    family = case.config["model_type"]
    return {
        each
        if "rope" in each[0] or "activation" in each[0] or each[0] == "hidden_act"
        else (family, *each)
        for each in branches(case.config)
    }


def reaching_every_branch(chosen):
    """Return few cases that reach every branch together."""
    reached = [(case, branches_of(case)) for case in chosen]
    left, few = set().union(*(each for _, each in reached)), list[Case]()
    while left:
        case, most = max(reached, key=lambda each: len(each[1] & left))
        few.append(case)
        left -= most
    return few


CASES = tuple(case for case in cases() if case.switch is None)
SWITCHED = tuple(case for case in cases() if case.switch is not None)
FEW = reaching_every_branch(CASES)
FIRST = tuple(case for case in CASES if number(case) < 3)
"""Enough for the portable form: what a configuration changes is the same code in both forms."""


@named(CASES, sample=FEW)
def test_logits_and_greedy_tokens_equal_those_of_torch(case, reference, tmp_path, with_kernels):
    check(case, reference, tmp_path, with_kernels)


@named(FIRST, sample=FIRST[::9])
def test_the_portable_form_gives_the_same(case, reference, tmp_path):
    check(case, reference, tmp_path, None)


def check(case, reference, at, forms):
    case.write(at)
    torch = reference[case.name]
    ours = Model(at, CONTEXT, forms).follow(case.prompt, torch[:-1].argmax(1))
    assert_equal(ours, torch)


@named(SWITCHED, sample=SWITCHED[:1])
def test_longrope_equals_torch_up_to_its_context_and_beyond_it(case, reference, tmp_path):
    assert case.switch is not None
    case.write(tmp_path)
    torch = reference[case.name]
    greedy, within = torch[:-1].argmax(1), case.switch - PROMPT + 1
    short = Model(tmp_path, case.switch).follow(case.prompt, greedy[: within - 1])
    assert_equal(short, torch[:within])
    long = Model(tmp_path, CONTEXT).follow(case.prompt, greedy)
    assert_equal(long[within:], torch[within:])
    assert np.abs(long[:within] - torch[:within]).max() > 100 * TOLERANCE


def test_every_case_is_recorded_and_they_differ(reference):
    assert list(reference) == [case.name for case in cases()]
    families = Counter(name.split("-")[0] for name in reference)
    others = {str(case.config["model_type"]) for case in siblings()}
    known = model_registry.DECODERS.keys() - others - ENCODER_DECODERS
    assert families.keys() == {family.removesuffix("_text") for family in known}
    assert min(families.values()) >= 10
    assert_measures(reference, STEPS)


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@named(cases())
def test_the_record_equals_what_torch_gives_here(case, reference, tmp_path):
    assert np.abs(torch_logits(case, tmp_path) - reference[case.name]).max() <= TOLERANCE / 2
