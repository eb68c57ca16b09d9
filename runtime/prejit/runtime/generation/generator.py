"""From the prompt and the options of a caller to a generation: tokens, defaults, sources."""

from __future__ import annotations

from typing import Any, final

from prejit.runtime.base import arguments
from prejit.runtime.errors import UsageError
from prejit.runtime.generation.decoder_programs import DecoderPrograms
from prejit.runtime.generation.defaults import Defaults
from prejit.runtime.generation.generate import Generation
from prejit.runtime.generation.options import (
    Options,
    Prompt,
    Resolved,
    resolve,
)
from prejit.runtime.text.bundle_text import BundleText


@final
class Generator:
    """The decoder of a bundle with its tokenizer and its defaults. Safe to use from many threads.

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

    def resolve(self, options: Options) -> Resolved:
        """Return the options of a call, filled in with the defaults of the bundle.

        Raises:
            UsageError: one is out of range.
        """
        self.decoder.programs.ask()
        resolved = resolve({**options}, self._defaults)
        return self.reading(resolved, resolved.common.get("source"))

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
        request = resolved.request(self.token_ids(prompt))
        return Generation(self.decoder, request, tokenizer, resolved.stop)

    def reading(self, resolved: Resolved, source: Any) -> Resolved:
        """Return the options of a call with this source; text becomes token ids."""
        if isinstance(source, str):
            if self.decoder.source is not None and self.decoder.source.dtype != "int32":
                raise UsageError(f"source: expected {self.decoder.source}, found a text")
            source = self._text.need_tokenizer().encode(source)
        return resolved._replace(common={**resolved.common, "source": source})

    def token_ids(self, prompt: Prompt | None) -> list[int]:
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
