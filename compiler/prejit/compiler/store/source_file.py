"""A source file of prejit as the digests of keys see it: its definitions, without prose.

Comments, docstrings, blank lines, the texts of errors and what stands under `if TYPE_CHECKING:` are left out.
So are the fields of syntax trees that only some versions of Python have: all versions find the same digests.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from prejit.compiler.base import python_source


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
            case ast.Import() | ast.ImportFrom() if found := [*_imports(node)]:
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
            case ast.Import() | ast.ImportFrom() if ours := [*_imports(statement)]:
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


def _imports(statement: ast.Import | ast.ImportFrom) -> Iterator[Import]:
    """Yield the names of prejit that a statement imports."""
    for alias in statement.names:
        local = alias.asname or alias.name
        if isinstance(statement, ast.Import):
            if alias.name.startswith("prejit."):
                yield Import(alias.name, "", local)
        elif (statement.module or "").startswith("prejit."):
            yield Import(str(statement.module), alias.name, local)
