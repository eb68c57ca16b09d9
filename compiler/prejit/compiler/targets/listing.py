"""The list of `prejit targets`: every target, and whether this machine compiles for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from prejit.compiler.targets import environments
from prejit.compiler.targets.build_host import can_build, cross_compiles
from prejit.compiler.targets.environments import EnvironmentSpec
from prejit.compiler.targets.installing import obstacle
from prejit.compiler.targets.target_classes import Target
from prejit.compiler.targets.target_table import names, target

EXACT_JAX = "0.12.0.1"
"""The newest known jax: the version to pin where the build host's own compiles for no described CPU."""

YES, DOWNLOAD, NO = "yes", "yes, after a first download", "no"


@dataclass(frozen=True, slots=True)
class Listed:
    """A target, and whether this machine compiles for it.

    Attributes:
        target: the target.
        builds: one of `YES`, `DOWNLOAD`, `NO`.
        packages: packages that the first build downloads.
        note: further information; where `builds` is `NO`, what to do.
    """

    target: Target
    builds: str
    packages: tuple[str, ...] = ()
    note: str | None = None


def list_targets(host_jax: str) -> tuple[Listed, ...]:
    """Return every target that a manifest may name, by platform. May start interpreters."""
    return tuple(_listed(target(name), host_jax) for name in names())


def _listed(found: Target, host_jax: str) -> Listed:
    pinned = replace(found, jax=EXACT_JAX)
    pin = f'jax = "{EXACT_JAX}" in its [[target]]'
    if reason := can_build(found):
        if can_build(pinned):  # another architecture: no jax helps
            return Listed(found, NO, note=reason)
        way = _by_environment(pinned, host_jax)
        return Listed(found, NO, note="; ".join([f"{reason}: set {pin}", *_more(way)]))
    listed = _by_environment(found, host_jax)
    if found.cpu_features is None or found.platform != "cpu" or cross_compiles(host_jax):
        return listed
    way = _by_environment(pinned, host_jax)
    note = "; ".join([f"exact only with {pin}", *_more(way)])
    return replace(listed, note=note)


def _by_environment(found: Target, host_jax: str) -> Listed:
    spec = environments.spec_for(found, host_jax)
    if spec is None or environments.read(environments.root() / spec.key) is not None:
        return Listed(found, YES)
    if (error := obstacle(spec)) is not None:
        return Listed(found, NO, note=f"{str(error).partition(': ')[2]}: {error.hint}")
    return Listed(found, DOWNLOAD, _packages(spec))


def _packages(spec: EnvironmentSpec) -> tuple[str, ...]:
    return tuple(text for text in spec.requirements if "==" in text)


def _more(way: Listed) -> Iterator[str]:
    """Yield what must happen before a pinned version compiles."""
    if way.builds == DOWNLOAD:
        yield f"after a first download of {', '.join(way.packages)}"
    elif way.note:
        yield way.note
