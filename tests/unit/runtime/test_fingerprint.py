"""Verdicts, axis by axis, and saved fingerprints."""

from __future__ import annotations

import ast
import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import pytest

from prejit.runtime import bundle, fingerprint, loader
from prejit.runtime.bundle import Requirement
from prejit.runtime.errors import FallbackWarning, MismatchError, RejectError, StoreError
from prejit.runtime.fingerprint import CPU_FEATURES, Fingerprint, compare
from prejit.runtime.layout import Layout

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


@pytest.mark.parametrize(
    ("axis", "needs", "machine"),
    [
        ("platform", {"platform": "cuda"}, {}),
        ("platform", {}, {"platform": "tpu"}),
        ("platform", {}, {"platform": "CPU"}),
        ("architecture", {"architecture": "aarch64"}, {}),
        ("architecture", {}, {"architecture": "aarch64"}),
        ("cpu_features", {"cpu_features": ("avx512f",)}, {}),
        ("cpu_features", {}, {"cpu_features": ("avx", "sse2")}),
        ("cpu_features", {}, {"cpu_features": ()}),
        ("jaxlib", {"jaxlib": "0.11.2"}, {}),
        ("jaxlib", {}, {"jaxlib": "0.12.0.1"}),
        ("jaxlib", {}, {"jaxlib": "0.12.0.dev20260101"}),
        ("jaxlib", {}, {"jaxlib": "0.12"}),
    ],
)
def test_a_mismatch_names_its_axis_and_both_sides(
    axis: str, needs: dict[str, Any], machine: dict[str, Any]
) -> None:
    assert compare("t", NEEDS, MACHINE).matches
    wants = dataclasses.replace(NEEDS, **needs)
    verdict = compare("t", wants, dataclasses.replace(MACHINE, **machine))
    assert not verdict.matches
    [found] = verdict.mismatches
    assert found.name == axis
    assert found.needed != found.found
    assert verdict.reason().startswith(f"{axis}: needs ")
    assert found.needed in verdict.reason()
    assert found.found in verdict.reason()
    assert len(verdict.axes) == 4, "a verdict shows every axis, also those that match"


@pytest.mark.parametrize(
    ("needs", "machine"),
    [
        ({}, {}),
        ({"cpu_features": ()}, {}),
        ({"cpu_features": ("avx2", "avx")}, {}),
        ({"cpu_features": ("avx", "avx2", "fma", "sse2")}, {}),
        ({}, {"cpu_features": ("amx-int8", "avx", "avx2", "avx512f")}),
        ({}, {"cpu_model": "Another CPU"}),
        ({}, {"cpu_count": 1}),
        ({}, {"memory_bytes": 1}),
    ],
)
def test_what_does_not_matter_does_not_mismatch(
    needs: dict[str, Any], machine: dict[str, Any]
) -> None:
    wants = dataclasses.replace(NEEDS, **needs)
    verdict = compare("t", wants, dataclasses.replace(MACHINE, **machine))
    assert verdict.matches
    assert verdict.mismatches == ()
    assert verdict.reason() == ""


def test_all_axes_that_mismatch_are_named_at_once() -> None:
    other = Fingerprint("tpu", "aarch64", (), "1", "", 1, 1)
    verdict = compare("t", NEEDS, other)
    assert [axis.name for axis in verdict.mismatches] == [
        *("platform", "architecture", "cpu_features", "jaxlib")
    ]
    assert verdict.reason().count("; ") == 3


def test_missing_features_are_listed_and_no_others() -> None:
    verdict = compare(
        "t", dataclasses.replace(NEEDS, cpu_features=("avx", "gfni", "bmi2")), MACHINE
    )
    [axis] = verdict.mismatches
    assert axis.found == "all but bmi2 gfni"


def test_this_machine_is_told_as_the_kernel_tells_it() -> None:
    machine = Fingerprint.current()
    assert machine == Fingerprint.current(), "it must not change from one look to the next"
    assert machine.platform == "cpu"
    assert machine.architecture == platform.machine()
    assert machine.cpu_count == len(os.sched_getaffinity(0))
    assert list(machine.cpu_features) == sorted(set(machine.cpu_features))
    assert set(machine.cpu_features) <= CPU_FEATURES.keys()
    from jaxlib import version

    assert machine.jaxlib == version.__version__


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_features_are_those_of_the_flags_line(tmp_path: Path, monkeypatch: Any) -> None:
    import builtins

    text = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: Some: CPU
flags\t\t: fpu lm sse sse2 pni abm sse4_2 avx512_vnni unheard_of

processor\t: 1
model name\t: Another
flags\t\t: fpu avx2
"""
    (tmp_path / "cpuinfo").write_text(text)
    real = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        return real(tmp_path / "cpuinfo" if path == "/proc/cpuinfo" else path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    machine = Fingerprint.current()
    assert machine.cpu_features == (
        *("64bit", "avx512vnni", "crc32", "lzcnt", "sse", "sse2", "sse3", "sse4.2"),
    )
    assert machine.cpu_model == "Some: CPU"


def test_a_machine_without_proc_has_no_features(monkeypatch: Any, tmp_path: Path) -> None:
    import builtins

    real = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        return real(tmp_path / "none" if path == "/proc/cpuinfo" else path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)
    assert Fingerprint.current().cpu_features == ()
    assert not compare("t", NEEDS, Fingerprint.current()).matches


def test_no_two_features_share_a_flag_by_mistake() -> None:
    flags = list(CPU_FEATURES.values())
    shared = {flag for flag in flags if flags.count(flag) > 1}
    assert shared == {"sse4_2"}, "crc32 is part of SSE4.2; no others are"
    assert list(CPU_FEATURES) == sorted(CPU_FEATURES)


def test_a_saved_fingerprint_is_read_back(tmp_path: Path, prejit: Any) -> None:
    for text in (
        prejit("fingerprint").stdout,
        bundle.to_json(MACHINE).decode(),
        bundle.to_json(MACHINE).decode() + "\n\n",
    ):
        (tmp_path / "machine.json").write_text(text)
        expected = MACHINE if "Some CPU" in text else Fingerprint.current()
        assert Fingerprint.read(tmp_path / "machine.json") == expected


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"{}", b"[]", b"garbage", b"[" * 100_000),
        bundle.to_json(MACHINE).replace(b'"cpu_count":4', b'"cpu_count":"4"'),
        bundle.to_json(MACHINE).replace(b'"cpu_count":4,', b""),
        bundle.to_json(MACHINE).replace(b'"platform"', b'"platfrom"'),
    ],
)
def test_what_is_no_fingerprint_says_how_to_get_one(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "machine.json").write_bytes(content)
    with pytest.raises(RejectError) as caught:
        Fingerprint.read(tmp_path / "machine.json")
    assert caught.value.path == str(tmp_path / "machine.json")
    assert "prejit fingerprint >" in (caught.value.hint or "")


def test_a_fingerprint_that_cannot_be_read_is_a_store_error(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreError, match="cannot read a fingerprint"):
            Fingerprint.read(path)


# Which target a machine loads


def targets_of(path: Path, machine: Fingerprint) -> list[tuple[str, bool]]:
    with Layout(path) as layout:
        index, _ = loader.open_index(layout)
        return [(t.name, t.verdict.matches) for t in loader.match(layout, index, machine)]


@pytest.fixture
def two_levels(recipe: Any, tmp_path: Path) -> Path:
    """A bundle whose targets say that they need avx, and avx and avx2 (the poorer is listed first)."""
    needs = {"cpu-host": ("avx",), "cpu-x86-64-v3": ("avx", "avx2")}

    def change(config: Any) -> Any:
        return dataclasses.replace(
            config,
            requirement=dataclasses.replace(NEEDS, cpu_features=needs[config.target]),
        )

    return recipe.configured(change).write(tmp_path / "two-levels")


def test_the_target_that_uses_most_of_the_machine_is_taken(two_levels: Path) -> None:
    assert targets_of(two_levels, MACHINE) == [("cpu-x86-64-v3", True), ("cpu-host", True)]
    poorer = dataclasses.replace(MACHINE, cpu_features=("avx",))
    assert targets_of(two_levels, poorer) == [("cpu-x86-64-v3", False), ("cpu-host", True)]


def test_a_mismatch_of_every_target_is_told_of_every_target(two_levels: Path) -> None:
    machine = dataclasses.replace(MACHINE, cpu_features=(), jaxlib="9")
    with pytest.raises(MismatchError) as caught:
        loader.load(two_levels, on_mismatch="error", fingerprint=machine)
    message = str(caught.value)
    for part in ("cpu-host", "cpu-x86-64-v3", "all but avx", "avx2", "needs 0.12.0, found 9"):
        assert part in message
    assert [verdict.target for verdict in caught.value.verdicts] == ["cpu-x86-64-v3", "cpu-host"]
    assert caught.value.exit_code == 3
    assert "[[target]]" in (caught.value.hint or "")


def test_the_fallback_warning_names_the_axis_of_the_closest_target(two_levels: Path) -> None:
    machine = dataclasses.replace(MACHINE, cpu_features=("avx",), jaxlib="9")
    with pytest.warns(FallbackWarning, match="closest is cpu-host: jaxlib: needs 0.12.0, found 9"):
        loaded = loader.load(two_levels, fingerprint=machine)
    assert not loaded.matched
    assert loaded.target == "cpu-host"


# What a format part may import


@pytest.mark.parametrize(
    "module", ["bundle", "errors", "fingerprint", "layout", "receipt", "verify"]
)
def test_the_format_part_imports_no_jax(module: str, run_python: Any) -> None:
    run_python(
        f"import sys, prejit.runtime.{module}\n"
        "heavy = {'jax', 'jaxlib', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )


@pytest.mark.parametrize("command", [["fingerprint"], ["explain"], ["inspect"], ["verify"]])
def test_commands_that_run_nothing_import_no_jax(
    command: list[str], settled_dir: Path, run_python: Any
) -> None:
    argv = command if command == ["fingerprint"] else [*command, str(settled_dir)]
    run_python(
        "import sys\n"
        "from prejit.runtime.__main__ import main\n"
        f"status = main({argv!r})\n"
        # jaxlib.version is how the version is told: jaxlib itself is small, its core is not.
        "heavy = {'jax', 'jaxlib._jax', 'numpy', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)"
    )


def test_the_cpu_features_table_is_plain_data() -> None:
    """Every name as LLVM spells it: lower case, digits, dots and dashes."""
    source = Path(fingerprint.__file__).read_text()
    assert ast.parse(source)
    for name, flag in CPU_FEATURES.items():
        assert name == name.lower().strip("+ ")
        assert flag == flag.lower()
        assert "_" not in name
