"""Whatever is passed to the public API gives a result or an error of prejit that names the argument."""

import contextlib
import dataclasses
import functools
import math
import warnings
from collections import deque
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.extent import examples
from tests.layouts import GOLDEN

from prejit.runtime import PrejitError, PrejitWarning, Request, Sampling, UsageError, load
from prejit.runtime.base.arguments import described
from prejit.runtime.generation.options import OPTIONS
from prejit.runtime.programs.fitted_arguments import instead

VOCAB = 48


@pytest.fixture(scope="module")
def bundle(decoder_dir):
    return load(decoder_dir, on_mismatch="error")


@pytest.fixture(scope="module")
def bundles(settled_dir):
    """By method: an encoder, functions, and a decoder with a tokenizer and chat templates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PrejitWarning)  # golden bundles fit no machine of today
        decoder, encoder = load(GOLDEN / "decoder"), load(GOLDEN / "encoder")
    functions = load(settled_dir, on_mismatch="error")
    return {"generate": decoder, "encode": encoder, "call": functions, "call_by_path": functions}


class Hostile:
    def _fail(self, *_, **__):
        raise ZeroDivisionError

    __repr__ = __index__ = __float__ = __iter__ = __len__ = __array__ = _fail


def nested(depth):
    return functools.reduce(lambda value, _: [value], range(depth), [])


JUNK = (
    *(None, True, False, -1, 0, 1, 2, 1.5, -0.0),
    *(math.nan, math.inf, -math.inf, 10**6000, -(10**30)),
    *(2**31, 2**63, 2**64, 1e-300, 1e300, 1j, b"", b"ab", "", "a", "\ud800", "\0", "\x1b[31m"),
    *(Hostile(), print, object(), [], (), {}, set(), frozenset((1,)), [1.0, 2.0], [True]),
    *([-1], [10**30], ["a", 1], [[1, 2], [3]], [None], {1: 2}, {1: "x"}, {"a": 1.0}, nested(3)),
    *(nested(5000), range(3), range(-3, 0), deque([1, 2]), iter([1, 2]), slice(3), ...),
    *(np.int64(1), np.float32(0.5), np.bool_(True)),
    *(np.array([1, 2]), np.array([1.0, 2.0]), np.array(3)),
    *(np.array([[1, 2], [3, 4]]), np.array([], np.int32), np.array(["a"]), np.array([None])),
    *(np.array([2**63], np.uint64), np.datetime64("2020-01-01"), np.ma.masked_array([1], [True])),
    *(Sampling(), Request([1]), Path("x"), NotImplemented, memoryview(b"abc"), bytearray(b"a")),
)


@dataclasses.dataclass(repr=False)
class Held:
    value: object

    def __repr__(self):
        return described(self.value)


_VALUES = st.one_of(
    st.sampled_from(JUNK),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.sampled_from(JUNK), st.integers(-1, VOCAB)), max_size=3),
    st.dictionaries(st.integers(-1, VOCAB) | st.text(max_size=2), st.floats(), max_size=2),
)
VALUES = st.builds(Held, _VALUES)
METHODS = {
    "generate": (*OPTIONS,),
    "generate_n": ("n", *OPTIONS),
    "generate_batch": ("sampling", *OPTIONS),
    "stream": (*OPTIONS,),
    "request": (*OPTIONS,),
    "encode": ("on_too_long",),
    "call": ("x",),
    "call_by_path": ("given", "static"),
    "apply_chat_template": (
        *("template", "add_generation_prompt", "continue_final_message", "tools", "documents"),
        "other",
    ),
}
"""Methods of bundles and the names of their options."""
OTHERS = {
    "prefix": lambda bundle, value: bundle.prefix(value),
    "batch": lambda bundle, value: bundle.batch(value),
    "evict": lambda bundle, value: bundle.batch(1).evict(value),
    "insert": lambda bundle, value: isinstance(value, Request) or bundle.batch(1).insert(value),
    "session": lambda bundle, value: bundle.session().generate([], seed=value),
    "load": lambda _, value: isinstance(value, str | Path) or load(value),
    **{
        name: lambda _, value, name=name: load("no such", **{name: value})
        for name in ("on_mismatch", "while_compiling", "fingerprint", "on_fallback")
    },
    "Request": lambda _, value: Request(value, prefix=value, token_mask=value),
    "Sampling": lambda _, value: Sampling(temperature=value, top_k=value, logit_bias=value),
}
"""Other functions of one value."""
RIGHT = {"n": 2, "given": {}, "max_new_tokens": 1}


@st.composite
def calls(draw):
    method = draw(st.sampled_from([*METHODS, *OTHERS]))
    names = METHODS.get(method, ())
    options = {name: Held(RIGHT[name]) for name in RIGHT if name in names}
    if names:
        options |= draw(st.dictionaries(st.sampled_from(names), VALUES, max_size=3))
    right = st.just(Held([[1], [2]] if method == "generate_batch" else [1, 2]))
    return method, draw(st.one_of(VALUES, right)), options


class Checked(Exception):  # noqa: N818 (no error)
    """Raised in place of running a program: all arguments were found right."""


@pytest.fixture
def calls_alone(monkeypatch):
    """Nothing runs: a call whose arguments are right ends where a program would."""

    def stop(*_, **__):
        raise Checked

    for name in (
        *("encoding.encoder.EncoderPrograms.encode", "generation.filling_aside.computing_prefix"),
        "generation.slots.Slots._reserve",
    ):
        monkeypatch.setattr(f"prejit.runtime.{name}", stop)


@pytest.mark.usefixtures("calls_alone")
@settings(max_examples=examples(500, 2000), deadline=None, suppress_health_check=list(HealthCheck))
@given(calls())
def test_whatever_is_passed_gives_a_result_or_an_error_of_prejit(bundles, call):
    method, first, held = call
    bundle = bundles.get(method, bundles["generate"])
    options = {name: option.value for name, option in held.items()}
    with contextlib.suppress(PrejitError, Checked):
        if method in OTHERS:
            OTHERS[method](bundle, first.value)
        else:
            result = getattr(bundle, method)(first.value, **options)
            if method == "stream":
                list(result)


def test_a_wrong_option_or_prompt_is_named_with_both_sides(bundle):
    def refused(message, use, *arguments, **options):
        with pytest.raises(UsageError, match=f"^{message}$"):
            use(*arguments, **options)

    for name, value, message in (
        ("max_new_tokens", 1.5, "expected an integer, found 1.5"),
        ("stop_token_ids", 3, "expected a list of integers, found 3"),
        ("stop_token_ids", [VOCAB], "expected token ids of 0 to 47, found 48"),
        ("stop", [""], "expected strings of at least one character, found ''"),
        ("stop", 5, "expected text or a list of texts, found 5"),
        ("prefix", [1], r"expected a Prefix, found \[1\]"),
    ):
        refused(f"{name}: {message}", bundle.generate, [1], **{name: value})
    for prompt, message in (
        ([1.0, 2.0], r"prompt\[0\]: expected an integer, found 1.0"),
        (np.array([1.0]), r"prompt: expected text or a list of token ids, found float64\[1\]"),
        (None, "prompt: expected text or a list of token ids, found None"),
        ([10**30], f"prompt: expected token ids of 0 to 47, found {10**30}"),
        ([-1], "prompt: expected token ids of 0 to 47, found -1"),
    ):
        for use in (bundle.generate, bundle.request, bundle.prefix, bundle.session().generate):
            refused(message, use, prompt)


def test_integers_of_every_library_are_token_ids_and_seeds(bundle):
    expected = bundle.generate([1, 2, 3], max_new_tokens=np.int32(3), seed=np.uint64(7))
    for prompt in (
        *((1, 2, 3), range(1, 4), deque([1, 2, 3]), [np.int8(1), np.uint64(2), 3]),
        *(np.array([1, 2, 3], np.uint16), jnp.array([1, 2, 3]), [jnp.int32(1), 2, 3]),
    ):
        result = bundle.generate(prompt, max_new_tokens=3, seed=7)
        assert result.token_ids == expected.token_ids
    numpy, python = (
        [r.token_ids for r in bundle.generate_n([1], 2, seed=s, temperature=1.0, max_new_tokens=3)]
        for s in (np.uint64(2**64 - 1), 2**64 - 1)
    )
    assert numpy == python


def test_one_text_is_one_prompt_and_too_many_sequences_are_refused(bundle):
    for prompts in ("abc", ["abc"]):
        with pytest.raises(UsageError, match="has no tokenizer, so a prompt cannot be text"):
            bundle.generate_batch(prompts)
    with pytest.raises(UsageError, match=r"prompts: expected a prompt or a list of .*, found 5"):
        bundle.generate_batch(5)
    with pytest.raises(UsageError, match=r"sampling: expected it without .* temperature"):
        bundle.generate_batch([[1]], sampling=[Sampling(seed=1)], temperature=0.5)
    for n in (0, -1, 1.0, "3", 16_385, 10**30):
        with pytest.raises(UsageError, match=r"^n: expected (1 to 16384|an integer), found"):
            bundle.generate_n([1], n)


def test_a_token_mask_that_gives_something_else_is_an_error(bundle):
    for mask in (5, "ab", [[True], [1, 2]], Hostile(), np.zeros((48,), np.int8)):
        with pytest.raises(UsageError, match=r"token_mask: expected bool\[48\] or None, found"):
            bundle.generate([1], max_new_tokens=2, token_mask=lambda ids, mask=mask: mask)


def test_every_value_has_a_short_description_of_one_line_and_a_lookalike_its_class():
    assert instead(1, True) == "True"
    assert instead("a", type("Text", (str,), {})("a")) == "'a' of class Text"
    for text in map(described, JUNK):
        assert 0 < len(text) <= 80
        assert text.isprintable(), ascii(text)
