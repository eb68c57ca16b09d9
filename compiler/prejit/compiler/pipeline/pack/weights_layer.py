"""The weights layer: tensors of a published model, of the user's decoder and of the user's functions.

It counts the matrices that were published in few bits, kept or converted. Large layers have chunks, with
whose digests a server verifies them, and an fs-verity digest: that of `fsverity digest`, SHA-256, blocks of
4096 bytes, no salt. The definition is Documentation/filesystems/fsverity.rst of Linux:

    blocks of the file, the last one padded with zeros    ->  their hashes
    blocks of hashes, 128 in each, padded with zeros      ->  their hashes, and so on to one hash, the root
    fsverity_descriptor: header, size, root, zeros        ->  the digest
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np
from blake3 import blake3

from prejit.compiler.checkpoint.checkpoint import Checkpoint
from prejit.compiler.manifest.specs import DRAFT_SECTION
from prejit.compiler.pipeline.model import ModelSource
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer, PackedTensor
from prejit.compiler.pipeline.published_files import Published, ResultOfFiles
from prejit.compiler.pipeline.result_keys import Contents, content_of, weights_key
from prejit.compiler.pipeline.workspace import UserCode, Workspace, values_of
from prejit.compiler.store.build_cache_key import Key
from prejit.compiler.store.store_interface import Store
from prejit.runtime.base.files import digest_of, store_errors
from prejit.runtime.errors import BuildError
from prejit.runtime.format.bundle_schema import Chunks
from prejit.runtime.format.checks.program_table import CHUNK_ALGORITHM
from prejit.runtime.format.names import LIBRARY_MEDIA_TYPE, WEIGHTS_MEDIA_TYPE

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


CHUNK_BYTES = 8 << 20
"""The size of a chunk. A thread takes 1.1 ms to hash one, and then up to 0.5 ms for the GIL, so
smaller ones cost time; larger ones make a thread wait longer for the bytes that it needs."""

CHUNKED_BYTES = 1 << 20
"""The size from which a layer has chunks. SHA-256 of a smaller one takes less than 0.6 ms."""


BLOCK_BYTES = 4096

_DESCRIPTOR = struct.Struct("<BBBBIQ64s176x")
"""Version, hash function, log2 of the block size, size of the salt, 0, size of the file, root, zeros."""


@final
class VerityHash:
    """The fs-verity digest of bytes that come in pieces. It keeps 32 bytes for each 4096."""

    def __init__(self) -> None:
        """Begin with an empty file."""
        self._size = 0
        self._hashes = bytearray()

    def update(self, piece: bytes) -> None:
        """Append a piece. All but the last one are a multiple of `BLOCK_BYTES` long."""
        assert self._size % BLOCK_BYTES == 0, "only the last piece may end inside of a block"
        self._size += len(piece)
        self._hashes += _hashes(piece)

    def digest(self) -> str:
        """Return the digest: `sha256:` and 64 hexadecimal digits."""
        level = bytes(self._hashes)
        while len(level) > hashlib.sha256().digest_size:
            level = _hashes(level)
        descriptor = _DESCRIPTOR.pack(1, 1, BLOCK_BYTES.bit_length() - 1, 0, 0, self._size, level)
        return digest_of(descriptor)


def _hashes(content: bytes) -> bytes:
    """Return the hashes of the blocks of some bytes, one after the other."""
    sha256, view = hashlib.sha256, memoryview(content)
    whole = len(content) - len(content) % BLOCK_BYTES
    hashes = [
        sha256(view[start : start + BLOCK_BYTES]).digest() for start in range(0, whole, BLOCK_BYTES)
    ]
    if rest := content[whole:]:
        hashes.append(sha256(rest.ljust(BLOCK_BYTES, b"\0")).digest())
    return b"".join(hashes)


def chunks_of(layers: Iterable[PackedLayer], store: Store) -> dict[str, Chunks] | None:
    """Return the chunks of large layers, by media type; None: no layer is large.

    A library of the user has none: it is read whole, and several have one media type. The store keeps the
    digests.
    """
    found = {
        layer.media_type: _chunks(layer, store)
        for layer in layers
        if layer.size >= CHUNKED_BYTES and layer.media_type != LIBRARY_MEDIA_TYPE
    }
    return found or None


def _chunks(layer: PackedLayer, store: Store) -> Chunks:
    sizes = (("size", str(CHUNK_BYTES)), ("verity block", str(BLOCK_BYTES)))
    ingredients = (("layer", layer.digest), ("hash", CHUNK_ALGORITHM), *sizes)
    key = Key("chunks", layer.digest, ingredients)
    result = store.get(key)
    if result is None:
        digests, verity = list[str](), VerityHash()
        for chunk in _pieces(layer.content):
            digests.append(blake3(chunk).hexdigest())
            verity.update(chunk)
        result = {"digests": digests, "verity": verity.digest()}
        store.put(key, result)
    return Chunks(CHUNK_ALGORITHM, CHUNK_BYTES, tuple(result["digests"]), result["verity"])


def _pieces(content: bytes | Path) -> Iterator[bytes]:
    if isinstance(content, bytes):
        for start in range(0, len(content), CHUNK_BYTES):
            yield content[start : start + CHUNK_BYTES]
        return
    with store_errors(content, "read"), content.open("rb") as file:
        while piece := file.read(CHUNK_BYTES):
            yield piece
