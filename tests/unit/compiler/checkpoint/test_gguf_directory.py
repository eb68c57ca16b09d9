"""A GGUF file without config.json and tokenizer.json: both are made from its metadata."""

import json
import os

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from tokenizers.processors import TemplateProcessing

from prejit.compiler.checkpoint.checkpoint import open_checkpoint
from prejit.compiler.checkpoint.gguf_config import config_of
from prejit.compiler.checkpoint.gguf_tensors import read_gguf
from prejit.compiler.checkpoint.gguf_tokenizer import tokenizer_of
from prejit.compiler.checkpoint.model_source import model_directory
from prejit.compiler.models import config_file
from prejit.runtime.errors import CheckpointError

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
TEXT = 'def f(x):\n    return {"é": x ** 2, "你好": [1.5e-3, "😀"]}  # 12345 it\'s   OK?\n' * 5
TEXTS = (
    *(TEXT, "", " ", "  hi", "hello  world \n\n\n x", "e\u0301 caf\u00e9", "123456", "<s>a</s> b"),
    *("a<think> b </think>", "don't DON'T we'LL", "\t\tx", "你好。世界 こんにちは"),
    *("<|end|>\n\nx", "<0x0A>"),
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
SPECIAL = ["<unk>", "<s>", "</s>", "<|end|>"]


def byte_level(split, *, ignore_merges=False, normalizer=None, first=None):
    """A tokenizer as Llama 3 and Qwen publish theirs."""
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    bytes_of = pre.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre.Sequence([pre.Split(Regex(split), "isolated"), bytes_of])
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    options = {"initial_alphabet": pre.ByteLevel.alphabet(), "show_progress": False}
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=400, **options))
    made.add_special_tokens(SPECIAL)
    made.add_tokens([AddedToken(each, normalized=False) for each in ("<think>", "</think>")])
    if first is not None:
        made.post_processor = TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, made.token_to_id(first))]
        )
    return made


def sentence_piece(*, phi=False, gemma=False):
    """A tokenizer as Llama 2, Mistral, Phi 3 and Gemma publish theirs."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    spaced = normalizers.Replace(" ", "▁")
    made.normalizer = spaced if gemma else normalizers.Sequence([normalizers.Prepend("▁"), spaced])
    strip = decoders.Strip(" ", 1, 0)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    made.decoder = decoders.Sequence(parts[:3] if gemma else parts)
    tokens = [*SPECIAL[:3], *(f"<0x{each:02X}>" for each in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=tokens, show_progress=False)
    made.train_from_iterator([TEXT.replace("😀", "").replace("你", "")], trainer)
    content = json.loads(made.to_str())
    content["added_tokens"] = [each for each in content["added_tokens"] if each["id"] < 3]
    content["added_tokens"][2]["rstrip"] = phi
    made = Tokenizer.from_str(json.dumps(content))
    made.add_special_tokens([AddedToken("<|end|>", normalized=False, rstrip=phi)])
    made.post_processor = TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return made


def add_tokenizer(writer, kind, tokenizer, name):
    """Write a tokenizer as llama.cpp's converter does."""
    content = json.loads(tokenizer.to_str())
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(place) for place in range(size)]
    types = [1] * size
    for each in content["added_tokens"]:
        types[each["id"]] = 3 if each["special"] else 4
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(name)
    merges = content["model"]["merges"]
    if kind == "llama":
        for place, token in enumerate(tokens):
            if token.startswith("<0x"):
                types[place] = 6
            if name == "gemma" and token != "▁" and set(token) == {"▁"}:
                tokens[place], types[place] = token.replace("▁", " "), 4
        types[0] = 2
        order = {"".join(each): -float(place) for place, each in enumerate(merges)}
        writer.add_token_scores([order.get(each, -1e6) for each in tokens])
    else:
        writer.add_token_merges([" ".join(each) for each in merges])
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for key, token in (("bos", "<s>"), ("eos", "</s>"), ("eot", "<|end|>")):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokenizer.token_to_id(token))
    writer.add_chat_template("{{ bos_token }}{{ messages }}")


def write(path, architecture, config, tokenizer=None, *, tensors=(), **more):
    """Write a file with a model's metadata, as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, architecture)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim", width // heads)
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in {
        **{"context_length": config["max_position_embeddings"], "embedding_length": width},
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        **dict.fromkeys(("attention.key_length", "attention.value_length"), size),
        "rope.dimension_count": size,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        **more,
    }.items():
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    if tokenizer is not None:
        add_tokenizer(writer, *tokenizer)
    writer.add_tensor("token_embd.weight", np.zeros((config["vocab_size"], width), np.float32))
    for name, values in dict(tensors).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


TOKENIZERS = {
    "llama3": ("gpt2", byte_level(LLAMA3, ignore_merges=True, first="<s>"), "llama-bpe"),
    "qwen2": ("gpt2", byte_level(QWEN2, normalizer=normalizers.NFC()), "qwen2"),
    "llama2": ("llama", sentence_piece(), "default"),
    "phi3": ("llama", sentence_piece(phi=True), "default"),
    "gemma2": ("llama", sentence_piece(gemma=True), "gemma"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_of_a_file_gives_other_tokens_than_the_published_one(name, tmp_path):
    architecture = name if name in ("phi3", "gemma2") else "llama"
    more = {"attention.sliding_window": 8} if architecture != "llama" else {}
    write(tmp_path / "m.gguf", architecture, SIZES, TOKENIZERS[name], **more)
    directory = model_directory(tmp_path / "m.gguf")
    os.utime(directory, (0, 0))
    assert model_directory(tmp_path / "m.gguf") == directory
    assert directory.stat().st_mtime > 0, "its last use, for prejit gc"
    found, published = Tokenizer.from_file(f"{directory}/tokenizer.json"), TOKENIZERS[name][1]
    for text in TEXTS:
        for special in (False, True):
            ids = published.encode(text, add_special_tokens=special).ids
            assert found.encode(text, add_special_tokens=special).ids == ids, text
        assert found.decode(ids) == published.decode(ids), text
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    assert settings["chat_template"] == "{{ bos_token }}{{ messages }}"
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


def scaled(kind, **more):
    return {"rope_type": kind, "rope_theta": 500000.0, **more}


def llama3_factors(factor, pairs):
    """The factors of frequencies that llama.cpp's converter writes (convert_hf_to_gguf.py, LlamaModel)."""
    found = []
    for pair in range(pairs):
        length = 2 * np.pi * 500000.0 ** (pair / pairs)
        smooth = (8192 / length - 1) / 3
        inner = 1 / ((1 - smooth) / factor + smooth)
        found.append(1 if length < 8192 / 4 else factor if length > 8192 else inner)
    return found


BASE = {"rope.freq_base": 500000.0}
SCALING = "rope.scaling."
LONG = {"long_factor": [1.5, 2.0, 4.0], "short_factor": [1.0, 1.25, 1.5]}
CONFIGS = {
    "llama": (
        "llama",
        {"rope_parameters": scaled("llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
                                   original_max_position_embeddings=8192), "mlp_bias": True},
        {**BASE, "vocab_size": 32, "expert_count": 0},
        {"rope_freqs.weight": llama3_factors(32.0, 32), "blk.0.ffn_gate.bias": [0], "output.weight": [0]},
    ),
    "qwen2": (
        "qwen2",
        {"rope_parameters": scaled("yarn", factor=4.0, original_max_position_embeddings=32)},
        {**BASE, f"{SCALING}type": "yarn", f"{SCALING}factor": 4.0, f"{SCALING}original_context_length": 32},
        {},
    ),
    "qwen3": ("qwen3", {"rope_parameters": scaled("default"), "attention_bias": True}, BASE,
              {"blk.0.attn_q.bias": [0]}),
    "gemma2": (
        "gemma2",
        {"sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
         "query_pre_attn_scalar": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        {},
    ),
    "gemma3_text": (
        "gemma3",
        {"sliding_window": 16, "query_pre_attn_scalar": 64, "rope_parameters": {
            "full_attention": scaled("linear", factor=8.0),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
        {**BASE, "attention.sliding_window": 16, f"{SCALING}type": "linear", f"{SCALING}factor": 8.0},
        {},
    ),
    "phi3": (
        "phi3",
        {"sliding_window": None, "original_max_position_embeddings": 32, "rope_parameters": scaled(
            "longrope", partial_rotary_factor=0.75, original_max_position_embeddings=32, **LONG)},
        {**BASE, "attention.sliding_window": 128, f"{SCALING}original_context_length": 32,
         f"{SCALING}attn_factor": 1.1832, "rope.dimension_count": 6},
        {"rope_factors_long.weight": LONG["long_factor"], "rope_factors_short.weight": LONG["short_factor"]},
    ),
}  # fmt: skip
SIZES = {
    **{"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    "rms_norm_eps": 1e-5,
}


@pytest.mark.parametrize("family", CONFIGS)
def test_metadata_gives_another_model_than_the_published_config_json(family, tmp_path):
    architecture, more, metadata, tensors = CONFIGS[family]
    size = 8 if family in ("phi3", "qwen2") else 64
    config = {"model_type": family, **SIZES, "tie_word_embeddings": family != "llama", **more}
    config |= {} if size == 8 else {"head_dim": size}
    config |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    file, sized = tmp_path / "m.gguf", SIZES | {"head_dim": size}
    write(file, architecture, sized, TOKENIZERS["qwen2"], tensors=tensors, **metadata)
    wanted = config_file.load_config(tmp_path / "published").to_dict()
    found = config_file.load_config(model_directory(file)).to_dict()
    ids = TOKENIZERS["qwen2"][1].token_to_id
    wanted |= {"bos_token_id": ids("<s>"), "eos_token_id": sorted(map(ids, ("</s>", "<|end|>")))}
    wanted["_name_or_path"] = found["_name_or_path"]
    assert found == wanted


def test_a_file_that_lacks_something_is_read(tmp_path):
    file = tmp_path / "m.gguf"
    factors = {"rope_freqs.weight": [1.0, 1.0, 2.0, 3.0]}
    long = {f"rope_factors_{each}.weight": [1.0, 2.0, 3.0, 4.0] for each in ("long", "short")}
    smollm, other = (*TOKENIZERS["qwen2"][:2], "smollm"), 'general.architecture: .* found "granite"'
    for architecture, more, tokenizer, said in (
        ("llama", {"attention.scale": 2.0}, None, "unknown llama.attention.scale"),
        ("llama", {"embedding_length": None}, None, "missing llama.embedding_length"),
        ("llama", {"rope.dimension_count": 4, "attention.key_length": 8}, None, "expected 8, found 4"),
        ("llama", {f"{SCALING}type": "su", f"{SCALING}factor": 2.0}, None, 'found "su"'),
        ("llama", {}, None, 'tokenizer.ggml.model: expected "gpt2" or "llama", found null'),
        ("llama", {}, smollm, 'found "smollm"'),
        ("granite", {}, None, other),
        ("llama", {"tensors": factors}, None, "expected the factors of a Llama 3, found others"),
        ("llama", {"tensors": factors, f"{SCALING}factor": 2.0}, None, "expected ones beside rope.scaling"),
        ("llama", {"tensors": long}, None, "rope_factors_long.weight: expected it in phi3 alone"),
    ):  # fmt: skip
        write(file, architecture, SIZES | {"head_dim": 8}, tokenizer, **more)
        with pytest.raises(CheckpointError, match=rf"^{file}: .*{said}") as caught:
            model_directory(file)
        assert "put config.json and tokenizer.json beside the file" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama3", "bos_token_id", "<s>"),
        ("llama3", "bos_token_id", -1),
        ("llama3", "eot_token_id", [3]),
        ("llama3", "tokens", lambda those: [*range(len(those))]),
        ("llama3", "token_type", lambda those: [1.5] * len(those)),
        ("llama3", "merges", lambda those: [*those[:3], "ab"]),
        ("llama3", "merges", lambda those: [*those[:3], "no token"]),
        ("llama2", "scores", lambda those: those[:-1]),
        ("llama2", "scores", lambda those: ["a"] * len(those)),
    ],
)
def test_a_value_of_another_type_is_refused_by_its_name(name, key, value, tmp_path):
    file, key = tmp_path / "m.gguf", f"tokenizer.ggml.{key}"
    write(file, "llama", SIZES, TOKENIZERS[name])
    metadata, tensors = read_gguf(file, arrays=True)
    changed = {**metadata, key: value(metadata[key]) if callable(value) else value}
    with pytest.raises(CheckpointError, match=r"m\.gguf: tokenizer\.ggml") as caught:  # noqa: PT012
        config_of(file, changed, tensors)
        tokenizer_of(file, changed)
    assert "put config.json and tokenizer.json beside the file" in caught.value.hint


def test_a_file_beside_it_is_not_read_and_texts_begin_if_it_names_no_token(tmp_path):
    file = tmp_path / "m.gguf"
    write(file, "llama", SIZES, TOKENIZERS["llama2"])
    metadata, _ = read_gguf(file, arrays=True)
    # As GGUFWriter.add_chat_template writes one for tools, which transformers takes where there are some.
    metadata["tokenizer.chat_templates"] = ["tool_use"]
    metadata["tokenizer.chat_template.tool_use"] = "{{ tools }}"
    assert tokenizer_of(file, metadata)[1]["chat_template"] == [
        {"name": "default", "template": "{{ bos_token }}{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    del metadata["tokenizer.ggml.bos_token_id"]
    without, _ = tokenizer_of(file, metadata)  # as in llama.cpp
    assert Tokenizer.from_str(json.dumps(without)).encode("a").ids[0] == 1
    made = model_directory(file)
    assert model_directory(file) == made
    assert sorted(each.name for each in made.iterdir()) == [
        *("config.json", "m.gguf", "tokenizer.json", "tokenizer_config.json")
    ]
    assert open_checkpoint(made, weights=made / "m.gguf").files[1].read_bytes() == file.read_bytes()
    (tmp_path / "tokenizer.json").write_text("{}")
    beside = model_directory(file)
    assert (beside / "tokenizer.json").read_text() == "{}"
    assert not (beside / "tokenizer_config.json").exists()
    (tmp_path / "config.json").write_text("{}")
    assert model_directory(file) == tmp_path
