"""Recordings that are built for other machines: recorded on one, started on others."""

import contextlib
import dataclasses
import functools
import json
import shutil
import sys

import pytest

from prejit.compiler.recording.build_for_machines import build_recording
from prejit.compiler.recording.jax_cache_packing import packed, read_targets, write_bundle
from prejit.runtime.errors import BuildError, RejectError, UsageError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.recorded.hook.jax_texts import LEAN_PREFIX

LEVELS = ("cpu-x86-64-v2", "cpu-x86-64-v3")
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
from jax import monitoring
from jax._src import cache_key
if "LAPTOP" in os.environ:  # another CPU: what jax hashes of it is in each key
    cache_key._hash_accelerator_config = lambda to, devices: to.update(b"a laptop")
jax.events_seen = []
monitoring.register_event_duration_secs_listener(lambda name, *_, **__: jax.events_seen.append(name))
@jax.jit
def step(params, x):
    loss, slopes = jax.value_and_grad(lambda w: jnp.square(jnp.tanh(x @ w) - 1).mean())(params["w"])
    return {"w": params["w"] - 0.1 * slopes}, loss
@jax.jit
def solve(w):
    return jax.scipy.linalg.cho_solve(jax.scipy.linalg.cho_factor(w @ w.T + jnp.eye(8)), jnp.ones(8))
if __name__ == "__main__":
    params, x = {"w": jnp.linspace(-1, 1, 64).reshape(8, 8)}, jnp.linspace(0, 1, 32).reshape(4, 8)
    for _ in range(3):
        params, loss = step(params, x)
    halves = jax.jit(lambda x: x / 2)(jax.device_put(x, jax.devices()[-1]))
    print(f"{loss:.4f} {solve(params['w']).sum():.4f} {halves.sum():.4f}")
    print(len(jax.events_seen), file=sys.stderr)
"""
# Beside a plain function: flags of XLA, a handler that the build does not have, and float16, which XLA does
# not compile for machines without the extension f16c.
PARTS = """
import jax, jax.numpy as jnp, numpy as np
from jaxlib.cpu import _lapack
_lapack.initialize()
jax.ffi.register_ffi_target("own_cholesky", _lapack.registrations()["lapack_spotrf_ffi"], platform="cpu")
@jax.jit
def own(x):
    shapes = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ffi.ffi_call("own_cholesky", shapes)(x, uplo=np.uint8(ord("L")))[0]
@jax.jit
def half(x):
    return x * x
@jax.jit
def largest(x):
    return jnp.max(jnp.where(x > 0, jnp.nan, x)), jnp.exp(x).sum()
print(own(np.eye(4, dtype=np.float32) * 4), half(np.ones(3, np.float16)), largest(np.ones(8, np.float32)))
"""
pytestmark = [
    pytest.mark.skipif(
        "fma" not in Fingerprint.current().cpu_features, reason="runs code for x86-64-v3"
    ),
    pytest.mark.thorough,
]


TWO_DEVICES = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
COMMAND = (sys.executable, "serve.py")


@pytest.fixture(scope="module")
def on_two_devices(python_at):
    return functools.partial(python_at, **TWO_DEVICES)


def recorded(on_two_devices, bundle, *options, **env):
    words = ("-m", "prejit.runtime", "record", "-o", bundle, *options, "--")
    return on_two_devices(*words, *COMMAND, **env)


@pytest.fixture(scope="module")
def recording(here, on_two_devices):
    for _ in range(2):
        recorded(on_two_devices, "serve", "--untraced")
    return here / "serve"


@pytest.fixture(scope="module")
def built(here, recording, on_two_devices):
    words = ("-m", "prejit.runtime", "build", recording, "--json")
    targets = [word for level in LEVELS for word in ("--target", level)]
    done = json.loads(on_two_devices(*words, *targets, "-o", "fleet").stdout)
    assert done[0]["targets"] == [*LEVELS]
    assert (done[0]["cached"], done[0]["left_out"]) == (0, [])
    return here / "fleet" / "serve"


def test_a_recording_is_built_for_levels_without_a_trace(
    here, recording, built, on_two_devices, reported
):
    """Recorded here, run for a lower level and for the best one: jax reports no trace and no compile."""
    plain = on_two_devices("serve.py")
    assert int(plain.stderr) > 10
    for level in LEVELS:
        done = on_two_devices(
            *("-m", "prejit.runtime", "build", recording, "--target", level, "-o", level)
        )
        assert "compiled 0, cached" in done.stderr
        strict = {"options": ("--require-aot",), **TWO_DEVICES}
        done, report = reported(f"{level}/serve", *COMMAND, **strict)
        assert (done.stdout, int(done.stderr)) == (plain.stdout, 0)
        assert (report["hits"], report["missed"], report["traced"]) == (0, 0, {})
        assert report["untraced"] >= 3
    done, report = reported(built, *COMMAND, **TWO_DEVICES)
    assert (report["target"], int(done.stderr)) == (LEVELS[1], 0)


def test_a_recording_onto_what_was_built_keeps_names_of_targets(built, on_two_devices, tmp_path):
    again = tmp_path / "serve"
    shutil.copytree(built, again)
    before = {each.name: {*each.programs} for each in read_targets(again)}
    assert before.keys() == {*LEVELS}
    recorded(on_two_devices, again)
    after = {each.name: {*each.programs} for each in read_targets(again)}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1


def test_each_program_that_xla_compiles_is_built_with_the_recorded_flags(here, python_at):
    (here / "parts.py").write_text(PARTS)
    flags = {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}
    command = ("--", sys.executable, "parts.py")
    plain = python_at("parts.py", **flags)
    for _ in range(2):
        python_at("-m", "prejit.runtime", "record", "-o", "parts", "--untraced", *command, **flags)
    for level, left_out in zip(LEVELS, (["jit_half"], []), strict=True):
        words = ("build", "parts", "--target", level, "-o", f"parts-{level}", "--json")
        [built] = json.loads(python_at("-m", "prejit.runtime", *words).stdout)
        assert [line.split()[0] for line in built["left_out"]] == left_out
        assert all("cpu-x86-64-v2: XLA cannot compile" in line for line in built["left_out"])
        words = ("run", f"parts-{level}/parts", "-o", "report.json")
        done = python_at("-m", "prejit.runtime", *words, *command, **flags)
        report = json.loads((here / "report.json").read_text())
        assert (done.stdout, report["target"]) == (plain.stdout, level)
        assert (report["missed"], report["hits"]) == (len(left_out), 0)
        reasons = {"the build for this target left its program out": left_out}
        assert report["traced"] == (reasons if left_out else {})


def test_calls_that_are_traced_find_the_keys_of_the_recorded_machine(on_two_devices, reported):
    recorded(on_two_devices, "laptop", LAPTOP="1")
    _, report = reported("laptop", *COMMAND, **TWO_DEVICES)
    assert report["hits"] == 0
    on_two_devices("-m", "prejit.runtime", "build", "laptop", "--target", LEVELS[1], "-o", "fleet")
    strict = {"options": ("--require-aot",), **TWO_DEVICES}
    _, report = reported("fleet/laptop", *COMMAND, **strict)
    assert report["hits"] >= 3
    assert report["missed"] == 0


def test_what_cannot_be_built_is_refused_with_the_way_out(here, recording, built, tmp_path):
    def refused(path, *names, output=tmp_path):
        with pytest.raises(UsageError) as found:
            build_recording(path, output, names, cache=here / "cache")
        return f"{found.value} {found.value.hint}"

    assert "--target cpu-x86-64-v3" in refused(recording)
    assert "a machine of platform cuda, found cpu" in refused(recording, "cuda-h100")
    assert "record on such a machine" in refused(recording, "cuda-h100")
    assert "found tpu-v5e" in refused(recording, "tpu-v5e")
    assert "another directory" in refused(recording, LEVELS[0], output=here)
    assert "record again" in refused(built, LEVELS[0])
    [target] = read_targets(recording)
    old = tmp_path / "old"
    write_bundle(old, "old", [packed(dataclasses.replace(target, lowered={}), "old")])
    assert "an older prejit recorded them" in refused(old, LEVELS[0], output=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_recording_of_a_gpu_is_built_for_others(here, recording, tmp_path):
    """The programs of a CPU stand for those of a GPU; LAPACK's, which no GPU has, are left out."""
    [target] = read_targets(recording)
    plugin = f"jax-cuda13-pjrt {target.versions['jax']}"
    needs = dataclasses.replace(target.requirement, platform="cuda", plugin=plugin, cpu_features=())
    for name, says in ((plugin, None), ("jax-cuda13-pjrt 0.0.1", "expected jax-cuda13-pjrt 0.0.1")):
        needs = dataclasses.replace(needs, plugin=name, device_kind="NVIDIA H200")
        path = tmp_path / name
        write_bundle(path, "gpu", [packed(dataclasses.replace(target, requirement=needs), "gpu")])
        with pytest.raises(BuildError, match=says) if says else contextlib.nullcontext():
            built = build_recording(
                path, tmp_path, ["cuda-h100", "cuda-l4"], cache=tmp_path / "cache"
            )
    assert built.targets == ("cuda-h100", "cuda-l4")
    assert {line.split()[0] for line in built.left_out} == {"jit_solve"}
    for each, capability in zip(read_targets(built.path), ("9.0", "8.9"), strict=True):
        assert each.requirement.compute_capability == capability
        assert (each.requirement.device_count, each.requirement.cuda) == (None, "13.0")
        assert set(target.programs) - set(each.programs) == {
            name for name in target.programs if name.startswith(("jit_solve", LEAN_PREFIX))
        }


def test_of_several_recorded_targets_that_of_the_installed_jax_is_built(here, recording, tmp_path):
    [target] = read_targets(recording)
    few = dict(sorted(target.programs.items())[:1])
    needs = dataclasses.replace(target.requirement, jaxlib="0.0.1")
    both = [
        dataclasses.replace(target, programs=few),
        dataclasses.replace(target, requirement=needs, given=""),
    ]
    write_bundle(tmp_path / "both", "both", [packed(each, "both") for each in both])
    built = build_recording(tmp_path / "both", tmp_path / "out", [LEVELS[1]], cache=here / "cache")
    assert built.compiled + built.cached == 1
    [line] = built.left_out
    assert line.startswith("the programs of cpu-jaxlib0.0.1")


def test_recordings_take_no_options_of_manifests(recording, on_two_devices):
    words = ("-m", "prejit.runtime", "build", recording, "--target", LEVELS[0])
    assert "found --retrace" in on_two_devices(*words, "--retrace", status=2).stderr
    assert "found manifests as well" in on_two_devices(*words, "demo.toml", status=2).stderr
    again = shutil.copytree(recording, recording.parent / "again" / "serve")
    assert "expected another name" in on_two_devices(*words, again, status=2).stderr


def test_no_flipped_bit_of_a_kept_program_is_compiled(recording, tmp_path):
    copy = shutil.copytree(recording, tmp_path / "serve")
    [target] = read_targets(copy)
    layer = packed(target, "serve").layers[1]
    file = copy / "blobs" / "sha256" / layer.digest.removeprefix("sha256:")
    content = file.read_bytes()
    file.chmod(0o644)
    for place in range(0, len(content), len(content) // 40):
        file.write_bytes(
            content[:place] + bytes([content[place] ^ 1 << place % 8]) + content[place + 1 :]
        )
        with pytest.raises(RejectError):
            read_targets(copy)
    file.write_bytes(content)
    assert read_targets(copy) == (target,)
