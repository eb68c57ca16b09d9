"""A source file of prejit as the digests of keys see it: its definitions, without prose.

Comments, docstrings, blank lines, the texts of errors and what stands under `if TYPE_CHECKING:` are left out.
The standard library's parser takes five times as long, and its trees differ between versions of Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

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

_DEFINES = re.compile(r"(?:async )?(?:def|class) (\w+)")
_ASSIGNS = re.compile(r"((?:\w+, )*\w+)(?::[^=]*)? ?(?:=(?!=)|$)")
"""`a = `, `a, b = `, and `a: Mapping`, which a bracket ends."""
_MENTION = re.compile(r"(?<![\w.])([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?")
"""A name, with the attribute that it is used for."""
_IN_BRACES = re.compile(r"\{([^{}]*)")
"""The expressions of an f-string."""


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
    """A top-level statement with what is indented below it.

    Attributes:
        names: the names that it defines; empty: it runs when the module is imported.
        lines: indentation and tokens of its lines, without its imports of prejit.
        imports: its imports of prejit, for a statement that has a body.
    """

    names: tuple[str, ...]
    lines: tuple[tuple[int, list[str]], ...]
    imports: tuple[Import, ...]

    @cached_property
    def digest(self) -> str:
        """Digest of its code."""
        code = "\n".join([f"{indent} {' '.join(tokens)}" for indent, tokens in self.lines])
        return hashlib.sha256(code.encode()).hexdigest()

    @cached_property
    def mentions(self) -> frozenset[tuple[str, str]]:
        """The names that its code mentions, each with the attribute that is used, or an empty text.

        Some of them are names of variables or of arguments. The types of arguments are not among them.
        """
        text = "\n".join([_mentioning(tokens) for _, tokens in self.lines])
        return frozenset(_MENTION.findall(text))


def definitions(source: str) -> tuple[list[Definition], list[Import]]:
    """Return the top-level definitions of a source, and its top-level imports of prejit."""
    found, imports = list[Definition](), list[Import]()
    names: tuple[str, ...] = ()
    lines, inner = list[tuple[int, list[str]]](), list[Import]()
    decorated = False

    def finish() -> None:
        if lines or inner:
            found.append(Definition(names, tuple(lines), tuple(inner)))
            lines.clear()
            inner.clear()

    unused_below: int | None = None  # indentation of `if TYPE_CHECKING:`
    for indent, tokens, is_text in _statements(source):
        if unused_below is not None and indent > unused_below:
            continue
        unused_below = indent if tokens[0] == "if TYPE_CHECKING:" else None
        if unused_below is not None or is_text:
            continue
        if indent == 0 and not decorated:
            finish()
            names = ()
        if tokens[0].startswith(("from prejit.", "import prejit.")):
            (inner if indent else imports).extend(_imports("".join(tokens)))
            continue
        if indent == 0:
            decorated = tokens[0].startswith("@")
            names = names if decorated else _defined(tokens)
        if tokens[0].startswith("raise "):
            tokens = [token for token in tokens if token[-1] not in "\"'"]
        lines.append((indent, tokens))
    finish()
    return found, imports


def _defined(tokens: list[str]) -> tuple[str, ...]:
    """Return the names that a top-level statement defines."""
    first = tokens[0]
    if first.startswith(("import ", "from ")):
        return tuple(each.local.partition(".")[0] for each in _imports("".join(tokens)))
    if match := _DEFINES.match(first):
        return (match[1],)
    match = _ASSIGNS.fullmatch(first) or _ASSIGNS.match(first)
    if match is None or first.endswith(":"):
        return ()
    return tuple(match[1].split(", "))


def _mentioning(tokens: list[str]) -> str:
    """Return the text in which a statement mentions names: f-strings but no texts, no types of arguments."""
    if tokens[0].startswith(("def ", "async def ")):
        tokens = _without_types(tokens)
    return " ".join(
        [" ".join(_IN_BRACES.findall(token)) if token[0] in "\"'" else token for token in tokens]
    )


def _without_types(tokens: list[str]) -> list[str]:
    """Return the tokens of a `def` line without the types of its arguments and its result."""
    kept, depth, is_type = list[str](), 0, False
    for code in tokens:
        if code in "([{":
            depth += 1
        elif code in ")]}":
            depth -= 1
            if depth == 0:
                break
        if depth != 1 or code in "([{)]}" or "lambda" in code:
            kept += [] if is_type else [code]
            continue
        for part, end in re.findall(r"([^,:=]*)([,:=]?)", code):
            kept += [part] if part and not is_type else []
            is_type = end == ":" or (is_type and end == "")
    return kept


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


def _imports(statement: str) -> Iterator[Import]:
    """Yield the names that an import statement imports."""
    words = statement.replace("(", " ").replace(")", " ").split(None, 1)[1]
    package, _, names = words.partition(" import ")
    for each in filter(None, (name.strip() for name in (names or words).split(","))):
        name, _, local = each.partition(" as ")
        yield Import(package, name, local or name) if names else Import(name, "", local or name)
