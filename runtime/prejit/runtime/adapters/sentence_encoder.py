"""A bundle with an encoder by the interface of sentence-transformers' `SentenceTransformer`.

from prejit.runtime.adapters.sentence_encoder import SentenceEncoder

model = SentenceEncoder("artifacts/encoder")
vectors = model.encode(["a sentence", "another"], normalize_embeddings=True)
model.similarity(vectors, vectors)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, final

import numpy as np

from prejit.runtime.base.wording import did_you_mean
from prejit.runtime.bundle import Bundle
from prejit.runtime.errors import UsageError
from prejit.runtime.loader import load

if TYPE_CHECKING:
    Vectors = np.ndarray[Any, np.dtype[np.float32]]

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


@final
class SentenceEncoder:
    """Encodes sentences on the CPU or the accelerator of its bundle. Safe to use from many threads.

    Attributes:
        bundle: the bundle.
        prompts: texts that are put before sentences, by name.
        default_prompt_name: the prompt of calls that name none.
        similarity_fn_name: how `similarity` compares.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str] | Bundle,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        similarity_fn_name: Similarity = "cosine",
        **options: Any,
    ) -> None:
        """Take a bundle, or load one.

        Args:
            bundle: the bundle, its directory, or a reference to it.
            prompts: texts to put before sentences, by name, in place of the model's or beside them.
            default_prompt_name: the name of the prompt of calls that name none; None: the model's default.
            similarity_fn_name: as there; a bundle does not hold the setting of the model's directory.
            **options: of `load`.

        Raises:
            UsageError: the bundle has no encoder, or there is no prompt or similarity of that name.
            MismatchError, RejectError, StoreError, UntrustedError: as `load`.
        """
        self.bundle = bundle if isinstance(bundle, Bundle) else load(bundle, **options)
        self._encoder = self.bundle.encoder
        described = self._encoder.encoder
        # There these two names are always known. An empty prompt takes the place of the default, too.
        known = {"query": "", "document": ""}
        self.prompts = {**known, **(described.prompts or {}), **(prompts or {})}
        self.default_prompt_name = default_prompt_name or described.default_prompt
        self.similarity_fn_name = similarity_fn_name
        self._prompt(self.default_prompt_name)
        _one_of("similarity_fn_name", similarity_fn_name, _SIMILARITIES)

    def encode(
        self,
        sentences: str | Sequence[str],
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        output_value: Literal["sentence_embedding"] = "sentence_embedding",
        precision: Literal["float32"] = "float32",
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        device: Any = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
    ) -> Any:
        """Return embeddings, float32 [N, D] in the order of the sentences, or [D] for one text.

        Args:
            sentences: a text, or any number of them.
            prompt_name: name of the prompt to put before each; None: `default_prompt_name`.
            prompt: a text to put before each, instead.
            batch_size: how many sentences go together between two lines of progress. The bundle chooses its
                buckets itself, for all sentences at once if no progress is shown.
            show_progress_bar: whether to write progress to stderr.
            output_value: only this value is possible.
            precision: only this value is possible.
            convert_to_tensor: only this value is possible.
            convert_to_numpy: whether the result is one array; if not, it is a list of arrays [D].
            device: ignored; the bundle has its device.
            normalize_embeddings: whether vectors get length 1.
            truncate_dim: the number of components to keep; None: all.

        Raises:
            UsageError: a value is not possible, or there is no prompt of that name.
            RejectError: a program is damaged.
        """
        _one_of("output_value", output_value, ("sentence_embedding",))
        _one_of("precision", precision, ("float32",))
        if convert_to_tensor:
            raise UsageError(
                "convert_to_tensor: expected False, found True",
                hint="torch.from_numpy(model.encode(...)) makes a tensor of the array without a copy",
            )
        before = self._prompt(prompt_name) if prompt is None else prompt
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        texts = [before + text for text in texts] if before else texts
        size = batch_size if show_progress_bar else max(1, len(texts))
        parts = [np.empty((0, self._encoder.encoder.width), np.float32)]
        for start in range(0, len(texts), size):
            parts.append(self.bundle.encode(texts[start : start + size], prompt_name=""))
            if show_progress_bar:
                print(f"\r{min(start + size, len(texts))}/{len(texts)}", end="", file=sys.stderr)
        if show_progress_bar:
            print(file=sys.stderr)
        found = np.concatenate(parts)[:, :truncate_dim]
        if normalize_embeddings:
            found = _unit(found)
        if isinstance(sentences, str):
            return found[0]
        return found if convert_to_numpy else list(found)

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Encode as `encode` does, by default with the prompt `query`, which is empty if none is given."""
        return self.encode(sentences, **_for_task(options, "query"))

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Any:
        """Encode as `encode` does, by default with the prompt `document`, which is empty if none is given.

        A prompt `passage` or `corpus` takes no part, because sentence-transformers finds `document` first.
        """
        return self.encode(sentences, **_for_task(options, "document"))

    def similarity(self, one: Vectors, other: Vectors) -> Vectors:
        """Return the similarities float32 [N, M] of embeddings [N, D] and [M, D]; more is more alike."""
        one, other = (np.atleast_2d(np.asarray(each, np.float32)) for each in (one, other))
        return _SIMILARITIES[self.similarity_fn_name](one, other)

    def similarity_pairwise(self, one: Vectors, other: Vectors) -> Vectors:
        """Return the similarity float32 [N] of each pair of embeddings [N, D] and [N, D]."""
        pairs = zip(np.atleast_2d(one), np.atleast_2d(other), strict=True)
        return np.array([self.similarity(a, b)[0, 0] for a, b in pairs], np.float32)

    def get_sentence_embedding_dimension(self) -> int:
        """Return the number of components of an embedding."""
        return self._encoder.encoder.width

    @property
    def max_seq_length(self) -> int:
        """The longest sentence in tokens; longer ones are cut, with a TruncationWarning."""
        return self._encoder.max_tokens

    def _prompt(self, name: str | None) -> str:
        name = self.default_prompt_name if name is None else name
        if name is None:
            return ""
        _one_of("prompt_name", name, self.prompts)
        return self.prompts[name]


def _for_task(options: dict[str, Any], name: str) -> dict[str, Any]:
    if options.get("prompt_name") is not None or options.get("prompt") is not None:
        return options
    return {**options, "prompt_name": name}


def _one_of(what: str, found: str, known: Sequence[str] | Mapping[str, Any]) -> None:
    if found not in known:
        raise UsageError(
            f"{what}: expected {' or '.join(map(repr, known)) or 'none'}, found {found!r:.80}"
            + did_you_mean(found, known)
        )


def _unit(vectors: Vectors) -> Vectors:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.maximum(lengths, 1e-12)  # as torch.nn.functional.normalize


def _euclidean(one: Vectors, other: Vectors) -> Vectors:
    return -np.stack([np.linalg.norm(each - other, axis=1) for each in one])


def _manhattan(one: Vectors, other: Vectors) -> Vectors:
    return -np.stack([np.abs(each - other).sum(axis=1) for each in one])


_SIMILARITIES: dict[str, Callable[[Vectors, Vectors], Vectors]] = {
    "cosine": lambda one, other: _unit(one) @ _unit(other).T,
    "dot": lambda one, other: one @ other.T,
    "euclidean": _euclidean,
    "manhattan": _manhattan,
}
"""As of sentence_transformers.util.SimilarityFunction."""
