"""The digest of prejit's own code, as an ingredient of keys.

A module decides a result together with all modules of prejit that it imports. They are found by reading
`import` statements, so a new import is in the keys without anyone adding it to a list. Nothing is imported
for it: a build that changes nothing imports neither jax nor flax.

Only code counts. Comments, docstrings, blank lines, the texts of errors, and the names and places of modules
change no digest.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import prejit.runtime

_ROOTS = {
    "prejit.compiler": Path(__file__).parents[1],
    "prejit.runtime": Path(prejit.runtime.__file__).parent,
}
"""Directory of each root package."""

COMPILING = ("prejit.compiler.compile.worker.compiling",)
"""The module that compiles a program."""
LOWERING = (
    "prejit.compiler.lowering.decoder",
    "prejit.compiler.lowering.encoder",
    "prejit.compiler.models.config_file",
)
"""The modules that lower the programs of a model."""
WEIGHTS = (
    "prejit.compiler.checkpoint.checkpoint",
    "prejit.compiler.pipeline.pack.bundle_files",
    "prejit.compiler.models.registry",
)
"""The modules that make the weights layer of a checkpoint."""
OWN_WEIGHTS = ("prejit.compiler.models.narrowing",)
"""The modules that store the weights of a decoder of the user."""
OWN_ACCURACY = ("prejit.compiler.pipeline.measure.comparison", "prejit.compiler.models.narrowing")
"""The modules that measure what stored dtypes cost a decoder of the user."""
ACCURACY = ("prejit.compiler.pipeline.measure.comparison", "prejit.compiler.checkpoint.checkpoint")
"""The modules that measure what stored dtypes cost in accuracy."""
USER_FUNCTIONS = (
    "prejit.compiler.lowering.user.files",
    "prejit.compiler.lowering.user.finding",
    "prejit.compiler.lowering.user.flax_modules",
    "prejit.compiler.lowering.user.lower",
)
"""The modules that trace and lower a function of the user."""
USER_DECODERS = ("prejit.compiler.lowering.decoder", "prejit.compiler.lowering.user.models")
"""The modules that trace and lower a decoder of the user."""
GOLDEN = ("prejit.runtime.programs.golden",)
"""The module that makes golden answers."""

_TOKEN = re.compile(
    r"""
    (?P<line>  \n [ ]* [^\n"'\#()\[\]{}\\]* )
  | (?P<code>  [^\n"'\#()\[\]{}\\]+ )
  | (?P<open>  [(\[{] )
  | (?P<close> [)\]}] )
  | (?P<text>  \"{3}[^"\\]*(?:(?:\\.|"(?!""))[^"\\]*)*\"{3} | "[^"\\\n]*(?:\\.[^"\\\n]*)*"
             | '{3}[^'\\]*(?:(?:\\.|'(?!''))[^'\\]*)*'{3} | '[^'\\\n]*(?:\\.[^'\\\n]*)*' )
  | (?P<none>  \#[^\n]* | \\\n )
    """,
    re.VERBOSE | re.DOTALL,
)
"""The tokens that separate code from prose. A `line` token includes the first code of its line."""


_NO_CODE = hashlib.sha256().hexdigest()


@dataclass(frozen=True, slots=True)
class _Import:
    """One imported name.

    Attributes:
        module: module or package that it comes from.
        name: the name there; empty for the module itself.
        local: the name that it gets.
    """

    module: str
    name: str
    local: str


@dataclass(frozen=True, slots=True)
class _Source:
    """The parts of a source file that enter a digest.

    Attributes:
        digest: digest of its code without its imports of prejit.
        imports: its imports of prejit, sorted.
    """

    digest: str
    imports: tuple[_Import, ...]


@cache
def code_digest(*modules: str) -> str:
    """Return the digest of the code of modules and of all modules of prejit that they import.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not run and do not count.

    Args:
        modules: full names: `prejit.compiler.lowering.export`.
    """
    parts = set[str]()
    for name in imported(*modules):
        source = _source(name)
        # Imported code enters by its content, not by its path.
        links = sorted(
            f"{each.local}={_source(each.module).digest}.{each.name}" for each in source.imports
        )
        parts.add("\n".join((source.digest, *links)))
    parts.discard(_NO_CODE)  # a package without code of its own counts for nothing
    return f"sha256:{hashlib.sha256(chr(0).join(sorted(parts)).encode()).hexdigest()}"


def directories() -> tuple[str, ...]:
    """Return the directories of prejit's own code."""
    return tuple(map(str, _ROOTS.values()))


@cache
def imported(*modules: str) -> tuple[str, ...]:
    """Return the full names of modules and of all modules of prejit that they import, sorted.

    A package that holds an imported module is one of them.
    """
    found = set[str]()
    left = list(modules)
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            named = {each.module for each in _source(name).imports}
            left += filter(_is_module, named | {each.rpartition(".")[0] for each in named})
    return tuple(sorted(found))


@cache
def _source(module: str) -> _Source:
    """Read a module.

    The standard library's parser takes five times as long, and its trees differ between versions of Python.
    """
    hasher = hashlib.sha256()
    imports = set[_Import]()
    unused_below: int | None = None  # indentation of `if TYPE_CHECKING:`
    for indent, tokens, is_text in _statements(_file(module).read_text("utf-8")):
        if unused_below is not None and indent > unused_below:
            continue
        unused_below = indent if tokens[0] == "if TYPE_CHECKING:" else None
        if unused_below is not None or is_text:
            continue
        if tokens[0].startswith(("from prejit.", "import prejit.")):
            imports.update(_imports("".join(tokens)))
            continue
        if tokens[0].startswith("raise "):
            tokens = [token for token in tokens if token[-1] not in "\"'"]
        hasher.update(f"{indent} {' '.join(tokens)}\n".encode())
    ordered = sorted(imports, key=lambda each: (each.module, each.name, each.local))
    return _Source(hasher.hexdigest(), tuple(ordered))


def _statements(source: str) -> Iterator[tuple[int, list[str], bool]]:
    """Yield the statements of a source: indentation, tokens, and whether it is a text and nothing else.

    A statement is one logical line. Comments and blank lines are left out.
    """
    indent = depth = 0
    tokens: list[str] = []
    is_text = True
    for match in _TOKEN.finditer(f"\n{source}\n"):
        kind, token = match.lastgroup, match[0]
        if kind == "none":
            continue
        code = token.strip()
        if kind == "line" and not depth:
            if tokens:
                yield indent, tokens, is_text
                tokens, is_text = [], True
            indent = len(token) - len(token.lstrip()) - 1
        elif kind == "open":
            depth += 1
        elif kind == "close":
            depth -= 1
        if code:
            tokens.append(code)
            is_text = is_text and kind == "text"


def _imports(statement: str) -> Iterator[_Import]:
    """Yield the names that a statement imports from modules of prejit."""
    words = statement.replace("(", " ").replace(")", " ").split(None, 1)[1]
    package, _, names = words.partition(" import ")
    for each in filter(None, (name.strip() for name in (names or words).split(","))):
        name, _, local = each.partition(" as ")
        module = f"{package}.{name}" if names else name
        if _is_module(module):
            yield _Import(module, "", local or name)
        elif _is_module(package):
            yield _Import(package, name, local or name)


@cache
def _is_module(name: str) -> bool:
    return any(name.startswith(f"{root}.") for root in _ROOTS) and _file(name).is_file()


def _file(module: str) -> Path:
    """Return the source file of a module of prejit; for any other name, a path that is no file."""
    root = next(root for root in _ROOTS if module.startswith(f"{root}."))
    place = f"{_ROOTS[root]}/{module.removeprefix(f'{root}.').replace('.', '/')}"
    return Path(f"{place}/__init__.py" if os.path.isdir(place) else f"{place}.py")
