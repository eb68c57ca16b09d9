"""Sentences of several callers in shared runs of a bundle's encoder."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from prejit.runtime.base import arguments
from prejit.runtime.encoding.encoder import Encoded, EncoderPrograms, EncodeStats, in_order
from prejit.runtime.encoding.sentences import (
    OnTooLong,
    Tokenized,
    activated,
    embed,
    tokenize,
    tokenize_pairs,
)
from prejit.server.engine.fair_queue import NO_LIMITS, Limits
from prejit.server.engine.microbatch import Lane
from prejit.server.engine.request_recorder import Cost, RequestRecorder
from prejit.server.engine.shared_jobs import Ran, Share, SharedJob, are_over, deadline_after
from prejit.server.engine.sleeper import Sleeper

if TYPE_CHECKING:
    from prejit.runtime.text.bundle_text import BundleText


Pair = tuple[str | None, str]
"""A query and a document, for a model that scores; of all pairs of a call, or of none, the query is None."""
_TYPICAL_TOKENS = 32
"""A turn of a call has as many sentences of this length as fit the largest packed batch."""


class _Sentences(NamedTuple):
    """The sentences of a call.

    Attributes:
        ids: their token ids, the longest sentence first, so that a run pads little.
        places: the place of each in the call.
    """

    ids: list[list[int]]
    places: list[int]


@final
class Encoding:
    """The shared runs of a bundle's encoder. Safe to use from many threads.

    A sentence is tokenized and checked in its caller's thread, so a wrong one fails nobody else. A call of
    more sentences than the largest batch bucket takes turns with other calls.
    """

    def __init__(
        self,
        encoder: EncoderPrograms,
        text: BundleText,
        finish: Callable[[], object],
        *,
        queue: int,
        recorder: RequestRecorder,
        sleeper: Sleeper,
    ) -> None:
        """Make an empty queue.

        Args:
            encoder: the programs.
            text: the tokenizer of the bundle.
            finish: waits until all files of the target are verified, before a caller gets a result.
            queue: the most calls that may wait.
            recorder: counts the calls.
            sleeper: keeps programs while one runs.
        """
        self._encoder = encoder
        self._sleeper = sleeper
        self._text = text
        self._finish = finish
        self._most = max(
            max(1, b.length // _TYPICAL_TOKENS) if b.sentences else b.batch for b in encoder.buckets
        )
        self._lane: Lane[_Sentences] = Lane(
            "encode",
            self._run,
            queue=queue,
            recorder=recorder,
            compiled=lambda: encoder.programs.compiled,
            ended=_reason,
        )
        self.drain, self.undrain = self._lane.drain, self._lane.undrain
        self.close = self._lane.close

    def tokenized(
        self,
        sentences: Any,
        on_too_long: OnTooLong,
        prompt_name: str | None,
        instruction: str | None,
    ) -> Tokenized:
        """Return the token ids of sentences or pairs. Arguments as of `Engine.encode`.

        Raises:
            UsageError, ContextError: as `Bundle.encode`.
        """
        encoder, text = self._encoder, self._text
        if encoder.encoder.scores is None:
            return tokenize(encoder, text, sentences, on_too_long, prompt_name)
        listed = arguments.items("sentences", sentences, "a list of pairs")
        for place, each in enumerate(listed):
            if not isinstance(each, tuple | list) or len(each) != 2:
                expected = "a pair of a query and a document: this model scores"
                arguments.refuse(f"sentences[{place}]", expected, each)
        queries, documents = [each[0] for each in listed], [each[1] for each in listed]
        query = None if listed and all(each is None for each in queries) else queries
        return tokenize_pairs(encoder, text, query, documents, on_too_long, instruction)

    def submit(
        self,
        tokenized: Tokenized,
        *,
        timeout: float | None = None,
        client: str = "",
        limits: Limits = NO_LIMITS,
    ) -> Future[Encoded]:
        """Begin to encode sentences and return their future embeddings. Options as `Engine.submit_encode`.

        Raises:
            QueueFullError: too many calls wait.
            ClosedError: `close` or `drain` was called.
        """
        job = self._job(tokenized, timeout)
        job.client, job.limits = client, limits
        if job.rows:
            self._lane.submit(job)
        else:
            job.future.set_result(self._encoded(tokenized))
        return job.future

    def encode(self, tokenized: Tokenized, *, timeout: float | None = None) -> Encoded:
        """Return the embeddings of sentences. Arguments and errors as `submit`.

        If the encoder is idle it runs in the caller's thread, unless the call has a timeout.

        Raises:
            DeadlineError: the timeout has passed.
        """
        count = len(tokenized.ids)
        if timeout is None and count <= self._most:
            with self._lane.alone(count) as ran:
                if ran is not None:
                    encoded = self._encoded(tokenized)
                    ran.cost = self._cost(encoded.stats, tokenized.ids)
                    ran.reason = _reason(encoded)
                    return encoded
        result: Encoded = self._lane.result(self._job(tokenized, timeout))
        return result

    def _encoded(self, tokenized: Tokenized) -> Encoded:
        """Encode the sentences of one call now."""
        with self._sleeper:
            encoded = embed(self._encoder, tokenized)
        self._finish()
        return encoded

    def _job(self, tokenized: Tokenized, timeout: float | None) -> SharedJob[_Sentences]:
        ids = tokenized.ids
        places = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        payload = _Sentences([ids[place] for place in places], places)

        def finish(returned: Sequence[Encoded]) -> Encoded:
            stats = _summed([part.stats for part in returned], job.began - job.submitted)
            stats = replace(
                stats,
                sentences=len(ids),
                tokens=sum(map(len, ids)),
                truncated=tokenized.truncated,
                tokenize_seconds=tokenized.seconds,
            )
            found = in_order(returned, places, stats)
            return replace(found, embeddings=activated(self._encoder, found.embeddings))

        deadline = deadline_after(timeout)
        job: SharedJob[_Sentences] = SharedJob(
            payload, len(ids), self._most, None, finish, deadline
        )
        return job

    def _run(self, shares: Sequence[Share[_Sentences]]) -> Ran:
        """Encode the sentences of several calls together."""
        ids = [each for share in shares for each in share.job.payload.ids[share.start : share.end]]
        self._sleeper.begin(partial(are_over, shares))
        try:
            found = self._encoder.encode(ids)
        finally:
            self._sleeper.end()
        self._finish()
        returned, first = [], 0
        for share in shares:
            end = first + share.rows
            returned.append(found.part(first, end))  # copied by `finish` of the job
            first = end
        return Ran(returned, self._cost(found.stats, ids))

    def _cost(self, stats: EncodeStats, ids: Sequence[Sequence[int]]) -> Cost:
        """Return the cost of runs of the encoder for these sentences, as metrics have it."""
        ran = [(b, stats.buckets.get(str(b), 0)) for b in self._encoder.buckets]
        rows = sum(b.batch * runs for b, runs in ran if not b.sentences)
        positions = sum(b.batch * b.length * runs for b, runs in ran)
        runs, lengths = sum(stats.buckets.values()), tuple(map(len, ids))
        return Cost(max(0, rows - stats.sentences), runs, stats.tokens, positions, lengths)


def _reason(encoded: Encoded) -> str:
    """Return why an encoding ended, as metrics have it."""
    return "done" if np.isfinite(encoded.embeddings).all() else "nan"


def _summed(each: Sequence[EncodeStats], waited_seconds: float) -> EncodeStats:
    """Return the costs of the runs that a call took part in. Others may have shared them."""
    tokens = sum(stats.tokens for stats in each)
    computed = sum(stats.tokens / (1 - stats.padding) for stats in each)
    buckets: Counter[str] = Counter()
    for stats in each:
        buckets.update(stats.buckets)
    return EncodeStats(
        sentences=sum(stats.sentences for stats in each),
        tokens=tokens,
        truncated=0,
        padding=1 - tokens / computed,
        buckets=dict(buckets),
        tokenize_seconds=0.0,
        queue_seconds=math.fsum(stats.queue_seconds for stats in each) + waited_seconds,
        run_seconds=math.fsum(stats.run_seconds for stats in each),
        obtained=tuple(report for stats in each for report in stats.obtained),
    )
