"""Traces of the user's code in the store: found again without importing anything, kept once they are made.

A function can read anything, so what decides its trace is known only after tracing it. The store therefore
has two kinds of results:

    inputs   a section, and the digests of inputs so far   -> the names of the inputs to look at next
    trace    a section, and the digests of all its inputs  -> the portable program

A look-up begins with the section alone, reads the named inputs as they are now, and goes on with their
digests until it finds a trace. A trace is used only where every input that it read is as it was.

The digest of a password could be tried out, so an environment variable is sealed in keys, and a trace that
reads one which is set goes to no shared store. Settings of jax and Python are the exception.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from glob import escape
from typing import Any

from prejit.compiler.lowering.user.trace_inputs import UNSET, Input, Present, file_digest, is_input
from prejit.compiler.manifest.manifest import Manifest, Model, Program
from prejit.compiler.manifest.specs import ProgramSpec
from prejit.compiler.pipeline.model import cache_dtype, longest_context, longest_source
from prejit.compiler.pipeline.result_keys import Ingredients, installed, versions
from prejit.compiler.store.build_cache_key import Key, nearest, why
from prejit.compiler.store.lowering_settings import jax_configuration
from prejit.compiler.store.prejit_code import USER_DECODERS, USER_FUNCTIONS, code_digest
from prejit.compiler.store.store_interface import Store
from prejit.runtime.machine.fingerprint import read_xla_flags

MODEL = "model"
"""The name of what is known of a decoder of the user before its programs."""
_MAX_STEPS = 32
"""Largest number of steps of a look-up."""


@dataclass(frozen=True)
class Known:
    """The knowledge of the store about a trace.

    Attributes:
        name: name of the program, for people: `demo/score/batch8`.
        section: the ingredients that the manifest decides.
        inputs: the inputs that were looked at, each with its digest.
        result: what `remember` stored; None: it has to be traced.
        never: why it is traced at every build; empty: it need not be.
    """

    name: str
    section: Ingredients
    inputs: Mapping[Input, str]
    result: Mapping[str, Any] | None = None
    never: str = ""

    def why(self, store: Store) -> str:
        """Return why it has to be traced: the inputs that changed."""
        if self.never:
            return f"it is traced at every build: {self.never}"
        new = _key("trace", self.name, self.section, self.inputs, store)
        old = nearest(store.last_keys(new.kind, new.name), new)
        if old is not None:  # a look-up that ends early knows fewer inputs
            names = {name for name, _ in new.ingredients}
            kept = (pair for pair in old.ingredients if pair[0] in names or not is_input(pair[0]))
            old = Key(old.kind, old.name, tuple(kept))
        return why(old, new)


Presents = Callable[[tuple[str, ...], tuple[str, ...]], Present]
"""Returns the inputs of a manifest's code as they are now, for a search path that code makes."""


def function_section(
    manifest: Manifest,
    program: Program,
    spec: ProgramSpec,
    platforms: Iterable[str],
    handlers: Sequence[str],
    present: Present,
) -> Ingredients | None:
    """Return what a manifest says about a function; None: it holds objects, so it is traced at every build.

    `handlers` are the names by which programs may call libraries; `present` reads files.
    """
    objects = (program.fn, program.args, program.params)
    if manifest.path is None or not all(map(_is_data, objects)):
        return None
    mesh = manifest.mesh
    file = manifest.resolve(str(program.fn)) if program.is_file else None
    said = {
        "args": program.args,
        "bucket": spec.bucket,
        "static": spec.static,
        "donate": program.donate,
        "pad": program.pad,
        "open_sizes": program.open_sizes,
        "repeat": bool(program.repeat),
        "carry": program.carry,
        "shardings": program.shardings,
    }
    return (
        ("function", str(program.fn) if file is None else file_digest(str(file))),
        *((name, _as_text(value)) for name, value in said.items()),
        ("mesh", "none" if mesh is None else str(mesh)),
        ("handlers", " ".join(handlers)),
        ("platforms", " ".join(sorted({*platforms}))),
        *_files(manifest, program, present),
        ("our code", code_digest(*USER_FUNCTIONS)),
        *_environment(),
    )


def decoder_section(
    manifest: Manifest, spec: ProgramSpec | None, present: Present, *, out_in: bool
) -> Ingredients | None:
    """Return what a manifest says about a program of the user's decoder; None: it holds objects.

    Without a program it is what decides the facts about the decoder as a whole.
    """
    model = manifest.model
    assert model is not None
    if manifest.path is None or not all(map(_is_data, (model.module, model.params))):
        return None
    return (
        ("decoder", str(model.module)),
        ("program", MODEL if spec is None else spec.kind),
        ("bucket", _as_text({} if spec is None else spec.bucket)),
        ("dtype", model.dtype),
        ("cache_dtype", cache_dtype(manifest)),
        ("longest context", str(longest_context(manifest))),
        ("longest source", str(longest_source(manifest))),
        ("matrices", "out, in" if out_in else "each as XLA wants it"),
        *_files(manifest, model, present),
        ("our code", code_digest(*USER_DECODERS)),
        *_environment(),
        *installed("flax").items(),
    )


_DEVICES = "--xla_force_host_platform_device_count"
"""The flag in XLA_FLAGS that sets how many devices code of the user sees: the last one counts."""


def declared_reads(manifest: Manifest) -> tuple[str, ...]:
    """Return the `reads` of all sections: each section may depend on what another one reads."""
    found = {pattern for program in manifest.programs for pattern in program.reads}
    return tuple(sorted(found.union(manifest.model.reads if manifest.model is not None else ())))


def _files(manifest: Manifest, section: Program | Model, present: Present) -> Ingredients:
    reads = declared_reads(manifest)
    named = () if section.params is None else (escape(str(section.params)),)
    return (
        ("impure", str(section.impure)),
        ("reads", _as_text(reads)),
        *((f"params {name}", digest) for name, digest in present.files(named)),
        *((f"reads {name}", digest) for name, digest in present.files(reads)),
    )


def _environment() -> Ingredients:
    devices = re.findall(rf"{_DEVICES}=(\S+)", read_xla_flags(os.environ))
    return (
        ("jax configuration", jax_configuration(os.environ)),
        *((_DEVICES, count) for count in devices[-1:]),
        ("python", platform.python_version() + " -O" * sys.flags.optimize),
        *versions("jaxlib").items(),
        *installed("jax").items(),
    )


def _is_data(value: Any) -> bool:
    """Return whether a value is one that a manifest file can hold."""
    if isinstance(value, dict):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_data, value))
    return value is None or isinstance(value, str)


def _as_text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def find_trace(
    name: str, section: Ingredients, store: Store, presents: Presents, *, reads: bool
) -> Known:
    """Return what the store knows of a trace. A file of StableHLO reads nothing else: `reads` is false."""
    known: dict[Input, str] = {}
    for _ in range(_MAX_STEPS):
        new: dict[Input, str] = {}
        if reads:
            step = store.get(_key("inputs", name, section, known, store))
            if step is None:
                break
            present = presents(tuple(step["front"]), tuple(step["back"]))
            named = (Input(kind, of) for kind, of in step["inputs"])
            new = present.digests(each for each in named if each not in known)
            known |= new
        # Damaged contents would be found only in a worker. Programs of functions are small.
        result = store.get(_key("trace", name, section, known, store), verify=True)
        if result is not None:
            return Known(name, section, known, result.get("trace"), result.get("never", ""))
        if not new:
            break
    return Known(name, section, known)


def remember_trace(
    known: Known,
    inputs: Mapping[Input, str],
    search_path: tuple[tuple[str, ...], tuple[str, ...]],
    result: Mapping[str, Any],
    blobs: Iterable[str],
    store: Store,
    *,
    reads: bool = True,
) -> None:
    """Keep a trace under everything that it read.

    `known` is what the look-up found, and `inputs` what the trace read, each with its digest.
    `search_path` has the directories before and behind `sys.path` in which modules were found. `result`
    is `{"trace": ...}`, or `{"never": reason}`; `blobs` are those that it needs.
    """

    def key(kind: str, of: Mapping[Input, str]) -> Key:
        return _key(kind, known.name, known.section, of, store)

    def step(new: Iterable[Input]) -> dict[str, Any]:
        front, back = search_path
        named = [[each.kind, each.name] for each in sorted(new)]
        return {"inputs": named, "front": [*front], "back": [*back]}

    if not reads:
        store.put(key("trace", {}), result, blobs=blobs)
        return
    before = known.inputs if all(inputs.get(i, d) == d for i, d in known.inputs.items()) else {}
    together = {**before, **inputs}
    if before:
        # Others may have the first step from a shared store: they find this trace behind it.
        if together.keys() - before.keys():
            store.put(key("inputs", before), step(together.keys() - before.keys()))
        store.put(key("trace", together), result, blobs=blobs)
    if not before or before.keys() - inputs.keys():
        store.put(key("inputs", {}), step(inputs))
        store.put(key("trace", inputs), result, blobs=blobs)


def remembered(known: Known, inputs: Mapping[Input, str], store: Store) -> Mapping[str, Any] | None:
    """Return the trace that the store has for exactly these inputs."""
    for each in ({**known.inputs, **inputs}, inputs):
        key = _key("trace", known.name, known.section, each, store)
        if (found := store.get(key)) is not None:
            return found.get("trace")
    return None


def _key(
    kind: str, name: str, section: Ingredients, inputs: Mapping[Input, str], store: Store
) -> Key:
    """Return a key of kind `inputs` or `trace`. That a variable is not set is no secret."""

    def value(read: Input) -> str:
        if read.is_private and inputs[read] != UNSET:
            return store.seal(f"{read.label} {inputs[read]}")
        return inputs[read]

    return Key(kind, name, (*section, *((each.label, value(each)) for each in sorted(inputs))))
