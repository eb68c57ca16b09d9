"""Chat templates are found where transformers finds them; one that does not parse fails the build."""

import json
import shutil
from pathlib import Path

import pytest

from prejit.compiler.models.chat_files import read_chat
from prejit.runtime.errors import CheckpointError

DEMO = Path(__file__).resolve().parents[4] / "manifests" / "demo-model" / "tokenizer.json"
ADDED = {"content": "</s>", "special": True}
SPELLED = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", **ADDED}}
TEMPLATES = {"default": "A", "tool_use": "B {{ eos_token }}"}
NAMED = [{"name": name, "template": text} for name, text in TEMPLATES.items()]
PRINTS_TOKENS = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}"


def model(directory, config, **files):
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


TOOLS = "additional_chat_templates__tool_use_jinja"
BEGIN = {"added_tokens_decoder": {"0": {"content": "<s>", "special": True}}, "bos_token": "<s>"}
END, MORE = {"eos_token": "<end>", "pad_token": ADDED}, {"image_token": "<b>"}


@pytest.mark.parametrize(
    ("template", "more", "files"),
    [
        (NAMED, SPELLED, {}),
        ("config", SPELLED, {"chat_template_jinja": "file\r\n{{ eos_token }}"}),
        ("config", SPELLED, {"chat_template_jinja": "file", TOOLS: "tools"}),
        (NAMED, SPELLED, {TOOLS: "x"}),
        (PRINTS_TOKENS, SPELLED, {"special_tokens_map_json": json.dumps(END)}),
        (PRINTS_TOKENS, BEGIN, {"special_tokens_map_json": '{"eos_token": "ignored"}'}),
        (PRINTS_TOKENS, {**SPELLED, "image_token": "<a>", "extra_special_tokens": MORE}, {}),
        (PRINTS_TOKENS, {"model_specific_special_tokens": {"boi_token": "<c>"}}, {}),
        (None, {}, {}),
    ],
)
def test_templates_and_tokens_are_those_of_transformers(tmp_path, template, more, files):
    from transformers import PreTrainedTokenizerFast

    config = more if template is None else {**more, "chat_template": template}
    theirs = PreTrainedTokenizerFast.from_pretrained(model(tmp_path, config, **files))
    found, expected = read_chat(tmp_path), theirs.chat_template
    if isinstance(expected, str):
        expected = {"default": expected}
    assert (found.templates if found else None) == expected
    if found is not None:
        said = {k: v for k, v in theirs.special_tokens_map.items() if isinstance(v, str)}
        assert found.special_tokens == said


@pytest.mark.parametrize(
    ("more", "model_type"),
    [
        ({"tokenizer_class": "GPT2Tokenizer"}, "gpt2"),
        ({"tokenizer_class": "Qwen2TokenizerFast", "eos_token": "<end>"}, "qwen2"),
        ({"tokenizer_class": "GPT2Tokenizer", "bos_token": None}, "gpt2"),
        ({"tokenizer_class": None}, "gpt2"),
        # For olmo2 transformers takes another class, which has no tokens by default.
        ({"tokenizer_class": "GPT2Tokenizer"}, "olmo2"),
        ({"tokenizer_class": "OwnTokenizer"}, "own"),
    ],
)
def test_tokens_that_no_file_names_are_those_of_the_class(tmp_path, more, model_type):
    from transformers import AutoTokenizer

    config = {"chat_template": PRINTS_TOKENS, **more}
    model(tmp_path, config, config_json=json.dumps({"model_type": model_type}))
    found = read_chat(tmp_path).special_tokens
    try:
        theirs = AutoTokenizer.from_pretrained(tmp_path).special_tokens_map
    except ValueError:  # no class of that name
        theirs = {}
    named = ("bos_token", "eos_token", "pad_token", "unk_token")
    assert found == {k: v for k, v in theirs.items() if k in named and isinstance(v, str)}
    assert bool(found) is (model_type in ("gpt2", "qwen2"))


def test_a_template_of_a_processor_counts_where_there_is_no_other(tmp_path):
    of_processor = json.dumps({"chat_template": "processor"})
    directory = model(tmp_path, {}, chat_template_json=of_processor)
    assert read_chat(directory).templates == {"default": "processor"}
    model(tmp_path, {"chat_template": "config"})
    assert read_chat(directory).templates == {"default": "config"}


WRONG = [  # a file, its text or the template in the configuration
    ("chat_template_jinja", "a\n{% if %}", r"chat_template\.jinja: line 2: "),
    ("additional_chat_templates__rag_jinja", "{{ x", r"_chat_templates/rag\.jinja: line 1: "),
    ("", "x\n\n{% endfor %}", r"tokenizer_config\.json: template 'default', line 3: "),
    ("", "\ud800", r"tokenizer_config\.json: template 'default', .*surrogates"),
    ("", [{"name": "x"}], "a list of names and templates: KeyError"),
    ("", 3, "expected text or a list"),
    ("", [{"name": 1, "template": 2}], "a name or template is no"),
]


@pytest.mark.parametrize(("file", "template", "says"), WRONG)
def test_a_wrong_template_is_told(tmp_path, file, template, says):
    files = {file: template} if file else {}
    with pytest.raises(CheckpointError, match=says):
        read_chat(model(tmp_path, {} if file else {"chat_template": template}, **files))
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: expected UTF-8"):
        read_chat(tmp_path)
