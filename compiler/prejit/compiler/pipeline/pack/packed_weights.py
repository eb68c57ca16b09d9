"""The weights layer of a bundle: a model's tensors, and the parameters of the user's functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.pipeline.model import (
    ModelSource,
    ReadModel,
    file_digests,
    open_weights,
)
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTensor
from prejit.compiler.pipeline.pack.chunks import chunks_of
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.program_keys import (
    Contents,
    content_of,
    weights_key,
)
from prejit.compiler.pipeline.user_code import ReadCode, values_of
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.runtime.errors import BuildError
from prejit.runtime.format.names import WEIGHTS_MEDIA_TYPE

if TYPE_CHECKING:
    from prejit.compiler.lowering.user.own_decoder import OwnModel


@dataclass(frozen=True)
class Published:
    """The published weights of a model.

    Attributes:
        checkpoint: the tensors; each is read when it is used.
        files: the files that decide them, by name, each with its digest.
    """

    checkpoint: Checkpoint
    files: tuple[tuple[str, str], ...]


def find_published(plan: Plan) -> Published | None:
    """Open the weights of the plan's model, and hash their files. None: it has no published model.

    Raises:
        CheckpointError: files are missing.
        StoreError: a file cannot be read.
    """
    if plan.model is None or plan.manifest.has_own_model:
        return None
    checkpoint = open_weights(plan.model)
    return Published(checkpoint, file_digests(plan.model.directory, checkpoint.files))


def pack_weights(
    plan: Plan,
    published: Published | None,
    user: Mapping[str, Contents],
    code: ReadCode,
    model: ReadModel,
    store: Store,
    progress: Progress,
) -> PackedLayer | None:
    """Return the weights layer: from the store, or packed now. None: the bundle has no weights.

    Args:
        plan: the plan of the build.
        published: the weights of its model.
        user: the parameters of the user's functions, by section.
        code: reads the user's code, which has their values.
        model: reads the model.
        store: keeps the layer.
        progress: shows that weights are packed.
    """
    own = plan.own
    if published is None and not user and (own is None or not own.parameters):
        return None
    with progress.phase("packing weights"):
        files = () if published is None else published.files
        exact, orders = (None, None) if own is None else (own.parameters, own.orders)
        key = weights_key(plan.manifest, plan.model, files, user, exact, orders)
        with store.making(key):
            result = store.get(key)
            if result is None:
                tensors = list(_user_tensors(plan, user, code)) if user else []
                if published is not None:
                    tensors = [*_tensors(model(), published.checkpoint), *tensors]
                if own is not None:
                    model_of_user = code().model
                    assert model_of_user is not None
                    tensors = [*_own_tensors(model_of_user), *tensors]
                with store.blob_writer() as blob:
                    bundle_files.write_weights(tensors, blob)
                result = {"digest": blob.digest, "size": blob.size}
                store.put(key, result, blobs=[blob.digest])
        path = store.blob_path(result["digest"])
        if path is None:
            raise BuildError("the weights are gone from the build cache", hint="build again")
        layer = PackedLayer(
            WEIGHTS_MEDIA_TYPE, result["digest"], result["size"], path, "weights.safetensors"
        )
        chunks_of([layer], store)  # while workers compile; `pack_bundle` finds them in the store
    return layer


def _user_tensors(
    plan: Plan, user: Mapping[str, Contents], code: ReadCode
) -> Iterator[PackedTensor]:
    """Yield the parameters of the user's functions.

    Raises:
        BuildError: they are not those that were traced.
    """
    for section, contents in user.items():
        for name, value in values_of(code(), section).items():
            if content_of(value) != contents.get(name):
                raise BuildError(
                    f"{plan.manifest.where}: program {section!r}: expected the same value of {name} each "
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


def _tensors(model: ModelSource, checkpoint: Checkpoint) -> list[PackedTensor]:
    """Return the model's parameters as they are packed: rounded or quantized when they are written."""
    from flax import nnx

    from prejit.compiler.models import precision
    from prejit.compiler.models.parameters import flat_parameters

    stored = precision.readers(model.module, checkpoint.rows)
    return [
        PackedTensor(
            name, str(leaf.dtype), leaf.shape, stored.get(name) or partial(checkpoint.read, name)
        )
        for name, leaf in flat_parameters(nnx.state(model.module)).items()
    ]
