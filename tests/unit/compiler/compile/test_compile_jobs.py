"""Compile keys: everything that decides an executable is in them, and nothing else."""

import os
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import jax
import numpy as np
from tests.recipes import export
from tests.unit.compiler.toolchains import HOST, L4, V3, for_gpu, new, old

from prejit.compiler.compile import compile_jobs
from prejit.compiler.compile.compile_jobs import Source, executable_key
from prejit.compiler.targets import cpu_count, toolchain
from prejit.compiler.targets.build_host import host_cpu
from prejit.compiler.targets.target_classes import catalogue
from prejit.compiler.targets.target_table import target
from prejit.compiler.targets.toolchain import Toolchain, Tuned, gpu_config

SOURCE = Source("sha256:0", ("cpu",))


def ingredients(toolchain, environ, source=SOURCE):
    with patch.dict(os.environ, environ, clear=True):
        return executable_key("name", toolchain, source).ingredients


def test_what_decides_an_executable_is_in_its_key_and_nothing_else():
    def of(toolchain, source=SOURCE, **environ):
        return ingredients(toolchain, environ, source)

    others = [replace(SOURCE, program="sha256:1"), replace(SOURCE, platforms=("cpu", "tpu"))]
    assert len({of(new(V3), source) for source in (SOURCE, *others)}) == 3
    assert dict(of(new(V3)))["cpu"] == "x86-64-v3"
    for name in ("cpu", "cpu_features"):
        assert len({dict(of(each))[name] for each in (old(V3), old(HOST), new(HOST))}) == 1
    other = Toolchain(V3, ("python",), (("jax", "0.12.1"), ("jaxlib", "0.12.0")))
    assert of(other) == of(new(V3))
    one = for_gpu()
    newer = replace(one, versions=(("jax", "0.12.1"), *one.versions[1:]))
    assert of(newer) != of(one), "jax describes its devices"
    newer = replace(one, versions=(*one.versions[:2], ("jaxlib", "0.12.0.1")))
    assert of(newer) != of(one) == of(replace(one, command=("other",)))
    found = [new(HOST), *(new(on) for on in catalogue().values() if on.platform == "cpu")]
    found += [for_gpu(on) for on in catalogue().values() if on.platform == "cuda"]
    assert len({of(each) for each in found}) == len(found)
    versions = (("jax", "0.12.0"), ("jaxlib", "0.12.0"), ("libtpu", "0.0.51"))
    tpu = Toolchain(target("tpu-v5e"), ("python",), versions, isolated=True)
    assert of(tpu, LIBTPU_INIT_ARGS="--xla_tpu_a=1") != of(tpu)
    assert of(new(V3), LIBTPU_INIT_ARGS="--xla_tpu_a=1") == of(new(V3))
    assert of(new(replace(V3, name="web-servers"))) == of(new(V3))


def test_cpus_count_by_kind_and_number(monkeypatch, tmp_path):
    """One kind has many names: AMD EPYC 9R14, AMD EPYC 9654."""
    lines = Path("/proc/cpuinfo").read_text()
    found = []
    for name, family in (("EPYC 1", "25"), ("EPYC 2", "25"), ("EPYC 1", "26")):
        described = tmp_path / f"cpuinfo-{name}-{family}"
        other = re.sub(r"(model name\s*:).*", rf"\1 {name}", lines)
        described.write_text(re.sub(r"(cpu family\s*:).*", rf"\1 {family}", other))
        with monkeypatch.context() as patch:
            patch.setattr(compile_jobs, "host_cpu", lambda at=described: host_cpu(at))
            found.append(ingredients(new(HOST), {}))
            assert "EPYC" not in str(found[-1])
    assert found[0] == found[1] != found[2]
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


def test_a_worker_for_cpus_imports_no_jax(tmp_path, run_python):
    """This is why jax is in no key of theirs."""
    portable = tmp_path / "portable"
    portable.write_bytes(export(jax.numpy.sin, np.zeros(8, np.float32)))
    run_python(
        "import sys\n"
        "from pathlib import Path\n"
        "from prejit.compiler.compile.worker import worker_requests, worker_compile, xla\n"
        "assert 'iced_x86' not in sys.modules, 'environments of targets have none'\n"
        "xla.import_compiler('cpu')\n"
        f"program = worker_compile.with_libraries(Path({str(portable)!r}).read_bytes(), {{}})\n"
        "for devices in (1, 2):\n"
        "    made = worker_compile.compile_program(program, xla.CompileFor(device_count=devices))\n"
        "    worker_compile.compress(made.serialized)\n"
        "found = {name for name in sys.modules if name.partition('.')[0] in ('jax', 'flax')}\n"
        "assert not found, found"
    )


def test_flags_and_measurements_count_by_what_they_say(tmp_path):
    both = {"XLA_FLAGS": "--xla_b=1 --xla_a=1", "HOME": "/a"}
    turned = {"XLA_FLAGS": "--xla_a=1 --xla_dump_to=/tmp/x --xla_dump_hlo_as_text --xla_b=1"}
    found = ingredients(new(V3), both)
    assert found == ingredients(new(V3), turned) != ingredients(new(V3), {})
    (tmp_path / "flags").write_text("--xla_b=1 --xla_a=1")
    assert found == ingredients(new(V3), {"XLA_FLAGS": str(tmp_path / "flags"), "HOME": "/b"})
    last = [{"XLA_FLAGS": f"--xla_a={a} --xla_a={b}"} for a, b in ("12", "21")]
    assert ingredients(new(V3), last[0]) != ingredients(new(V3), last[1]), "XLA takes the last"
    plain = for_gpu()
    a, b, c = (
        replace(plain, tuned=Tuned(results, "", digest))
        for results, digest in ((b"x", "one"), (b"y", "one"), (b"x", "two"))
    )
    assert ingredients(a, {}) == ingredients(b, {})
    assert len({ingredients(x, {}) for x in (plain, a, c)}) == 3
    [flags] = {x.worker_flags({}, Path("/a user/x")) for x in (a, c)}
    assert flags.endswith('--xla_gpu_load_autotune_results_from="/a user/x"'), "it stays one flag"


def test_what_describes_a_gpu_and_our_code_are_in_the_key(monkeypatch):
    flags = ("--xla_gpu_autotune_level=0",)
    others = {"memory_bytes": 1, "xla_flags": flags, "device_count": 2, "compute_capability": "9.0"}
    changed = [replace(L4, **{name: value}) for name, value in others.items()]
    assert len({ingredients(for_gpu(on), {}) for on in (L4, *changed)}) == 5
    before = ingredients(for_gpu(), {})
    # A limit that all GPUs share is no field of a target.
    monkeypatch.setattr(toolchain, "gpu_config", lambda on: f"{gpu_config(on)}\nmended: 1")
    assert ingredients(for_gpu(), {}) != before
    before = ingredients(new(V3), {})
    monkeypatch.setattr(compile_jobs, "code_digest", lambda *all: f"sha256:of mended {all}")
    after = ingredients(new(V3), {})
    assert after != before
    assert "prejit.compiler.compile.worker.worker_compile" in dict(after)["our code"]
