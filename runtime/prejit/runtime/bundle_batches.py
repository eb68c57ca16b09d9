"""Whole texts of a decoder, from one prompt or many; sessions, shared prefixes and slots for other loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from prejit.runtime.base import arguments
from prejit.runtime.bundle_decodes import BundleDecodes
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.finished_text import Result
from prejit.runtime.generation.generate import run
from prejit.runtime.generation.options import (
    SAMPLING_OPTIONS,
    Options,
    Prompt,
    Request,
    Resolved,
    Sampling,
)

if TYPE_CHECKING:
    from prejit.runtime.generation.continuous_batch import Batch
    from prejit.runtime.generation.session import Session
    from prejit.runtime.generation.shared_prefix import Prefix
    from prejit.runtime.lora.adapter_slots import Adapters
_MAX_SEQUENCES = 16_384
"""Maximum number of continuations of one prompt in one call."""


class BundleBatches(BundleDecodes):
    """The methods of `Bundle` that generate and are no stream."""

    @property
    def adapters(self) -> Adapters:
        """The adapters that requests may choose, of a bundle whose manifest has `[adapters]`.

        Raises:
            UsageError: the bundle takes none.
        """
        found: Adapters = self.decoder.adapters
        return found

    def generate(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Result:
        """Generate text from one prompt.

        Args:
            prompt: text, or token ids (`apply_chat_template` returns those of a conversation). An
                encoder-decoder reads `source`, and needs a prompt only for a text that has begun already.
            **options: see `Options`.

        Raises:
            UsageError: an option is out of range, or the bundle holds no decoder.
            ContextError: the prompt is longer than the longest context.
            RejectError: a program is damaged.
        """
        return self.generate_batch([prompt], **options)[0]

    def generate_n(self, prompt: Prompt | None, n: int, **options: Unpack[Options]) -> list[Result]:
        """Generate n continuations of one prompt. The prompt is computed once.

        The first result is the same as from `generate`; each further one uses the next seed. Arguments and
        errors as `generate`; n is 1 to 16,384.
        """
        n = arguments.integer("n", n, 1, _MAX_SEQUENCES)
        first = self.generator.resolve(options)
        seeds = [(first.sampling.seed + index) % 2**64 for index in range(n)]
        each = [first._replace(sampling=replace(first.sampling, seed=seed)) for seed in seeds]
        ids = self.generator.token_ids(prompt, first.common.get("images"))
        return self._run([ids] * n, each)

    def generate_batch(
        self,
        prompts: str | Sequence[Prompt | None] | None = None,
        *,
        sources: str | Sequence[Any] | None = None,
        sampling: Sequence[Sampling] | None = None,
        **options: Unpack[Options],
    ) -> list[Result]:
        """Generate from several prompts at the same time. Prompts without a free slot wait for one.

        Args:
            prompts: any number; a beginning that all of them share is computed once. One text is as good as a
                list of one. None: one for each source, which begins a text.
            sources: what an encoder-decoder reads, one for each prompt; each as the option `source`. One text
                is as good as a list of one.
            sampling: one for each prompt if they differ; they replace the bundle's defaults. None: the
                options decide.
            **options: for all prompts, as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        listed, each = self._each(prompts, sources, self.generator.resolve(options))
        if sampling is None:
            return self._run(listed, each)
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
        return self._run(listed, [one._replace(sampling=way) for one, way in ones])

    def _each(
        self,
        prompts: str | Sequence[Prompt | None] | None,
        sources: str | Sequence[Any] | None,
        resolved: Resolved,
    ) -> tuple[list[Prompt | None], list[Resolved]]:
        """Return the prompts of a batch, and the options of each."""
        read: list[Any] | None = None
        if sources is not None:
            one = [sources] if isinstance(sources, str) else sources
            read = arguments.items("sources", one, "a source or a list of sources")
        if prompts is None and read is not None:
            prompts = [None] * len(read)
        given = [prompts] if isinstance(prompts, str) else prompts
        listed = arguments.items("prompts", given, "a prompt or a list of prompts")
        if read is None:
            return listed, [resolved] * len(listed)
        if len(listed) != len(read):
            raise UsageError(
                f"sources: expected {len(listed)}, one for each prompt; found {len(read)}"
            )
        return listed, [self.generator.with_source(resolved, source) for source in read]

    def _run(self, prompts: Sequence[Prompt | None], each: Sequence[Resolved]) -> list[Result]:
        generator = self.generator
        generations = [generator.begin(*pair) for pair in zip(prompts, each, strict=True)]
        for _ in run(generator.decoder, generations):
            pass
        return [generation.result() for generation in generations]

    def session(self) -> Session:
        """Return a session, whose generations share a KV cache: a conversation computes only what is new.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        from prejit.runtime.generation.session import Session  # only conversations need it

        return Session(self.generator)

    def prefix(self, prompt: Prompt) -> Prefix:
        """Compute the common beginning of many prompts once, such as a system prompt.

        Pass the result to other calls: `generate(..., prefix=...)`.

        Args:
            prompt: as of `generate`. Only whole tokens can be shared: a text should end at the end of one.

        Raises:
            UsageError, ContextError, RejectError: as `generate`.
        """
        from prejit.runtime.generation.filling_aside import computing_prefix
        from prejit.runtime.generation.prefill import whole
        from prejit.runtime.generation.rows import admit

        generator = self.generator
        if generator.decoder.source is not None:
            raise UsageError(f"{self.name}: texts about different sources have no common prefix")
        row = admit(Request(generator.token_ids(prompt)), generator.decoder)
        context = generator.decoder.context_for(len(row.token_ids))
        return whole(computing_prefix(generator.decoder, row.token_ids, context, row.usage))

    def batch(self, slots: int) -> Batch:
        """Return slots for continuous batching: `insert` requests of `request`, `step`, `evict`.

        Args:
            slots: how many requests may run at a time; rounded up to one of the bundle's batch buckets.

        Raises:
            UsageError: the bundle holds no decoder, or no batch bucket is large enough.
        """
        from prejit.runtime.generation.continuous_batch import Batch

        return Batch(self.decoder, slots)

    def request(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Request:
        """Return a request for `Batch.insert`. Arguments as `generate`, without `stop`.

        Raises:
            UsageError: as `generate`; or `stop` is given, which a batch cannot do, because it has no text.
        """
        resolved = self.generator.resolve(options)
        if resolved.stop:
            raise UsageError(
                "stop: expected none, since a batch knows tokens and no text",
                hint="push text through prejit.runtime.text.stop_strings.StopStrings and evict the slot",
            )
        ids = self.generator.token_ids(prompt, resolved.common.get("images"))
        return resolved.request(ids)
