"""The chat templates of a model directory, where transformers looks for them."""

from __future__ import annotations

from pathlib import Path

from prejit.compiler.base.json_file import read_object
from prejit.runtime.errors import CheckpointError
from prejit.runtime.format.schema import Chat

_DEFAULT = "default"


def read_chat(directory: Path) -> Chat | None:
    """Reads chat templates and special tokens, as transformers' `from_pretrained` does.

    The first of these that is there: chat_template.jinja with additional_chat_templates/NAME.jinja;
    `chat_template` of tokenizer_config.json, text or a list of {"name": ..., "template": ...};
    chat_template.json (of models that were published with a processor).

    Args:
        directory: in the Hugging Face layout.

    Returns:
        The templates, or None where the model has none.

    Raises:
        CheckpointError: a file cannot be read, or a template does not parse; names file and line.
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
            source.encode()  # JSON can spell what is no text
            check_template(source)
        except ValueError as error:
            which = "" if path.suffix == ".jinja" else f" template {name!r},"
            raise CheckpointError(
                f"{path}:{which} {error}",
                hint="the model's chat template must parse as Jinja; mend it in the model directory",
            ) from error
    templates = {name: source for name, (_, source) in found.items()}
    return Chat(templates, _special_tokens(directory))


def _jinja_files(directory: Path) -> dict[str, tuple[Path, str]]:
    files = {_DEFAULT: directory / "chat_template.jinja"}
    extra = directory / "additional_chat_templates"
    files |= {path.stem: path for path in sorted(extra.glob("*.jinja"))}
    return {name: (path, _text(path)) for name, path in files.items() if path.is_file()}


def _json_templates(path: Path) -> dict[str, tuple[Path, str]]:
    said = read_object(path, required=False).get("chat_template")
    if said is None:
        return {}
    if isinstance(said, str):
        return {_DEFAULT: (path, said)}
    try:
        named = {entry["name"]: (path, entry["template"]) for entry in said}
        if not all(isinstance(x, str) for name, (_, text) in named.items() for x in (name, text)):
            raise TypeError("a name or template is no text")
    except (TypeError, LookupError) as error:
        raise CheckpointError(
            f"{path}: chat_template: expected text or a list of names and templates: {error!r:.80}"
        ) from error
    return named


def _special_tokens(directory: Path) -> dict[str, str]:
    """`bos_token` and its like; special_tokens_map.json counts only beside files of old versions."""
    said = read_object(directory / "tokenizer_config.json", required=False)
    if "added_tokens_decoder" not in said:
        said |= read_object(directory / "special_tokens_map.json", required=False)
    tokens = {}
    for name, token in said.items():
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
