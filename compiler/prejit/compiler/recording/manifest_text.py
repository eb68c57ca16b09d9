"""The manifest of the functions and shapes that a recording saw: a beginning for `prejit build`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from prejit.runtime.recorded.events import JaxRequest

_PLAIN = re.compile(r"[a-z0-9_]+\[[\d,]*\]")
"""An argument that a manifest can name: no typed key."""

_IMPORTABLE = re.compile(r"\w+(?:\.\w+)*:\w+")

_HEAD = """\
# The functions and shapes that `prejit record` saw. `prejit plan` reads this file; the comments say what it
# lacks. A module is found relative to this file, and importing it must not run the program.
[bundle]
name = "{name}"
"""
_TAIL = """
[[target]]
name = "cpu-host"
"""


def manifest_text(name: str, requests: Iterable[JaxRequest]) -> str:
    """Return a manifest as TOML.

    Args:
        name: the name of the bundle.
        requests: the programs of a run. Those whose function can be imported become sections, once for each
            combination of shapes; the others are named in comments.
    """
    sections, others = dict[tuple[str, tuple[str, ...]], JaxRequest](), dict[str, int]()
    for request in requests:
        function = request.function
        if not function or not _IMPORTABLE.fullmatch(function) or request.arguments is None:
            others[request.name] = others.get(request.name, 0) + 1
        else:
            sections.setdefault((function, request.arguments), request)
    parts, counts = [_HEAD.format(name=name)], dict[str, int]()
    for (function, _), request in sections.items():
        plain = re.sub(r"[^A-Za-z0-9._-]", "-", function.rpartition(":")[2]).lstrip("._-") or "f"
        counts[plain] = counts.get(plain, 0) + 1
        label = plain if counts[plain] == 1 else f"{plain}-{counts[plain]}"
        parts.append(_section(label, function, request))
    parts.append(_TAIL)
    if others:
        parts.append(
            "\n# Compiled too, by functions that cannot be imported by a name that was found:\n"
        )
        parts += [f"#   {count} x {name}\n" for name, count in sorted(others.items())]
    return "".join(parts)


def _section(label: str, function: str, request: JaxRequest) -> str:
    arguments, parameters = request.arguments or (), request.parameters
    lines = ["", "[[program]]", f'name = "{label}"', f'function = "{function}"']
    if len(arguments) == len(parameters) and all(map(_PLAIN.fullmatch, arguments)):
        pairs = zip(parameters, arguments, strict=True)
        lines.append(
            f"args = {{ {', '.join(f'{name} = {_quoted(text)}' for name, text in pairs)} }}"
        )
    else:
        lines = [f"# {line}".rstrip() for line in lines]
        lines.append(
            f"# args: fill in; the parameters ({', '.join(parameters)}) hold {_counted(arguments)}:"
        )
        lines += [f"#   {text}" for text in arguments[:20]]
        lines += [f"#   and {len(arguments) - 20} more"] if len(arguments) > 20 else []
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return f'"{text}"'


def _counted(arguments: Sequence[str]) -> str:
    return "1 array" if len(arguments) == 1 else f"{len(arguments)} arrays"
