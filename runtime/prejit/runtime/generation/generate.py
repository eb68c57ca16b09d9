"""Generation for callers: requests in, text and what it cost out. The work is batch.py's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from prejit.runtime.errors import UsageError
from prejit.runtime.generation.batch import Batch
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.request import Logprob, Request, Token, Usage
from prejit.runtime.programs.programs import ProgramReport
from prejit.runtime.text.stop import StopStrings

if TYPE_CHECKING:
    from prejit.runtime.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Stats:
    """What a generation took.

    Attributes:
        prompt_tokens, new_tokens: counts.
        reused_tokens: of the prompt, that were in a cache already.
        queue_seconds: from the call until it had a slot.
        prefill_seconds: of the call that put its prompt into the cache, with those that came with it.
        decode_seconds: of the steps that it was part of.
        first_token_seconds: from the call to the first token.
        tokens_per_second: of those after the first.
        passes: runs over the weights after prefill; fewer than tokens where drafts were accepted.
        drafted_tokens, accepted_tokens: of prompt lookup.
        padding: of the positions that were computed for it, the part that nobody asked for: padding of
            buckets, slots that were free, drafts that were wrong; 0 to 1.
        programs: names of the programs, and so the buckets, that ran for it.
        obtained: those of them that were made ready during the call, and how: loaded, compiled or kept.
    """

    prompt_tokens: int
    new_tokens: int
    reused_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    first_token_seconds: float
    tokens_per_second: float
    passes: int
    drafted_tokens: int
    accepted_tokens: int
    padding: float
    programs: tuple[str, ...]
    obtained: tuple[ProgramReport, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation.

    Attributes:
        text: of the new tokens; empty where the bundle has no tokenizer.
        token_ids: the new tokens, without the stop token.
        finish_reason: `stop` (a stop token or stop string came), `length` (max_new_tokens), `context` (the
            longest context of the bundle is full), `mask` (token mask and bias allow nothing) or `nan` (the
            model gave no numbers: its weights are broken, or a cache dtype overflowed).
        stats: what it took.
        logprobs: of each new token, where they were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats
    logprobs: tuple[Logprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream.

    Attributes:
        token_id: the token.
        text: the text that is complete with it; a character is never split, a stop string never begun.
        finish_reason: as in Result, on the last piece; else None.
        logprob: of the token, where it was asked for.
        stats: what it took, on the last piece.
    """

    token_id: int | None
    text: str
    finish_reason: str | None = None
    logprob: Logprob | None = None
    stats: Stats | None = None


@final
class Generation:
    """A request on its way: its text so far, and its times."""

    def __init__(
        self,
        decoder: DecoderPrograms,
        request: Request,
        tokenizer: Tokenizer | None,
        stop: Sequence[str] = (),
    ) -> None:
        """Starts its clock.

        Raises:
            UsageError: a stop string is empty.
        """
        self.request = request
        self._started = time.perf_counter()
        self._programs = decoder.programs
        self._ready = decoder.programs.obtained()
        self._text = tokenizer.stream(request.prompt) if tokenizer is not None else None
        self._stops = StopStrings(stop)
        self._pieces: list[Piece] = []
        self._entered = self._first = self._last = self._started

    def enter(self) -> None:
        """Notes that it got a slot."""
        self._entered = time.perf_counter()

    def take(self, token: Token) -> Piece:
        """The piece of text that comes with the next token of its slot; the last has a finish_reason."""
        text, reason = "", token.finish_reason
        if self._text is not None:
            if token.token_id is not None:
                text = self._stops.push(self._text.push(token.token_id))
            if reason is not None:
                text += self._stops.push(self._text.finish())
            if self._stops.found is not None:
                reason = "stop"
            elif reason is not None:
                text += self._stops.finish()
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
        """All of it, once its last piece has come."""
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
        seconds = self._last - self._first
        prompt = len(self.request.prompt)
        useful = (
            prompt - usage.reused_tokens + max(0, new_tokens - 1)
        )  # the last is never computed on
        obtained = self._programs.obtained()
        return Stats(
            prompt_tokens=prompt,
            new_tokens=new_tokens,
            reused_tokens=usage.reused_tokens,
            queue_seconds=self._entered - self._started - usage.prefill_seconds,
            prefill_seconds=usage.prefill_seconds,
            decode_seconds=usage.decode_seconds,
            first_token_seconds=self._first - self._started,
            tokens_per_second=(new_tokens - 1) / seconds if new_tokens > 1 and seconds else 0.0,
            passes=usage.passes,
            drafted_tokens=usage.drafted_tokens,
            accepted_tokens=usage.accepted_tokens,
            padding=max(0.0, 1 - useful / usage.computed_tokens),
            programs=tuple(usage.programs),
            obtained=tuple(
                obtained[name]
                for name in usage.programs
                if name in obtained and name not in self._ready
            ),
        )


def run(
    decoder: DecoderPrograms, generations: Sequence[Generation], batch: Batch | None = None
) -> Iterator[tuple[Generation, Piece]]:
    """Generates for several requests, as many at a time as there are slots.

    When it is closed or interrupted, its slots are free.

    Args:
        decoder: the programs.
        generations: the requests; those that find no slot wait for one.
        batch: the slots, nobody else's meanwhile; None: as many as are wanted, or as the bundle's largest
            batch has.

    Yields:
        Each piece as it comes.

    Raises:
        ContextError, UsageError: as Batch.insert; or the batch was closed meanwhile.
    """
    if batch is None:
        batch = Batch(decoder, max(1, min(len(generations), decoder.batches[-1])))
    waiting = deque(generations)
    running: dict[int, Generation] = {}
    try:
        while waiting or running:
            if (count := min(batch.free, len(waiting))) > 0:
                entering = [waiting.popleft() for _ in range(count)]
                slots = batch.insert(*(generation.request for generation in entering))
                running |= zip(slots, entering, strict=True)
                for generation in entering:
                    generation.enter()
            tokens = batch.step()
            if running and not tokens:
                raise UsageError(
                    f"expected slots that are live until their requests are finished; found that "
                    f"{len(running)} of them were freed",
                    hint="a session was closed, or failed in another thread, while it generated",
                )
            for token in tokens:
                if (found := running.get(token.slot)) is None:
                    continue  # a stop string has ended it within this step
                piece = found.take(token)
                if piece.finish_reason is not None:
                    del running[token.slot]
                    if token.finish_reason is None:
                        batch.evict(token.slot)
                yield found, piece
    finally:
        for slot in range(batch.slots):  # an interrupt may come before we know which are ours
            batch.evict(slot)
