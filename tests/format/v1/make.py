"""How the golden bundles of format 1 were made, with jax 0.10.2.

    call/       two targets of two versions of jax, with real executables; programs of the user's own with
                weights, trees, static arguments, padding and open sizes; a licence and what a build attaches
    decoder/    a GPT-2 with every kind of program, a tokenizer and chat templates
    mesh/       the same, split over two devices
    stored/     a Llama with int8 weights, a bfloat16 cache, and what they cost
    reader/     a T5 that reads sources of two sizes, with its start token and a tokenizer
    encoder/    a BERT of two layers, with a dense layer behind it and a tokenizer
    ...         and those of by_hand.py

Executables but call's are of a jaxlib that never was, so that every machine falls back to the portable
programs. `expected.json` has the digests and the answers. A change of the format makes them again until the
first release; then they are kept for ever. From the root of the repository, with names of bundles:

    .venv/bin/python -m tests.format.v1.make call decoder
"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tests.decoders import gpt2_config
from tests.encoders import bert_config
from tests.format.v1 import by_hand
from tests.layouts import index_file
from tests.parity import cases, encoder_cases, t5_cases
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from prejit.compiler.pipeline.pack.bundle_files import PackedTarget, layer
from prejit.runtime import load
from prejit.runtime.base.files import digest_of
from prejit.runtime.format.layout import Layout
from prejit.runtime.format.names import EXECUTABLES_MEDIA_TYPE, KERNELS_MEDIA_TYPE, TITLE
from prejit.runtime.format.opening import match, read_contents
from prejit.runtime.format.root import read_root
from prejit.runtime.machine.fingerprint import Fingerprint

HERE = Path(__file__).parent
FUNCTIONS = """
import jax.numpy as jnp

def score(params, x):
    return jnp.tanh(x @ params["kernel"]) + params["bias"]

def nest(tree):
    half, (count, flag) = tree["half"], tree["pair"]
    return {"sums": (jnp.where(flag, half + half, half), count + 1), "scalar": jnp.float32(2.5)}

def repeat(x, times):
    return x * times
"""
LETTERS = "abcdefghijklmnopqrstuvwxyzĠ.,:()_'012"
GPT2 = gpt2_config(
    **{"vocab_size": 1 + len(LETTERS), "n_positions": 32, "n_embd": 8, "n_head": 2, "n_layer": 1},
    **{"bos_token_id": 0, "eos_token_id": 0},
)
LLAMA = {
    **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 24},
    **{"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "hidden_act": "silu"},
    **{"max_position_embeddings": 32, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    **{"tie_word_embeddings": False, "eos_token_id": 0},
}
WORDS = (
    *("[PAD]", "[CLS]", "[SEP]", "[UNK]"),
    *("a", "golden", "bundle", "two", "words", "of", "the", "format", "sentence"),
)
BERT = bert_config(
    **{"vocab_size": len(WORDS), "hidden_size": 8, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "intermediate_size": 12, "max_position_embeddings": 16},
)
READ_WORDS = (
    *("<pad>", "</s>", "<unk>", "a", "golden", "bundle", "reads", "two", "sources", "of"),
    *("the", "format", "and", "writes", "what", "it", "has", "read"),
)
T5 = {
    **{"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    **{"vocab_size": len(READ_WORDS), "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 1},
    **{"num_heads": 2, "relative_attention_num_buckets": 8},
    **{"relative_attention_max_distance": 20, "layer_norm_epsilon": 1e-6},
    **{"feed_forward_proj": "relu", "tie_word_embeddings": False},
    **{"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
}
TEMPLATE = """\
{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}
{%- if add_generation_prompt %}assistant:{% endif %}"""
HOST = """
[[target]]
name = "cpu-x86-64-v2"
"""
MANIFESTS = {
    "call": """
license = "LICENSE"
[[program]]
name = "score"
function = "golden_functions:score"
params = "score.safetensors"
args = { x = "float32[{b}, 16]" }
buckets = { b = [2] }
[[program]]
name = "nest"
function = "golden_functions:nest"
args = { tree = { half = "bfloat16[3]", pair = ["int32[2, 2]", "bool[]"] } }
[[program]]
name = "repeat"
function = "golden_functions:repeat"
args = { x = "float32[{rows}, {columns}]" }
buckets = { rows = [4], columns = [2] }
static = { times = [2, 3] }
pad = ["rows"]
open_sizes = ["columns"]
[[target]]
name = "cpu-x86-64-v3"
jax = "0.12.0.1"
""",
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
    "reader": """
[model]
source = "t5"
[generate]
batch = [1, 2]
prompt = [4]
context = [8, 16]
source = [4, 8]
draft_tokens = 2
""",
}
SAMPLED = {
    **{"temperature": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "seed": 2**40 + 7},
    **{"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
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
SOURCES = ["a golden bundle", "the format of two sources", "what it has read and writes"]
"""With the end behind each: four places, which fill the smaller program; six, and seven."""
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)


def write_functions(at):
    random = np.random.default_rng(4)
    (at / "golden_functions.py").write_text(FUNCTIONS)
    (at / "LICENSE").write_text("CC0-1.0\n")
    kernel = random.standard_normal((16, 4), np.float32)
    save_file({"kernel": kernel, "bias": np.arange(4, dtype=np.float32)}, at / "score.safetensors")


def write_models(at):
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
    t5_cases.Case("t5", T5, 5, old=False).write(at / "t5")
    for model, known, unknown, post_processor in (
        ("bert", WORDS, "[UNK]", processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))),
        ("t5", READ_WORDS, "<unk>", processors.TemplateProcessing("$A </s>", None, [("</s>", 1)])),
    ):
        words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unknown))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.post_processor = post_processor
        words.save(str(at / model / "tokenizer.json"))


def built(name):
    """Build a bundle from its manifest, and return it loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        at = Path(scratch)
        write_functions(at)
        write_models(at)
        manifest = at / f"{name}.toml"
        manifest.write_text(f'[bundle]\nname = "{name}"\n{MANIFESTS[name]}{HOST}')
        command = [sys.executable, "-m", "prejit.runtime", "build", str(manifest), "-o", str(at)]
        environment = {**os.environ, "PREJIT_CACHE": str(at / "cache")}
        subprocess.run(command, env=environment, check=True)
        if name == "call":
            shutil.copytree(at / name, HERE / name)
        else:
            by_hand.written(name, without_executables(at / name))
    return load(HERE / name)


def without_executables(path):
    """The target of a bundle, with executables of a few words, for a jaxlib that never was.

    They call no kernels, so the bundle has none either.
    """
    frame, segment = by_hand.frame_of(by_hand.NO_EXECUTABLE)
    with Layout(path) as layout:
        [target] = match(read_root(layout), Fingerprint.current())
        contents = read_contents(layout, target)
        layers = [
            layer(
                kept.mediaType,
                frame if kept.mediaType == EXECUTABLES_MEDIA_TYPE else layout.read_blob(kept),
                (kept.annotations or {})[TITLE],
            )
            for kept in contents.manifest.layers
            if kept.mediaType != KERNELS_MEDIA_TYPE
        ]
    config = contents.config
    needs = dataclasses.replace(config.requirement, jaxlib=by_hand.NO_JAXLIB, glibc=None)
    programs = (dataclasses.replace(p, executable=segment, kernels=None) for p in config.programs)
    changed = dataclasses.replace(
        config, requirement=needs, programs=tuple(programs), kernels=None, forms=None
    )
    return PackedTarget(changed, tuple(layers))


def looked_up(decoder):
    """A prompt that repeats itself and that the model goes on with: the first drafts are right."""
    assert decoder.config.decoder is not None
    for pair in itertools.product(range(1, decoder.config.decoder.vocab_size), repeat=2):
        prompt = [*pair] * 6
        if decoder.generate(prompt, max_new_tokens=2).token_ids == pair:
            found = decoder.generate(prompt, max_new_tokens=20, prompt_lookup=True)
            assert found.stats.accepted_tokens
            return {"lookup_prompt": prompt, "lookup": [*found.token_ids]}
    raise AssertionError("expected a prompt that the model goes on with, found none")


def written(given, results, name):
    """Return what was given, and what was written after it."""
    return {
        name: given,
        "token_ids": [one.token_ids for one in results],
        "texts": [one.text for one in results],
        "logprobs": [[one.logprob for one in result.logprobs or ()] for result in results],
    }


def call():
    return {"score": built("call").call("score", x=X).tolist()}


def decoder(name="decoder"):
    loaded = built(name)
    prompts = ["a golden", "two"]
    greedy = loaded.generate_batch(prompts, max_new_tokens=20, logprobs=2)
    if name == "mesh":
        return {"prompts": prompts, "token_ids": [one.token_ids for one in greedy]}
    options = {**SAMPLED, "logit_bias": BIAS, "max_new_tokens": 20}
    return {
        **written(prompts, greedy, "prompts"),
        **{"options": SAMPLED, "bias": BIAS, "messages": MESSAGES},
        "sampled": [loaded.generate(prompt, **options).token_ids for prompt in prompts],
        **looked_up(loaded),
        "chat": loaded.apply_chat_template(MESSAGES),
        "bare": loaded.apply_chat_template(MESSAGES, template="bare"),
    }


def stored():
    loaded, tokens = built("stored"), [3, 1, 4, 1, 5]
    found = loaded.generate(tokens, max_new_tokens=20).token_ids
    return {"prompt": tokens, "token_ids": found, **looked_up(loaded)}


def encoder():
    return {"sentences": SENTENCES, "embeddings": built("encoder").encode(SENTENCES).tolist()}


def reader():
    loaded = built("reader")
    greedy = loaded.generate_batch(
        sources=SOURCES, max_new_tokens=12, logprobs=2, stop_token_ids=[]
    )
    prompt = [0, 4, 3]
    options = {**SAMPLED, "source": SOURCES[1], "max_new_tokens": 12}
    prompted = loaded.generate(prompt, source=SOURCES[2], max_new_tokens=12, stop_token_ids=[])
    return {
        **written(SOURCES, greedy, "sources"),
        **{"prompt": prompt, "prompted": prompted.token_ids, "options": SAMPLED},
        "sampled": loaded.generate(**options).token_ids,
    }


MAKERS = {
    "call": call,
    "decoder": decoder,
    "mesh": partial(decoder, "mesh"),
    "stored": stored,
    "reader": reader,
    "encoder": encoder,
    **by_hand.MAKERS,
}


def main():
    warnings.simplefilter("ignore")  # of fallback
    file = HERE / "expected.json"
    expected = json.loads(file.read_bytes()) if file.exists() else {"digests": {}}
    for name in sys.argv[1:]:
        shutil.rmtree(HERE / name, ignore_errors=True)
        expected[name] = MAKERS[name]()
        expected["digests"][name] = digest_of(index_file(HERE / name).read_bytes())
        file.write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
