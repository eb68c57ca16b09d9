"""Text generation with a KV cache, on compiled programs alone.

A session is a batch of rows, each with its own length, over one cache. A prompt enters in chunks (prefill),
then every step gives one token a row (decode). Cache, tokens and positions stay on the device; the host
reads one integer a row and step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.runtime.bundle import Decoder, Program
from prejit.runtime.errors import ContextError, UsageError
from prejit.runtime.executable import Device, DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.programs import Programs
from prejit.runtime.weights import dtype_of

if TYPE_CHECKING:
    from prejit.runtime.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen from the logits.

    Attributes:
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the smallest set of tokens that has this much probability; 1: all.
        seed: 0 to 2**64 - 1. A request's tokens depend on its seed, not on what shares its batch.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UsageError(f"temperature: expected 0 or more, found {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise UsageError(f"top_k: expected 0 or more, found {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p: expected more than 0 and at most 1, found {self.top_p}")
        if not 0 <= self.seed < 2**64:
            raise UsageError(f"seed: expected 0 to 2**64 - 1, found {self.seed}")


@dataclass(frozen=True, slots=True)
class Stats:
    """What a generation cost.

    Attributes:
        prompt_tokens, new_tokens: counts.
        first_token_seconds: from the call to the first token.
        tokens_per_second: of those after the first.
    """

    prompt_tokens: int
    new_tokens: int
    first_token_seconds: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Result:
    """One finished generation.

    Attributes:
        text: of the new tokens; empty where the bundle has no tokenizer.
        token_ids: the new tokens, without the stop token.
        finish_reason: `stop` (a stop token came), `length` (max_new_tokens) or `context` (the longest
            context of the bundle is full).
        stats: what it cost.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stats: Stats


@dataclass(frozen=True, slots=True)
class Piece:
    """One token of a stream.

    Attributes:
        token_id: the token.
        text: the text that is complete with it; a character is never split.
        finish_reason: as in Result, on the last piece; else None.
    """

    token_id: int | None
    text: str
    finish_reason: str | None = None


@final
class DecoderPrograms:
    """Which prefill and decode programs a bundle has, and which of them serves a request."""

    def __init__(self, decoder: Decoder, programs: Programs, device: Device) -> None:
        self.decoder = decoder
        self.programs = programs
        self.device = device
        self._prefill: dict[tuple[int, int], list[Program]] = {}
        self._decode: dict[tuple[int, int], Program] = {}
        for program in programs.table.values():
            if program.kind not in ("prefill", "decode"):
                continue
            sizes = program.bucket["batch"], program.bucket["context"]
            if program.kind == "decode":
                self._decode[sizes] = program
            else:
                self._prefill.setdefault(sizes, []).append(program)
        for rows in self._prefill.values():
            rows.sort(key=lambda program: program.bucket["prompt"])
        self.batches = sorted({batch for batch, _ in self._decode})
        self.contexts = sorted({context for _, context in self._decode})

    def batch_for(self, rows: int) -> int:
        """The smallest batch bucket for so many rows.

        Raises:
            UsageError: no bucket is large enough.
        """
        for batch in self.batches:
            if batch >= rows:
                return batch
        raise UsageError(
            f"expected at most {self.batches[-1]} prompts at once, found {rows}",
            hint=f"generate them in turn, or add a batch of {rows} to [generate] of the manifest",
        )

    def context_for(self, tokens: int) -> int:
        """The smallest context bucket for so many tokens, or the largest there is."""
        return next((c for c in self.contexts if c >= tokens), self.contexts[-1])

    def bucket_for(self, rows: int, tokens: int) -> tuple[int, int]:
        """The batch and context bucket of a session: the smallest, or one in whose stead others are ready.

        That is the one for which the fewest programs must be waited for.

        Raises:
            UsageError: no bucket is large enough.
        """
        batch, context = self.batch_for(rows), self.context_for(tokens)
        larger = [
            (b, c) for b in self.batches for c in self.contexts if b >= batch and c >= context
        ]
        return min(larger, key=self._missing)  # the first of equals

    def _missing(self, bucket: tuple[int, int]) -> int:
        ready = self.programs.ready
        some = any(ready(prefill.name) for prefill in self._prefill[bucket])
        return (not some) + (not ready(self._decode[bucket].name))

    def prefill_for(self, batch: int, context: int, tokens: int) -> Program:
        """The prefill program for so many tokens: the smallest that takes them all, else the largest.

        Of those that are ready; where none is, the shortest.
        """
        programs = self._prefill[batch, context]
        ready = [program for program in programs if self.programs.ready(program.name)]
        return _fitting(ready or programs[:1], tokens)

    def prepare(self, rows: int, tokens: int, prompt: int, bucket: tuple[int, int]) -> None:
        """Begins to make the programs of a request ready, then those that would have served it better.

        Args:
            rows: of the request.
            tokens: of the request, as for `bucket_for`.
            prompt: the longest of its prompts, in tokens.
            bucket: the batch and context that were chosen.

        Raises:
            BuildError, RejectError: one of the latter failed in the background, and fails again.
        """
        self.programs.prepare(self.prefill_for(*bucket, prompt).name, self._decode[bucket].name)
        best = self.batch_for(rows), self.context_for(tokens)
        wanted = _fitting(self._prefill[best], prompt), self._decode[best]
        self.programs.wish(*(p.name for p in wanted if not self.programs.ready(p.name)))

    def prefills(self, batch: int, context: int) -> tuple[Program, ...]:
        """The prefill programs of a bucket, the shortest first."""
        return tuple(self._prefill[batch, context])

    def decode_for(self, batch: int, context: int) -> Program:
        """The decode program of a bucket."""
        return self._decode[batch, context]


def _fitting(prefills: Sequence[Program], tokens: int) -> Program:
    return next((p for p in prefills if p.bucket["prompt"] >= tokens), prefills[-1])


@final
class Session:
    """One live generation: a batch of rows and its KV cache."""

    def __init__(
        self,
        decoder: DecoderPrograms,
        sampling: Sequence[Sampling],
        context: int,
        batch: int | None = None,
    ) -> None:
        """Makes an empty cache.

        Args:
            decoder: the programs.
            sampling: one for each row.
            context: cache positions of each row; one of the bundle's context buckets.
            batch: one of the bundle's batch buckets; None: the smallest for so many rows.
        """
        self._decoder = decoder
        self._device = decoder.device
        self.rows = len(sampling)
        self.context = context
        self._batch = decoder.batch_for(self.rows) if batch is None else batch
        self._step = decoder.decode_for(self._batch, context)
        shape = decoder.decoder
        cache_shape = (self._batch, shape.num_kv_heads, context, shape.head_size)
        # Of a session's arrays a mesh splits the cache alone; the others are on every device.
        whole = self._device.mesh is None
        split = () if whole else decoder.programs.arguments(self._step.name)[-1].sharding
        self._cache: list[DeviceArray] = [
            self._device.put(aligned_zeros(cache_shape, dtype_of(shape.cache_dtype)), split)
            for _ in range(2 * shape.num_layers)
        ]
        padded = [*sampling, *[Sampling()] * (self._batch - self.rows)]
        seeds = np.array([[s.seed >> 32, s.seed & 0xFFFFFFFF] for s in padded], np.uint32)
        self._sampling = [
            self._device.put(np.array([s.temperature for s in padded], np.float32)),
            self._device.put(np.array([s.top_k for s in padded], np.int32)),
            self._device.put(np.array([s.top_p for s in padded], np.float32)),
            self._device.put(seeds),
        ]
        self._token: DeviceArray = None
        self._position: DeviceArray = None

    def prefill(self, prompts: Sequence[Sequence[int]]) -> np.ndarray[Any, Any]:
        """Puts prompts into the cache, in chunks where they are longer than the largest bucket.

        Args:
            prompts: token ids of each row, at least one and at most `context`.

        Returns:
            int32 [rows]: the first new token of each row.
        """
        lengths = np.zeros(self._batch, np.int32)
        lengths[: self.rows] = [len(prompt) for prompt in prompts]
        done = np.zeros(self._batch, np.int32)
        first = np.zeros(self._batch, np.int32)
        while (left := lengths - done).any():
            program = self._decoder.prefill_for(self._batch, self.context, int(left.max()))
            size = program.bucket["prompt"]
            count = np.minimum(left, size).astype(np.int32)
            tokens = np.zeros((self._batch, size), np.int32)
            for row, prompt in enumerate(prompts):
                tokens[row, : count[row]] = prompt[done[row] : done[row] + count[row]]
            results = self._run(program, [tokens, done.copy(), count])
            finished = (left > 0) & (left == count)
            first[finished] = to_numpy(results[0])[finished]
            done += count
        self._token = self._device.put(first.copy())
        self._position = self._device.put(lengths)
        return first[: self.rows]

    def step(self) -> np.ndarray[Any, Any]:
        """Decodes one token a row: int32 [rows]."""
        programs = self._decoder.programs
        results = programs[self._step.name].run(
            [
                *programs.weights(self._step.weights),
                self._token,
                self._position,
                *self._sampling,
                *self._cache,
            ]
        )
        self._token, self._position, *self._cache = results
        return to_numpy(self._token)[: self.rows]

    def _run(self, program: Program, inputs: list[np.ndarray[Any, Any]]) -> list[DeviceArray]:
        programs = self._decoder.programs
        arguments = [self._device.put(value) for value in inputs]
        results = programs[program.name].run(
            [*programs.weights(program.weights), *arguments, *self._sampling, *self._cache]
        )
        token, position, *self._cache = results
        return [token, position]


def run_rows(
    decoder: DecoderPrograms,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    max_new_tokens: int | None,
    stop_token_ids: frozenset[int],
) -> Iterator[list[tuple[int | None, str | None]]]:
    """Generates for a batch of prompts, step by step.

    Yields:
        For each row of a step (token or None, finish reason or None); a row that has finished gives
        (None, None) from then on. A stop token is not given out.

    Raises:
        ContextError: a prompt fills the longest context.
        UsageError: a prompt is empty or holds an id that the model has not.
    """
    limit = decoder.contexts[-1]
    for prompt in prompts:
        if not prompt:
            raise UsageError("prompt: expected at least one token, found none")
        for token in prompt:
            if not 0 <= token < decoder.decoder.vocab_size:
                raise UsageError(
                    f"prompt: expected token ids of 0 to {decoder.decoder.vocab_size - 1}, found {token}"
                )
        if len(prompt) > limit:
            raise ContextError(
                f"prompt: expected at most {limit} tokens (the longest context), found {len(prompt)}",
                hint="shorten the prompt, or add a longer context to [generate] of the manifest",
            )
    if max_new_tokens is not None and max_new_tokens < 1:
        raise UsageError(f"max_new_tokens: expected 1 or more, found {max_new_tokens}")
    longest = max(len(prompt) for prompt in prompts)
    # The last token need not enter the cache, so a full context still gives one token.
    wanted = limit if max_new_tokens is None else longest + max_new_tokens - 1
    batch, context = decoder.bucket_for(len(prompts), wanted)
    # XLA loads them in a thread while this one makes the first array, which imports parts of jax.
    decoder.prepare(len(prompts), wanted, longest, (batch, context))
    session = Session(decoder, sampling, context, batch)
    live = [True] * len(prompts)
    count = 0
    tokens = session.prefill(prompts)
    while True:
        count += 1
        out: list[tuple[int | None, str | None]] = []
        for row, token in enumerate(tokens.tolist()):
            if not live[row]:
                out.append((None, None))
            elif token in stop_token_ids:
                out.append((None, "stop"))
            elif count == max_new_tokens:
                out.append((token, "length"))
            elif len(prompts[row]) + count > session.context:
                out.append((token, "context"))
            else:
                out.append((token, None))
            live[row] = live[row] and out[row][1] is None
        yield out
        if not any(live):
            return
        tokens = session.step()


@final
class Timer:
    """Measures a generation while it is consumed."""

    def __init__(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._started = time.perf_counter()
        self._first: float | None = None
        self._last = self._started
        self._tokens = 0

    def token(self) -> None:
        """Notes that a token came."""
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last
        self._tokens += 1

    def stats(self) -> Stats:
        """What was measured so far."""
        first = self._first if self._first is not None else self._last
        rate = (self._tokens - 1) / (self._last - first) if self._tokens > 1 else 0.0
        return Stats(self._prompt_tokens, self._tokens, first - self._started, rate)


def stream_text(
    rows: Iterator[list[tuple[int | None, str | None]]],
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer | None,
) -> Iterator[Piece]:
    """The pieces of a generation of one row."""
    text = tokenizer.stream(prompt_ids) if tokenizer is not None else None
    for [(token, reason)] in rows:
        piece = text.push(token) if text is not None and token is not None else ""
        if reason is not None and text is not None:
            piece += text.finish()
        yield Piece(token, piece, reason)
