"""Compile keys: everything that decides an executable is in them, and nothing else."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax import export
from tests.unit.compiler.toolchains import HOST, L4, V3, for_gpu, new, old

from prejit.compiler.compile import executable_keys
from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.compile.executable_keys import executable_key
from prejit.compiler.targets import cpu_count, toolchain
from prejit.compiler.targets.build_host import host_cpu
from prejit.compiler.targets.target_classes import catalogue
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain, Tuned, gpu_config

SOURCE = Source("sha256:0", ("cpu",))


def ingredients(
    toolchain: Toolchain, environ: Mapping[str, str], source: Source = SOURCE
) -> tuple[tuple[str, str], ...]:
    return executable_key("name", toolchain, source, environ).ingredients


def test_what_decides_an_executable_is_in_its_key_and_nothing_else() -> None:
    sources = [
        SOURCE,
        replace(SOURCE, program="sha256:1"),
        replace(SOURCE, platforms=("cpu", "tpu")),
    ]
    assert len({ingredients(new(V3), {}, source) for source in sources}) == len(sources)
    assert dict(ingredients(new(V3), {}))["cpu"] == "x86-64-v3"
    for name in ("cpu", "cpu_features"):
        found = dict(ingredients(old(V3), {}))[name]
        assert (
            found
            == dict(ingredients(old(HOST), {}))[name]
            == dict(ingredients(new(HOST), {}))[name]
        )
    other = Toolchain(V3, ("python",), (("jax", "0.12.1"), ("jaxlib", "0.12.0")))
    assert ingredients(other, {}) == ingredients(new(V3), {})
    newer = replace(for_gpu(), versions=(("jax", "0.12.1"), *for_gpu().versions[1:]))
    assert ingredients(newer, {}) != ingredients(for_gpu(), {}), "jax describes its devices"
    found = [new(HOST), *(new(on) for on in catalogue().values() if on.platform == "cpu")]
    found += [for_gpu(on) for on in catalogue().values() if on.platform == "cuda"]
    assert len({ingredients(one, {}) for one in found}) == len(found)
    versions = (("jax", "0.12.0"), ("jaxlib", "0.12.0"), ("libtpu", "0.0.51"))
    tpu = Toolchain(target("tpu-v5e"), ("python",), versions, isolated=True)
    assert ingredients(tpu, {"LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}) != ingredients(tpu, {})
    assert ingredients(new(V3), {"LIBTPU_INIT_ARGS": "--xla_tpu_a=1"}) == ingredients(new(V3), {})
    one = for_gpu()
    assert ingredients(replace(one, command=("other",)), {}) == ingredients(one, {})
    versions = (*one.versions[:2], ("jaxlib", "0.12.0.1"))
    assert ingredients(replace(one, versions=versions), {}) != ingredients(one, {})


def test_cpus_of_one_kind_have_one_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One kind has many names: AMD EPYC 9R14, AMD EPYC 9654."""
    lines = Path("/proc/cpuinfo").read_text()
    found = []
    for name, family in (("EPYC 1", "25"), ("EPYC 2", "25"), ("EPYC 1", "26")):
        described = tmp_path / f"cpuinfo-{name}-{family}"
        other = re.sub(r"(model name\s*:).*", rf"\1 {name}", lines)
        described.write_text(re.sub(r"(cpu family\s*:).*", rf"\1 {family}", other))
        with monkeypatch.context() as patch:
            patch.setattr(executable_keys, "host_cpu", lambda at=described: host_cpu(at))
            found.append(ingredients(new(HOST), {}))
            assert "EPYC" not in str(found[-1])
    assert found[0] == found[1] != found[2]


def test_the_cpus_of_the_target_count_or_those_that_xla_sees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = (replace(HOST, cpus=n) for n in (1, 16))
    assert ingredients(new(few), {}) != ingredients(new(many), {}) == ingredients(new(HOST), {})
    before = ingredients(new(many), {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(64)))
    assert ingredients(new(many), {}) == before
    monkeypatch.setattr(cpu_count, "_can_answer", lambda: False)
    for cores in (2, 8):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, n=cores: set(range(n)))
        assert dict(ingredients(new(HOST), {}))["cpus"] == str(cores)
        assert dict(ingredients(new(replace(HOST, cpus=2)), {}))["cpus"] == "2"


def test_a_worker_for_cpus_imports_no_jax(tmp_path: Path, run_python: Any) -> None:
    """This is why jax is in no key of theirs."""
    portable = tmp_path / "portable"
    exported = export.export(jax.jit(jax.numpy.sin), platforms=["cpu"])
    portable.write_bytes(exported(jax.ShapeDtypeStruct((8,), "float32")).mlir_module_serialized)
    run_python(
        "import sys\n"
        "from pathlib import Path\n"
        "from prejit.compiler.compile.worker import worker_requests, worker_compile, xla\n"
        "xla.import_compiler('cpu')\n"
        f"program = worker_compile.with_libraries(Path({str(portable)!r}).read_bytes(), {{}})\n"
        "for devices in (1, 2):\n"
        "    made = worker_compile.compile_program(program, xla.CompileFor(device_count=devices))\n"
        "    worker_compile.compress(made.serialized)\n"
        "found = {name for name in sys.modules if name.partition('.')[0] in ('jax', 'flax')}\n"
        "assert not found, found"
    )


def test_flags_count_unless_they_print_but_not_their_order(tmp_path: Path) -> None:
    both = {"XLA_FLAGS": "--xla_b=1 --xla_a=1", "HOME": "/a"}
    turned = {"XLA_FLAGS": "--xla_a=1 --xla_dump_to=/tmp/x --xla_dump_hlo_as_text --xla_b=1"}
    found = ingredients(new(V3), both)
    assert found == ingredients(new(V3), turned) != ingredients(new(V3), {})
    (tmp_path / "flags").write_text("--xla_b=1 --xla_a=1")
    assert found == ingredients(new(V3), {"XLA_FLAGS": str(tmp_path / "flags"), "HOME": "/b"})
    last = [{"XLA_FLAGS": f"--xla_a={a} --xla_a={b}"} for a, b in ("12", "21")]
    assert ingredients(new(V3), last[0]) != ingredients(new(V3), last[1]), "XLA takes the last"


def test_what_describes_a_gpu_and_our_code_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    changed = (
        replace(L4, memory_bytes=1),
        replace(L4, xla_flags=("--xla_gpu_autotune_level=0",)),
        replace(L4, device_count=2),
        replace(L4, compute_capability="9.0"),
    )
    assert len({ingredients(for_gpu(on), {}) for on in (L4, *changed)}) == 5
    before = ingredients(for_gpu(), {})
    # A limit that all GPUs share is no field of a target.
    monkeypatch.setattr(toolchain, "gpu_config", lambda on: f"{gpu_config(on)}\nmended: 1")
    assert ingredients(for_gpu(), {}) != before
    before = ingredients(new(V3), {})
    monkeypatch.setattr(
        executable_keys, "code_digest", lambda *modules: f"sha256:of mended {modules}"
    )
    after = ingredients(new(V3), {})
    assert after != before
    assert "prejit.compiler.compile.worker.worker_compile" in dict(after)["our code"]


def test_names_of_targets_and_cores_of_the_build_host_are_in_no_key() -> None:
    renamed = replace(V3, name="web-servers")
    assert ingredients(new(renamed), {}) == ingredients(new(V3), {})
    host = os.sched_getaffinity(0)
    before = ingredients(new(V3), {})
    os.sched_setaffinity(0, {min(host)})
    try:
        assert ingredients(new(V3), {}) == before
    finally:
        os.sched_setaffinity(0, host)


def test_what_was_measured_counts_by_what_it_says() -> None:
    plain = for_gpu()
    a, b, c = (
        replace(plain, tuned=Tuned(results, "", digest))
        for results, digest in ((b"x", "one"), (b"y", "one"), (b"x", "two"))
    )
    assert ingredients(a, {}) == ingredients(b, {})
    assert len({ingredients(x, {}) for x in (plain, a, c)}) == 3
    [flags] = {x.worker_flags({}, Path("/x/a")) for x in (a, c)}
    assert flags.endswith("--xla_gpu_load_autotune_results_from=/x/a")


def test_every_ingredient_of_an_executable_is_in_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[4] / "docs/architecture/build.md").read_text()
    [row] = re.findall(r"^\| `compile` \| (.*) \|$", page, re.MULTILINE)
    listed = {*re.split(r"[,;] ", row.partition("; versions")[0])}
    versions = {"jax", "jaxlib", "jax-cuda13-pjrt", "libtpu", "our code"}
    tpu = Toolchain(target("tpu-v5e"), ("python",), new(V3).versions, isolated=True)
    source = replace(SOURCE, kernels=None, calls=(("scale", "scale.1"),))
    tuned = replace(for_gpu(), tuned=Tuned(b"x", "", "sha256:1"))
    found = set[str]()
    for each in (new(HOST), new(V3), tuned, tpu):
        found |= {name for name, _ in ingredients(each, {}, source)}
    found = {"library calls" if name.startswith("library call ") else name for name in found}
    assert found - versions == listed - {"kernels"}
