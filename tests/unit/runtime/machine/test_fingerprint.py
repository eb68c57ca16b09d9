"""Verdicts, axis by axis, and saved fingerprints."""

import builtins
import dataclasses
import json
import os
import platform

import pytest
from jaxlib import version as jaxlib_version
from tests.layouts import index_file, write_index

from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import MismatchError, RejectError, StoreError
from prejit.runtime.format.bundle_schema import Index
from prejit.runtime.format.index_writing import encode_index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import REQUIREMENT
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.compare import _RULES, compare
from prejit.runtime.machine.fingerprint import (
    _AXIS_FORMS,
    CPU_FEATURES,
    Fingerprint,
    Requirement,
    effective_xla_flags,
)

MACHINE = Fingerprint(
    platform="cpu",
    architecture="x86_64",
    cpu_features=("avx", "avx2", "fma", "sse2"),
    jaxlib="0.12.0",
    cpu_model="Some CPU",
    cpu_count=4,
    memory_bytes=1 << 34,
)
NEEDS = Requirement("cpu", "x86_64", ("avx", "avx2"), "0.12.0")


def test_features_are_told_as_the_kernel_tells_them():
    machine = Fingerprint.current()
    assert machine == Fingerprint.current(), "it must not change from one look to the next"
    assert (machine.platform, machine.architecture) == ("cpu", platform.machine())
    assert machine.cpu_count == len(os.sched_getaffinity(0))
    assert list(machine.cpu_features) == sorted(set(machine.cpu_features))
    assert set(machine.cpu_features) <= CPU_FEATURES.keys()
    assert machine.jaxlib == jaxlib_version.__version__
    flags = list(CPU_FEATURES.values())
    assert {flag for flag in flags if flags.count(flag) > 1} == {"sse4_2"}, "crc32 is part of it"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_features_are_those_of_the_flags_line(tmp_path, monkeypatch):
    real, path = builtins.open, tmp_path / "cpuinfo"

    def opened(name, *args, **kwargs):
        return real(path if name == "/proc/cpuinfo" else name, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    assert Fingerprint.current().cpu_features == ()  # there is none yet
    path.write_text("""processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: Some: CPU
flags\t\t: fpu lm sse sse2 pni abm sse4_2 avx512_vnni unheard_of

processor\t: 1
model name\t: Another
flags\t\t: fpu avx2
""")
    machine = Fingerprint.current()
    features = "64bit avx512vnni crc32 lzcnt sse sse2 sse3 sse4.2"
    assert machine.cpu_features == (*features.split(),)
    assert machine.cpu_model == "Some: CPU"


def test_saved_ones_are_read_back(tmp_path, said):
    """As jq, an editor or a form of one's own leave them: it is a person's file, and none of a bundle's."""
    file = tmp_path / "machine.json"
    file.write_text(said("fingerprint"))
    assert Fingerprint.read(file) == Fingerprint.current()
    plain = json.loads(to_json(MACHINE))
    backwards = dict(reversed(plain.items())) | {"cpu_features": plain["cpu_features"][::-1]}
    for text in (
        to_json(MACHINE).decode() + "\n\n",
        json.dumps(plain, indent="\t").replace("\n", "\r\n"),
        f"\n {json.dumps(backwards)}\n\n",
        "\ufeff" + json.dumps(plain, ensure_ascii=False),
    ):
        file.write_text(text, encoding="utf-8")
        assert Fingerprint.read(file) == MACHINE


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[]", b"garbage", b"[" * 100_000),
        to_json(MACHINE).replace(b'"platform"', b'"platfrom"'),
        to_json(MACHINE).replace(b"{", b'{"jaxlib":"0.0.1",'),
        to_json(MACHINE).replace(b"17179869184", b"1" + b"0" * 9000),
        to_json(MACHINE).replace(b'"Some CPU"', b"[" * 900 + b"]" * 900),
    ],
)
def test_what_is_no_fingerprint_says_how_to_get_one(content, tmp_path):
    (tmp_path / "machine.json").write_bytes(content)
    with pytest.raises(RejectError) as caught:
        Fingerprint.read(tmp_path / "machine.json")
    assert caught.value.path == str(tmp_path / "machine.json")
    assert "prejit fingerprint >" in (caught.value.hint or "")
    assert "__init__" not in str(caught.value)
    assert content != b"{}" or "Fingerprint: expected the key 'platform'" in str(caught.value)


CASES = {
    "platform": ("tpu", ["tpu"], ["cpu", "cuda"]),
    "architecture": ("x86_64", ["x86_64"], ["aarch64"]),
    "cpu_features": (("avx", "avx2"), [("amx-int8", "avx", "avx2")], [("avx", "sse2"), ()]),
    "jaxlib": ("0.12.0", ["0.12.0"], ["0.12", "0.12.0.1"]),
    "plugin": ("libtpu 0.0.50", ["libtpu 0.0.50"], ["libtpu 0.0.51", None]),
    "cuda": ("13.0", ["13", "13.0.96", "13.2.1"], ["14.0", "12.9.79", None]),
    "driver": ("580.65.06", ["580.65.06", "1000.1", "9" * 5000], ["580.65.05", "580.9.1", None]),
    "device_kind": ("TPU v5 lite", ["TPU v5 lite"], ["TPU v6 lite", None]),
    "compute_capability": ("8.9", ["8.9"], ["9.0", None]),
    "device_count": (2, [2, 8], [1, None]),
    "topology": ("2x2", ["2x2"], ["4x1", None]),
    "device_memory_bytes": (10**10, [10**10, 10**10 + 1], [10**10 - 1, 9 * 10**9, None]),
    "xla_flags": (("--xla_a=1",), [("--xla_a=1",)], [(), ("--xla_a=1", "--xla_b=1")]),
    "environment": (("A=1",), [("A=1",)], [("A=1", "B=2"), ()]),
    "glibc": ("2.34", ["2.34", "2.100"], ["2.31", None]),
}
"""Axes, each with what is needed, values of machines that fit, and those that fall back."""
AXES = [field.name for field in dataclasses.fields(Requirement)]
ASKING = Requirement(**{field: needed for field, (needed, *_) in CASES.items()})
FITTING = dataclasses.replace(MACHINE, **{field: fits[0] for field, (_, fits, _) in CASES.items()})
REFUSED = {
    # JSON values that nothing could mean
    "platform": ["CPU", "", "c p u", 1],
    "architecture": ["X86", "", "x86-64"],
    "cpu_features": [["AVX"], [""], ["avx,avx2"], "avx"],
    "jaxlib": ["latest", "", "v0.12", "0.12 "],
    "plugin": ["libtpu", "libtpu  0.0.50", "0.0.50"],
    "cuda": ["cu13", "", "13."],
    "driver": ["r580", "", 580],
    "device_kind": ["", "NVIDIA\nL4", "\u00e9"],
    "compute_capability": ["9", "sm_90", "9.0a", "\u0669.\u0660"],
    "device_count": [0, -1, "2", 1.5, True],
    "topology": ["x", "2x0", "2x", "2*2"],
    "device_memory_bytes": [-1, "16 GB", 1.5],
    "xla_flags": [["xla_a"], ["-xla_a"], ["--xla a"], ["--"], "--xla_a"],
    "environment": [["a=1"], ["A"], ["=1"], ["A=1\nB=2"]],
    "glibc": ["2", "", "glibc 2.36", "2.36 ", 2],
}


def compared(**changes):
    """Return the verdict where axes have other values, each with what is needed and found."""
    needs = dataclasses.replace(ASKING, **{axis: needed for axis, (needed, _) in changes.items()})
    machine = dataclasses.replace(FITTING, **{axis: found for axis, (_, found) in changes.items()})
    return compare("t", needs, machine)


def test_no_axis_is_forgotten():
    """A field that is added to Requirement needs a rule, a form, a place in Fingerprint and cases here."""
    assert list(CASES) == list(REFUSED) == list(_AXIS_FORMS) == AXES
    assert set(AXES) <= {field.name for field in dataclasses.fields(Fingerprint)}
    assert [axis.name for axis in compared().axes] == [f.removesuffix("_bytes") for f in _RULES]
    assert set(_RULES) == set(AXES)


@pytest.mark.parametrize("field", AXES)
def test_what_fits_is_not_turned_away_and_what_does_not_falls_back(field):
    needed, fits, falls_back = CASES[field]
    name = field.removesuffix("_bytes")  # the unit is in the values
    for found in fits:
        assert compared(**{field: (needed, found)}).matches, found
    for found in falls_back:
        verdict = compared(**{field: (needed, found)})
        [axis] = verdict.mismatches
        assert axis.name == name
        assert axis.needed != axis.found, "both sides must show what differs"
        assert verdict.reason() == f"{name}: needs {axis.needed}, found {axis.found}"
        if Requirement.__dataclass_fields__[field].default is None:  # it may say nothing of it
            verdict = compared(**{field: (None, found)})
            assert verdict.matches
            assert name not in {axis.name for axis in verdict.axes}


def test_platforms_differ_and_numbers_have_any_length():
    gpu, cpu = {"platform": ("cuda", "cuda")}, {"platform": ("cpu", "cpu")}
    assert compared(**gpu, device_kind=("NVIDIA L4", "NVIDIA L40S")).matches
    assert not compared(**gpu, device_count=(2, 1)).matches
    assert compared(**cpu, device_count=(8, None)).matches  # virtual devices
    assert compared(driver=("0" * 5000 + "580", "580")).matches
    assert compared(driver=("580", "580.1")).matches
    assert compared(xla_flags=((), ()), cpu_features=((), ())).matches
    assert not compared(xla_flags=((), ("--xla_a=1",))).matches
    # Joined by spaces, these two would look the same.
    assert not compared(environment=(("A=1 B=2",), ("A=1", "B=2"))).matches


@pytest.mark.parametrize("field", REFUSED)
def test_an_axis_without_meaning_is_rejected(field, recipe, tmp_path):
    """It never falls back: who wrote it did not write a bundle. A saved fingerprint is held to the same."""
    path = recipe.only("cpu-host").write(tmp_path / "bundle")
    [descriptor] = from_json(Index, index_file(path).read_bytes(), "").manifests
    annotations = descriptor.annotations
    needs, machine = json.loads(annotations[REQUIREMENT]), json.loads(to_json(MACHINE))
    saved = tmp_path / "machine.json"
    for value in REFUSED[field]:
        forged = {**annotations, REQUIREMENT: to_json({**needs, field: value}).decode()}
        content = encode_index("example", (dataclasses.replace(descriptor, annotations=forged),))
        file = write_index(path, content)
        saved.write_bytes(to_json({**machine, field: value}))
        for at in (file, saved):
            with pytest.raises(RejectError, match=rf"\b{field}\b.*: expected") as caught:
                Fingerprint.read(at) if at == saved else targets_of(path, MACHINE)
            assert caught.value.path == str(at)


def test_flags_are_in_the_fingerprint_but_those_that_change_nothing(monkeypatch, tmp_path):
    for flags, effective in {
        "": (),
        "--xla_b=1 --xla_a=2": ("--xla_a=2", "--xla_b=1"),
        "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8": (),
        "--xla_cpu_max_isa=AVX2 -v noise": (),
    }.items():
        assert effective_xla_flags(flags) == effective
    monkeypatch.setenv("XLA_FLAGS", "--xla_b=1 --xla_dump_to=x")
    assert Fingerprint.current().xla_flags == ("--xla_b=1",)
    (tmp_path / "flags").write_text("--xla_a=1\n--xla_b=1\n")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "flags"))
    assert Fingerprint.current().xla_flags == ("--xla_a=1", "--xla_b=1")
    monkeypatch.setenv("XLA_FLAGS", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="XLA_FLAGS names"):
        Fingerprint.current()


def targets_of(path, machine):
    with Layout(path) as layout:
        root = read_root(layout)
        return [(t.name, t.verdict.matches) for t in match(root, machine)]


def test_the_target_that_uses_most_or_is_tuned_for_the_device_goes_first(recipe, tmp_path):
    """The poorer target is listed first."""
    needs = {"cpu-host": ("avx",), "cpu-x86-64-v3": ("avx", "avx2")}

    def change(config):
        needed = dataclasses.replace(NEEDS, cpu_features=needs[config.target])
        return dataclasses.replace(config, requirement=needed)

    path = recipe.configured(change).write(tmp_path / "two-levels")
    assert targets_of(path, MACHINE) == [("cpu-x86-64-v3", True), ("cpu-host", True)]
    poorer = dataclasses.replace(MACHINE, cpu_features=("avx",))
    assert targets_of(path, poorer) == [("cpu-x86-64-v3", False), ("cpu-host", True)]
    machine = dataclasses.replace(MACHINE, cpu_features=(), jaxlib="9")
    with pytest.raises(MismatchError) as caught:
        load(path, on_mismatch="error", fingerprint=machine)
    message = str(caught.value)
    for part in ("cpu-host", "cpu-x86-64-v3", "all but avx", "avx2", "needs 0.12.0, found 9"):
        assert part in message
    assert caught.value.verdicts[0].mismatches[0].found == "all but avx avx2"
    assert [verdict.target for verdict in caught.value.verdicts] == ["cpu-x86-64-v3", "cpu-host"]
    assert caught.value.exit_code == 3
    assert "[[target]]" in (caught.value.hint or "")
    kinds = {"cpu-host": "NVIDIA L40S", "cpu-x86-64-v3": "NVIDIA L4"}

    def order(kind, **features):
        def change(config):
            told = {"device_kind": kinds[config.target], "cpu_features": ()}
            if config.target == "cpu-host":
                told |= features
            needs = dataclasses.replace(ASKING, platform="cuda", **told)
            return dataclasses.replace(config, requirement=needs)

        machine = dataclasses.replace(FITTING, platform="cuda", device_kind=kind)
        found = targets_of(recipe.configured(change).write(tmp_path / "kinds"), machine)
        return [name for name, matches in found if matches]

    both = ("avx", "avx2")
    assert order("NVIDIA L4", cpu_features=both) == ["cpu-x86-64-v3", "cpu-host"]
    for kind in ("NVIDIA L40S", "NVIDIA RTX 4000"):
        assert order(kind, cpu_features=both) == ["cpu-host", "cpu-x86-64-v3"]
    assert order("NVIDIA RTX 4000") == ["cpu-host", "cpu-x86-64-v3"], "as listed"
