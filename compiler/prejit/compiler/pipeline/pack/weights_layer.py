"""The weights layer: tensors of a published model, of the user's decoder and of the user's functions.

It counts the matrices that were published in few bits, kept or converted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.manifest.specs import DRAFT_SECTION
from prejit.compiler.pipeline.model import ModelSource
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTensor
from prejit.compiler.pipeline.pack.chunks import chunks_of
from prejit.compiler.pipeline.published_files import Published, ResultOfFiles
from prejit.compiler.pipeline.result_keys import Contents, content_of, weights_key
from prejit.compiler.pipeline.workspace import UserCode, Workspace, values_of
from prejit.runtime.errors import BuildError
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.own_decoder import OwnModel

Values = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class FewBits:
    """How many matrices of few bits were kept exactly, and how many were converted.

    Attributes:
        forms: number of matrices by form, such as `GPTQ, 4 bits, groups of 128`.
        kept: number of matrices whose values are exactly the published ones.
        converted: number of the others.
        error: the largest error of one: the root of the sum of its squares, as a share of that of the values.
    """

    forms: dict[str, int]
    kept: int
    converted: int
    error: float

    def __str__(self) -> str:
        """Return it as a line for people."""
        matrices = "matrix" if self.kept == 1 else "matrices"
        forms = "; ".join(
            form if len(self.forms) == 1 else f"{count} of {form}"
            for form, count in self.forms.items()
        )
        line = f"kept {self.kept:,} {matrices} exactly as published ({forms})"
        if not self.converted:
            return line
        return f"{line}; converted {self.converted:,}, with an error of up to {self.error:.2%}"


def few_bits(forms: Mapping[str, str], errors: Mapping[str, float]) -> FewBits | None:
    """Return what became of matrices; None: there are none."""
    if not forms:
        return None
    wrong = [error for error in errors.values() if error]
    return FewBits(
        dict(sorted(Counter(forms.values()).items())),
        len(forms) - len(wrong),
        len(wrong),
        max(wrong, default=0.0),
    )


@dataclass(frozen=True)
class WeightsLayer(PackedLayer):
    """The layer of weights.

    Attributes:
        few_bits: what became of matrices that were published in few bits; None: there are none.
        int4: what decided how matrices were rounded to int4, and an encoder's dtypes; empty: nothing.
    """

    few_bits: FewBits | None = None
    int4: str = ""


@dataclass(frozen=True)
class RoundedByText:
    """Matrices that a text rounded to int4.

    Attributes:
        words: words and scales by name.
        line: what the text decided, for people; empty: there was nothing to decide.
    """

    words: Mapping[str, tuple[Values, Values]]
    line: str


def pack_weights(
    space: Workspace,
    published: Published | None,
    user: Mapping[str, Contents],
    round_by_text: Callable[[Workspace, Checkpoint], RoundedByText | None],
) -> WeightsLayer | None:
    """Return the weights layer: from the store, or packed now. None: the bundle has no weights.

    `user` has the parameters of the user's functions, by section. `round_by_text` rounds matrices to int4 by
    a text; None: it decides nothing.
    """
    manifest, store, own = space.plan.manifest, space.store, space.plan.own
    if published is None and not user and (own is None or not own.parameters):
        return None
    exact, orders = (None, None) if own is None else (own.parameters, own.orders)
    key_of = partial(
        weights_key,
        manifest,
        space.plan.model,
        user=user,
        own=exact,
        own_orders=orders,
        draft=space.plan.draft,
    )
    stored = ResultOfFiles(store, key_of, published)
    with space.progress.phase("packing weights"):
        with stored.making():
            result = stored.find()
            if result is None:
                result = _write_weights(space, published, user, round_by_text)
                stored.put(result, blobs=[result["digest"]])
        path = store.blob_path(result["digest"])
        if path is None:
            raise BuildError("the weights are gone from the build cache", hint="build again")
        layer = WeightsLayer(
            *(WEIGHTS_MEDIA_TYPE, result["digest"], result["size"], path, "weights.safetensors"),
            FewBits(**result["few_bits"]) if "few_bits" in result else None,
            result.get("int4", ""),
        )
        chunks_of([layer], store)  # while workers compile; `pack_bundle` finds them in the store
    return layer


def _write_weights(
    space: Workspace,
    published: Published | None,
    user: Mapping[str, Contents],
    round_by_text: Callable[[Workspace, Checkpoint], RoundedByText | None],
) -> dict[str, Any]:
    """Write the weights layer into the store, as in `pack_weights`, and return the result of its key."""
    tensors: list[PackedTensor] = []
    if user:
        tensors += _user_tensors(space.plan.manifest.where, user, space.code())
    errors: dict[str, float] = {}
    rounded = None
    if published is not None:
        checkpoint = published.checkpoint
        rounded = round_by_text(space, checkpoint)
        words = {} if rounded is None else rounded.words
        if published.draft is not None and (drafts := space.of_draft) is not None:
            of_draft = published.draft.checkpoint
            by_text = round_by_text(drafts, of_draft)
            more = {} if by_text is None else by_text.words
            for each in _tensors(drafts.model(), of_draft, lambda *_: None, more):
                tensors.append(replace(each, name=f"{DRAFT_SECTION}:{each.name}"))
        tensors = [*_tensors(space.model(), checkpoint, errors.__setitem__, words), *tensors]
    if space.plan.own is not None:
        model_of_user = space.code().model
        assert model_of_user is not None
        tensors = [*_own_tensors(model_of_user), *tensors]
    with space.store.blob_writer() as blob:
        bundle_files.write_weights(tensors, blob)
        if published is not None:
            published.check_unchanged()
    bits = few_bits(published.checkpoint.forms if published else {}, errors)
    result: dict[str, Any] = {"digest": blob.digest, "size": blob.size}
    result |= {"few_bits": asdict(bits)} if bits else {}
    lines = (rounded.line if rounded else "", _mixture(space) if published else "")
    result |= {"int4": "; ".join(filter(None, lines))}
    return result


def _mixture(space: Workspace) -> str:
    """Return the dtypes of an encoder's matrices, for people; empty: they are the manifest's."""
    from prejit.compiler.models import quantizing

    files = space.plan.model
    if files is None or not files.chosen:
        return ""
    found = quantizing.described(space.model().module)
    return f"stored matrices as {found}, for a cosine of 0.999"


def _user_tensors(
    where: str, user: Mapping[str, Contents], code: UserCode
) -> Iterator[PackedTensor]:
    for section, contents in user.items():
        for name, value in values_of(code, section).items():
            if content_of(value) != contents.get(name):
                raise BuildError(
                    f"{where}: program {section!r}: expected the same value of {name} each "
                    "time that its module is imported, found another one",
                    hint="give random parameters a seed, or save them to a file and name it in `params`",
                )
            yield PackedTensor(
                f"{section}:{name}", str(value.dtype), value.shape, partial(np.asarray, value)
            )


def _own_tensors(own: OwnModel) -> list[PackedTensor]:
    return [
        PackedTensor(name, str(shape.dtype), shape.shape, own.stored.values[name])
        for name, shape in own.stored.model.weights.items()
    ]


def _tensors(
    model: ModelSource,
    checkpoint: Checkpoint,
    tell: Callable[[str, float], object],
    words: Mapping[str, tuple[Values, Values]],
) -> list[PackedTensor]:
    """Return the model's parameters as they are packed: rounded or quantized when they are written.

    `tell` and `words` are as in `quantizing.readers`.
    """
    from flax import nnx

    from prejit.compiler.models import quantizing
    from prejit.compiler.models.parameters import flat_parameters

    stored = quantizing.readers(model.module, checkpoint.rows, tell, words)
    return [
        PackedTensor(
            name, str(leaf.dtype), leaf.shape, stored.get(name) or partial(checkpoint.read, name)
        )
        for name, leaf in flat_parameters(nnx.state(model.module)).items()
    ]
