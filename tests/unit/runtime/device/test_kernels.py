"""Native kernels of a bundle: verified, loaded, registered before the executables that call them."""

import dataclasses
import os
from unittest import mock

import numpy as np
import pytest

from prejit.runtime import __main__
from prejit.runtime.base.files import digest_of
from prejit.runtime.device import kernels
from prejit.runtime.errors import FallbackWarning, KernelError, MismatchError, RejectError
from prejit.runtime.fallback_reporting import fallback_counts
from prejit.runtime.format.names import KERNELS_MEDIA_TYPE, kernel_target
from prejit.runtime.loader import load
from prejit.runtime.machine.fingerprint import Fingerprint

X = np.arange(5, dtype=np.float32)


@pytest.fixture
def kernels_dir(kernel_recipe, tmp_path):
    return kernel_recipe.write(tmp_path / "kernels")


@pytest.fixture
def nothing_is_mapped(monkeypatch):
    def reached(*_):
        raise AssertionError("a damaged library reached the dynamic linker")

    monkeypatch.setattr(kernels, "_open_sealed", reached)
    monkeypatch.setattr(kernels, "_loaded", {})


def test_a_changed_library_never_reaches_the_linker(kernels_dir, kernel_recipe, nothing_is_mapped):
    """Even behind a receipt: its digest is taken of the very bytes that would be loaded."""
    with pytest.raises(AssertionError, match="reached the dynamic linker"):
        load(kernels_dir)  # whole kernels get there, or the fixture would show nothing
    digest = kernel_recipe.targets[0].config.kernels.digest
    blob = kernels_dir / "blobs" / "sha256" / digest.removeprefix("sha256:")
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    with pytest.raises(RejectError, match=blob.name):
        load(kernels_dir)
    assert __main__.main(["verify", str(kernels_dir)]) == RejectError.exit_code


def forged(recipe, **changes):
    return recipe.configured(lambda config: dataclasses.replace(config, **changes))


def test_kernels_that_manifest_config_and_library_do_not_agree_on_are_rejected(
    kernel_recipe, tmp_path, nothing_is_mapped
):
    config = kernel_recipe.targets[0].config
    (program,) = config.programs
    silent = (dataclasses.replace(program, kernels=None),)
    untrue = (dataclasses.replace(program, kernels=False),)
    without_layer = kernel_recipe.layered(
        lambda layers: tuple(x for x in layers if x.media_type != KERNELS_MEDIA_TYPE)
    )

    def naming(**changes):
        return forged(kernel_recipe, kernels=dataclasses.replace(config.kernels, **changes))

    def holding(content):
        return naming(digest=digest_of(content)).with_content(KERNELS_MEDIA_TYPE, content)

    for complaint, forgery in {
        "found no layer": without_layer,
        "expected kernels none": forged(kernel_recipe, kernels=None, programs=silent),
        "it calls kernels, and the config names no library": forged(kernel_recipe, kernels=None),
        "expected a program that calls": forged(kernel_recipe, programs=silent),
        "to be true or absent": forged(kernel_recipe, programs=untrue),
        "expected exports prejit_scale, found": naming(handlers=("scale",)),
        "expected exports prejit_other": naming(handlers=("other", "root", "scale")),
        "each once, sorted": naming(handlers=("scale", "root")),
        "names, each once": naming(handlers=()),
        "expected kernels sha256:0": naming(digest="sha256:" + "0" * 64),
        "expected a digest": naming(digest="../../lib.so"),
        "expected a shared library: not an ELF": holding(b"#!/bin/sh\n"),
        "expected a shared library: not a whole": holding(b"\x7fELF\x02\x01" + bytes(30)),
    }.items():
        with pytest.raises(RejectError, match=complaint):
            load(forgery.write(tmp_path / complaint[:30].replace("/", "")))


def test_where_kernels_do_not_load_programs_compile_or_a_target_without_them_serves(
    kernels_dir, kernel_recipe, tmp_path, monkeypatch
):
    (with_kernels,) = kernel_recipe.targets
    silent = (dataclasses.replace(with_kernels.config.programs[0], kernels=None),)
    config = dataclasses.replace(with_kernels.config, target="plain", kernels=None, programs=silent)
    layers = tuple(x for x in with_kernels.layers if x.media_type != KERNELS_MEDIA_TYPE)
    plain = dataclasses.replace(with_kernels, config=config, layers=layers)
    both = dataclasses.replace(kernel_recipe, targets=(with_kernels, plain)).write(tmp_path / "b")
    assert load(both).target == "cpu-host"
    error = KernelError("cannot load native kernels: no")
    monkeypatch.setattr(kernels, "load", mock.Mock(side_effect=error))
    loaded = load(both)
    assert (loaded.target, loaded.matched) == ("plain", True)
    with pytest.raises(MismatchError, match=r"kernels: needs a library for x86-64-v2 by .*native"):
        load(kernels_dir, on_mismatch="error")
    counted = fallback_counts().get("kernels", 0)
    with pytest.warns(FallbackWarning, match="kernels: needs a library for x86-64-v2"):
        loaded = load(kernels_dir)
    assert not loaded.matched
    assert fallback_counts()["kernels"] == counted + 1
    np.testing.assert_array_equal(loaded.call("scale", x=X), X * np.float32(2.5))
    assert loaded.report()[0].source == "compiled"


def test_a_library_for_another_machine_is_a_mismatch_before_it_is_read(
    kernel_recipe, tmp_path, nothing_is_mapped, kernels_dir
):
    """The library itself is for v2; a machine without sse4.2 must not see it."""
    needs = dataclasses.replace(kernel_recipe.targets[0].config.requirement, glibc="99.1")
    path = forged(kernel_recipe, requirement=needs).write(tmp_path / "later")
    with pytest.raises(MismatchError, match=r"glibc: needs 99\.1, found \d+\.\d+"):
        load(path, on_mismatch="error")
    here = Fingerprint.current()
    lesser = tuple(name for name in here.cpu_features if name != "sse4.2")
    machine = dataclasses.replace(here, cpu_features=lesser)
    with pytest.raises(MismatchError, match=r"cpu_features: needs \d+ .*, found all but sse4.2"):
        load(kernels_dir, on_mismatch="error", fingerprint=machine)


COMPILE = """
import sys
import jax
import numpy as np
from jax import export
from prejit.compiler.compile.worker.xla import compile_portable
from prejit.runtime.device import kernels
name, library, program, compiled = sys.argv[1:]
x = jax.ShapeDtypeStruct((5,), np.float32)
call = jax.jit(lambda x: jax.ffi.ffi_call(name, x)(x, factor=np.float32(2.5)))
unchecked = [export.DisabledSafetyCheck.custom_call(name)]
portable = export.export(call, platforms=("cpu",), disabled_checks=unchecked)(x).mlir_module_serialized
open(program, "wb").write(portable)
kernels.register(kernels.load(open(library, "rb").read()))
open(compiled, "wb").write(compile_portable(bytes(portable)).serialized)
"""
STAND_IN = """
import sys
import numpy as np
from prejit.compiler.compile.worker.worker_compile import with_kernels
from prejit.compiler.compile.worker.xla import compile_portable
from prejit.runtime.device.device import Device
from prejit.runtime.device.transfer import to_numpy
library, program, other = (open(path, "rb").read() for path in sys.argv[1:])
program = with_kernels(program, library)
assert "prejit-kernels" not in open("/proc/self/maps").read()
compiled = compile_portable(program).serialized
assert compiled == other, "the stand-in is in what was compiled"
device = Device("cpu")
try:
    [result] = device.load(compiled, "path").run([device.put(np.ones(5, np.float32))])
    print(to_numpy(result))
except Exception as error:
    print(type(error).__name__)
"""


def test_a_worker_with_a_stand_in_compiles_as_the_library(toy_library, tmp_path, run_python):
    """And maps no code of it: the build host may lack the instructions. A call fails, and does not crash."""
    library, content = toy_library
    paths = [tmp_path / name for name in ("kernels.so", "program", "executable")]
    paths[0].write_bytes(content)
    run_python(COMPILE, kernel_target("scale", library.digest), *paths)
    assert run_python(STAND_IN, *paths).stdout in ("XlaRuntimeError\n", "JaxRuntimeError\n")


DESCRIPTORS = """
import os, sys
from prejit.runtime.device import kernels
content = open(sys.argv[1], "rb").read()
libraries = [kernels.load(content + bytes(extra)) for extra in range(3)]
print(len({str(h) for x in libraries for h in x.values()}), len(os.listdir("/proc/self/fd")))
assert kernels.load(content) is libraries[0]
assert not {"jax", "jaxlib", "numpy"} & {name.partition(".")[0] for name in sys.modules}
lines = [line for line in open("/proc/self/maps") if "prejit-kernels" in line]
print(len({line.split()[4] for line in lines}), len([line for line in lines if "x" in line.split()[1]]))
"""


def test_a_descriptor_that_comes_again_is_another_library(toy_library, tmp_path, run_python):
    """The dynamic linker knows what it loaded by its name, and /proc/self/fd/3 is used three times."""
    (tmp_path / "kernels.so").write_bytes(toy_library[1])
    handlers, mapped = run_python(DESCRIPTORS, tmp_path / "kernels.so").stdout.splitlines()
    assert handlers.split()[0] == "6"
    assert mapped == "3 3"


def test_a_library_without_a_symbol_or_system_without_memfd_is_told(toy_library, monkeypatch):
    content = toy_library[1].replace(b"GLIBC_2.3\0", b"GLIBC_9.3\0")  # as with an older glibc
    with pytest.raises(KernelError, match=r"cannot load native kernels: .*GLIBC_9\.3") as caught:
        kernels.load(content)
    assert caught.value.hint
    make = os.memfd_create

    def failing(errno, flag=-1):
        def made(name, flags):
            if flags & flag:
                raise OSError(errno, os.strerror(errno))
            return make(name, flags)

        monkeypatch.setattr(os, "memfd_create", made)

    for errno in (1, 13, 38):
        failing(errno)
        with pytest.raises(KernelError, match=r"native kernels: the system (does not|has no)"):
            kernels.load(toy_library[1] + b"\0\0\0\0")
    failing(22, 8)  # a kernel before Linux 6.3 does not know the new flag
    assert len(kernels.load(toy_library[1] + b"\0\0\0")) == 2


def test_what_is_loaded_cannot_be_changed_and_has_its_exports(toy_library):
    descriptor = kernels._memory_file(toy_library[1], "test")
    try:
        for change, *given in ((os.pwrite, b"x", 0), (os.ftruncate, 10)):
            with pytest.raises(PermissionError):
                change(descriptor, *given)
        assert os.pread(descriptor, 1 << 20, 0) == toy_library[1]
    finally:
        os.close(descriptor)
    assert kernels.kernels_of(toy_library[1]) == ("root", "scale")
    with pytest.raises(KernelError, match="expected a shared library"):
        kernels.kernels_of(b"\x7fELF")
