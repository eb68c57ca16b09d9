"""Read the chat templates of a model directory, from the files that transformers reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prejit.compiler.base.json_file import read_object
from prejit.compiler.models.layers.config_checks import silence_transformers
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.checks.seldom_parts import Chat

_DEFAULT = "default"
_TOKEN = re.compile(r"\b\w+_token\b")
"""A name in a template that may be a special token's."""
_GENERAL = ("PreTrainedTokenizerFast", "PreTrainedTokenizer", "TokenizersBackend")
"""Classes of tokenizers that have no special tokens by default."""


def read_chat(directory: Path) -> Chat | None:
    """Return chat templates and special tokens, as transformers' `from_pretrained` does.

    The first of these that exists is read: chat_template.jinja with additional_chat_templates/NAME.jinja;
    `chat_template` of tokenizer_config.json, a text or a list of {"name": ..., "template": ...};
    chat_template.json (for models that were published with a processor).

    Returns:
        The templates, or None if the model has none.

    Raises:
        CheckpointError: a file cannot be read, or a template does not parse; the error names file and line.
    """
    found = (
        _jinja_files(directory)
        or _json_templates(directory / "tokenizer_config.json")
        or _json_templates(directory / "chat_template.json")
    )
    if not found:
        return None
    from prejit.runtime.text.sandbox import check_template  # only models with a template need Jinja

    for name, (path, source) in found.items():
        try:
            source.encode()  # JSON can hold surrogates, which UTF-8 cannot
            check_template(source)
        except ValueError as error:
            which = "" if path.suffix == ".jinja" else f" template {name!r},"
            raise CheckpointError(
                f"{path}:{which} {error}",
                hint="the model's chat template must parse as Jinja; mend it in the model directory",
            ) from error
    templates = {name: source for name, (_, source) in found.items()}
    tokens = special_tokens(directory)
    settings = read_object(directory / "tokenizer_config.json", required=False)
    named = {name for source in templates.values() for name in _TOKEN.findall(source)}
    if missing := named - tokens.keys() - settings.keys():
        of_class = _tokens_of_class(directory, settings)
        tokens |= {name: of_class[name] for name in sorted(missing & of_class.keys())}
    return Chat(templates, tokens)


def _tokens_of_class(directory: Path, settings: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the special tokens that transformers' class of a tokenizer has by default."""
    if not (directory / "tokenizer.json").is_file() or settings.get("tokenizer_class") in _GENERAL:
        return {}
    silence_transformers()
    from transformers import AutoTokenizer  # takes seconds, and files seldom leave names out

    try:
        found = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).special_tokens_map
    except Exception:  # a class with code of its own, a model of our users: such have no defaults
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)}


def _jinja_files(directory: Path) -> dict[str, tuple[Path, str]]:
    files = {_DEFAULT: directory / "chat_template.jinja"}
    extra = directory / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(extra.glob("*.jinja"))}
    return {name: (path, _text(path)) for name, path in files.items() if path.is_file()}


def _json_templates(path: Path) -> dict[str, tuple[Path, str]]:
    settings = read_object(path, required=False).get("chat_template")
    if settings is None:
        return {}
    if isinstance(settings, str):
        return {_DEFAULT: (path, settings)}
    try:
        named = {entry["name"]: (path, entry["template"]) for entry in settings}
        if not all(isinstance(x, str) for name, (_, text) in named.items() for x in (name, text)):
            raise TypeError("a name or template is no text")
    except (TypeError, LookupError) as error:
        raise CheckpointError(
            f"{path}: chat_template: expected text or a list of names and templates: {error!r:.80}"
        ) from error
    return named


def special_tokens(directory: Path) -> dict[str, str]:
    """Return `bos_token` and others; special_tokens_map.json is read only beside files of old versions."""
    settings = read_object(directory / "tokenizer_config.json", required=False)
    if "added_tokens_decoder" not in settings:
        settings |= read_object(directory / "special_tokens_map.json", required=False)
    for key in ("model_specific_special_tokens", "extra_special_tokens"):  # or a list without names
        settings |= named if isinstance(named := settings.get(key), dict) else {}
    tokens = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read it: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: expected UTF-8: {error}") from error
