"""Methods of a bundle with an encoder: embeddings and scores of sentences and of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prejit.runtime.base.process_facts import importing
from prejit.runtime.base.threads_and_forks import once
from prejit.runtime.errors import UsageError
from prejit.runtime.loaded_bundle import LoadedBundle

if TYPE_CHECKING:
    import numpy as np

    from prejit.runtime.encoding.encoder import Encoded, EncoderPrograms
    from prejit.runtime.encoding.images import ImagePrograms, Picture
    from prejit.runtime.encoding.sentences import OnTooLong
    from prejit.runtime.generation.options import Prompt


class BundleEncodes(LoadedBundle):
    """The methods of `Bundle` that encode."""

    def encode(
        self,
        sentences: str | Sequence[Prompt],
        *,
        on_too_long: OnTooLong = "truncate",
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return embeddings of sentences, float32 [N, D] in their order.

        Args:
            sentences: texts or lists of token ids; any number, of any lengths. One text is as good as a list
                of one.
            on_too_long: what to do with a sentence that has more tokens than the model or the longest shape
                of the manifest takes. `truncate`: cut it before its last special tokens, with one
                TruncationWarning per call. `error`: raise.
            prompt_name: the prompt of the model to put before texts; None: its default, if it has one. An
                empty name: no prompt.
            dimensions: how many components to keep; vectors of length 1 get that length again. None: all.

        Raises:
            UsageError: the bundle holds no encoder, or no tokenizer for a text, or it scores texts; a token
                or a prompt does not exist.
            ContextError: a sentence is too long, and on_too_long is `error`.
            RejectError: a program is damaged.
        """
        return self.encode_batch(
            sentences, on_too_long=on_too_long, prompt_name=prompt_name, dimensions=dimensions
        ).embeddings

    def encode_batch(
        self,
        sentences: str | Sequence[Prompt],
        *,
        on_too_long: OnTooLong = "truncate",
        prompt_name: str | None = None,
        dimensions: int | None = None,
    ) -> Encoded:
        """Return embeddings as `encode` does, with statistics: tokens, padding, buckets, times, programs."""
        self._programs.ask()
        from prejit.runtime.encoding.sentences import embed, shortened, tokenize

        tokenized = tokenize(self.encoder, self.text, sentences, on_too_long, prompt_name)
        encoded = shortened(self.encoder, embed(self.encoder, tokenized), dimensions)
        self.finish()
        return encoded

    def score(
        self,
        query: str | Sequence[str] | None,
        documents: str | Sequence[str],
        *,
        on_too_long: OnTooLong = "truncate",
        instruction: str | None = None,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return how relevant documents are to a query, float32 [N], as a cross-encoder finds.

        Args:
            query: a text, or as many as there are documents. None: each document is scored alone, as a
                classifier reads it.
            documents: a text, or any number of them.
            on_too_long: what to do with a pair that is too long. `truncate`: its longer text loses tokens
                until it fits, with one TruncationWarning per call. `error`: raise.
            instruction: what makes a document relevant, for a model that takes one; None: its own.

        Returns:
            A score for each document: of the model's sigmoid, 0 to 1, or as the model gives it. A model with
            several labels gives [N, labels].

        Raises:
            UsageError: the bundle holds no model that scores texts, or no tokenizer, or it takes no
                instruction.
            ContextError: a pair is too long, and on_too_long is `error`.
            RejectError: a program is damaged.
        """
        self._programs.ask()
        from prejit.runtime.encoding.sentences import embed, tokenize_pairs

        tokenized = tokenize_pairs(
            self.encoder, self.text, query, documents, on_too_long, instruction
        )
        found = embed(self.encoder, tokenized).embeddings
        self.finish()
        return found[:, 0] if found.shape[1] == 1 else found

    def embed_images(
        self, images: Picture | Sequence[Picture]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return embeddings of images, float32 [N, D] in their order.

        Those of a model of images and texts have length 1, as `encode` returns those of texts in the same
        space. Of other models it is the class token behind the last norm.

        Args:
            images: paths or bytes of files, images of Pillow, or arrays uint8 [H, W, 3], of any sizes. One is
                as good as a list of one. A file has one frame; it is turned as its EXIF orientation says,
                and its alpha is left out. An image of Pillow is not turned, and its alpha lies on white.

        Raises:
            UsageError: the bundle reads no images, or names what they show; one is no image; or Pillow is
                not installed.
            RejectError: a program is damaged.
        """
        if self.images.images.tokens is not None:
            raise UsageError(
                f"{self.name}: expected a model that embeds images, found one that writes about them",
                hint="bundle.generate(prompt, images=[...])",
            )
        if self.images.images.labels is not None:
            raise UsageError(
                "expected a model that embeds images, found one that names what they show",
                hint="bundle.score_images(images), bundle.image_labels",
            )
        self._programs.ask()
        found = self.images.encode(images)
        self.finish()
        return found

    def score_images(
        self,
        images: Picture | Sequence[Picture],
        texts: str | Sequence[str] | None = None,
        *,
        logits: bool = False,
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return probabilities that images show a label, or match a text: float32 [N, M].

        Args:
            images: as of `embed_images`.
            texts: M texts, for a model of images and texts; they are embedded as `encode` does it. None: the
                columns are `image_labels`.
            logits: return what the activation is given: a sigmoid, or a softmax over each row.

        Raises:
            UsageError, RejectError: as `embed_images`, or as `encode`.
        """
        read = self.images
        if read.images.scores is None:
            wanted = "a model with labels, or of images and texts"
            raise UsageError(f"{self.name}: expected {wanted}, found one that scores no images")
        if (texts is None) == (read.images.labels is None):
            wanted = (
                "texts to compare images with" if texts is None else "none, of a model with labels"
            )
            raise UsageError(f"texts: expected {wanted}, found {texts!r:.80}")
        self._programs.ask()
        if texts is None:
            found = read.encode(images)
        else:
            others = self.encode(texts)
            found = read.matches(read.encode(images), others)
        self.finish()
        return found if logits else read.activated(found)

    @property
    def image_labels(self) -> tuple[str, ...]:
        """The names of what images show, in the order of `score_images`; a model that embeds has none."""
        return self.images.images.labels or ()

    @once
    def images(self) -> ImagePrograms:
        """The programs that read images.

        Raises:
            UsageError: the bundle has none.
        """
        if self.config.images is None:
            raise UsageError(f"{self.name}: this bundle reads no images", hint=self._programs.usage)
        with importing():
            from prejit.runtime.encoding.images import ImagePrograms  # others do not need it

        return ImagePrograms(self.config.images, self._programs)

    @once
    def encoder(self) -> EncoderPrograms:
        """The programs of an encoder.

        Raises:
            UsageError: the bundle holds no encoder.
        """
        if self.config.encoder is None:
            raise UsageError(
                f"{self.name}: this bundle holds no encoder", hint=self._programs.usage
            )
        with importing():
            from prejit.runtime.encoding.encoder import EncoderPrograms  # decoders do not need it

        return EncoderPrograms(self.config.encoder, self._programs)
