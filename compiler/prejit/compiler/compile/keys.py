"""The key of a compile: everything that decides an executable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from prejit.compiler.compile.jobs import Source
from prejit.compiler.store.code import COMPILING, code_digest
from prejit.compiler.store.key import Key
from prejit.compiler.targets import cpu_count
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.machine.environment import effective_environment
from prejit.runtime.machine.fingerprint import Fingerprint


def executable_key(
    name: str, toolchain: Toolchain, source: Source, environ: Mapping[str, str] | None = None
) -> Key:
    """Return the key of compiling a program with a toolchain.

    The target's name is no ingredient: two targets for the same machine share their executables.

    Args:
        name: name of the result, for people.
        toolchain: what compiles the program, and for which target.
        source: the program.
        environ: environment variables of the build; None: this process's.

    Raises:
        StoreError: XLA_FLAGS names a file, and it cannot be read.
    """
    environ = os.environ if environ is None else environ
    target = toolchain.target
    # Ingredients of their own: the program's platforms, and the digest of the tuning file.
    untuned = replace(toolchain, tuned=None)
    machine = untuned.machine(()) | {"described": None, "platforms": None}
    if target.platform == "cpu":
        if not toolchain.is_exact:
            # The host's features get into the code; --xla_cpu_max_isa only removes some of them.
            host = Fingerprint.current()
            machine |= {"cpu": host.cpu_model, "cpu_features": host.cpu_features}
        machine["cpus"] = cpu_count.seen_by_xla()
    ingredients = [
        ("stablehlo", source.program),
        ("platforms", " ".join(source.platforms)),
        *((("kernels", source.kernels.digest),) if source.kernels is not None else ()),
        *((f"library call {name}", target) for name, target in source.calls),
        ("our code", code_digest(*COMPILING)),
        *toolchain.versions,
        ("architecture", target.architecture),
        *((key, _text(value)) for key, value in machine.items() if value is not None),
        # Without the tuning: its content counts, and not its path.
        ("xla_flags", untuned.xla_flags(environ)),
        ("environment", " ".join(effective_environment(target.platform, environ))),
    ]
    if toolchain.tuned is not None:
        ingredients.append(("tuning", toolchain.tuned.digest))
    return Key("compile", name, tuple(ingredients))


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
