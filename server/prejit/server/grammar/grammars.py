"""The grammars of one vocabulary. Each gives token masks, and is compiled once for all of its requests.

The mask of a request says which tokens continue its text.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, final

import numpy as np
from tokenizers import Tokenizer

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import UsageError
from prejit.runtime.text.vocabulary import bytes_by_decoder
from prejit.server.grammar.grammar_compiling import CompiledGrammar, compiled, tokenizer_of
from prejit.server.grammar.grammar_sources import (
    GrammarSource,
    ToolForm,
    lark_source,
    regex_source,
    schema_source,
    tools_source,
)

if TYPE_CHECKING:
    import llguidance
    from llguidance import LLMatcher

    from prejit.runtime.bundle import Bundle
    from prejit.server.grammar.grammar_trial import Trial

    Allowed = np.ndarray[Any, np.dtype[np.bool_]]

_KEPT_BYTES = 64 << 20
"""Maximum memory of the compiled grammars that are kept. A small one compiles again in milliseconds."""
_LEAST_BYTES = 3 << 20
"""The least that a kept grammar counts: its lexer grows while it makes masks."""

_RENEWED_SECONDS = 0.05
"""The longest CPU time to compile a client's grammar again while others generate."""


@final
class Grammars:
    """The grammars of a bundle. Safe to use from many threads.

        grammars = Grammars(bundle)
        bundle.generate(prompt, token_mask=grammars.json_schema({"type": "integer"}))

    Every method returns a new mask, for one request. A mask costs microseconds if the grammar was used
    before. A request with its own `stop_token_ids` gives them here, too.
    """

    def __init__(self, bundle: Bundle, *, of_strangers: bool = False) -> None:
        """Keep the vocabulary of a bundle. It is read with the first grammar, or by `prepare`.

        Args:
            bundle: has a decoder and a tokenizer.
            of_strangers: whether grammars may be hostile. Each is then compiled in a process with limits
                before it is compiled in this one, and its masks have a limit of time.

        Raises:
            UsageError: the bundle holds no decoder or no tokenizer.
        """
        self._decoder = bundle.decoder.decoder
        self._vocabulary = bundle.tokenizer
        self._of_strangers = of_strangers
        self._compiled: OrderedDict[str, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Read the vocabulary now: half a second for 128,000 tokens.

        Raises:
            UsageError: llguidance is not installed, or the tokens of the tokenizer are not bytes.
        """
        self._tokenizer  # noqa: B018 (made when it is read)

    def json_object(self, *, stop_token_ids: Collection[int] | None = None) -> GrammarMask:
        """Return a mask for any JSON object. Raises as `prepare`."""
        return self.json_schema({"type": "object"}, stop_token_ids=stop_token_ids)

    def json_schema(
        self,
        schema: Mapping[str, Any] | bool,
        *,
        lenient: bool = False,
        stop_token_ids: Collection[int] | None = None,
    ) -> GrammarMask:
        """Return a mask for the JSON texts that a JSON schema describes.

        The members of an object come in the order of the schema.

        Args:
            schema: a JSON schema.
            lenient: whether to ignore keywords that a grammar cannot enforce, instead of raising.
            stop_token_ids: of the request; None: those of the model.

        Raises:
            UsageError: it is no schema, no value satisfies it, or it has a keyword that a grammar cannot
                enforce. The message has the JSON pointer of the place. Also as `prepare`.
        """
        return self.mask(schema_source(schema, lenient=lenient), stop_token_ids)

    def regex(self, pattern: str, *, stop_token_ids: Collection[int] | None = None) -> GrammarMask:
        """Return a mask for texts that match a regular expression as a whole.

        The syntax is that of Rust's `regex`: as Python's, without look-around and references to groups.

        Raises:
            UsageError: it is no such expression. Also as `prepare`.
        """
        self.prepare()
        return self.mask(regex_source(pattern), stop_token_ids)

    def lark(self, grammar: str, *, stop_token_ids: Collection[int] | None = None) -> GrammarMask:
        """Return a mask for the texts of a context-free grammar.

        Args:
            grammar: in llguidance's variant of Lark; its rule `start` is the whole text.
            stop_token_ids: of the request; None: those of the model.

        Raises:
            UsageError: it is no such grammar. Also as `prepare`.
        """
        return self.mask(lark_source(grammar), stop_token_ids)

    def tools(
        self,
        tools: Sequence[Mapping[str, Any]],
        form: ToolForm,
        *,
        required: bool = False,
        parallel: bool = True,
        stop_token_ids: Collection[int] | None = None,
    ) -> GrammarMask:
        """Return a mask for answers that call tools with arguments of the right form.

        Args:
            tools: as OpenAI's API has them. The arguments of a function that is `strict` follow every
                keyword of its schema; others follow those that a grammar can enforce.
            form: how this model writes a call.
            required: whether the answer must be calls; if not, it may be text, or have text around calls.
            parallel: whether there may be several calls.
            stop_token_ids: of the request; None: those of the model.

        Raises:
            UsageError: a tool has no name, or a schema that no grammar follows. Also as `prepare`.
        """
        source = tools_source(
            tools,
            form,
            required=required,
            parallel=parallel,
            special_id=self._vocabulary.special_id,
        )
        return self.mask(source, stop_token_ids)

    def mask(
        self, source: GrammarSource, stop_token_ids: Collection[int] | None = None
    ) -> GrammarMask:
        """Return a mask for a grammar, which is compiled if it is not kept.

        Raises:
            UsageError: it does not compile, or takes too much of something. Also as `prepare`.
        """
        return self.kept_mask(source, stop_token_ids) or self._new_mask(
            source, self._keep(source), stop_token_ids
        )

    def kept_mask(
        self, source: GrammarSource, stop_token_ids: Collection[int] | None
    ) -> GrammarMask | None:
        """Return a mask for a grammar that is kept; None: it must be compiled."""
        with self._lock:
            if (kept := self._compiled.get(source.text)) is None:
                return None
            if kept.matcher.is_error():  # the lexer is common to all masks of a grammar
                del self._compiled[source.text]
                return None
            self._compiled.move_to_end(source.text)
        return self._new_mask(source, kept, stop_token_ids)

    def stop_trial(self) -> None:
        """Give up what `mask` compiles now in another thread, which raises UsageError then."""
        if "_trial" in vars(self):
            self._trial.stop()

    def _new_mask(
        self, source: GrammarSource, kept: CompiledGrammar, stop_token_ids: Collection[int] | None
    ) -> GrammarMask:
        decoder = self._decoder
        stop = decoder.eos_token_ids if stop_token_ids is None else stop_token_ids
        return GrammarMask(
            kept.matcher,
            decoder.vocab_size,
            stop,
            is_limited=self._of_strangers,
            renewed=partial(self._renewed, source, kept),
        )

    def _renewed(
        self, source: GrammarSource, before: CompiledGrammar, full: LLMatcher
    ) -> LLMatcher:
        """Return a matcher of a grammar with a lexer that is not full, which new masks take, too.

        A client's grammar that takes long to compile stays full: the engine would wait.
        """
        with self._lock:
            kept = self._compiled.get(source.text, before)
        if kept.matcher is not full:
            return kept.matcher
        if self._of_strangers and kept.seconds > _RENEWED_SECONDS:
            return full
        found = compiled(self._tokenizer, source, kept.size_bytes if self._of_strangers else None)
        with self._lock:
            self._compiled[source.text] = found
        return found.matcher

    def _keep(self, source: GrammarSource) -> CompiledGrammar:
        """Compile a grammar and keep it. Those that were not used for longest make room."""
        tokenizer = self._tokenizer
        known = self._trial.compile(source) if self._of_strangers else None
        found = compiled(tokenizer, source, known)
        with self._lock:
            self._compiled[source.text] = found
            while len(self._compiled) > 1 and self._kept_bytes() > _KEPT_BYTES:
                self._compiled.popitem(last=False)
        return found

    def _kept_bytes(self) -> int:
        return sum(max(_LEAST_BYTES, each.size_bytes) for each in self._compiled.values())

    @once
    def _tokenizer(self) -> llguidance.LLTokenizer:
        return tokenizer_of(self._trial.table if self._of_strangers else self._table())

    @once
    def _trial(self) -> Trial:
        from prejit.server.grammar.grammar_trial import Trial  # only servers need processes

        return Trial(self._table())

    def _table(self) -> list[bytes | None]:
        """Return the bytes of each token: half a second for 128,000."""
        return token_table(self._vocabulary.library, self._decoder.vocab_size)


def token_table(tokenizer: Tokenizer, vocab_size: int) -> list[bytes | None]:
    """Return the bytes that each token adds to a text, in the order of token ids.

    Args:
        tokenizer: the `library` of a `Tokenizer`.
        vocab_size: how many; the model may have more logits than the tokenizer has tokens, or fewer.

    Returns:
        None for special tokens, which add no text, and for ids that are no token.

    Raises:
        UsageError: as `bytes_by_decoder`.
    """
    bytes_of, added = bytes_by_decoder(tokenizer), tokenizer.get_added_tokens_decoder()
    table: list[bytes | None] = [None] * vocab_size
    for token, token_id in tokenizer.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and not (token_id in added and added[token_id].special):
            table[token_id] = bytes_of(token)
    return table


_MASKS_SECONDS = 0.25
"""CPU time that the masks of one text may take, beside that for each token."""
_MASK_SECONDS = 1e-3
"""CPU time that a mask may take on average. Those of JSON take a tenth of it."""


class _FullError(UsageError):
    """The lexer has as many states as it may have. Texts and masks of the same grammar have added to them."""


@final
class GrammarMask:
    """A token mask that keeps a text in a grammar, for the option `token_mask`.

    A stop token is allowed where the text may end, and nowhere else, even if it has a text of its own. A text
    that must end has no other token; a request without stop tokens then ends with the reason `mask`.

    Each request needs its own mask: one that several requests share gives the right tokens, but reads each
    text from its beginning at every token. Safe to use from many threads.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        stop_token_ids: Collection[int],
        *,
        is_limited: bool = False,
        renewed: Callable[[LLMatcher], LLMatcher] | None = None,
    ) -> None:
        """Begin a text. `Grammars` makes masks.

        Args:
            matcher: at the beginning of a text. Its vocabulary has one token more, which ends a text.
            vocab_size: number of logits of the model.
            stop_token_ids: with which a text may end.
            is_limited: whether masks that take long end the request: others share the engine's thread.
            renewed: returns a matcher like the one given, whose lexer is full; masks of a grammar share one.
        """
        self._fresh = matcher
        self._is_limited = is_limited
        self._renewed = renewed
        self._seconds = 0.0
        self._matcher = matcher.deep_copy()
        self._vocab_size = vocab_size
        self._stop = [token_id for token_id in stop_token_ids if token_id < vocab_size]
        self._read: list[int] = []
        self._lock = threading.Lock()

    def __call__(self, token_ids: Sequence[int]) -> Allowed:
        """Return which tokens may come after these, bool [V].

        Raises:
            UsageError: these tokens are no beginning of a text of the grammar, or the text became too
                ambiguous for the parser.
        """
        with self._lock:
            started, before = time.thread_time(), self._fresh
            try:
                bits = self._bits(token_ids)
            except _FullError:
                if self._fresh is before:
                    raise
                bits = self._bits(token_ids)
            if self._is_limited:
                self._spend(time.thread_time() - started, len(token_ids))
            allowed = np.unpackbits(bits, count=self._vocab_size + 1, bitorder="little").view(
                np.bool_
            )
            allowed[self._stop] = allowed[-1]  # the last one stands for the end of the text
            return allowed[:-1]

    def again(self) -> GrammarMask:
        """Return a new mask of the same grammar, for another request."""
        return GrammarMask(
            self._fresh,
            self._vocab_size,
            self._stop,
            is_limited=self._is_limited,
            renewed=self._renewed,
        )

    def accepts(self, token_ids: Sequence[int]) -> bool:
        """Return whether these tokens are a whole text of the grammar; a stop token may be the last."""
        whole = token_ids[:-1] if token_ids and token_ids[-1] in self._stop else token_ids
        with self._lock:
            try:
                self._follow(whole)
            except UsageError:
                return False
            return self._matcher.is_accepting()

    def _spend(self, seconds: float, count: int) -> None:
        """Count the CPU time of a mask."""
        self._seconds += seconds
        if self._seconds > _MASKS_SECONDS + count * _MASK_SECONDS:
            raise UsageError(
                f"grammar: expected masks that take at most {_MASK_SECONDS * 1e3:g} ms a token, found "
                f"{self._seconds:.2f} seconds for {count} tokens",
                hint="send a simpler grammar: one with less repetition and fewer alternatives",
            )

    def _bits(self, token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        self._follow(token_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return bits

    def _follow(self, token_ids: Sequence[int]) -> None:
        """Let the matcher read the tokens that it has not read, and forget those that are others now."""
        read = self._read
        if list(token_ids[: len(read)]) != read:
            self._begin_again()
        for token_id in token_ids[len(read) :]:
            if not self._matcher.consume_token(token_id):
                self._check()
            read.append(token_id)

    def _check(self) -> None:
        """Raise the matcher's error, if it has one. A matcher never leaves its error, so take another."""
        if not self._matcher.is_error():
            return
        error, count = self._matcher.get_error().partition("\n")[0], len(self._read)
        is_full = "too many states" in error
        if is_full and self._renewed is not None:
            self._fresh = self._renewed(self._fresh)
        self._begin_again()
        if "too many" in error or "max is" in error:
            raise (_FullError if is_full else UsageError)(
                f"grammar: expected a smaller one, found after {count} tokens: {error}",
                hint="allow fewer alternatives, and texts that are shorter or of any length",
            )
        raise UsageError(
            f"grammar: expected one that allows more after {count} tokens, found: {error}",
            hint="a schema that refers only to itself has no end; a mask is for one request, from its first "
            "token on",
        )

    def _begin_again(self) -> None:
        self._matcher = self._fresh.deep_copy()
        self._read.clear()
