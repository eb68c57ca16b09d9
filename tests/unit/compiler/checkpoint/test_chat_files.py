"""Chat templates are found where transformers finds them; one that does not parse fails the build."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from prejit.compiler.checkpoint.chat_files import read_chat
from prejit.runtime.errors import CheckpointError

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
ADDED = {"content": "</s>", "special": True}
SPELLED = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", **ADDED}}
NAMED = [
    {"name": "default", "template": "A"},
    {"name": "tool_use", "template": "B {{ eos_token }}"},
]
PRINTS_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}"


def model(directory: Path, config: dict[str, Any] | None, **files: str) -> Path:
    """A model directory: tokenizer_config.json, and others with their names spelled `a__b_json`."""
    shutil.copy(DEMO, directory / "tokenizer.json")
    config = None if config is None else {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    for name, text in {"tokenizer_config_json": json.dumps(config), **files}.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        path = directory / f"{stem}.{suffix}"
        path.parent.mkdir(exist_ok=True)
        if text != "null":
            path.write_text(text)
    return directory


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({**SPELLED, "chat_template": NAMED}, {}),
        (
            {**SPELLED, "chat_template": "config"},
            {"chat_template_jinja": "file\r\n{{ eos_token }}"},
        ),
        (
            {**SPELLED, "chat_template": "config"},
            {"chat_template_jinja": "file", "additional_chat_templates__tool_use_jinja": "tools"},
        ),
        ({**SPELLED, "chat_template": NAMED}, {"additional_chat_templates__tool_use_jinja": "x"}),
        (
            {**SPELLED, "chat_template": PRINTS_TOKENS},
            {"special_tokens_map_json": json.dumps({"eos_token": "<end>", "pad_token": ADDED})},
        ),
        (
            {
                **{"chat_template": PRINTS_TOKENS, "bos_token": "<s>"},
                "added_tokens_decoder": {"0": {"content": "<s>", "special": True}},
            },
            {"special_tokens_map_json": json.dumps({"eos_token": "ignored"})},
        ),
        ({}, {}),
    ],
)
def test_templates_and_tokens_are_those_of_transformers(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str]
) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = model(tmp_path, config, **files)
    theirs = PreTrainedTokenizerFast.from_pretrained(directory)
    found = read_chat(directory)
    expected = theirs.chat_template
    if isinstance(expected, str):
        expected = {"default": expected}
    assert (found.templates if found else None) == expected
    if found is not None:
        said = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
        assert found.special_tokens == said


def test_a_template_of_a_processor_counts_where_there_is_no_other(tmp_path: Path) -> None:
    of_processor = json.dumps({"chat_template": "processor"})
    directory = model(tmp_path, {}, chat_template_json=of_processor)
    assert read_chat(directory).templates == {"default": "processor"}  # type: ignore[union-attr]
    model(tmp_path, {"chat_template": "config"})
    assert read_chat(directory).templates == {"default": "config"}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"chat_template_jinja": "a\n{% if %}"}, r"chat_template\.jinja: line 2: "),
        (
            {"additional_chat_templates__rag_jinja": "{{ x"},
            r"additional_chat_templates/rag\.jinja: line 1: ",
        ),
        (
            {"tokenizer_config_json": json.dumps({"chat_template": "x\n\n{% endfor %}"})},
            r"tokenizer_config\.json: template 'default', line 3: ",
        ),
        (
            {"tokenizer_config_json": json.dumps({"chat_template": "\ud800"})},
            r"tokenizer_config\.json: template 'default', .*surrogates",
        ),
        (
            {"tokenizer_config_json": json.dumps({"chat_template": [{"name": "x"}]})},
            "a list of names and templates: KeyError",
        ),
        ({"tokenizer_config_json": json.dumps({"chat_template": 3})}, "expected text or a list"),
        (
            {"tokenizer_config_json": json.dumps({"chat_template": [{"name": 1, "template": 2}]})},
            "a name or template is no",
        ),
    ],
)
def test_a_template_that_is_none_is_told(tmp_path: Path, files: dict[str, str], says: str) -> None:
    with pytest.raises(CheckpointError, match=says):
        read_chat(model(tmp_path, {}, **files))


def test_a_template_that_is_no_text_fails_the_build(tmp_path: Path) -> None:
    (model(tmp_path, {}) / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected UTF-8"):
        read_chat(tmp_path)
