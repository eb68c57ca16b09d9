"""The compiler of llguidance, with limits."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from prejit.server.grammar.grammar_sources import GrammarSource

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_LEXER_STATES = 250_000
"""Maximum number of lexer states of a grammar, of 1 to 3 kB each. A string with a `maxLength` takes 12
for each of its characters."""
_CLIENT_LEXER_STATES = 60_000
"""The same of a client's grammar: a hostile schema cannot fill the memory."""
_STEP_FUEL = 200_000
"""Maximum work of the lexer for one mask: some 40 ms. A common mask takes less than a hundredth of it, that
of an enumeration of 8,000 texts more than a fourth."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Without it, llguidance allows only the tokens into which the tokenizer cuts a text that must come. It would
call the tokenizer for that, and some models were trained on other cuts."""
_BYTES_FOR_BYTE = 150
"""The memory of a compiled grammar for each character of its source, where nobody has measured it."""


_GBNF_PART = re.compile(
    r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[*+?}]\s*\)(?=[\s)]*[*+?{])', re.DOTALL
)
"""A text, a class or a comment of GBNF, or the end of a group that is repeated and ends with a repetition."""
_GBNF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[\[\]\\])")
"""An escape in them for which there is a plainer form."""


class _Vocabulary(NamedTuple):
    """The tokens as llguidance reads them: attributes of a guidance tokenizer.

    Attributes:
        tokens: the bytes of each.
        special_token_ids: those that are no text.
        eos_token_id: None: llguidance adds a token that ends a text, after all others.
        bos_token_id: none is needed.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int | None = None
    bos_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A compiled grammar.

    Attributes:
        matcher: at the beginning of a text; masks copy it. It has made its first mask, which makes theirs
            quick.
        size_bytes: its memory.
        seconds: the CPU time that compiling it took.
    """

    matcher: LLMatcher
    size_bytes: int
    seconds: float


def tokenizer_of(table: Sequence[bytes | None]) -> LLTokenizer:
    """Return a vocabulary for the compiler, of the bytes of each token; None: it is no text."""
    from llguidance import LLTokenizer, TokenizerWrapper

    vocabulary = _Vocabulary(
        [b"" if token is None else token for token in table],
        [token_id for token_id, token in enumerate(table) if token is None],
    )
    return LLTokenizer(TokenizerWrapper(vocabulary))


def compiled(
    tokenizer: LLTokenizer, source: GrammarSource, size_bytes: int | None = None
) -> CompiledGrammar:
    """Compile a grammar. Other threads run meanwhile.

    Args:
        tokenizer: the vocabulary.
        source: the grammar.
        size_bytes: its memory, which is measured for grammars of clients.

    Raises:
        UsageError: it does not compile.
    """
    from llguidance import LLMatcher, LLParserLimits

    started = time.thread_time()
    limits = LLParserLimits(
        max_lexer_states=_LEXER_STATES if size_bytes is None else _CLIENT_LEXER_STATES,
        step_lexer_fuel=_STEP_FUEL,
        verbose_errors=False,
    )
    grammar = LLMatcher.grammar_from_lark(f"{_lark(source)}\n{_OPTIONS}")
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # 100 ms for 4,000 members, which no step of an engine waits for now
    if matcher.is_error():
        raise source.error(matcher.get_error())
    seconds = time.thread_time() - started
    return CompiledGrammar(matcher, size_bytes or len(source.text) * _BYTES_FOR_BYTE, seconds)


def _lark(source: GrammarSource) -> str:
    if not source.is_gbnf:
        return source.text
    from llguidance import gbnf_to_lark

    try:
        return gbnf_to_lark.gbnf_to_lark(_GBNF_PART.sub(_with_plain_escapes, source.text))
    except Exception as error:  # it raises bare Exceptions
        raise source.error(str(error)) from None


def _with_plain_escapes(part: re.Match[str]) -> str:
    r"""Return a part of GBNF as one that llguidance 1.9.1 converts rightly.

    It drops the zeros of `\u00e9`, so that `[\u00e9ab]` meant U+E9AB, knows no `\[` in a text, and takes
    `&&` and `~~` in a class for operators. It drops the brackets of `("a"?){2}`, unless they have two parts.
    """
    text = part[0]
    if text.startswith("#"):
        return text
    if text.endswith(")"):
        return f'{text[:-1]} "")'
    text = _GBNF_ESCAPE.sub(_plain, text)
    return re.sub("[&~]", _plain, text) if text.startswith("[") else text


def _plain(found: re.Match[str]) -> str:
    r"""Return a character of GBNF as `\xNN`, or as itself if it is none of ASCII."""
    text = found[0]
    code = int(text[2:], 16) if text[1:2] in ("u", "U") else ord(text[-1])
    if code > sys.maxunicode or 0xD800 <= code < 0xE000:  # no character
        return text
    return f"\\x{code:02x}" if code < 128 else chr(code)
