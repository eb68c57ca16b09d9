"""Sessions and prefixes keep only whole states of a decoder whose state cannot go back.

The model is that of an example. test_invariance.py has it in every way to generate.
"""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.manifests import write_manifest

from prejit.runtime import load
from prejit.runtime.generation import decode

from .conftest import ROOT

pytestmark = pytest.mark.thorough

CONTEXT = 72
TEXTS = np.random.default_rng(0).integers(0, 512, (4, CONTEXT)).tolist()


def write_model(directory):
    """The example's model with two layers: four take twice as long to compile."""
    text = (ROOT / "examples" / "state_space" / "model.py").read_text()
    sizes = "= 512, 4, 128,"
    assert sizes in text
    (directory / "model.py").write_text(text.replace(sizes, "= 512, 2, 128,"))
    return directory / "model.py"


def state_space_bundle(run, once):
    """The bundle of the example's model, in float32 and with other sizes."""

    def build(directory):
        write_model(directory)
        lines = {"model": 'module = "model:model"', "generate": "draft_tokens = 3"}
        sizes = {"batch": (2,), "prompt": (8,), "context": (CONTEXT,)}
        manifest = directory / "manifest.toml"
        write_manifest(manifest, name="state_space", **lines, **sizes)
        run("build", manifest, "-o", directory, quick=True)

    return once("state_space", build) / "state_space"


@pytest.fixture(scope="module")
def bundle(run, once):
    return load(state_space_bundle(run, once), on_mismatch="error")


def written(bundle, prompt, count):
    """Return the tokens after a prompt, from a bundle that keeps nothing."""
    return list(bundle.generate(prompt, max_new_tokens=count).token_ids)


def goes_on(bundle, by, prompt, count, reused=None, **options):
    """Check that `by` writes what the bundle alone does, and reuses so many tokens; return the tokens."""
    found = by.generate(prompt, max_new_tokens=count, **options)
    assert list(found.token_ids) == written(bundle, prompt, count)
    assert reused is None or found.stats.reused_tokens == reused
    return list(found.token_ids)


def test_a_text_is_that_of_a_plain_loop(bundle, run, once, monkeypatch):
    """One row, one token a call, one cache from the first token to the last."""
    file = state_space_bundle(run, once).parent / "model.py"
    spec = importlib.util.spec_from_file_location("state_space", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "state_space", module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    step, cache = jax.jit(module.model.__call__), module.model.make_cache(1, CONTEXT, "float32")
    text, one = TEXTS[0][:9], jnp.ones(1, jnp.int32)
    for place in range(9 + 24 - 1):
        token = jnp.array([[text[place]]], jnp.int32)
        logits, cache = step(token, jnp.array([place], jnp.int32), one, cache)
        if place >= 8:
            text.append(int(logits[0].argmax()))
    assert len(set(text[9:])) > 4, "a text that says something"
    assert written(bundle, text[:9], 24) == text[9:]


@pytest.fixture(params=[1, 4])
def steps(request, monkeypatch):
    """The most steps of a decode call, which otherwise depend on how long a step takes."""
    most = request.param
    monkeypatch.setattr(decode, "steps_per_call", lambda _, left: min(left, most))
    return most


def test_a_session_computes_only_what_is_new(bundle):
    session = bundle.session()
    text = TEXTS[2][:10]
    for reused in (0, 10 + 6 - 1):  # the last token has not been fed back
        text = [*text, *goes_on(bundle, session, text, 6, reused), 5, 6, 7]
    goes_on(bundle, session, text[:12], 3, reused=0)  # a state cannot go back


def test_a_stop_token_in_the_middle_of_a_call(bundle, steps):
    """The call goes on behind it, and its state is of no text."""
    session, prompt = bundle.session(), TEXTS[1][:7]
    whole = written(bundle, prompt, 12)
    # The first token comes from the prefill, and four from a call: those at 4 and 8 are the last of one.
    stop = next(place for place in (3, 5, 6, 7) if whole[place] not in whole[:place])
    found = session.generate(prompt, max_new_tokens=12, stop_token_ids=[whole[stop]])
    assert list(found.token_ids) == whole[:stop]
    text = [*prompt, *whole[:stop], 5, 6]
    goes_on(bundle, session, text, 6, len(text) - 2 if steps == 1 else 0)


def test_a_prefix_serves_what_its_state_can_continue(bundle):
    text = TEXTS[3]
    prefix = bundle.prefix(text[:20])
    goes_on(bundle, bundle, text[:29], 5, 20, prefix=prefix)
    elsewhere = [*text[:13], *TEXTS[1][:9]]  # leaves the prefix before its end
    goes_on(bundle, bundle, elsewhere, 5, 0, prefix=prefix)
    goes_on(bundle, bundle, text[:20], 5, prefix=prefix)


def test_one_context_is_enough_for_a_cache_without_positions(run, tmp_path):
    write_model(tmp_path)
    sizes = {"prompt": (8,), "context": (64, 4096)}
    manifest = write_manifest(tmp_path / "m.toml", model='module = "model:model"', **sizes)
    said = run("build", manifest, "-o", tmp_path, quick=True, status=2).stderr
    assert (
        "generate.context: expected one size, because the cache of model:model has no "
        "positions and is as large for any; found [64, 4096]\n"
    ) in said
    assert "give the longest text that you want to allow: context = [4096]" in said
