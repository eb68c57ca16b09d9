"""Have tokenizer.json of a bundle say what transformers makes of it and its configuration, and check it.

A bundle has tokenizer.json alone. Where tokenizer_config.json describes an added token too, in
`added_tokens_decoder` or as a special token such as `eos_token`, that decides: whether the spaces beside a
token belong to it, whether it may lie within a word, and whether a decoded text shows it. So such tokens get
its properties.

A bundle cuts off the end of a text that is too long, and takes every token of a single text as one of the
first segment. Where that, or a setting of tokenizer_config.json, would give other tokens than transformers,
the build refuses the file.

The file is a program from outside: regular expressions, tables and templates that the `tokenizers` library
runs. It may fail on some texts only, panic, or never end. So it is checked in a separate process: a bundle
with such a file would load and then fail on its first text.
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.base.suggestions import shown
from prejit.runtime.base.child_process import run_child
from prejit.runtime.errors import CheckpointError, PrejitError

if TYPE_CHECKING:
    from prejit.compiler.models.families.sentence_layout import SentenceLayout

_PROPERTIES = ("single_word", "lstrip", "rstrip", "normalized", "special")
_LIST = re.compile(r'"added_tokens"\s*:\s*(?=\[)')
_OF_WORDS = ("BertTokenizer", "DistilBertTokenizer", "ElectraTokenizer", "MPNetTokenizer")
"""How the names of transformers' classes begin that make their own normalizer, by keys of _NORMALIZED."""
_OF_WORDS_TOO = ("bert", "distilbert", "electra", "mpnet", "nomic_bert")
"""The values of model_type whose tokenizer is of such a class where no file names one."""
_OF_BYTES = ("CodeGenTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "RobertaTokenizer")
"""How the names of transformers' classes begin that split texts by add_prefix_space, false if missing."""
_NORMALIZED = {
    "lowercase": ("do_lower_case", True),
    "strip_accents": ("strip_accents", None),
    "handle_chinese_chars": ("tokenize_chinese_chars", True),
}
"""Each setting of BertNormalizer with the key of tokenizer_config.json, and the value if that is missing."""
_PROBES = {
    "an empty text": "",
    "an English text": "Hello, world! The quick brown fox jumps over the lazy dog.",
    "all characters of ASCII": "".join(map(chr, range(128))),
    "40 times the letter a": "a" * 40,
    "accents": "Éàüñ ç ø Å e\u0301 a\u0308",
    "emoji": "😀👍🏽👩‍👩‍👧 🇨🇭",
    "Chinese, Japanese and Korean": "你好。世界 こんにちは 안녕하세요",
    "white space": " \t\n\r\n  \u00a0\u200b\u3000 \n\n",
    "2 kB of mixed text": 'def f(x):\n    return {"é": x ** 2, "你": [1.5e-3, "😀"]}  # ok?\n' * 30,
}
"""Texts of many kinds. The tokenizer of a published model accepts any text."""
_CHECK_CPU_SECONDS = 5
"""CPU time limit of the process for files up to 4 MB: a hundred times what it needs."""
_CHECKED_BYTES_A_SECOND = 4 << 20
"""Bytes of a larger file for which the limit grows by a second."""
_CHECK_WALL_SECONDS = 30
_CHECK_MEMORY_BYTES = 8 << 30
_DECODED_AT_ONCE = 256
_BOOTSTRAP = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from prejit.compiler.checkpoint.configured_tokenizer import _main; _main(*sys.argv[2:])"
)


def with_configured_tokens(file: Path, content: bytes) -> bytes:
    """Return a tokenizer.json whose added tokens are as tokenizer_config.json beside it says.

    The content is returned as it is if they are so, or if it is no tokenizer: its check says what is wrong.

    Raises:
        CheckpointError: tokenizer_config.json cannot be read.
    """
    wanted = _wanted(file.parent)
    try:
        text = content.decode()
        # Only a tokenizer that changes is read whole: it may have 30 MB.
        found, _ = json.JSONDecoder().raw_decode(text, _LIST.search(text).end())  # type: ignore[union-attr]
        described = {each for each in wanted if _is_whole(wanted[each])}
        if (
            described <= {each["content"] for each in found}
            and _changed(found, wanted, {}) == found
        ):
            return content
        tree = json.loads(text)
        tokens = _changed(found, wanted, _ids(tree["model"]["vocab"]))
        changed = json.dumps({**tree, "added_tokens": tokens}, ensure_ascii=False).encode()
    except (AttributeError, ValueError, TypeError, LookupError, RecursionError):
        return content
    return content if tokens == found else changed


def _wanted(directory: Path) -> dict[str, dict[str, bool]]:
    """Return the properties of tokens that tokenizer_config.json describes, by their texts."""
    from prejit.compiler.models.chat_files import special_tokens  # not in the process that checks

    settings = read_object(directory / "tokenizer_config.json", required=False)
    described = settings.get("added_tokens_decoder")
    wanted: dict[str, dict[str, bool]] = {}
    for each in described.values() if isinstance(described, dict) else ():
        if isinstance(each, dict) and isinstance(each.get("content"), str):
            start = dict.fromkeys(_PROPERTIES, False) | {"normalized": not each.get("special")}
            found = {key: each[key] for key in _PROPERTIES if isinstance(each.get(key), bool)}
            wanted[each["content"]] = start | found
    for text in special_tokens(directory).values():
        wanted[text] = wanted.get(text, {}) | {"special": True}
    return wanted


def _changed(
    found: Iterable[Mapping[str, Any]],
    wanted: Mapping[str, Mapping[str, bool]],
    ids: Mapping[str, int],
) -> list[dict[str, Any]]:
    """Return added tokens with these properties; `ids` has the tokens that may become added ones."""
    tokens = {each["content"]: dict(each) for each in found}
    for text, properties in wanted.items():
        # A name alone makes no added token: the padding of a GGUF file may be any word.
        if text in tokens or (text in ids and _is_whole(properties)):
            new = {"id": ids.get(text), "content": text, **dict.fromkeys(_PROPERTIES, False)}
            token = tokens.setdefault(text, new)
            is_special = token["special"] or properties["special"]  # the library forgets none
            token |= {**properties, "special": is_special}
    return list(tokens.values())


def _is_whole(properties: Mapping[str, bool]) -> bool:
    return properties.keys() == {*_PROPERTIES}


def _ids(vocab: Any) -> Mapping[str, int]:
    """Return the ids of tokens; Unigram has a list of tokens with their scores."""
    return vocab if isinstance(vocab, dict) else {each[0]: n for n, each in enumerate(vocab)}


def check_encoder_tokenizer(
    file: Path, content: bytes, layout: SentenceLayout, vocab_size: int
) -> None:
    """Check a tokenizer.json that the library can read.

    `file` is tokenizer.json with its content, `layout` and `vocab_size` those of its model.

    Raises:
        CheckpointError: the tokenizer would give other tokens than transformers; the error names file, key,
            value and what is allowed.
    """
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot read JSON: {error}") from error
    settings_file = file.with_name("tokenizer_config.json")
    settings = read_object(settings_file, required=False)
    direction = _part(found, "truncation").get("direction", "Right")
    if direction != "Right" and settings.get("truncation_side") is None:
        raise CheckpointError(
            f'{file}: truncation.direction: expected "Right", found {shown(direction)}',
            hint="a bundle cuts off the end of a text that is too long: set Right, or truncation to null",
        )
    config = read_object(file.with_name("config.json"), required=False)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if str(kind).startswith(_OF_WORDS) or (
        kind is None and config.get("model_type") in _OF_WORDS_TOO
    ):
        _check_normalizer(file, _part(found, "normalizer"), settings_file, settings)
    if config.get("model_type") == "clip":
        _check_pooled(file, found, vocab_size - 1)
    if layout.scores or layout.has_segments is False:
        return
    single = _part(found, "post_processor").get("single")
    for piece in single if isinstance(single, list) else ():
        for name, value in piece.items():
            if value["type_id"] != 0:
                raise CheckpointError(
                    f"{file}: post_processor.single: expected type_id 0 everywhere, found "
                    f"{shown(value['type_id'])} of {name} {shown(value['id'])}",
                    hint="an embedding takes all tokens as of the first segment: set type_id to 0",
                )


def check_prefix_space(file: Path, content: bytes) -> None:
    """Check that a tokenizer.json puts a space before texts where transformers does, and only there.

    Raises:
        CheckpointError: it does otherwise than tokenizer_config.json beside it says.
    """
    settings_file, key = file.with_name("tokenizer_config.json"), "add_prefix_space"
    settings = read_object(settings_file, required=False)
    config = read_object(file.with_name("config.json"), required=False)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if kind is None and config.get("model_type") == "roberta":
        kind = "RobertaTokenizer"
    splits, wanted = _part(json.loads(content), "pre_tokenizer"), bool(settings.get(key, False))
    if not str(kind).startswith(_OF_BYTES) or splits.get("type") != "ByteLevel":
        return
    if splits.get(key, True) is not wanted:
        where = f"{file}: pre_tokenizer.{key}"
        raise _differing(where, wanted, f"the {key} of {settings_file}", splits.get(key))


def _check_normalizer(
    file: Path, normalizer: Mapping[str, Any], settings_file: Path, settings: Mapping[str, Any]
) -> None:
    """Refuse a BertNormalizer that differs from the one that transformers makes of its settings."""
    if normalizer.get("type") != "BertNormalizer":
        return
    found = {key: normalizer.get(key, default) for key, (_, default) in _NORMALIZED.items()}
    wanted = {key: settings.get(name, default) for key, (name, default) in _NORMALIZED.items()}
    for each in (found, wanted):  # without a value accents go where letters become small
        if each["strip_accents"] is None:
            each["strip_accents"] = each["lowercase"]
    for key, (name, _) in _NORMALIZED.items():
        if bool(found[key]) is not bool(wanted[key]):
            where = f"{file}: normalizer.{key}"
            of = f"the {name} of {settings_file}"
            raise _differing(where, bool(wanted[key]), of, normalizer.get(key))


def _differing(where: str, wanted: bool, of: str, found: object) -> CheckpointError:
    return CheckpointError(
        f"{where}: expected {shown(wanted)}, {of}, found {shown(found)}",
        hint="a bundle follows tokenizer.json, transformers tokenizer_config.json: correct the wrong one",
    )


def _check_pooled(file: Path, content: Mapping[str, Any], end: int) -> None:
    """Refuse texts that do not end with the token at whose place CLIP pools."""
    processor = _part(content, "post_processor")
    last: Any = None
    for part in processor.get("processors", [processor]):
        if part.get("type") in ("RobertaProcessing", "BertProcessing"):
            last = part["sep"][1]
        if part.get("type") == "TemplateProcessing":
            token = part["single"][-1].get("SpecialToken") if part["single"] else None
            last = token and part["special_tokens"][token["id"]]["ids"][-1]
    if last != end:
        raise CheckpointError(
            f"{file}: post_processor: expected {end}, the last of the vocabulary, at the end of texts, found "
            f"{shown(last)}",
            hint="CLIP pools at that token: take the tokenizer.json that belongs to the model",
        )


def _part(content: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    part = content.get(key)
    return part if isinstance(part, dict) else {}


def check_tokenizer(path: Path, content: bytes, vocab_size: int) -> None:
    """Load a tokenizer and encode and decode a set of texts, within limits of time and memory.

    `path` is the file, for errors, and `vocab_size` the number of tokens of the model.

    Raises:
        CheckpointError: the library cannot read the file, fails on a text, or does not end, or a text has a
            token that the model does not have.
    """
    seconds = _CHECK_CPU_SECONDS + len(content) // _CHECKED_BYTES_A_SECOND
    arguments = (
        json.dumps(sys.path),
        str(path),
        *map(str, (vocab_size, seconds, _CHECK_MEMORY_BYTES)),
    )
    try:
        status, output, _ = run_child(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
            content,
            # Each thread would reserve memory, which is limited.
            env={**os.environ, "RUST_BACKTRACE": "0", "RAYON_NUM_THREADS": "1"},
            seconds=_CHECK_WALL_SECONDS + seconds,
        )
    except OSError as error:
        raise CheckpointError(f"cannot start {sys.executable}: {error.strerror}") from error
    lines = output.decode("utf-8", "replace").splitlines()
    if status == 0 and lines:
        problem: str | None = json.loads(lines[-1])
        if problem is None:
            return
    else:
        doing = lines[-1] if lines else "starting"
        how = f"exit status {status}"
        if status is None or status in (-signal.SIGXCPU, -signal.SIGKILL):
            how = f"no end after {seconds} s"
        elif status < 0:
            how = f"a crash with signal {-status}"
        problem = f"{path}: expected a tokenizer that takes any text, found {how} while {doing}"
    raise CheckpointError(
        problem,
        hint="mend or replace the file: a bundle that holds it would fail where it runs. Without it, "
        "prompts are token ids",
    )


def _main(path: str, vocab_size: str, seconds: str, memory_bytes: str) -> None:
    """Print each step, and at the end the problem or null as JSON."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    problem = _problem(sys.stdin.buffer.read(), path, int(vocab_size))
    print(json.dumps(problem), flush=True)


def _problem(content: bytes, path: str, vocab_size: int) -> str | None:
    from prejit.runtime.text.tokenizer import Tokenizer  # only this process needs the library

    doing = "reading it"
    try:
        print(doing, flush=True)
        tokenizer = Tokenizer(content, path)
        # Tokens that were added do not count: some published models have no embedding for them.
        largest = max(tokenizer.library.get_vocab(with_added_tokens=False).values(), default=-1)
        if largest >= vocab_size:
            return (
                f"{path}: expected token ids of 0 to {vocab_size - 1}, which the model has; found "
                f"{largest}"
            )
        for name, text in _PROBES.items():
            doing = f"encoding {name}"
            print(doing, flush=True)
            for special in (False, True):
                ids = tokenizer.encode(text, add_special_tokens=special)
                if tokenizer.encode_batch([text], add_special_tokens=special) != [ids]:
                    return f"{path}: expected the same tokens each time, found others while {doing}"
            if max(ids, default=0) >= vocab_size:
                return (
                    f"{path}: expected token ids of 0 to {vocab_size - 1}, which the model has; found "
                    f"{max(ids)} while {doing}"
                )
            if text.isascii() and text and not ids:
                return f"{path}: expected at least one token, found none while {doing}"
            doing = f"decoding the tokens of {name}"
            print(doing, flush=True)
            tokenizer.decode(ids)
            stream = tokenizer.stream(ids[:1])
            for token_id in ids[1:]:
                stream.push(token_id)
            stream.finish()
        doing = "decoding all tokens"
        print(doing, flush=True)
        for first in range(0, vocab_size, _DECODED_AT_ONCE):
            tokenizer.decode(range(first, min(first + _DECODED_AT_ONCE, vocab_size)))
    except PrejitError as error:
        said = f"{error}"
        return said if said.startswith(f"{path}: ") else f"{path}: {doing}: {said}"
    return None
