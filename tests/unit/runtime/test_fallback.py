"""MISMATCH: programs compile from their portable form, loudly, once, and right."""

import dataclasses
import json
import re
from datetime import date

import numpy as np
import pytest

from prejit.runtime import fallback_counts, load
from prejit.runtime.base.files import digest_of
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.device import _jax_parts
from prejit.runtime.device.device import Device
from prejit.runtime.errors import (
    BuildError,
    FallbackWarning,
    MismatchError,
    RejectError,
    UsageError,
)
from prejit.runtime.fallback_reporting import expiry_notice
from prejit.runtime.machine.fingerprint import Fingerprint

XLA_SAYS_WHAT_IT_COMPILES = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "cpu_compiler=1"}
X = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)


def compiled_by_xla(process):
    return re.findall(r"cpu_compiler\.cc:\d+\] Compiling: (\S+)", process.stderr)


def v2_machine():
    """This machine without anything newer than SSE4.2."""
    machine = Fingerprint.current()
    newer = re.compile("avx|fma|f16c|bmi|vaes|vpclmul|gfni|movbe|lzcnt|xsave")
    kept = tuple(name for name in machine.cpu_features if not newer.match(name))
    assert kept != machine.cpu_features
    return dataclasses.replace(machine, cpu_features=kept)


@pytest.mark.parametrize(("version", "hint"), [("1.0.0", "a later jax"), ("99.0.0", "")])
def test_a_program_xla_cannot_read_is_named_and_hinted(
    settled_dir, monkeypatch, tmp_path, version, hint
):
    """A later jax may use operations that this one cannot read."""
    monkeypatch.setenv("PREJIT_RUNTIME_CACHE", str(tmp_path))
    monkeypatch.setattr(_jax_parts, "stablehlo_version", lambda: version)
    monkeypatch.setattr(_jax_parts, "parse_stablehlo", lambda portable: int("no StableHLO"))
    with pytest.warns(FallbackWarning):
        bundle = load(settled_dir, fingerprint=v2_machine())
    with pytest.raises(BuildError, match=r"blobs.*: score/b2: XLA cannot compile") as caught:
        bundle.call("score", x=X)
    assert (caught.value.hint or "").startswith(hint)
    assert bool(caught.value.hint) == bool(hint)


def test_a_mismatch_warns_of_its_axis_and_is_counted_and_told_once(settled_dir):
    loaded = load(settled_dir)
    with pytest.warns(FallbackWarning, match=r"none of the bundle's targets.*cpu_features: needs"):
        fallen_back = load(settled_dir, fingerprint=v2_machine())
    assert (loaded.matched, fallen_back.matched) == (True, False)
    ours, theirs = (bundle.call("score", x=X) for bundle in (loaded, fallen_back))
    np.testing.assert_allclose(theirs, ours, rtol=1e-5)
    assert theirs.dtype == ours.dtype
    assert [(r.program, r.source) for r in fallen_back.report()] == [
        *(("score/b2", "compiled"), ("score/b8", "unused"), ("nest", "unused")),
        ("tick", "unused"),
    ]
    assert [r.source for r in loaded.report()] == ["loaded", "unused", "unused", "unused"]
    told = []
    machine = dataclasses.replace(v2_machine(), jaxlib="0.9.9")
    before = fallback_counts()
    with pytest.warns(FallbackWarning):
        fallen_back = load(settled_dir, fingerprint=machine, on_fallback=told.append)
    [closest] = [v for v in fallen_back.verdicts if v.target == fallen_back.target]
    assert [axis.name for axis in told] == ["cpu_features", "jaxlib"]
    assert tuple(told) == closest.mismatches
    for name in ("cpu_features", "jaxlib"):
        assert fallback_counts()[name] == before.get(name, 0) + 1
    before = fallback_counts()
    unheard = {"on_mismatch": "error", "on_fallback": lambda axis: pytest.fail(str(axis))}
    load(settled_dir, **unheard)
    with pytest.raises(MismatchError):
        load(settled_dir, fingerprint=v2_machine(), **unheard)
    assert fallback_counts() == before
    with pytest.raises(FallbackWarning):  # its warning is an error here, and it counts
        load(settled_dir, fingerprint=v2_machine())
    assert fallback_counts()["cpu_features"] == before.get("cpu_features", 0) + 1
    with pytest.raises(UsageError, match="expected 'jit' or 'error', found 'ignore'"):
        load(settled_dir, on_mismatch="ignore")
    with pytest.raises(UsageError, match="expected 'wait' or 'smaller', found 'hope'"):
        load(settled_dir, while_compiling="hope")


def test_a_declared_machine_lends_this_one_no_instructions(recipe, tmp_path):
    """A saved fingerprint of a better machine, and code that would die of SIGILL here."""
    machine = Fingerprint.current()

    def change(config):
        needs = dataclasses.replace(config.requirement, cpu_features=("avx10.9", "sse2"))
        return dataclasses.replace(config, requirement=needs)

    path = recipe.configured(change).write(tmp_path / "b")
    better = dataclasses.replace(machine, cpu_features=("avx10.9", *machine.cpu_features))
    with pytest.warns(FallbackWarning, match=r"cpu_features: needs .*avx10\.9"):
        loaded = load(path, fingerprint=better)
    assert not loaded.matched
    with pytest.raises(MismatchError, match=r"avx10\.9"):
        load(path, fingerprint=better, on_mismatch="error")


@pytest.mark.parametrize("axis", ["cpu_features", "platform"])
def test_error_compiles_nothing(axis, settled_dir, monkeypatch):
    on_tpu = dataclasses.replace(Fingerprint.current(), platform="tpu")
    machine = {"cpu_features": v2_machine(), "platform": on_tpu}[axis]
    monkeypatch.setattr(Device, "__init__", lambda *_: pytest.fail("made a device"))
    with pytest.raises(MismatchError, match=f"{axis}: needs") as caught:
        load(settled_dir, on_mismatch="error", fingerprint=machine)
    assert caught.value.exit_code == 3
    assert caught.value.code == "mismatch"
    assert {m.name for v in caught.value.verdicts for m in v.mismatches} == {axis}


RUN_ALL = """
import json, sys, warnings
import numpy as np
from prejit.runtime import Fingerprint, load
warnings.simplefilter("ignore")
machine = Fingerprint.read(sys.argv[2]) if len(sys.argv) > 2 else None
bundle = load(sys.argv[1], fingerprint=machine)
bundle.prepare()
x = np.linspace(-1, 1, 2 * 16, dtype=np.float32).reshape(2, 16)
y = bundle.call("score", x=x)
print(json.dumps({"y": y.tolist(), "how": {r.program: r.source for r in bundle.report()}}))
"""


@pytest.fixture
def foreign(tmp_path):
    path = tmp_path / "foreign.json"
    path.write_bytes(to_json(v2_machine()))
    return path


def test_a_second_start_compiles_nothing(settled_dir, foreign, run_python):
    first, second, matching = (
        run_python(RUN_ALL, settled_dir, *machine, env=XLA_SAYS_WHAT_IT_COMPILES)
        for machine in ([foreign], [foreign], [])
    )
    assert len(compiled_by_xla(first)) == 4
    assert compiled_by_xla(second) == []
    assert compiled_by_xla(matching) == []
    said = [json.loads(process.stdout) for process in (first, second, matching)]
    for found, source in zip(said, ("compiled", "kept", "loaded"), strict=True):
        assert set(found["how"].values()) == {source}
        np.testing.assert_allclose(found["y"], said[2]["y"], rtol=1e-5)


def fallen_back(path):
    with pytest.warns(FallbackWarning):
        return load(path, fingerprint=v2_machine())


@pytest.mark.parametrize("part", ["portable", "executable"])
def test_a_damaged_program_is_rejected_late(part, recipe, tmp_path):
    """Not a mismatch, not a failed build: the frame is wrong although the layer's digest is right."""

    def change(config):
        first = config.programs[0]
        damaged = dataclasses.replace(getattr(first, part), raw_digest=digest_of(b"other"))
        changed = dataclasses.replace(first, **{part: damaged})
        return dataclasses.replace(config, programs=(changed, *config.programs[1:]))

    path = recipe.configured(change).write(tmp_path / "b")
    if part == "portable":
        assert load(path).call("score", x=X).shape == (2, 4)
        loaded = fallen_back(path)
    else:
        loaded = load(path)
        loaded._programs.prepare("score/b2", "tick")  # in a thread
    with pytest.raises(RejectError, match="expected sha256"):
        loaded.call("score", x=X)
    assert loaded.call("tick") == 7


@pytest.mark.parametrize(
    ("today", "says"),
    [
        ("2026-11-13", None),
        (
            "2026-11-14",
            "promises that its later versions read portable programs of jax 0.10.2 until 2026-12-14",
        ),
        (
            "2026-12-15",
            "promised that its later versions read portable programs of jax 0.10.2 until 2026-12-14",
        ),
    ],
)
def test_somebody_is_told_before_portable_programs_expire(today, says):
    said = expiry_notice("0.10.2", "2026-12-14", date.fromisoformat(today))
    assert (said is None) == (says is None)
    assert (says or "") in (said or "")
    assert expiry_notice("0.99.0", None, date.fromisoformat(today)) is None
