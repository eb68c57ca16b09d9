"""What tells the calls of a process apart: function, structure and types of arguments, settings of jax."""

from __future__ import annotations

from typing import Any

from prejit.runtime.recorded.hook.jax_calls import (
    JaxCall,
    TracedPart,
    array_text,
    jit_text,
    settings_text,
)
from prejit.runtime.recorded.hook.plain_texts import digest_of, text_of

PARTS = ("function", "jit", "structure", "arguments", "static", "settings")
"""The parts of a signature, in the order in which a difference is looked for."""


class SignatureReader:
    """Reads the signatures of calls.

    Args:
        left_out: settings of jax that tell nothing of a program.
    """

    def __init__(self, left_out: tuple[str, ...]) -> None:
        self._left_out = left_out
        self._settings: tuple[Any, str] = (None, "")

    def read(self, call: JaxCall) -> dict[str, str]:
        """Return a text for each of PARTS.

        Raises:
            NotKeptError: an argument has a sharding that is not kept, or a jaxpr has no exact text.
        """
        arrays = zip(call.arrays, call.avals, strict=True)
        statics = (call.static, call.static_names)
        if isinstance(call.function, TracedPart):
            function, jit = call.function.texts()
        else:
            function, jit = text_of(call.function), jit_text(call.info)
        return {
            "function": function,
            "jit": jit,
            "structure": "; ".join([*map(_tree_text, call.structures), ", ".join(call.names)]),
            "arguments": ", ".join(array_text(array, aval) for array, aval in arrays),
            "static": text_of(statics),
            "settings": self._settings_text(),
        }

    def _settings_text(self) -> str:
        found = settings_text(self._left_out)
        known, text = self._settings
        if found != known:
            text = text_of(found)
            self._settings = found, text
        return text


def signature_of(parts: dict[str, str]) -> str:
    """Return a digest of all parts."""
    return digest_of("\0".join(parts[name] for name in PARTS))


def _tree_text(tree: Any) -> str:
    data = tree.node_data()
    if data is None:
        return "*"
    kind, beside = data
    children = ",".join(map(_tree_text, tree.children()))
    name = kind.__name__ if kind.__module__ == "builtins" else text_of(kind)
    return f"{name}({'' if beside is None else text_of(beside)}|{children})"
