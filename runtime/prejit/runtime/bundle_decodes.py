"""Methods of a bundle with a decoder: stream text. `bundle_batches` has those that wait for the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Unpack

from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import UsageError
from prejit.runtime.format.names import GENERATION_MEDIA_TYPE
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.generate import Generator, Piece, run
from prejit.runtime.generation.options import Options, Prompt
from prejit.runtime.loaded_bundle import LoadedBundle

if TYPE_CHECKING:
    from prejit.runtime.generation.options import Defaults


class BundleDecodes(LoadedBundle):
    """The methods of `Bundle` that a stream needs."""

    def stream(self, prompt: Prompt | None = None, **options: Unpack[Options]) -> Iterator[Piece]:
        """Generate from one prompt and yield each token as it comes.

        Closing the iterator, or ctrl-C, frees its memory. Arguments as `generate`.

        Raises:
            UsageError, ContextError, RejectError: as `generate`; those about the prompt at the first piece.
        """
        generator = self.generator
        resolved = generator.resolve(options)

        def pieces() -> Iterator[Piece]:
            for _, piece in run(generator.decoder, [generator.begin(prompt, resolved)]):
                yield piece

        return pieces()

    @once
    def defaults(self) -> Defaults:
        """The options that the model's publisher recommends, for calls that do not give their own.

        All are unset if the bundle was loaded with `generation_config=False`.

        Raises:
            RejectError: the model's generation config is damaged.
        """
        from prejit.runtime.generation.options import Defaults, check_generation

        layer = self._open.layers.get(GENERATION_MEDIA_TYPE)
        if layer is None or self.config.decoder is None or not self._generation_config:
            return Defaults()
        return check_generation(bytes(layer.wait()), layer.path)

    @once
    def generator(self) -> Generator:
        """The decoder with its tokenizer and defaults, for callers that schedule generations themselves.

        Raises:
            UsageError: the bundle holds no decoder.
            RejectError: the model's generation config is damaged.
        """
        return Generator(self.name, self.decoder, self.text, self.defaults)

    @once
    def decoder(self) -> DecoderPrograms:
        """The prefill and decode programs, for callers that run their own loop.

        Raises:
            UsageError: the bundle holds no decoder.
        """
        if self.config.decoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no decoder", hint=self._programs.usage
            )
        parts = self.config.decoder, self._programs
        if self.config.decoder.adapters is not None:
            from prejit.runtime.lora.adapter_slots import AdaptedPrograms  # few take adapters

            return AdaptedPrograms(*parts, self._policies)
        if self.config.images is not None:
            from prejit.runtime.encoding.seeing_programs import SeeingPrograms  # few read images

            return SeeingPrograms(*parts)
        return DecoderPrograms(*parts)
