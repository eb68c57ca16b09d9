"""The tools of each target: its toolchain, and the kernels that its programs may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from prejit.compiler.native.form_table import FormChoice, KnownForms, conditions_of
from prejit.compiler.native.kernel_library import KernelLibrary, NoKernels, build_kernels
from prejit.compiler.native.products import Product
from prejit.compiler.pipeline.result_keys import versions
from prejit.compiler.progress import Progress
from prejit.compiler.store.store_interface import Store
from prejit.compiler.targets import environments
from prejit.compiler.targets.build_host import can_build
from prejit.compiler.targets.installing import make_environment, obstacle
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.toolchain import Toolchain, host_toolchain, read_tuning, toolchain_of


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
