"""A release that serves fewer machines, or takes less than before, is seen before it runs."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prejit.runtime.errors import RejectError
from prejit.runtime.format import bundle_schema as schema
from prejit.runtime.format.bundle_schema import Descriptor, ImageManifest
from prejit.runtime.format.names import CHAT_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE
from prejit.runtime.format.release_limits import (
    DEFAULT_SHARES,
    SLO,
    ReleaseLimits,
    fraction_of,
    limits_annotation,
)
from prejit.runtime.machine.fingerprint import Fingerprint, Requirement
from prejit.runtime.machine.fleet_machines import Machine
from prejit.server.releases.release_contents import (
    ReleaseContents,
    compare_contents,
    described_limits,
    limits_of,
    stricter,
)

SEGMENT = schema.Segment(0, 1, "sha256:1", 1, "sha256:2")
V2, V3 = ("sse3", "ssse3"), ("avx2", "sse3", "ssse3")


def needs(*features, **more):
    return Requirement("cpu", "x86_64", features, "0.10.2", **more)


def program(kind, name="", arguments=(), **bucket):
    given = (name or f"{kind}/{bucket}", kind, bucket, "", arguments, ())
    return schema.ProgramEntry(*given, SEGMENT, SEGMENT, schema.Memory(1000, 0, 0, 0))


def decodes(*buckets):
    return tuple(program("decode", batch=batch, context=context) for batch, context in buckets)


DECODER = schema.Decoder("gpt2", 50, "float32", 512, (7,), ())
OTHER_END = replace(DECODER, eos_token_ids=(8,))
CONFIG = schema.Config(
    1, "m", "v2", needs(*V2), {}, decodes((1, 64), (4, 512)), {}, decoder=DECODER
)
LAYERS = (
    schema.Descriptor(WEIGHTS_MEDIA_TYPE, "sha256:3", 10_000),
    schema.Descriptor(CHAT_MEDIA_TYPE, "", 9),
)
MANIFEST = schema.ImageManifest(2, "", "", schema.Descriptor("", "", 0), LAYERS, {})
TARGETS = {"v2": needs(*V2), "v3": needs(*V3)}
OLD = ReleaseContents(
    *("old", "sha256:a", TARGETS, "v2", "", CONFIG, MANIFEST, {"temperature": 0.7}),
    limits=ReleaseLimits(),
)


def failed(new, old=OLD, *machines):
    """The checks that stop a release, each with its reason."""
    checks, _ = compare_contents(old, new, machines)
    return {each.name: each.why for each in checks if each.outcome == "failed"}


def with_config(**changes):
    return replace(OLD, config=replace(CONFIG, **changes))


@pytest.mark.parametrize(
    ("requirements", "reason"),
    [
        (TARGETS, ""),
        ({"v3": needs(*V3), "v2": needs(*V2), "v4": needs(*V3, "avx512f")}, ""),
        ({"all": needs("sse3")}, ""),  # serves machines that have less, too
        ({"v2": needs(*V2, glibc="2.17")}, ""),
        ({"v3": needs(*V3)}, "v2 and no more would compile; v3 is closest: cpu_features"),
        ({"v2": replace(needs(*V2), jaxlib="0.11.0")}, "needs 0.11.0, found 0.10.2"),
        ({"v2": needs(*V2, xla_flags=("--xla_x=1",))}, "xla_flags"),
    ],
)
def test_machines_that_lose_their_target_stop_it(requirements, reason):
    found = failed(replace(OLD, requirements=requirements))
    assert found.keys() == ({"targets"} if reason else set())
    assert reason in found.get("targets", "")


def test_machines_of_the_fleet_and_this_one_must_not_begin_to_compile():
    fleet = [
        Machine(name, f"{name}.json", Fingerprint("cpu", "x86_64", features, "0.10.2", "", 1, 1))
        for name, features in (("rack-1", V3), ("rack-2", V2), ("arm", ()))
    ]
    new = replace(OLD, requirements={"v3": needs(*V3)})
    assert failed(new, OLD, *fleet)["fleet"] == "would compile: rack-2"
    assert "fleet" not in failed(OLD, new, *fleet)  # who compiled before loses nothing
    compiles = replace(OLD, why_not="cpu_features: needs amx, found none")
    assert failed(compiles)["runs here"] == "cpu_features: needs amx, found none"
    assert "runs here" not in failed(compiles, compiles)


@pytest.mark.parametrize(
    ("new", "check", "reason"),
    [
        (with_config(programs=decodes((4, 256))), "programs", "longest context 512 -> 256"),
        (with_config(programs=decodes((1, 512))), "programs", "largest batch 4 -> 1"),
        (with_config(decoder=OTHER_END), "programs", "eos_token_ids (7,) -> (8,)"),
        (with_config(decoder=None, programs=()), "programs", "longest context 512 -> none"),
        (replace(OLD, defaults={"temperature": 0.2}), "sampling", ""),
        (replace(OLD, defaults={}), "sampling", ""),
        (replace(OLD, manifest=replace(MANIFEST, layers=LAYERS[:1])), "chat template", ""),
    ],
)
def test_what_callers_can_no_longer_ask_for_stops_it(new, check, reason):
    assert reason in failed(new)[check]


def test_a_function_with_other_arguments_stops_it_and_a_new_one_does_not():
    def having(*programs):
        return with_config(programs=(*CONFIG.programs, *programs))

    one = program("call", "score/b1", ("x: float32[1]",), batch=1)
    other = program("call", "score/b1", ("x: float32[2]",), batch=1)
    both = program("call", "score/b2", ("x: float32[2]",), batch=2)
    assert "score/b1" in failed(having(other), having(one))["programs"]
    assert failed(having(one, both), having(one)) == {}


def test_sizes_have_a_share_and_an_end_by_the_limits_of_the_release_before():
    def larger(size, **limits):
        found = replace(MANIFEST, layers=(replace(LAYERS[0], size=size), LAYERS[1]))
        return replace(OLD, manifest=found, limits=ReleaseLimits(**limits))

    assert failed(larger(10_900)) == {}
    assert failed(larger(11_200))["bytes to fetch"] == "expected at most 10 % more, found 12.0 %"
    assert "at most 500 B" in failed(larger(600, bundle_bytes=500))["bytes to fetch"]
    hungry = tuple(replace(each, memory=schema.Memory(1200, 0, 0, 0)) for each in CONFIG.programs)
    assert "20.0 %" in failed(with_config(programs=hungry))["memory of programs"]
    old = replace(OLD, limits=ReleaseLimits(p95_ms=10))
    new = replace(OLD, limits=ReleaseLimits(p95_ms=90, start_ms=5))
    checks, limits = compare_contents(old, new)
    assert limits == ReleaseLimits(p95_ms=10, start_ms=5)
    [noted] = [each for each in checks if each.outcome == "noted"]
    assert (noted.name, noted.old, noted.new) == ("slo: p95_ms", "10", "90")


def test_perplexity_is_compared_with_the_same_text_or_else_with_float32():
    def measured(stored, float32=9_000_000, text="a"):
        return with_config(accuracy=schema.Accuracy("int8", text, 9, float32, stored))

    assert failed(measured(9_080_000)) == {}
    assert "1.1 %" in failed(measured(9_100_000))["perplexity"]
    assert failed(measured(9_500_000), measured(9_500_000)) == {}
    assert "perplexity" in failed(measured(9_500_000, text="b"), measured(9_500_000))


NAMES = [each.name for each in fields(ReleaseLimits)]


def manifest(annotations):
    return ImageManifest(2, "", "", Descriptor("", "", 0), (), annotations)


def limits():
    shares = st.none() | st.integers(0, 2000).map(lambda each: f"{each / 10:g}%")
    numbers = st.none() | st.integers(1, 2**40)
    values = {name: shares if name in DEFAULT_SHARES else numbers for name in NAMES}
    return st.builds(ReleaseLimits, **values)


def test_limits_and_shares_that_no_build_writes_are_refused():
    numbers = ('{"p95_ms":"5"}', '{"max_slower":"5"}', '{"new":1}', '{ "p95_ms":5}')
    for text in ("", "[]", "ä", *numbers):
        with pytest.raises(RejectError, match="m: "):
            limits_of(manifest({SLO: text}), "m")
    for text in ("5", "5 %", "-5%", "five%", "1e3%", "5%\n", "%", "1" * 9 + "%"):
        with pytest.raises(ValueError, match="such as"):
            fraction_of(text)
    assert fraction_of("2.5%") == pytest.approx(0.025)
    assert limits_annotation(None) == limits_annotation(ReleaseLimits()) == {}
    assert described_limits(ReleaseLimits(start_ms=5)) == DEFAULT_SHARES | {"start_ms": 5}


@given(limits(), limits())
def test_a_bundle_carries_its_limits_and_the_stricter_one_of_each_name_holds(old, new):
    assert limits_of(manifest(limits_annotation(old)), "m") == old
    found, loosened = stricter(old, new)
    for name in NAMES:
        values = [getattr(each, name) for each in (old, new, found)]
        if name in DEFAULT_SHARES:
            was, now, holds = (each.share(name) for each in (old, new, found))
            assert holds == min(was, now)
            assert (name in loosened) == (now > was)
        else:
            given_values = [each for each in values[:2] if each is not None]
            choose = max if name == "tokens_per_second" else min
            assert values[2] == (choose(given_values) if given_values else None)
    assert stricter(old, old) == (old, ())
