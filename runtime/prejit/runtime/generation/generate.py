"""Generation for callers: feed requests into `Slots`, return text and statistics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, final

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.options import Defaults, Options, Prompt, Request, Resolved, resolve
from prejit.runtime.generation.rows import Token, Usage
from prejit.runtime.generation.sampling_arguments import Logprob
from prejit.runtime.generation.slots import Slots
from prejit.runtime.records import dataclass
from prejit.runtime.text.bundle_text import BundleText

if TYPE_CHECKING:
    from prejit.runtime.generation.finished_text import Result, Stats
    from prejit.runtime.text.stop_strings import StopStrings
    from prejit.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream.

    Attributes:
        token_id: the token.
        text: the text that is complete with it. It never splits a character or begins a stop string.
        finish_reason: as in Result, on the last piece; else None.
        logprob: log-probability of the token, if the request has `logprobs`.
        stats: what the generation cost, on the last piece.
    """

    token_id: int | None
    text: str
    finish_reason: str | None = None
    logprob: Logprob | None = None
    stats: Stats | None = None


@final
class Generation:
    """State of an active request: generated text and timings."""

    def __init__(
        self,
        decoder: DecoderPrograms,
        request: Request,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
    ) -> None:
        """Start the clock of a request.

        Raises:
            UsageError: a stop string is empty.
        """
        self.request = request
        self._started = time.perf_counter()
        self._programs = decoder.programs
        self._ready = decoder.programs.obtained()
        self._text = tokenizer.stream(request.prompt) if tokenizer is not None else None
        self._stops: StopStrings | None = None
        if stop:
            from prejit.runtime.text.stop_strings import StopStrings  # few requests have any

            self._stops = StopStrings(stop)
        self._pieces: list[Piece] = []
        self._entered = self._first = self._last = self._started

    def enter(self) -> None:
        """Record that the request gets a slot now."""
        self._entered = time.perf_counter()

    @property
    def new_tokens(self) -> int:
        """The number of tokens so far: one of each piece, if the last is no end without a token."""
        return len(self._pieces) - any(piece.token_id is None for piece in self._pieces[-1:])

    @property
    def has_stops(self) -> bool:
        """True if a stop string may end the text."""
        return self._stops is not None

    def take(self, token: Token) -> Piece:
        """Return the piece of text that a token completes. The last piece has a finish_reason."""
        text, reason = "", token.finish_reason
        if self._text is not None:
            if token.token_id is not None:
                text = self._text.push(token.token_id)
            is_free = len(self._pieces) < self.request.min_new_tokens
            stops = self._stops
            if stops is not None and token.token_id is not None and not is_free:
                text = stops.push(text)
            if reason is not None:
                rest = self._text.finish()
                text += rest if stops is None else stops.push(rest)
            if stops is not None and stops.found is not None:
                reason = "stop"
            elif stops is not None and reason is not None:
                text += stops.finish()
        self._last = time.perf_counter()
        if not self._pieces:
            self._first = self._last
        stats = None
        if reason is not None:
            stats = self._stats(token.usage, len(self._pieces) + (token.token_id is not None))
        piece = Piece(token.token_id, text, reason, token.logprob, stats)
        self._pieces.append(piece)
        return piece

    def result(self) -> Result:
        """Return the finished generation. Call it after the last piece."""
        from prejit.runtime.generation.finished_text import Result

        last = self._pieces[-1]
        assert last.finish_reason is not None
        assert last.stats is not None
        logprobs = tuple(piece.logprob for piece in self._pieces if piece.logprob is not None)
        return Result(
            "".join(piece.text for piece in self._pieces),
            tuple(piece.token_id for piece in self._pieces if piece.token_id is not None),
            last.finish_reason,
            last.stats,
            logprobs if self.request.logprobs is not None else None,
        )

    def _stats(self, usage: Usage, new_tokens: int) -> Stats:
        from prejit.runtime.generation.finished_text import stats_of

        obtained = {
            name: how for name, how in self._programs.obtained().items() if name not in self._ready
        }
        times = self._started, self._entered, self._first, self._last
        return stats_of(usage, len(self.request.prompt), new_tokens, times, obtained)


def run(
    decoder: DecoderPrograms, generations: Sequence[Generation], batch: Slots | None = None
) -> Iterator[tuple[Generation, Piece]]:
    """Generate for several requests, as many at a time as there are slots, and yield each piece as it comes.

    If the iterator is closed or interrupted, its slots become free.

    Args:
        decoder: the programs.
        generations: the requests; those without a free slot wait for one.
        batch: slots that nobody else uses in the meantime; None: make one slot per request, at most as many
            as the bundle's largest batch.

    Raises:
        ContextError, UsageError: as Batch.insert; or the batch was closed during the generation.
    """
    if batch is None:
        batch = Slots(decoder, max(1, min(len(generations), decoder.batches[-1])))
    waiting = deque(generations)
    running: dict[int, Generation] = {}
    try:
        while waiting or running:
            if (count := min(batch.free, len(waiting))) > 0:
                entering = [waiting.popleft() for _ in range(count)]
                for generation in entering:
                    generation.enter()
                slots = batch.insert(*(generation.request for generation in entering))
                running |= zip(slots, entering, strict=True)
            tokens = batch.step()
            if running and not tokens:
                raise UsageError(
                    "expected slots to stay live until their requests are finished, found "
                    f"{len(running)} that became free before that",
                    hint="a session was closed, or failed in another thread, while it generated",
                )
            for token in tokens:
                if (found := running.get(token.slot)) is None:
                    continue  # a stop string ended it earlier in this step
                piece = found.take(token)
                if piece.finish_reason is not None:
                    del running[token.slot]
                    if token.finish_reason is None:  # a stop string
                        decoder.programs.verification.finish()
                        batch.evict(token.slot)
                yield found, piece
    finally:
        for slot in range(batch.slots):  # all: an interrupt may come before we know our slots
            batch.evict(slot)


@final
class Generator:
    """The decoder of a bundle with its tokenizer and its defaults. Safe to use from many threads.

    Attributes:
        decoder: the prefill and decode programs.
    """

    def __init__(
        self, name: str, decoder: DecoderPrograms, text: BundleText, defaults: Defaults
    ) -> None:
        """Keep the parts of a bundle."""
        self.decoder = decoder
        self._name = name
        self._text = text
        self._defaults = defaults.options()
        if bias := self._defaults.get("logit_bias"):  # as in transformers, other ids mean nothing
            known = range(decoder.decoder.vocab_size)
            self._defaults["logit_bias"] = {token: bias[token] for token in bias if token in known}

    def resolve(self, options: Options) -> Resolved:
        """Return the options of a call, filled in with the defaults of the bundle.

        Raises:
            UsageError: one is out of range.
        """
        self.decoder.programs.ask()
        resolved = resolve({**options}, self._defaults)
        if (adapter := resolved.common.get("adapter")) is not None:
            resolved.common["adapter"] = self.decoder.adapters[adapter]
        if (images := resolved.common.get("images")) is not None:
            from prejit.runtime.generation.image_prompts import read_images  # few prompts have any

            resolved.common["images"] = read_images(self.decoder, images)
        return self.with_source(resolved, resolved.common.get("source"))

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
        request = resolved.request(self.token_ids(prompt, resolved.common.get("images")))
        return Generation(self.decoder, request, tokenizer, resolved.stop)

    def with_source(self, resolved: Resolved, source: Any) -> Resolved:
        """Return the options of a call with this source; text becomes token ids."""
        if isinstance(source, str):
            if self.decoder.source is not None and self.decoder.source.dtype != "int32":
                raise UsageError(f"source: expected {self.decoder.source}, found a text")
            source = self._text.need_tokenizer().encode(source)
        return resolved._replace(common={**resolved.common, "source": source})

    def token_ids(self, prompt: Prompt | None, images: Any = None) -> list[int]:
        """Return the token ids of a prompt with these images, all of them in the vocabulary."""
        start = self.decoder.decoder.start_token_ids
        if prompt is None and start:
            return list(start)
        tokens = arguments.prompt("prompt", prompt, self.decoder.decoder.vocab_size)
        if isinstance(tokens, str):
            text = tokens if images is None else images.expanded(tokens)
            # Special tokens, such as an end, belong to the source of an encoder-decoder.
            encode, most = self._text.need_tokenizer().encode, self.decoder.contexts[-1]
            tokens = [*(start or ()), *encode(text, add_special_tokens=not start, max_tokens=most)]
        if images is None:
            self.decoder.check_text(tokens)
        return tokens
