"""How the golden bundles of format 3 were made, once, with jax 0.10.2. For the record: never run it again.

    decoder/    a GPT-2 with every kind of program, two buckets of each size, a tokenizer and chat templates
    stored/     a Llama with int8 weights, a bfloat16 cache, and what they cost
    mesh/       the GPT-2 split over two devices
    encoder/    a BERT of two layers, with a dense layer behind it and a tokenizer

All executables are of a jaxlib that never was, so that every machine falls back to the portable programs (and
the files stay small). `expected.json` holds the digests and what the programs answer. From the root of the
repository:

    .venv/bin/python -m tests.format.v3.make
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.format.v2.make import without_executables
from tests.parity import cases, encoder_cases
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from prejit.runtime import load
from prejit.runtime.bundle import Bundle
from prejit.runtime.format.writing import write_layout

HERE = Path(__file__).parent
LETTERS = "abcdefghijklmnopqrstuvwxyzĠ.,:()_'012"
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 1 + len(LETTERS),
    "n_positions": 32,
    "n_embd": 8,
    "n_head": 2,
    "n_layer": 1,
    "n_inner": None,
    "activation_function": "gelu_new",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}
WORDS = (
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "[UNK]",
    *["a", "golden", "bundle", "two", "words", "of", "the", "format", "sentence"],
)
BERT = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "vocab_size": len(WORDS),
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "hidden_act": "gelu",
    "max_position_embeddings": 16,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
MANIFESTS = {
    "decoder": """
[model]
source = "gpt2"
[generate]
batch = [1, 2]
prompt = [4, 8]
context = [16, 32]
draft_tokens = 2
""",
    "stored": """
[model]
source = "llama"
dtype = "int8"
[generate]
batch = [1]
prompt = [8]
context = [16, 32]
draft_tokens = 2
cache_dtype = "bfloat16"
""",
    "mesh": """
[model]
source = "gpt2"
[generate]
batch = [2]
prompt = [8]
context = [16, 32]
[mesh]
tensor = 2
""",
    "encoder": """
[model]
source = "bert"
[encode]
shapes = [[1, 8], [2, 16]]
""",
}
SAMPLED = {
    "temperature": 0.9,
    "top_k": 30,
    "top_p": 0.95,
    "min_p": 0.01,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "seed": 2**40 + 7,
}
BIAS = {5: 2.0, 13: -1.5}
MESSAGES = [{"role": "user", "content": "a golden"}, {"role": "assistant", "content": "two"}]
SENTENCES = [
    "a golden bundle",
    "two words",
    "the format of a sentence of two words",
    "unknown",
    "a",
]


def write_models(at: Path) -> None:
    cases.Case("gpt2", GPT2, seed=3).write(at / "gpt2")
    letters = {letter: i + 1 for i, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.BPE(vocab={**letters, "<|end|>": 0}, merges=[]))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(at / "gpt2" / "tokenizer.json"))
    said = {
        "bos_token": "<|end|>",
        "eos_token": "<|end|>",
        "chat_template": [
            {"name": "default", "template": TEMPLATE},
            {"name": "bare", "template": "{{ messages[0].content }}"},
        ],
    }
    (at / "gpt2" / "tokenizer_config.json").write_text(json.dumps(said))
    (at / "gpt2" / "generation_config.json").write_text('{"eos_token_id": 0}')
    cases.Case("llama", LLAMA, seed=4).write(at / "llama")
    dense = ((8, 6, True, "activation.Tanh"),)
    encoder_cases.Case(
        "bert", BERT, 5, pooling=("mean_tokens",), dense=dense, normalize=True
    ).write(at / "bert")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    words.save(str(at / "bert" / "tokenizer.json"))


def looked_up(decoder: Bundle) -> dict[str, list[int]]:
    """A prompt that repeats itself and that the model goes on with: the first drafts are right."""
    assert decoder.config.decoder is not None
    for pair in itertools.product(range(1, decoder.config.decoder.vocab_size), repeat=2):
        prompt = [*pair] * 6
        if decoder.generate(prompt, max_new_tokens=2).token_ids == pair:
            found = decoder.generate(prompt, max_new_tokens=20, prompt_lookup=True)
            assert found.stats.accepted_tokens
            return {"lookup_prompt": prompt, "lookup": [*found.token_ids]}
    raise AssertionError("expected a prompt that the model goes on with, found none")


def answers(loaded: dict[str, Bundle]) -> dict[str, Any]:
    """What the bundles give, with options as the tests have them."""
    decoder, stored = loaded["decoder"], loaded["stored"]
    prompts, tokens = ["a golden", "two"], [3, 1, 4, 1, 5]
    greedy = decoder.generate_batch(prompts, max_new_tokens=20, logprobs=2)
    options: Any = {**SAMPLED, "logit_bias": BIAS, "max_new_tokens": 20}
    return {
        "digests": {name: bundle.digest for name, bundle in loaded.items()},
        "decoder": {
            "prompts": prompts,
            "token_ids": [one.token_ids for one in greedy],
            "texts": [one.text for one in greedy],
            "logprobs": [[one.logprob for one in result.logprobs or ()] for result in greedy],
            "options": SAMPLED,
            "bias": BIAS,
            "sampled": [decoder.generate(prompt, **options).token_ids for prompt in prompts],
            **looked_up(decoder),
            "messages": MESSAGES,
            "chat": decoder.apply_chat_template(MESSAGES),
            "bare": decoder.apply_chat_template(MESSAGES, template="bare"),
        },
        "stored": {
            "prompt": tokens,
            "token_ids": stored.generate(tokens, max_new_tokens=20).token_ids,
            **looked_up(stored),
        },
        "encoder": {
            "sentences": SENTENCES,
            "embeddings": loaded["encoder"].encode(SENTENCES).tolist(),
        },
    }


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        write_models(at)
        for name, manifest in MANIFESTS.items():
            path = at / f"{name}.toml"
            target = '[[target]]\nname = "cpu-x86-64-v2"\n'
            path.write_text(f'[bundle]\nname = "{name}"\n{manifest}{target}')
            command = [sys.executable, "-m", "prejit.runtime", "build", str(path), "-o", str(at)]
            environment = {**os.environ, "PREJIT_CACHE": str(at / "cache")}
            subprocess.run(command, env=environment, check=True)
            write_layout(HERE / name, *without_executables(at / name))
    warnings.simplefilter("ignore")  # of fallback
    loaded = {name: load(HERE / name) for name in MANIFESTS}
    (HERE / "expected.json").write_text(json.dumps(answers(loaded), indent=1) + "\n")


if __name__ == "__main__":
    main()
