"""The digest of prejit's own code, as an ingredient of keys.

The functions that make a result decide it together with all functions, classes and constants of prejit that
they mention, in any module. These are found by reading the sources, so new code is in the keys without anyone
adding it to a list, and code beside it is not. Nothing is imported for it: a build that changes nothing
imports neither jax nor flax.

Only code counts. Comments, docstrings, blank lines, the texts of errors, and the names and places of modules
change no digest. Nor do the fields of syntax trees that only some versions of Python have: all versions find
the same digests.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import final

import prejit.runtime
from prejit.compiler.base import python_source
from prejit.runtime.base.files import Identity, digest_of, is_digest
from prejit.runtime.device.quick_start import collector_off
from prejit.runtime.machine.kept_files import SETTLED_SECONDS, cache_root, read_own, write_own

_MAX_BYTES = 1 << 20
"""Maximum size of the file of `KnownDigests`."""
_ROOTS = {
    "prejit.compiler": Path(__file__).parents[1],
    "prejit.runtime": Path(prejit.runtime.__file__).parent,
}
"""Directory of each root package."""

COMPILING = (
    "prejit.compiler.compile.worker.worker_compile",
    "prejit.compiler.compile.worker.worker_requests:_compile",
)
"""The code that compiles a program."""
LOWERING = (
    "prejit.compiler.pipeline.lower.program_lowering:_lower_model",
    "prejit.compiler.pipeline.lower.program_lowering:_lower_native",
    "prejit.compiler.pipeline.model:read_model",
)
"""The code that lowers the programs of a model."""
PACKING = (
    "prejit.compiler.pipeline.pack.bundle_files:write_weights",
    "prejit.compiler.pipeline.pack.weights_layer:_user_tensors",
)
"""The code that writes the file of a weights layer, with the parameters of functions of the user."""
WEIGHTS = (
    "prejit.compiler.pipeline.model:open_weights",
    "prejit.compiler.pipeline.model:read_model",
    "prejit.compiler.pipeline.pack.weights_layer:_tensors",
)
"""The code that makes the tensors of a published model from its checkpoint."""
INT4_TEXT = ("prejit.compiler.pipeline.measure.int4_inputs",)
"""The code that rounds matrices to int4 by a text."""
OWN_WEIGHTS = (
    "prejit.compiler.lowering.user.own_decoder:find_model",
    "prejit.compiler.models.own_decoder_narrowing",
    "prejit.compiler.pipeline.pack.weights_layer:_own_tensors",
)
"""The code that makes the tensors of a decoder of the user."""
USER_FUNCTIONS = (
    "prejit.compiler.lowering.user.found_function",
    "prejit.compiler.lowering.user.flax_modules",
    "prejit.compiler.lowering.user.function_lowering",
    "prejit.compiler.lowering.user.observer:Observer",
    "prejit.compiler.lowering.user.observing:observing",
    "prejit.compiler.pipeline.workspace:_find_functions",
    "prejit.compiler.pipeline.lower.program_lowering:lower_function",
    "prejit.compiler.pipeline.lower.program_lowering:put_lowered",
)
"""The code that traces and lowers a function of the user, and sees what a trace reads."""
USER_DECODERS = (
    "prejit.compiler.lowering.decoder",
    "prejit.compiler.lowering.user.own_decoder",
    "prejit.compiler.lowering.user.observer:Observer",
    "prejit.compiler.lowering.user.observing:observing",
    "prejit.compiler.pipeline.workspace:_find_own_model",
    "prejit.compiler.pipeline.lower.program_lowering:lower_own_decoder",
    "prejit.compiler.pipeline.lower.program_lowering:put_lowered",
)
"""The code that traces and lowers a decoder of the user, and sees what a trace reads."""
ACCURACY = (
    "prejit.compiler.pipeline.measure.accuracy:_measure_published",
    "prejit.compiler.pipeline.model:open_weights",
    "prejit.compiler.pipeline.model:read_model",
)
"""The code that measures what stored dtypes cost in accuracy."""
OWN_ACCURACY = (
    "prejit.compiler.lowering.user.own_decoder:find_model",
    "prejit.compiler.models.own_decoder_narrowing",
    "prejit.compiler.pipeline.measure.accuracy:_measure_own",
)
"""The code that measures what stored dtypes cost a decoder of the user."""
BITS = (
    "prejit.compiler.pipeline.measure.encoder_bits",
    "prejit.compiler.pipeline.measure.int4_inputs",
    "prejit.compiler.pipeline.model:open_weights",
    "prejit.compiler.pipeline.model:read_model",
)
"""The code that chooses the dtypes of an encoder's matrices."""
GOLDEN = ("prejit.compiler.pipeline.measure.golden_child",)
"""The code that asks programs for golden answers."""
SIZES = ("prejit.compiler.pipeline.measure.sizes_child:_compare",)
"""The code that compares programs with their functions at other sizes."""
TOKENIZER = ("prejit.compiler.checkpoint.configured_tokenizer",)
"""The code that tries a tokenizer."""
KERNELS = (
    "prejit.compiler.native.compilers:Compiler",
    "prejit.compiler.native.kernel_library:_compile",
    "prejit.compiler.native.kernel_library:_library",
)
"""The code that compiles the library of kernels. Flags and compilers are ingredients of their own."""


@dataclass(frozen=True)
class _Module:
    """A module as digests see it.

    Attributes:
        definitions: its top-level statements.
        named: those that define each name.
        run: those that define none, and run when it is imported.
        imports: the modules, and names there, that each name imports at the top level.
    """

    definitions: list[Definition]
    named: dict[str, list[Definition]] = field(default_factory=dict)
    run: list[Definition] = field(default_factory=list)
    imports: dict[str, list[tuple[str, str]]] = field(default_factory=dict)


@cache
def code_digest(*roots: str) -> str:
    """Return the digest of code and of all code of prejit that it mentions.

    Imports inside functions count; those under `if TYPE_CHECKING:` do not run and do not count.

    Args:
        roots: full names of modules, `prejit.compiler.lowering.export`, or of a function, class or constant:
            `prejit.compiler.lowering.export:export_program`.
    """
    known, name = _known(), " ".join(roots)
    if (digest := known.get(name)) is None:
        known.keep(name, digest := _read_digest(*roots))
    return digest


@cache
def _known() -> KnownDigests:
    return KnownDigests(_ROOTS)


@collector_off()  # trees are many objects and no garbage
def _read_digest(*roots: str) -> str:
    """Return what `code_digest` says, from the sources."""
    parts = set[str]()
    for module, found in reached(*roots).items():
        for each in found:
            # Imported code enters by its content, not by its path.
            links = [f"{local}={_content(*at)}" for local, at in _links(module, each)]
            parts.add("\n".join((each.digest, *sorted(links))))
    return digest_of("\0".join(sorted(parts)).encode())


def directories() -> tuple[str, ...]:
    """Return the directories of prejit's own code."""
    return tuple(map(str, _ROOTS.values()))


@cache
def reached(*roots: str) -> dict[str, set[Definition]]:
    """Return the top-level statements that code mentions, directly or not, by the module that has them."""
    found: dict[str, set[Definition]] = {}
    left = [(module, name) for module, _, name in (root.partition(":") for root in roots)]
    if gone := [f"{at}:{name}" for at, name in left if name and name not in _module(at).named]:
        raise ValueError(f"expected code of prejit, found nothing at {', '.join(gone)}")
    seen = set(left)

    def follow(*places: tuple[str, str]) -> None:
        left.extend(place for place in places if place not in seen)
        seen.update(places)

    while left:
        module, name = left.pop()
        package = module.rpartition(".")[0]
        if module not in found:
            found[module] = set()
            if _is_module(package):  # importing a module runs its package
                follow((package, "__init__"))
        for each in _defining(module, name):
            if each not in found[module]:
                found[module].add(each)
                follow(*(at for _, at in _links(module, each)), *_inside(module, each))
        follow(*_module(module).imports.get(name, ()))  # a package passes it on
    return found


def _defining(module: str, name: str) -> Iterable[Definition]:
    """Return the statements that define a name, and those that always run; without a name all of them."""
    read = _module(module)
    if not name:
        return read.definitions
    return (*read.run, *read.named.get(name, ()))


def _inside(module: str, definition: Definition) -> Iterator[tuple[str, str]]:
    """Yield the names of its own module that a definition mentions."""
    named = _module(module).named
    return ((module, name) for name, _ in definition.mentions if name in named)


@cache
def _links(module: str, definition: Definition) -> list[tuple[str, tuple[str, str]]]:
    """Return the names of other modules that a definition mentions: as it spells them, and where they are."""
    places = _imports(definition.imports)
    found = []
    for name, attribute in definition.mentions:
        for at in (*places.get(name, ()), *_module(module).imports.get(name, ())):
            # A module that is mentioned by itself may be used for anything.
            found.append((name, at) if at[1] else (f"{name}.{attribute}", (at[0], attribute)))
    return found


@cache
def _content(module: str, name: str) -> str:
    """Return the digest of what a name of a module stands for."""
    read = _module(module)
    if name in read.imports:
        return " ".join(_content(*at) for at in read.imports[name])
    found = read.named.get(name, ()) if name else read.definitions
    return " ".join(each.digest for each in found) or name


@cache
def _module(name: str) -> _Module:
    found, imports = definitions(_file(name).read_text("utf-8"))
    module = _Module(found, imports=_imports(imports))
    for each in found:
        for defined in each.names:
            module.named.setdefault(defined, []).append(each)
        if not each.names:
            module.run.append(each)
    return module


def _imports(statements: Iterable[Import]) -> dict[str, list[tuple[str, str]]]:
    """Return the modules that imports name, and the names there, by the names that they get."""
    found: dict[str, list[tuple[str, str]]] = {}
    for each in statements:
        if each.name and _is_module(inner := f"{each.statement}.{each.name}"):
            found.setdefault(each.local, []).append((inner, ""))
        elif _is_module(each.statement):
            found.setdefault(each.local, []).append((each.statement, each.name))
    return found


@cache
def _is_module(name: str) -> bool:
    """Return whether a name is a module of prejit below a root package, which passes nothing on."""
    return name not in _ROOTS and _file(name).is_file()


def _file(module: str) -> Path:
    """Return the source file of a module of prejit; for any other name, a path that is no file."""
    for root, directory in _ROOTS.items():
        if f"{module}.".startswith(f"{root}."):
            place = f"{directory}{module.removeprefix(root).replace('.', '/')}"
            return Path(f"{place}/__init__.py" if os.path.isdir(place) else f"{place}.py")
    return Path(os.devnull)


@final
class KnownDigests:
    """The digests of code in some directories that an earlier process found, by what each is the digest of.

    Parsing the sources takes nearly half a second of CPU time. A source that is written, replaced, added or
    removed ends them: the kernel changes its ctime, which no program can set back
    (`prejit.runtime.machine.kept_files` relies on the same).
    """

    def __init__(self, directories: Mapping[str, Path]) -> None:
        """Read the digests that an earlier process kept.

        Args:
            directories: the directory of each root package.
        """
        places = "\0".join(os.path.abspath(each) for each in directories.values())
        name = hashlib.sha256(os.fsencode(places)).hexdigest()
        self._path = cache_root() / "code" / "v1" / f"{name}.json"
        sources = sorted(each for root in directories.values() for each in _sources(str(root)))
        self._state = hashlib.sha256(repr(sources).encode()).hexdigest()
        # A change within the same tick of the clock as the last one would leave the same ctime.
        changed = max((identity.ctime_ns for _, identity in sources), default=0)
        self._settled = time.time() - changed / 1e9 > SETTLED_SECONDS
        self._digests = self._read()

    def _read(self) -> dict[str, str]:
        with suppress(ValueError, RecursionError, KeyError, TypeError, AttributeError):
            held = json.loads(read_own(self._path, _MAX_BYTES) or b"")
            if held["sources"] == self._state:
                return {
                    name: digest for name, digest in held["digests"].items() if is_digest(digest)
                }
        return {}

    def get(self, name: str) -> str | None:
        """Return the digest that is kept under a name; None: none is."""
        return self._digests.get(name)

    def keep(self, name: str, digest: str) -> None:
        """Keep a digest for later processes, where a cache directory can be written."""
        self._digests[name] = digest
        if self._settled:
            held = {"sources": self._state, "digests": self._digests}
            write_own(self._path, json.dumps(held).encode())


def _sources(directory: str) -> Iterator[tuple[str, Identity]]:
    """Yield path and identity of each source file below a directory."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                yield entry.path, Identity.of(entry.stat())
            elif entry.is_dir() and entry.name != "__pycache__":
                yield from _sources(entry.path)


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name.

    Attributes:
        statement: what is imported from: `prejit.runtime.base`; the whole name for `import a.b`.
        name: the name there; empty for `import a.b`.
        local: the name that it gets.
    """

    statement: str
    name: str
    local: str


@dataclass(frozen=True, eq=False)  # no slots: cached_property needs a __dict__
class Definition:
    """A top-level statement.

    Attributes:
        names: the names that it defines; empty: it runs when the module is imported.
        statement: its syntax tree.
    """

    names: tuple[str, ...]
    statement: ast.stmt

    @cached_property
    def digest(self) -> str:
        """Digest of its code, without its imports of prejit."""
        return hashlib.sha256(self._read[0].encode()).hexdigest()

    @property
    def mentions(self) -> set[tuple[str, str]]:
        """The names that its code mentions, each with the attribute that is used, or an empty text.

        Some of them are names of variables or of arguments. The types of arguments are not among them.
        """
        return self._read[1].mentions

    @property
    def imports(self) -> list[Import]:
        """The imports of prejit inside it."""
        return self._read[1].imports

    @cached_property
    def _read(self) -> tuple[str, _Reader]:
        reader = _Reader()
        return reader.form(self.statement), reader


class _Reader:
    """Turns syntax trees into text, and collects the names and the imports of prejit on the way."""

    def __init__(self) -> None:
        self.mentions = set[tuple[str, str]]()
        self.imports = list[Import]()

    def form(self, node: object, is_type: bool = False, is_error: bool = False) -> str:
        """Return the text that stands for a node, a list of nodes, or a value; empty for prose.

        Names in types of arguments and results do not count, nor do texts in a `raise`.
        """
        match node:  # the most frequent first
            case ast.Name(name):
                if not is_type:
                    self.mentions.add((name, ""))
                return name
            case ast.Attribute(ast.Name(name), attribute):
                if not is_type:
                    self.mentions.add((name, attribute))
                return f"{name}.{attribute}"
            case list():
                each = [self.form(one, is_type, is_error) for one in node]
                return f"[{','.join(filter(None, each))}]"
            case ast.Constant(str()) | ast.JoinedStr() if is_error:
                return "''"
            case ast.Constant(value):
                return repr(value)
            case ast.JoinedStr(values):  # Python 3.12 ends some of them with an empty text
                filled = [each for each in values if getattr(each, "value", None) != ""]
                return f"(f {self.form(filled, is_type, is_error)})"
            case ast.Expr(ast.Constant(str())):
                return ""
            case ast.If(ast.Name("TYPE_CHECKING")):
                return self.form(node.orelse) if node.orelse else ""
            case ast.Import() | ast.ImportFrom() if found := [*_imported_names(node)]:
                self.imports += found
                return ""
            case ast.AST():
                is_error = is_error or isinstance(node, ast.Raise)
                parts = [type(node).__name__]
                for field in node._fields:
                    value = getattr(node, field)
                    if value and field != "ctx":
                        typed = field == "returns" or (
                            field == "annotation" and isinstance(node, ast.arg)
                        )
                        parts.append(f"{field}={self.form(value, is_type or typed, is_error)}")
                return f"({' '.join(parts)})"
        return repr(node)


def definitions(source: str) -> tuple[list[Definition], list[Import]]:
    """Return the top-level definitions of a source, and its top-level imports of prejit."""
    found, imports = list[Definition](), list[Import]()
    for statement in python_source.parse(source).body:
        match statement:
            case ast.Expr(ast.Constant(str())) | ast.If(ast.Name("TYPE_CHECKING"), orelse=[]):
                continue
            case ast.Import() | ast.ImportFrom() if ours := [*_imported_names(statement)]:
                imports += ours
            case _:
                found.append(Definition(_defined(statement), statement))
    return found, imports


def _defined(statement: ast.stmt) -> tuple[str, ...]:
    """Return the names that a top-level statement defines."""
    nodes: Iterator[ast.AST]
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return (statement.name,)
        case ast.Import() | ast.ImportFrom():
            names = (alias.asname or alias.name for alias in statement.names)
            return tuple(name.partition(".")[0] for name in names)
        case ast.Assign(targets):
            nodes = (node for target in targets for node in ast.walk(target))
        case ast.AnnAssign(target) | ast.AugAssign(target):
            nodes = ast.walk(target)
        case _:
            return ()
    return tuple(n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))


def _imported_names(statement: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield the names of prejit that a statement imports."""
    for alias in statement.names:
        local = alias.asname or alias.name
        if isinstance(statement, ast.Import):
            if alias.name.startswith("prejit."):
                yield Import(alias.name, "", local)
        elif (statement.module or "").startswith("prejit."):
            yield Import(str(statement.module), alias.name, local)
