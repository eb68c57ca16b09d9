"""What this machine can compile for."""

from __future__ import annotations

import platform

from prejit.runtime.errors import BuildError
from prejit.runtime.machine.fingerprint import Fingerprint
from prejit.runtime.machine.targets import Target


def can_build(found: Target) -> str | None:
    """Return why this machine cannot compile for a target; None: it can, as far as the target alone shows.

    `installing.obstacle` returns what the target's environment lacks.
    """
    if found.architecture != platform.machine():
        return f"it needs a build host with {found.architecture}, this is {platform.machine()}"
    if found.platform != "cpu" or found.cpu_features is None:
        return None
    version = found.jax or jaxlib_version()
    if cross_compiles(version):
        return None
    missing = sorted(set(found.cpu_features) - set(Fingerprint.current().cpu_features))
    if missing:
        # --xla_cpu_max_isa only removes features: the code would be for a lower level than its name.
        return (
            f"it needs jaxlib 0.11 or later on this machine: {version} compiles only for"
            f" the build host's own CPU, which lacks {' '.join(missing)}"
        )
    return None


def cross_compiles(jaxlib: str) -> bool:
    """Return whether a version of jaxlib compiles for a CPU that is described in data (0.11 and later).

    Older ones compile for the build host's own features, capped by `--xla_cpu_max_isa` in XLA_FLAGS.
    """
    major, minor = jaxlib.split(".")[:2]
    return (int(major), int(minor)) >= (0, 11)


def jaxlib_version() -> str:
    """Return the version of the installed jaxlib.

    Raises:
        BuildError: it is not installed.
    """
    try:
        from jaxlib import version
    except ImportError as error:
        raise BuildError(
            "expected jaxlib to compile with, found none", hint="pip install 'prejit[compiler]'"
        ) from error
    return str(version.__version__)
