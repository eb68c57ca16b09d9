"""Why jax did not find a program in a recorded bundle: the ingredient of its key that differs, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prejit.runtime.format.bundle_schema import RecordedProgram
from prejit.runtime.machine.fingerprint import Requirement
from prejit.runtime.recorded.hook import jax_texts
from prejit.runtime.recorded.hook_events import UNCACHED, JaxRequest

_RECORD = "record this run too (prejit record -o BUNDLE -- COMMAND)"
_UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs between a program and the nearest recorded one.

    Attributes:
        name: what it is: jax's name of the ingredient, `arguments`, or another.
        recorded: its value in the bundle.
        found: its value in this run.
        hint: what to do.
    """

    name: str
    recorded: str
    found: str
    hint: str

    def __str__(self) -> str:
        return f"{self.name}: recorded {self.recorded}, found {self.found}"


_CONDITIONS = {
    # ingredient: (the conditions behind it, what to do)
    jax_texts.BACKEND: (
        ("backend version",),
        f"run with the plugin and driver of the recording, or {_RECORD}",
    ),
    jax_texts.XLA_FLAGS: (
        ("XLA flags",),
        "set XLA_FLAGS, LIBTPU_INIT_ARGS and arguments that begin with --xla as in the recording, or "
        + _RECORD,
    ),
    jax_texts.COMPILE_OPTIONS: (
        ("device count",),
        "use as many devices, and the same compiler options of jit and settings of jax, or "
        + _RECORD,
    ),
    jax_texts.ACCELERATOR: (
        ("device kind", "device count"),
        f"use as many devices of this kind, or {_RECORD}: it adds what this machine needs",
    ),
}


def differences(
    found: JaxRequest,
    recorded: Sequence[RecordedProgram],
    requirement: Requirement,
    *,
    jaxlib: str,
    cpu_features: Sequence[str],
) -> tuple[Difference, ...]:
    """Return what differs between a program that was compiled and the nearest recorded one.

    `recorded` and `requirement` are those of the target that matches, or of the closest; `jaxlib` is the
    version in the program's process.
    """
    if found.outcome == UNCACHED:
        what = "jax_enable_compilation_cache"
        hint = "remove what turns jax's cache off; jax also keeps no program of some platforms"
        return (Difference("jax's cache", "on", "off", f"{hint} ({what})"),)
    same_name = [each for each in recorded if each.name == found.name]
    if not same_name:
        return (Difference("program", "none of this name", _arguments(found.arguments), _RECORD),)
    if not found.ingredients:
        hint = "leave the loggers of jax enabled: logging.disable and disable_existing_loggers hide the cause"
        return (Difference("cause", f"{len(same_name)} of this name", _UNKNOWN, hint),)
    nearest = min(same_name, key=lambda each: _distance(found, each))
    rows = [
        _difference(name, found, nearest, requirement, jaxlib, cpu_features)
        for name in _telling(_differing(found, nearest))
    ]
    if rows:
        return tuple(rows)
    hint = "look for warnings of jax in the program's output: it could not load the recorded file"
    return (Difference("file", nearest.file, "not loaded", hint),)


def _differing(found: JaxRequest, recorded: RecordedProgram) -> list[str]:
    """Return the names of the ingredients that differ, in jax's order."""
    names = dict.fromkeys((*jax_texts.INGREDIENTS, *found.ingredients))
    return [
        name
        for name in names
        if name in recorded.ingredients
        and found.ingredients.get(name) != recorded.ingredients[name]
    ]


def _telling(differing: list[str]) -> list[str]:
    """Return the ingredients that differ without those that follow from others.

    Another jaxlib writes most of the others in other forms. XLA's flags are also in the compile options.
    """
    if jax_texts.JAXLIB in differing:
        return [jax_texts.JAXLIB]
    if jax_texts.XLA_FLAGS in differing:
        return [name for name in differing if name != jax_texts.COMPILE_OPTIONS]
    return differing


def _distance(found: JaxRequest, recorded: RecordedProgram) -> tuple[int, bool, str]:
    """Return a sort key: few ingredients that differ, equal arguments, the file's name."""
    differing = _differing(found, recorded)
    return len(differing), found.arguments != recorded.arguments, recorded.file


def _difference(
    name: str,
    found: JaxRequest,
    recorded: RecordedProgram,
    requirement: Requirement,
    jaxlib: str,
    cpu_features: Sequence[str],
) -> Difference:
    if name == jax_texts.COMPUTATION:
        if found.arguments != recorded.arguments:
            sides = _arguments(recorded.arguments), _arguments(found.arguments)
            return Difference("arguments", *sides, _RECORD)
        hint = (
            "a static argument, or a shape that it takes from outside, has another value, as n in "
            f"jnp.zeros(n); or its code or a library changed: {_RECORD}"
        )
        return Difference(name, "another program of these arguments", "this one", hint)
    if name == jax_texts.JAXLIB:
        hint = f"install jaxlib {requirement.jaxlib}, or {_RECORD}"
        return Difference("jaxlib", requirement.jaxlib, jaxlib, hint)
    if name == jax_texts.COMPRESSION:
        hint = "install zstandard in both environments or in none"
        return Difference(name, "another compression", "this one", hint)
    conditions, hint = _CONDITIONS.get(name, ((), _RECORD))
    for condition in conditions:
        there = recorded.conditions.get(condition, _UNKNOWN) or "none"
        here = found.conditions.get(condition, _UNKNOWN) or "none"
        if there != here:
            return Difference(condition, there, here, hint)
    if name == jax_texts.ACCELERATOR and set(cpu_features) != set(requirement.cpu_features):
        more = set(requirement.cpu_features) - set(cpu_features)
        fewer = set(cpu_features) - set(requirement.cpu_features)
        return Difference("CPU features", _only(more), _only(fewer), hint)
    return Difference(name, "another one", "this one", hint)


def _arguments(arguments: Sequence[str] | None) -> str:
    if arguments is None:
        return _UNKNOWN
    more = f", ... {len(arguments)} in all" if len(arguments) > 6 else ""
    return f"({', '.join(arguments[:6])}{more})"


def _only(names: set[str]) -> str:
    return f"also {', '.join(sorted(names))}" if names else "no others"
