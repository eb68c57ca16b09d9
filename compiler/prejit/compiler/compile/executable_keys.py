"""The key of a compile: everything that decides an executable."""

from __future__ import annotations

import os
from dataclasses import replace

from prejit.compiler.compile.compile_jobs import Source
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.prejit_code import COMPILING, code_digest
from prejit.compiler.targets.build_host import host_cpu, host_features
from prejit.compiler.targets.toolchain import Toolchain
from prejit.runtime.machine.fingerprint import effective_environment

_FLAGS_THAT_PRINT = ("--xla_dump", "--xla_backtrace", "--xla_vlog", "--xla_gpu_dump_autotune")
"""Prefixes of flags with which XLA writes files or logs beside the same executable."""


def executable_key(name: str, toolchain: Toolchain, source: Source) -> Key:
    """Return the key of compiling a program with a toolchain.

    The target's name is no ingredient: two targets for the same machine share their executables. Nor is jax
    where jaxlib alone compiles, which it does for CPUs: a worker imports nothing else.
    """
    target = toolchain.target
    # Ingredients of their own: the program's platforms, and the digest of the tuning file.
    untuned = replace(toolchain, tuned=None)
    machine = untuned.machine(()) | {"described": None, "platforms": None}
    if target.platform == "cpu":
        if not toolchain.is_exact:
            # The host's features get into the code; --xla_cpu_max_isa only removes some of them.
            machine |= {"cpu": host_cpu(), "cpu_features": host_features()}
        machine["cpus"] = toolchain.cpus
    ingredients = [
        ("stablehlo", source.program),
        ("platforms", " ".join(source.platforms)),
        *((("kernels", source.kernels.digest),) if source.kernels is not None else ()),
        *((f"library call {name}", target) for name, target in source.calls),
        ("our code", code_digest(*COMPILING)),
        *(each for each in toolchain.versions if each[0] != "jax" or target.platform != "cpu"),
        ("architecture", target.architecture),
        *((key, _text(value)) for key, value in machine.items() if value is not None),
        # Without the tuning: its content counts, and not its path.
        ("xla_flags", _deciding(untuned.xla_flags(os.environ))),
        ("environment", " ".join(effective_environment(target.platform, os.environ))),
    ]
    if toolchain.tuned is not None:
        ingredients.append(("tuning", toolchain.tuned.digest))
    return Key("compile", name, tuple(ingredients))


def _deciding(flags: str) -> str:
    """Return the flags of XLA that may decide an executable, by name. The order of equal names stays."""
    deciding = (flag for flag in flags.split() if not flag.startswith(_FLAGS_THAT_PRINT))
    return " ".join(sorted(deciding, key=lambda flag: flag.partition("=")[0]))


def _text(value: object) -> str:
    return " ".join(value) if isinstance(value, tuple) else str(value)
