"""Verdicts, axis by axis, and saved fingerprints."""

import builtins
import dataclasses
import json
import os
import platform

import pytest
from jaxlib import version as jaxlib_version
from tests.layouts import index_file, write_index

from prejit.runtime.__main__ import main
from prejit.runtime.base.typed_json import from_json, to_json
from prejit.runtime.errors import MismatchError, RejectError, StoreError
from prejit.runtime.format.bundle_schema import Index
from prejit.runtime.format.index_writing import encode_index
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import REQUIREMENT
from prejit.runtime.format.opening import match
from prejit.runtime.format.root import read_root
from prejit.runtime.loader import load
from prejit.runtime.machine.compare import compare
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


def test_mismatches_are_named_at_once_flag_by_flag():
    other = Fingerprint("tpu", "aarch64", ("avx",), "1", "", 1, 1)
    needs = dataclasses.replace(NEEDS, cpu_features=("avx", "gfni", "bmi2"))
    verdict = compare("t", needs, other)
    assert [axis.name for axis in verdict.mismatches] == [
        *("platform", "architecture", "cpu_features", "jaxlib")
    ]
    assert verdict.mismatches[2].found == "all but bmi2 gfni"
    assert verdict.reason().count("; ") == 3
    # Joined by spaces, these two would look the same.
    needs, machine = changed("cuda", "environment", (("A=1 B=2",), ("A=1", "B=2")))
    assert not compare("t", needs, machine).matches


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


def test_saved_ones_are_read_back(tmp_path, capsys):
    """As jq, an editor or a form of one's own leave them: it is a person's file, and none of a bundle's."""
    file = tmp_path / "machine.json"
    assert main(["fingerprint"]) == 0
    file.write_text(capsys.readouterr().out)
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


CPU = (
    Requirement(
        *("cpu", "x86_64", ("avx", "avx2"), "0.12.0"),
        device_count=2,
        xla_flags=("--xla_a=1",),
        environment=(),
        glibc="2.34",
    ),
    dataclasses.replace(MACHINE, xla_flags=("--xla_a=1",), glibc="2.36"),
)
L4 = {
    "plugin": "jax-cuda13-pjrt 0.12.0",
    "driver": "580.65.06",
    "device_kind": "NVIDIA L4",
    "compute_capability": "8.9",
    "device_count": 2,
    "device_memory_bytes": 10_000_000_000,
    "environment": ("NVIDIA_TF32_OVERRIDE=0",),
}
V5 = {
    "plugin": "libtpu 0.0.50",
    "device_kind": "TPU v5 lite",
    "device_count": 4,
    "topology": "2x2",
    "device_memory_bytes": 16_000_000_000,
}
CUDA = (
    Requirement("cuda", "x86_64", (), "0.12.0", **L4, cuda="13.0", xla_flags=()),
    dataclasses.replace(MACHINE, platform="cuda", cuda="13.0.96", **L4),
)
TPU = (
    Requirement("tpu", "x86_64", (), "0.12.0", **V5, xla_flags=(), environment=()),
    dataclasses.replace(MACHINE, platform="tpu", **V5),
)
BASES = {"cpu": CPU, "cuda": CUDA, "tpu": TPU}
SAME = object()
"""As in the base."""
CASES = {
    "cpu": {
        "platform": ((SAME, SAME), (SAME, "tpu")),
        "architecture": (("aarch64", "aarch64"), (SAME, "aarch64")),
        "cpu_features": ((("avx",), ("amx-int8", "avx")), (SAME, ("avx", "sse2"))),
        "jaxlib": (("0.12.0.1", "0.12.0.1"), (SAME, "0.12.0.1")),
        "device_count": ((8, None), None),
        "xla_flags": (((), ()), (SAME, ())),
        "environment": ((("A=1",), ("A=1",)), (SAME, ("A=1",))),
        "glibc": ((SAME, "2.100"), (SAME, "2.31")),
    },
    "cuda": {
        "platform": ((SAME, SAME), (SAME, "tpu")),
        "architecture": (("aarch64", "aarch64"), (SAME, "aarch64")),
        "cpu_features": ((SAME, ()), (("avx512f",), SAME)),
        "jaxlib": (("0.11.2", "0.11.2"), (SAME, "0.12")),
        "plugin": (("any 1.0", "any 1.0"), (SAME, "jax-cuda12-pjrt 0.12.0")),
        "cuda": ((SAME, "13.1"), (SAME, "12.9.79")),
        "driver": ((SAME, "1000.1"), (SAME, "580.65.05")),
        "device_kind": ((SAME, "NVIDIA L40S"), None),
        "compute_capability": (("12.0", "12.0"), (SAME, "9.0")),
        "device_count": ((SAME, 8), (SAME, 1)),
        "device_memory_bytes": ((SAME, 10_000_000_001), (SAME, 9_999_999_999)),
        "xla_flags": ((("--xla_a=1",), ("--xla_a=1",)), (SAME, ("--xla_a=1",))),
        "environment": (((), ()), (SAME, ())),
    },
    "tpu": {
        "platform": ((SAME, SAME), (SAME, "cpu")),
        "architecture": (("aarch64", "aarch64"), ("aarch64", SAME)),
        "cpu_features": ((SAME, ()), (("avx512f",), SAME)),
        "jaxlib": (("0.11.2", "0.11.2"), (SAME, "0.11.2")),
        "plugin": (("libtpu 0.0.51", "libtpu 0.0.51"), (SAME, "libtpu 0.0.51")),
        "device_kind": (("TPU v6 lite", "TPU v6 lite"), (SAME, "TPU v6 lite")),
        "device_count": ((1, SAME), (SAME, 1)),
        "topology": (("2x4", "2x4"), (SAME, "4x1")),
        "device_memory_bytes": ((None, None), (SAME, None)),
        "xla_flags": ((None, ("--xla_a=1",)), (SAME, ("--xla_a=1",))),
        "environment": ((None, ("A=1",)), (SAME, ("LIBTPU_INIT_ARGS=--a --b",))),
    },
}
"""Axes, each with (what is needed, what the machine has) that fits, and that falls back, if anything can."""
ELSEWHERE = {
    **{"plugin": "any 1.0", "cuda": "12.0", "driver": "1", "device_kind": "NVIDIA L4"},
    **{"compute_capability": "7.5", "topology": "2x2", "device_memory_bytes": 1, "glibc": "2.17"},
}
"""Values that a machine may have where the requirement says nothing of them."""
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
AXES = [field.name for field in dataclasses.fields(Requirement)]


def changed(platform, field, change):
    needs, machine = BASES[platform]
    needed, found = change
    if needed is not SAME:
        needs = dataclasses.replace(needs, **{field: needed})
    if found is not SAME:
        machine = dataclasses.replace(machine, **{field: found})
    return needs, machine


def axis_of(field):
    """The name in a verdict; the unit is in the values."""
    return field.removesuffix("_bytes")


def test_no_axis_is_forgotten():
    """A field that is added to Requirement needs a rule, a form, a place in Fingerprint and cases here."""
    assert list(REFUSED) == AXES
    assert all({*cases, *ELSEWHERE} == {*AXES} for cases in CASES.values())
    assert list(_AXIS_FORMS) == AXES
    assert set(AXES) <= {field.name for field in dataclasses.fields(Fingerprint)}
    seen = {
        axis.name for needs, machine in BASES.values() for axis in compare("t", needs, machine).axes
    }
    assert seen == set(map(axis_of, AXES))


@pytest.mark.parametrize("field", AXES)
@pytest.mark.parametrize("platform", BASES)
def test_what_fits_is_not_turned_away_and_what_does_not_falls_back(platform, field):
    fits, falls_back = CASES[platform].get(field, ((SAME, ELSEWHERE.get(field)), None))
    assert compare("t", *BASES[platform]).matches
    needs, machine = changed(platform, field, fits)
    verdict = compare("t", needs, machine)
    assert verdict.matches, verdict.reason()
    told = axis_of(field) in {axis.name for axis in verdict.axes}
    assert told == (getattr(needs, field) is not None)
    if falls_back is None:
        return
    verdict = compare("t", *changed(platform, field, falls_back))
    [axis] = verdict.mismatches
    assert axis.name == axis_of(field)
    assert axis.needed != axis.found, "both sides must show what differs"
    assert verdict.reason() == f"{axis.name}: needs {axis.needed}, found {axis.found}"


@pytest.mark.parametrize("field", REFUSED)
def test_an_axis_without_meaning_is_rejected(field, recipe, tmp_path):
    """It never falls back: who wrote it did not write a bundle. A saved fingerprint is held to the same."""
    path = recipe.only("cpu-host").write(tmp_path / "bundle")
    index = from_json(Index, index_file(path).read_bytes(), "")
    [descriptor] = index.manifests
    annotations = descriptor.annotations or {}
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


@pytest.mark.parametrize(
    ("axis", "needed", "found", "fits"),
    [
        *(("cuda", SAME, found, True) for found in ("13", "13.0", "13.2.1")),
        *(("cuda", SAME, found, False) for found in ("14.0", "12.9")),
        ("driver", "580.65.06", "580.9.1", False),
        ("driver", "580.65.06", None, False),
        ("driver", "580", "9" * 5000, True),
        ("driver", "0" * 5000 + "580", "580", True),
    ],
)
def test_versions_are_numbers(axis, needed, found, fits):
    """CUDA is compatible within a major version."""
    needs, machine = changed("cuda", axis, (needed, found))
    assert compare("t", needs, machine).matches == fits


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
    assert [verdict.target for verdict in caught.value.verdicts] == ["cpu-x86-64-v3", "cpu-host"]
    assert caught.value.exit_code == 3
    assert "[[target]]" in (caught.value.hint or "")
    kinds = {"cpu-host": "NVIDIA L40S", "cpu-x86-64-v3": "NVIDIA L4"}
    features = {"cpu-host": ("avx", "avx2"), "cpu-x86-64-v3": ()}

    def change(config):
        told = {"device_kind": kinds[config.target], "cpu_features": features[config.target]}
        return dataclasses.replace(config, requirement=dataclasses.replace(CUDA[0], **told))

    def order(kind):
        machine = dataclasses.replace(CUDA[1], device_kind=kind)
        return [name for name, matches in targets_of(path, machine) if matches]

    path = recipe.configured(change).write(tmp_path / "kinds")
    assert order("NVIDIA L4") == ["cpu-x86-64-v3", "cpu-host"]
    for kind in ("NVIDIA L40S", "NVIDIA RTX 4000"):
        assert order(kind) == ["cpu-host", "cpu-x86-64-v3"]
    features["cpu-host"] = ()
    path = recipe.configured(change).write(tmp_path / "equal")
    assert order("NVIDIA RTX 4000") == ["cpu-host", "cpu-x86-64-v3"], "as listed"
