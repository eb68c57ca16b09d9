"""The programs of an encoder: run them over the cheapest set of buckets, and load them in the background.

A bucket has three programs (`bundle_schema.Encoder`): embed, layer (run once for each layer) and pool. A
thread loads all buckets from the moment that the bundle is loaded. It loads them in an order in which the
first few serve every sentence at no more than twice its best cost; the very first is ready when `load`
returns. A call in the meantime uses the buckets that are ready if that is faster than waiting.

In a packed bucket sentences lie one after the other in one row, and only the end of the row is padding.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from prejit.runtime.base.threads_and_forks import start_thread
from prejit.runtime.device.transfer import DeviceArray, aligned_zeros, to_numpy
from prejit.runtime.encoding.buckets import Bucket, evened, fitting, loading_order, partition
from prejit.runtime.format.bundle_schema import Encoder
from prejit.runtime.programs.ready_programs import ProgramReport, Programs

_LOAD_MICROSECONDS = 15_000
"""Rough cost of loading a bucket: three programs are deserialized, and XLA finishes them at their first run.
Measured with MiniLM on two cores."""
_WARM_MICROSECONDS = 30_000
"""Buckets whose run costs less than this are run once in advance. A first run takes a few milliseconds more
than the next, which matters little for a run that takes longer than this."""
_PATIENCE_SECONDS = 0.1
"""Maximum time that the loading thread waits for calls to finish before it loads the next bucket."""


@dataclass(frozen=True, slots=True)
class EncodeStats:
    """The cost of a call of `encode`.

    Attributes:
        sentences: the number of sentences.
        tokens: the number of their tokens, special tokens included, after truncation.
        truncated: the number of sentences that were too long.
        padding: the fraction of computed tokens that was padding, 0 to 1.
        buckets: how many times each bucket ran, by batch and length, `8x128`, or tokens, `packed 1024`.
        tokenize_seconds: time from texts to token ids.
        queue_seconds: time waiting for programs to be loaded or compiled.
        run_seconds: time running programs.
        obtained: programs that became ready during the call, and how: loaded, compiled or kept.
    """

    sentences: int
    tokens: int
    truncated: int
    padding: float
    buckets: dict[str, int]
    tokenize_seconds: float
    queue_seconds: float
    run_seconds: float
    obtained: tuple[ProgramReport, ...]


@dataclass(frozen=True, slots=True)
class Encoded:
    """Embeddings, or scores, and what they cost.

    Attributes:
        embeddings: float32 [N, D], in the order of the sentences; or scores of pairs, [N, labels].
        stats: what they cost.
        lexical_weights: of each sentence the weights of its tokens, by token id, without special tokens and
            those of weight 0; None: the bundle was built without the head `sparse`.
        token_vectors: of each sentence a vector of length 1 for each token but the first, float32
            [T - 1, D']; None: the bundle was built without the head `multi_vector`.
    """

    embeddings: np.ndarray[Any, np.dtype[np.float32]]
    stats: EncodeStats
    lexical_weights: tuple[dict[int, float], ...] | None = None
    token_vectors: tuple[np.ndarray[Any, np.dtype[np.float32]], ...] | None = None

    def part(self, first: int, end: int) -> Encoded:
        """Return that of the sentences from `first` up to `end`."""
        weights, vectors = self.lexical_weights, self.token_vectors
        return Encoded(
            self.embeddings[first:end],
            self.stats,
            None if weights is None else weights[first:end],
            None if vectors is None else vectors[first:end],
        )


def in_order(parts: Sequence[Encoded], places: Sequence[int], stats: EncodeStats) -> Encoded:
    """Return parts as one, whose sentences come at the given places."""
    found = [part.embeddings for part in parts]
    embeddings = np.empty((len(places), found[0].shape[1]), np.float32)
    embeddings[places] = np.concatenate(found)

    def ordered(each: Sequence[tuple[Any, ...] | None]) -> Any:
        if each[0] is None:
            return None
        placed = zip(places, (one for several in each for one in several or ()), strict=True)
        return tuple(one for _, one in sorted(placed, key=lambda pair: pair[0]))

    return Encoded(
        embeddings,
        stats,
        ordered([part.lexical_weights for part in parts]),
        ordered([part.token_vectors for part in parts]),
    )


@final
class EncoderPrograms:
    """The programs of an encoder by bucket. Safe to use from many threads.

    Attributes:
        encoder: the bundle's description of the model.
        buckets: all buckets.
        max_tokens: the longest sentence: the limit of the model, or the longest bucket.
    """

    def __init__(self, encoder: Encoder, programs: Programs) -> None:
        """Sort the programs of a bundle into buckets."""
        self.encoder = encoder
        self.programs = programs
        self._device = programs.device
        found = [each.bucket for each in programs.table.values() if each.kind == "layer"]
        shapes = {(each["batch"], each["length"], each.get("sentences", 0)) for each in found}
        self.buckets = evened(self._bucket(Bucket(*each[:2], 0, each[2])) for each in shapes)
        self._fitting = fitting(self.buckets)
        self.max_tokens = min(encoder.max_tokens, max(bucket.length for bucket in self.buckets))
        self._warm: set[Bucket] = set()
        self._calls = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def _bucket(self, bucket: Bucket) -> Bucket:
        costs = [self.programs.table[name].cost_microseconds for name in bucket.programs]
        if None in costs:
            return replace(bucket, cost=bucket.batch * bucket.length)
        embed, layer, pool = (cost or 0 for cost in costs)
        return replace(bucket, cost=embed + layer * len(self.encoder.layers) + pool)

    def start_loading(self, before: Callable[[], object]) -> None:
        """Load one bucket and begin to load the others in a thread. The use of a bucket raises its error.

        The one bucket serves most of the others well. The first call finds it ready, whatever its sentences
        are, and the number of buckets does not matter. The thread calls `before` first.
        """
        first, *others = loading_order(self.buckets)
        self._thread = start_thread(lambda: self._load(before, others), "prejit-encoder")
        with contextlib.suppress(Exception):
            self._warm_up(first, self.encoder.layers)  # all layers: puts all weights on the device

    def _load(self, before: Callable[[], object], buckets: Sequence[Bucket]) -> None:
        with contextlib.suppress(Exception):  # raised again for the call that needs it
            before()
        for bucket in buckets:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or not self._calls, _PATIENCE_SECONDS
                )
            # At exit, the interpreter waits for this thread.
            if self._is_closed or not threading.main_thread().is_alive():
                return
            with contextlib.suppress(Exception):  # raised again for the call that needs the bucket
                if bucket not in self._warm:
                    self._warm_up(bucket, self.encoder.layers[:1])

    def release(self) -> None:
        """Forget which buckets are loaded, after their programs were dropped. Calls load what they need."""
        self.close()
        self._warm.clear()

    def close(self) -> None:
        """Stop to load buckets, and wait for the thread that does it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _warm_up(self, bucket: Bucket, layers: Sequence[str]) -> None:
        """Load the programs of a bucket; run them for some layers if a first run would be noticeably slow."""
        for name in bucket.programs:
            self.programs[name]
        if bucket.cost < _WARM_MICROSECONDS:
            tokens = aligned_zeros((bucket.batch, bucket.length), np.dtype(np.int32))
            self._run(bucket, tokens, np.ones(bucket.most, np.int32), layers)
        self._warm.add(bucket)

    def encode(self, sentences: Sequence[Sequence[int]]) -> Encoded:
        """Return the embeddings of token ids, float32 [N, D], and what they cost.

        Args:
            sentences: token ids, none longer than max_tokens.

        Raises:
            RejectError: a program is damaged.
        """
        with self._changed:
            self._calls += 1
        try:
            return self._encode(sentences)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def _encode(self, sentences: Sequence[Sequence[int]]) -> Encoded:
        heads = self.encoder.heads or ()
        of_tokens: dict[str, list[Any]] = {head: [None] * len(sentences) for head in heads}
        found = np.zeros((len(sentences), self.encoder.width), np.float32)
        order = sorted(range(len(sentences)), key=lambda place: -len(sentences[place]))
        before = self.programs.obtained()
        queued = ran = 0.0
        used: Counter[Bucket] = Counter()
        for bucket, first, end in self._runs([len(sentences[place]) for place in order]):
            places = order[first:end]
            tokens = aligned_zeros((bucket.batch, bucket.length), np.dtype(np.int32))
            length = np.zeros(bucket.most, np.int32)
            for row, place in enumerate(places):
                start = int(length.sum()) if bucket.sentences else row * bucket.length
                length[row] = len(sentences[place])
                tokens.reshape(-1)[start : start + length[row]] = sentences[place]
            started = time.perf_counter()
            for name in bucket.programs:
                self.programs[name]
            ready = time.perf_counter()
            first_result, *others = self._run(bucket, tokens, length, self.encoder.layers)
            found[places] = first_result[: len(places)]
            for head, values in zip(heads, others, strict=True):
                for row, place in enumerate(places):
                    of_tokens[head][place] = self._of_tokens(head, values[row], sentences[place])
            self._warm.add(bucket)
            used[bucket] += 1
            queued += ready - started
            ran += time.perf_counter() - ready
        computed = sum(bucket.batch * bucket.length * runs for bucket, runs in used.items())
        tokens_in_all = sum(map(len, sentences))
        after = self.programs.obtained()
        names = {name for bucket in used for name in bucket.programs}
        stats = EncodeStats(
            sentences=len(sentences),
            tokens=tokens_in_all,
            truncated=0,
            padding=1 - tokens_in_all / computed if computed else 0.0,
            buckets={str(b): used[b] for b in sorted(used, key=lambda b: (b.batch, b.length))},
            tokenize_seconds=0.0,
            queue_seconds=queued,
            run_seconds=ran,
            obtained=tuple(
                report for name, report in after.items() if name in names and name not in before
            ),
        )
        weights, vectors = of_tokens.get("sparse"), of_tokens.get("multi_vector")
        return Encoded(
            found,
            stats,
            None if weights is None else tuple(weights),
            None if vectors is None else tuple(vectors),
        )

    def _of_tokens(self, head: str, values: np.ndarray[Any, Any], ids: Sequence[int]) -> Any:
        """Return what a head gives of a sentence, from the values of its row."""
        if head == "multi_vector":
            return values[1 : len(ids)].copy()
        weights: dict[int, float] = {}
        for token, weight in zip(ids, values[: len(ids)].tolist(), strict=True):
            if weight > weights.get(token, 0.0):
                weights[token] = weight
        for token in self.encoder.unweighted or ():
            weights.pop(token, None)
        return weights

    def _runs(self, lengths: Sequence[int]) -> list[tuple[Bucket, int, int]]:
        """Return the cheapest runs for these lengths, which descend; a bucket not yet loaded costs extra."""
        if not lengths:
            return []
        best = partition(lengths, self._fitting)
        if not self.programs.are_loaded:  # they must be compiled: do not wait for them
            ready = [b for b in self.buckets if all(map(self.programs.ready, b.programs))]
            if len(ready) == len(self.buckets):
                return best
            self._prepare_later(best)
            if ready and max(bucket.length for bucket in ready) >= lengths[0]:
                return partition(lengths, fitting(ready))
            return best
        if len(self._warm) < len(self.buckets):
            here = (b for b in self.buckets if all(map(self.programs.is_here, b.programs)))
            self._warm.update(here)
        if self._warm.issuperset(bucket for bucket, *_ in best):
            return best
        if self._is_closed:  # they were dropped, and no thread loads them all again
            self._prepare_later(best)
        later = {
            b: b if b in self._warm else replace(b, cost=b.cost + _LOAD_MICROSECONDS)
            for b in self.buckets
        }
        own = {charged: bucket for bucket, charged in later.items()}
        return [(own[b], first, end) for b, first, end in partition(lengths, fitting(list(own)))]

    def _prepare_later(self, runs: Sequence[tuple[Bucket, int, int]]) -> None:
        self.programs.prepare_later(*(name for bucket, *_ in runs for name in bucket.programs))

    def _run(
        self, bucket: Bucket, tokens: Any, length: Any, layers: Sequence[str]
    ) -> list[np.ndarray[Any, Any]]:
        """Return embeddings float32 [B, D] of tokens [B, T] and lengths [B], then what heads give."""
        programs = self.programs
        embed, layer, pool = bucket.programs
        valid = self._device.put(length)
        inputs = [self._device.put(tokens), *([valid] if bucket.sentences else [])]
        (hidden,) = programs[embed].run([*self._weights(embed), *inputs])
        for weights in layers:
            (hidden,) = programs[layer].run([*programs.weights(weights), valid, hidden])
        return [
            to_numpy(each) for each in programs[pool].run([*self._weights(pool), valid, hidden])
        ]

    def _weights(self, name: str) -> list[DeviceArray]:
        return self.programs.weights(self.programs.table[name].weights)
