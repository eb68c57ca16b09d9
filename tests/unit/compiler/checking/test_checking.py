"""The checks of the decoder protocol: right models pass, and each broken rule is found under its name."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extent import one_in

from prejit.compiler.checking.kit import RULES, SHAPES, check_model, compare_with
from prejit.compiler.checking.subject import TOLERANCE, Subject, difference

from .tiny_models import BROKEN, LONGEST, Tiny, TinyWriter, apart, random_model

_CHECKS = {check.__name__: check for check in (*SHAPES, *RULES)}
_OF_DECODERS = [*_CHECKS][:-1]


def check(kind, name, **changed):
    model, values = apart(replace(random_model(kind), **changed))
    return _CHECKS[name](Subject(model, values, TOLERANCE, 16))


class Short(Tiny):
    """Of few positions, within which it is checked."""

    max_positions = 13

    def make_cache(self, rows, positions, dtype):
        assert positions <= 13
        return super().make_cache(rows, positions, dtype)


class Fixed(TinyWriter):
    """It takes one size of sources, and needs no mask."""

    def encode(self, source, length, positions, dtype):
        if source.shape[1] != 30:
            raise ValueError("expected 30 places")
        return super().encode(source, jnp.full_like(length, 30), positions, dtype)


@pytest.mark.thorough
def test_models_that_keep_the_rules_pass_every_check():
    assert LONGEST > 13
    *found, against_none = check_model(*apart(random_model(Short)), against=lambda: None)
    assert [one for one in found if not one.passed] == []
    assert [one.name for one in found] == _OF_DECODERS
    assert all(one.difference is None or one.difference < 1e-5 for one in found)
    assert (against_none.name, against_none.passed) == ("against", False)
    assert "expected a result, found TypeError(" in against_none.found
    model = apart(random_model(Fixed))
    found = list(check_model(*model, source_size=30))
    assert [one for one in found if not one.passed] == []
    assert [one.name for one in found] == [*_CHECKS]
    *_, refused = check_model(*model)
    assert (refused.name, refused.passed) == ("cache", False)
    assert "expected 30 places" in refused.found
    assert refused.change.startswith("give --source-size N if the model takes sources of N places")


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    one_in(4, BROKEN),
    ids=[f"{name} {says:.50}" for name, _, says in BROKEN],
)
def test_a_broken_rule_is_found_by_its_check(name, kind, says):
    found = check(kind, name)
    assert (found.name, found.passed) == (name, False)
    assert says in found.found
    assert found.found.startswith(("expected", "cache[", "max_positions:", "vocab_size:"))
    assert found.change


def test_what_a_model_raises_or_hides_is_a_failed_check_and_an_interrupt_none():
    class Raises(Tiny):
        def last(self, x, length):
            raise KeyError("no last token")

    assert {name for name, _, _ in BROKEN} == {*_CHECKS}, "each check has a model that breaks it"
    # Checks of numbers do not run on wrong shapes.
    *passed, last = check_model(*apart(random_model(Raises)), describe=lambda error: f"<{error!r}>")
    assert [one.name for one in passed] == ["attributes", "cache"]
    assert last.found == "expected a result, found <KeyError('no last token')>"

    class Interrupted(Tiny):
        def last(self, x, length):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(check_model(*apart(random_model(Interrupted))))
    found = check(Tiny, "sensitive", embedding=np.zeros((19, 8), np.float32))
    assert "too small for the other checks to find a mistake" in found.found
    assert "--params" in found.change


def reference(tokens):
    """Logits of Tiny after each token, in one call over texts."""
    model = random_model(Tiny)
    rows, count = tokens.shape
    zeros = jnp.zeros(rows, jnp.int32)
    cache = model.make_cache(rows, count, "float32")
    return model(jnp.asarray(tokens), zeros, zeros + count, cache, every=True)[0]


def against(function, kind=Tiny, tolerance=TOLERANCE):
    return compare_with(Subject(*apart(random_model(kind)), tolerance, 16), function)


def test_a_model_is_compared_with_a_reference_after_each_token():
    assert against(reference).passed
    assert against(lambda tokens: np.asarray(reference(tokens), np.float64)).passed
    wrong = against(lambda tokens: np.asarray(reference(tokens)) * np.linspace(1, 2, 12)[:, None])
    assert not wrong.passed
    assert "after token 1, the first that differs" in wrong.found
    assert wrong.difference == pytest.approx(0.5, rel=0.5)
    assert against(lambda tokens: 1.01 * reference(tokens), tolerance=0.1).passed
    assert not against(lambda tokens: 1.01 * reference(tokens), tolerance=1e-3).passed

    def written(source, length, tokens):
        model = random_model(TinyWriter)
        rows, count = tokens.shape
        cache = model.encode(source, length, count, "float32")
        zeros = jnp.zeros(rows, jnp.int32)
        return model(tokens, zeros, zeros + count, cache, every=True)[0]

    assert against(written, TinyWriter).passed
    for one, other, expected in (
        ([1.0, 3.0], [1.0, 3.0], 0.0),
        ([1.0, 2.5], [1.0, 3.0], 0.25),
        ([2.0, 2.0], [2.0, 2.0], 0.0),
        ([2.0, 2.1], [2.0, 2.0], np.inf),
        ([np.nan, 2.0], [1.0, 2.0], np.inf),
        ([1.0, 2.0], [1.0, np.inf], np.inf),
    ):
        assert difference(one, jax.numpy.asarray(other)) == expected
