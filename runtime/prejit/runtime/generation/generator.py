"""Generate from the prompts of callers: what `Bundle.generate` and its siblings do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Unpack, final

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.defaults import Defaults
from prejit.runtime.generation.generate import Generation, Piece, Result, run
from prejit.runtime.generation.kv_cache import Prefix
from prejit.runtime.generation.options import (
    SAMPLING_OPTIONS,
    Options,
    Prompt,
    Request,
    Resolved,
    Sampling,
    resolve,
)
from prejit.runtime.generation.prefill import compute_prefix
from prejit.runtime.generation.rows import admit
from prejit.runtime.text.bundle_text import BundleText


@final
class Generator:
    """The decoder of a bundle with its tokenizer and its defaults. Safe to use from many threads.

    Methods with the name of one of `Bundle` have its arguments, results and errors.

    Attributes:
        decoder: the prefill and decode programs.
    """

    def __init__(
        self, name: str, decoder: DecoderPrograms, text: BundleText, defaults: Defaults
    ) -> None:
        """Keep the parts of a bundle.

        Args:
            name: of the bundle, for errors.
            decoder: its programs.
            text: its tokenizer, if it has one.
            defaults: options for calls that do not give their own.
        """
        self.decoder = decoder
        self._name = name
        self._text = text
        self._defaults = defaults.options()

    def generate_n(self, prompt: Prompt | None, n: int, **options: Unpack[Options]) -> list[Result]:
        """Generate n continuations of one prompt."""
        n = arguments.integer("n", n, 1, arguments.MAX_SEQUENCES)
        first = self.resolve(options)
        seeds = [(first.sampling.seed + index) % 2**64 for index in range(n)]
        each = [first._replace(sampling=replace(first.sampling, seed=seed)) for seed in seeds]
        return self._generate([self._token_ids(prompt)] * n, each)

    def generate_batch(
        self,
        prompts: str | Sequence[Prompt | None] | None,
        *,
        sources: str | Sequence[Any] | None,
        sampling: Sequence[Sampling] | None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generate from several prompts at the same time."""
        listed, each = self._each(prompts, sources, self.resolve(options))
        if sampling is None:
            return self._generate(listed, each)
        ways = arguments.items("sampling", sampling, "a list of Sampling, one for each prompt")
        if len(ways) != len(listed):
            raise UsageError(
                f"sampling: expected {len(listed)}, one for each prompt; found {len(ways)}"
            )
        if beside := [name for name in SAMPLING_OPTIONS if options.get(name) is not None]:
            raise UsageError(
                f"sampling: expected it without other options of sampling, found {beside[0]}",
                hint=f"give each prompt's {beside[0]} in its Sampling",
            )
        ones = zip(each, ways, strict=True)
        return self._generate(listed, [one._replace(sampling=way) for one, way in ones])

    def stream(self, prompt: Prompt | None, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generate from one prompt and yield each token as it comes."""
        return self._stream(prompt, self.resolve(options))

    def prefix(self, prompt: Prompt) -> Prefix:
        """Compute the common beginning of many prompts once."""
        if self.decoder.source is not None:
            raise UsageError(f"{self._name}: texts about different sources have no common prefix")
        row = admit(Request(self._token_ids(prompt)), self.decoder)
        context = self.decoder.context_for(len(row.token_ids))
        return compute_prefix(self.decoder, row.token_ids, context, row.usage)

    def request(self, prompt: Prompt | None, **options: Unpack[Options]) -> Request:
        """Return a request for `Batch.insert`."""
        resolved = self.resolve(options)
        if resolved.stop:
            raise UsageError(
                "stop: expected none, since a batch knows tokens and no text",
                hint="push text through prejit.runtime.text.stop.StopStrings and evict the slot",
            )
        return resolved.request(self._token_ids(prompt))

    def resolve(self, options: Options) -> Resolved:
        """Return the options of a call, filled in with the defaults of the bundle.

        Raises:
            UsageError: one is out of range.
        """
        self.decoder.programs.ask()
        resolved = resolve({**options}, self._defaults)
        return self._reading(resolved, resolved.common.get("source"))

    def begin(self, prompt: Prompt | None, resolved: Resolved) -> Generation:
        """Return a generation from a prompt, which `generate.run` runs.

        Raises:
            UsageError: the prompt is none, or the bundle has no tokenizer and the call needs it.
        """
        tokenizer = self._text.tokenizer
        if resolved.stop and tokenizer is None:
            raise UsageError(
                f"{self._name}: this bundle has no tokenizer, so nothing can stop at a string",
                hint="give stop_token_ids, or build from a model directory with a tokenizer.json",
            )
        request = resolved.request(self._token_ids(prompt))
        return Generation(self.decoder, request, tokenizer, resolved.stop)

    def _reading(self, resolved: Resolved, source: Any) -> Resolved:
        """Return the options of a call with this source; text becomes token ids."""
        if isinstance(source, str):
            if self.decoder.source is not None and self.decoder.source.dtype != "int32":
                raise UsageError(f"source: expected {self.decoder.source}, found a text")
            source = self._text.need_tokenizer().encode(source)
        return resolved._replace(common={**resolved.common, "source": source})

    def _each(
        self,
        prompts: str | Sequence[Prompt | None] | None,
        sources: str | Sequence[Any] | None,
        resolved: Resolved,
    ) -> tuple[list[Prompt | None], list[Resolved]]:
        """Return the prompts of a batch, and the options of each."""
        given = [prompts] if isinstance(prompts, str) else prompts
        if sources is None:
            listed = arguments.items("prompts", given, "a prompt or a list of prompts")
            return list(listed), [resolved] * len(listed)
        one = [sources] if isinstance(sources, str) else sources
        read = arguments.items("sources", one, "a source or a list of sources")
        listed = (
            [None] * len(read)
            if given is None
            else arguments.items("prompts", given, "a prompt or a list of prompts")
        )
        if len(listed) != len(read):
            raise UsageError(
                f"sources: expected {len(listed)}, one for each prompt; found {len(read)}"
            )
        return list(listed), [self._reading(resolved, source) for source in read]

    def _generate(self, prompts: Sequence[Prompt | None], each: Sequence[Resolved]) -> list[Result]:
        generations = [self.begin(*pair) for pair in zip(prompts, each, strict=True)]
        for _ in run(self.decoder, generations):
            pass
        return [generation.result() for generation in generations]

    def _stream(self, prompt: Prompt | None, resolved: Resolved) -> Iterator[Piece]:
        for _, piece in run(self.decoder, [self.begin(prompt, resolved)]):
            yield piece

    def _token_ids(self, prompt: Prompt | None) -> list[int]:
        """Return the token ids of a prompt, all of them in the vocabulary."""
        start = self.decoder.decoder.start_token_ids
        if prompt is None and start:
            return list(start)
        checked = arguments.prompt("prompt", prompt, self.decoder.decoder.vocab_size)
        if not isinstance(checked, str):
            return checked
        # Special tokens, such as an end, belong to the source of an encoder-decoder.
        tokens = self._text.need_tokenizer().encode(
            checked, add_special_tokens=not start, max_tokens=self.decoder.contexts[-1]
        )
        return [*start, *tokens] if start else tokens
