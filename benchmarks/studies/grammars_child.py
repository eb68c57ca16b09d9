"""One process of `grammars.py`: import a grammar library, compile schemas, compute the masks of their texts.

    python grammars_child.py LIBRARY VOCABULARY.json

Prints one line of JSON. It imports nothing of prejit, so that it runs in an environment of each library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

MaskOf = Callable[[], object]
Begin = Callable[[], tuple[MaskOf, Callable[[int], object]]]
"""Begins a text: returns what computes the mask, and what reads a token."""


def with_llguidance(tokens: Sequence[bytes]) -> Callable[[str], Begin]:
    """Return what compiles a schema with llguidance, as prejit does."""
    from collections import namedtuple

    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    made = namedtuple("made", "tokens special_token_ids eos_token_id bos_token_id")
    tokenizer = LLTokenizer(TokenizerWrapper(made(list(tokens), [], None, None)))

    def compile_schema(schema: str) -> Begin:
        ways = {**json.loads(schema), "x-guidance": {"whitespace_pattern": " "}}
        source = f'start: %json {json.dumps(ways)}\n%llguidance {{"no_forcing": true}}'
        first = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(source), log_level=0)
        assert not first.is_error(), first.get_error()

        def begin() -> tuple[MaskOf, Callable[[int], object]]:
            matcher = first.deep_copy()
            return matcher.compute_bitmask, matcher.consume_token

        return begin

    return compile_schema


def with_xgrammar(tokens: Sequence[bytes]) -> Callable[[str], Begin]:
    """Return what compiles a schema with xgrammar."""
    import xgrammar

    known = xgrammar.TokenizerInfo(list(tokens), stop_token_ids=[len(tokens) - 1])
    compiler = xgrammar.GrammarCompiler(known, max_threads=1, cache_enabled=False)
    room = xgrammar.allocate_token_bitmask(1, len(tokens))

    def compile_schema(schema: str) -> Begin:
        compiled = compiler.compile_json_schema(schema, strict_mode=False)

        def begin() -> tuple[MaskOf, Callable[[int], object]]:
            matcher = xgrammar.GrammarMatcher(compiled)
            return lambda: matcher.fill_next_token_bitmask(room), matcher.accept_token

        return begin

    return compile_schema


LIBRARIES = {"llguidance": with_llguidance, "xgrammar": with_xgrammar}


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * 4096


def masks(begin: Begin, token_ids: Sequence[int]) -> list[float]:
    """Return the seconds of each mask along a text."""
    mask, read = begin()
    seconds = []
    for token_id in token_ids:
        started = time.perf_counter()
        mask()
        seconds.append(round(time.perf_counter() - started, 7))
        if not read(token_id):
            raise SystemExit(f"token {token_id} after {len(seconds)} is refused")
    return seconds


def main() -> None:
    """Measure one library on one vocabulary."""
    library, path = sys.argv[1:]
    with open(path, encoding="utf-8") as file:
        given: dict[str, Any] = json.load(file)
    tokens = [bytes.fromhex(token) for token in given["tokens"]]
    began, before = time.perf_counter(), resident_bytes()
    __import__(library)
    imported = time.perf_counter()
    compile_schema = LIBRARIES[library](tokens)
    prepared = time.perf_counter()
    found: dict[str, Any] = {}
    for name, one in given["schemas"].items():
        started = time.perf_counter()
        begin = compile_schema(json.dumps(one["schema"]))
        compiled = time.perf_counter()
        first = masks(begin, one["token_ids"])
        found[name] = {
            "compile_seconds": compiled - started,
            "first_text": first,
            "again": masks(begin, one["token_ids"]) + masks(begin, one["token_ids"]),
        }
    print(
        json.dumps(
            {
                "import_seconds": imported - began,
                "vocabulary_seconds": prepared - imported,
                "resident_bytes": resident_bytes() - before,
                "schemas": found,
            }
        )
    )


if __name__ == "__main__":
    main()
