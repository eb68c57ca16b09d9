"""Find what a trace changes outside itself, which would not happen without the trace.

jax asks for functions without effects, and this finds what people do nevertheless: they print, count, append, set
globals, attributes and settings. It compares what the function can reach in a step or two, and the globals of the
program's own modules.
"""

from __future__ import annotations

import inspect
import io
import os
import sys
from collections.abc import Iterator
from typing import Any

_LIBRARY = os.path.join(os.path.dirname(os.__file__), "")
_SIZED = (list, dict, set, bytearray)


class TraceEffects:
    """The state before a trace of a function."""

    def __init__(self, function: Any) -> None:
        self._roots = dict(_roots(function))
        self._before = {name: _state(root) for name, root in self._roots.items()}
        self._settings = _settings()
        self._streams = {name: _Stream(name) for name in ("stdout", "stderr")}

    def found(self) -> str | None:
        """Return what the trace has changed; None: nothing was found. To be called once."""
        streams, self._streams = self._streams, {}
        written = [name for name, stream in streams.items() if stream.close()]
        if written:
            return f"its trace writes to {written[0]}"
        if _settings() != self._settings:
            return "its trace changes a setting of jax"
        for name, root in self._roots.items():
            after, before = _state(root), self._before[name]
            for key in {**before, **after}:
                if before.get(key) != after.get(key):
                    return f"its trace changes {key} of {name}"
        return None


class _Stream:
    """Notes whether something is written to a stream of Python."""

    def __init__(self, name: str) -> None:
        self._stream = getattr(sys, name)
        self.has_written = False
        write = getattr(self._stream, "write", None)

        def noted(text: Any) -> Any:
            self.has_written = True
            return write(text)

        self._is_set = isinstance(self._stream, io.TextIOBase) and "write" not in vars(self._stream)
        if self._is_set:
            self._stream.write = noted

    def close(self) -> bool:
        if self._is_set:
            del self._stream.write
        return self.has_written


def _roots(function: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield names and dictionaries of what a trace of a function may change."""
    for name, module in [*sys.modules.items()]:
        file = getattr(module, "__file__", None)
        own = name == "__main__" or (file and "site-packages" not in file and not file.startswith(_LIBRARY))
        if own and not name.startswith("prejit"):
            yield name, vars(module)
    seen: set[int] = set()
    waiting = [(function, "the function", 3)]
    while waiting:
        value, name, depth = waiting.pop()
        if depth == 0 or id(value) in seen:
            continue
        seen.add(id(value))
        value = getattr(value, "__wrapped__", value)
        if inspect.ismethod(value):
            waiting += [(value.__self__, "self", depth), (value.__func__, name, depth)]
        elif hasattr(value, "func") and hasattr(value, "keywords"):  # functools.partial
            waiting += [(each, name, depth) for each in (value.func, *value.args, *value.keywords.values())]
        elif inspect.isfunction(value):
            cells = dict(zip(value.__code__.co_freevars, value.__closure__ or (), strict=True))
            held = {}
            for each, cell in cells.items():
                try:
                    held[each] = cell.cell_contents
                except ValueError:
                    continue
            if held:
                yield f"{name} {value.__qualname__}", held | {"__defaults__": value.__defaults__}
            waiting += [(content, each, depth - 1) for each, content in held.items()]
        elif isinstance(getattr(value, "__dict__", None), dict) and not inspect.ismodule(value):
            yield f"{name} ({type(value).__qualname__})", vars(value)


def _state(root: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return what tells whether a value was set, and how many members it has."""
    return {
        str(key): (id(value), len(value) if isinstance(value, _SIZED) else -1)
        for key, value in [*root.items()]
    }


def _settings() -> dict[str, Any]:
    import jax

    return dict(jax.config.values)
