"""Run calls of jitted functions without a trace, as a recording of the same process has them.

A call is served if the command, files, environment variables and modules that the recorded process had read
before it are the same, and two recordings gave the same program for a call of this signature.

Its result is a tree, kept as JSON. A tree of jax has nodes of any registered class, with values of the class
beside the children, such as the function of a train state. Of these JSON has plain values and names; what the
call was given, it refers to.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import json
import os
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from prejit.runtime.recorded.hook.jax_calls import (
    PARTS,
    JaxCall,
    KeptCall,
    SignatureReader,
    TracedPart,
    load_executable,
    looks_for_nans,
    signature_of,
    structure_of,
)
from prejit.runtime.recorded.hook.kept_shardings import NotKeptError
from prejit.runtime.recorded.hook.plain_texts import attributes_of, digest_of, is_of_program
from prejit.runtime.recorded.hook.process_inputs import (
    InputComparison,
    calls_file,
    command_of_process,
)

CHECKED = "traced to be compared with "
"""The beginning of the reason why a call that could be served is traced; the program's key follows."""
_DEPTH = 12
"""How deep values given with a call are looked for."""
_MAXIMUM_GIVEN = 5000
_HEAP = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: the class is written in Python, and its objects hold nothing but attributes."""


class KeptCalls:
    """Serves the calls of this process.

    Args:
        directory: the directory of jax's cache, with the files of calls.
        settings: settings of jax that prejit sets, which tell nothing of a program.
        checked: the share of the calls that jax traces for comparison, from 0 to 1.
        tell: takes of each call the name of its function, why it is traced (None: it is not), and the
            seconds that it took to say so.
    """

    def __init__(
        self,
        directory: Path,
        settings: tuple[str, ...],
        checked: float,
        tell: Callable[[str, str | None, float], None],
    ) -> None:
        self._file = directory / calls_file(command_of_process())
        # Beside the directories of unpacked bundles, which nobody writes.
        self._receipts = directory.parent.parent / "inputs" / self._file.name
        self._reader = SignatureReader(settings)
        self._checked = checked
        self._tell = tell
        self._broken: str | None = None
        self._times: dict[str, int] = {}
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._stopped: set[str] = set()

    @functools.cached_property
    def _recorded(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = json.loads(self._file.read_text())
        except (OSError, ValueError):
            return None
        return found

    @functools.cached_property
    def _comparison(self) -> InputComparison:
        assert self._recorded is not None
        return InputComparison(self._recorded["inputs"], self._receipts)

    def started(self, token: object, call: JaxCall) -> KeptCall | None:
        """Return what runs a call without a trace; None: jax traces it."""
        began = time.perf_counter()
        try:
            with self._lock:
                kept, reason = self._kept(call), None
        except NotKeptError as error:
            kept, reason = None, str(error)
        except Exception as error:  # of a class of the program, or of jax
            kept, reason = None, f"{type(error).__name__}: {error}"
        self._tell(call_name(call), reason, time.perf_counter() - began)
        return kept

    def stop(self, function: str) -> None:
        """Serve no call of a function any more: its trace has given another program."""
        self._stopped.add(function)

    def _kept(self, call: JaxCall) -> KeptCall:
        if self._broken is not None:
            raise NotKeptError(self._broken)
        if self._recorded is None:
            raise NotKeptError("no recording of this command in this directory")
        if os.getpid() != self._process:
            raise NotKeptError("it runs in a process that was forked after jax was imported")
        if looks_for_nans():
            raise NotKeptError("jax looks for NaNs or infinities")
        parts = self._reader.read(call)
        signature = signature_of(parts)
        recorded = self._recorded["calls"].get(signature)
        if recorded is None:
            raise NotKeptError(self._difference(parts))
        if recorded["reason"] is not None:
            raise NotKeptError(recorded["reason"])
        if call_name(call) in self._stopped:
            raise NotKeptError("a trace of this function has given another program")
        before = self._times.get(signature, 0)
        if before >= len(recorded["indices"]):
            raise NotKeptError("it is called for more functions than were recorded")
        self._times[signature] = before + 1
        difference = self._comparison.difference(recorded["indices"][before])
        if difference is not None:
            self._broken = f"{difference} is not as recorded"
            raise NotKeptError(self._broken)
        if self._checked and random.random() < self._checked:  # noqa: S311, no secret
            raise NotKeptError(CHECKED + recorded["program"])
        tree = tree_of(recorded["results"], functools.cache(functools.partial(given_values, call)))
        kept = KeptCall(_executable(recorded["program"], json.dumps(recorded["executable"])), tree)
        self._comparison.save()
        return kept

    def _difference(self, parts: dict[str, str]) -> str:
        """Return which part of a signature no recorded call has."""
        assert self._recorded is not None
        same = [*self._recorded["calls"].values()]
        for name in PARTS:
            digest = digest_of(parts[name])
            found = [each for each in same if each["parts"][name][0] == digest]
            if not found:
                text = parts[name] if len(parts[name]) < 200 else f"{parts[name][:200]}..."
                near = f", recorded {same[0]['parts'][name][1]}" if name != "function" else ""
                return f"{name} not as recorded: {text}{near}"
            same = found
        return "not as recorded"


def call_name(call: JaxCall) -> str:
    """Return the name of a call's function as jax's programs have it."""
    if isinstance(call.function, TracedPart):
        return call.function.name
    return str(getattr(call.function, "__name__", type(call.function).__name__))


@functools.lru_cache(8192)
def _executable(key: str, described: str) -> Any:
    return load_executable(json.loads(described), key)


def given_values(call: JaxCall) -> list[Any]:
    """Return the values that a call was given beside arrays, in an order that all processes have.

    They are the classes and values of its trees, its static arguments, and what its function holds. What jax
    has traced already returns a list and needs none.
    """
    if isinstance(call.function, TracedPart):
        return []
    nodes = itertools.chain.from_iterable(map(_nodes, call.structures))
    values = itertools.chain(nodes, call.static, [call.function])
    held = itertools.chain.from_iterable(_inside(value, _DEPTH) for value in values)
    return list(itertools.islice(held, _MAXIMUM_GIVEN))


def _nodes(tree: Any) -> Iterator[Any]:
    data = tree.node_data()
    if data is None:
        return
    yield data
    for child in tree.children():
        yield from _nodes(child)


def _inside(value: Any, depth: int) -> Iterator[Any]:
    """Yield a value and what it holds, as far as its order is the same in all processes."""
    yield value
    if depth == 0:
        return
    held: list[Any] = []
    if isinstance(value, (tuple, list)):
        held = list(value)
    elif isinstance(value, dict):
        held = list(value.values())
    elif inspect.ismethod(value):
        held = [value.__func__, value.__self__]
    elif inspect.isfunction(value):
        for cell in value.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:
                continue
    elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
        held = [value.func, value.args, value.keywords]
    elif _is_plain_object(type(value)):
        held = list(attributes_of(value).values())
    for each in held:
        yield from _inside(each, depth - 1)


def tree_json(tree: Any, given: list[Any]) -> Any:
    """Return the tree of a call's results as JSON. `given` is what `given_values` returned.

    Raises:
        NotKeptError: it has a value that is neither plain, nor has a name, nor was given with the call.
    """
    data = tree.node_data()
    if data is None:
        return None
    kind, beside = data
    if kind is type(None):
        return "none"
    children = [tree_json(child, given) for child in tree.children()]
    return [_value_json(kind, given), _value_json(beside, given), children]


def tree_of(described: Any, given: Callable[[], list[Any]]) -> Any:
    """Return the tree that `tree_json` described. `given` returns what `given_values` does for the call here.

    Raises:
        NotKeptError: the process has no such class or value.
    """
    if described is None:
        return jax.tree.structure(0)
    if described == "none":
        return jax.tree.structure(None)
    kind, beside, children = described
    made = [tree_of(child, given) for child in children]
    return structure_of(_value(kind, given), _value(beside, given), made)


def _value_json(value: Any, given: list[Any]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return {"is": value}
    if kind is float:
        return {"float": value.hex()}
    for place, each in enumerate(given):
        if each is value:
            return {"given": place}
    if kind is PyTreeDef:
        return {"tree": tree_json(value, given)}
    name = _name_of(value)
    if name is not None:
        return {"named": name}
    if kind in (dict, OrderedDict):
        pairs = [[_value_json(k, given), _value_json(v, given)] for k, v in value.items()]
        return {kind.__name__: pairs}
    if kind in (list, set, frozenset):
        ordered = value if kind is list else sorted(value, key=repr)
        return {kind.__name__: [_value_json(each, given) for each in ordered]}
    if isinstance(value, tuple) and _c_class(kind) is tuple and not attributes_of(value):
        return {"tuple": [_value_json(kind, given), [_value_json(each, given) for each in value]]}
    if _is_plain_object(kind):
        # Another object would not equal the one that the program has.
        if getattr(kind, "__eq__", None) is object.__eq__:
            raise NotKeptError(f"its results hold a {kind.__qualname__}, which equals itself alone")
        state = [[key, _value_json(each, given)] for key, each in attributes_of(value).items()]
        return {"object": [_value_json(kind, given), state]}
    raise NotKeptError(f"its results hold a {kind.__module__}.{kind.__qualname__}")


def _value(described: Any, given: Callable[[], list[Any]]) -> Any:
    ((kind, content),) = described.items()
    match kind:
        case "is":
            return content
        case "float":
            return float.fromhex(content)
        case "given":
            return given()[content]
        case "named":
            return _named(content)
        case "tree":
            return tree_of(content, given)
        case "dict" | "OrderedDict":
            pairs = ((_value(k, given), _value(v, given)) for k, v in content)
            return dict(pairs) if kind == "dict" else OrderedDict(pairs)
        case "list" | "set" | "frozenset":
            make = {"list": list, "set": set, "frozenset": frozenset}[kind]
            return make(_value(each, given) for each in content)
        case "tuple":
            return tuple.__new__(
                _value(content[0], given), [_value(each, given) for each in content[1]]
            )
        case "object":
            class_ = _value(content[0], given)
            if not _is_plain_object(class_):
                raise NotKeptError(f"{class_.__qualname__} is no plain class any more")
            made = object.__new__(class_)
            for key, each in content[1]:
                object.__setattr__(made, key, _value(each, given))
            return made
    raise NotKeptError(f"no value for {described}")


def _c_class(kind: Any) -> Any:
    """Return the class of C whose objects those of a class are; None: it is no class."""
    return next((each for each in getattr(kind, "__mro__", ()) if not each.__flags__ & _HEAP), None)


def _is_plain_object(kind: Any) -> bool:
    """Return whether objects of a class hold nothing but their attributes, as pickle would have it."""
    own = ["__new__", "__reduce__", "__reduce_ex__"]
    own += [] if dataclasses.is_dataclass(kind) else ["__getstate__"]  # those with slots have one
    plain = all(getattr(kind, name) is getattr(object, name) for name in own)
    has_own = hasattr(kind, "__setstate__") and not dataclasses.is_dataclass(kind)
    return _c_class(kind) is object and plain and not has_own


def _name_of(value: Any) -> list[str] | None:
    """Return a module and a name in it that lead to a class, a function or an object of a module."""
    if isinstance(value, type) or inspect.isroutine(value):
        name = [str(getattr(value, "__module__", "")), str(getattr(value, "__qualname__", ""))]
        return name if _named_or_none(name) is value else None
    if isinstance(value, enum.Enum):
        class_ = _name_of(type(value))
        return None if class_ is None else [class_[0], f"{class_[1]}.{value.name}"]
    homes = [type(value).__module__]
    if not isinstance(value, (tuple, frozenset)):  # which may be one by chance
        homes += filter(is_of_program, [*sys.modules])
    for home in homes:
        for attribute, each in [*vars(sys.modules.get(home, object)).items()]:
            if each is value:
                return [home, attribute]
    return None


def _named(name: list[str]) -> Any:
    found = _named_or_none(name)
    if found is None:
        raise NotKeptError(f"{name[0]} has no {name[1]} here")
    return found


def _named_or_none(name: list[str]) -> Any:
    """Return what a module that is imported has by a name; None: it has none."""
    found: Any = sys.modules.get(name[0])
    for part in name[1].split("."):
        found = getattr(found, part, None)
    return found
