"""A tiny BERT with random weights whose words are letters, for tests of encoders. No JAX."""

import json
import shutil
import zlib
from pathlib import Path
from string import ascii_lowercase

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordPiece

from .parity.encoder_cases import Case


def bert_config(**changes):
    config = {
        **{"model_type": "bert", "architectures": ["BertModel"], "hidden_act": "gelu"},
        **{"hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 1},
        **{"num_attention_heads": 3, "vocab_size": 30, "max_position_embeddings": 64},
        **{"type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0},
    }
    return config | changes


def write_encoder(directory, *, pieces=False, changes=None, **modules):
    """Write the checkpoint and its tokenizer, which is returned."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *ascii_lowercase]
    names += [f"##{letter}" for letter in ascii_lowercase * pieces]
    config = bert_config(**{"vocab_size": len(names), **(changes or {})})
    Case("tiny", config, 7, **modules).write(directory)
    made = Tokenizer(WordPiece({name: at for at, name in enumerate(names)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.save(str(directory / "tokenizer.json"))
    return made


def write_scorer(directory, labels=1):
    """Write a cross-encoder of letters: a BERT with the head of BertForSequenceClassification."""
    changes = {
        "architectures": ["BertForSequenceClassification"],
        "id2label": {str(label): f"label {label}" for label in range(labels)},
    }
    write_encoder(directory, changes=changes, published="bert.")
    file = directory / "model.safetensors"
    tensors = load_file(file)
    for name, shape in {"bert.pooler.dense": (12, 12), "classifier": (labels, 12)}.items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        tensors[f"{name}.weight"] = random.standard_normal(shape, dtype=np.float32)
        tensors[f"{name}.bias"] = random.standard_normal(shape[:1], dtype=np.float32)
    save_file(tensors, file, metadata={"format": "pt"})
    said = '{"tokenizer_class": "BertTokenizer", "model_max_length": 16}'
    (directory / "tokenizer_config.json").write_text(said)


TEMPLATE = (
    '{%- set s = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}'
    "x {{ s | default('a z') }} q {{ (messages | selectattr('role', 'eq', 'query') | first).content }} "
    "d {{ (messages | selectattr('role', 'eq', 'document') | first).content }} e y"
    "{{ ' w' if add_generation_prompt }}"
)


def write_causal(directory, *, answers):
    """Write a Qwen3 of letters that scores: by the answers `y` and `n`, or with a head behind each text."""
    from prejit.compiler.models import config_file, model_registry
    from prejit.compiler.models.families.rotary_encoders import derived_of
    from prejit.compiler.models.parameters import parameters_of

    write_encoder(directory)  # for its tokenizer
    (directory / "model.safetensors").unlink()
    config = {
        **{"model_type": "qwen3", "hidden_act": "silu", "vocab_size": 30, "hidden_size": 12},
        **{"intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 64},
        **{"tie_word_embeddings": True, "pad_token_id": 3, "eos_token_id": 3},
        "architectures": [f"Qwen3For{'CausalLM' if answers else 'SequenceClassification'}"],
        "id2label": {"0": "relevant"},
    }
    (directory / "config.json").write_text(json.dumps(config))
    said = {"tokenizer_class": "TokenizersBackend", "model_max_length": 16, "pad_token": "[SEP]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    if answers:
        module = model_registry.make_decoder(config_file.load_config(directory), out_in=True)
    else:
        module = model_registry.make_encoder(config_file.load_encoder(directory), out_in=True)
    tensors = {}
    for name, each in parameters_of(module).items():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = random.standard_normal(each.shape, dtype=np.float32) * np.float32(0.4)
        tensors[name] = values + np.float32(len(each.shape) == 1)
    derived = {} if answers else derived_of(module)
    published = {name: value for name, value in tensors.items() if name not in derived}
    save_file(published, directory / "model.safetensors", metadata={"format": "pt"})
    if answers:
        (directory / "chat_template.jinja").write_text(TEMPLATE)


def write_answers_modules(directory):
    """Write the modules with which sentence-transformers 6 saves a model that `write_causal` wrote."""
    form = {"method": "forward", "method_output_name": "logits"}
    (directory / "1_LogitScore").mkdir()
    for name, content in {
        "modules.json": [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {
                **{"idx": 1, "name": "1", "path": "1_LogitScore"},
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            },
        ],
        "sentence_bert_config.json": {
            "transformer_task": "text-generation",
            "modality_config": {"text": form, "message": {**form, "format": "flat"}},
            "module_output_name": "causal_logits",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
        "1_LogitScore/config.json": {"true_token_id": 28, "false_token_id": 17},
        "config_sentence_transformers.json": {
            "activation_fn": "torch.nn.modules.linear.Identity",
            **{"prompts": {"web": "f w"}, "default_prompt_name": "web"},
            "model_type": "CrossEncoder",
        },
    }.items():
        (directory / name).write_text(json.dumps(content))


def write_heads(directory):
    """Write a BERT of letters with the heads of BGE-M3: files of torch.save, which tests/torch_heads has."""
    made = write_encoder(directory, pooling=("cls_token",), normalize=True)
    made.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    made.save(str(directory / "tokenizer.json"))
    special = {"cls_token": "[CLS]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    said = {"tokenizer_class": "BertTokenizer", "eos_token": "[SEP]", **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(said))
    for file in (Path(__file__).parent / "torch_heads").glob("*.pt"):
        shutil.copy(file, directory)
