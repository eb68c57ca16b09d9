"""Which programs of a decoder a bundle has, which of them serves a request, and how they are called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np

from prejit.runtime.device.executable import Device, DeviceArray, aligned_zeros
from prejit.runtime.errors import UsageError
from prejit.runtime.format.schema import Decoder, Program
from prejit.runtime.generation.sampling import Sampling, arrays
from prejit.runtime.programs.programs import Programs

if TYPE_CHECKING:
    from prejit.runtime.generation.kv_cache import KVCache

_NEUTRAL = {"min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}


@final
class DecoderPrograms:
    """The programs of a decoder by their buckets. Safe for many threads.

    Attributes:
        decoder: what the bundle says of the model.
        programs: all programs of the bundle.
        device: where they run.
        batches, contexts: the buckets, ascending.
        draft_tokens: the most tokens of a draft that the bundle can verify; 0: it has no programs for it.
        copies: whether it can copy rows from cache to cache; bundles of formats 1 and 2 cannot.
    """

    def __init__(self, decoder: Decoder, programs: Programs, device: Device) -> None:
        """Sorts the programs of a bundle."""
        self.decoder = decoder
        self.programs = programs
        self.device = device
        self._prefill: dict[tuple[int, int], list[Program]] = {}
        self._decode: dict[tuple[int, int], Program] = {}
        self._verify: dict[tuple[int, int], Program] = {}
        self._copy: dict[tuple[int, ...], Program] = {}
        for program in programs.table.values():
            bucket = program.bucket
            if program.kind == "copy":
                names = ("source_batch", "source_context", "batch", "context")
                self._copy[tuple(bucket[name] for name in names)] = program
            elif program.kind == "prefill":
                self._prefill.setdefault((bucket["batch"], bucket["context"]), []).append(program)
            elif program.kind in ("decode", "verify"):
                found = self._decode if program.kind == "decode" else self._verify
                found[bucket["batch"], bucket["context"]] = program
        for rows in self._prefill.values():
            rows.sort(key=lambda program: program.bucket["prompt"])
        self.batches = sorted({batch for batch, _ in self._decode})
        self.contexts = sorted({context for _, context in self._decode})
        self.draft_tokens = max((p.bucket["draft"] for p in self._verify.values()), default=0)
        self.copies = bool(self._copy)
        self._calls: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._zeros: dict[tuple[int, Any], DeviceArray] = {}

    def batch_for(self, rows: int) -> int:
        """The smallest batch bucket for so many rows.

        Raises:
            UsageError: no bucket is large enough.
        """
        for batch in self.batches:
            if batch >= rows:
                return batch
        raise UsageError(
            f"expected at most {self.batches[-1]} rows at once, found {rows}",
            hint=f"add a batch of {rows} to [generate] of the manifest",
        )

    def context_for(self, tokens: int) -> int:
        """The smallest context bucket for so many tokens, or the largest there is."""
        return next((c for c in self.contexts if c >= tokens), self.contexts[-1])

    def bucket_for(self, rows: int, tokens: int) -> tuple[int, int]:
        """The batch and context bucket of rows: the smallest, or one in whose stead others are ready.

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

    def prefills(self, batch: int, context: int) -> tuple[Program, ...]:
        """The prefill programs of a bucket, the shortest first."""
        return tuple(self._prefill[batch, context])

    def decode_for(self, batch: int, context: int) -> Program:
        """The decode program of a bucket."""
        return self._decode[batch, context]

    def verify_for(self, batch: int, context: int) -> Program | None:
        """The verify program of a bucket, where the bundle has them."""
        return self._verify.get((batch, context))

    def copy_for(self, source_batch: int, source_context: int, batch: int, context: int) -> Program:
        """The program that copies rows of one cache array into another.

        Raises:
            UsageError: the bundle has none.
        """
        if found := self._copy.get((source_batch, source_context, batch, context)):
            return found
        raise UsageError(
            f"expected a program that copies caches of {source_batch} x {source_context} to "
            f"{batch} x {context}, found none",
            hint="build the bundle again: older ones have no such programs",
        )

    def can_fill_aside(self, batch: int, context: int, tokens: int) -> bool:
        """Whether prompts of so many tokens can be computed in the smallest batch and copied into this one.

        Not while that would wait for other programs than those of the bucket that was chosen.
        """
        if not self.copies:
            return False
        smallest = self.batches[0]
        programs = (
            self.prefill_for(smallest, context, tokens),
            self.copy_for(smallest, context, batch, context),
        )
        return all(self.programs.ready(program.name) for program in programs)

    def prepare(self, rows: int, tokens: int, prompt: int, bucket: tuple[int, int]) -> None:
        """Begins to make the programs of a request ready, then those that would have served it better.

        Decode, where it need not be compiled, comes after the prompt (`prepare_decode`): loading it meanwhile
        takes a core from the first token.

        Args:
            rows: of the request.
            tokens: of the request, as for `bucket_for`.
            prompt: the longest of its prompts, in tokens.
            bucket: the batch and context that were chosen.

        Raises:
            BuildError, RejectError: one of the latter failed in the background, and fails again.
        """
        first = [self.prefill_for(*bucket, prompt).name] if prompt > 1 else []
        later = first and self.programs.are_loaded
        self.programs.prepare(*first, *(() if later else (self._decode[bucket].name,)))
        best = self.batch_for(rows), self.context_for(tokens)
        wanted = _fitting(self._prefill[best], prompt), self._decode[best]
        self.programs.wish(*(p.name for p in wanted if not self.programs.ready(p.name)))

    def prepare_decode(self, bucket: tuple[int, int]) -> None:
        """Begins to make the decode program of a batch and context ready, once the first token is in hand."""
        self.programs.prepare(self._decode[bucket].name)

    def prepare_growth(self, batch: int, context: int) -> None:
        """Begins to make ready what a cache of this bucket needs to grow and go on."""
        longer = next((c for c in self.contexts if c > context), None)
        if longer is not None and self.copies:
            copy = self._copy[batch, context, batch, longer]
            self.programs.prepare(copy.name, self._decode[batch, longer].name)

    def cache_sharding(self, batch: int, context: int) -> tuple[str, ...]:
        """How a mesh splits the arrays of a cache; empty where there is none."""
        if self.device.mesh is None:
            return ()
        return self.programs.arguments(self._decode[batch, context].name)[-1].sharding

    def run(
        self, program: Program, inputs: Mapping[str, DeviceArray], cache: KVCache
    ) -> dict[str, DeviceArray]:
        """Runs prefill, decode or verify.

        Args:
            program: which.
            inputs: its arguments by name, but for weights and cache. It may take fewer: older bundles do.
            cache: is donated, and holds the new arrays then.

        Returns:
            Its results by name, but for the cache.
        """
        names, results = self._call(program.name)
        given = self.programs[program.name].run(
            [
                *self.programs.weights(program.weights),
                *(inputs[name] for name in names),
                *cache.arrays,
            ]
        )
        cache.arrays = given[len(results) :]
        return dict(zip(results, given, strict=False))

    def _call(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the arguments and results of a program, but for weights and cache."""
        if (found := self._calls.get(name)) is None:
            arguments, results = (
                tuple(str(array.path[0]) for array in arrays if array.path[0] != "cache")
                for arrays in (self.programs.arguments(name), self.programs.results(name))
            )
            found = self._calls[name] = arguments, results
        return found

    def takes(self, program: Program, argument: str) -> bool:
        """Whether a program has such an argument."""
        return argument in self._call(program.name)[0]

    def place_sampling(
        self, sampling: Sequence[Sampling], logprobs: Sequence[int], bias: Any = None
    ) -> dict[str, DeviceArray]:
        """The sampling arguments of a batch, on the device.

        Args:
            sampling: of each row.
            logprobs: of each row: 1 where log-probabilities are wanted.
            bias: float32 [B, V] instead of what the rows' own logit_bias gives.
        """
        values = arrays(sampling, self.decoder.vocab_size, logprobs)
        if bias is not None:
            values["bias"] = bias
        return {
            name: self.zeros(len(sampling), np.float32) if value is None else self.device.put(value)
            for name, value in values.items()
        }

    def zeros(self, batch: int, dtype: Any) -> DeviceArray:
        """Zeros [B, V] that everybody reads and nobody writes."""
        if (found := self._zeros.get((batch, dtype))) is None:
            size = (batch, self.decoder.vocab_size)
            found = self._zeros[batch, dtype] = self.device.put(
                aligned_zeros(size, np.dtype(dtype))
            )
        return found

    def check_sampling(self, sampling: Sampling, *, logprobs: bool, masked: bool) -> None:
        """Checks that the programs can do what a request asks for.

        Args:
            sampling: of the request.
            logprobs: whether it wants log-probabilities.
            masked: whether it has a token mask.

        Raises:
            UsageError: the bundle is of a format that had no such sampling, or a value is of no token.
        """
        decode = next(iter(self._decode.values()))
        asked = [name for name, value in _NEUTRAL.items() if getattr(sampling, name) != value]
        asked += ["bias"] if sampling.logit_bias or masked else []
        asked += ["logprobs"] if logprobs else []
        if missing := [name for name in asked if not self.takes(decode, name)]:
            raise UsageError(
                f"expected a bundle whose programs take {', '.join(missing)}, found an older one",
                hint="build the bundle again with this version of prejit",
            )


def _fitting(prefills: Sequence[Program], tokens: int) -> Program:
    return next((p for p in prefills if p.bucket["prompt"] >= tokens), prefills[-1])
