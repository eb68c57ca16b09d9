"""BGE-M3's heads of tokens: files beside its modules (Chen et al. 2024, arXiv 2402.03216, section 3).

    sparse_linear.pt     hidden state to a number; its positive part weighs the token
    colbert_linear.pt    hidden state to a vector, of length 1 then

They are computed as FlagEmbedding does it (inference/embedder/encoder_only/m3.py).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from prejit.compiler.models.chat_files import special_tokens
from prejit.compiler.models.torch_tensors import torch_tensors
from prejit.runtime.errors import CheckpointError

_FILES = {"multi_vector": "colbert_linear", "sparse": "sparse_linear"}
"""The name of each head's file, and of its layer, in the order in which a program returns them."""
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")


@dataclass(frozen=True)
class TokenHead:
    """A linear layer on the hidden state of each token."""

    kind: str
    outputs: int
    file: Path

    @property
    def name(self) -> str:
        """The name of the layer."""
        return _FILES[self.kind]


def token_heads(
    directory: Path, tokenizer: Path, asked: Collection[str]
) -> tuple[tuple[TokenHead, ...], tuple[int, ...] | None]:
    """Return the heads of a directory that are asked for, and the tokens that get no weight.

    `tokenizer` is the directory of its tokenizer. None in place of tokens: no head weighs any.

    Raises:
        CheckpointError: a file is missing or has other tensors.
    """
    heads = []
    for kind, name in _FILES.items():
        if kind not in asked:
            continue
        file = directory / f"{name}.pt"
        tensors = torch_tensors(file)
        matrix = tensors.get("weight")
        if tensors.keys() != {"weight", "bias"} or matrix is None or len(matrix.shape) != 2:
            raise CheckpointError(
                f"{file}: expected the tensors weight [outputs, inputs] and bias [outputs], found "
                f"{', '.join(f'{at} {list(each.shape)}' for at, each in tensors.items()) or 'none'}"
            )
        if kind == "sparse" and matrix.shape[0] != 1:
            raise CheckpointError(f"{file}: weight: expected one output, found {matrix.shape[0]}")
        heads.append(TokenHead(kind, matrix.shape[0], file))
    return tuple(heads), _unweighted(tokenizer) if "sparse" in asked else None


def _unweighted(directory: Path) -> tuple[int, ...]:
    from tokenizers import Tokenizer

    named = special_tokens(directory)
    if "cls_token" not in named:  # transformers would take that of the tokenizer's class
        raise CheckpointError(
            f"{directory / 'tokenizer_config.json'}: expected cls_token and the other special tokens, which "
            "get no weight; found none",
            hint="save the tokenizer again with a newer transformers: tokenizer.save_pretrained(DIRECTORY)",
        )
    file = directory / "tokenizer.json"
    try:
        ids = Tokenizer.from_file(str(file)).token_to_id
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: expected a tokenizer: {error}") from error
    found = {ids(named[name]) for name in _UNWEIGHTED if name in named}
    return tuple(sorted(each for each in found if each is not None))
