"""The tools of each target: its toolchain, and what its programs may call, kernels and libraries of the user.

A library of FFI handlers that a manifest names is read and checked. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.manifest.manifest import Library, Manifest
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.native.form_table import FormChoice, KnownForms, conditions_of
from prejit.compiler.native.kernel_library import KernelLibrary, NoKernels, build_kernels, glibc_of
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets import environments
from prejit.compiler.targets.build_host import can_build
from prejit.compiler.targets.installing import make_environment, obstacle
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain, read_tuning, toolchain_of
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.errors import BuildError, ManifestError
from prejit.runtime.format import limits
from prejit.runtime.format.bundle_schema import UserLibrary
from prejit.runtime.format.checks.elf import read_shared_library
from prejit.runtime.format.checks.seldom_parts import handler_names
from prejit.runtime.machine.fingerprint import Fingerprint


@dataclass(frozen=True)
class TargetKernels:
    """The kernels of a target, and what returns the form that each product takes beside them."""

    library: KernelLibrary
    choose: Callable[[Product], FormChoice]


@dataclass(frozen=True)
class TargetTools:
    """The compiler of a target with its versions and flags, and the native kernels, if it has some."""

    toolchain: Toolchain
    kernels: TargetKernels | None

    @property
    def name(self) -> str:
        """The name of the target."""
        return self.toolchain.target.name


def find_toolchain(target: Target) -> Toolchain | None:
    """Return what compiles for a target; None: its environment has to be made first."""
    spec = environments.spec_for(target, versions("jax")["jax"])
    if spec is None:
        found = host_toolchain(target, versions("jax", "jaxlib"))
    elif (environment := environments.find(spec)) is not None:
        found = toolchain_of(target, environment)
    else:
        return None
    return replace(found, tuned=read_tuning(target))


def make_toolchain(target: Target, progress: Progress) -> Toolchain:
    """Return what compiles for a target; its environment is made first if it is not there."""
    if (found := find_toolchain(target)) is None:
        spec = environments.spec_for(target, versions("jax")["jax"])
        assert spec is not None
        make_environment(spec, progress)
        found = find_toolchain(target)
        assert found is not None
    return found


def why_not(target: Target) -> str | None:
    """Return why this machine cannot compile for a target; None: it can, once packages are fetched."""
    if reason := can_build(target):
        return reason
    spec = environments.spec_for(target, versions("jax")["jax"])
    error = None if spec is None else obstacle(spec)
    return None if error is None else f"{error} ({error.hint})"


def build_libraries(
    toolchains: Sequence[Toolchain], store: Store, progress: Progress, by: Mapping[str, str] | None
) -> dict[str, KernelLibrary]:
    """Return the kernels of each target that has some, compiled now if the store has none.

    `by` is `BuildOptions.kernels_by`.
    """
    found = {
        name: build_kernels(each, store, progress, first=None if by is None else by[name])
        for name, each in ((each.target.name, each) for each in toolchains)
        if by is None or name in by
    }
    missing = [each for each in found.values() if isinstance(each, NoKernels)]
    for reason in dict.fromkeys(each.reason for each in missing if each.worth_telling):
        progress.note(reason)
    return {name: each for name, each in found.items() if isinstance(each, KernelLibrary)}


def kernels_of(library: KernelLibrary, toolchain: Toolchain, forms: KnownForms) -> TargetKernels:
    """Return the kernels of a target with the choice of forms beside them."""
    conditions = conditions_of(toolchain, library)
    return TargetKernels(library, cache(partial(forms.choice, conditions=conditions)))


@dataclass(frozen=True, slots=True)
class ReadLibrary:
    """A library of the user that was read once, so that it cannot change during a build.

    Attributes:
        described: its entry in a config.
        architecture: the architecture that it is for, as `uname -m` says it.
        glibc: the oldest glibc that can load it; None: it needs none.
        targets: names of the targets that it is for; empty: all CPU targets of its architecture.
    """

    described: UserLibrary
    content: bytes
    architecture: str
    glibc: str | None
    targets: tuple[str, ...]

    def is_for(self, target: Target) -> bool:
        """Return whether a target may load it."""
        if target.platform != "cpu" or target.architecture != self.architecture:
            return False
        names = (target.name, target.name.removesuffix(f"-jax{target.jax}"))
        return not self.targets or any(name in self.targets for name in names)


def read_libraries(manifest: Manifest) -> tuple[ReadLibrary, ...]:
    """Read the libraries of a manifest.

    Raises:
        ManifestError: a file is no library that a target can load, lacks a symbol, or shares a name with
            another library of a target.
        StoreError: a file cannot be read.
    """
    found = tuple(
        _read(manifest, library, f"{manifest.where}: library[{place}]")
        for place, library in enumerate(manifest.libraries)
    )
    for target in manifest.targets:
        named: dict[str, str] = {}
        for library in libraries_of(found, target):
            for name in library.described.handlers:
                if name in named:
                    raise ManifestError(
                        f"{manifest.where}: library: target {target.name}: expected one library with "
                        f"{name!r}, found {named[name]} and {library.described.name}",
                        hint="say which targets each one is for: targets = [...]",
                    )
                named[name] = library.described.name
    return found


def libraries_of(libraries: Iterable[ReadLibrary], target: Target) -> tuple[ReadLibrary, ...]:
    """Return the libraries that a target may load, sorted by digest."""
    found = (library for library in libraries if library.is_for(target))
    return tuple(sorted(found, key=lambda library: library.described.digest))


def handlers_of(libraries: Iterable[ReadLibrary]) -> tuple[str, ...]:
    """Return the names by which programs may call libraries, sorted."""
    return tuple(sorted({name for each in libraries for name in each.described.handlers}))


def bind_libraries(
    libraries: Sequence[ReadLibrary],
    where: str,
    spec: ProgramSpec,
    source: Source,
    target: Target,
    store: Store,
) -> Source:
    """Return what a function of the user is compiled from for a target, with the libraries that it calls.

    Raises:
        BuildError: it calls a handler on the target's platform that no library for the target has.
    """
    if not libraries or spec.kind != "call":
        return source
    from prejit.runtime.device.portable import custom_calls

    where = f"{where}: target {target.name}: program {spec.name}"
    program = store.read_blob(source.program)
    assert program is not None
    called = custom_calls(program, source.platforms, target.platform) & {*handlers_of(libraries)}
    names: dict[str, str] = {}
    for library in libraries_of(libraries, target):
        names |= handler_names(library.described)
    for name in sorted(called):
        if name not in names:
            have = ", ".join(
                f"{each.described.name} for {each.architecture}"
                for each in libraries
                if name in each.described.handlers
            )
            raise BuildError(
                f"{where}: it calls {name}: expected a [[library]] with this handler for "
                f"{target.platform} and {target.architecture}, found {have}",
                hint="libraries run on CPUs alone: leave the target out, or give the function another form "
                "there with jax.lax.platform_dependent"
                if target.platform != "cpu"
                else f"add a [[library]] that is built for {target.name}, or leave the target out",
            )
    return replace(source, calls=tuple(sorted((name, names[name]) for name in called)))


def allowed_features(target: Target) -> tuple[str, ...]:
    """Return the CPU extensions that a library for a target may use without asking the CPU: all it has."""
    if target.cpu_features is None:
        return Fingerprint.current().cpu_features
    return target.cpu_features


def _read(manifest: Manifest, library: Library, where: str) -> ReadLibrary:
    path = manifest.resolve(library.path)
    content = _content(path, where)
    try:
        read = read_shared_library(content)
    except ValueError as error:
        raise ManifestError(
            f"{where}.path: {path}: expected a shared library of Linux: {error}",
            hint="link it with: g++ -shared -fPIC",
        ) from error
    if read.architecture is None:
        raise ManifestError(
            f"{where}.path: {path}: expected a library for x86_64 or aarch64, found another",
            hint="compile it for the machines of the targets",
        )
    if missing := [name for name in library.handlers.values() if name not in read.exported]:
        in_c = [name for name in read.exported if not name.startswith("_Z")]
        shown = ", ".join(in_c[:_MAX_SHOWN]) or "no name of C"
        raise ManifestError(
            f"{where}.handlers: expected symbols that {path} exports, found no {', '.join(missing)}; it "
            f"exports {shown}",
            hint='define them with XLA_FFI_DEFINE_HANDLER_SYMBOL, as extern "C" and with default visibility',
        )
    described = UserLibrary(digest_of(content), path.name, dict(sorted(library.handlers.items())))
    made = ReadLibrary(
        described, content, read.architecture, glibc_of(read), tuple(library.targets)
    )
    if not any(map(made.is_for, manifest.targets)):
        listed = ", ".join(f"{t.name} ({t.platform}, {t.architecture})" for t in manifest.targets)
        raise ManifestError(
            f"{where}: {path} is for {read.architecture}: expected a CPU target of that architecture, "
            f"found {listed}",
            hint="compile it for the machines of the targets, or add a target",
        )
    return made


_MAX_SHOWN = 8
"""Maximum number of exported symbols that an error lists, of those whose names are not C++'s."""


def _content(path: Path, where: str) -> bytes:
    with store_errors(f"{where}.path: {path}", "read"), path.open("rb") as file:
        content = file.read(limits.MAX_LIBRARY_BYTES + 1)
    if len(content) > limits.MAX_LIBRARY_BYTES:
        raise ManifestError(
            f"{where}.path: {path}: expected at most {limits.MAX_LIBRARY_BYTES} bytes, found more",
            hint="strip it: strip --strip-unneeded",
        )
    return content
