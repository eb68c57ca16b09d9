"""The layers that all targets share beside the weights: the files of a model as they are, and the licence.

A file is checked before anything compiles: one with a mistake would fail where the bundle runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.compiler.checkpoint import configured_tokenizer
from prejit.compiler.checkpoint.configured_tokenizer import (
    check_encoder_tokenizer,
    check_prefix_space,
    with_configured_tokens,
)
from prejit.compiler.models.chat_files import read_chat, special_tokens
from prejit.compiler.models.families.sentence_layout import SentenceLayout
from prejit.compiler.pipeline.model import file_digest
from prejit.compiler.pipeline.pack import bundle_files
from prejit.compiler.pipeline.pack.bundle_files import PackedLayer
from prejit.compiler.pipeline.result_keys import tokenizer_key
from prejit.compiler.pipeline.workspace import Workspace
from prejit.runtime.base.files import store_errors
from prejit.runtime.base.typed_json import to_json
from prejit.runtime.base.wording import few
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format import limits
from prejit.runtime.format.names import (
    CHAT_MEDIA_TYPE,
    GENERATION_MEDIA_TYPE,
    LICENSE_MEDIA_TYPE,
    TOKENIZER_MEDIA_TYPE,
)
from prejit.runtime.generation import options
from prejit.runtime.text.tokenizer import Tokenizer

_UNREAD_GENERATION: Mapping[str, int | None] = {
    **dict.fromkeys(("bad_words_ids", "sequence_bias")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "forced_decoder_ids")),
    **dict.fromkeys(("exponential_decay_length_penalty", "stop_strings", "watermarking_config")),
    **dict.fromkeys(("constraints", "force_words_ids", "dola_layers", "token_healing", "top_h")),
    **dict.fromkeys(("max_length", "max_time", "language", "task")),
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale", "encoder_repetition_penalty"), 1),
    "num_return_sequences": 1,
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha"), 0),
}
"""Keys of generation_config.json by which transformers chooses tokens or ends a text, and prejit does not.

Each has the number that changes no text; None: every number does."""

_CLEANS, _SPLITS = "clean_up_tokenization_spaces", "split_special_tokens"
_SIMILARITY = "similarity_fn_name"
_TOKENIZERS = ("*.tiktoken", "*.spm", "s*.model", "tekken.json", "tokenizer.model*", "vocab.*")
"""Names of files of tokenizers that transformers reads, and prejit does not."""


def read_layers(space: Workspace) -> Iterator[PackedLayer]:
    """Yield the layers of a model's files and of the licence, each checked.

    The store knows which tokenizers passed before.

    Raises:
        CheckpointError: a file would fail where the bundle runs.
        StoreError: a file cannot be read.
    """
    plan, manifest = space.plan, space.plan.manifest
    if plan.model is not None:
        directory, decodes = plan.model.transformer, plan.model.layout is None
        _check_links(directory)
        if decodes:
            special_ids(directory, limits.MAX_SIZE, own=manifest.has_own_model)
        tokenizer, generation = directory / "tokenizer.json", directory / "generation_config.json"
        reads_texts = manifest.encode is None or bool(
            manifest.encode.shapes or manifest.encode.packed
        )
        if tokenizer.is_file() and reads_texts:
            content = with_configured_tokens(tokenizer, _read(tokenizer))
            _check_tokenizer(space, tokenizer, content)
            settings = tokenizer.with_name("tokenizer_config.json")
            for key in unread_settings(settings, content, decodes=decodes):
                space.progress.note(f"{settings}: prejit does not use {key}: true")
            yield bundle_files.layer(TOKENIZER_MEDIA_TYPE, content, tokenizer.name)
        elif reads_texts and (others := other_tokenizers(directory)):
            space.progress.note(others)
        if plan.model.layout is not None and (unread := unread_similarity(plan.model.layout)):
            space.progress.note(unread)
        if plan.draft is not None:
            _check_same_tokens(tokenizer, plan.draft.transformer / tokenizer.name)
        if generation.is_file():
            content = _read(generation)
            if decodes and (keys := check_generation(generation, content)):
                space.progress.note(f"{generation}: prejit does not use {', '.join(keys)}")
            yield bundle_files.layer(GENERATION_MEDIA_TYPE, content, generation.name)
        chat = read_chat(directory)
        if chat is not None and tokenizer.is_file():
            yield bundle_files.layer(CHAT_MEDIA_TYPE, to_json(chat), "chat.json")
    if manifest.bundle.license is not None:
        path = manifest.resolve(manifest.bundle.license)
        with store_errors(path, "read the licence"):
            content = path.read_bytes()
        yield bundle_files.layer(LICENSE_MEDIA_TYPE, content, "LICENSE")


def _check_links(directory: Path) -> None:
    """Refuse links to files that are gone: copies of the Hub's cache without what its links lead to.

    A model may be without a tokenizer. One that has lost it would be built without it, and say nothing.
    """
    for file in sorted((*directory.glob("*.json"), *directory.glob("*.jinja"))):
        if file.is_symlink() and not file.exists():
            raise CheckpointError(
                f"{file}: expected a file, found a link to {os.readlink(file)}, which is not there",
                hint="copy the model with what its links lead to (cp -rL), or remove the link",
            )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from error


def special_ids(
    directory: Path, vocab_size: int, *, own: bool = False
) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    """Return the token ids that end a text, the one that begins it, and those with which an answer begins.

    The last are of encoder-decoders: `decoder_start_token_id`. Of several that end a text, those outside the
    vocabulary are left out: no token has them. Beside a decoder of the user (`own`) there may be no
    config.json, and where no file gives ids, the tokenizer does.

    Raises:
        CheckpointError: a file cannot be read, or an id is no integer, or beyond the vocabulary.
    """
    names = ("eos_token_id", "bos_token_id", "decoder_start_token_id")
    found: dict[str, list[int]] = {name: [] for name in names}
    config = read_object(directory / "config.json", required=not own)
    if isinstance(text := config.get("text_config"), dict):
        # transformers takes from the text model what a model that also reads images does not give
        config = text | {key: value for key, value in config.items() if value is not None}
    # generation_config.json goes before config.json, as in transformers.
    files = {
        directory / "config.json": config,
        directory / "generation_config.json": read_object(
            directory / "generation_config.json", required=False
        ),
    }
    given = {name: (file, values[name]) for file, values in files.items() for name in values}
    for name in found.keys() & given.keys():
        file, value = given[name]
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
            raise CheckpointError(
                f"{file}: {name}: expected a token id or a list of them, found {value!r:.80}",
                hint="correct the file, or take the one that was published with the weights",
            )
        known = [each for each in ids if 0 <= each < vocab_size]
        beyond = [each for each in ids if each >= vocab_size]
        # Nothing would end a text, or another token would begin it.
        if beyond and not (name == "eos_token_id" and known):
            raise CheckpointError(
                f"{file}: {name}: expected ids below vocab_size = {vocab_size}, found {beyond[0]}",
                hint="give the id that the tokenizer has for it, or null where there is no such token",
            )
        # The order of tokens with which a text begins matters; those that end one are a set.
        found[name] = known if name.startswith("decoder_") else sorted(set(known))
    if own:
        of_tokenizer = _ids_of_tokenizer(directory)
        for name in names:
            token_id = of_tokenizer.get(name.removesuffix("_id"), vocab_size)
            if not found[name] and token_id < vocab_size:
                found[name] = [token_id]
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
    except (ValueError, TypeError, LookupError, RecursionError):
        return {}  # the check of the tokenizer says what is wrong
    return {name: ids[text] for name, text in special_tokens(directory).items() if text in ids}


def _check_same_tokens(model: Path, draft: Path) -> None:
    """Check that the tokens of a draft model are those of the model; without tokenizers nothing is compared.

    Raises:
        CheckpointError: one id is of different texts, or one of both has no tokenizer.
    """
    if model.is_file() != draft.is_file():
        have, lack = (model, draft) if model.is_file() else (draft, model)
        raise CheckpointError(
            f"{lack}: expected the tokenizer of {have}, found no file",
            hint="a draft model must have the tokens of the model: take one of the same family",
        )
    if not model.is_file() or file_digest(model) == file_digest(draft):
        return
    ours, theirs = (
        Tokenizer(_read(path), str(path)).library.get_vocab() for path in (model, draft)
    )
    if differing := ours.items() ^ theirs.items():
        text, _ = min(differing, key=lambda pair: (pair[1], pair[0]))
        found = (f"{text!r:.40} is {vocab.get(text, 'none')}" for vocab in (ours, theirs))
        raise CheckpointError(
            f"{draft}: expected the tokens of {model}, where {next(found)}; found that {next(found)}",
            hint="a draft model must have the tokens of the model: take one of the same family",
        )


def check_generation(path: Path, content: bytes) -> list[str]:
    """Check generation_config.json as the server will read it.

    Returns:
        the keys with which transformers would write another text, and prejit does not.

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
    config = json.loads(content)
    if config.get("max_new_tokens") is not None:  # which goes before it in transformers
        config.pop("max_length", None)
    return [
        key
        for key, value in config.items()
        if key in _UNREAD_GENERATION
        and not (value in (None, [], {}) or value is False or value == _UNREAD_GENERATION[key])
    ]


def unread_settings(file: Path, content: bytes, *, decodes: bool) -> list[str]:
    """Return the settings of tokenizer_config.json that are true and change texts in transformers alone.

    One removes spaces before punctuation from decoded texts, which transformers 5 ignores for BPE; the other
    takes the names of special tokens in a text for words.
    """
    settings = read_object(file, required=False)
    cleans = decodes and settings.get(_CLEANS) is True
    found = {
        _CLEANS: cleans and json.loads(content)["model"].get("type") != "BPE",
        _SPLITS: settings.get(_SPLITS) is True,
    }
    return [key for key, is_set in found.items() if is_set]


def other_tokenizers(directory: Path) -> str:
    """Return a note about a tokenizer in other files than tokenizer.json; empty: there is none."""
    found = sorted(each.name for pattern in _TOKENIZERS for each in directory.glob(pattern))
    if not found:
        return ""
    return (
        f"{directory}: prejit reads tokenizer.json, found {few(found, 4)}: texts are token ids; "
        "transformers.AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY) writes that file"
    )


def unread_similarity(layout: SentenceLayout) -> str:
    """Return a note if sentence-transformers compares a model's embeddings by another number than the cosine.

    Lengths of 1 have one number for cosine and dot. Empty: there is nothing to note.
    """
    file = layout.directory / "config_sentence_transformers.json"
    name = read_object(file, required=False).get(_SIMILARITY) if file in layout.files else None
    if layout.scores or name in (None, "cosine") or (name == "dot" and layout.normalized):
        return ""
    return f"{file}: prejit does not use {_SIMILARITY}: {shown(name)}; SentenceEncoder takes it as an option"


def _check_tokenizer(space: Workspace, path: Path, content: bytes) -> None:
    """Check a tokenizer, unless it passed before."""
    if space.plan.manifest.has_own_model:
        config = f"vocab_size {space.vocab_size()}"
    else:
        config = file_digest(path.with_name("config.json"))
    model = space.plan.model
    layout = None if model is None else model.layout
    settings = path.with_name("tokenizer_config.json")
    config += f" {file_digest(settings) if settings.is_file() else None}"
    if layout is not None:
        config += f" {layout.scores}"
    key = tokenizer_key(space.plan.manifest, content, config)
    if space.store.get(key) is not None:
        return
    with space.progress.phase("checking tokenizer.json"):
        configured_tokenizer.check_tokenizer(path, content, space.vocab_size())
        check_prefix_space(path, content)
        if layout is not None:
            check_encoder_tokenizer(path, content, layout, space.vocab_size())
    space.store.put(key, {"passed": True})
