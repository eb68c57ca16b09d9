"""The grammars of one vocabulary. Each gives token masks, and is compiled once for all of its requests."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

from prejit.runtime.base import arguments
from prejit.runtime.base.once import once
from prejit.runtime.errors import UsageError
from prejit.runtime.grammar.mask import GrammarMask
from prejit.runtime.grammar.schema_paths import error_path
from prejit.runtime.grammar.tools import ToolForm, tools_grammar

if TYPE_CHECKING:
    import llguidance

    from prejit.runtime.format.schema import Decoder
    from prejit.runtime.text.tokenizer import Tokenizer

WHITESPACE = " "
"""White space that JSON may have between its parts: one space, as JSON in one line has. Small models repeat
white space until their last token if they may, and indents cost tokens without a meaning."""
_COMPILED = 64
"""Maximum number of compiled grammars that are kept."""
_LEXER_STATES = 50_000
"""Maximum number of lexer states of a grammar, of 1 to 2 kB each: a hostile schema cannot fill the memory."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Without it, llguidance allows only the tokens into which the tokenizer cuts a text that must come. It would
call the tokenizer for that, and some models were trained on other cuts."""


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


@final
class Grammars:
    """The grammars of a bundle: `Bundle.grammars`. Safe to use from many threads.

        bundle.generate(prompt, token_mask=bundle.grammars.json_schema({"type": "integer"}))

    Every method returns a new mask, for one request. A mask costs microseconds if the grammar was used
    before. A request with its own `stop_token_ids` gives them here, too.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer) -> None:
        """Keep a vocabulary. It is read with the first grammar, or by `prepare`.

        Args:
            decoder: has the number of logits and the stop tokens.
            tokenizer: of the same bundle.
        """
        self._decoder = decoder
        self._vocabulary = tokenizer
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
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
        source = f"start: %json {_schema_text(schema, lenient)}"
        try:
            return self._mask(source, stop_token_ids)
        except _GrammarError:
            raise self._schema_error(schema, lenient) from None

    def regex(self, pattern: str, *, stop_token_ids: Collection[int] | None = None) -> GrammarMask:
        """Return a mask for texts that match a regular expression as a whole.

        The syntax is that of Rust's `regex`: as Python's, without look-around and references to groups.

        Raises:
            UsageError: it is no such expression. Also as `prepare`.
        """
        arguments.text("regex", pattern)
        self.prepare()
        from llguidance import regex_to_lark

        try:
            return self._mask(f"start: /{regex_to_lark(pattern, '')}/", stop_token_ids)
        except _GrammarError as error:
            raise UsageError(
                f"regex: expected a regular expression without look-around, found {pattern!r:.80}: {error}"
            ) from None

    def lark(self, grammar: str, *, stop_token_ids: Collection[int] | None = None) -> GrammarMask:
        """Return a mask for the texts of a context-free grammar.

        Args:
            grammar: in llguidance's variant of Lark; its rule `start` is the whole text.
            stop_token_ids: of the request; None: those of the model.

        Raises:
            UsageError: it is no such grammar. Also as `prepare`.
        """
        arguments.text("grammar", grammar)
        try:
            return self._mask(grammar, stop_token_ids)
        except _GrammarError as error:
            raise UsageError(f"grammar: expected a Lark grammar: {error}") from None

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
        source = tools_grammar(
            tools,
            form,
            required=required,
            parallel=parallel,
            schema_text=_schema_text,
            special_id=self._vocabulary.special_id,
        )
        try:
            return self._mask(source, stop_token_ids)
        except _GrammarError as error:
            for place, tool in enumerate(tools):
                function = tool.get("function", tool)
                lenient = not function.get("strict")
                parameters = function.get("parameters") or {}
                if self._error_of(parameters, lenient):
                    raise self._schema_error(
                        parameters, lenient, f"tools[{place}].function.parameters"
                    ) from None
            raise UsageError(f"tools: expected tools that fit a grammar: {error}") from None

    def _mask(self, source: str, stop_token_ids: Collection[int] | None) -> GrammarMask:
        matcher = self._matcher(source)
        decoder = self._decoder
        stop = decoder.eos_token_ids if stop_token_ids is None else stop_token_ids
        return GrammarMask(matcher, decoder.vocab_size, stop)

    def _matcher(self, source: str) -> llguidance.LLMatcher:
        """Return a matcher at the beginning of a text, which masks copy; a kept one if there is one."""
        with self._lock:
            if (kept := self._compiled.get(source)) is not None:
                self._compiled.move_to_end(source)
                return kept
        compiled = self._compile(source)
        with self._lock:
            self._compiled[source] = compiled
            while len(self._compiled) > _COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _compile(self, source: str) -> llguidance.LLMatcher:
        tokenizer = self._tokenizer
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
        grammar = LLMatcher.grammar_from_lark(f"{source}\n{_OPTIONS}")
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise _GrammarError(_one_line(matcher.get_error()))
        return matcher

    @once
    def _tokenizer(self) -> llguidance.LLTokenizer:
        table = self._vocabulary.vocabulary(self._decoder.vocab_size)
        try:
            from llguidance import LLTokenizer, TokenizerWrapper
        except ImportError as error:
            raise UsageError(
                "grammar: expected the package llguidance, found none",
                hint="pip install 'prejit[grammar]'",
            ) from error
        vocabulary = _Vocabulary(
            [b"" if token is None else token for token in table],
            [token_id for token_id, token in enumerate(table) if token is None],
        )
        return LLTokenizer(TokenizerWrapper(vocabulary))

    def _schema_error(
        self, schema: Mapping[str, Any] | bool, lenient: bool, at: str = "schema"
    ) -> UsageError:
        """Return the error of a schema, with the path of its place."""
        error = self._error_of(schema, lenient)
        path = error_path(schema, error, lambda part: self._error_of(part, lenient))
        if (
            "coerce_one_of" in error
        ):  # an option that we do not offer, because it allows wrong answers
            error = "alternatives of oneOf may fit the same value; use anyOf"
        return UsageError(
            f"{at}{path}: expected a JSON schema that a grammar can follow: {error}",
            hint="leave the keyword out, or check it after the answer",
        )

    def _error_of(self, schema: Any, lenient: bool) -> str:
        from llguidance import LLMatcher

        text = _schema_text(schema, lenient)
        error = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
        return _one_line(
            error.partition("\n  while processing ")[0]
        )  # it names the place of a $ref


class _GrammarError(Exception):
    """A grammar does not compile."""


def _schema_text(schema: Mapping[str, Any] | bool, lenient: bool) -> str:
    """Return a schema as JSON, with llguidance's own options instead of those that it has."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise UsageError(
            f"schema: expected a JSON schema that a value satisfies, found {schema!r:.80}"
        )
    ways = {"whitespace_pattern": WHITESPACE, "lenient": lenient}
    try:
        return json.dumps({**schema, "x-guidance": ways}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"schema: expected values of JSON, found others: {error}") from error


def _one_line(error: str) -> str:
    """Return an error of llguidance in one line: without the picture of the source that follows it."""
    lines = [" ".join(line.split()) for line in error.split("\n   1 |")[0].splitlines()]
    return " ".join(filter(None, lines))
