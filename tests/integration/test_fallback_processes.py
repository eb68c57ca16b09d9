"""A mismatch of a decoder: requests need not wait for what compiles in the background."""

import dataclasses
import json
import re
import threading
import warnings

import pytest
from tests.quick_compiling import XLA_FLAGS
from tests.waiting import wait_for

from prejit.runtime import FallbackWarning, Fingerprint, Sampling, load
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import BuildError

OTHER = dataclasses.replace(Fingerprint.current(), jaxlib="0.4.0")


@pytest.fixture(scope="module")
def ids(decoder_dir):
    """A text of the model's own: what follows any beginning of it is known."""
    written = load(decoder_dir, on_mismatch="error").generate([5], max_new_tokens=60).token_ids
    return [5, *written]


class Compiler:
    """Stands before a bundle's own compiler: says what is compiled, holds it up or breaks it."""

    def __init__(self, bundle):
        self.compiled = []
        self.most_at_once = 0
        self.broken = set()
        self.go_on = threading.Event()  # only what is needed now is compiled before
        self.held = re.compile("(?!)")
        self._inside = 0
        self._names = {p.portable.raw_digest: p.name for p in bundle.config.programs}
        self._compile = bundle._programs.device.compile
        bundle._programs.device.compile = self

    def __call__(self, portable, *more):
        name = self._names[digest_of(portable)]
        self._inside += 1
        self.most_at_once = max(self.most_at_once, self._inside)
        try:
            if self.held.fullmatch(name) and not self.go_on.wait(60):
                raise TimeoutError(name)
            if name in self.broken:
                raise BuildError(f"{name} is broken")
            self.compiled.append(name)
            return self._compile(portable, *more)
        finally:
            self._inside -= 1


@pytest.fixture
def served(decoder_dir):
    """A bundle on a machine that it was not built for, which serves with what is ready."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FallbackWarning)
        bundle = load(decoder_dir, fingerprint=OTHER, while_compiling="smaller")
    compiler = Compiler(bundle)
    yield bundle, compiler
    compiler.go_on.set()
    finish(bundle)


def finish(bundle):
    """Waits for what compiles in the background."""
    wait_for(lambda: not bundle._programs._working)


def sources(bundle):
    return {r.program: r.source for r in bundle.report() if r.source != "unused"}


def test_a_long_prompt_goes_through_the_smallest_bucket_while_its_own_compiles(served, ids):
    bundle, compiler = served
    compiler.held = re.compile(r"prefill/b1-t10-c24")
    for _ in range(2):
        result = bundle.generate(ids[:13], max_new_tokens=8)
        assert list(result.token_ids) == ids[13:21]
    assert sources(bundle) == {
        "prefill/b1-t3-c24": "compiled",
        "prefill/b1-t10-c24": "compiling",
        "decode/b1-c24": "compiled",
    }
    compiler.go_on.set()
    finish(bundle)
    assert sources(bundle)["prefill/b1-t10-c24"] == "compiled"
    used = []
    real = type(bundle.decoder).prefill_for
    bundle.decoder.prefill_for = lambda *a: used.append(real(bundle.decoder, *a)) or used[-1]
    assert list(bundle.generate(ids[:13], max_new_tokens=8).token_ids) == ids[13:21]
    assert used[0].name == "prefill/b1-t10-c24"


@pytest.mark.thorough
def test_a_larger_context_or_batch_that_is_ready_serves(served, ids):
    bundle, compiler = served
    for name in ("prefill/b3-t3-c72", "decode/b3-c72"):
        bundle._programs[name]
    compiler.held = re.compile(".*")
    assert list(bundle.generate(ids[:10], max_new_tokens=12).token_ids) == ids[10:22]
    assert [p.token_id for p in bundle.stream(ids[:10], max_new_tokens=5)] == ids[10:15]
    results = bundle.generate_batch([ids[:1], ids[:7]], max_new_tokens=5)
    assert [list(r.token_ids) for r in results] == [ids[1:6], ids[7:12]]
    assert compiler.compiled == ["prefill/b3-t3-c72", "decode/b3-c72"]
    assert {name for name, source in sources(bundle).items() if source == "compiling"} == {
        *("decode/b1-c24", "prefill/b1-t10-c24"),
        *("decode/b3-c24", "prefill/b3-t10-c24"),
    }
    compiler.go_on.set()
    finish(bundle)
    assert compiler.most_at_once == 1
    # Smallest first; the first was taken up before the others were wished for.
    assert compiler.compiled[2:] == [
        *("decode/b1-c24", "decode/b3-c24", "prefill/b1-t10-c24", "prefill/b3-t10-c24")
    ]


@pytest.mark.thorough
def test_tokens_are_those_of_the_bundles_own_programs_while_it_compiles(served, decoder_dir, ids):
    """Without pauses, so that requests meet whatever is ready by then."""
    bundle, _ = served
    own = load(decoder_dir, on_mismatch="error")
    sampled = {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 1}
    requests = [(1, 5), (23, 20), (40, None)]
    for how in ({}, sampled):
        for length, count in requests:
            ours, theirs = (
                b.generate(ids[:length], max_new_tokens=count, **how) for b in (bundle, own)
            )
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            pieces = list(bundle.stream(ids[:length], max_new_tokens=count, **how))
            assert "".join(piece.text for piece in pieces) == theirs.text
        prompts, sampling = [ids[:30], ids[:2], ids[:9]], [Sampling(**how)] * 3
        together = [
            b.generate_batch(prompts, max_new_tokens=20, sampling=sampling) for b in (bundle, own)
        ]
        assert [r.token_ids for r in together[0]] == [r.token_ids for r in together[1]]


@pytest.mark.thorough
def test_what_failed_in_the_background_is_told_to_who_wants_it_and_heals(served, ids):
    bundle, compiler = served
    compiler.broken = {"prefill/b1-t10-c24"}
    assert list(bundle.generate(ids[:13], max_new_tokens=5).token_ids) == ids[13:18]
    finish(bundle)
    with pytest.raises(BuildError, match="prefill/b1-t10-c24 is broken"):
        bundle.generate(ids[:13], max_new_tokens=5)
    assert list(bundle.generate(ids[:3], max_new_tokens=5).token_ids) == ids[3:8]
    compiler.broken = set()
    assert list(bundle.generate(ids[:13], max_new_tokens=5).token_ids) == ids[13:18]
    assert sources(bundle)["prefill/b1-t10-c24"] == "compiled"


LEAVE_AT_ONCE = """
import json, sys, time, warnings
from prejit.runtime import Fingerprint, load
warnings.simplefilter("ignore")
bundle = load(sys.argv[1], fingerprint=Fingerprint.read(sys.argv[2]), while_compiling="smaller")
compile = bundle._programs.device.compile
bundle._programs.device.compile = lambda *given: time.sleep(0.5) or compile(*given)
prompt = list(range(1, 14))
bundle.generate(prompt, max_new_tokens=8)
bundle.generate_batch([prompt] * 2, max_new_tokens=5)  # of each, a longer prefill goes on compiling
print(json.dumps([r.source for r in bundle.report()]))
"""


@pytest.mark.thorough
def test_a_process_that_ends_while_it_compiles_ends_cleanly(python, decoder_dir, tmp_path):
    (tmp_path / "other.json").write_bytes(to_json(OTHER))
    settings = {"PREJIT_RUNTIME_CACHE": str(tmp_path / "cache"), "XLA_FLAGS": XLA_FLAGS}
    done = python(LEAVE_AT_ONCE, decoder_dir, tmp_path / "other.json", **settings)
    assert done.stderr == ""
    assert "compiling" in json.loads(done.stdout)
