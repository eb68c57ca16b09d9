"""Find the parameters of the modules that follow an encoder's transformer.

Dense layers have files of their own. A causal language model that scores has a row of its head: that of one
answer, less that of another. A T5 may lack a head, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint.parameter_sources import ParameterSource, TensorSource, not_float
from prejit.compiler.checkpoint.tensor_files import Tensor, tensors
from prejit.compiler.models.families.encoder_table import HEADS
from prejit.compiler.models.families.family_table import DECODERS
from prejit.compiler.models.families.sentence_layout import SentenceLayout
from prejit.compiler.models.parameters import Parameter
from prejit.compiler.models.torch_tensors import torch_tensors
from prejit.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from prejit.compiler.models.layers.layer_config import Naming

_FILE = "model.safetensors"
Values = np.ndarray[Any, Any]


def dense_sources(
    layout: SentenceLayout, files: Sequence[Path], parameters: Mapping[str, Parameter]
) -> tuple[dict[str, ParameterSource], list[str]]:
    """Return the tensors of dense layers and heads of tokens by the names of parameters, and problems."""
    found: dict[str, ParameterSource] = {}
    problems: list[str] = []
    for part, file in zip(layout.dense, files, strict=True):
        for name, tensor in tensors(file).items():
            # torch stores (out, in)
            ours = f"sentence.{part.name}.{name}"
            transposed = ours in parameters and parameters[ours].in_out
            problems += not_float(f"{part.name}/{name}", tensor)
            found[ours] = TensorSource(f"{part.name}/{name}", tensor, transposed)
    for head in layout.heads:
        for name, each in torch_tensors(head.file).items():
            ours = f"{head.name}.{name}"
            transposed = ours in parameters and parameters[ours].in_out
            tensor = Tensor(each.path, each.shape, each.dtype, each.read)
            found[ours] = TensorSource(f"{head.file.name}/{name}", tensor, transposed)
    return found, problems


def dense_weights(directory: Path) -> Path:
    """Return the file with the weights of a dense layer.

    Raises:
        CheckpointError: there is none.
    """
    file = directory / _FILE
    if not file.is_file():
        others = sorted(path.name for path in directory.glob("*.bin"))
        raise CheckpointError(
            f"{directory}: expected {_FILE}, found {', '.join(others) or 'none'}",
            hint="save the model again with a newer sentence-transformers",
        )
    return file


@dataclass(frozen=True)
class AnswerRow(ParameterSource):
    """The difference of rows of a head, or one row: the score is its product with a hidden state.

    Attributes:
        head: the head, or the embedding that is also the head.
        tokens: the row of the answer, and that which is subtracted from it, if any.
        in_out: whether the parameter is stored (in, out).
    """

    head: TensorSource
    tokens: tuple[int, ...]
    in_out: bool

    @property
    def first(self) -> TensorSource:
        """See ParameterSource."""
        return self.head

    @property
    def shape(self) -> tuple[int, ...]:
        """See ParameterSource."""
        width = self.head.shape[1]
        return (width, 1) if self.in_out else (1, width)

    def __getitem__(self, part: slice) -> Values:
        return self.read()[part]

    def read(self) -> Values:
        """See ParameterSource."""
        rows = [self.head[token : token + 1] for token in self.tokens]
        row: Values = rows[0] if len(rows) == 1 else rows[0] - rows[1]
        return np.ascontiguousarray(row.T) if self.in_out else row


def answer_row(
    layout: SentenceLayout,
    config: Any,
    published: Mapping[str, Tensor],
    found: Mapping[str, ParameterSource],
    out_in: bool,
) -> dict[str, ParameterSource]:
    """Return the source of the head that scores, by its name in the model.

    Raises:
        CheckpointError: there is no head, or an answer is no token.
    """
    answers, naming = layout.answers, DECODERS[config.model_type].naming
    assert answers is not None
    asked = {"yes": answers.yes, "no": answers.no}
    tokens = {
        name: _token(layout.transformer / "tokenizer.json", f"{answers.where}.{name}", token)
        for name, token in asked.items()
        if token is not None
    }
    embedding = found.get(naming.embedding)
    if embedding is None:
        return {}  # an error that names it follows
    head = embedding
    if not config.tie_word_embeddings:
        tensor = published.get(naming.head)
        if tensor is None:
            raise CheckpointError(
                f"{layout.transformer}: expected the tensor {naming.head}, whose rows score, as "
                "tie_word_embeddings is false; found none",
                hint="config.json and the weights must come from the same model",
            )
        if problems := [*not_float(naming.head, tensor)]:
            raise CheckpointError(f"{layout.transformer}: {problems[0]}")
        head = TensorSource(naming.head, tensor)
    assert isinstance(head, TensorSource)
    for name, token in tokens.items():
        if not 0 <= token < head.shape[0]:
            raise CheckpointError(
                f"{answers.where}.{name}: expected a token of 0 to {head.shape[0] - 1}, found {token}"
            )
    name = f"{HEADS[config.model_type].out}.weight"
    return {name: AnswerRow(head, tuple(tokens.values()), not out_in)}


def _token(file: Path, where: str, token: int | str) -> int:
    if isinstance(token, int):
        return token
    from tokenizers import Tokenizer

    try:
        found = Tokenizer.from_file(str(file)).token_to_id(token)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(f"{file}: expected a tokenizer: {error}") from error
    if found is None:
        raise CheckpointError(
            f"{where}: expected one token of {file}, found {shown(token)}",
            hint="write it as the vocabulary does, with its mark of a space, if any",
        )
    return int(found)


def copy_embedding(
    found: dict[str, ParameterSource], parameters: Mapping[str, Parameter], naming: Naming
) -> None:
    """Make the head of a T5 that has none of its embedding, without the scale of the first T5.

    transformers 5 ties every T5 whose checkpoint has no head, also one whose outputs are not scaled.
    """
    embedding = found.get(naming.embedding)
    if naming.head in parameters and isinstance(embedding, TensorSource):
        transposed = embedding.transposed != parameters[naming.head].in_out
        found.setdefault(naming.head, replace(embedding, transposed=transposed))
