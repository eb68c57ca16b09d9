"""The files of a model that a bundle carries as they are: tokenizer, generation config, chat, licence.

Each is checked here, before anything compiles: a file with a mistake would fail where the bundle runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from prejit.compiler.base.json_file import read_object
from prejit.compiler.checkpoint import tokenizer_check
from prejit.compiler.checkpoint.chat_files import read_chat, special_tokens
from prejit.compiler.pipeline.model import file_digest
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.plan import Plan
from prejit.compiler.pipeline.program_keys import tokenizer_key
from prejit.compiler.progress import Progress
from prejit.compiler.store.interface import Store
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.errors import CheckpointError, StoreError
from prejit.runtime.format import limits
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
)
from prejit.runtime.generation import options


def read_layers(
    plan: Plan, vocab_size: Callable[[], int], store: Store, progress: Progress
) -> tuple[PackedLayer, ...]:
    """Return the layers of a model's files and of the licence, each checked.

    Args:
        plan: the plan of the build.
        vocab_size: returns the number of tokens of the model.
        store: knows which tokenizers passed the check before.
        progress: shows that a tokenizer is checked.

    Raises:
        CheckpointError: a file would fail where the bundle runs.
        StoreError: a file cannot be read.
    """
    return tuple((*_model_layers(plan, vocab_size, store, progress), *_license(plan)))


def _model_layers(
    plan: Plan, vocab_size: Callable[[], int], store: Store, progress: Progress
) -> Iterator[PackedLayer]:
    if plan.model is None:
        return
    directory, decodes = plan.model.transformer, plan.model.layout is None
    if decodes:
        special_ids(directory, limits.MAX_SIZE, own=plan.manifest.has_own_model)
    tokenizer, generation = directory / "tokenizer.json", directory / "generation_config.json"
    if tokenizer.is_file():
        content = _read(tokenizer)
        _check_tokenizer(plan, tokenizer, content, vocab_size, store, progress)
        yield bundle_files.layer(TOKENIZER_MEDIA_TYPE, content, tokenizer.name)
    if generation.is_file():
        content = _read(generation)
        if decodes:
            check_generation(generation, content)
        yield bundle_files.layer(GENERATION_MEDIA_TYPE, content, generation.name)
    chat = read_chat(directory)
    if chat is not None and tokenizer.is_file():
        yield bundle_files.layer(CHAT_MEDIA_TYPE, to_json(chat), "chat.json")


def _license(plan: Plan) -> Iterator[PackedLayer]:
    if plan.manifest.bundle.license is None:
        return
    path = plan.manifest.resolve(plan.manifest.bundle.license)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path}: cannot read the licence: {error.strerror}") from error
    yield bundle_files.layer(LICENSE_MEDIA_TYPE, content, "LICENSE")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from error


def special_ids(
    directory: Path, vocab_size: int, *, own: bool = False
) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    """Return the token ids that end a text, the one that begins it, and those with which an answer begins.

    The last are of encoder-decoders: `decoder_start_token_id`.

    Ids outside the vocabulary are left out: no token has them.

    Args:
        directory: the model directory.
        vocab_size: V.
        own: whether it is beside a decoder of the user. It needs no config.json then, and where no file gives
            ids, the tokenizer does.

    Raises:
        CheckpointError: a file cannot be read, or an id is no integer.
    """
    names = ("eos_token_id", "bos_token_id", "decoder_start_token_id")
    found: dict[str, list[int]] = {name: [] for name in names}
    # generation_config.json goes before config.json, as in transformers.
    files = {
        directory / "config.json": read_object(directory / "config.json", required=not own),
        directory / "generation_config.json": read_object(
            directory / "generation_config.json", required=False
        ),
    }
    for file, values in files.items():
        for name in found.keys() & values.keys():
            value = values[name]
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
                raise CheckpointError(
                    f"{file}: {name}: expected a token id or a list of them, found {value!r:.80}",
                    hint="correct the file, or take the one that was published with the weights",
                )
            known = [each for each in ids if 0 <= each < vocab_size]
            # The order of tokens with which a text begins matters; those that end one are a set.
            found[name] = known if name.startswith("decoder_") else sorted(set(known))
    if own:
        of_tokenizer = _ids_of_tokenizer(directory)
        for name in names:
            token_id = of_tokenizer.get(name.removesuffix("_id"), vocab_size)
            found[name] = found[name] or [token_id] * (token_id < vocab_size)
    eos, bos, start = (tuple(found[name]) for name in names)
    return eos, next(iter(bos), None), start


def _ids_of_tokenizer(directory: Path) -> dict[str, int]:
    """Return the ids of the special tokens of a tokenizer, by name: `eos_token`."""
    tokenizer = directory / "tokenizer.json"
    if not tokenizer.is_file():
        return {}
    try:
        ids = {
            each["content"]: int(each["id"])
            for each in json.loads(_read(tokenizer))["added_tokens"]
        }
    except (
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
    ):  # the check of the tokenizer says what is wrong
        return {}
    return {name: ids[text] for name, text in special_tokens(directory).items() if text in ids}


def check_generation(path: Path, content: bytes) -> None:
    """Check generation_config.json as the server will read it.

    Raises:
        CheckpointError: the file is too large, or has a value that the server refuses.
    """
    if len(content) > limits.MAX_GENERATION_BYTES:
        raise CheckpointError(
            f"{path}: expected at most {limits.MAX_GENERATION_BYTES} bytes, found {len(content)}"
        )
    try:
        options.parse_defaults(content)
    except ValueError as error:
        raise CheckpointError(
            f"{path}: {error}", hint="correct the value, or remove the key to use prejit's default"
        ) from error


def _check_tokenizer(
    plan: Plan,
    path: Path,
    content: bytes,
    vocab_size: Callable[[], int],
    store: Store,
    progress: Progress,
) -> None:
    """Check a tokenizer, unless it passed before."""
    if plan.manifest.has_own_model:
        config = f"vocab_size {vocab_size()}"
    else:
        config = file_digest(path.with_name("config.json"))
    key = tokenizer_key(plan.manifest, content, config)
    if store.get(key) is not None:
        return
    with progress.phase("checking tokenizer.json"):
        tokenizer_check.check_tokenizer(path, content, vocab_size())
    store.put(key, {"passed": True})
