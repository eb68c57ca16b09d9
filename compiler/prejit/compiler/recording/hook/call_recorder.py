"""Record the calls of a process that jax traces, for `kept_calls` of the runtime's hook.

`executable_json` describes jax's executables for its `load_executable`; `CallbackLines` finds the lines that
make an executable call Python.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from prejit.compiler.recording.hook.jax_lowerings import hook_callbacks
from prejit.compiler.recording.hook.trace_effects import TraceEffects
from prejit.runtime.recorded.hook import jax_calls
from prejit.runtime.recorded.hook.input_facts import file_of, initial_environment
from prejit.runtime.recorded.hook.jax_calls import (
    PARTS,
    CompiledCall,
    JaxCall,
    Json,
    SignatureReader,
    TracedPart,
    aval_of,
    looks_for_nans,
    settings_text,
    signature_of,
)
from prejit.runtime.recorded.hook.kept_calls import call_name, given_values, tree_json
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError, entries_of, sharding_json
from prejit.runtime.recorded.hook.plain_texts import digest_of, text_of
from prejit.runtime.recorded.hook.process_inputs import command_of_process

_EXCERPT = 300
"""Characters of a part of a signature that a bundle keeps, for reports."""


@dataclass
class _Begun:
    """A call that jax traces now.

    Attributes:
        held: what its function and static arguments hold; None: it is not compared.
        parts: its signature; None: it has none.
        reason: why it cannot be kept, as far as the call itself tells.
        given: what `given_values` returned.
        effects: watches what its trace changes; None: jax is not tracing it.
        outside: how many effects outside of the process were seen before.
        key: the key of its program in jax's cache, if other calls followed the compile: jax splits arguments
            over devices by programs of its own.
    """

    call: JaxCall
    held: str | None
    parts: dict[str, str] | None
    reason: str | None
    given: list[Any]
    effects: TraceEffects | None
    outside: int
    key: str | None = None


class CallRecorder:
    """Records calls.

    Args:
        settings: settings of jax that prejit sets, which tell nothing of a program.
        key_of: returns the key in jax's cache of the program that this thread compiled last; None: none.
        write: takes lines.
    """

    def __init__(
        self,
        settings: tuple[str, ...],
        key_of: Callable[[], str | None],
        write: Callable[[list[dict[str, Any]]], None],
    ) -> None:
        self._settings = settings
        self._reader = SignatureReader(settings)
        self._callbacks = CallbackLines()
        self._key_of = key_of
        self._write = write
        self._thread = threading.local()
        self._keys: dict[int, tuple[Any, str]] = {}
        self._modules: set[str] = set()
        self._traces: set[int] = set()
        self._count = 0
        self._watch = sys.modules["prejit_process_watch"].watch
        of_process = {"environment": initial_environment(), "prefix": sys.prefix}
        self._write([{"command": command_of_process(), **of_process}])

    def started(self, token: object, call: JaxCall) -> None:
        """jax begins with a call."""
        begun = self._begun()
        on_stack = _frames()
        for stale in [each for each in begun if each not in on_stack]:  # jax raised an error
            self._end_trace(begun.pop(stale))
        if any(each.effects is not None for each in begun.values()):
            return  # inside a trace, for a value that the trace asks for
        parts, reason = None, None
        given: list[Any] = []
        try:
            parts = self._reader.read(call)
            given = given_values(call)
        except NotKeptError as error:
            reason = str(error)
        except Exception as error:  # of a class of the program
            reason = f"{type(error).__name__}: {error}"
        if looks_for_nans():
            reason = "jax looks for NaNs or infinities"
        self._count += 1
        self._write(self._inputs())
        before = self._key_of()
        if begun:
            outer = next(reversed(begun.values()))
            outer.key = before or outer.key
        held, effects, outside = None, None, 0
        if not isinstance(call.function, TracedPart):
            held = _held(call)
            effects = TraceEffects(call.function)
            self._traces.add(id(effects))
            self._watch.effects = self._watch.effects or []
            outside = len(self._watch.effects)
        begun[id(token)] = _Begun(call, held, parts, reason, given, effects, outside)

    def traced(self, token: object) -> None:
        """jax has traced a call."""
        begun = self._begun().get(id(token))
        if begun is None or begun.effects is None:
            return
        effect = self._end_trace(begun)
        if effect is None and _held(begun.call) != begun.held:
            effect = "its trace changes what its function or a static argument holds"
        begun.reason = begun.reason or effect
        self._write(self._inputs())  # what the trace has read counts for it

    def _end_trace(self, begun: _Begun) -> str | None:
        """Return what a trace has changed outside itself; None: nothing. Other threads count, too."""
        effects, begun.effects = begun.effects, None
        if effects is None:
            return None
        outside = (self._watch.effects or [])[begun.outside :]
        self._traces.discard(id(effects))
        if not self._traces:
            self._watch.effects = None
        effect = effects.found()
        return effect or (f"its trace does {outside[0]}" if outside else None)

    def ended(self, token: object, compiled: CompiledCall) -> None:
        """jax has traced, compiled and run a call."""
        begun = self._begun().pop(id(token), None)
        callbacks = self._callbacks.reason(compiled.executable)
        if begun is None or (begun.parts is None and callbacks is None):
            return
        # A jaxpr that calls Python has no signature. No run looks for this one: it is for the report.
        parts = begun.parts or dict.fromkeys(PARTS, str(callbacks))
        executable = getattr(compiled.executable, "xla_executable", None)
        key = self._key_of() or begun.key
        if key is not None:
            self._keys[id(executable)] = executable, key
        key = self._keys.get(id(executable), (None, None))[1]
        line: dict[str, Any] = {
            "signature": signature_of(parts),
            "name": call_name(begun.call),
            "parts": {name: [digest_of(parts[name]), parts[name][:_EXCERPT]] for name in PARTS},
            "index": self._count,
            "program": key,
            "reason": callbacks or begun.reason,
        }
        try:
            if begun.parts and text_of(settings_text(self._settings)) != parts["settings"]:
                # It imported a module of jax that has settings: without it no later call is as recorded.
                raise NotKeptError("its lowering changes the settings of jax")
            if compiled.arrays != len(begun.call.arrays):
                raise NotKeptError("its executable needs arrays of the trace")
            if key is None:
                raise NotKeptError("jax kept no executable of it")
            line["executable"] = executable_json(compiled.executable)
            if not compiled.is_dispatched:
                raise NotKeptError("jaxlib does not run it again by itself")
            line["results"] = tree_json(compiled.tree, begun.given)
        except NotKeptError as error:
            line["reason"] = line["reason"] or str(error)
        except Exception as error:  # of a class of the program, or of jax
            line["reason"] = line["reason"] or f"{type(error).__name__}: {error}"
        self._write([{"called": line}])

    def _begun(self) -> dict[int, _Begun]:
        """Return the calls that this thread traces, by their frames."""
        return vars(self._thread).setdefault("begun", {})

    def _inputs(self) -> list[dict[str, Any]]:
        """Return lines of what the process has read since the call before."""
        modules = {
            name: file_of(module)
            for name, module in [*sys.modules.items()]
            if name not in self._modules
        }
        self._modules.update(modules)
        read = self._watch.taken()
        lines: list[dict[str, Any]] = [{"read": read, "index": self._count}] if read else []
        return lines + ([{"modules": modules}] if modules else [])


def _held(call: JaxCall) -> str | None:
    """Return a text of what a call's function and static arguments hold; None: they cannot be read."""
    try:
        return text_of((call.function, call.static), without_libraries=True)
    except Exception:  # of a class of the program
        return None


def _frames() -> set[int]:
    frame: Any = sys._getframe()
    found = set()
    while frame is not None:
        found.add(id(frame))
        frame = frame.f_back
    return found


def executable_json(executable: Any) -> Json:
    """Return a MeshExecutable without its code, as JSON.

    Raises:
        NotKeptError: it has parts that another process cannot have.
    """
    import jax

    if executable is None or getattr(executable, "_unloaded_executable", None) is None:
        raise NotKeptError("jax kept no executable of it")
    found = executable._unloaded_executable
    if found.host_callbacks or found.keepalive:
        raise NotKeptError("it calls Python")
    if found.unordered_effects or found.ordered_effects:
        raise NotKeptError("it has effects")
    if found.mut is not None and (found.mut.in_mut or found.mut.out_mut):
        raise NotKeptError("it changes a reference of jax")
    if jax.process_count() > 1:
        raise NotKeptError("it runs in several processes")
    return {
        "name": found.name,
        "platform": found.backend.platform,
        "devices": [device.id for device in found.device_list],
        "inputs": [_aval_json(aval) for aval in found.input_avals],
        "input_shardings": [sharding_json(each) for each in found.input_shardings],
        "outputs": [_aval_json(aval) for aval in found.output_avals],
        "output_shardings": [sharding_json(each) for each in found.output_shardings],
        "committed": bool(found.committed),
        "kept": sorted(found.kept_var_idx),
        "plain_layouts": _no_layouts(found.dispatch_in_layouts),
    }


def _no_layouts(layouts: Sequence[Any]) -> bool:
    if any(each is not None for each in layouts):
        raise NotKeptError("it was given layouts of arguments")
    return True


def _aval_json(aval: Any) -> Json:
    import jax

    if type(aval) is not jax.core.ShapedArray:
        raise NotKeptError(f"it takes or returns a {type(aval).__name__}")
    mesh = aval.sharding.mesh
    on_mesh = [] if mesh.empty else [[*_abstract_mesh_json(mesh), entries_of(aval.sharding.spec)]]
    implementation = getattr(aval.dtype, "_impl", None)
    if implementation is not None:
        described = [implementation.name, list(aval.shape), "key", *on_mesh]
    elif hasattr(aval.dtype, "_rules"):
        raise NotKeptError(f"it takes or returns {aval}")
    else:
        kind = "weak" if aval.weak_type else ""
        described = [aval.dtype.name, list(aval.shape), kind, *on_mesh]
    made = aval_of(described)
    if made != aval or str(made) != str(aval):
        raise NotKeptError(f"it takes or returns {aval}")
    return described


def _abstract_mesh_json(mesh: Any) -> Json:
    device = mesh.abstract_device
    return [
        list(mesh.axis_names),
        list(mesh.axis_sizes),
        [str(each) for each in mesh.axis_types],
        None if device is None else [device.device_kind, device.num_cores, device.platform],
    ]


_OURS = os.path.dirname(__file__), os.path.dirname(jax_calls.__file__)
_UNKNOWN = "a line not known"
_MOST = 3
"""Maximum number of lines in a reason."""
_EQUINOX = os.path.join("equinox", "_errors.py")
"""The file of equinox whose checks call Python: those of diffrax, lineax and optimistix, too."""


class CallbackLines:
    """Notes where the program asked for each function that an executable calls, when jax lowers it."""

    def __init__(self) -> None:
        self._lines: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

        def note(callback: Any, frames: list[tuple[str, int]]) -> None:
            self._lines[callback] = _line(frames)

        hook_callbacks(note)

    def reason(self, executable: Any) -> str | None:
        """Return why a MeshExecutable that calls Python is traced; None: it calls nothing."""
        unloaded = getattr(executable, "_unloaded_executable", None)
        callbacks = getattr(unloaded, "host_callbacks", None)
        if not callbacks:
            return None
        lines = [*dict.fromkeys(self._lines.get(each, _UNKNOWN) for each in callbacks)]
        more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        advice = "return the value instead, or put that part under a jax.jit of its own"
        if all(_EQUINOX in each for each in lines):
            advice = "EQX_ON_ERROR=nan makes such a check give NaN instead of an error"
        return (
            f"it calls Python at {', '.join(lines[:_MOST])}{more}, so it is traced, though not compiled: "
            + advice
        )


def _line(frames: list[tuple[str, int]]) -> str:
    """Return the innermost line of the program, and the file of the library between it and jax."""
    frames = [(file, line) for file, line in frames if not file.startswith(_OURS)]
    own = [f"{os.path.basename(file)}:{line}" for file, line in frames if not _is_library(file)]
    library = os.sep.join(frames[0][0].split(os.sep)[-2:]) if frames else ""
    if not own or not _is_library(frames[0][0]):
        return own[0] if own else library or _UNKNOWN
    return f"{own[0]} (in {library})"


def _is_library(file: str) -> bool:
    return "site-packages" in file
